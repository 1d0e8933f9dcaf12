"""Stages: compiled functions that run one after the other in one call of torch's threads.

A small step is a hundred short functions, and between two of them Python and the start of the threads take as long as
some of the functions themselves. Recorded as stages, they are one call: each thread runs a stage's function and waits
until all threads have ended it. Jobs are recorded once, with their addresses; those that change from step to step are
written into the jobs before a run.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray

from rootstock.kernels.cpu.compiler import c_function, cgutils, fetch_add, intrinsic, nb, pointer_to, types
from rootstock.kernels.cpu.threads import run_on_threads, team_size_function
from rootstock.kernels.cpu.vector_lanes import I64

_SPINS = 2000  # looks at the count of arrivals before a thread offers its processor to others

JOB = np.dtype(
    [
        ("count", "i8"),
        ("stages", "i8"),  # address of [count, 2] int64: addresses of a function and of its job
        ("arrived", "i8"),  # address of an int64: threads that have ended a stage, summed over the stages
        ("team_size", "i8"),  # addresses of C functions int (void)
        ("yields", "i8"),
    ]
)


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, function: Any, job: Any) -> Any:
    """Calls a C function void (void *) at an address."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(given[0], kind), [builder.inttoptr(given[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _ask(typing: Any, function: Any) -> Any:
    """Calls a C function int (void) at an address."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(given[0], kind), []), I64)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _look(typing: Any, address: Any) -> Any:
    """Reads an int64 that other threads change, after a pause of some cycles."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pause = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
        )
        builder.call(pause, [])
        return builder.load_atomic(builder.inttoptr(given[0], I64.as_pointer()), "acquire", align=8)

    return types.int64(types.int64), generate


def _work(jobs: Any) -> None:
    """Runs all stages on one thread of the team."""
    job = nb.carray(jobs, (1,))[0]
    stages = nb.carray(pointer_to(job.stages), (job.count, 2), np.int64)
    arrived = nb.carray(pointer_to(job.arrived), (1,), np.int64)
    team = _ask(job.team_size)
    for number in range(job.count):
        _call(stages[number, 0], stages[number, 1])
        if number + 1 == job.count:
            return  # the end of the call waits for all threads
        fetch_add(arrived, 0, 1)
        looks = 0
        while _look(job.arrived) < (number + 1) * team:
            looks += 1
            if looks > _SPINS:
                _ask(job.yields)


@cache
def _compiled() -> int:
    return c_function(_work, JOB)


@cache
def _yield_function() -> int:
    return int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)


def can_run_stages() -> bool:
    """Returns whether the processor is one that the loops wait on, and torch's threads are a team whose size a thread
    can ask for."""
    return platform.machine() == "x86_64" and team_size_function() != 0


class Stages:
    """Recorded stages. One thread at a time may run them; the recorder keeps the memory that the jobs name."""

    def __init__(self) -> None:
        self._recorded: list[tuple[int, NDArray[np.void]]] = []
        self._claims: list[tuple[NDArray[np.void], str, int]] = []
        self._numbers = np.zeros(0, np.int64)
        self._job = np.zeros(1, JOB)

    def add(self, function: int, job: NDArray[np.void], claims: str, size: int) -> None:
        """Records a function and a copy of its job [1], whose field `claims` is the address of `size` int64 that are
        zeros before each run."""
        own = job.copy()
        self._recorded.append((function, own))
        self._claims.append((own, claims, size))

    def close(self) -> list[memoryview]:
        """Ends the recording. Returns the jobs' numbers, as int64, to be changed between runs."""
        self._numbers = np.zeros(8 + sum(-(-size // 8) * 8 for _, _, size in self._claims), np.int64)
        at = 8
        for job, name, size in self._claims:
            job[name] = self._numbers[at:].ctypes.data
            at += -(-size // 8) * 8
        self._stages = np.array([(function, job.ctypes.data) for function, job in self._recorded], np.int64)
        self._job["count"], self._job["stages"] = len(self._stages), self._stages.ctypes.data
        self._job["arrived"] = self._numbers.ctypes.data
        self._job["team_size"], self._job["yields"] = team_size_function(), _yield_function()
        self._job_at, self._function = self._job.ctypes.data, _compiled()
        return [
            memoryview(job.view(np.uint8))[: job.nbytes // 8 * 8].cast("q")  # type: ignore[arg-type]
            for _, job in self._recorded
        ]

    def run(self) -> None:
        self._numbers.fill(0)
        run_on_threads(self._function, self._job_at, torch.get_num_threads())
