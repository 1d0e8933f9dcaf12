"""Integrity check: recounts the cache's invariants from its structures. For tests and idle time: O(blocks + nodes +
leases)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootstock.cache.keys import prefix_digest
from rootstock.cache.lease import Lease
from rootstock.cache.pools import Pools
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Checkpoint, Node, namespace_of, walk
from rootstock.cache.resumable_blocks import PREFIXES, ResumableBlocks, prefix_keys
from rootstock.cache.retention.grants import Level
from rootstock.cache.write_back import path_tokens


def check_cache(pools: Pools, tree: PrefixTree, leases: Sequence[Lease]) -> None:
    """Asserts that every row of every pool has exactly the owners that nodes, checkpoints and leases name, and that
    their own fields agree with each other."""
    pools.check()
    tree.check()
    count = _Count(pools)
    attached = [lease.node for lease in leases if lease.node is not None]
    for root in tree.roots.values():
        assert root.ref_count == sum(list(node.path())[-1] is root for node in attached)
    for node in tree.nodes():
        count.node(node)
    _check_retention(tree)
    if tree.resumable is not None:
        _check_resumable(tree, tree.resumable)
    tree.queue.check()
    tree.checkpoints.check()
    for lease in leases:
        count.lease(lease)
        assert lease.node is None or lease in tree.leases_at(lease.node)
    count.compare()


def _check_retention(tree: PrefixTree) -> None:
    """Recounts the bytes of each tenant's retained entries."""
    charged: dict[str, dict[Level, int]] = {}
    for node in tree.nodes():
        entries: list[Node | Checkpoint] = [node, *node.checkpoints.values()]
        for entry in entries:
            grant, size = entry.grant, tree.size_bytes(entry)
            assert (grant is not None) == bool(entry.grant_ticket)
            if grant is None or not grant.is_charged or not size:
                continue
            levels = charged.setdefault(grant.tenant, {})
            levels[grant.level] = levels.get(grant.level, 0) + size
    tree.ledger.check(charged)


def _check_resumable(tree: PrefixTree, resumable: ResumableBlocks) -> None:
    """Recounts the blocks up to which a request can resume from the nodes and checkpoints alone."""
    size, prefixes, at_checkpoints = tree.block_size, set[int](), set[int]()
    for node in tree.nodes():
        scope, tokens = path_tokens(node, node.end)
        if scope.namespace.is_private:
            continue
        keys = prefix_keys(tokens, scope, size).tolist()
        resumable_end = max(node.checkpoints, default=node.start)
        if tree.pools.resume_anywhere or any(deeper.checkpoints for deeper in walk(node)):
            resumable_end = node.end
        prefixes.update(keys[node.start // size : resumable_end // size])
        at_checkpoints.update(keys[at // size - 1] for at in node.checkpoints if at >= size)
    assert resumable.keys(PREFIXES) == prefixes
    assert tree.pools.resume_anywhere or resumable.keys(PREFIXES + 1) == at_checkpoints


class _Count:
    """Holders and users of each row of each pool, as nodes, checkpoints and leases name them."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._windows = range(len(pools.windows))
        self._held = [np.zeros(pool.pool.total_blocks, np.int32) for pool in pools.every]
        self._used = [np.zeros(pool.pool.total_blocks, np.int32) for pool in pools.every]

    def node(self, node: Node) -> None:
        self._held[0][node.blocks] += 1
        for checkpoint in node.checkpoints.values():
            self._check_checkpoint(checkpoint, node)
            for i in self._windows:
                self._held[1 + i][checkpoint.windows[i].ids] += 1
            if self._pools.states is not None:
                self._held[-1][checkpoint.slot] += 1

    def lease(self, lease: Lease) -> None:
        owned = [*lease.table.tolist(), *lease.replaced]
        assert len(set(owned)) == len(owned), "a lease owns a block twice"
        self._used[0][owned] += 1
        for i in self._windows:
            self._used[1 + i][lease.windows[i].owned] += 1
            source = lease.copy_sources[i] if lease.copy_sources else None
            if source is not None:
                self._used[1 + i][source.ids] += 1
        if self._pools.states is not None:
            self._used[-1][self._pools.slot_rows(lease.slot)] += 1  # a pin has no working state
            self._used[-1][self._pools.slot_rows(lease.draft_slot)] += 1
            if lease.resumed_from is not None:
                self._used[-1][lease.resumed_from.slot] += 1
        if lease.node is not None:
            assert lease.node.end == lease.num_cached_tokens
            own = namespace_of(lease.node)
            assert own == lease.scope.of(lease.num_cached_tokens) or not lease.num_cached_tokens
            needed = {int(b) for node in lease.node.path() for b in node.blocks}
            assert needed <= set(owned), "a lease does not own a block of a node that it references"

    def compare(self) -> None:
        for pool, held, used in zip(self._pools.every, self._held, self._used, strict=True):
            pool_held, pool_used = pool.pool.owners()
            name = "full" if pool.family is None else pool.family.name
            assert (held == pool_held).all(), f"{name}: rows held do not match the tree"
            assert (used == pool_used).all(), f"{name}: rows used do not match the leases"

    def _check_checkpoint(self, checkpoint: Checkpoint, node: Node) -> None:
        size = self._pools.block_size
        namespace = namespace_of(node)
        tokens = np.concatenate([step.tokens for step in reversed(list(node.path()))])
        assert checkpoint.digest == prefix_digest(namespace, tokens[: checkpoint.position])
        for window, held in zip(self._pools.windows, checkpoint.windows, strict=True):
            start = window.family.first_visible(checkpoint.position)
            if start < checkpoint.position:
                assert held.first == start // size
                assert held.first + len(held.ids) == -(-checkpoint.position // size)
