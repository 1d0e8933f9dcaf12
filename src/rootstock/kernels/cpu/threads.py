"""Threads for compiled functions: the threads of torch's own OpenMP runtime if it is libgomp.

Numba would start threads of its own. After each parallel region, OpenMP's threads spin for a while to wait for more
work, and the threads of two runtimes compete for the processor. On Linux torch computes with libgomp. Its entry point
for compilers, GOMP_parallel, runs a function on the same thread team that torch uses. A call takes 2 to 5 µs.
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


@cache
def callable_at(function: int) -> Callable[[int], None]:
    """Returns the C function void (void *) at an address, to be called on the calling thread. It must not raise, and
    runs without the interpreter's lock."""
    return _VOID_OF_POINTER(function)


def run_on_threads(function: int, argument: int, threads: int) -> None:
    """Calls function(argument) on `threads` threads, which divide the work among themselves. Returns when all are
    done.

    function: the address of a C function void (void *), which must not raise; argument: an address. Only one thread
    at a time may call this.
    """
    if threads == 1:
        callable_at(function)(argument)
    else:
        _runner()(function, argument, threads)


@cache
def team_size_function() -> int:
    """Returns the address of the C function int (void) that tells a thread of a call of `run_on_threads` how many
    threads take part. Returns 0 if torch's runtime is not libgomp. A call with one thread is no team, and counts
    one."""
    openmp = _torch_openmp()
    if openmp is None:
        return 0
    return int(ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p).value or 0)


def end_team() -> None:
    """Ends the helper threads of the calling thread if torch's runtime is libgomp. A later computation starts new
    ones.

    Called by a thread that has finished computing. libgomp counts the helpers of all threads. If they are more than
    the processors, it lets none of them spin for long, and every parallel region then has to wake its threads.
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
    """Loads the OpenMP runtime that torch is linked with. Returns None if it is not libgomp."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            openmp = ctypes.CDLL(str(library))
            # Both symbols are found in the libraries that this one depends on.
            parallel, pause = openmp.GOMP_parallel, openmp.omp_pause_resource_all
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        pause.argtypes = [ctypes.c_int]
        return openmp
    return None


_PAUSE_SOFT = 1  # omp_pause_soft: keeps the settings
_VOID_OF_POINTER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # releases the GIL during the call


def _run_on_python_threads(function: int, argument: int, threads: int) -> None:
    """Runs a function on Python's threads, for runtimes without GOMP_parallel: a call takes tens of microseconds."""
    call = callable_at(function)
    others = [_pool(threads - 1).submit(call, argument) for _ in range(threads - 1)]
    call(argument)
    wait(others)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")
