"""Compiled loops that quantize K and V to int8 on writing to the pool and dequantize them on reading, in one pass
each.

They give the same bits as the torch code of `RoundedRows`. Writing also returns the dequantized rows, so that a step
attends to the numbers that the pool holds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock.kernels.cpu.compiler import (
    c_function,
    compiled,
    compiled_exactly,
    fetch_add,
    float32_bits,
    float32_from,
    narrow,
    nb,
    pointer_to,
    widen,
)
from rootstock.kernels.cpu.threads import run_on_threads
from rootstock.kernels.quantized_rows import LARGEST, LEAST_SCALE, RoundedRows

PARALLEL_FROM = 64  # rows
_AT_ONCE = 8  # rows that a thread claims
_LARGEST = np.float32(LARGEST)
_LEAST_SCALE = np.float32(LEAST_SCALE)
_INFINITY, _NO_NUMBER = np.int32(0x7F800000), np.int32(0x7FC00000)  # as bits of float32

JOB = np.dtype(
    [
        ("rows", "i8"),
        ("heads", "i8"),
        ("dim", "i8"),
        # Address of [rows, heads, dim]; strides of rows and heads follow, in elements. 0: only read.
        ("given", "i8"),
        ("given_row", "i8"),
        ("given_head", "i8"),
        ("slots", "i8"),  # address of [rows] int64; 0: adjoining slots from `first_slot` on
        ("first_slot", "i8"),
        ("codes", "i8"),  # address of [slots, heads, dim] int8
        ("scales", "i8"),  # address of [slots, heads] float32
        ("read", "i8"),  # address of [rows, heads, dim]: the dequantized rows, written
        ("claimed", "i8"),  # address of an int64: rows that threads have begun
    ]
)


@compiled
def _largest_of(given: Any) -> Any:
    """Returns the bits of the largest absolute value: bits are ordered like the numbers, and infinity and NaN come
    last."""
    largest = np.int32(0)
    for d in range(given.shape[0]):
        largest = max(largest, np.int32(float32_bits(widen(given[d])) & np.uint32(0x7FFFFFFF)))
    return largest


@compiled_exactly
def _round_head(given: Any, codes: Any, read: Any) -> Any:
    """Quantizes `given` [dim] into `codes` [dim], and dequantizes it into `read` [dim]. Returns the scale's bits."""
    largest = _largest_of(given)
    if largest >= _INFINITY:  # infinity or NaN: handled apart, because the loop below assumes finite numbers
        for d in range(given.shape[0]):
            codes[d] = np.int8(0)
            read[d] = narrow(float32_from(_NO_NUMBER), read)
        return _NO_NUMBER
    scale = float32_from(largest) / _LARGEST
    if scale < _LEAST_SCALE:
        scale = np.float32(0)
    inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
    for d in range(given.shape[0]):
        value = np.floor(widen(given[d]) * inverse + np.float32(0.5))
        value = min(max(value, -_LARGEST), _LARGEST)
        codes[d] = np.int8(value)
        read[d] = narrow(value * scale, read)
    return np.int32(float32_bits(scale))


@compiled_exactly
def _widen_head(codes: Any, scale: Any, read: Any) -> None:
    for d in range(codes.shape[0]):
        read[d] = narrow(widen(codes[d]) * scale, read)


@compiled
def _work(job: Any, element: Any, element_bytes: Any) -> None:
    """Runs one thread's share of a job: claims rows until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (1,), np.int64)
    slots = nb.carray(pointer_to(job.slots), (job.rows,), np.int64)
    codes = nb.carray(pointer_to(job.codes), (1, job.heads, job.dim), np.int8)
    scales = nb.carray(pointer_to(job.scales), (1, job.heads), np.float32)
    scale_bits = nb.carray(pointer_to(job.scales), (1, job.heads), np.int32)
    read = nb.carray(pointer_to(job.read), (job.rows, job.heads, job.dim), element)
    while True:
        first = fetch_add(claimed, 0, _AT_ONCE)
        if first >= job.rows:
            return
        for r in range(first, min(first + _AT_ONCE, job.rows)):
            slot = slots[r] if job.slots != 0 else job.first_slot + r
            for h in range(job.heads):
                if job.given == 0:
                    _widen_head(codes[slot, h], scales[slot, h], read[r, h])
                    continue
                at = job.given + element_bytes * (r * job.given_row + h * job.given_head)
                given = nb.carray(pointer_to(at), (job.dim,), element)
                scale_bits[slot, h] = _round_head(given, codes[slot, h], read[r, h])


def _work_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, 2)


def _work_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, 4)


_FUNCTIONS = {torch.bfloat16: _work_bfloat16, torch.float32: _work_float32}
DTYPES = frozenset(_FUNCTIONS)


@cache
def _loops_for(dtype: torch.dtype) -> int:
    """Returns the address of a C function void (JOB *): compiled, or loaded, at the first call in a process."""
    return c_function(_FUNCTIONS[dtype], JOB)


class RoundingLoops:
    """Loops that quantize and dequantize rows of a dtype in `DTYPES` on a CPU. Compiled on construction; one thread
    at a time may use them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._function_at = _loops_for(dtype)
        self._claimed = np.zeros(1, np.int64)
        self._jobs = np.zeros(1, JOB)
        self._job = self._jobs[0]
        self._job["claimed"] = self._claimed.ctypes.data
        self._address = self._jobs.ctypes.data

    def write(self, pool: RoundedRows, slots: Tensor, rows: Tensor) -> Tensor:
        """Quantizes rows into a pool, like `RoundedRows.write`."""
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        job = self._job
        job["given"], job["slots"] = rows.data_ptr(), slots.data_ptr()
        job["given_row"], job["given_head"] = rows.stride(0), rows.stride(1)
        return self._run(pool, torch.empty(rows.shape, dtype=rows.dtype))

    def read(self, pool: RoundedRows, slots: Tensor | slice, out: Tensor) -> Tensor:
        """Reads rows of a pool, like `RoundedRows.read`. `out` is contiguous."""
        job = self._job
        job["given"] = 0
        if isinstance(slots, slice):
            job["slots"], job["first_slot"] = 0, slots.start
        else:
            job["slots"] = slots.data_ptr()
        return self._run(pool, out)

    def _run(self, pool: RoundedRows, read: Tensor) -> Tensor:
        assert read.dtype == pool.read_as == self._dtype
        job = self._job
        job["read"] = read.data_ptr()
        job["rows"], job["heads"], job["dim"] = read.shape
        job["codes"], job["scales"] = pool.codes.data_ptr(), pool.scales.data_ptr()
        self._claimed[0] = 0
        threads = 1 if len(read) < PARALLEL_FROM else torch.get_num_threads()
        run_on_threads(self._function_at, self._address, threads)
        return read
