"""Memory that is taken from the system when it is first written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rootstock.errors import InvalidOption

OutOfMemory = (MemoryError, torch.OutOfMemoryError)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, contiguous. On a CPU the system gives each page when it is first written: `torch.zeros` would write
    them all. Raises InvalidOption if the device cannot even promise that much."""
    elements = torch.Size(shape).numel()
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        raw = np.zeros(elements * dtype.itemsize, np.uint8)  # calloc
        return torch.from_numpy(raw).view(dtype).view(shape)
    except (RuntimeError, MemoryError, ValueError) as error:  # torch's own OutOfMemoryError is a RuntimeError
        raise InvalidOption("--kv-budget", elements * dtype.itemsize, f"what {device} has free") from error
