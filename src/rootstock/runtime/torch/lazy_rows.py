"""Memory that is taken from the system when it is first written, and can be given back row by row."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.plan import BlockIds, HostBytes
from rootstock.errors import InvalidOption
from rootstock.units import in_units

OutOfMemory = (MemoryError, torch.OutOfMemoryError)

_CAN_GIVE_BACK = hasattr(mmap, "MADV_DONTNEED")  # not on Windows


class LazyRows:
    """A tensor [rows, …] of zeros. On a CPU the system gives each page of it when it is first written; `torch.zeros`
    would write them all at once. Raises InvalidOption if the device cannot even promise that much."""

    __slots__ = ("_bytes", "_mapping", "row_bytes", "tensor")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        wanted = torch.Size(shape).numel() * dtype.itemsize
        self._mapping: mmap.mmap | None = None
        self.tensor: Tensor
        try:
            if device.type == "cpu" and wanted and _CAN_GIVE_BACK:
                self._mapping = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self.tensor = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError, OSError, OverflowError, ValueError) as error:
            # RuntimeError is how torch runs out of memory.
            remedy = f"what {device} has free: a pool of {in_units(wanted)} cannot be had"
            raise InvalidOption("--kv-budget", "too large", remedy) from error
        self.row_bytes = wanted // shape[0] if shape[0] else 0
        # NumPy slices ten times faster than torch, and knows no bfloat16: bytes serve all.
        self._bytes: HostBytes | None = self._raw(self.tensor).numpy() if device.type == "cpu" else None

    def host_bytes(self, first: int, end: int) -> HostBytes:
        """[(end - first) · row_bytes] the memory of these rows itself, on a CPU."""
        assert self._bytes is not None, "the device's memory is not the host's"
        return self._bytes[first * self.row_bytes : end * self.row_bytes]

    def device_bytes(self, first: int, end: int) -> Tensor:
        """[(end - first) · row_bytes] uint8, the memory of these rows itself."""
        return self._raw(self.tensor[first:end])

    @staticmethod
    def _raw(rows: Tensor) -> Tensor:
        """A view, whatever the shape."""
        return rows.view(-1).view(torch.uint8)

    def give_back(self, rows: BlockIds, positions: int = 1) -> None:
        """Of rows of `positions` rows of the tensor each, the pages that hold nothing else. They read as zeros then,
        and take memory again when they are next written."""
        if self._mapping is None or not len(self.tensor):
            return
        row_bytes = positions * self.tensor.nbytes // len(self.tensor)
        for first, end in _runs(rows):
            # Pages that a neighbour shares stay.
            start = -(-first * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = end * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                with contextlib.suppress(OSError):  # a system that keeps them is slower, not wrong
                    self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _runs(rows: BlockIds) -> Iterator[tuple[int, int]]:
    """(first, end) of each run of rows that adjoin."""
    ordered = np.sort(rows)
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
