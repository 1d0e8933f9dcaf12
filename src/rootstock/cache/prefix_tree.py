"""The tree as running requests see it: what is cached, who pins it, and what goes first.

`PrefixTree` owns the nodes, their checkpoints and the order of eviction, and takes and gives rows of the pools.
Leases hang on it as *tips*, each on the node at which what it has published ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool, References
from rootstock.cache.checkpoints import Checkpoint, CheckpointKind
from rootstock.cache.eviction import EvictionPolicy, EvictionQueue, MostValuableLast, Rank
from rootstock.cache.eviction_history import EvictionHistory
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Lease, Match, Pending
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.radix_node import NO_TOKENS, Node, Root, common_prefix, descend, kept_part, split, walk
from rootstock.cache.stats import Counters
from rootstock.cache.types import NO_BLOCK, BlockIds, Tokens
from rootstock.cache.write_back import WriteBackQueue

# Namespaces of which nothing is cached any more, kept for what `explain` tells of their evicted prefixes.
MAX_EMPTY_ROOTS = 64


class Want:
    """A queued request's claim on the prefix it would hit: evicted after everything nobody waits for."""

    __slots__ = ("checkpoint", "nodes", "version")

    def __init__(self, version: int) -> None:
        self.nodes: list[Node] = []
        self.checkpoint: Checkpoint | None = None
        self.version = version  # of the tree it was made from


class PrefixTree:
    def __init__(
        self,
        pools: Pools,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        counters: Counters,
        spill: WriteBackQueue | None = None,
    ) -> None:
        self.pools = pools
        self.spill = spill  # told of what is evicted
        self.pool: BlockPool = pools.full.pool
        self.block_size = pools.block_size
        self.counters = counters
        self.version = 0  # changes with the tree: a match stands as long as it does not
        self.roots: dict[Namespace, Root] = {}
        # Every root that has neither children nor pins is here, emptied last at the end; others may be as well.
        self._emptied: dict[Namespace, None] = {}
        self.queue: EvictionQueue[Node] = EvictionQueue(policy)
        self.checkpoints: EvictionQueue[Checkpoint] = EvictionQueue(policy)
        self.evicted = EvictionHistory()
        self._policy = policy
        self._clock = clock

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        for root in self.roots.values():
            yield from walk(root)

    def find(self, tokens: Tokens, namespace: Namespace) -> tuple[Node, int] | None:
        """The deepest node that agrees and how many tokens agree; None if the namespace holds nothing."""
        root = self.roots.get(namespace)
        return None if root is None else descend(root, tokens)

    def pending(self, node: Node, found: int, resumable: int, tokens: Tokens, limit: int) -> Pending | None:
        """The running request that will have computed the most of `tokens` beyond what can be resumed now.

        Unless every position can be resumed at, only one that has yet to get to where the two part: it is asked
        for a checkpoint there, and `limit` is the deepest that is of use. What is cached but cannot be resumed at is
        worth waiting for as well.
        """
        anywhere = self.pools.resume_anywhere
        best: Pending | None = None
        for step in node.path():
            if step.end > found:
                continue
            for lease in step.tips:
                if lease.known == lease.published:
                    continue
                rest = slice(lease.published, None)
                until = lease.published + common_prefix(lease.tokens[rest], tokens[rest])
                if not anywhere:
                    until = min(until, limit)
                    if until <= lease.computed:
                        continue
                # One that is behind what is cached already (its prompt is scored, say) must first catch up.
                behind = max(0, resumable - lease.computed)
                if until - resumable > behind and (best is None or until > best.until):
                    best = Pending(lease, until)
        return best

    # ------------------------------------------------------------------------------ leases on the tree

    def root_of(self, namespace: Namespace) -> Root:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self.pools.resume_anywhere, self._clock())
        return root

    def attach(self, lease: Lease, tip: Node) -> None:
        """The lease, which uses the blocks of every node on the path, pins the path."""
        self.version += 1
        now = self._clock()
        if lease.hit_tokens and not tip.pins:
            self._learn(now - tip.last_used)
        lease.tip = tip
        tip.tips[lease] = None
        for node in tip.path():
            node.pins += 1
            node.hits += 1
            node.last_used = now
            node.passed_by = False
            if node.queue_ticket:
                self.queue.drop(node)
        turn = tip.checkpoints.get(tip.end)
        if turn is not None and turn.kind is CheckpointKind.USER:
            self._pass_by(tip)
        if lease.resumed_from is not None:
            lease.resumed_from.hits += 1
            lease.resumed_from.last_used = now
            self.counters.checkpoints_hit += 1
            if lease.resumed_from.kind is CheckpointKind.ANSWER:
                self._drop_passed_prompt(lease.resumed_from)

    def _drop_passed_prompt(self, answer: Checkpoint) -> None:
        """A conversation goes on from its answer as it was given, so nobody comes back to the end of the prompt that
        was answered: what is kept there, for templates that drop reasoning at once, has no use."""
        assert answer.node is not None
        before = answer.before
        if (
            before is not None
            and before.kind in (CheckpointKind.PROMPT, CheckpointKind.TOOL)
            and before.is_idle
        ):
            self.drop(before)

    def _pass_by(self, turn: Node) -> None:
        """A request resumes at the end of a user turn: what followed it once, reasoning and calls of tools, has been
        dropped from the conversation, and is hardly asked for again."""
        stack = [child for child in turn.children.values() if not child.pins]
        while stack:
            node = stack.pop()
            if node.passed_by:
                continue
            node.passed_by = True
            if node.queue_ticket:
                self.queue.put(node)
            for checkpoint in node.checkpoints.values():
                if checkpoint.queue_ticket:
                    self.checkpoints.put(checkpoint)
            stack.extend(child for child in node.children.values() if not child.pins)

    def _learn(self, idle_s: float) -> None:
        """Something that nobody was using is used again."""
        if self.pools.resume_anywhere:  # then all is worth the same, and patience has no say
            return
        if isinstance(self._policy, MostValuableLast) and self._policy.reused(idle_s):
            self.queue.renew()
            self.checkpoints.renew()

    def detach(self, lease: Lease) -> None:
        """The lease lets go of its path, and of the blocks that its table replaces; not of its table."""
        self.version += 1
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

    def split(self, node: Node, position: int) -> Node:
        """Cuts an edge; returns the upper half."""
        self.version += 1
        upper = split(node, position, self.pool, self.block_size)
        for want in upper.wants:
            assert isinstance(want, Want)
            want.nodes.append(upper)
        return upper

    # -------------------------------------------------------------------------------------- publishing

    def publish(self, lease: Lease) -> None:
        """Makes positions published … computed-1 findable."""
        self.version += 1
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
                child = self.split(child, agreed)
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
        own = lease.table[first : first + whole]
        theirs = node.blocks[:whole]
        differs = own != theirs
        if np.count_nonzero(differs):
            duplicates, gained = own[differs], theirs[differs]
            if int(theirs[0]) in lease.replaced:
                # The other half of a split block: used already, as the parent's tail. Now the table has it.
                lease.replaced.remove(int(theirs[0]))
                gained = gained[1:]
            if len(gained):
                self.pool.use(gained)
            own[:] = theirs  # a view of the lease's table
            assert node.parent is not None
            above = self._ancestors_inside_block(node.parent, node.start)
            if differs[0] and any(int(n.blocks[-1]) == int(duplicates[0]) for n in above):
                # Our block is the tail of a node that we pin, so it stays ours beside the table.
                lease.replaced.append(int(duplicates[0]))
                duplicates = duplicates[1:]
            if len(duplicates):
                self.pool.unuse(duplicates)
            self.counters.duplicate_blocks += len(duplicates)
        if whole < len(node.blocks):
            tail = int(node.blocks[-1])
            if tail != int(lease.table[first + whole]) and tail not in lease.replaced:
                self.pool.use(node.blocks[-1:])
                lease.replaced.append(tail)
        ours = self._references(lease, node.start, node.end) if node.tails else []
        for of_family, of_node, of_lease in zip(self.pools.tails, node.tails, ours, strict=True):
            gone = of_family.pool.resolve(of_node) < 0  # where nobody has them any more, ours will do
            of_node[gone] = of_lease[gone]
        node.pins += 1
        self.queue.drop(node)

    def _references(self, lease: Lease, start: int, end: int) -> list[References]:
        """To the lease's tail blocks of the positions start … end-1."""
        if not lease._tails:
            return []
        size = self.block_size
        first, last = start // size, -(-end // size)
        found = []
        for tail, table in zip(self.pools.tails, lease._tails, strict=True):
            ids = table.ids[first:last]
            if len(ids) < last - first:  # loaded up to inside a block of which this family needs nothing
                ids = np.concatenate((ids, np.full(last - first - len(ids), NO_BLOCK, np.int32)))
            found.append(tail.pool.references(ids))
        return found

    def _refer(self, lease: Lease, node: Node, end: int) -> None:
        """The lease's own edge is about to grow to `end`: references for the new block indices, too. A block that
        was filled in part is the same block still."""
        if self.pools.tails:
            known = len(node.blocks)
            grown = self._references(lease, node.start, end)
            node.tails = [
                np.concatenate((old, new[known:])) for old, new in zip(node.tails, grown, strict=True)
            ]

    def _add(self, lease: Lease, node: Node, position: int, tokens: Tokens) -> Node:
        """Positions `position` … of the lease, which the tree does not have, as a longer edge or a new leaf."""
        size, end = self.block_size, len(tokens)
        now = self._clock()
        if node.writer is lease and node.pins == 1 and not node.children:
            first_new = node.start // size + len(node.blocks)
            fresh = lease.table[first_new : -(-end // size)]
            self._refer(lease, node, end)
            if len(fresh):
                self.pool.hold(fresh)
                node.blocks = np.concatenate((node.blocks, fresh))
            node.tokens = np.concatenate((node.tokens, tokens[position:]))
            self.evicted.forget_below(node)
            node.end = end
            node.last_used = now
            return node
        blocks = lease.table[position // size : -(-end // size)].copy()
        self.pool.hold(blocks)
        leaf = Node(
            node, position, tokens[position:].copy(), blocks, self._references(lease, position, end), now
        )
        leaf.writer = lease
        leaf.pins = 1
        self.evicted.returned(node, int(tokens[position]))
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

    def retract(self, tip: Node | None, first: int) -> None:
        """Takes back what a lease that is gone had published from position `first` on, up to what others use."""
        self.version += 1
        node = tip
        while node is not None and node.queue_ticket and node.start >= first:
            parent = node.parent
            self.queue.drop(node)
            self._remove(node)
            node = parent

    def forget(self, tokens: Tokens, namespace: Namespace, first: int) -> None:
        """Takes out every node on the path of `tokens` that reaches beyond `first`, and what is below, as far as
        nobody uses it."""
        self.version += 1
        root = self.roots.get(namespace)
        node = None if root is None else root.children.get(int(tokens[0]))
        while node is not None and node.end <= first:
            node = node.children.get(int(tokens[node.end])) if node.end < len(tokens) else None
        if node is None:
            return
        for wrong in reversed([node, *walk(node)]):  # children first
            if wrong.queue_ticket:
                self.queue.drop(wrong)
                self._remove(wrong)

    # --------------------------------------------------------------------------------- queued requests

    def want(self, match: Match) -> Want:
        """Until `unwant`, what this match found is evicted after everything that nobody waits for."""
        want = Want(self.version)
        if match.node is not None and match.length:
            for node in match.node.path():
                if not node.is_root:
                    node.wants[want] = None
                    want.nodes.append(node)
        if match.checkpoint is not None:
            match.checkpoint.wants[want] = None
            want.checkpoint = match.checkpoint
        return want

    def is_current(self, want: Want | None) -> bool:
        """Whether the claim covers all that its request would hit now."""
        return want is not None and want.version == self.version

    def unwant(self, want: Want) -> None:
        for node in want.nodes:
            node.wants.pop(want, None)
            if node.queue_ticket:
                self.queue.put(node)  # its rank has fallen
        want.nodes.clear()
        if want.checkpoint is not None:
            want.checkpoint.wants.pop(want, None)
            if want.checkpoint.queue_ticket:
                self.checkpoints.put(want.checkpoint)
            want.checkpoint = None

    # ------------------------------------------------------------------------------------- checkpoints

    def keep(self, checkpoint: Checkpoint) -> None:
        """A new checkpoint, whose rows are the caller's until now, is found from here on."""
        self.version += 1
        node = checkpoint.node
        assert node is not None
        assert node.start < checkpoint.position <= node.end
        assert checkpoint.position not in node.checkpoints
        for tail, held in zip(self.pools.tails, checkpoint.tails, strict=True):
            if len(held.ids):
                tail.pool.hold(held.ids)
        if self.pools.states is not None:
            self.pools.states.pool.hold(self.pools.slot_rows(checkpoint.slot))
        node.checkpoints[checkpoint.position] = checkpoint
        self.checkpoints.put(checkpoint)
        self.counters.checkpoints_taken += 1
        for other in _neighbours(checkpoint):
            if other.queue_ticket:
                self.checkpoints.put(other)  # passed by this one, or saving only what lies between them
        if node.queue_ticket:
            self.queue.put(node)  # it may be worth more now

    def drop(self, checkpoint: Checkpoint) -> None:
        """The K/V before it stay; what it alone held is free."""
        self.version += 1
        node = checkpoint.node
        assert node is not None
        self.checkpoints.drop(checkpoint)
        del node.checkpoints[checkpoint.position]
        for want in checkpoint.wants:
            assert isinstance(want, Want)
            want.checkpoint = None
        checkpoint.wants.clear()
        checkpoint.node = None
        for tail, held in zip(self.pools.tails, checkpoint.tails, strict=True):
            if len(held.ids):
                tail.pool.unhold(held.ids)
        if self.pools.states is not None:
            self.pools.states.pool.unhold(self.pools.slot_rows(checkpoint.slot))
        if node.queue_ticket:
            self.queue.put(node)  # its rank may have fallen

    def pin(self, checkpoint: Checkpoint) -> None:
        """A request resumes from it: it stays until that has computed something."""
        checkpoint.pins += 1
        self.checkpoints.drop(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        if checkpoint.node is not None and not checkpoint.pins:
            self.checkpoints.put(checkpoint)

    # ---------------------------------------------------------------------------------------- eviction

    def make_room(self, rows: Rows) -> None:
        """Evicts until so many rows of each pool are free. The caller has checked that they can be had."""
        while not self.pools.has_free(rows):
            evicted = self._evict(rows, None)
            assert evicted, "rows counted as cached could not be evicted"

    def make_room_below(self, rows: Rows, rank: Rank) -> bool:
        """So, but only at the expense of what ranks lower; False if that is not enough."""
        while not self.pools.has_free(rows):
            if not self._evict(rows, rank):
                return False
        return True

    def _evict(self, rows: Rows, below: Rank | None) -> bool:
        """One step towards `rows` free rows: the tail of a leaf or a checkpoint, whichever ranks lower."""
        full = self.pools.full
        missing_bytes = self.pools.missing_bytes(rows)
        missing_blocks = rows[0] - full.pool.free_blocks
        leaf = checkpoint = None
        if missing_blocks > 0 or (missing_bytes and full.row_bytes):
            leaf = self.queue.peek()
        if missing_blocks <= 0:  # else only leaves will do, and they give the rest as well
            checkpoint = self.checkpoints.peek()
        by_leaf = leaf is not None and (checkpoint is None or leaf <= checkpoint)
        rank = leaf if by_leaf else checkpoint
        if rank is None or (below is not None and rank >= below):
            return False
        self.version += 1
        if by_leaf:
            node = self.queue.pop()
            by_bytes = -(-missing_bytes // full.row_bytes) if full.row_bytes else 0
            self._trim(node, max(1, missing_blocks, by_bytes))
        else:
            chosen = self.checkpoints.pop()
            if self.spill is not None:
                self.spill.checkpoint(chosen)
            self.drop(chosen)
            self.counters.checkpoints_evicted += 1
        return True

    def clear(self) -> None:
        """Drops everything that no lease pins, and every memory of evictions."""
        self.version += 1
        while self.checkpoints.peek() is not None:
            self.drop(self.checkpoints.pop())
        while self.queue.peek() is not None:
            self._remove(self.queue.pop())
        for root in list(self.roots.values()):
            self._forget_evictions(root)

    def clear_namespace(self, namespace: Namespace) -> None:
        """Like `clear`, for one namespace: O(its nodes)."""
        self.version += 1
        root = self.roots.get(namespace)
        if root is None:
            return
        for node in reversed(list(walk(root))):  # children first
            for checkpoint in list(node.checkpoints.values()):
                if checkpoint.queue_ticket:
                    self.drop(checkpoint)
            if node.queue_ticket:
                self.queue.drop(node)
                self._remove(node)
        self._forget_evictions(root)

    def _forget_evictions(self, root: Root) -> None:
        for node in (root, *walk(root)):
            self.evicted.forget_below(node)
        self._forget_if_empty(root)

    def _trim(self, leaf: Node, blocks: int) -> None:
        """Evicts the last `blocks` blocks of a leaf, or all of it if it has no more than that.

        The tail goes rather than the leaf: what is left of it is still a prefix somebody may ask for. What lies
        behind its last checkpoint goes before that checkpoint, and a checkpoint goes with the K/V before it.
        """
        size, kept = self.block_size, len(leaf.blocks) - blocks
        end = (leaf.start // size + kept) * size
        last = leaf.deepest_checkpoint
        if last is not None and end <= -(-last.position // size) * size and last.position < leaf.end:
            # Up to the very position: only then is what is left worth what the checkpoint is.
            kept, end = -(-last.position // size) - leaf.start // size, last.position
        if kept > 0:
            self._spill(leaf, end)
            gone = leaf.blocks[kept:]
            self._remember_evicted(leaf, leaf, leaf.tokens[end - leaf.start :])
            self._drop_checkpoints(leaf, end)
            leaf.blocks = leaf.blocks[:kept].copy()
            leaf.tails = [references[:kept].copy() for references in leaf.tails]
            leaf.tokens = kept_part(leaf.tokens[: end - leaf.start])
            self.counters.evicted_tokens += leaf.end - end
            leaf.end = end
            self.pool.unhold(gone)
            self.counters.evicted_blocks += len(gone)
            self.queue.put(leaf)
            return
        assert leaf.parent is not None
        self._spill(leaf, leaf.start)
        self._remember_evicted(leaf.parent, leaf, leaf.tokens)
        self.counters.evicted_tokens += leaf.end - leaf.start
        self.counters.evicted_blocks += len(leaf.blocks)
        self._remove(leaf)

    def _spill(self, leaf: Node, after: int) -> None:
        """What the leaf holds beyond position `after` is about to go. A block that is kept in part goes down as a
        whole: what is deeper goes on from its end."""
        if self.spill is not None:
            self.spill.blocks(leaf, after // self.block_size - leaf.start // self.block_size)
            for position, checkpoint in leaf.checkpoints.items():
                if position > after:
                    self.spill.checkpoint(checkpoint)

    def _remove(self, leaf: Node) -> None:
        """Takes a leaf that nobody uses, and that is not queued, out of the tree."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert not leaf.pins
        self.evicted.forget_below(leaf)
        self._drop_checkpoints(leaf, leaf.start)
        del parent.children[int(leaf.tokens[0])]
        for want in leaf.wants:
            assert isinstance(want, Want)
            want.nodes.remove(leaf)
        leaf.wants.clear()
        leaf.parent = None
        self.pool.unhold(leaf.blocks)
        # What still points at the node must not keep them.
        leaf.tokens, leaf.blocks, leaf.tails = NO_TOKENS, NO_BLOCKS, []
        self._queue_if_evictable(parent)
        self._forget_if_empty(parent)

    def _drop_checkpoints(self, node: Node, after: int) -> None:
        """Those of the node that lie behind position `after`."""
        if not node.checkpoints:
            return
        for position in [p for p in node.checkpoints if p > after]:
            self.drop(node.checkpoints[position])
            self.counters.checkpoints_evicted += 1

    def _queue_if_evictable(self, node: Node) -> None:
        if node.pins == 0 and not node.children and not node.is_root:
            self.queue.put(node)

    def _remember_evicted(self, node: Node, leaf: Node, tokens: Tokens) -> None:
        """`tokens`, the tail of `leaf`, are not cached below `node` any more; what was below the leaf follows."""
        for forgotten in self.evicted.remember(node, tokens, self.evicted.take_below(leaf)):
            self._forget_if_empty(forgotten)

    def _forget_if_empty(self, node: Node) -> None:
        """Drops a root of which nothing is cached or in use, unless it was emptied lately and remembers evictions."""
        if not isinstance(node, Root) or not node.is_empty:
            return
        self._emptied.pop(node.namespace, None)
        if not node.evicted:
            self.roots.pop(node.namespace, None)
            return
        self._emptied[node.namespace] = None
        while len(self._emptied) > MAX_EMPTY_ROOTS:
            namespace = next(iter(self._emptied))
            del self._emptied[namespace]
            oldest = self.roots.get(namespace)
            if oldest is not None and oldest.is_empty:
                self.evicted.forget_below(oldest)
                del self.roots[namespace]

    def check(self) -> None:
        """Asserts the invariants of every node and every root."""
        for node in self.nodes():
            self._check_node(node)
        assert len(self._emptied) <= MAX_EMPTY_ROOTS
        for namespace, root in self.roots.items():
            assert root.namespace == namespace
            is_remembered = bool(root.evicted) and namespace in self._emptied
            assert not root.is_empty or is_remembered, "a namespace outlives what was cached of it"

    def _check_node(self, node: Node) -> None:
        size = self.block_size
        assert node.end - node.start == len(node.tokens) > 0
        assert len(node.blocks) == -(-node.end // size) - node.start // size
        assert len(node.tails) == len(self.pools.tails)
        assert all(len(references) == len(node.blocks) for references in node.tails)
        for position, checkpoint in node.checkpoints.items():
            assert checkpoint.node is node
            assert checkpoint.position == position
            assert node.start < position <= node.end
            assert bool(checkpoint.queue_ticket) == (not checkpoint.pins)
        assert node.parent is not None
        assert node.parent.end == node.start
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.pins == len(node.tips) + sum(child.pins for child in node.children.values())
        evictable = not node.children and not node.pins
        assert bool(node.queue_ticket) == evictable, (
            f"{node} is queued for eviction: {bool(node.queue_ticket)}"
        )


def _neighbours(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Those that are worth less with this one: the next shallower, on its node or the one above, and the next deeper,
    on its node or right below."""
    node, position = checkpoint.node, checkpoint.position
    assert node is not None
    shallower = [p for p in node.checkpoints if p < position]
    if shallower:
        yield node.checkpoints[max(shallower)]
    elif node.parent is not None and node.parent.checkpoints:
        yield node.parent.checkpoints[max(node.parent.checkpoints)]
    deeper = [p for p in node.checkpoints if p > position]
    if deeper:
        yield node.checkpoints[min(deeper)]
        return
    for child in node.children.values():
        if child.checkpoints:
            yield child.checkpoints[min(child.checkpoints)]
