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
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rootstock.cache.blocks import NO_BLOCKS, BlockPool
from rootstock.cache.evicted import EvictedRuns, joined
from rootstock.cache.eviction import EvictionPolicy, EvictionQueue, least_recently_used
from rootstock.cache.explain import Explanation, explain_match
from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted, Deferred, Extended, Lease, LeaseId, Match, Pending
from rootstock.cache.plan import NOTHING, BlockCopy, BlockId, BlockIds, Plan, Tokens
from rootstock.cache.radix import (
    NO_TOKENS,
    Node,
    Root,
    block_table,
    common_prefix,
    descend,
    replaced_blocks,
    split,
    walk,
)
from rootstock.cache.stats import CacheStats, Counters
from rootstock.errors import BudgetTooSmall


class Want:
    """A queued request's claim on the prefix it would hit: evicted after everything nobody waits for."""

    __slots__ = ("nodes", "version")

    def __init__(self, version: int) -> None:
        self.nodes: list[Node] = []
        self.version = version  # of the tree it was made from


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
        self._version = 0
        self._start_empty(blocks)

    def _start_empty(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self._queue: EvictionQueue[Node] = EvictionQueue(self._policy)
        self._roots: dict[Namespace, Root] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._evicted = EvictedRuns()

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
        root = self._roots.get(namespace)
        if root is None:
            return Match(tokens, namespace, 0, 0, None, None, self._version)
        node, found = descend(root, tokens)
        pending = self._find_pending(node, found, tokens) if self._leases else None
        return Match(tokens, namespace, max(min(found, limit), 0), found, node, pending, self._version)

    def _find_pending(self, node: Node, found: int, tokens: Tokens) -> Pending | None:
        """The running request that will have computed the most of `tokens` beyond what is found."""
        best: Pending | None = None
        for step in node.path():
            if step.end > found:
                continue
            for lease in step.tips:
                if lease.known == lease.published:
                    continue
                rest = slice(lease.published, None)
                until = lease.published + common_prefix(lease.tokens[rest], tokens[rest])
                # One that is behind what is cached already (its prompt is scored, say) must first catch up.
                behind = max(0, found - lease.computed)
                if until - found > behind and (best is None or until > best.until):
                    best = Pending(lease, until)
        return best

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
        if match.version != self._version:
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
        self._version += 1
        pool.use(owned)
        now = self._clock()
        lease = Lease(LeaseId(self._next_lease), match.namespace, match.tokens, hit, shared)
        self._next_lease += 1
        self._leases[lease.id] = lease
        if attached is not None:
            if hit < attached.end:
                attached = self._split(attached, hit)
            lease.replaced = replaced
            self._attach(lease, attached, now)
        elif self.reuse and hit == 0:
            self._attach(lease, self._root_of(match.namespace, now), now)
        self._make_room(fresh_blocks)
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
            self._detach(lease)
        self._make_room(missing)
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
            self._publish(lease)
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
        node, first = lease.tip, lease.hit_tokens
        lease.computed = lease.published
        self._end(lease)
        while node is not None and node.queue_ticket and node.start >= first:
            parent = node.parent
            self._queue.drop(node)
            self._remove(node)
            node = parent

    def abort(self, lease: Lease) -> None:
        """The request is not wanted any more, or failed before its blocks were written: commit comes first."""
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        assert not lease.ended, "a lease was ended twice"
        self._version += 1
        now = self._clock()
        if self.reuse and lease.tip is None and lease.computed > lease.published:
            # It let go of its path to get blocks; its table still holds every position from 0 on.
            lease.published = 0
            self._attach(lease, self._root_of(lease.namespace, now), now)
        if lease.tip is not None:
            if lease.published < lease.computed:
                self._publish(lease)
            self._detach(lease)
        self.pool.unuse(lease.table)
        lease.ended = True
        del self._leases[lease.id]

    # ------------------------------------------------------------------------------- queued requests

    def want(self, match: Match) -> Want:
        """Until `unwant`, what this match found is evicted after everything that nobody waits for."""
        want = Want(self._version)
        if match.node is not None and match.length:
            for node in match.node.path():
                if not node.is_root:
                    node.wants[want] = None
                    want.nodes.append(node)
        return want

    def is_current(self, want: Want | None) -> bool:
        """Whether the claim covers all that its request would hit now."""
        return want is not None and want.version == self._version

    def unwant(self, want: Want) -> None:
        for node in want.nodes:
            node.wants.pop(want, None)
            if node.queue_ticket:
                self._queue.put(node)  # its rank has fallen
        want.nodes.clear()

    # ---------------------------------------------------------------------------------- house-keeping

    def clear(self) -> int:
        """Drops every cached prefix that no running request uses; returns how many blocks that freed."""
        before = self.pool.free_blocks
        self._version += 1
        while (leaf := self._queue.pop()) is not None:
            self._remove(leaf)
        for root in list(self._roots.values()):
            for node in (root, *walk(root)):
                self._evicted.forget_below(node)
            self._forget_if_empty(root)
        return self.pool.free_blocks - before

    def reset(self) -> None:
        """Forgets everything, leases included: for an owner whose own state was lost."""
        self._version += 1
        for lease in self._leases.values():
            lease.ended = True
        self._start_empty(self.pool.total_blocks)

    def stats(self) -> CacheStats:
        """Recounted from the structures at each call: O(nodes)."""
        nodes = [node for root in self._roots.values() for node in walk(root)]
        return CacheStats(
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            total_blocks=self.pool.total_blocks,
            free_blocks=self.pool.free_blocks,
            cached_blocks=self.pool.cached_blocks,
            live_blocks=self.pool.live_blocks,
            nodes=len(nodes),
            namespaces=len(self._roots),
            cached_tokens=sum(node.end - node.start for node in nodes),
            leases=len(self._leases),
            **self.counters.as_dict(),
        )

    def check(self) -> None:
        """Asserts every invariant by recounting: O(blocks + nodes + leases). For tests and idle time."""
        self.pool.check()
        held = np.zeros(self.pool.total_blocks, np.int32)
        used = np.zeros(self.pool.total_blocks, np.int32)
        for root in self._roots.values():
            tips = [lease.tip for lease in self._leases.values() if lease.tip is not None]
            assert root.pins == sum(list(tip.path())[-1] is root for tip in tips)
            for node in walk(root):
                self._check_node(node)
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

    def _check_node(self, node: Node) -> None:
        size = self.block_size
        assert node.end - node.start == len(node.tokens) > 0
        assert len(node.blocks) == -(-node.end // size) - node.start // size
        assert node.parent is not None
        assert node.parent.end == node.start
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.pins == len(node.tips) + sum(child.pins for child in node.children.values())
        evictable = not node.children and not node.pins
        assert bool(node.queue_ticket) == evictable, (
            f"{node} is queued for eviction: {bool(node.queue_ticket)}"
        )

    # ---------------------------------------------------------------------------------- the tree

    def _root_of(self, namespace: Namespace, now: float) -> Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace, now)
        return root

    def _attach(self, lease: Lease, tip: Node, now: float) -> None:
        lease.tip = tip
        tip.tips[lease] = None
        for node in tip.path():
            node.pins += 1
            node.hits += 1
            node.last_used = now
            if node.queue_ticket:
                self._queue.drop(node)

    def _detach(self, lease: Lease) -> None:
        tip = lease.tip
        assert tip is not None
        now = self._clock()
        del tip.tips[lease]
        if tip.writer is lease:
            tip.writer = None
        for node in tip.path():
            node.pins -= 1
            node.last_used = now
        self._forget_if_empty(tip)
        lease.tip = None
        if lease.replaced:
            self.pool.unuse(np.array(lease.replaced, np.int32))
            lease.replaced = []
        self._queue_if_evictable(tip)

    def _queue_if_evictable(self, node: Node) -> None:
        if node.pins == 0 and not node.children and not node.is_root:
            self._queue.put(node)

    def _split(self, node: Node, position: int) -> Node:
        upper = split(node, position, self.pool, self.block_size)
        for want in upper.wants:
            assert isinstance(want, Want)
            want.nodes.append(upper)
        return upper

    def _publish(self, lease: Lease) -> None:
        """Makes positions published … computed-1 findable."""
        self._version += 1
        node, position, end = lease.tip, lease.published, lease.computed
        assert node is not None
        tokens = lease._tokens[:end]
        came_from = node
        while position < end:
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            agreed = position + common_prefix(child.tokens, tokens[position:])
            if agreed < child.end:
                child = self._split(child, agreed)
            self._adopt(lease, child)
            node, position = child, agreed
        if position < end:
            node = self._add(lease, node, position, tokens)
        if node is not came_from:
            self._move_tip(lease, came_from, node)
        lease.published = end

    def _move_tip(self, lease: Lease, came_from: Node, tip: Node) -> None:
        """`tip` is below `came_from`; the nodes between them are pinned by `_adopt` and `_add`."""
        del came_from.tips[lease]
        if came_from.writer is lease:
            came_from.writer = None
        tip.tips[lease] = None
        lease.tip = tip

    def _adopt(self, lease: Lease, node: Node) -> None:
        """The lease has computed what `node` holds: duplicates go back to the pool, the tree's blocks stay.

        A block that the lease will still write into remains its own; the node's counterpart is then owned too.
        """
        size = self.block_size
        first = node.start // size
        whole = node.end // size - first  # blocks of the node that are full up to its end
        own = lease._table[first : first + whole]
        theirs = node.blocks[:whole]
        differs = own != theirs
        if differs.any():
            duplicates = own[differs].copy()
            self.pool.use(theirs[differs])
            lease._table[first : first + whole] = theirs
            if int(theirs[0]) in lease.replaced:  # the other half of a split block was the parent's tail
                lease.replaced.remove(int(theirs[0]))
                self.pool.unuse(theirs[:1])
            assert node.parent is not None
            above = self._ancestors_inside_block(node.parent, node.start)
            if differs[0] and any(int(n.blocks[-1]) == int(duplicates[0]) for n in above):
                # Our block is the tail of a node that we pin, so it stays ours beside the table.
                lease.replaced.append(int(duplicates[0]))
                duplicates = duplicates[1:]
            self.pool.unuse(duplicates)
            self.counters.duplicate_blocks += len(duplicates)
        if whole < len(node.blocks):
            tail = int(node.blocks[-1])
            if tail != int(lease._table[first + whole]) and tail not in lease.replaced:
                self.pool.use(node.blocks[-1:])
                lease.replaced.append(tail)
        node.pins += 1
        self._queue.drop(node)

    def _add(self, lease: Lease, node: Node, position: int, tokens: Tokens) -> Node:
        """Positions `position` … of the lease, which the tree does not have, as a longer edge or a new leaf."""
        size, end = self.block_size, len(tokens)
        now = self._clock()
        if node.writer is lease and node.pins == 1 and not node.children:
            first_new = node.start // size + len(node.blocks)
            fresh = lease._table[first_new : self.blocks_for(end)]
            if len(fresh):
                self.pool.hold(fresh)
                node.blocks = np.concatenate((node.blocks, fresh))
            node.tokens = np.concatenate((node.tokens, tokens[position:]))
            self._evicted.forget_below(node)
            node.end = end
            node.last_used = now
            return node
        blocks = lease._table[position // size : self.blocks_for(end)].copy()
        self.pool.hold(blocks)
        leaf = Node(node, position, tokens[position:].copy(), blocks, now)
        leaf.writer = lease
        leaf.pins = 1
        self._evicted.returned(node, int(tokens[position]))
        node.children[int(tokens[position])] = leaf
        if position % size and not node.is_root and node.pins == 1:
            self._rehome_tail(lease, node, blocks[:1])
        return leaf

    def _rehome_tail(self, lease: Lease, node: Node, copy: BlockIds) -> None:
        """The parent's partial tail is the first part of its new child's block: keep one of the two.

        A conversation whose turns end inside blocks then costs as many blocks as one long prompt. The old tail may
        serve several short ancestors; it goes only where they are its only holders and nobody else pins them.
        Every position of theirs reads the same from the copy.
        """
        old = node.blocks[-1:].copy()
        block = int(old[0])
        if block == int(copy[0]):
            return
        holders = [n for n in self._ancestors_inside_block(node, node.end) if int(n.blocks[-1]) == block]
        if self.pool.holders(block) != len(holders) or any(n.pins != 1 for n in holders):
            return
        for holder in holders:
            self.pool.hold(copy)
            holder.blocks[-1] = copy[0]
            self.pool.unhold(old)
        if block in lease.replaced:
            lease.replaced.remove(block)
            self.pool.unuse(old)

    def _ancestors_inside_block(self, node: Node, position: int) -> Iterator[Node]:
        """From `node` up, the nodes that end inside the block of `position` or at it, but not at its start."""
        block_start = position // self.block_size * self.block_size
        step: Node | None = node
        while step is not None and step.end > block_start:
            yield step
            step = step.parent

    # ---------------------------------------------------------------------------------- eviction

    def _make_room(self, blocks: int) -> None:
        """Evicts until `blocks` are free. The caller has checked that they can be had."""
        while self.pool.free_blocks < blocks:
            leaf = self._queue.pop()
            assert leaf is not None, "blocks counted as cached could not be evicted"
            self._version += 1
            self._trim(leaf, blocks - self.pool.free_blocks)

    def _trim(self, leaf: Node, blocks: int) -> None:
        """Evicts the last `blocks` blocks of a leaf, or all of it if it has no more than that.

        The tail goes rather than the leaf: what is left of it is still a prefix somebody may ask for.
        """
        kept = len(leaf.blocks) - blocks
        if kept > 0:
            end = (leaf.start // self.block_size + kept) * self.block_size
            gone = leaf.blocks[kept:]
            self._remember_evicted(leaf, leaf, leaf.tokens[end - leaf.start :])
            leaf.blocks = leaf.blocks[:kept].copy()
            leaf.tokens = leaf.tokens[: end - leaf.start].copy()
            self.counters.evicted_tokens += leaf.end - end
            leaf.end = end
            self.pool.unhold(gone)
            self.counters.evicted_blocks += len(gone)
            self._queue.put(leaf)
            return
        assert leaf.parent is not None
        self._remember_evicted(leaf.parent, leaf, leaf.tokens)
        self.counters.evicted_tokens += leaf.end - leaf.start
        self.counters.evicted_blocks += len(leaf.blocks)
        self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        """Takes a leaf that nobody uses, and that is not queued, out of the tree."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert not leaf.pins
        self._evicted.forget_below(leaf)
        del parent.children[int(leaf.tokens[0])]
        for want in leaf.wants:
            assert isinstance(want, Want)
            want.nodes.remove(leaf)
        leaf.wants.clear()
        leaf.parent = None
        self.pool.unhold(leaf.blocks)
        leaf.tokens, leaf.blocks = NO_TOKENS, NO_BLOCKS  # what still points at the node must not keep them
        self._queue_if_evictable(parent)

    def _remember_evicted(self, node: Node, leaf: Node, tokens: Tokens) -> None:
        """`tokens`, the tail of `leaf`, are not cached below `node` any more; what was below the leaf follows."""
        run = joined(tokens, self._evicted.longest_below(leaf))
        self._evicted.forget_below(leaf)
        for forgotten in self._evicted.remember(node, run):
            self._forget_if_empty(forgotten)

    def _forget_if_empty(self, node: Node) -> None:
        if isinstance(node, Root) and not (node.children or node.pins or node.evicted):
            self._roots.pop(node.namespace, None)


_EXTENDED = Extended()
