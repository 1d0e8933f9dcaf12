"""Share of the processors that other processes used during a measurement.

Threads of one step wait for each other. If another process has the core of one of them, all wait, and a step of many
short parts can take fifty times as long: times of several threads then mean little.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Processor time of other processes since this object was made. Child processes count as own once they end."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), _own_s()

    def share(self) -> float | None:
        """Returns the share of others in all processor time, the host's other guests included. None: unknown."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        had_s = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return round(max(0.0, others_s / had_s), 3)


def busy_s_of(process: int) -> float:
    """Returns the processor time of a process, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _busy_s() -> float | None:
    """Returns the busy seconds of all processors since the machine started."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
