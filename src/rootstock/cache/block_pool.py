"""The block pool: the owners of each block, and the free blocks.

A block has owners of two kinds. The tree's nodes and checkpoints *hold* it: its content can be found. Leases *use*
it: a running request reads or writes it. Its refcount is the sum. At every instant a block is in exactly one state:

    free     no owner
    cached   held, not used: may be evicted
    live     used, held or not

A *weak reference* names a block without owning it, together with how often the block had been freed by then. It is
void from the moment the block becomes free, however often the id is allocated again.

Every operation takes an array of distinct ids and costs a handful of NumPy calls, however long the array is. All of
an operation's assertions run before its first write, so an operation that fails has changed nothing.

A table of 256 blocks is owned and released twice per request, so these calls are chosen by their cost: both counts
lie in one number, which one gather reads; ids become NumPy's own index type once rather than at each access; and
`count_nonzero` replaces `all` and `any` at a fifth of their price.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import NO_BLOCK, BlockIds

NO_BLOCKS: BlockIds = np.empty(0, np.int32)
NO_BLOCKS.flags.writeable = False

WeakReferences = NDArray[np.int64]  # [blocks] block id + 2^32 · how often it had been freed; or -1
_ID = np.int64(2**32 - 1)

# Owners of a block in one number: how many hold it, and 2^32 for each that uses it.
_USER = 2**32
_HOLDERS = _USER - 1


class BlockPool:
    """Blocks of one family and their owners. A `weakly_referenced` pool gives out weak references, a `returnable` one
    knows which rows have memory. Both cost a little time."""

    def __init__(self, blocks: int, *, weakly_referenced: bool = False, returnable: bool = False) -> None:
        assert blocks > 0
        self.total_blocks = blocks
        self._owners = np.zeros(blocks, np.int64)  # holders + _USER · users
        self._weakly_referenced = weakly_referenced
        self.returnable = returnable
        self._freed = np.zeros(blocks if weakly_referenced else 0, np.int64)  # how often each became free
        # Has memory: was allocated since its memory was last returned.
        self._backed = np.zeros(blocks if returnable else 0, np.bool_)
        self.backed_blocks: int = 0
        self._cached_blocks = 0
        self._free = FreeExtents(blocks)

    @property
    def free_blocks(self) -> int:
        return self._free.blocks

    @property
    def cached_blocks(self) -> int:
        return self._cached_blocks

    @property
    def live_blocks(self) -> int:
        return self.total_blocks - self._free.blocks - self._cached_blocks

    def refcount(self, block: int) -> int:
        owners = int(self._owners[block])
        return (owners & _HOLDERS) + owners // _USER

    def holders(self, block: int) -> int:
        """Counts the nodes and checkpoints that hold it."""
        return int(self._owners[block]) & _HOLDERS

    def unused_among(self, ids: BlockIds) -> int:
        """Counts the blocks that no lease uses."""
        return int(np.count_nonzero(self._owners[ids] < _USER))

    def used_once_among(self, ids: BlockIds) -> int:
        """Counts the blocks that exactly one lease uses."""
        return int(np.count_nonzero(self._owners[ids] // _USER == 1))

    def allocate(self, blocks: int, after: int | None = None) -> BlockIds:
        """Takes free blocks, each with one user: a single run if one is long enough, else few long runs.

        With `after`, tries the run that follows that block first, so that a growing sequence stays contiguous.
        The caller has checked that there are enough.
        """
        assert 0 <= blocks <= self._free.blocks, f"{blocks} of {self._free.blocks} free blocks asked"
        ids = self._free.take(blocks, after)
        self._owners[ids.astype(np.intp)] = _USER
        if self.returnable:
            fresh = len(ids) - int(np.count_nonzero(self._backed[ids]))
            if fresh:
                self._backed[ids] = True
                self.backed_blocks += fresh
        return ids

    def return_blocks(self, blocks: int) -> BlockIds:
        """Marks up to so many free blocks as without memory; the caller returns their memory. O(blocks)."""
        idle = np.flatnonzero(self._backed & (self._owners == 0))
        # The last ones first: allocation prefers low addresses.
        ids = idle[max(0, len(idle) - blocks) :].astype(np.int32)
        self._backed[ids] = False
        self.backed_blocks -= len(ids)
        return ids

    def use(self, ids: BlockIds) -> None:
        """Adds a lease to the owners of each block."""
        if not len(ids):  # of a prompt without a hit
            return
        rows = ids.astype(np.intp)
        owners = self._owners[rows]
        assert np.count_nonzero(owners) == len(rows), "a free block was used"
        self._cached_blocks -= int(np.count_nonzero(owners < _USER))
        self._owners[rows] = owners + _USER

    def unuse(self, ids: BlockIds) -> None:
        """Removes a lease from the owners of each block; blocks without an owner become free."""
        rows = ids.astype(np.intp)
        owners = self._owners[rows] - _USER
        assert not np.count_nonzero(owners < 0), "a block was released twice"
        self._owners[rows] = owners
        owned = int(np.count_nonzero(owners))
        if owned < len(rows):
            self._give(ids[owners == 0])
        self._cached_blocks += owned - int(np.count_nonzero(owners >= _USER))

    def hold(self, ids: BlockIds) -> None:
        """Adds a node or checkpoint to the owners of each block."""
        rows = ids.astype(np.intp)
        owners = self._owners[rows]
        assert np.count_nonzero(owners) == len(rows), "a free block was held"
        self._owners[rows] = owners + 1

    def unhold(self, ids: BlockIds) -> None:
        """Removes a node or checkpoint from the owners of each block; blocks without an owner become free."""
        if len(ids) <= 1:
            if len(ids):
                self._unhold_one(ids)
            return
        rows = ids.astype(np.intp)
        owners = self._owners[rows]
        if not np.count_nonzero(owners != 1):  # as for most evicted nodes: all of its blocks become free
            self._owners[rows] = 0
            self._cached_blocks -= len(rows)
            self._give(ids)
            return
        assert np.count_nonzero(owners & _HOLDERS) == len(rows), "a block was released that no node holds"
        owners -= 1
        self._owners[rows] = owners
        gone = len(rows) - int(np.count_nonzero(owners))
        if gone:
            self._cached_blocks -= gone
            self._give(ids if gone == len(rows) else ids[owners == 0])

    def _unhold_one(self, ids: BlockIds) -> None:
        """Removes an owner of the only block of `ids`: a block that two nodes share, in a third of the time of
        arrays."""
        block = ids.item()
        owners = self._owners.item(block)
        assert owners & _HOLDERS, "a block was released that no node holds"
        self._owners[block] = owners - 1
        if owners == 1:
            self._cached_blocks -= 1
            self._give(ids)

    def _give(self, ids: BlockIds) -> None:
        if self._weakly_referenced:
            self._freed[ids] += 1
        self._free.give(ids)

    def weak_references(self, ids: BlockIds) -> WeakReferences:
        """Returns weak references to these blocks, which have owners now; NO_BLOCK gives -1."""
        assert self._weakly_referenced
        found: WeakReferences = np.where(ids == NO_BLOCK, np.int64(-1), ids + (self._freed[ids] << 32))
        return found

    def resolve(self, references: WeakReferences) -> BlockIds:
        """Returns the ids of the blocks that were not freed since, NO_BLOCK for the others."""
        ids = references & _ID  # of -1: not a block, and void by the comparison
        valid = references >= 0
        ids = np.where(valid, ids, 0)
        valid &= self._freed[ids] == references >> 32
        return np.where(valid, ids, NO_BLOCK).astype(np.int32)

    def check(self) -> None:
        """Recounts everything. For tests and idle time: O(blocks)."""
        owned = self._owners > 0
        free = self._free.check()
        assert not bool((owned & free).any()), "an owned block is free"
        assert bool((owned | free).all()), "a block is neither owned nor free"
        cached = int(np.count_nonzero(owned & (self._owners < _USER)))
        assert cached == self._cached_blocks, f"{cached} cached blocks, {self._cached_blocks} counted"
        if self.returnable:
            assert int(np.count_nonzero(self._backed)) == self.backed_blocks
            assert bool(self._backed[owned].all()), "an owned block has no memory"

    def owners(self) -> tuple[BlockIds, BlockIds]:
        """Returns copies of (held, used) per block, for integrity checks."""
        return (self._owners & _HOLDERS).astype(np.int32), (self._owners // _USER).astype(np.int32)


class FreeExtents:
    """Runs of free blocks, merged with their neighbours when freed (boundary tags, Knuth 1.2.5).

    Runs are kept by size class (powers of two) in heaps by address with lazy deletion: taking n blocks looks
    into the smallest class that is sure to fit, lowest address first, which packs the pool from the front and
    is deterministic. A bit for each class that may have runs finds the next one without a search.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = 0
        self._length_at: dict[int, int] = {}  # start of a run → its length
        self._start_before: dict[int, int] = {}  # end of a run → its start
        self._classes: list[list[int]] = [[] for _ in range(blocks.bit_length() + 1)]
        self._occupied = 0  # bit c: there may be runs of class c
        self._ids = np.arange(blocks, dtype=np.int32)  # every id; runs are slices of it
        self._insert(0, blocks)

    def take(self, blocks: int, after: int | None = None) -> BlockIds:
        if blocks == 0:
            return NO_BLOCKS
        if after is not None and self._length_at.get(after + 1, 0) >= blocks:
            return self._cut(after + 1, blocks)
        start = self._fitting(blocks)
        if start is not None:
            return self._cut(start, blocks)
        pieces: list[BlockIds] = []
        while blocks:
            start = self._longest()
            length = self._remove(start)
            if length > blocks:
                self._insert(start + blocks, length - blocks)
                length = blocks
            pieces.append(self._ids[start : start + length])
            blocks -= length
        return np.concatenate(pieces)

    def give(self, ids: BlockIds) -> None:
        """Frees `ids`, in any order. Takes one step per run of consecutive ids, not per block."""
        start, begin = int(ids[0]), 0
        if len(ids) == 1:
            self._merge(start, 1)
            return
        for last in (ids[1:] - ids[:-1] != 1).nonzero()[0].tolist():
            self._merge(start, last + 1 - begin)
            start, begin = int(ids[last + 1]), last + 1
        self._merge(start, len(ids) - begin)

    def _merge(self, start: int, length: int) -> None:
        left = self._start_before.get(start)
        if left is not None:
            length += self._remove(left)
            start = left
        if start + length in self._length_at:
            length += self._remove(start + length)
        self._insert(start, length)

    def _cut(self, start: int, blocks: int) -> BlockIds:
        length = self._remove(start)
        if length > blocks:
            self._insert(start + blocks, length - blocks)
        return self._ids[start : start + blocks].copy()

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self.blocks += length
        size_class = length.bit_length()
        self._occupied |= 1 << size_class
        heap = self._classes[size_class]
        heapq.heappush(heap, start)
        if len(heap) > 64 + 2 * len(self._length_at):  # mostly entries of runs that are gone or changed class
            self._compact(size_class)

    def _compact(self, size_class: int) -> None:
        alive = [s for s, n in self._length_at.items() if n.bit_length() == size_class]
        heapq.heapify(alive)
        self._classes[size_class] = alive

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        self.blocks -= length
        return length

    def _fitting(self, blocks: int) -> int | None:
        """Finds the start of a run of at least `blocks`; None if none was found with bounded effort."""
        own_class = blocks.bit_length()
        classes = self._occupied >> own_class << own_class
        while classes:
            smallest = (classes & -classes).bit_length() - 1
            start = self._first_of(smallest)
            if start is not None and self._length_at[start] >= blocks:
                return start
            classes &= classes - 1
        # Some runs of the class of `blocks` itself may fit: worth a short look, not a search.
        for start in self._classes[own_class][:64] if own_class < len(self._classes) else ():
            if self._length_at.get(start, 0) >= blocks:
                return start
        return None

    def _longest(self) -> int:
        """Finds the start of the first run of the longest class that has any."""
        while True:
            start = self._first_of(self._occupied.bit_length() - 1)
            if start is not None:
                return start

    def _first_of(self, size_class: int) -> int | None:
        """Finds the lowest start of a class; None if it has no runs."""
        heap = self._classes[size_class]
        while heap:
            start = heap[0]
            if self._length_at.get(start, 0).bit_length() == size_class:
                return start
            heapq.heappop(heap)  # gone, or of another class by now
        self._occupied &= ~(1 << size_class)
        return None

    def check(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Asserts that runs neither touch nor overlap; returns which blocks are free."""
        free = np.zeros(len(self._ids), np.bool_)
        end_of_last = -1
        for start in sorted(self._length_at):
            length = self._length_at[start]
            assert start > end_of_last, "free runs touch or overlap"
            assert self._start_before[start + length] == start
            free[start : start + length] = True
            end_of_last = start + length
        assert int(np.count_nonzero(free)) == self.blocks
        assert len(self._start_before) == len(self._length_at)
        assert all(self._occupied >> length.bit_length() & 1 for length in self._length_at.values())
        return free
