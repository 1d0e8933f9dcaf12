"""Memory of MLX: limits for the whole process, and the bytes that pools and weights can still take.

MLX keeps its arrays in memory that CPU and GPU share: unified memory of a Mac, main memory elsewhere. On a Mac the
system grants the GPU a part of it (`max_recommended_working_set_size`), and other programs compete for all of it, so
the smaller of both counts. Nothing here has run on a Mac.
"""

from __future__ import annotations

import mlx.core as mx

from rootstock.runtime.base import DeviceMemory
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.units import GIB, MIB

# MLX keeps freed buffers for later arrays, by default until they fill the memory. A forward reuses buffers of the
# forward before: the activations of one chunk of a prompt, a few hundred MiB for models of a few billion parameters.
_CACHE_SHARE = 1 / 32
_LEAST_CACHE_BYTES, _MOST_CACHE_BYTES = 256 * MIB, 2 * GIB


def limit_memory() -> None:
    """Limits MLX's cache of freed buffers, and keeps the GPU's memory resident. For the whole process."""
    mx.set_cache_limit(cache_limit_bytes())
    granted = _granted_bytes()
    if granted is not None:
        # Otherwise macOS pages out weights that a server has not used for a while. It does so all the same before 15.
        mx.set_wired_limit(granted)


def cache_limit_bytes() -> int:
    """Returns the bytes of freed buffers that MLX may keep."""
    granted = _granted_bytes()
    total = mx.get_memory_limit() if granted is None else granted
    return max(_LEAST_CACHE_BYTES, min(_MOST_CACHE_BYTES, int(total * _CACHE_SHARE)))


def free_bytes() -> int:
    """Returns the bytes that new arrays can take, beside the freed buffers that MLX may keep."""
    free, kept = free_host_bytes() + mx.get_cache_memory(), cache_limit_bytes()
    granted = _granted_bytes()
    if granted is not None:
        free = min(free, granted - mx.get_active_memory())
    return max(0, free - kept)


def device_memory(device: str = "auto") -> DeviceMemory:
    """Returns the memory in which the runtime makes its pools, on any device."""
    return DeviceMemory("unified", free_bytes())


def _granted_bytes() -> int | None:
    """Returns the memory that the system grants to the GPU; None: MLX computes on a CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    granted = mx.device_info().get("max_recommended_working_set_size")
    return granted if isinstance(granted, int) else None
