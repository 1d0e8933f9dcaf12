"""Main memory: the free part, within the limits of the system and of a container, and this process's footprint."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rootstock.errors import InvalidOption
from rootstock.runtime.base import PoolMemory
from rootstock.runtime.mac_memory import available_bytes
from rootstock.units import in_units


def free_host_bytes() -> int:
    """Returns the main memory that this process can still use: the smaller of the system's and the container's."""
    limits = [_system_free_bytes()]
    for folder, limit, used, unused_file in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # not in a container, or "max"
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            used_bytes = int(Path(folder, used).read_text()) - int(stat[unused_file])
            limits.append(int(Path(folder, limit).read_text()) - used_bytes)
    return max(0, min(limits))


def _system_free_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    available = available_bytes()
    if available is not None:
        return available
    # Without /proc the free memory is unknown: the BSDs report only the total. Half of it is assumed free.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def total_host_bytes() -> int:
    """Returns the main memory of the machine, or of the container if it has less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not in a container, or "max"
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def footprint_bytes() -> int | None:
    """Returns the memory that the system must keep for this process: without pages of files, which it can read again,
    but with pages that it has swapped out or compressed. None: this system does not tell it.
    """
    if sys.platform == "darwin":
        return physical_footprint(_libc())
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return resident_footprint(status)


def resident_footprint(status: str) -> int | None:
    """Returns the footprint that Linux tells in /proc/self/status. None: a kernel before 4.5 does not tell it."""
    sizes = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    try:
        return 1024 * sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))
    except (KeyError, ValueError, IndexError):
        return None


class _ResourceUsage(ctypes.Structure):
    """`struct rusage_info_v0` of macOS, from <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    )


_RUSAGE_INFO_V0 = 0
_M_ARENA_MAX, _HEAPS = -8, 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def physical_footprint(libc: Any) -> int | None:
    """Returns the footprint of this process by macOS' C library, as Activity Monitor shows it. It counts memory that
    the GPU uses, and compressed memory."""
    usage = _ResourceUsage()
    pid, version = ctypes.c_int(os.getpid()), ctypes.c_int(_RUSAGE_INFO_V0)
    if libc.proc_pid_rusage(pid, version, ctypes.byref(usage)) != 0:
        return None
    return int(usage.ri_phys_footprint)


def return_free_memory() -> None:
    """Makes the C library return freed memory to the system, where it keeps some for later.

    Tokenizing one megabyte allocates a few hundred in small pieces, and glibc keeps most of that when it is freed.
    """
    return_free_memory_of(_libc())


def share_heaps() -> None:
    """Makes all threads share a few heaps of the C library. Call it before they start."""
    share_heaps_of(_libc())


def share_heaps_of(libc: Any) -> None:
    """Bounds the heaps of glibc. Each keeps up to 64 MiB at its end when a thread has freed it, for good."""
    if hasattr(libc, "malloc_trim"):  # glibc: others give mallopt's numbers other meanings, or none
        libc.mallopt(_M_ARENA_MAX, _HEAPS)


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Makes the C library map large blocks one by one, so that freeing one gives its memory back at once.

    Otherwise glibc raises its limit for that to 32 MiB, and weights that are rewritten one by one leave holes.
    """
    libc = _libc()
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    try:
        yield
    finally:
        # The limits that glibc arrives at by itself, so that forwards reuse blocks of up to 32 MiB.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.malloc_trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def reporting_growth(report: Callable[[float], None], expected_bytes: int) -> Iterator[None]:
    """Reports, five times a second and from a thread of its own, the share of the expected bytes by which this
    process has grown: the progress of a library that loads weights and tells none. Pages of mapped files count."""
    before, over = _resident_bytes(), threading.Event()

    def watch() -> None:
        done = 0.0
        while before is not None and not over.wait(0.2):
            done = max(done, min(0.99, ((_resident_bytes() or before) - before) / max(1, expected_bytes)))
            report(done)

    thread = threading.Thread(target=watch, name="rootstock-load-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _resident_bytes() -> int | None:
    """Returns the memory of this process, with pages of files. None: this system does not tell it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return footprint_bytes()


def return_free_memory_of(libc: Any) -> None:
    """Calls the C library's own function for it: of glibc or of macOS. Other libraries have none."""
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(libc, "malloc_zone_pressure_relief"):
        libc.malloc_zone_pressure_relief(ctypes.c_void_p(None), ctypes.c_size_t(0))  # all zones, all they can


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def refuse_host_tier(budget_bytes: int, memory: PoolMemory) -> None:
    """Raises InvalidOption for a host tier below a pool that is in main memory itself."""
    if budget_bytes and memory != "device":
        where = "a CPU" if memory == "host" else "unified memory"
        remedy = f"omitted on {where}, where the cache is in RAM: see --kv-budget"
        raise InvalidOption("--host-budget", in_units(budget_bytes), remedy)
