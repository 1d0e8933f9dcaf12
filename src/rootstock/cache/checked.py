"""The cache for engines of others: a mistake of the engine raises an error with its reason, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rootstock.cache.arguments import (
    is_count,
    require_agreement,
    require_count,
    require_namespace,
    require_tokens,
)
from rootstock.cache.explain import Explanation
from rootstock.cache.keys import Namespace
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Admitted, Deferred, Lease, Match, ReleaseReason
from rootstock.cache.plan import Plan
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.retention.hint_types import CacheHints, HintOutcome
from rootstock.cache.retention.pins import Pinned, PinRefused
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import NO_SLOT, Tokens
from rootstock.errors import CacheMisuse, shown


class CheckedKVCache(KVCache):
    """A cache that checks the arguments of each call. `rootstock.cache` exports it as `KVCache`.

    Rootstock's own engine uses the cache below it, whose own tests and the engine's run on this one. Each method
    raises CacheMisuse for a wrong argument.
    """

    def match(
        self, tokens: Tokens, namespace: Namespace, at_most: int | None = None, *, public_tokens: int = 0
    ) -> Match:
        _require_prompt("match", tokens, namespace, public_tokens)
        if at_most is not None:
            require_count("match", "at_most", at_most)
        return super().match(tokens, namespace, at_most, public_tokens=public_tokens)

    def explain(self, tokens: Tokens, namespace: Namespace, *, public_tokens: int = 0) -> Explanation:
        _require_prompt("explain", tokens, namespace, public_tokens)
        return super().explain(tokens, namespace, public_tokens=public_tokens)

    def admit(
        self,
        match: Match,
        watermark_blocks: int = 0,
        boundaries: Sequence[Boundary] = (),
        tier_hit: TierHit | None = None,
        *,
        counted: bool = True,
        is_idle: bool = False,
        comes_back: bool = False,
        hints: CacheHints | None = None,
    ) -> Admitted | Deferred:
        _require_match(match)
        require_count("admit", "watermark_blocks", watermark_blocks)
        _require_boundaries(boundaries, len(match.tokens))
        if tier_hit is not None and not isinstance(tier_hit, TierHit):
            raise CacheMisuse("admit", f"{shown(tier_hit)} is no TierHit, which KVCache.tier_hit returns")
        if hints is not None:
            _require_hints("admit", hints)
        return super().admit(
            match,
            watermark_blocks,
            boundaries,
            tier_hit,
            counted=counted,
            is_idle=is_idle,
            comes_back=comes_back,
            hints=hints,
        )

    def loaded(self, lease: Lease, position: int) -> Plan:
        self._require_lease("loaded", lease)
        if not is_count(position, lease.num_computed_tokens) or position > lease.prompt_tokens:
            raise CacheMisuse(
                "loaded",
                f"the position is {shown(position)}, but must be from {lease.num_computed_tokens} to "
                f"{lease.prompt_tokens}",
            )
        return super().loaded(lease, position)

    def detach(self, lease: Lease) -> None:
        self._require_lease("detach", lease)
        if lease.node is None:
            raise CacheMisuse("detach", f"{lease!r} is out of the tree already")
        super().detach(lease)

    def request_checkpoint(self, lease: Lease, position: int) -> None:
        self._require_lease("request_checkpoint", lease)
        require_count("request_checkpoint", "position", position)
        super().request_checkpoint(lease, position)

    def extend(
        self, lease: Lease, new_tokens: int, watermark_blocks: int = 0, *, is_least: bool = False
    ) -> Deferred | None:
        self._require_lease("extend", lease)
        require_count("extend", "new_tokens", new_tokens)
        require_count("extend", "watermark_blocks", watermark_blocks)
        return super().extend(lease, new_tokens, watermark_blocks, is_least=is_least)

    def fork_state(self, lease: Lease) -> Plan | None:
        self._require_lease("fork_state", lease)
        return super().fork_state(lease)

    def keep_fork(self, lease: Lease) -> None:
        self._require_lease("keep_fork", lease)
        if self.pools.states is not None and lease.draft_slot == NO_SLOT:
            raise CacheMisuse(
                "keep_fork", "the lease has no second state: call fork_state before the forward"
            )
        super().keep_fork(lease)

    def drop_fork(self, lease: Lease) -> bool:
        self._require_lease("drop_fork", lease)
        return super().drop_fork(lease)

    def commit(self, lease: Lease, tokens: Tokens) -> Plan:
        self._require_lease("commit", lease)
        require_tokens("commit", tokens)
        self._require_room(lease, len(tokens))
        if lease.num_computed_tokens < lease.num_tokens:
            known = lease.tokens[lease.num_computed_tokens :]
            require_agreement(known, tokens, lease.num_computed_tokens)
        return super().commit(lease, tokens)

    def release(self, lease: Lease, reason: ReleaseReason) -> None:
        self._require_lease("release", lease)
        if not isinstance(reason, ReleaseReason):
            raise CacheMisuse("release", f"the reason is {shown(reason)}, but must be a ReleaseReason")
        super().release(lease, reason)

    def discard(self, lease: Lease) -> None:
        self._require_lease("discard", lease)
        super().discard(lease)

    def apply_hints(
        self, tokens: Tokens, namespace: Namespace, hints: CacheHints, *, public_tokens: int = 0
    ) -> tuple[HintOutcome, ...]:
        _require_prompt("apply_hints", tokens, namespace, public_tokens)
        _require_hints("apply_hints", hints)
        return super().apply_hints(tokens, namespace, hints, public_tokens=public_tokens)

    def pin(
        self, tokens: Tokens, namespace: Namespace, tenant: str = "", *, public_tokens: int = 0
    ) -> Pinned | PinRefused:
        _require_prompt("pin", tokens, namespace, public_tokens)
        return super().pin(tokens, namespace, tenant, public_tokens=public_tokens)

    def forget(self, tokens: Tokens, namespace: Namespace, first: int, *, public_tokens: int = 0) -> None:
        require_tokens("forget", tokens, 1)
        _require_prompt("forget", tokens, namespace, public_tokens)
        require_count("forget", "first", first)
        super().forget(tokens, namespace, first, public_tokens=public_tokens)

    def clear(self, namespace: Namespace | None = None) -> int:
        if namespace is not None:
            require_namespace("clear", namespace)
        return super().clear(namespace)

    def _require_lease(self, call: str, lease: Lease) -> None:
        """Raises CacheMisuse unless this is a running lease of this cache."""
        if isinstance(lease, Lease) and self._leases.get(lease.id) is lease:
            return
        if not isinstance(lease, Lease):
            raise CacheMisuse(call, f"{shown(lease)} is no Lease")
        if lease.ended:
            raise CacheMisuse(call, f"{lease!r} has ended: a lease is ended once, and not used afterwards")
        raise CacheMisuse(call, f"{lease!r} is a lease of another cache")

    def _require_room(self, lease: Lease, new_tokens: int) -> None:
        """Raises CacheMisuse if so many tokens were computed without blocks for them."""
        needed = -(-(lease.num_computed_tokens + new_tokens) // self.block_size)
        reserved = lease.table_blocks
        for table in lease.windows:
            reserved = min(reserved, table.length)
        if needed > reserved:
            room = max(0, reserved * self.block_size - lease.num_computed_tokens)
            raise CacheMisuse(
                "commit",
                f"{new_tokens} tokens, but there are blocks for {room} more: call extend before the forward",
            )


def _require_hints(call: str, hints: CacheHints) -> None:
    if not isinstance(hints, CacheHints):
        raise CacheMisuse(call, f"{shown(hints)} is no CacheHints")


def _require_prompt(call: str, tokens: Tokens, namespace: Namespace, public_tokens: int) -> None:
    require_tokens(call, tokens)
    require_namespace(call, namespace)
    require_count(call, "public_tokens", public_tokens)


def _require_match(match: Match) -> None:
    if not isinstance(match, Match):
        raise CacheMisuse("admit", f"{shown(match)} is no Match, which KVCache.match returns")
    if not len(match.tokens):
        raise CacheMisuse("admit", "the prompt has no tokens, but the logits of its last one are needed")


def _require_boundaries(boundaries: Sequence[Boundary], prompt_tokens: int) -> None:
    if not isinstance(boundaries, Sequence):
        raise CacheMisuse("admit", f"the boundaries are {shown(boundaries)}, but must be a list of Boundary")
    for boundary in boundaries:
        if not isinstance(boundary, Boundary) or not is_count(boundary.position, 1):
            raise CacheMisuse("admit", f"{shown(boundary)} is no Boundary with a position of 1 or more")
        if not isinstance(boundary.kind, CheckpointKind):
            raise CacheMisuse(
                "admit", f"a boundary's kind is {shown(boundary.kind)}, but must be a CheckpointKind"
            )
        if boundary.position > prompt_tokens:
            raise CacheMisuse(
                "admit",
                f"a boundary is at position {boundary.position}, but the prompt has {prompt_tokens} tokens",
            )
