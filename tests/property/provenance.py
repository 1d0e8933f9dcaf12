"""A cache that remembers who has computed which positions, and refuses hits on those of another tenant.

It knows nothing of the tree: a position is named by the namespace that it belongs to and by all tokens up to it. It
belongs to the public namespace within a public head, and to the tenant's own behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.lease import Admitted, Deferred, Lease
from rootstock.cache.plan import Plan
from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.types import Tokens
from rootstock.engine.engine import Engine
from rootstock.engine.sequence import WaitingForPrefix

Position = tuple[Namespace, bytes]
SALTS = ("", "tenant", "other", "client:own")


def heads_of(shared: Tokens, rng: np.random.Generator) -> PublicHeads:
    """Draws beginnings of `shared`, one within another, and a head that parts from them."""
    lengths = rng.integers(1, 50, int(rng.integers(1, 4)))
    other = np.concatenate((shared[: int(lengths[0])], rng.integers(0, 4, 5))).astype(np.int32)
    return PublicHeads([*(shared[: int(length)] for length in lengths), other])


class Provenance:
    """The positions that were computed, in all lives of a server."""

    def __init__(self, heads: PublicHeads) -> None:
        self.heads = heads
        self.public_hits = 0  # admissions that resumed within or at the end of a head
        self.private_hits = 0  # and behind it
        self._computed: set[Position] = set()

    def scope(self, tokens: Tokens, salt: str, namespace: Namespace) -> Scope:
        """Returns the scope that a prompt should have."""
        return Scope(namespace, 0 if salt.startswith("client:") else self.heads.longest(tokens))

    def computed(self, scope: Scope, tokens: Tokens, first: int, end: int) -> None:
        self._computed.update(_positions(scope, tokens, first, end))

    def judge(self, scope: Scope, tokens: Tokens, hit: int) -> None:
        # A tier may also have what the tenant computed for a prompt that ended within the head.
        own = _positions(Scope(scope.namespace), tokens, 0, hit)
        # And a block of the tenant's own, in which a longer head ends, has positions of that head: they are public.
        public = _positions(Scope(scope.namespace, hit), tokens, 0, hit)
        named = enumerate(zip(_positions(scope, tokens, 0, hit), own, public, strict=True))
        foreign = [at for at, either in named if self._computed.isdisjoint(either)]
        assert not foreign, f"a hit of {hit} tokens has positions of another tenant, from {foreign[0]} on"
        self.public_hits += 0 < hit <= scope.public_tokens
        self.private_hits += hit > scope.public_tokens > 0

    def judge_waiting(self, engine: Engine) -> None:
        """Asserts that no request waits for a part of another tenant's tail: its time would tell of it."""
        for sequence in engine.scheduler.sequences():
            if (
                isinstance(sequence.state, WaitingForPrefix)
                and sequence.state.producer.scope != sequence.scope
            ):
                assert sequence.state.until <= sequence.scope.public_tokens

    def cache(self) -> Callable[..., KVCache]:
        """Returns a constructor of caches that report to this one."""
        provenance = self

        class Watched(KVCache):
            def admit(self, *args: Any, **kwargs: Any) -> Admitted | Deferred:
                answer = super().admit(*args, **kwargs)
                if isinstance(answer, Admitted):
                    lease = answer.lease
                    provenance.judge(lease.scope, lease.tokens, lease.hit_tokens)
                return answer

            def loaded(self, lease: Lease, position: int) -> Plan:
                provenance.judge(lease.scope, lease.tokens, position)
                first = lease.num_computed_tokens
                plan = super().loaded(lease, position)
                provenance.computed(lease.scope, lease.tokens, first, position)
                return plan

            def commit(self, lease: Lease, tokens: Tokens) -> Plan:
                first = lease.num_computed_tokens
                plan = super().commit(lease, tokens)
                provenance.computed(lease.scope, lease.tokens, first, lease.num_computed_tokens)
                return plan

            def following(self, lease: Lease, last: int, most: int) -> Tokens:
                draft = super().following(lease, last, most)
                after = np.concatenate((lease.tokens, [last], draft)).astype(np.int32)
                first = max(lease.num_tokens + 1, lease.scope.public_tokens)
                for position in _positions(lease.scope, after, first, len(after)):
                    assert position in provenance._computed, "a draft of another tenant's tokens"
                return draft

        return Watched


def _positions(scope: Scope, tokens: Tokens, first: int, end: int) -> Sequence[Position]:
    raw = np.ascontiguousarray(tokens, np.int32).tobytes()
    return [(scope.of(at + 1), raw[: 4 * (at + 1)]) for at in range(first, end)]
