"""`--memory-limit`: a limit of the whole process's memory, which the engine enforces between two steps.

Pools and weights are bounded from the start. Activations, freed buffers that a library keeps, states, tokenized
prompts and adapters are added to them, and their sum cannot be predicted. The footprint is therefore measured:

    pressure   begins at              ends below   consequence
    NEAR       85 % of the limit      80 %         unused memory goes back to the system; no idle work
    OVER       95 % of the limit      90 %         no request is admitted while others run, chunks of prompts are
                                                   small, and checkpoints that no request uses are evicted

Without pressure, nothing differs from a server without a limit. A request that waits for memory waits as for a full
pool. While none runs, the first one is admitted, however large the footprint is, so that every request ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.plan import Plan
from rootstock.engine.parts import Part
from rootstock.engine.scheduler import Scheduler
from rootstock.errors import InvalidOption
from rootstock.runtime import host_memory
from rootstock.runtime.base import PoolMemory, Runtime
from rootstock.units import GIB, in_units

log = logging.getLogger(__name__)

SAMPLE_S = 0.1  # least time between two measurements
# Time between two returns of unused memory. It doubles while a return does not end the pressure: buffers that go back
# must be allocated again.
_RETURN_S, _LONGEST_RETURN_S = 1.0, 60.0
# Memory that an automatic limit leaves to the system and to other programs.
_LEAST_OTHERS_BYTES, _OTHERS_SHARE = 3 * GIB, 1 / 8


class Pressure(IntEnum):
    NONE = 0
    NEAR = 1
    OVER = 2


_BEGINS = {Pressure.NEAR: 0.85, Pressure.OVER: 0.95}  # shares of the limit
_ENDS = {Pressure.NEAR: 0.80, Pressure.OVER: 0.90}


@dataclass(frozen=True, slots=True)
class MemoryStats:
    footprint_bytes: int  # by the last measurement
    limit_bytes: int
    pressure: Pressure
    returns: int  # how often unused memory was given back to the system
    held_requests: int  # requests whose admission has waited for memory


def memory_limit(asked: int | None, memory: PoolMemory) -> int | None:
    """Returns the limit for --memory-limit, for a model in this kind of memory; None: there is none.

    `asked` is a number of bytes, 0 for none, or None for "auto": pools of unified memory take it from everything else
    on the machine at once. Raises InvalidOption.
    """
    if asked == 0 or (asked is None and memory != "unified"):
        return None
    if host_memory.footprint_bytes() is None:
        if asked is None:
            return None
        raise InvalidOption(
            "--memory-limit", in_units(asked), "auto or off: this system does not tell a process's memory"
        )
    return auto_limit_bytes(host_memory.total_host_bytes()) if asked is None else asked


def auto_limit_bytes(total_bytes: int) -> int:
    """Returns the memory of a machine that one process may take: 5 of 8 GiB, 28 of 32 GiB, 112 of 128 GiB."""
    return max(total_bytes // 2, total_bytes - max(_LEAST_OTHERS_BYTES, int(total_bytes * _OTHERS_SHARE)))


class MemoryWatch:
    """Watch over the footprint of the process. A pressure ends below the footprint at which it begins, so that one
    request does not switch it to and fro."""

    def __init__(
        self,
        limit_bytes: int,
        footprint: Callable[[], int | None] = host_memory.footprint_bytes,
        return_free: Callable[[], None] = host_memory.return_free_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`footprint` measures the process; `return_free` returns freed memory of its C library to the system."""
        self.limit_bytes = limit_bytes
        self.footprint_bytes = 0
        self.pressure = Pressure.NONE
        self.return_free = return_free
        self._footprint = footprint
        self._clock = clock
        self._due = clock()
        self.measure()

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def is_due(self) -> bool:
        """True if the last measurement is old enough for another."""
        return self._clock() >= self._due

    def measure(self) -> None:
        """Measures the footprint. A measurement that fails leaves everything as it was."""
        self._due = self._clock() + SAMPLE_S
        footprint = self._footprint()
        if footprint is None:
            return
        self.footprint_bytes = footprint
        self.pressure = _pressure(footprint / self.limit_bytes, self.pressure)

    @property
    def excess_bytes(self) -> int:
        """Bytes that must be given back until requests are admitted again; 0: they are."""
        end = int(self.limit_bytes * _ENDS[Pressure.OVER])
        return max(0, self.footprint_bytes - end) if self.pressure is Pressure.OVER else 0

    @property
    def spare_bytes(self) -> int:
        """Bytes that the process can still take before pressure begins."""
        return max(0, int(self.limit_bytes * _BEGINS[Pressure.NEAR]) - self.footprint_bytes)


def _pressure(share: float, before: Pressure) -> Pressure:
    for pressure in (Pressure.OVER, Pressure.NEAR):
        if share >= _BEGINS[pressure] or (before >= pressure and share >= _ENDS[pressure]):
            return pressure
    return Pressure.NONE


class MemoryGuard(Part):
    """Guard of one engine's memory, owned by the engine's thread. Engines of one process measure the same footprint,
    and each gives back its own memory."""

    def __init__(
        self,
        watch: MemoryWatch,
        runtime: Runtime,
        cache: KVCache,
        scheduler: Scheduler,
        apply: Callable[[Plan], None],
    ) -> None:
        """`apply` executes a plan of the cache."""
        self._watch = watch
        self._runtime = runtime
        self._cache = cache
        self._scheduler = scheduler
        self._apply = apply
        self._returned_at = float("-inf")
        self._pause_s = _RETURN_S  # before the next return
        self._returned_under = Pressure.NONE
        self._returns = 0

    @property
    def holds_idle_work(self) -> bool:
        """True if memory is too scarce for work that no request waits for."""
        return self._watch.pressure is not Pressure.NONE

    def before_step(self) -> None:
        """Measures the footprint if that is due, gives memory back, and tells the scheduler. Between two steps."""
        watch = self._watch
        if not watch.is_due:
            return
        watch.measure()
        if self._return_is_due:
            self._return_memory()
        self._returned_under = min(self._returned_under, watch.pressure)
        is_over = watch.pressure is Pressure.OVER
        if is_over != self._scheduler.admits_one_by_one:
            self._scheduler.admits_one_by_one = is_over
            self._tell()

    def before_idle(self) -> None:
        self.before_step()

    @property
    def _return_is_due(self) -> bool:
        pressure = self._watch.pressure
        if pressure is Pressure.NONE:
            return False
        return pressure > self._returned_under or self._watch.now >= self._returned_at + self._pause_s

    def _return_memory(self) -> None:
        watch = self._watch
        self._returns += 1
        first = self._returned_under is Pressure.NONE
        self._pause_s = _RETURN_S if first else min(2 * self._pause_s, _LONGEST_RETURN_S)
        self._returned_under = watch.pressure
        self._give_back(self._cache.return_memory())
        if watch.excess_bytes:
            self._give_back(self._cache.return_memory(watch.excess_bytes))
        self._returned_at = watch.now

    def _give_back(self, plan: Plan) -> None:
        self._apply(plan)
        self._runtime.release_unused()
        self._watch.return_free()
        self._watch.measure()

    def _tell(self) -> None:
        watch = self._watch
        taken, limit = in_units(watch.footprint_bytes), in_units(watch.limit_bytes)
        is_over = watch.pressure is Pressure.OVER
        consequence = "requests wait while others run" if is_over else "requests are admitted again"
        log.warning("the process takes %s of its --memory-limit of %s: %s", taken, limit, consequence)

    def stats(self) -> dict[str, MemoryStats]:
        watch = self._watch
        told = MemoryStats(
            watch.footprint_bytes,
            watch.limit_bytes,
            watch.pressure,
            self._returns,
            self._scheduler.requests_held_for_memory,
        )
        return {"memory": told}
