"""Main memory that the system allocates page by page at the first write, and that can be given back row by row."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np

from rootstock.cache.plan import HostBytes
from rootstock.cache.types import BlockIds
from rootstock.errors import MemoryLacks
from rootstock.units import in_units

_CAN_GIVE_BACK = hasattr(mmap, "MADV_DONTNEED")  # false on Windows


class LazyMemory:
    """Zeros in main memory. Raises MemoryLacks if the system cannot reserve that much.

    bytes    uint8 [all]; owned by this object
    """

    __slots__ = ("_mapping", "bytes")

    def __init__(self, wanted: int) -> None:
        self._mapping: mmap.mmap | None = None
        try:
            if wanted and _CAN_GIVE_BACK:
                self._mapping = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self.bytes: HostBytes = np.frombuffer(self._mapping, np.uint8)
            else:
                self.bytes = np.zeros(wanted, np.uint8)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise lacking(wanted, "cpu") from error

    def give_back(self, rows: BlockIds, row_bytes: int) -> None:
        """Gives back the pages that hold only these rows. They then read as zeros, and take memory again when they
        are next written."""
        if self._mapping is None:
            return
        for first, end in _runs(rows):
            # A page that is shared with a neighbouring row stays.
            start = -(-first * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = end * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                with contextlib.suppress(OSError):  # if it fails, the memory is not freed, nothing else
                    self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def lacking(wanted: int, device: str) -> MemoryLacks:
    """Returns the error for a pool of so many bytes that a device has not."""
    remedy = f"at most the free memory of {device}: a pool of {in_units(wanted)} does not fit"
    return MemoryLacks("--kv-budget", "too large", remedy)


def _runs(rows: BlockIds) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of each run of adjoining rows."""
    ordered = np.sort(rows)
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
