"""The cache's invariants, recounted from its structures. For tests and idle time: O(blocks + nodes + leases)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootstock.cache.checkpoints import Checkpoint
from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.lease import Lease
from rootstock.cache.pools import Pools
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Node, Root, walk


def check_cache(pools: Pools, tree: PrefixTree, leases: Sequence[Lease]) -> None:
    """Asserts that every row of every pool is owned by exactly those who should own it, and that nodes, checkpoints
    and leases say the truth about themselves."""
    pools.check()
    tree.check()
    count = _Count(pools)
    for root in tree.roots.values():
        tips = [lease.tip for lease in leases if lease.tip is not None]
        assert root.pins == sum(list(tip.path())[-1] is root for tip in tips)
        count.nodes_below(root)
    for lease in leases:
        count.lease(lease)
    count.compare()


class _Count:
    """Who holds and who uses each row of each pool, as nodes, checkpoints and leases tell it."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._tails = range(len(pools.tails))
        self._held = [np.zeros(pool.pool.total_blocks, np.int32) for pool in pools.every]
        self._used = [np.zeros(pool.pool.total_blocks, np.int32) for pool in pools.every]

    def nodes_below(self, root: Root) -> None:
        for node in walk(root):
            self._held[0][node.blocks] += 1
            for checkpoint in node.checkpoints.values():
                self._check_checkpoint(checkpoint, node, root.namespace)
                for i in self._tails:
                    self._held[1 + i][checkpoint.tails[i].ids] += 1
                if self._pools.states is not None:
                    self._held[-1][checkpoint.slot] += 1

    def lease(self, lease: Lease) -> None:
        owned = [*lease.table.tolist(), *lease.replaced]
        assert len(set(owned)) == len(owned), "a lease owns a block twice"
        self._used[0][owned] += 1
        for i in self._tails:
            self._used[1 + i][lease._tails[i].owned] += 1
            source = lease.sources[i] if lease.sources else None
            if source is not None:
                self._used[1 + i][source.ids] += 1
        if self._pools.states is not None:
            self._used[-1][lease.slot] += 1
            if lease.resumed_from is not None:
                self._used[-1][lease.resumed_from.slot] += 1
        if lease.tip is not None:
            assert lease.tip.end == lease.published
            assert lease in lease.tip.tips
            needed = {int(b) for node in lease.tip.path() for b in node.blocks}
            assert needed <= set(owned), "a lease does not own a block of a node that it pins"

    def compare(self) -> None:
        for pool, held, used in zip(self._pools.every, self._held, self._used, strict=True):
            pool_held, pool_used = pool.pool.owners()
            name = "full" if pool.family is None else pool.family.name
            assert (held == pool_held).all(), f"{name}: rows held do not match the tree"
            assert (used == pool_used).all(), f"{name}: rows used do not match the leases"

    def _check_checkpoint(self, checkpoint: Checkpoint, node: Node, namespace: Namespace) -> None:
        size = self._pools.block_size
        tokens = np.concatenate([step.tokens for step in reversed(list(node.path()))])
        assert checkpoint.digest == prefix_digest(namespace, tokens[: checkpoint.position])
        for tail, held in zip(self._pools.tails, checkpoint.tails, strict=True):
            start = tail.family.tail_start(checkpoint.position)
            if start < checkpoint.position:
                assert held.first == start // size
                assert held.first + len(held.ids) == -(-checkpoint.position // size)
