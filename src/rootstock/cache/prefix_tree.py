"""The prefix tree of all namespaces: cached prefixes, the leases that reference them, and the order of eviction.

`PrefixTree` owns the nodes, their checkpoints and the eviction queues, and takes and releases rows of the pools. Each
running lease is attached to one node (`Lease.node`), at whose end its published tokens end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool, WeakReferences
from rootstock.cache.eviction import (
    MAX_CHECKPOINTS,
    EvictionHistory,
    EvictionPolicy,
    EvictionQueue,
    Rank,
    rank_of,
)
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.lease import Lease, Match, Pending
from rootstock.cache.longest_match import common_prefix, descend
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.radix_node import (
    NEAR_TOKENS,
    Checkpoint,
    CheckpointKind,
    HitProtection,
    Node,
    Root,
    UnaskedEntry,
    below,
    kept_part,
    namespace_of,
    split,
    walk,
)
from rootstock.cache.resumable_blocks import ResumableBlocks
from rootstock.cache.retention.accounts import RetentionLedger
from rootstock.cache.retention.grants import Grant
from rootstock.cache.shared_budget import Value
from rootstock.cache.stats import Counters
from rootstock.cache.types import NO_BLOCK, NO_TOKENS, BlockIds, Tokens
from rootstock.cache.write_back import WriteBackQueue

# Empty namespaces that are kept because `explain` tells about their evicted prefixes.
MAX_EMPTY_ROOTS = 64


# Versions of two trees are never equal, so that a match of another cache counts as out of date.
_FIRST_VERSIONS = itertools.count(0, 1 << 40)


class PrefixTree:
    """Radix tree of prefixes. `write_back` receives evicted blocks and checkpoints before their rows are free,
    `resumable` every change of nodes and checkpoints."""

    def __init__(
        self,
        pools: Pools,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        counters: Counters,
        write_back: WriteBackQueue | None = None,
        resumable: ResumableBlocks | None = None,
    ) -> None:
        self.pools = pools
        self.write_back = write_back
        self.resumable = resumable
        self.pool: BlockPool = pools.full.pool
        self.block_size = pools.block_size
        self.counters = counters
        self.version = next(_FIRST_VERSIONS)  # changes with the tree: a match is valid only for its version
        self.roots: dict[Namespace, Root] = {}
        self._private_roots: dict[Namespace, dict[Root, None]] = {}  # no inner dictionary is empty
        # Roots that became empty, the last one at the end. Some of them may be in use again.
        self._emptied: dict[Root, None] = {}
        self._leases_at: dict[Node, dict[Lease, None]] = {}  # attached leases; no inner dictionary is empty
        self.queue: EvictionQueue[Node] = EvictionQueue(policy)
        self.checkpoints: EvictionQueue[Checkpoint] = EvictionQueue(policy)
        self.evicted = EvictionHistory()
        # Tokens of the nodes that idle work has added and no request has used. No entry is 0.
        self.unasked_tokens: Counter[Namespace] = Counter()
        self.ledger = RetentionLedger()
        self.token_bytes = pools.full.row_bytes // pools.block_size
        self._policy = policy
        self._clock = clock

    def nodes(self) -> Iterator[Node]:
        """Yields every node but roots, parents first."""
        for root in self.roots.values():
            yield from walk(root)

    def leases_at(self, node: Node) -> Collection[Lease]:
        """Returns the leases whose published prefix ends exactly at the node's end."""
        return self._leases_at.get(node, ())

    def roots_of(self, namespace: Namespace) -> list[Root]:
        """Returns the namespace's root, if it has one, and its private roots."""
        root = self.roots.get(namespace)
        return [*([] if root is None else [root]), *self._private_roots.get(namespace, ())]

    @property
    def namespaces(self) -> int:
        """Number of namespaces that have a root."""
        return len(self.roots.keys() | self._private_roots.keys())

    def find(self, tokens: Tokens, scope: Scope) -> tuple[Node, int] | None:
        """Finds the deepest node that agrees and how many tokens agree; None if the namespaces hold nothing."""
        root = self.roots.get(scope.first)
        if root is None or not scope.public_tokens:
            return None if root is None else descend(root, tokens)
        node, found = descend(root, tokens[: scope.public_tokens])
        private = self.private_root(node, found, scope)
        return (node, found) if private is None else descend(private, tokens)

    def private_root(self, node: Node, position: int, scope: Scope) -> Root | None:
        """Returns the root of the scope's tails at `position` of `node`. None: no public head with such tails ends
        there."""
        if not position or position != scope.public_tokens or node.end != position:
            return None
        return node.private_roots.get(scope.namespace)

    def pending(
        self, node: Node, found: int, resumable: int, tokens: Tokens, limit: int, scope: Scope
    ) -> Pending | None:
        """Finds the running request that will compute the most of `tokens` beyond position `resumable`.

        Positions that one tenant computes behind a public head count for that tenant alone.

        A model that resumes anywhere can take over at any position that the other request publishes. Otherwise only a
        request that has not yet reached the point of divergence helps: it is asked for a checkpoint there, but not
        beyond `limit`. Tokens that are cached but not resumable are worth waiting for as well.
        """
        anywhere = self.pools.resume_anywhere
        best: Pending | None = None
        for step in node.path():
            if step.end > found:
                continue
            for lease in self._leases_at.get(step, ()):
                if lease.num_tokens == lease.num_cached_tokens:
                    continue
                rest = slice(lease.num_cached_tokens, None)
                until = lease.num_cached_tokens + common_prefix(lease.tokens[rest], tokens[rest])
                if lease.scope != scope:
                    until = min(until, scope.public_tokens, lease.scope.public_tokens)
                if not anywhere:
                    until = min(until, limit)
                    if until <= lease.num_computed_tokens:
                        continue
                # A request that is behind the cached prefix (its prompt is scored, say) must first catch up.
                behind = max(0, resumable - lease.num_computed_tokens)
                if until - resumable > behind and (best is None or until > best.until):
                    best = Pending(lease, until)
        return best

    # ------------------------------------------------------------------------------ leases on the tree

    def ensure_root(self, namespace: Namespace) -> Root:
        """Returns the namespace's root; creates it if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self.pools.resume_anywhere, self._clock())
        return root

    def attach(self, lease: Lease, node: Node) -> None:
        """References every node on the path for the lease, which uses all of their blocks already."""
        self.version += 1
        now = self._clock()
        if lease.hit_tokens and not node.ref_count and not lease.is_idle:
            self._observe_reuse(now - node.last_used)
        lease.node = node
        self._join(node, lease)
        step: Node | None = node
        while step is not None:  # the same walk as `path`, but faster
            step.ref_count += 1
            step.last_used = now
            step.passed_by = False
            if not lease.is_idle:
                step.hits += 1
                if step.unasked:
                    self.counters.idle_hit_tokens += step.end - step.start
                    self._asked(step)
                if step.session != lease.session or step.grant is not None:
                    self._used_by(step, lease)
            if step.queue_ticket:
                self.queue.drop(step)
            step = step.parent
        turn = node.checkpoints.get(node.end)
        if turn is not None and turn.kind is CheckpointKind.USER:
            self._pass_by(node)
        if lease.resumed_from is not None and not lease.is_idle:
            lease.resumed_from.hits += 1
            lease.resumed_from.last_used = now
            if lease.resumed_from.grant is not None and not lease.resumed_from.grant.is_charged:
                self.ungrant(lease.resumed_from)
            self.counters.checkpoints_hit += 1
            if lease.resumed_from.kind is CheckpointKind.ANSWER:
                self._drop_answered_prompt(lease.resumed_from)

    def _asked(self, node: Node) -> None:
        """Makes a node that idle work has added an ordinary node, because a request uses it."""
        node.unasked = False
        self._count_unasked(node, node.start - node.end)

    def _count_unasked(self, node: Node, tokens: int) -> None:
        namespace = namespace_of(node)
        self.unasked_tokens[namespace] += tokens
        if not self.unasked_tokens[namespace]:
            del self.unasked_tokens[namespace]

    def hold(self, lease: Lease, node: Node) -> None:
        """References every node on the path for a pinned prefix. This does not count as a use of them."""
        self.version += 1
        lease.node = node
        self._join(node, lease)
        for step in node.path():
            step.ref_count += 1
            if step.queue_ticket:
                self.queue.drop(step)

    def _used_by(self, node: Node, lease: Lease) -> None:
        """Notes a use of a node: it is no private part of another session, and it is not demoted any more."""
        if node.session != lease.session:
            node.session = 0
        if node.grant is not None and not node.grant.is_charged:
            self.ungrant(node)

    def _drop_answered_prompt(self, answer: Checkpoint) -> None:
        """Drops the checkpoint at the end of a prompt after its conversation has resumed from the answer as given.

        The dropped checkpoint serves chat templates that remove reasoning from the history. The conversation's
        template does not."""
        assert answer.node is not None
        previous = answer.previous
        if (
            previous is not None
            and previous.kind in (CheckpointKind.PROMPT, CheckpointKind.TOOL)
            and previous.is_unused
        ):
            self.drop(previous)

    def _pass_by(self, turn: Node) -> None:
        """Lowers the worth of everything below a user turn at whose end a request resumes: the conversation has
        dropped the reasoning and tool calls that followed, and will rarely need them again."""
        stack = [child for child in turn.children.values() if not child.ref_count]
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
            stack.extend(child for child in node.children.values() if not child.ref_count)

    def _observe_reuse(self, idle_s: float) -> None:
        """Tells the policy that an unreferenced prefix is used again."""
        if self.pools.resume_anywhere and self.pools.share is None:
            return  # every entry has the same worth, and idle times change no order
        if self._policy.observe_reuse(idle_s):
            self.queue.renew()
            self.checkpoints.renew()

    def detach(self, lease: Lease) -> None:
        """Drops the lease's references to its path, and the blocks that its table replaces. Its table stays."""
        self.version += 1
        node = lease.node
        assert node is not None
        now = self._clock()
        self._leave(node, lease)
        lease.own_leaf = None
        step: Node | None = node
        while step is not None:  # the same walk as `path`, but faster
            step.ref_count -= 1
            step.last_used = now
            step = step.parent
        self._forget_if_empty(node)
        lease.node = None
        if lease.replaced:
            self.pool.unuse(np.array(lease.replaced, np.int32))
            lease.replaced = []
        self._queue_if_evictable(node)

    def _join(self, node: Node, lease: Lease) -> None:
        here = self._leases_at.get(node)
        if here is None:
            self._leases_at[node] = {lease: None}
        else:
            here[lease] = None

    def _leave(self, node: Node, lease: Lease) -> None:
        here = self._leases_at[node]
        del here[lease]
        if not here:
            del self._leases_at[node]

    def split(self, node: Node, position: int) -> Node:
        """Splits an edge; returns the upper half."""
        self.version += 1
        upper = split(node, position, self.pool, self.block_size)
        if self.resumable is not None:
            self.resumable.split(upper, node)
        if upper.grant is not None:
            self.ledger.divided(upper)
        if node.queue_ticket:
            self.queue.put(node)  # the checkpoint at its end may be the upper half's now
        return upper

    # -------------------------------------------------------------------------------------- publishing

    def publish(self, lease: Lease) -> None:
        """Makes positions num_cached_tokens … num_computed_tokens-1 findable; for all tenants in a public head."""
        self.version += 1
        node, position, end = lease.node, lease.num_cached_tokens, lease.num_computed_tokens
        assert node is not None
        came_from, head = node, lease.scope.public_tokens
        if position < head:
            node = self._publish_up_to(min(head, end), lease, node, position)
            position = min(head, end)
        if head and position == head < end:
            node = self._enter_private_root(lease, node)
        if position < end:
            node = self._publish_up_to(end, lease, node, position)
        if node is not came_from:
            self._move(lease, came_from, node)
        lease.num_cached_tokens = end
        if not self.pools.resume_anywhere:
            # The checkpoints of a long-running request count as used now, like the one that it leaves next.
            now = self._clock()
            for step in node.path():
                step.last_used = now
                step.passed_by = False  # a repeated request has computed it again

    def _enter_private_root(self, lease: Lease, node: Node) -> Root:
        """References the root of the lease's tails below the end of a public head."""
        assert node.end == lease.scope.public_tokens
        namespace = lease.scope.namespace
        root = node.private_roots.get(namespace)
        if root is None:
            root = Root(namespace, self.pools.resume_anywhere, self._clock(), node)
            node.private_roots[namespace] = root
            self._private_roots.setdefault(namespace, {})[root] = None
        root.ref_count += 1
        return root

    def _publish_up_to(self, end: int, lease: Lease, node: Node, position: int) -> Node:
        """Publishes positions `position` … end-1 below `node`; returns the node that ends there."""
        tokens = lease.computed_tokens[:end]
        while position < end:
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            agreed = position + common_prefix(child.tokens, tokens[position:])
            if agreed < child.end:
                child = self.split(child, agreed)
            self._adopt(lease, child)
            node, position = child, agreed
        return self._add(lease, node, position, tokens) if position < end else node

    def _move(self, lease: Lease, came_from: Node, node: Node) -> None:
        """Attaches the lease to `node`, below `came_from`. `_adopt` and `_add` have referenced the nodes between."""
        self._leave(came_from, lease)
        if lease.own_leaf is came_from:
            lease.own_leaf = None
        self._join(node, lease)
        lease.node = node

    def _adopt(self, lease: Lease, node: Node) -> None:
        """Replaces the lease's blocks by a node's blocks of the same tokens; returns the duplicates to the pool.

        A block that the lease will still write into remains its own; the lease then uses the node's block as well.
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
                # The block is split between two nodes. The lease uses it already, as the parent's last block, and
                # has it in its table from now on.
                lease.replaced.remove(int(theirs[0]))
                gained = gained[1:]
            if len(gained):
                self.pool.use(gained)
            own[:] = theirs  # a view of the lease's table
            assert node.parent is not None
            above = self._ancestors_inside_block(node.parent, node.start)
            if differs[0] and any(int(n.blocks[-1]) == int(duplicates[0]) for n in above):
                # The lease's block is the last one of a node that the lease references. The lease therefore keeps
                # using it, outside of its table.
                lease.replaced.append(int(duplicates[0]))
                duplicates = duplicates[1:]
            if len(duplicates):
                self.pool.unuse(duplicates)
            self.counters.duplicate_blocks += len(duplicates)
        if whole < len(node.blocks):
            last = int(node.blocks[-1])
            if last != int(lease.table[first + whole]) and last not in lease.replaced:
                self.pool.use(node.blocks[-1:])
                lease.replaced.append(last)
        ours = self._weak_references(lease, node.start, node.end) if node.windows else []
        for window, of_node, of_lease in zip(self.pools.windows, node.windows, ours, strict=True):
            gone = window.pool.resolve(of_node) < 0  # released by all others: the lease's blocks replace them
            of_node[gone] = of_lease[gone]
        node.ref_count += 1
        if not lease.is_idle:
            if node.unasked:
                self._asked(node)
            self._used_by(node, lease)
        self.queue.drop(node)

    def _weak_references(self, lease: Lease, start: int, end: int) -> list[WeakReferences]:
        """Returns weak references to the lease's window blocks of the positions start … end-1."""
        if not lease.windows:
            return []
        size = self.block_size
        first, last = start // size, -(-end // size)
        found = []
        for window, table in zip(self.pools.windows, lease.windows, strict=True):
            ids = table.ids[first:last]
            if len(ids) < last - first:  # the load ended inside a block that this family does not need
                ids = np.concatenate((ids, np.full(last - first - len(ids), NO_BLOCK, np.int32)))
            found.append(window.pool.weak_references(ids))
        return found

    def _refer_to_window_blocks(self, lease: Lease, node: Node, end: int) -> None:
        """Adds weak references for the new block indices before the lease's own edge grows to `end`. A block that was
        partly filled is still the same block."""
        if self.pools.windows:
            old_blocks = len(node.blocks)
            grown = self._weak_references(lease, node.start, end)
            node.windows = [
                np.concatenate((old, new[old_blocks:])) for old, new in zip(node.windows, grown, strict=True)
            ]

    def _add(self, lease: Lease, node: Node, position: int, tokens: Tokens) -> Node:
        """Adds positions `position` … of the lease, which the tree does not have, as a longer edge or a new leaf."""
        size, end = self.block_size, len(tokens)
        now = self._clock()
        if lease.own_leaf is node and node.ref_count == 1 and node.is_leaf:
            self._drop_private_roots(node)
            first_new = node.start // size + len(node.blocks)
            fresh = lease.table[first_new : -(-end // size)]
            self._refer_to_window_blocks(lease, node, end)
            if len(fresh):
                self.pool.hold(fresh)
                node.blocks = np.concatenate((node.blocks, fresh))
            node.tokens = np.concatenate((node.tokens, tokens[position:]))
            if node.unasked:
                self.counters.idle_tokens += end - position
                self._count_unasked(node, end - position)
            self.evicted.forget_below(node)
            if node.grant is not None:
                self.ledger.resized(node, (end - node.end) * self.token_bytes)
            node.end = end
            node.last_used = now
            if self.resumable is not None:
                self.resumable.grown(node)
            return node
        blocks = lease.table[position // size : -(-end // size)].copy()
        self.pool.hold(blocks)
        leaf = Node(
            node, position, tokens[position:].copy(), blocks, self._weak_references(lease, position, end), now
        )
        lease.own_leaf = leaf
        leaf.ref_count = 1
        if lease.is_idle:
            leaf.unasked = True
            self.counters.idle_tokens += end - position
            self._count_unasked(leaf, end - position)
        leaf.session = lease.session
        self.evicted.forget_run(node, int(tokens[position]))
        node.children[int(tokens[position])] = leaf
        if self.resumable is not None:
            self.resumable.grown(leaf)
        if position % size and not isinstance(node, Root) and node.ref_count == 1:
            self._merge_last_block(lease, node, blocks[:1])
        return leaf

    def _merge_last_block(self, lease: Lease, node: Node, copy: BlockIds) -> None:
        """Replaces the parent's partly filled last block by its new child's first one, which begins with a copy of
        it.

        A conversation whose turns end inside blocks then costs as many blocks as one long prompt. The old block may
        be the last of several short ancestors. It is replaced only if these are its only holders and no other lease
        references them. Their positions have the same content in the copy.
        """
        old = node.blocks[-1:].copy()
        block = int(old[0])
        if block == int(copy[0]):
            return
        holders = [n for n in self._ancestors_inside_block(node, node.end) if int(n.blocks[-1]) == block]
        if self.pool.holders(block) != len(holders) or any(n.ref_count != 1 for n in holders):
            return
        for holder in holders:
            self.pool.hold(copy)
            holder.blocks[-1] = copy[0]
            self.pool.unhold(old)
        if block in lease.replaced:
            lease.replaced.remove(block)
            self.pool.unuse(old)

    def _ancestors_inside_block(self, node: Node, position: int) -> Iterator[Node]:
        """Yields `node` and its ancestors, deepest first, as long as they end beyond the start of the block of
        `position`."""
        block_start = position // self.block_size * self.block_size
        step: Node | None = node
        while step is not None and step.end > block_start:
            if not isinstance(step, Root):
                yield step
            step = step.parent

    def retract(self, node: Node | None, first: int) -> None:
        """Removes the nodes from `node` up to position `first` that a released lease had published, as far as no
        other request uses them."""
        self.version += 1
        while node is not None and node.queue_ticket and node.start >= first:
            parent = node.parent
            self.queue.drop(node)
            self._remove(node)
            node = parent.parent if isinstance(parent, Root) else parent

    def forget(self, tokens: Tokens, scope: Scope, first: int) -> None:
        """Removes every node on the path of `tokens` that reaches beyond `first`, and all nodes below, as far as no
        lease uses them."""
        self.version += 1
        root = self.roots.get(scope.first)
        node = None if root is None else root.children.get(int(tokens[0]))
        while node is not None and node.end <= first:
            parent = self.private_root(node, node.end, scope) or node
            node = parent.children.get(int(tokens[node.end])) if node.end < len(tokens) else None
        if node is None:
            return
        for wrong in reversed([node, *walk(node)]):  # children first
            if wrong.queue_ticket:
                self.queue.drop(wrong)
                self._remove(wrong)

    # --------------------------------------------------------------------------------- queued requests

    def protect(self, match: Match) -> HitProtection:
        """Protects the hit until `unprotect`: it is evicted after all unprotected entries."""
        protection = HitProtection(self.version)
        if match.node is not None and match.length:
            for node in match.node.path():
                if not isinstance(node, Root):
                    protection.add(node)
        if match.checkpoint is not None:
            match.checkpoint.protections[protection] = None
            protection.checkpoint = match.checkpoint
        return protection

    def is_current(self, protection: HitProtection | None) -> bool:
        """Returns True if the protection covers everything that its request would hit now."""
        return protection is not None and protection.version == self.version

    def unprotect(self, protection: HitProtection) -> None:
        for node in protection.nodes:
            node.protections.pop(protection, None)
            if node.queue_ticket:
                self.queue.put(node)  # its rank has fallen
        protection.nodes.clear()
        if protection.checkpoint is not None:
            protection.checkpoint.protections.pop(protection, None)
            if protection.checkpoint.queue_ticket:
                self.checkpoints.put(protection.checkpoint)
            protection.checkpoint = None

    # ------------------------------------------------------------------------------------- checkpoints

    def keep(self, checkpoint: Checkpoint) -> None:
        """Adds a new checkpoint to its node. The caller has owned its rows until now."""
        self.version += 1
        node = checkpoint.node
        assert node is not None
        assert node.start < checkpoint.position <= node.end
        assert checkpoint.position not in node.checkpoints
        for window, held in zip(self.pools.windows, checkpoint.windows, strict=True):
            if len(held.ids):
                window.pool.hold(held.ids)
        if self.pools.states is not None:
            self.pools.states.pool.hold(self.pools.slot_rows(checkpoint.slot))
        node.checkpoints[checkpoint.position] = checkpoint
        if node.evicted_checkpoints:
            node.evicted_checkpoints = tuple(
                at for at in node.evicted_checkpoints if at != checkpoint.position
            )
        grant, checkpoint.grant = checkpoint.grant, None
        if grant is not None:
            self.ledger.set(checkpoint, grant, checkpoint.size_bytes)
        self.checkpoints.put(checkpoint)
        self.counters.checkpoints_taken += 1
        if self.resumable is not None:
            self.resumable.kept(checkpoint)
        for other in _neighbours(checkpoint):
            if other.grant is not None and other.is_spent:
                self.ledger.clear(other, other.size_bytes)
            self._rank_again(other)  # the new one passes it, or leaves it only the prefill between them
        if node.queue_ticket:
            self.queue.put(node)  # it may be worth more now

    def drop(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint and releases its rows. The K/V before it stay."""
        self.version += 1
        node = checkpoint.node
        assert node is not None
        self.checkpoints.drop(checkpoint)
        self.ledger.clear(checkpoint, checkpoint.size_bytes)
        del node.checkpoints[checkpoint.position]
        if self.resumable is not None:
            self.resumable.dropped(checkpoint, node)
        for protection in checkpoint.protections:
            protection.checkpoint = None
        checkpoint.protections.clear()
        checkpoint.node = None
        for window, held in zip(self.pools.windows, checkpoint.windows, strict=True):
            if len(held.ids):
                window.pool.unhold(held.ids)
        if self.pools.states is not None:
            self.pools.states.pool.unhold(self.pools.slot_rows(checkpoint.slot))
        if node.queue_ticket:
            self.queue.put(node)  # its rank may have fallen

    def _rank_again(self, checkpoint: Checkpoint) -> None:
        """Queues a checkpoint, and the leaf that ends there, again, because the checkpoint's rank may have fallen."""
        node = checkpoint.node
        assert node is not None
        if checkpoint.queue_ticket:
            self.checkpoints.put(checkpoint)
        if node.queue_ticket:
            self.queue.put(node)

    def note_boundaries(self, node: Node, positions: Iterable[int]) -> None:
        """Marks the checkpoints of a path that are boundaries of the last request. Its conversation resumes at no
        other marks or user turns."""
        near = {position - before for position in positions for before in range(NEAR_TOKENS)}
        for step in node.path():
            for position, checkpoint in step.checkpoints.items():
                if checkpoint.is_boundary != (position in near):
                    checkpoint.is_boundary = position in near
                    if checkpoint.queue_ticket:
                        self.checkpoints.put(checkpoint)  # its rank may have fallen

    def reference(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint from eviction while a lease resumes from it, until the lease has computed something."""
        checkpoint.ref_count += 1
        self.checkpoints.drop(checkpoint)

    def unreference(self, checkpoint: Checkpoint) -> None:
        checkpoint.ref_count -= 1
        if checkpoint.node is not None and not checkpoint.ref_count:
            self.checkpoints.put(checkpoint)

    def rank(self, checkpoint: Checkpoint) -> Rank:
        """Returns the rank of a checkpoint, which need not be on its node yet."""
        return rank_of(checkpoint, self._policy)

    # --------------------------------------------------------------------------------------- retention

    def size_bytes(self, entry: Node | Checkpoint) -> int:
        """Returns the bytes of an entry that its tenant's share pays for. Halves of a split node together pay as much
        as before, also where both hold the block between them."""
        if isinstance(entry, Checkpoint):
            return entry.size_bytes
        return (entry.end - entry.start) * self.token_bytes

    def grant(self, entry: Node | Checkpoint, grant: Grant) -> None:
        """Gives an entry a grant, in place of the one that it has."""
        self.ledger.set(entry, grant, self.size_bytes(entry))
        self._queue_again(entry)

    def ungrant(self, entry: Node | Checkpoint) -> None:
        """Takes an entry's grant away."""
        self.ledger.clear(entry, self.size_bytes(entry))
        self._queue_again(entry)

    def _queue_again(self, entry: Node | Checkpoint) -> None:
        if not entry.queue_ticket:
            return
        if isinstance(entry, Checkpoint):
            self.checkpoints.put(entry)
        else:
            self.queue.put(entry)

    def log_value(self, entry: Node | Checkpoint) -> float:
        """Returns the logarithm of the time that a byte of an entry saves, at the price of 1."""
        return self._policy.log_value(self._policy.rank(entry), self._clock())

    def expire_grants(self) -> None:
        """Takes away the grants that have expired: these entries have their ordinary rank again. Entries whose next
        use is overdue keep the rest of theirs."""
        now = self._clock()
        for entry in self.ledger.expiry.expired(now):
            assert isinstance(entry, Node | Checkpoint)
            grant = entry.grant
            assert grant is not None
            if grant.end(entry.used_at) > now:
                self.grant(entry, grant.overdue)
                continue
            if grant.is_charged:
                self.counters.expired_grants += 1
            self.ungrant(entry)

    # ---------------------------------------------------------------------------------------- eviction

    def make_room(self, rows: Rows) -> None:
        """Evicts until so many rows of each pool are free. The caller has checked that they are available."""
        if not self.pools.has_free(rows):
            self.expire_grants()
        while not self.pools.has_free(rows):
            evicted = self._evict(rows, None)
            assert evicted, "rows counted as cached could not be evicted"

    def make_room_below(self, rows: Rows, rank: Rank) -> bool:
        """Evicts like `make_room`, but only entries ranked below `rank`. Returns False if that frees too little."""
        if not self.pools.has_free(rows):
            self.expire_grants()
        while not self.pools.has_free(rows):
            if not self._evict(rows, rank):
                return False
        return True

    def evict_checkpoints(self, size_bytes: int) -> None:
        """Evicts checkpoints, the least valuable first, until they have freed `size_bytes` of memory that can be
        returned, or until no checkpoint can be evicted."""
        aim = max(0, self.pools.returnable_bytes - size_bytes)
        while self.pools.returnable_bytes > aim and self.checkpoints.peek() is not None:
            self._evict_first(by_leaf=False, missing_blocks=0, missing_bytes=0)

    def unasked_rank(self) -> Rank:
        """Returns the rank that idle work gives to the prefix that it adds now."""
        return False, False, 0, 0, True, self._policy.rank(UnaskedEntry(self._clock()))

    def _evict(self, rows: Rows, below: Rank | None) -> bool:
        """Makes one step towards `rows` free rows: evicts the tail of a leaf or a checkpoint, whichever ranks
        lower."""
        full = self.pools.full
        missing_bytes = self.pools.missing_bytes(rows)
        missing_blocks = rows.full - full.pool.free_blocks
        leaf = checkpoint = None
        if missing_blocks > 0 or (missing_bytes and full.row_bytes):
            leaf = self.queue.peek()
        if missing_blocks <= 0:  # otherwise only leaves help, and they free the other rows as well
            checkpoint = self.checkpoints.peek()
        by_leaf = leaf is not None and (checkpoint is None or leaf <= checkpoint)
        rank = leaf if by_leaf else checkpoint
        is_ours = rank is not None and (below is None or rank < below)
        share = self.pools.share
        if share is not None and missing_bytes and missing_blocks <= 0:
            limit = rank if is_ours else below
            if share.evict_elsewhere(
                missing_bytes, None if limit is None else share.valued(self._value(limit))
            ):
                return True
        if is_ours:
            self._evict_first(by_leaf, missing_blocks, missing_bytes, below)
        return is_ours

    def _evict_first(
        self, by_leaf: bool, missing_blocks: int, missing_bytes: int, below: Rank | None = None
    ) -> None:
        """Evicts the tail of the first leaf, which `peek` has just found, or else the first checkpoint.

        If blocks are missing, only leaves help. Further leaves that rank below `below` are evicted in the same call,
        because releasing many blocks at once costs as much as releasing a few.
        """
        self.version += 1
        if by_leaf:
            full = self.pools.full
            wanted = max(1, missing_blocks, -(-missing_bytes // full.row_bytes) if full.row_bytes else 0)
            gone: list[BlockIds] = []
            is_first = True
            while is_first or self._may_follow(missing_blocks, below):
                is_first = False
                evicted = self._trim(self.queue.pop(), wanted)
                wanted, missing_blocks = max(1, wanted - len(evicted)), missing_blocks - len(evicted)
                gone.append(evicted)
            self.pool.unhold(gone[0] if len(gone) == 1 else np.concatenate(gone))
            return
        chosen = self.checkpoints.pop()
        if self.write_back is not None:
            self.write_back.add_checkpoint(chosen)
        node = chosen.node
        assert node is not None
        node.evicted_checkpoints = (*node.evicted_checkpoints, chosen.position)[-MAX_CHECKPOINTS:]
        self.drop(chosen)
        self.counters.checkpoints_evicted += 1

    def _may_follow(self, missing_blocks: int, below: Rank | None) -> bool:
        """Returns whether another leaf is evicted in the same call, because blocks are still missing."""
        if missing_blocks <= 0:
            return False
        rank = self.queue.peek()
        return rank is not None and (below is None or rank < below)

    # ------------------------------------------------------------------- for the caches of a shared budget

    @property
    def owned_bytes(self) -> int:
        return self.pools.owned_bytes

    @property
    def cached_bytes(self) -> int:
        return self.pools.cached_bytes

    @property
    def backed_bytes(self) -> int:
        return self.pools.backed_bytes

    def least_value(self) -> Value | None:
        """Returns the value of the leaf or checkpoint to evict next; None: there is none. Ends expired grants."""
        self.expire_grants()
        first = self._first()
        return None if first is None else self._value(first[0])

    def evict_least(self, missing_bytes: int) -> None:
        """Makes one step towards so many free bytes: evicts the tail of a leaf or a checkpoint."""
        first = self._first()
        assert first is not None
        self._evict_first(first[1], 0, missing_bytes)

    def _first(self) -> tuple[Rank, bool] | None:
        """Returns the rank of the entry with memory to evict next, and whether it is a leaf."""
        leaf = self.queue.peek() if self.pools.full.row_bytes else None
        checkpoint = self.checkpoints.peek()
        if leaf is not None and (checkpoint is None or leaf <= checkpoint):
            return leaf, True
        return None if checkpoint is None else (checkpoint, False)

    def _value(self, rank: Rank) -> Value:
        return *rank[:5], self._policy.log_value(rank[5], self._clock())

    # ------------------------------------------------------------------------------------------ clearing

    def clear(self) -> None:
        """Drops everything that no lease references, and the history of evictions."""
        self.version += 1
        while self.checkpoints.peek() is not None:
            self.drop(self.checkpoints.pop())
        while self.queue.peek() is not None:
            self._remove(self.queue.pop())
        private = [root for roots in self._private_roots.values() for root in roots]
        for root in [*private, *self.roots.values()]:
            self._forget_evictions(root)

    def clear_namespace(self, namespace: Namespace) -> None:
        """Clears one namespace: O(its nodes). The private tails of its public heads are dropped as well."""
        self.version += 1
        for root in self.roots_of(namespace):
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

    def _trim(self, leaf: Node, blocks: int) -> BlockIds:
        """Evicts the last `blocks` blocks of a leaf, or the whole leaf if it has no more blocks.

        Returns the blocks that the caller releases. No two calls return the same block.

        Only the tail is evicted, because the rest is still a prefix that a later request may need. Blocks behind the
        last checkpoint are evicted before it. A checkpoint is evicted together with the K/V before it.
        """
        size, kept, was_retained = self.block_size, len(leaf.blocks) - blocks, leaf.is_retained
        end = (leaf.start // size + kept) * size
        last = leaf.deepest_checkpoint
        if last is not None and end <= -(-last.position // size) * size and last.position < leaf.end:
            # The leaf is cut at the exact position: only then is the rest worth as much as the checkpoint.
            kept, end = -(-last.position // size) - leaf.start // size, last.position
        if kept > 0:
            self._write_back(leaf, end)
            gone = leaf.blocks[kept:]
            self._remember_evicted(leaf, end, leaf, was_retained)
            self._drop_checkpoints(leaf, end)
            self._drop_private_roots(leaf)
            leaf.blocks = leaf.blocks[:kept].copy()
            leaf.windows = [references[:kept].copy() for references in leaf.windows]
            leaf.tokens = kept_part(leaf.tokens[: end - leaf.start])
            self.counters.evicted_tokens += leaf.end - end
            if leaf.unasked:
                self.counters.idle_evicted_tokens += leaf.end - end
                self._count_unasked(leaf, end - leaf.end)
            self.counters.evicted_retained_tokens += was_retained * (leaf.end - end)
            if leaf.grant is not None:
                self.ledger.resized(leaf, (end - leaf.end) * self.token_bytes)
            leaf.end = end
            if self.resumable is not None:
                self.resumable.trimmed(leaf)
            self.counters.evicted_blocks += len(gone)
            self.queue.put(leaf)
            return gone
        assert leaf.parent is not None
        self._write_back(leaf, leaf.start)
        self._remember_evicted(leaf.parent, leaf.start, leaf, was_retained)
        self.counters.evicted_tokens += leaf.end - leaf.start
        self.counters.idle_evicted_tokens += leaf.unasked * (leaf.end - leaf.start)
        self.counters.evicted_retained_tokens += was_retained * (leaf.end - leaf.start)
        self.counters.evicted_blocks += len(leaf.blocks)
        return self._unlink(leaf)

    def _write_back(self, leaf: Node, after: int) -> None:
        """Queues the rows of the leaf beyond position `after` for the tier below, before they are evicted. A block
        that is kept in part is written whole: deeper records continue from its end."""
        if self.write_back is not None:
            self.write_back.add_blocks(leaf, after // self.block_size - leaf.start // self.block_size)
            for position, checkpoint in leaf.checkpoints.items():
                if position > after:
                    self.write_back.add_checkpoint(checkpoint)

    def _remove(self, leaf: Node) -> None:
        """Takes an unreferenced leaf, which is not queued any more, out of the tree, and releases its blocks."""
        self.pool.unhold(self._unlink(leaf))

    def _unlink(self, leaf: Node) -> BlockIds:
        """Takes an unreferenced leaf, which is not queued any more, out of the tree.

        Returns the blocks that the caller releases.
        """
        parent = leaf.parent
        assert parent is not None
        assert leaf.is_leaf
        assert not leaf.ref_count
        self.evicted.forget_below(leaf)
        if leaf.unasked:
            self._count_unasked(leaf, leaf.start - leaf.end)
        self._drop_private_roots(leaf)
        self._drop_checkpoints(leaf, leaf.start)
        if self.resumable is not None:
            self.resumable.removed(leaf)
        self.ledger.clear(leaf, self.size_bytes(leaf))
        del parent.children[int(leaf.tokens[0])]
        for protection in leaf.protections:
            protection.nodes.remove(leaf)
        leaf.protections.clear()
        leaf.parent = None
        if len(parent.children) < 2 and not self.pools.resume_anywhere:
            # The parent is now a leaf or has one child, so its last checkpoint may count as passed.
            above = parent.checkpoint_up_to(parent.end)
            if above is not None:
                self._rank_again(above)
        blocks = leaf.blocks
        if leaf.start % self.block_size:  # the node above may hold the first one as well
            self.pool.unhold(blocks[:1])
            blocks = blocks[1:]
        # An object that still points at the node must not keep its arrays alive.
        leaf.tokens, leaf.blocks, leaf.windows = NO_TOKENS, NO_BLOCKS, []
        head = parent.parent if isinstance(parent, Root) else None  # a leaf now, if this was its last tail
        self._forget_if_empty(parent)
        self._queue_if_evictable(parent if head is None else head)
        return blocks

    def _drop_checkpoints(self, node: Node, after: int) -> None:
        """Drops the node's checkpoints behind position `after`."""
        if not node.checkpoints:
            return
        for position in [p for p in node.checkpoints if p > after]:
            self.drop(node.checkpoints[position])
            self.counters.checkpoints_evicted += 1

    def _queue_if_evictable(self, node: Node) -> None:
        if node.ref_count == 0 and not isinstance(node, Root) and node.is_leaf:
            self.queue.put(node)

    def _remember_evicted(self, node: Node, end: int, leaf: Node, was_retained: bool) -> None:
        """Adds the tail of `leaf` from position `end` on to the history below `node`, with its checkpoints and the
        runs that followed the leaf."""
        deeper, checkpoints = self.evicted.take_below(leaf)
        if leaf.checkpoints or leaf.evicted_checkpoints:
            positions = sorted({*leaf.evicted_checkpoints, *leaf.checkpoints})
            checkpoints = (*(at for at in positions if at > end), *checkpoints)
            leaf.evicted_checkpoints = tuple(at for at in leaf.evicted_checkpoints if at <= end)
        tail = leaf.tokens if end == leaf.start else leaf.tokens[end - leaf.start :]
        for forgotten in self.evicted.remember(node, tail, deeper, checkpoints, was_retained):
            self._forget_if_empty(forgotten)

    def _forget_if_empty(self, node: Node) -> None:
        """Drops a root below which nothing is cached or in use, unless it was emptied lately and has a history."""
        if not isinstance(node, Root) or not node.is_empty:
            return
        self._emptied.pop(node, None)
        if self.evicted.runs_below(node):
            self._emptied[node] = None
            while len(self._emptied) > MAX_EMPTY_ROOTS:
                oldest = next(iter(self._emptied))
                del self._emptied[oldest]
                if oldest.is_empty:
                    self._drop_root(oldest)
        else:
            self._drop_root(node)

    def _drop_root(self, root: Root) -> None:
        """Takes an empty root out of the tree, and the history of evictions below it."""
        self.evicted.forget_below(root)
        self._emptied.pop(root, None)
        if root.parent is None:
            self.roots.pop(root.namespace, None)
            return
        root.parent.private_roots.pop(root.namespace, None)
        of_namespace = self._private_roots.get(root.namespace, {})
        of_namespace.pop(root, None)
        if not of_namespace:
            self._private_roots.pop(root.namespace, None)

    def _drop_private_roots(self, leaf: Node) -> None:
        """Drops the roots below the end of a leaf, which are empty, before its end moves or it is removed."""
        if not leaf.private_roots:
            return
        for root in list(leaf.private_roots.values()):
            self._drop_root(root)

    def check(self) -> None:
        """Asserts the invariants of every node and every root."""
        unasked: Counter[Namespace] = Counter()
        for node in self.nodes():
            self._check_node(node)
            if node.unasked:
                unasked[namespace_of(node)] += node.end - node.start
        assert unasked == self.unasked_tokens
        assert len(self._emptied) <= MAX_EMPTY_ROOTS
        private = [(node, root) for node in self.nodes() for root in node.private_roots.values()]
        assert len(private) == sum(map(len, self._private_roots.values()))
        for node, root in private:
            assert root.parent is node
            assert root.start == root.end == node.end
            assert root in self._private_roots[root.namespace]
            assert node.private_roots[root.namespace] is root
            assert root.ref_count == sum(child.ref_count for child in root.children.values())
            above = next(step for step in node.path() if isinstance(step, Root))
            assert above.namespace.is_public, "a private root below a private node"
        for namespace, root in self.roots.items():
            assert root.namespace == namespace
            assert not root.private_roots, "a public head without tokens"
        for root in [*self.roots.values(), *(root for _, root in private)]:
            is_remembered = bool(self.evicted.runs_below(root)) and root in self._emptied
            assert not root.is_empty or is_remembered, "a namespace outlives its cached prefixes"

    def _check_node(self, node: Node) -> None:
        size = self.block_size
        assert node.end - node.start == len(node.tokens) > 0
        assert len(node.blocks) == -(-node.end // size) - node.start // size
        assert len(node.windows) == len(self.pools.windows)
        assert all(len(references) == len(node.blocks) for references in node.windows)
        for position, checkpoint in node.checkpoints.items():
            assert checkpoint.node is node
            assert checkpoint.position == position
            assert node.start < position <= node.end
            assert bool(checkpoint.queue_ticket) == (not checkpoint.ref_count)
        assert node.parent is not None
        assert node.parent.end == node.start
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.ref_count == len(self.leases_at(node)) + sum(child.ref_count for child in below(node))
        evictable = node.is_leaf and not node.ref_count
        assert bool(node.queue_ticket) == evictable, (
            f"{node} is queued for eviction: {bool(node.queue_ticket)}"
        )


def _neighbours(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yields the checkpoints that are worth less with this one: the next shallower on its path, and the next deeper
    on its node or on each branch below."""
    node, position = checkpoint.node, checkpoint.position
    assert node is not None
    shallower = checkpoint.previous
    if shallower is not None:
        yield shallower
    deeper = [p for p in node.checkpoints if p > position]
    if deeper:
        yield node.checkpoints[min(deeper)]
        return
    stack = list(below(node))
    while stack:
        step = stack.pop()
        if step.checkpoints:
            yield step.checkpoints[min(step.checkpoints)]
        else:
            stack.extend(below(step))
