"""The block pool: who owns each block, and which are free.

A block has owners of two kinds. The tree's nodes and checkpoints *hold* it: its content can be found. Leases *use*
it: a running request reads or writes it. Its refcount is the sum. At every instant a block is in exactly one state:

    free     no owner
    cached   held, not used: may be evicted
    live     used, held or not

A *reference* names a block without owning it, together with how often the block had been freed by then. It is void
from the moment the block becomes free, however often the id is given out again.

Every operation takes an array of distinct ids and costs a handful of NumPy calls, whatever its length. All of
an operation's assertions run before its first write, so an operation that fails has changed nothing.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.plan import NO_BLOCK, BlockIds

NO_BLOCKS: BlockIds = np.empty(0, np.int32)
NO_BLOCKS.flags.writeable = False

References = NDArray[np.int64]  # [blocks] block id + 2^32 · how often it had been freed; or -1
NO_REFERENCES: References = np.empty(0, np.int64)
NO_REFERENCES.flags.writeable = False
_ID = np.int64(2**32 - 1)


class BlockPool:
    """`referred` pools can be referred to; `returnable` ones know which rows have memory. Both cost a little."""

    def __init__(self, blocks: int, *, referred: bool = False, returnable: bool = False) -> None:
        assert blocks > 0
        self.total_blocks = blocks
        self._held = np.zeros(blocks, np.int32)
        self._used = np.zeros(blocks, np.int32)
        self._referred = referred
        self._returnable = returnable
        self._freed = np.zeros(blocks if referred else 0, np.int64)  # how often each became free
        # Has memory: was written since it was last given back.
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
        return int(self._held[block] + self._used[block])

    def holders(self, block: int) -> int:
        """How many tree nodes own it."""
        return int(self._held[block])

    def unused_among(self, ids: BlockIds) -> int:
        """How many of these blocks no lease uses."""
        return len(ids) - int(np.count_nonzero(self._used[ids]))

    def used_once_among(self, ids: BlockIds) -> int:
        """How many of these blocks exactly one lease uses."""
        return int(np.count_nonzero(self._used[ids] == 1))

    def allocate(self, blocks: int, after: int | None = None) -> BlockIds:
        """Free blocks, used once: one run if a free one is long enough, else few long runs.

        With `after`, first the run that follows that block, so that a growing sequence stays contiguous.
        The caller has checked that there are enough.
        """
        assert 0 <= blocks <= self._free.blocks, f"{blocks} of {self._free.blocks} free blocks asked"
        ids = self._free.take(blocks, after)
        self._used[ids] = 1
        if self._returnable:
            fresh = len(ids) - int(np.count_nonzero(self._backed[ids]))
            if fresh:
                self._backed[ids] = True
                self.backed_blocks += fresh
        return ids

    def give_back(self, blocks: int) -> BlockIds:
        """Up to so many free blocks that have memory; the caller sees to it that they lose it. O(blocks)."""
        idle = np.flatnonzero(self._backed & (self._held == 0) & (self._used == 0))
        # The last ones first: allocation prefers low addresses.
        ids = idle[max(0, len(idle) - blocks) :].astype(np.int32)
        self._backed[ids] = False
        self.backed_blocks -= len(ids)
        return ids

    def use(self, ids: BlockIds) -> None:
        """One more lease owns each of these."""
        used = self._used[ids]
        fresh = used == 0
        assert bool((self._held[ids[fresh]] > 0).all()), "a free block was used"
        self._cached_blocks -= int(np.count_nonzero(fresh))
        self._used[ids] = used + 1

    def unuse(self, ids: BlockIds) -> None:
        """One lease less owns each of these; blocks without an owner become free."""
        used = self._used[ids]
        assert bool((used > 0).all()), "a block was released twice"
        used -= 1
        self._used[ids] = used
        idle = ids[used == 0]
        if len(idle):
            held = self._held[idle] > 0
            kept = int(np.count_nonzero(held))
            self._cached_blocks += kept
            if kept < len(idle):
                self._give(idle[~held])

    def hold(self, ids: BlockIds) -> None:
        """One more tree node owns each of these."""
        held = self._held[ids]
        assert bool((held + self._used[ids] > 0).all()), "a free block was held"
        self._held[ids] = held + 1

    def unhold(self, ids: BlockIds) -> None:
        """One tree node less owns each of these; blocks without an owner become free."""
        held = self._held[ids]
        assert bool((held > 0).all()), "a block was let go twice"
        held -= 1
        self._held[ids] = held
        gone = ids[held == 0]
        if len(gone):
            unowned = gone[self._used[gone] == 0]
            self._cached_blocks -= len(unowned)
            if len(unowned):
                self._give(unowned)

    def _give(self, ids: BlockIds) -> None:
        if self._referred:
            self._freed[ids] += 1
        self._free.give(ids)

    def references(self, ids: BlockIds) -> References:
        """References to these blocks, which have owners now; NO_BLOCK gives -1."""
        assert self._referred
        found: References = np.where(ids == NO_BLOCK, np.int64(-1), ids + (self._freed[ids] << 32))
        return found

    def resolve(self, references: References) -> BlockIds:
        """The ids of those that still stand, NO_BLOCK for the others."""
        ids = references & _ID  # of -1: not a block, and void by the comparison
        stands = references >= 0
        ids = np.where(stands, ids, 0)
        stands &= self._freed[ids] == references >> 32
        return np.where(stands, ids, NO_BLOCK).astype(np.int32)

    def check(self) -> None:
        """Recounts everything. For tests and idle time: O(blocks)."""
        owned = (self._held > 0) | (self._used > 0)
        free = self._free.check()
        assert not bool((owned & free).any()), "an owned block is free"
        assert bool((owned | free).all()), "a block has neither owner nor place among the free"
        cached = int(np.count_nonzero((self._held > 0) & (self._used == 0)))
        assert cached == self._cached_blocks, f"{cached} cached blocks, {self._cached_blocks} counted"
        if self._returnable:
            assert int(np.count_nonzero(self._backed)) == self.backed_blocks
            assert bool(self._backed[owned].all()), "an owned block has no memory"

    def owners(self) -> tuple[BlockIds, BlockIds]:
        """Copies of (held, used) per block, for integrity checks."""
        return self._held.copy(), self._used.copy()


class FreeExtents:
    """Runs of free blocks, merged with their neighbours when given back (boundary tags, Knuth 1.2.5).

    Runs are kept by size class (powers of two) in heaps by address with lazy deletion: taking n blocks looks
    into the smallest class that is sure to fit, lowest address first, which packs the pool from the front and
    is the same in every run.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = 0
        self._length_at: dict[int, int] = {}  # start of a run → its length
        self._start_before: dict[int, int] = {}  # end of a run → its start
        self._classes: list[list[int]] = [[] for _ in range(blocks.bit_length() + 1)]
        self._universe = blocks
        self._insert(0, blocks)

    def take(self, blocks: int, after: int | None = None) -> BlockIds:
        if blocks == 0:
            return NO_BLOCKS
        if after is not None:
            following = self._length_at.get(after + 1, 0)
            if following >= blocks:
                return self._cut(after + 1, blocks)
        start = self._fitting(blocks)
        if start is not None:
            return self._cut(start, blocks)
        pieces: list[BlockIds] = []
        while blocks:
            start = self._longest()
            piece = self._cut(start, min(blocks, self._length_at[start]))
            pieces.append(piece)
            blocks -= len(piece)
        return np.concatenate(pieces)

    def give(self, ids: BlockIds) -> None:
        """`ids` in any order. One step per run of consecutive ids, not per block."""
        ids = np.sort(ids)
        first, last = int(ids[0]), int(ids[-1])
        if last - first + 1 == len(ids):
            self._merge(first, len(ids))
            return
        ends = np.flatnonzero(np.diff(ids) != 1) + 1
        bounds = [0, *ends.tolist(), len(ids)]
        for begin, end in itertools.pairwise(bounds):
            self._merge(int(ids[begin]), end - begin)

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
        return np.arange(start, start + blocks, dtype=np.int32)

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self.blocks += length
        size_class = self._classes[length.bit_length()]
        heapq.heappush(size_class, start)
        if len(size_class) > 64 + 2 * len(self._length_at):  # mostly runs that are gone or changed class
            self._compact(length.bit_length())

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
        """The start of a run of at least `blocks`, or None if none was found with bounded effort."""
        own_class = blocks.bit_length()
        for size_class in range(own_class, len(self._classes)):
            start = self._top(size_class)
            if start is not None and self._length_at[start] >= blocks:
                return start
        # All runs of larger classes fit, those of the own class may: worth a short look, not a search.
        for start in self._classes[own_class][:64] if own_class < len(self._classes) else ():
            if self._length_at.get(start, 0) >= blocks:
                return start
        return None

    def _longest(self) -> int:
        for size_class in range(len(self._classes) - 1, 0, -1):
            start = self._top(size_class)
            if start is not None:
                return start
        raise AssertionError("no free run left")

    def _top(self, size_class: int) -> int | None:
        heap = self._classes[size_class]
        while heap:
            length = self._length_at.get(heap[0])
            if length is not None and length.bit_length() == size_class:
                return heap[0]
            heapq.heappop(heap)
        return None

    def check(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Asserts that runs neither touch nor overlap; returns which blocks are free."""
        free = np.zeros(self._universe, np.bool_)
        end_of_last = -1
        for start in sorted(self._length_at):
            length = self._length_at[start]
            assert start > end_of_last, "free runs touch or overlap"
            assert self._start_before[start + length] == start
            free[start : start + length] = True
            end_of_last = start + length
        assert int(np.count_nonzero(free)) == self.blocks
        assert len(self._start_before) == len(self._length_at)
        return free
