"""The tree and the pool against a naive model: a dictionary of bytes and a set of prefixes.

The model knows nothing of trees: it keeps the content of every block as a list of (position → prefix), executes
copies, and demands that whatever a lease's table leads to is exactly the lease's tokens.
"""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.lease import Admitted, Deferred, Lease
from rootstock.cache.plan import Plan
from rootstock.cache.radix import Node, block_table, walk

ALPHABET = 3  # few tokens, so that prefixes meet often
Prefix = tuple[int, ...]


class TreeAndPool(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(block_size=st.sampled_from([1, 2, 3, 4, 8]), blocks=st.integers(3, 40))
    def start(self, block_size: int, blocks: int) -> None:
        self.time = 0.0
        self.size = block_size
        self.cache = KVCache([FullAttention(1, 1)], blocks * block_size, block_size, clock=lambda: self.time)
        # What each position of each block holds: the whole prefix that ends there, or None for garbage.
        self.memory: list[list[Prefix | None]] = [[None] * block_size for _ in range(blocks)]
        self.written: dict[Namespace, set[Prefix]] = {}
        self.asked = self.hit = 0

    def capacity(self) -> int:
        return self.cache.capacity_tokens

    def tick(self) -> None:
        self.time += 1.0

    def execute(self, plan: Plan) -> None:
        for copy in plan.copies:
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]

    @rule(
        target=leases,
        prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40),
        tenant=st.sampled_from(["", "", "other"]),
        headroom=st.integers(0, 2),
    )
    def admit(self, prompt: list[int], tenant: str, headroom: int):  # type: ignore[no-untyped-def]
        return self.ask(prompt, tenant, headroom)

    @rule(
        target=leases,
        lease=leases,
        more=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=9),
        back=st.integers(0, 5),
    )
    def go_on_from(self, lease: Lease, more: list[int], back: int):  # type: ignore[no-untyped-def]
        """A next turn, or a sibling: it begins with what another request has, finished or not."""
        upto = max(0, lease.computed - back)
        return self.ask([*lease.tokens[:upto].tolist(), *more], lease.namespace.salt, 0)

    def ask(self, prompt: list[int], tenant: str, headroom: int):  # type: ignore[no-untyped-def]
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
        answer = self.cache.admit(match, headroom)
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
        """Prefill a chunk of what is known, else decode some tokens."""
        if lease.ended:
            return
        self.tick()
        if lease.computed < lease.known:
            new = lease.tokens[lease.computed : lease.computed + len(tokens)].copy()
        else:
            new = np.array(tokens, np.int32)[: self.capacity() - lease.computed]
        if len(new) == 0:
            return
        if isinstance(self.cache.extend(lease, len(new)), Deferred):
            return
        everything = [*lease.tokens[: lease.computed].tolist(), *new.tolist()]
        known = self.written.setdefault(lease.namespace, set())
        for position in range(lease.computed, len(everything)):
            block = int(lease.table[position // self.size])
            self.memory[block][position % self.size] = tuple(everything[: position + 1])
            known.add(tuple(everything[: position + 1]))
        self.execute(self.cache.commit(lease, new))

    @rule(lease=consumes(leases), how=st.sampled_from(["finish", "preempt", "abort"]))
    def end(self, lease: Lease, how: str) -> None:
        if lease.ended:
            return
        self.tick()
        tokens, computed = lease.tokens.copy(), lease.computed
        getattr(self.cache, how)(lease)
        if computed:
            match = self.cache.match(tokens[:computed], lease.namespace)
            assert match.found == computed, "what a lease computed must be findable when it ends"

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.pool.cached_blocks == 0

    @rule(prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40))
    def protect_for_a_while(self, prompt: list[int]) -> None:
        namespace = Namespace("weights", "float32")
        want = self.cache.want(self.cache.match(np.array(prompt, np.int32), namespace))
        self.cache.check()
        self.cache.unwant(want)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        pool, stats = self.cache.pool, self.cache.stats()
        assert pool.free_blocks + pool.cached_blocks + pool.live_blocks == pool.total_blocks
        assert stats.asked_tokens == self.asked == stats.hit_tokens + stats.missed_tokens
        assert stats.hit_tokens == self.hit
        for lease in self.cache._leases.values():
            self.assert_readable(lease)
        for root in self.cache.tree.roots.values():
            for node in walk(root):
                self.assert_node_readable(node)

    def assert_node_readable(self, node: Node) -> None:
        prefix = [int(t) for step in reversed(list(node.path())) for t in step.tokens]
        table = block_table(node, node.end, self.size)
        for position in range(node.end):
            block = int(table[position // self.size])
            assert self.memory[block][position % self.size] == tuple(prefix[: position + 1])

    def assert_readable(self, lease: Lease) -> None:
        tokens = lease.tokens.tolist()
        for position in range(lease.computed):
            block = int(lease.table[position // self.size])
            assert self.memory[block][position % self.size] == tuple(tokens[: position + 1]), (
                f"{lease} reads something else at position {position}"
            )

    def snapshot(self) -> tuple[object, ...]:
        held, used = self.cache.pool.owners()
        return (self.cache.stats(), held.tobytes(), used.tobytes(), self.cache.tree.version)


TestTreeAndPool = TreeAndPool.TestCase
TestTreeAndPool.settings = settings(
    max_examples=4000 if os.environ.get("ROOTSTOCK_SOAK") else 250, stateful_step_count=60
)
