"""Compiled loops that quantize weights to 8 and 4 bits and dequantize them. Torch has no fast loops for this.

8 bits: a scale for each row; its largest absolute weight is 127. 4 bits: a scale and a middle for each group of
inputs of an output; q = 0 … 15 stands for (q - 8) · scale + middle, or for a table's value q times the scale. The
range of a group is the range from its smallest to its largest weight, shrunk by the factor that gives the least
squared error. Few weights are clipped, and all others get finer steps. Relative root mean square error of normally
distributed weights: 0.008 in 8 bits (rows of 1,024), 0.0065 (of 128); in 4 bits with a middle 0.086 in groups of 64
(0.090 without shrinking), 0.094 in groups of 128, 0.076 in groups of 32; with a table for such weights and no middle
0.082 in groups of 64.

Arrays are contiguous. Weights, scales and middles are float32, or bfloat16 as uint16. Weights are quantized with
scales and middles that are already rounded to that dtype, as the kernels read them. There is one C function for each
dtype. It runs on torch's threads, which claim some rows at a time, because Numba's own threads would compete with
torch's. The result depends neither on the threads nor on the addresses of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rootstock.kernels.cpu.compiler import (
    c_function,
    compiled,
    compiled_exactly,
    fetch_add,
    narrow,
    nb,
    pointer_to,
    widen,
)
from rootstock.kernels.cpu.threads import run_on_threads

Array = NDArray[Any]

LANES = 64  # outputs of a block of packed 4-bit weights: byte j of an input holds lanes j and j + 32
_SHRINK_STEP, _SHRINKS = np.float32(0.05), 8  # factors of a range: 1, 0.95, … 0.65
_MOST_SHARE = np.float32(1.1)  # of the largest weight, for the largest value of a table

_ROUND_8, _WIDEN_8, _ROUND_4, _WIDEN_4, _TO_TABLE = range(5)

JOB = np.dtype(
    [
        ("operation", "i8"),
        ("count", "i8"),  # rows, or blocks of outputs
        ("at_once", "i8"),  # rows or blocks that a thread claims at a time
        ("claimed", "i8"),  # address of an int64: the number that threads have claimed
        ("inputs", "i8"),
        ("group", "i8"),  # inputs that share a scale; 4 bits only
        ("outputs", "i8"),  # outputs of `scales`; 4 bits only
        ("first", "i8"),  # first output to compute; 4 bits only
        ("weight", "i8"),  # addresses from here on
        ("scales", "i8"),
        ("q", "i8"),
        ("table", "i8"),  # address of [16] float32; codes of a table only
    ]
)


# ---- 8 bits


@compiled_exactly
def _round_row(weight: Any, scale: Any, q: Any) -> None:
    """Quantizes weight [in] into scale [1] and q [in] int8."""
    largest = np.float32(0)
    for k in range(weight.shape[0]):
        largest = max(largest, abs(widen(weight[k])))
    scale[0] = narrow(largest / np.float32(127), scale)
    step = widen(scale[0])
    inverse = np.float32(1) / step if step > np.float32(0) else np.float32(0)
    for k in range(weight.shape[0]):
        value = np.floor(widen(weight[k]) * inverse + np.float32(0.5))
        q[k] = np.int8(min(max(value, np.float32(-127)), np.float32(127)))


@compiled_exactly
def _widen_row(q: Any, scale: Any, out: Any) -> None:
    for k in range(q.shape[0]):
        out[k] = narrow(np.float32(q[k]) * scale, out)


# ---- 4 bits


@compiled_exactly
def _round_to_steps(weight: Any, middle: Any, inverse: Any, q: Any) -> None:
    for k in range(weight.shape[0]):
        value = np.floor((widen(weight[k]) - middle) * inverse + np.float32(0.5))
        q[k] = np.int32(min(max(value, np.float32(-8)), np.float32(7))) + np.int32(8)


@compiled
def _squared_error(weight: Any, step: Any, middle: Any, q: Any) -> Any:
    """Returns the squared error of a group. Apart from the loop that writes `q`, because LLVM makes two versions of a
    loop that writes, which would add up the sums in different orders."""
    error = np.float32(0)
    for k in range(weight.shape[0]):
        off = widen(weight[k]) - (np.float32(q[k] - np.int32(8)) * step + middle)
        error += off * off
    return error


@compiled_exactly
def _round_group(weight: Any, scale_middle: Any, q: Any) -> None:
    """Quantizes weight [group] into scale_middle [2] and q [group] int32."""
    low = high = widen(weight[0])
    for k in range(weight.shape[0]):
        low, high = min(low, widen(weight[k])), max(high, widen(weight[k]))
    least, best = np.float32(np.inf), np.float32(1)
    for attempt in range(_SHRINKS + 1):
        # The last attempt repeats the best factor, to write its result.
        share = np.float32(1) - _SHRINK_STEP * np.float32(attempt) if attempt < _SHRINKS else best
        scale_middle[0] = narrow((high - low) * share / np.float32(15), scale_middle)
        step = widen(scale_middle[0])
        scale_middle[1] = narrow((low + high) * np.float32(0.5) + step * np.float32(0.5), scale_middle)
        middle = widen(scale_middle[1])
        inverse = np.float32(1) / step if step > np.float32(0) else np.float32(0)
        _round_to_steps(weight, middle, inverse, q)
        error = _squared_error(weight, step, middle, q)
        if error < least:
            least, best = error, share


@compiled_exactly
def _widen_block(packed: Any, group: Any, scales_middles: Any, first: Any, column: Any, out: Any) -> None:
    """Dequantizes packed [in, LANES / 2], the outputs first … first + LANES - 1, into `out`'s columns from `column`
    on."""
    half = LANES // 2
    for k in range(packed.shape[0]):
        scales = scales_middles[k // group]
        row = packed[k]
        for j in range(half):
            low = np.float32(np.int32(row[j] & np.uint8(15)) - np.int32(8))
            n = first + j
            out[k, column + j] = narrow(low * widen(scales[n, 0]) + widen(scales[n, 1]), out)
        for j in range(half):
            high = np.float32(np.int32(row[j] >> np.uint8(4)) - np.int32(8))
            n = first + half + j
            out[k, column + half + j] = narrow(high * widen(scales[n, 0]) + widen(scales[n, 1]), out)


# ---- a table


@compiled_exactly
def _nearest(weight: Any, inverse: Any, middles: Any, q: Any) -> None:
    """Writes the place of the nearest value of a table, from the middles [15] between its values."""
    for k in range(weight.shape[0]):
        q[k] = 0
    for place in range(middles.shape[0]):
        for k in range(weight.shape[0]):
            q[k] += np.uint8(widen(weight[k]) * inverse > middles[place])


@compiled
def _error_of_table(weight: Any, step: Any, table: Any, q: Any) -> Any:
    error = np.float32(0)
    for k in range(weight.shape[0]):
        off = widen(weight[k]) - table[q[k]] * step
        error += off * off
    return error


@compiled_exactly
def _group_to_table(weight: Any, table: Any, middles: Any, scale: Any, q: Any) -> None:
    """Rounds weight [group] to scale [1] · table [16]. q [group] uint8"""
    largest = np.float32(0)
    for k in range(weight.shape[0]):
        largest = max(largest, abs(widen(weight[k])))
    least, best = np.float32(np.inf), largest
    # A table has more values on one side, so the sign of a scale counts.
    for attempt in range(2 * _SHRINKS + 1):
        share = (_MOST_SHARE - _SHRINK_STEP * np.float32(attempt // 2)) * np.float32(1 - 2 * (attempt % 2))
        # The last attempt repeats the best factor, to write its result.
        scale[0] = narrow(largest * share if attempt < 2 * _SHRINKS else best, scale)
        step = widen(scale[0])
        inverse = np.float32(1) / step if step != np.float32(0) else np.float32(0)
        _nearest(weight, inverse, middles, q)
        error = _error_of_table(weight, step, table, q)
        if error < least:
            least, best = error, step


# ---- all rows


@compiled
def _round_8(job: Any, begin: Any, end: Any, element: Any) -> None:
    weight = nb.carray(pointer_to(job.weight), (job.count, job.inputs), element)
    scales = nb.carray(pointer_to(job.scales), (job.count, 1), element)
    q = nb.carray(pointer_to(job.q), (job.count, job.inputs), np.int8)
    for n in range(begin, end):
        _round_row(weight[n], scales[n], q[n])


@compiled
def _widen_8(job: Any, begin: Any, end: Any, element: Any) -> None:
    out = nb.carray(pointer_to(job.weight), (job.count, job.inputs), element)
    scales = nb.carray(pointer_to(job.scales), (job.count,), element)
    q = nb.carray(pointer_to(job.q), (job.count, job.inputs), np.int8)
    for n in range(begin, end):
        _widen_row(q[n], widen(scales[n]), out[n])


@compiled
def _round_4(job: Any, begin: Any, end: Any, element: Any) -> None:
    groups = job.inputs // job.group
    weight = nb.carray(pointer_to(job.weight), (job.count, groups, job.group), element)
    scales_middles = nb.carray(pointer_to(job.scales), (job.count, groups, 2), element)
    q = nb.carray(pointer_to(job.q), (job.count, groups, job.group), np.int32)
    for n in range(begin, end):
        for g in range(groups):
            _round_group(weight[n, g], scales_middles[n, g], q[n, g])


@compiled
def _to_table(job: Any, begin: Any, end: Any, element: Any) -> None:
    groups = job.inputs // job.group
    weight = nb.carray(pointer_to(job.weight), (job.count, groups, job.group), element)
    scales = nb.carray(pointer_to(job.scales), (job.count, groups, 1), element)
    q = nb.carray(pointer_to(job.q), (job.count, groups, job.group), np.uint8)
    table, middles = nb.carray(pointer_to(job.table), (16,), np.float32), np.empty(15, np.float32)
    for place in range(15):
        middles[place] = (table[place] + table[place + 1]) * np.float32(0.5)
    for n in range(begin, end):
        for g in range(groups):
            _group_to_table(weight[n, g], table, middles, scales[n, g], q[n, g])


@compiled
def _widen_4(job: Any, begin: Any, end: Any, element: Any) -> None:
    out = nb.carray(pointer_to(job.weight), (job.inputs, job.count * LANES), element)
    groups = job.inputs // job.group
    scales_middles = nb.carray(pointer_to(job.scales), (groups, job.outputs, 2), element)
    packed = nb.carray(pointer_to(job.q), (job.count, job.inputs, LANES // 2), np.uint8)
    for n in range(begin, end):
        _widen_block(packed[n], job.group, scales_middles, job.first + n * LANES, n * LANES, out)


@compiled
def _work(job: Any, element: Any) -> None:
    """Runs one thread's share of a job: claims rows until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (1,), np.int64)
    while True:
        begin = fetch_add(claimed, 0, job.at_once)
        if begin >= job.count:
            return
        end = min(begin + job.at_once, job.count)
        if job.operation == _ROUND_8:
            _round_8(job, begin, end, element)
        elif job.operation == _WIDEN_8:
            _widen_8(job, begin, end, element)
        elif job.operation == _ROUND_4:
            _round_4(job, begin, end, element)
        elif job.operation == _TO_TABLE:
            _to_table(job, begin, end, element)
        else:
            _widen_4(job, begin, end, element)


def _work_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16)


def _work_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32)


_FUNCTIONS: dict[np.dtype[Any], Callable[[Any], None]] = {
    np.dtype(np.uint16): _work_bfloat16,
    np.dtype(np.float32): _work_float32,
}


@cache
def _compiled_for(element: np.dtype[Any]) -> int:
    """Returns the address of a C function void (JOB *): compiled, or loaded, at the first call in a process."""
    return c_function(_FUNCTIONS[element], JOB)


def _run(
    operation: int, count: int, at_once: int, weight: Array, scales: Array, q: Array, **more: int
) -> None:
    assert weight.dtype == scales.dtype
    claimed = np.zeros(1, np.int64)
    jobs = np.zeros(1, JOB)
    job = jobs[0]
    job["operation"], job["count"], job["at_once"] = operation, count, at_once
    job["claimed"] = claimed.ctypes.data
    for name, array in (("weight", weight), ("scales", scales), ("q", q)):
        assert array.flags.c_contiguous
        job[name] = array.ctypes.data
    for name, number in more.items():
        job[name] = number
    threads = max(1, min(torch.get_num_threads(), -(-count // at_once)))
    run_on_threads(_compiled_for(weight.dtype), jobs.ctypes.data, threads)


# ---- public interface


def bits_of(rows: torch.Tensor) -> Array:
    """Returns a view of a tensor's memory for compiled code: float32 unchanged, bfloat16 as uint16."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.uint16).numpy()
    assert rows.dtype == torch.float32
    return rows.numpy()


_ROWS_AT_ONCE, _BLOCKS_AT_ONCE = 64, 8  # that a thread claims at a time


def round_to_8_bits(weight: Array, scales: Array, q: Array) -> None:
    """Quantizes weight [out, in] into scales [out] and q [out, in] int8."""
    _run(_ROUND_8, len(weight), _ROWS_AT_ONCE, weight, scales, q, inputs=weight.shape[1])


def from_8_bits(q: Array, scales: Array, out: Array) -> None:
    """Dequantizes q [out, in] int8 with scales [out] into out [out, in]."""
    _run(_WIDEN_8, len(q), _ROWS_AT_ONCE, out, scales, q, inputs=q.shape[1])


def round_to_4_bits(weight: Array, group: int, scales_middles: Array, q: Array) -> None:
    """Quantizes weight [out, in] into scales_middles [out, in / group, 2] and q [out, in] int32."""
    _run(_ROUND_4, len(weight), _ROWS_AT_ONCE, weight, scales_middles, q, inputs=weight.shape[1], group=group)


def round_to_table(weight: Array, group: int, table: Array, scales: Array, q: Array) -> None:
    """Rounds weight [out, in] to the nearest of table [16] float32, in ascending order, times the scale of the group
    that gives the least squared error: scales [out, in / group], q [out, in] uint8."""
    at = table.ctypes.data
    _run(
        _TO_TABLE,
        len(weight),
        _ROWS_AT_ONCE,
        weight,
        scales,
        q,
        inputs=weight.shape[1],
        group=group,
        table=at,
    )


def from_4_bits(packed: Array, group: int, scales_middles: Array, first: int, out: Array) -> None:
    """Dequantizes packed [blocks, in, LANES / 2] uint8, the outputs from `first` on, into out [in, blocks · LANES].

    scales_middles [in / group, all outputs, 2]
    """
    _run(
        _WIDEN_4,
        len(packed),
        _BLOCKS_AT_ONCE,
        out,
        scales_middles,
        packed,
        inputs=packed.shape[1],
        group=group,
        outputs=scales_middles.shape[1],
        first=first,
    )
