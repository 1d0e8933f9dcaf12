"""Tensors whose memory is taken from the system when it is first written, and can be given back row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from rootstock.cache.plan import HostBytes
from rootstock.cache.types import BlockIds
from rootstock.runtime.lazy_memory import LazyMemory, lacking

OutOfMemory = (MemoryError, torch.OutOfMemoryError)


class LazyRows:
    """Tensor [rows, …] of zeros. On a CPU the system allocates each page when it is first written; `torch.zeros`
    would write all pages at once. Raises MemoryLacks if the device cannot reserve that much."""

    __slots__ = ("_memory", "row_bytes", "tensor")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        wanted = torch.Size(shape).numel() * dtype.itemsize
        # NumPy slices ten times faster than torch. It has no bfloat16, so the memory is of bytes.
        self._memory = LazyMemory(wanted) if device.type == "cpu" else None
        self.tensor: Tensor
        if self._memory is not None and wanted:
            self.tensor = torch.from_numpy(self._memory.bytes).view(dtype).view(shape)
        else:
            try:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
                # torch raises RuntimeError when it runs out of memory.
                raise lacking(wanted, str(device)) from error
        self.row_bytes = wanted // shape[0] if shape[0] else 0

    def host_bytes(self, first: int, end: int) -> HostBytes:
        """Returns a view [(end - first) · row_bytes] of the memory of these rows, on a CPU."""
        assert self._memory is not None, "the device's memory is not the host's"
        return self._memory.bytes[first * self.row_bytes : end * self.row_bytes]

    def device_bytes(self, first: int, end: int) -> Tensor:
        """Returns a view [(end - first) · row_bytes] uint8 of the memory of these rows."""
        return self.tensor[first:end].view(-1).view(torch.uint8)

    def give_back(self, rows: BlockIds, positions: int = 1) -> None:
        """Gives back the pages that hold only these rows, on a CPU. A row here is `positions` rows of the tensor."""
        if self._memory is not None:
            self._memory.give_back(rows, positions * self.row_bytes)
