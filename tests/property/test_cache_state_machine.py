"""The tree and the pools against a naive model: a dictionary of bytes and a set of prefixes.

The model has no tree: it keeps the content of every block as a list of (position → prefix), and of every state as a
prefix, and executes plans. The rows of a lease must hold exactly its tokens, as far back as each family
needs them. Every checkpoint must hold exactly its prefix.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    RecurrentState,
    SlidingWindow,
    row_bytes,
    token_families,
)
from rootstock.cache.lease import Admitted, Deferred, Lease, ReleaseReason
from rootstock.cache.plan import Plan
from rootstock.cache.radix_node import Boundary, Checkpoint, CheckpointKind, Node, block_table, walk
from rootstock.cache.retention.hint_types import ActKind, CacheHints, HintOutcome, PrefixAct, RetentionWish
from rootstock.cache.retention.pins import PINNED_SHARE, PinId, Pinned

ALPHABET = 3  # few tokens, so that prefixes meet often
Prefix = tuple[int, ...]

FULL, STATE = FullAttention(1, 2), RecurrentState(1, 5)
MODELS: list[tuple[Family, ...]] = [
    (FULL,),
    (FULL, STATE),
    (FULL, SlidingWindow(1, 1, 4)),
    (FULL, ChunkedAttention(1, 3, 6)),
    (SlidingWindow(1, 2, 7),),
    (STATE,),
    (FULL, SlidingWindow(1, 1, 9), SlidingWindow(1, 2, 2), STATE),
]


ACTS = st.lists(
    st.builds(
        PrefixAct,
        field=st.just("act"),
        kind=st.sampled_from(ActKind),
        start=st.none() | st.integers(0, 30),
        end=st.none() | st.integers(0, 50),
        session=st.sampled_from([None, None, "x", "y"]),
    ),
    max_size=3,
).map(tuple)
SOME_HINTS = st.builds(
    CacheHints,
    tenant=st.sampled_from(["", "a", "b"]),
    session=st.sampled_from([None, "x", "y"]),
    ends_session=st.booleans(),
    retentions=st.lists(
        st.builds(
            RetentionWish,
            field=st.just("field"),
            end=st.none() | st.integers(0, 50),
            ttl_s=st.none() | st.sampled_from([-1.0, 5.0, 50.0, 1e9]),
            priority=st.sampled_from([-3, 0, 0, 5, 200]),
        ),
        max_size=3,
    ).map(tuple),
    acts=ACTS,
    may_pin=st.booleans(),
)
HINTS = st.none() | SOME_HINTS


class TreeAndPool(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(
        model=st.sampled_from(MODELS),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        blocks=st.integers(3, 40),
        retained_share=st.sampled_from([0.1, 0.5, 1.0]),
    )
    def start(self, model: tuple[Family, ...], block_size: int, blocks: int, retained_share: float) -> None:
        self.time = 0.0
        self.size = block_size
        self.families = token_families(model)
        budget = blocks * sum(row_bytes(family, block_size) for family in model)
        self.cache = KVCache(
            model,
            budget,
            block_size,
            clock=lambda: self.time,
            retained_share=retained_share,
            announces=True,
        )
        # Content of each position of each block: the whole prefix that ends there, or None for garbage.
        self.memory: list[list[list[Prefix | None]]] = [
            [[None] * block_size for _ in range(rows)]
            for rows, family in zip(self.cache.rows, model, strict=True)
            if not isinstance(family, RecurrentState)
        ]
        slots = 0 if self.cache.pools.states is None else self.cache.pools.states.pool.total_blocks
        self.states: list[Prefix | None] = [None] * slots
        self.written: dict[Namespace, set[Prefix]] = {}
        self.asked = self.hit = 0
        self.pinned: dict[PinId, tuple[list[int], Namespace]] = {}

    def capacity(self) -> int:
        return min(self.cache.capacity_tokens, 400)

    def tick(self) -> None:
        self.time += 1.0

    def execute(self, plan: Plan) -> None:
        for copy in plan.copies:
            rows = self.memory[copy.family]
            rows[copy.target][: copy.tokens] = rows[copy.source][: copy.tokens]
        for state in plan.states:
            self.states[state.target] = self.states[state.source]

    @rule(
        target=leases,
        prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40),
        tenant=st.sampled_from(["", "", "other"]),
        watermark_blocks=st.integers(0, 2),
        boundaries=st.lists(st.integers(1, 40), max_size=3),
        hints=HINTS,
    )
    def admit(  # type: ignore[no-untyped-def]
        self,
        prompt: list[int],
        tenant: str,
        watermark_blocks: int,
        boundaries: list[int],
        hints: CacheHints | None,
    ):
        return self.ask(prompt, tenant, watermark_blocks, boundaries, hints)

    @rule(
        target=leases,
        lease=leases,
        more=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=9),
        back=st.integers(0, 5),
        hints=HINTS,
    )
    def go_on_from(  # type: ignore[no-untyped-def]
        self, lease: Lease, more: list[int], back: int, hints: CacheHints | None
    ):
        """Asks for a next turn, or a sibling: a prompt that begins with another request's tokens, finished or not."""
        upto = max(0, lease.num_computed_tokens - back)
        return self.ask([*lease.tokens[:upto].tolist(), *more], lease.namespace.salt, 0, [upto], hints)

    def ask(  # type: ignore[no-untyped-def]
        self,
        prompt: list[int],
        tenant: str,
        watermark_blocks: int,
        boundaries: list[int],
        hints: CacheHints | None,
    ):
        self.tick()
        namespace = Namespace("weights", "float32", salt=tenant)
        tokens = np.array(prompt[: self.capacity()], np.int32)
        before = self.snapshot()
        match = self.cache.match(tokens, namespace)
        assert self.snapshot() == before, "match changed something"
        assert match.length <= len(tokens) - 1
        # Never more than was ever computed in this namespace.
        known = self.written.get(namespace, set())
        assert all(tuple(tokens[: n + 1].tolist()) in known for n in range(match.length))
        at = [Boundary(p, CheckpointKind.USER) for p in boundaries if 0 < p <= len(tokens)]
        answer = self.cache.admit(match, watermark_blocks, at, hints=hints)
        if isinstance(answer, Deferred):
            assert self.snapshot() == before, "a rejected admission changed something"
            return multiple()
        assert isinstance(answer, Admitted)
        self.execute(answer.plan)
        self.asked += len(tokens)
        self.hit += answer.lease.hit_tokens
        self.assert_readable(answer.lease)
        return answer.lease

    @rule(lease=leases, tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=9))
    def compute(self, lease: Lease, tokens: list[int]) -> None:
        """Prefills a chunk of the known tokens. If all are computed, decodes some tokens."""
        if lease.ended:
            return
        self.tick()
        if lease.num_computed_tokens < lease.num_tokens:
            new = lease.tokens[lease.num_computed_tokens : lease.num_computed_tokens + len(tokens)].copy()
        else:
            new = np.array(tokens, np.int32)[: self.capacity() - lease.num_computed_tokens]
        if lease.next_checkpoint_position is not None:
            new = new[: lease.next_checkpoint_position - lease.num_computed_tokens]
        if len(new) == 0:
            return
        if isinstance(self.cache.extend(lease, len(new)), Deferred):
            return
        everything = [*lease.tokens[: lease.num_computed_tokens].tolist(), *new.tolist()]
        known = self.written.setdefault(lease.namespace, set())
        for position in range(lease.num_computed_tokens, len(everything)):
            for rows, table in zip(self.memory, lease.tables, strict=True):
                block = int(table[position // self.size])
                assert block >= 0
                rows[block][position % self.size] = tuple(everything[: position + 1])
            known.add(tuple(everything[: position + 1]))
        if self.states:
            self.states[lease.slot] = tuple(everything)
        self.execute(self.cache.commit(lease, new))

    @rule(seconds=st.sampled_from([10.0, 100.0, 1000.0]))
    def pass_time(self, seconds: float) -> None:
        self.time += seconds

    @rule(lease=leases, upto=st.integers(1, 60), tenant=st.sampled_from(["", "a"]))
    def pin(self, lease: Lease, upto: int, tenant: str) -> None:
        """Pins a prefix of another request, and checks that it can be resumed where the pin ends."""
        pinned = self.cache.pin(lease.tokens[:upto].copy(), lease.namespace, tenant)
        if isinstance(pinned, Pinned):
            self.pinned[pinned.id] = (lease.tokens[: pinned.tokens].tolist(), lease.namespace)

    @rule(lease=leases, upto=st.integers(1, 60), hints=SOME_HINTS)
    def apply_hints(self, lease: Lease, upto: int, hints: CacheHints) -> None:
        """Applies hints without a request. Acts alone change no retention of other tenants, and no entry that is in
        use but for an end of its own retention."""
        nodes = [node for root in self.cache.tree.roots.values() for node in walk(root)]
        before = [(node, node.grant) for node in nodes if node.grant is not None and node.grant.is_charged]
        in_use = [node for node in nodes if node.ref_count and node.grant is None]
        outcomes = self.cache.apply_hints(lease.tokens[:upto].copy(), lease.namespace, hints)
        self.judge_outcomes(hints, outcomes)
        self.note_pins()
        if not hints.retentions:
            assert all(node.grant is grant for node, grant in before if grant.tenant != hints.tenant)
            assert all(node.grant is None for node in in_use)

    def judge_outcomes(self, hints: CacheHints, outcomes: Sequence[HintOutcome]) -> None:
        named = [hints.session_field] if hints.session is not None else []
        fields = [each.field for each in (*hints.retentions, *hints.acts)]
        assert sorted(each.field for each in outcomes) == sorted(fields + named)

    def note_pins(self) -> None:
        for pin in self.cache.pins():
            tokens = pin.lease.tokens[: pin.tokens].tolist()
            self.pinned.setdefault(pin.id, (tokens, pin.lease.namespace))
        assert self.cache.pinned_bytes() <= PINNED_SHARE * self.cache.budget_bytes

    @rule(number=st.integers(0, 9))
    def release_pin(self, number: int) -> None:
        pins = self.cache.pins()
        if pins:
            assert self.cache.release_pin(pins[number % len(pins)].id)

    @rule()
    def drop_pin(self) -> None:
        were_pinned = len(self.cache.pins())
        assert self.cache.drop_pin() == bool(were_pinned)
        assert len(self.cache.pins()) == max(0, were_pinned - 1)

    @rule(lease=leases, ahead=st.integers(1, 20))
    def wait_for(self, lease: Lease, ahead: int) -> None:
        """Requests a checkpoint at the position where another request will part from this one."""
        if not lease.ended:
            self.cache.request_checkpoint(lease, lease.num_computed_tokens + ahead)

    @rule(lease=consumes(leases))
    def fail(self, lease: Lease) -> None:
        """Ends a lease after a forward that raised: the rows of that forward and the working state are garbage."""
        if lease.ended:
            return
        if self.states:
            self.states[lease.slot] = None
        self.cache.release(lease, ReleaseReason.FAILED)

    @rule(
        lease=consumes(leases),
        reason=st.sampled_from([ReleaseReason.FINISHED, ReleaseReason.PREEMPTED, ReleaseReason.ABORTED]),
    )
    def end(self, lease: Lease, reason: ReleaseReason) -> None:
        if lease.ended:
            return
        self.tick()
        tokens, computed = lease.tokens.copy(), lease.num_computed_tokens
        self.cache.release(lease, reason)
        self.note_pins()
        if lease.hints is not None and reason is ReleaseReason.FINISHED:
            assert [each.field for each in lease.act_outcomes] == [act.field for act in lease.hints.acts]
        else:
            assert not lease.act_outcomes
        if computed:
            match = self.cache.match(tokens[:computed], lease.namespace)
            assert match.found == computed, "the computed tokens of a lease must be found when it has ended"

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert all(pool.pool.cached_blocks == 0 for pool in self.cache.pools.every)

    @rule(tenant=st.sampled_from(["", "other"]))
    def clear_for_a_tenant(self, tenant: str) -> None:
        namespace = Namespace("weights", "float32", salt=tenant)

        def others() -> list[Node]:
            roots = (root for root in self.cache.tree.roots.values() if root.namespace != namespace)
            return [node for root in roots for node in walk(root)]

        before = others()
        self.cache.clear(namespace)
        root = self.cache.tree.roots.get(namespace)
        assert root is None or all(node.ref_count for node in walk(root))
        assert others() == before

    @rule(prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40))
    def protect_for_a_while(self, prompt: list[int]) -> None:
        namespace = Namespace("weights", "float32")
        protection = self.cache.protect(self.cache.match(np.array(prompt, np.int32), namespace))
        self.cache.check()
        self.cache.unprotect(protection)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        pool, stats = self.cache.pool, self.cache.stats()
        assert pool.free_blocks + pool.cached_blocks + pool.live_blocks == pool.total_blocks
        assert stats.asked_tokens == self.asked == stats.hit_tokens + stats.missed_tokens
        assert stats.hit_tokens == self.hit
        pins = {pin.lease: pin for pin in self.cache.pins()}
        for lease in self.cache._leases.values():
            if lease not in pins:  # a pin's table ends at a whole block
                self.assert_readable(lease)
        for pin in pins.values():
            tokens, namespace = self.pinned[pin.id]
            resumed = self.cache.match(np.array([*tokens, ALPHABET], np.int32), namespace)
            assert resumed.length == pin.tokens, "a pinned prefix was evicted"
        for account in self.cache.tree.ledger.tenants:
            assert self.cache.tree.ledger.bytes_of(account) <= self.cache.budget_bytes
        for root in self.cache.tree.roots.values():
            for node in walk(root):
                self.assert_node_readable(node)
                for checkpoint in node.checkpoints.values():
                    self.assert_checkpoint_readable(checkpoint, node)

    def assert_node_readable(self, node: Node) -> None:
        if FULL not in self.families:
            return
        prefix = tokens_of(node)
        table = block_table(node, node.end, self.size)
        for position in range(node.end):
            block = int(table[position // self.size])
            assert self.memory[0][block][position % self.size] == prefix[: position + 1]

    def assert_checkpoint_readable(self, checkpoint: Checkpoint, node: Node) -> None:
        """Checks that a checkpoint holds all rows that a resumption at its position needs."""
        prefix = tokens_of(node)[: checkpoint.position]
        if self.states:
            assert self.states[checkpoint.slot] == prefix
        windowed = [(f, rows) for f, rows in zip(self.families, self.memory, strict=True) if f is not FULL]
        for (family, rows), held in zip(windowed, checkpoint.windows, strict=True):
            for position in range(family.first_visible(checkpoint.position), checkpoint.position):
                block = int(held.ids[position // self.size - held.first])
                assert rows[block][position % self.size] == prefix[: position + 1]

    def assert_readable(self, lease: Lease) -> None:
        """Checks that every family has the positions that it needs to continue. Earlier ones may be gone."""
        tokens = tuple(lease.tokens.tolist())
        for family, rows, table in zip(self.families, self.memory, lease.tables, strict=True):
            for position in range(family.first_visible(lease.num_computed_tokens), lease.num_computed_tokens):
                block = int(table[position // self.size])
                assert block >= 0, f"{family.name} has lost position {position}"
                assert rows[block][position % self.size] == tokens[: position + 1], (
                    f"{lease}: {family.name} reads something else at position {position}"
                )
        if self.states and lease.num_computed_tokens:
            assert self.states[lease.slot] == tokens[: lease.num_computed_tokens]

    def snapshot(self) -> tuple[object, ...]:
        owners = [rows.tobytes() for pool in self.cache.pools.every for rows in pool.pool.owners()]
        return (self.cache.stats(), owners, self.cache.tree.version)


def tokens_of(node: Node) -> Prefix:
    return tuple(int(t) for step in reversed(list(node.path())) for t in step.tokens)


TestTreeAndPool = TreeAndPool.TestCase
TestTreeAndPool.settings = settings(
    max_examples=4000 if os.environ.get("ROOTSTOCK_SOAK") else 250, stateful_step_count=60
)
