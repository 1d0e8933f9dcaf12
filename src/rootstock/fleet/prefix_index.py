"""Index of the blocks of all replicas: a hash table from a block's key to a bit mask of replicas.

A dict of a million keys takes 140 bytes a key, and holds the interpreter's lock while a replica's keys are dropped.
Two arrays with open addressing take 16 bytes a place. Single keys are read and written through memory views, about
as fast as in a dict; whole columns by NumPy, which releases the lock.

One thread changes the table, any other reads it, without a lock: a reader that meets a change sees the state before
or after it, or in the rare case that a place gets another key, that key's replicas. A wrong answer costs a
hit, no correctness. Where the table is laid out anew, readers keep the old one until the new one is whole.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_REPLICAS: Final = 64  # bits of a mask
_LEAST_BITS = 10  # of a table's size
_ALL = 2**64 - 1

Keys = NDArray[np.uint64]


class NoFreeSlot(RuntimeError):
    """The index has as many replicas as it can have."""


class _Table:
    """Places of blocks. A place is empty (0), or has a scrambled key and its replicas: none in a dead place."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.keys: Keys = np.zeros(2**bits, np.uint64)
        self.masks = np.zeros(2**bits, np.uint64)
        self.key_at = self.keys.data
        self.mask_at = self.masks.data
        self.shift = 64 - bits  # from a scrambled key to its first place
        self.last = 2**bits - 1
        self.used = 0  # places that are not empty
        self.most_used = 3 * 2**bits // 4  # runs of used places get long beyond that

    @classmethod
    def of(cls, keys: Keys, masks: Keys, room: int) -> _Table:
        """Lays out live keys in a table that has room for as many further ones."""
        bits = _LEAST_BITS
        while 5 * 2**bits // 8 < len(keys) + room:
            bits += 1
        table = cls(bits)
        order = np.argsort(keys)
        keys, masks = np.take(keys, order), np.take(masks, order)
        # Sorted by their first place, each key goes there, or right behind the key before it.
        number = np.arange(len(keys))
        first = (keys >> np.uint64(table.shift)).astype(np.int64)
        place = number + np.maximum.accumulate(first - number)
        inside = int(np.searchsorted(place, 2**bits))
        table.keys[place[:inside]] = keys[:inside]
        table.masks[place[:inside]] = masks[:inside]
        table.used = inside
        for key, mask in zip(keys[inside:].tolist(), masks[inside:].tolist(), strict=True):
            table.add([key], mask)  # from the first place on again
        return table

    def add(self, keys: Iterable[int], mask: int) -> None:
        key_at, mask_at, shift, last = self.key_at, self.mask_at, self.shift, self.last
        for key in keys:
            place, dead = key >> shift, -1
            while (found := key_at[place]) != key and found:
                if dead < 0 and not mask_at[place]:
                    dead = place
                place = (place + 1) & last
            if not found:
                if dead >= 0:
                    place = dead
                else:
                    self.used += 1
                key_at[place] = key  # before its mask: a reader finds no replica rather than another key's
            mask_at[place] |= mask

    def remove(self, keys: Iterable[int], mask: int) -> None:
        key_at, mask_at, shift, last = self.key_at, self.mask_at, self.shift, self.last
        left = _ALL ^ mask
        for key in keys:
            place = key >> shift
            while (found := key_at[place]) != key and found:
                place = (place + 1) & last
            if found:
                mask_at[place] &= left


class PrefixIndex:
    """Index of the blocks of up to 64 replicas, each of which has a slot.

    `join`, `matched` and `len` may be called from any thread; all else belongs to the thread that changes the index.
    """

    def __init__(self) -> None:
        # Unknown to those who write prompts, so that they cannot choose keys that collide.
        self._odd = np.uint64(secrets.randbits(64) | 1)
        self._table = _Table(_LEAST_BITS)
        self._free = deque(range(MOST_REPLICAS))

    def join(self) -> int:
        """Returns the slot of a new replica, which has no blocks. Raises NoFreeSlot."""
        try:
            return self._free.popleft()
        except IndexError:
            raise NoFreeSlot(f"an index has {MOST_REPLICAS} replicas at most") from None

    def leave(self, slot: int) -> None:
        """Drops all of a replica's blocks, and gives its slot to the next one that joins."""
        self.cleared(slot)
        self._free.append(slot)

    def stored(self, slot: int, keys: Keys) -> None:
        table = self._table
        if table.used + len(keys) > table.most_used:
            live = table.masks != 0
            table = _Table.of(table.keys[live], table.masks[live], len(keys))
        table.add(self._scrambled(keys), 1 << slot)
        self._table = table

    def removed(self, slot: int, keys: Keys) -> None:
        self._table.remove(self._scrambled(keys), 1 << slot)

    def cleared(self, slot: int) -> None:
        masks = self._table.masks
        np.bitwise_and(masks, np.uint64(_ALL ^ 1 << slot), out=masks)

    def matched(self, keys: Keys, slots: Sequence[int]) -> dict[int, int]:
        """Returns how many of a prompt's first blocks each of these replicas has."""
        table = self._table
        key_at, mask_at, shift, last = table.key_at, table.mask_at, table.shift, table.last
        having = 0  # replicas that have all blocks so far
        for slot in slots:
            having |= 1 << slot
        found, count = dict.fromkeys(slots, 0), 0
        for key in self._scrambled(keys):
            place = key >> shift
            while (at := key_at[place]) != key and at:
                place = (place + 1) & last
            still = mask_at[place] & having if at else 0
            if still != having:
                for slot in slots:
                    if having >> slot & 1 > still >> slot & 1:
                        found[slot] = count
                having = still
                if not having:
                    return found
            count += 1
        for slot in slots:
            if having >> slot & 1:
                found[slot] = count
        return found

    def __len__(self) -> int:
        """Returns the number of keys that any replica has."""
        return int(np.count_nonzero(self._table.masks))

    @property
    def nbytes(self) -> int:
        return self._table.keys.nbytes + self._table.masks.nbytes

    def _scrambled(self, keys: Keys) -> list[int]:
        """Spreads keys over all places, one to one but for 0, which marks an empty place."""
        scrambled: list[int] = np.maximum(keys * self._odd, np.uint64(1)).tolist()
        return scrambled
