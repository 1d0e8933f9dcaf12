"""Tensors whose memory is taken from the system when it is first written, and can be given back row by row."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.plan import HostBytes
from rootstock.cache.types import BlockIds
from rootstock.errors import MemoryLacks
from rootstock.units import in_units

OutOfMemory = (MemoryError, torch.OutOfMemoryError)

_CAN_GIVE_BACK = hasattr(mmap, "MADV_DONTNEED")  # false on Windows


class LazyRows:
    """Tensor [rows, …] of zeros. On a CPU the system allocates each page when it is first written; `torch.zeros`
    would write all pages at once. Raises MemoryLacks if the device cannot reserve that much."""

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
            # torch raises RuntimeError when it runs out of memory.
            remedy = f"at most the free memory of {device}: a pool of {in_units(wanted)} does not fit"
            raise MemoryLacks("--kv-budget", "too large", remedy) from error
        self.row_bytes = wanted // shape[0] if shape[0] else 0
        # NumPy slices ten times faster than torch. It has no bfloat16, so the view is of bytes.
        self._bytes: HostBytes | None = self._raw(self.tensor).numpy() if device.type == "cpu" else None

    def host_bytes(self, first: int, end: int) -> HostBytes:
        """Returns a view [(end - first) · row_bytes] of the memory of these rows, on a CPU."""
        assert self._bytes is not None, "the device's memory is not the host's"
        return self._bytes[first * self.row_bytes : end * self.row_bytes]

    def device_bytes(self, first: int, end: int) -> Tensor:
        """Returns a view [(end - first) · row_bytes] uint8 of the memory of these rows."""
        return self._raw(self.tensor[first:end])

    @staticmethod
    def _raw(rows: Tensor) -> Tensor:
        """Returns a view of the bytes, for any shape."""
        return rows.view(-1).view(torch.uint8)

    def give_back(self, rows: BlockIds, positions: int = 1) -> None:
        """Gives back the pages that hold only these rows. A row here is `positions` rows of the tensor. The pages
        then read as zeros, and take memory again when they are next written."""
        if self._mapping is None or not len(self.tensor):
            return
        row_bytes = positions * self.tensor.nbytes // len(self.tensor)
        for first, end in _runs(rows):
            # A page that is shared with a neighbouring row stays.
            start = -(-first * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = end * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                with contextlib.suppress(OSError):  # if it fails, the memory is not freed, nothing else
                    self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _runs(rows: BlockIds) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of each run of adjoining rows."""
    ordered = np.sort(rows)
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
