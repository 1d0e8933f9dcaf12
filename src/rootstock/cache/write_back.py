"""What memory gives up, named for the tier below, so that nothing is stored twice and nothing under a wrong name.

Eviction tells the spill what goes, while its rows still hold it. The engine executes the stores before anything is
written to those rows.
"""

from __future__ import annotations

import numpy as np
import xxhash

from rootstock.cache.checkpoints import Checkpoint
from rootstock.cache.families import ChunkedAttention
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Lease
from rootstock.cache.plan import RowPart, Store
from rootstock.cache.pools import FamilyPool, Pools
from rootstock.cache.radix_node import Node, Root
from rootstock.cache.record_identity import Identity, Kind, RecordKey, identify
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import NO_SLOT, BlockIds, SlotId, Tokens


class WriteBackQueue:
    """`through`: what is published is stored at once, so that evictions cost nothing and a crash loses less."""

    def __init__(self, pools: Pools, stored: StoredIndex, *, through: bool = False) -> None:
        self.stored = stored
        self.through = through
        self.is_open = True  # else nothing that goes can be stored, and nothing is said of it
        self._pools = pools
        self._waiting: dict[RecordKey, Store] = {}
        self._used: list[RecordKey] = []
        self._wrong: list[RecordKey] = []

    def take(self) -> tuple[Store, ...]:
        """What is to be stored since this was last asked, and has not been since."""
        if not self._waiting:
            return ()
        stores, self._waiting = tuple(self._waiting.values()), {}
        return stores

    def forget(self, namespace: Namespace | None = None) -> None:
        """Drops the stores that wait, all of them or those of a namespace."""
        of = None if namespace is None else namespace.digest()
        self._waiting = {
            key: store
            for key, store in self._waiting.items()
            if of is not None and store.identity.namespace != of
        }

    def take_used(self) -> list[RecordKey]:
        """Records of what was in use in memory until now."""
        used, self._used = self._used, []
        return used

    def take_wrong(self) -> list[RecordKey]:
        """Records of what must not be believed any more."""
        wrong, self._wrong = self._wrong, []
        return wrong

    # ---------------------------------------------------------------------------------- what goes

    def blocks(self, node: Node, kept: int = 0) -> None:
        """The node's blocks but for the first `kept` are about to go. Reasoning that a conversation dropped is not
        worth a place on the disk."""
        full = self._pools.full
        if not self.is_open or full.family is None or node.passed_by or kept >= len(node.blocks):
            return
        namespace, tokens = path_tokens(node, node.end)
        self._blocks(namespace, tokens, node.start // self._size + kept, node.blocks[kept:], full)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """It is about to be dropped."""
        node = checkpoint.node
        assert node is not None
        if self.is_open and not node.passed_by:
            namespace, tokens = path_tokens(node, checkpoint.position)
            self._checkpoint(namespace, tokens, checkpoint, checkpoint.slot)

    def node(self, node: Node) -> None:
        """All of a node that stays: its blocks, but for a last one that children begin with, and its checkpoints."""
        full = self._pools.full
        if node.passed_by:
            return
        if full.family is not None:
            end = node.end if not node.children else node.end - node.end % self._size
            if end > node.start:
                namespace, tokens = path_tokens(node, end)
                self._blocks(namespace, tokens, node.start // self._size, node.blocks, full)
        for checkpoint in node.checkpoints.values():
            self.checkpoint(checkpoint)

    # ------------------------------------------------------------------------------- what is published

    def published(self, lease: Lease, first: int, *, at_end: bool = False) -> None:
        """Positions from `first` on can be found now. Blocks are stored when they are full, or at the lease's end."""
        full = self._pools.full
        if not (self.through and self.is_open) or full.family is None:
            return
        size, end = self._size, lease.published
        if not at_end:
            end -= end % size
        if first // size * size < end:
            blocks = slice(first // size, -(-end // size))
            self._blocks(lease.namespace, lease.tokens[:end], blocks.start, lease.table[blocks], full)

    def left(self, checkpoint: Checkpoint, lease: Lease) -> None:
        """A checkpoint was left where the lease is now: its working state is what the checkpoint's will be."""
        if self.through and self.is_open:
            self._checkpoint(lease.namespace, lease.tokens[: checkpoint.position], checkpoint, lease.slot)

    def distrust(
        self, tokens: Tokens, namespace: Namespace, first: int, *, all_that_follows: bool = False
    ) -> None:
        """What was computed of these tokens from position `first` on may be wrong."""
        if all_that_follows:
            # Others went on from it, with tokens that nobody has at hand: rather too much than too little.
            keys = self.stored.keys_beyond(namespace, first)
        else:
            keys = self.stored.keys_along(tokens, namespace, first)
        for key in keys:
            self._wrong.append(key)
            self.stored.remove(key)
        self._waiting = {
            key: store
            for key, store in self._waiting.items()
            if store.identity.end <= first or not _is_prefix_of(store.identity, tokens, namespace)
        }

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _size(self) -> int:
        return self._pools.block_size

    def _checkpoint(self, namespace: Namespace, tokens: Tokens, checkpoint: Checkpoint, slot: SlotId) -> None:
        """What lets every family resume after `tokens`, with the state in `slot`."""
        if self._is_whole(checkpoint):
            for pool, tail in zip(self._pools.tails, checkpoint.tails, strict=True):
                self._blocks(namespace, tokens, tail.first, tail.ids, pool)
            self._state(namespace, tokens, slot)

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        """Whether its blocks hold all their positions. Where a chunk begins inside a block, what lies before it there
        may never have been written; records begin at blocks, so that cannot be stored."""
        for pool, tail in zip(self._pools.tails, checkpoint.tails, strict=True):
            inside = pool.family.tail_start(checkpoint.position) % self._size
            if isinstance(pool.family, ChunkedAttention) and inside and len(tail.ids):
                return False
        return True

    def _blocks(
        self, namespace: Namespace, tokens: Tokens, first: int, ids: BlockIds, pool: FamilyPool
    ) -> None:
        """Of block indices `first` …, the last of which is filled as far as `tokens` go."""
        assert pool.family is not None
        if namespace.is_private:
            return
        size, raw = self._size, np.ascontiguousarray(tokens, "<i4").data.cast("B")
        of_namespace, dtype = namespace.digest(), self.stored.dtype_of(namespace)
        h = xxhash.xxh3_128(of_namespace)
        h.update(raw[: first * size * 4])
        for i, block in enumerate(ids.tolist(), first):
            parent = h.digest()
            start, end = i * size, min((i + 1) * size, len(tokens))
            if end <= start:
                return
            h.update(raw[start * 4 : end * 4])
            own = np.array(tokens[start:end], np.int32)
            identity = Identity(
                of_namespace,
                pool.family.name,
                pool.family.layers,
                dtype,
                Kind.BLOCKS,
                start,
                own,
                parent,
                h.digest(),
            )
            is_stored = identity.key in self.stored
            if not is_stored and end - start < size and self.stored.covers(pool.index, parent, own):
                continue
            self._store(identity, RowPart(pool.index, block, end - start))

    def _state(self, namespace: Namespace, tokens: Tokens, slot: SlotId) -> None:
        pool = self._pools.states
        if pool is None or slot == NO_SLOT or namespace.is_private:
            return
        assert pool.family is not None
        # Found from the boundary before it, like the block that it lies in.
        start = (len(tokens) - 1) // self._size * self._size
        identity = identify(
            namespace,
            pool.family.name,
            pool.family.layers,
            self.stored.dtype_of(namespace),
            Kind.STATE,
            tokens,
            start,
        )
        self._store(identity, RowPart(pool.index, slot, 0))

    def _store(self, identity: Identity, part: RowPart) -> None:
        key = identity.key
        if key in self.stored:
            self._used.append(key)
        else:
            self._waiting.setdefault(key, Store(identity, part))


def path_tokens(node: Node, position: int) -> tuple[Namespace, Tokens]:
    """The namespace, and the tokens 0 … position-1 on the path to `node`. O(position)."""
    tokens = np.empty(position, np.int32)
    for step in node.path():
        if isinstance(step, Root):
            return step.namespace, tokens
        end = min(step.end, position)
        tokens[step.start : end] = step.tokens[: end - step.start]
    raise AssertionError("a path without a root")


def _is_prefix_of(identity: Identity, tokens: Tokens, namespace: Namespace) -> bool:
    if identity.namespace != namespace.digest() or identity.end > len(tokens):
        return False
    return bool((identity.tokens == tokens[identity.start : identity.end]).all())
