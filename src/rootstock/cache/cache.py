"""The cache's façade: one radix tree and one block pool, and who owns what while requests run.

The cycle of a request is `match` → `admit` → (`extend` → a forward → `commit`)* → `finish`. `preempt` and
`abort` end it early; what was computed stays findable in all three cases.

Invariant on which eviction and admission rest: *a lease uses every block of every node on its path*. Unpinned
nodes therefore form whole subtrees whose unused blocks can all be evicted, leaves first, so that

    blocks that can be had = free blocks + cached blocks

exactly, known without looking at the tree. `check()` recounts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from rootstock.cache.blocks import NO_BLOCKS, BlockPool
from rootstock.cache.eviction import EvictionPolicy, least_recently_used
from rootstock.cache.explain import Explanation, explain_match
from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted, Deferred, Extended, Lease, LeaseId, Match
from rootstock.cache.plan import NOTHING, BlockCopy, BlockId, Plan, Tokens
from rootstock.cache.radix import (
    block_table,
    replaced_blocks,
    walk,
)
from rootstock.cache.stats import CacheStats, Counters
from rootstock.cache.tree import PrefixTree, Want
from rootstock.errors import BudgetTooSmall


class KVCache:
    """Framework-free and single-threaded: the engine's thread owns it.

    `families` say what a token costs; `budget_bytes` pays for whole blocks of `block_size` positions in all of
    them. With `reuse=False` nothing is ever published or found: the same engine without a prefix cache.
    """

    def __init__(
        self,
        families: Sequence[Family],
        budget_bytes: int,
        block_size: int = 32,
        *,
        policy: EvictionPolicy = least_recently_used,
        clock: Callable[[], float] = time.monotonic,
        reuse: bool = True,
    ) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * sum(f.bytes_per_token for f in families)
        blocks = budget_bytes // self.block_bytes
        if blocks < 2:  # one to compute into and one to copy a shared tail from
            raise BudgetTooSmall(budget_bytes, 2 * self.block_bytes, self.block_bytes)
        self.families = tuple(families)
        self.reuse = reuse
        self.counters = Counters()
        self._policy = policy
        self._clock = clock
        self._next_lease = 0
        self._start_empty(blocks)

    def _start_empty(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.tree = PrefixTree(self.pool, self.block_size, self._policy, self._clock, self.counters)
        self._leases: dict[LeaseId, Lease] = {}

    @property
    def capacity_tokens(self) -> int:
        return self.pool.total_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ------------------------------------------------------------------------------------------ asking

    def match(self, tokens: Tokens, namespace: Namespace, at_most: int | None = None) -> Match:
        """Where these tokens can resume. Changes nothing.

        The last token is always left to compute, since its logits are what a request is for; `at_most` lowers
        the limit further, for requests that need the logits of earlier positions.
        """
        limit = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        reached = self.tree.find(tokens, namespace)
        if reached is None:
            return Match(tokens, namespace, 0, 0, None, None, self.tree.version)
        node, found = reached
        pending = self.tree.pending(node, found, tokens) if self._leases else None
        return Match(tokens, namespace, max(min(found, limit), 0), found, node, pending, self.tree.version)

    def explain(self, tokens: Tokens, namespace: Namespace) -> Explanation:
        """Why a request with these tokens hits what it hits, and what stopped it there. Changes nothing."""
        return explain_match(self.match(tokens, namespace), self.reuse)

    # --------------------------------------------------------------------------- the cycle of a request

    def admit(self, match: Match, headroom_blocks: int = 0) -> Admitted | Deferred:
        """Reserves blocks for the whole prompt and pins what it hits, or changes nothing at all.

        `headroom_blocks` must remain available afterwards, for requests that are running already. The plan copies
        the shared part of a block that the prompt diverges in.
        """
        assert len(match.tokens) > 0
        if match.version != self.tree.version:
            match = self.match(match.tokens, match.namespace, match.length)
        size, pool = self.block_size, self.pool
        hit, node = match.length, match.node
        while node is not None and hit <= node.start and not node.is_root:
            node = node.parent  # the cap moved the position to an ancestor's end
        shared_blocks = hit // size
        fresh_blocks = self.blocks_for(len(match.tokens)) - shared_blocks
        needed = fresh_blocks + headroom_blocks

        path_table = block_table(node, hit, size) if node is not None and hit else NO_BLOCKS
        shared = path_table[:shared_blocks]
        replaced = replaced_blocks(node, shared, size) if node is not None and hit else []
        if node is not None and replaced and hit < node.end:
            # The node will be split at the hit: blocks that only its lower half needs are not pinned.
            replaced = [b for b in replaced if b != int(node.blocks[-1])]
            if hit % size:
                replaced = list(dict.fromkeys([*replaced, int(path_table[-1])]))
        owned = np.concatenate((shared, np.array(replaced, np.int32))) if replaced else shared
        available = pool.free_blocks + pool.cached_blocks - pool.unused_among(owned)
        attached = node if hit else None
        if needed > available and replaced:
            # Without pinning the path, its replaced tails can go; without copying, so can the shared tail.
            attached, replaced, owned, hit = None, [], shared, shared_blocks * size
            available = pool.free_blocks + pool.cached_blocks - pool.unused_among(owned)
        if needed > available:
            return Deferred(needed, available)

        # Nothing can fail from here on. The hit is pinned before room is made for the rest.
        pool.use(owned)
        lease = Lease(LeaseId(self._next_lease), match.namespace, match.tokens, hit, shared)
        self._next_lease += 1
        self._leases[lease.id] = lease
        if attached is not None:
            if hit < attached.end:
                attached = self.tree.split(attached, hit)
            lease.replaced = replaced
            self.tree.attach(lease, attached)
        elif self.reuse and hit == 0:
            self.tree.attach(lease, self.tree.root_of(match.namespace))
        self.tree.make_room(fresh_blocks)
        fresh = pool.allocate(fresh_blocks, lease.last_block)
        lease._grow_table(fresh)
        self.counters.admitted(len(match.tokens), hit)
        if hit % size == 0:
            return Admitted(lease, NOTHING)
        copy = BlockCopy(BlockId(int(path_table[-1])), BlockId(int(fresh[0])), hit % size)
        self.counters.copied_blocks += 1
        return Admitted(lease, Plan((copy,)))

    def extend(self, lease: Lease, new_tokens: int) -> Extended | Deferred:
        """Reserves blocks for the next `new_tokens` positions, before the forward that computes them."""
        missing = self.blocks_for(lease.computed + new_tokens) - lease.table_blocks
        if missing <= 0:
            return _EXTENDED
        pool = self.pool
        available = pool.free_blocks + pool.cached_blocks
        if missing > available:
            # Without its path's pins, the replaced tails that only this lease uses can be evicted, too.
            replaced = np.array(lease.replaced, np.int32)
            if lease.tip is None or missing > available + pool.used_once_among(replaced):
                return Deferred(missing, available)
            self.tree.detach(lease)
        self.tree.make_room(missing)
        lease._grow_table(pool.allocate(missing, lease.last_block))
        return _EXTENDED

    def commit(self, lease: Lease, tokens: Tokens) -> Plan:
        """The K/V of `tokens`, which follow what was computed, are in the pool now.

        Prompt chunks can be found at once, generated tokens a block at a time. Where another request has
        published the same prefix meanwhile, its blocks replace ours and ours are released.
        """
        assert not lease.ended
        assert self.blocks_for(lease.computed + len(tokens)) <= lease.table_blocks, "computed without blocks"
        lease._append(tokens)
        if lease.tip is not None and (
            lease.computed <= lease.prompt_tokens
            or lease.computed // self.block_size > lease.published // self.block_size
        ):
            self.tree.publish(lease)
        return NOTHING

    def finish(self, lease: Lease) -> None:
        """The request is complete: what it computed stays findable, what it owned is released."""
        self._end(lease)

    def preempt(self, lease: Lease) -> None:
        """The request makes room for others and will be admitted again."""
        self.counters.preemptions += 1
        self._end(lease)

    def discard(self, lease: Lease) -> None:
        """What the request computed may be wrong: none of it is published, and what can be is taken back.

        What others share already stays with them; they computed upon it.
        """
        tip = lease.tip
        lease.computed = lease.published
        self._end(lease)
        self.tree.retract(tip, lease.hit_tokens)

    def abort(self, lease: Lease) -> None:
        """The request is not wanted any more, or failed before its blocks were written: commit comes first."""
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        assert not lease.ended, "a lease was ended twice"
        if self.reuse and lease.tip is None and lease.computed > lease.published:
            # It let go of its path to get blocks; its table still holds every position from 0 on.
            lease.published = 0
            self.tree.attach(lease, self.tree.root_of(lease.namespace))
        if lease.tip is not None:
            if lease.published < lease.computed:
                self.tree.publish(lease)
            self.tree.detach(lease)
        self.pool.unuse(lease.table)
        lease.ended = True
        del self._leases[lease.id]

    # ------------------------------------------------------------------------------- queued requests

    def want(self, match: Match) -> Want:
        """Until `unwant`, what this match found is evicted after everything that nobody waits for."""
        return self.tree.want(match)

    def is_current(self, want: Want | None) -> bool:
        """Whether the claim covers all that its request would hit now."""
        return self.tree.is_current(want)

    def unwant(self, want: Want) -> None:
        self.tree.unwant(want)

    # ---------------------------------------------------------------------------------- house-keeping

    def clear(self) -> int:
        """Drops every cached prefix that no running request uses; returns how many blocks that freed."""
        before = self.pool.free_blocks
        self.tree.clear()
        return self.pool.free_blocks - before

    def reset(self) -> None:
        """Forgets everything, leases included: for an owner whose own state was lost."""
        for lease in self._leases.values():
            lease.ended = True
        version = self.tree.version
        self._start_empty(self.pool.total_blocks)
        self.tree.version = version + 1  # no match of before stands

    def stats(self) -> CacheStats:
        """Recounted from the structures at each call: O(nodes)."""
        nodes = list(self.tree.nodes())
        return CacheStats(
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            total_blocks=self.pool.total_blocks,
            free_blocks=self.pool.free_blocks,
            cached_blocks=self.pool.cached_blocks,
            live_blocks=self.pool.live_blocks,
            nodes=len(nodes),
            namespaces=len(self.tree.roots),
            cached_tokens=sum(node.end - node.start for node in nodes),
            leases=len(self._leases),
            **self.counters.as_dict(),
        )

    def check(self) -> None:
        """Asserts every invariant by recounting: O(blocks + nodes + leases). For tests and idle time."""
        self.pool.check()
        self.tree.check()
        held = np.zeros(self.pool.total_blocks, np.int32)
        used = np.zeros(self.pool.total_blocks, np.int32)
        for root in self.tree.roots.values():
            tips = [lease.tip for lease in self._leases.values() if lease.tip is not None]
            assert root.pins == sum(list(tip.path())[-1] is root for tip in tips)
            for node in walk(root):
                held[node.blocks] += 1
        for lease in self._leases.values():
            owned = [*lease.table.tolist(), *lease.replaced]
            assert len(set(owned)) == len(owned), "a lease owns a block twice"
            used[owned] += 1
            if lease.tip is not None:
                assert lease.tip.end == lease.published
                assert lease in lease.tip.tips
                needed = {int(b) for node in lease.tip.path() for b in node.blocks}
                assert needed <= set(owned), "a lease does not own a block of a node that it pins"
        pool_held, pool_used = self.pool.owners()
        assert (held == pool_held).all(), "blocks held do not match the tree"
        assert (used == pool_used).all(), "blocks used do not match the leases"


_EXTENDED = Extended()
