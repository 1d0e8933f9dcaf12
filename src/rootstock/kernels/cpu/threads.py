"""Runs compiled functions on several threads: on torch's own where that can be had.

Numba would bring threads of its own. After each parallel region OpenMP's threads spin for a while in the hope of more
work, and those of two runtimes take the processor from each other. On Linux torch computes with libgomp, whose entry
for compilers, GOMP_parallel, runs a function on the very team that torch uses; it takes 2 to 5 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

Run = Callable[[int, int, int], None]


def run_on_threads(function: int, argument: int, threads: int) -> None:
    """function(argument) on each of so many threads, which divide the work among themselves; returns when all have.

    function: the address of a C function void (void *), which may not raise; argument: an address. For one thread at
    a time.
    """
    if threads == 1:
        _VOID_OF_POINTER(function)(argument)
    else:
        _runner()(function, argument, threads)


def end_team() -> None:
    """The threads that help the calling one end, where torch's runtime is libgomp; computing again, it gets others.

    For a thread that has computed and will not any more. libgomp counts the helpers of all threads, and where there
    are more than processors it lets none of them spin for long: every parallel region then has to wake somebody.
    """
    openmp = _torch_openmp()
    if openmp is not None:
        openmp.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _runner() -> Run:
    openmp = _torch_openmp()
    if openmp is None:
        return _run_on_python_threads
    parallel = openmp.GOMP_parallel

    def run(function: int, argument: int, threads: int) -> None:
        parallel(function, argument, threads, 0)

    return run


@cache
def _torch_openmp() -> Any:
    """The OpenMP runtime that torch is linked with if it is libgomp, or None."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            openmp = ctypes.CDLL(str(library))
            parallel, pause = (
                openmp.GOMP_parallel,
                openmp.omp_pause_resource_all,
            )  # of what the library depends on
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        pause.argtypes = [ctypes.c_int]
        return openmp
    return None


_PAUSE_SOFT = 1  # omp_pause_soft: what was set stays set
_VOID_OF_POINTER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # calls without the interpreter's lock


def _run_on_python_threads(function: int, argument: int, threads: int) -> None:
    """Where torch's runtime has no such entry: tens of microseconds a call."""
    call = _VOID_OF_POINTER(function)
    others = [_pool(threads - 1).submit(call, argument) for _ in range(threads - 1)]
    call(argument)
    wait(others)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")
