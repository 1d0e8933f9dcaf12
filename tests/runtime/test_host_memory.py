"""The memory of this process and of the machine, on Linux and by a stand-in for macOS' C library."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest

from rootstock.runtime.host_memory import (
    footprint_bytes,
    free_host_bytes,
    physical_footprint,
    reporting_growth,
    resident_footprint,
    return_free_memory,
    return_free_memory_of,
    share_heaps_of,
    total_host_bytes,
)
from rootstock.units import MIB
from waiting import HANG_S

STATUS = """Name:\tpython
VmSwap:\t      64 kB
RssAnon:\t    1024 kB
RssFile:\t  999999 kB
RssShmem:\t     256 kB
"""


def test_pages_of_files_are_left_out_and_swapped_ones_count() -> None:
    assert resident_footprint(STATUS) == (64 + 1024 + 256) * 1024


@pytest.mark.parametrize("status", ["", "VmRSS:\t 5 kB\n", STATUS.replace("1024 kB", ""), "RssAnon: x\n"])
def test_a_kernel_that_does_not_tell_the_sizes_gives_none(status: str) -> None:
    assert resident_footprint(status) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_footprint_grows_with_memory_that_is_written() -> None:
    before = footprint_bytes()
    assert before is not None
    written = bytearray(b"x") * (64 * MIB)
    after = footprint_bytes()
    assert after is not None
    assert after - before > 32 * MIB
    assert len(written) == 64 * MIB


class LibSystem:
    """Stand-in for the part of macOS' C library that tells a footprint: at byte 72 of `struct rusage_info_v0`."""

    def __init__(self, footprint: int, result: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self.relieved: list[tuple[Any, int]] = []
        self._footprint = footprint
        self._result = result

    def proc_pid_rusage(self, pid: Any, flavor: Any, buffer: Any) -> int:
        self.asked.append((pid.value, flavor.value))
        if self._result == 0:
            size = ctypes.sizeof(buffer._obj)
            assert size == 16 + 10 * 8
            raw = (ctypes.c_uint64 * (size // 8)).from_buffer(buffer._obj)
            raw[:] = range(1000, 1000 + len(raw))
            raw[9] = self._footprint
        return self._result

    def malloc_zone_pressure_relief(self, zone: Any, goal: Any) -> int:
        self.relieved.append((zone.value, goal.value))
        return 0


def test_the_footprint_on_macos_is_that_of_activity_monitor() -> None:
    library = LibSystem(footprint=7 * 2**30)
    assert physical_footprint(library) == 7 * 2**30
    assert library.asked == [(os.getpid(), 0)]


def test_a_footprint_that_macos_refuses_is_none() -> None:
    assert physical_footprint(LibSystem(1, result=-1)) is None


def test_freed_memory_goes_back_by_the_function_that_the_library_has() -> None:
    library = LibSystem(1)
    return_free_memory_of(library)
    assert library.relieved == [(None, 0)]

    kept: list[int] = []

    class Glibc:
        def malloc_trim(self, padding: Any) -> int:
            kept.append(padding.value)
            return 1

    return_free_memory_of(Glibc())
    assert kept == [0]
    return_free_memory_of(object())  # a library without either
    return_free_memory()


def test_heaps_are_shared_where_the_library_is_glibc() -> None:
    set_to: list[tuple[int, int]] = []

    class Glibc:
        def malloc_trim(self, padding: Any) -> int: ...

        def mallopt(self, option: int, value: int) -> int:
            set_to.append((option, value))
            return 1

    share_heaps_of(Glibc())
    assert set_to == [(-8, 2)]
    share_heaps_of(LibSystem(1))


def test_the_machine_has_more_memory_than_is_free() -> None:
    assert 0 < free_host_bytes() <= total_host_bytes()


def test_the_growth_of_the_process_is_reported_while_a_library_loads() -> None:
    reported: list[float] = []
    arrived = threading.Event()

    def report(done: float) -> None:
        reported.append(done)
        if done > 0.4:
            arrived.set()

    with reporting_growth(report, 64 << 20):
        held = np.ones(64 << 20, np.uint8)
        assert arrived.wait(HANG_S)
    assert held[0] == 1
    assert reported == sorted(reported)
    assert reported[-1] <= 0.99
    count = len(reported)
    assert not [thread for thread in threading.enumerate() if thread.name == "rootstock-load-progress"]
    assert len(reported) == count
