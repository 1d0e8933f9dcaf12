"""Free main memory, within the limits of the system and of a container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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


def refuse_host_tier(budget_bytes: int, memory: PoolMemory) -> None:
    """Raises InvalidOption for a host tier below a pool that is in main memory itself."""
    if budget_bytes and memory != "device":
        where = "a CPU" if memory == "host" else "unified memory"
        remedy = f"omitted on {where}, where the cache is in RAM: see --kv-budget"
        raise InvalidOption("--host-budget", in_units(budget_bytes), remedy)
