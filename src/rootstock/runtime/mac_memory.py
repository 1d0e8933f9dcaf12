"""Main memory that macOS can still give away, from its kernel's statistics."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

_HOST_VM_INFO64 = 4  # <mach/host_info.h>
_MOST_INTEGERS = 256  # the kernel fills in as many as it knows, and says how many


def available_bytes() -> int | None:
    """Returns the memory that is free or inactive: pages of files, which the system drops, and pages of programs that
    rest, which it compresses. None: not macOS, or the kernel does not answer."""
    if platform.system() != "Darwin":
        return None
    return available_pages(ctypes.CDLL(None)) * os.sysconf("SC_PAGE_SIZE") or None


def available_pages(libc: Any) -> int:
    """Returns the free and the inactive pages, which `struct vm_statistics64` begins with: free, active, inactive. 0:
    the kernel does not answer."""
    statistics = (ctypes.c_uint32 * _MOST_INTEGERS)()
    count = ctypes.c_uint32(_MOST_INTEGERS)
    libc.mach_host_self.restype = ctypes.c_uint32
    status = libc.host_statistics64(
        ctypes.c_uint32(libc.mach_host_self()), ctypes.c_int(_HOST_VM_INFO64), statistics, ctypes.byref(count)
    )
    if status != 0 or count.value < 3:
        return 0
    free, _, inactive = statistics[:3]
    return int(free + inactive)
