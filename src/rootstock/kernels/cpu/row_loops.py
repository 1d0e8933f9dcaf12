"""Compiled loops for the row-wise operations of a decoder layer between its linear layers, each in one pass over
memory.

The operations are normalisation, residual sum with normalisation, rotation of queries and keys with their
normalisation, and the gates of an MLP and of attended rows. In torch each of them takes several operations. Each such
operation reads and writes memory and takes some microseconds to start, which is most of the time if there are few
rows. Here a row stays in registers in float32 and is rounded once.

All operations are one C function for each dtype. It takes a job that names the operation and the addresses. The
calling thread computes few rows itself, because waking a second thread costs more than computing them. Torch's
threads compute many rows; each claims some at a time. A row's result depends neither on the threads nor on other
rows.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
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
    narrow,
    nb,
    pointer_to,
    sigmoid,
    widen,
)
from rootstock.kernels.cpu.stages import Stages
from rootstock.kernels.cpu.threads import callable_at, run_on_threads

PARALLEL_FROM = 16  # rows
_AT_ONCE = 4  # rows that a thread claims

_NORM, _ADD, _ADD_NORM, _SILU, _GELU, _ROTATE, _GATE = range(7)

JOB = np.dtype(
    [
        ("operation", "i8"),
        ("rows", "i8"),
        ("width", "i8"),  # of a row of `out`; with heads, of a head
        ("claimed", "i8"),  # address of an int64: rows that threads have begun
        ("given", "i8"),  # addresses from here on
        ("more", "i8"),
        ("total", "i8"),
        ("out", "i8"),
        ("weight", "i8"),  # [width] float32, or 0
        ("key_weight", "i8"),
        ("cos", "i8"),
        ("sin", "i8"),
        ("key", "i8"),
        ("slots", "i8"),  # [rows] int64 of `pool_keys` and `pool_values`, or 0
        ("pool_keys", "i8"),
        ("pool_values", "i8"),
        ("q_heads", "i8"),
        ("kv_heads", "i8"),
        ("gated", "i8"),  # 1: a gate follows each query head of `given`
        ("rotary_dim", "i8"),
        ("eps", "f4"),
    ]
)
_FIELDS = struct.Struct("=20qf")  # packing all fields at once takes a tenth of the time of single assignments


# ---- one row


@compiled
def _scale_of(row: Any, eps: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        value = widen(row[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(row.shape[0]) + eps)


@compiled_exactly
def _norm_row(row: Any, weight: Any, eps: Any, out: Any) -> None:
    scale = _scale_of(row, eps)
    for i in range(row.shape[0]):
        out[i] = narrow(widen(row[i]) * scale * weight[i], out)


@compiled_exactly
def _add_row(row: Any, more: Any, out: Any) -> None:
    for i in range(row.shape[0]):
        out[i] = narrow(widen(row[i]) + widen(more[i]), out)


@compiled_exactly
def _silu_row(gate_up: Any, out: Any) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        out[i] = narrow(gate * sigmoid(gate) * widen(gate_up[width + i]), out)


@compiled_exactly
def _gelu_row(gate_up: Any, out: Any) -> None:
    """Computes gelu(gate) · up by the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        # (1 + tanh z) / 2 = 1 / (1 + e^-2z), without subtracting nearly equal numbers.
        twice = np.float32(2 * 0.7978845608) * (gate + np.float32(0.044715) * gate * gate * gate)
        out[i] = narrow(gate * sigmoid(twice) * widen(gate_up[width + i]), out)


@compiled_exactly
def _rotate_head(head: Any, weight: Any, has_weight: Any, eps: Any, cos: Any, sin: Any, out: Any) -> None:
    """Normalises a head if there is a weight, then rotates its first 2 · half dimensions in pairs (i, i + half).

    Each half has a loop of its own: LLVM does not vectorise a loop that writes to two places near each other.
    """
    dim = head.shape[0]
    half = cos.shape[0] // 2
    first, second = head[:half], head[half : 2 * half]
    low, high = out[:half], out[half : 2 * half]
    cos_low, cos_high = cos[:half], cos[half:]
    sin_low, sin_high = sin[:half], sin[half:]
    if has_weight:
        scale = _scale_of(head, eps)
        weight_low, weight_high = weight[:half], weight[half : 2 * half]
        for i in range(half):
            a = widen(first[i]) * scale * weight_low[i]
            b = widen(second[i]) * scale * weight_high[i]
            low[i] = narrow(a * widen(cos_low[i]) - b * widen(sin_low[i]), out)
        for i in range(half):
            a = widen(first[i]) * scale * weight_low[i]
            b = widen(second[i]) * scale * weight_high[i]
            high[i] = narrow(b * widen(cos_high[i]) + a * widen(sin_high[i]), out)
        for i in range(2 * half, dim):
            out[i] = narrow(widen(head[i]) * scale * weight[i], out)
    else:
        for i in range(half):
            low[i] = narrow(widen(first[i]) * widen(cos_low[i]) - widen(second[i]) * widen(sin_low[i]), out)
        for i in range(half):
            high[i] = narrow(
                widen(second[i]) * widen(cos_high[i]) + widen(first[i]) * widen(sin_high[i]), out
            )
        for i in range(2 * half, dim):
            out[i] = head[i]


@compiled_exactly
def _gate_head(gate: Any, head: Any, out: Any) -> None:
    for i in range(head.shape[0]):
        out[i] = narrow(widen(head[i]) * sigmoid(widen(gate[i])), out)


# ---- all rows


@compiled
def _rotate_rows(job: Any, first: Any, end: Any, element: Any) -> None:
    q_heads, kv_heads, dim, step = job.q_heads, job.kv_heads, job.width, 1 + job.gated
    first_key, first_value = step * q_heads, step * q_heads + kv_heads
    given = nb.carray(pointer_to(job.given), (job.rows, first_value + kv_heads, dim), element)
    query = nb.carray(pointer_to(job.out), (job.rows, q_heads, dim), element)
    key = nb.carray(pointer_to(job.key), (job.rows, kv_heads, dim), element)
    cos = nb.carray(pointer_to(job.cos), (job.rows, job.rotary_dim), element)
    sin = nb.carray(pointer_to(job.sin), (job.rows, job.rotary_dim), element)
    weight = nb.carray(pointer_to(job.weight), (dim,), np.float32)
    key_weight = nb.carray(pointer_to(job.key_weight), (dim,), np.float32)
    slots = nb.carray(pointer_to(job.slots), (job.rows,), np.int64)
    pool_keys = nb.carray(pointer_to(job.pool_keys), (1, kv_heads, dim), element)
    pool_values = nb.carray(pointer_to(job.pool_values), (1, kv_heads, dim), element)
    for r in range(first, end):
        for h in range(q_heads):
            _rotate_head(given[r, step * h], weight, job.weight != 0, job.eps, cos[r], sin[r], query[r, h])
        for h in range(kv_heads):
            head = given[r, first_key + h]
            _rotate_head(head, key_weight, job.key_weight != 0, job.eps, cos[r], sin[r], key[r, h])
        if job.slots != 0:
            slot = slots[r]
            for h in range(kv_heads):
                rotated, value = key[r, h], given[r, first_value + h]
                kept_key, kept_value = pool_keys[slot, h], pool_values[slot, h]
                for i in range(dim):
                    kept_key[i] = rotated[i]
                    kept_value[i] = value[i]


@compiled
def _gate_rows(job: Any, first: Any, end: Any, element: Any) -> None:
    q_heads, dim = job.q_heads, job.width
    given = nb.carray(pointer_to(job.given), (job.rows, 2 * (q_heads + job.kv_heads), dim), element)
    attended = nb.carray(pointer_to(job.more), (job.rows, q_heads, dim), element)
    out = nb.carray(pointer_to(job.out), (job.rows, q_heads, dim), element)
    for r in range(first, end):
        for h in range(q_heads):
            _gate_head(given[r, 2 * h + 1], attended[r, h], out[r, h])


@compiled
def _plain_rows(job: Any, first: Any, end: Any, element: Any) -> None:
    width = job.width
    of_gates = 2 if job.operation == _SILU or job.operation == _GELU else 1
    given = nb.carray(pointer_to(job.given), (job.rows, of_gates * width), element)
    more = nb.carray(pointer_to(job.more), (job.rows, width), element)
    total = nb.carray(pointer_to(job.total), (job.rows, width), element)
    out = nb.carray(pointer_to(job.out), (job.rows, width), element)
    weight = nb.carray(pointer_to(job.weight), (width,), np.float32)
    for r in range(first, end):
        if job.operation == _NORM:
            _norm_row(given[r], weight, job.eps, out[r])
        elif job.operation == _ADD:
            _add_row(given[r], more[r], out[r])
        elif job.operation == _ADD_NORM:
            _add_row(given[r], more[r], total[r])
            _norm_row(total[r], weight, job.eps, out[r])
        elif job.operation == _SILU:
            _silu_row(given[r], out[r])
        else:
            _gelu_row(given[r], out[r])


@compiled
def _work(job: Any, element: Any) -> None:
    """Runs one thread's share of a job: claims rows until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (1,), np.int64)
    while True:
        first = fetch_add(claimed, 0, _AT_ONCE)
        if first >= job.rows:
            return
        end = min(first + _AT_ONCE, job.rows)
        if job.operation == _ROTATE:
            _rotate_rows(job, first, end, element)
        elif job.operation == _GATE:
            _gate_rows(job, first, end, element)
        else:
            _plain_rows(job, first, end, element)


def _work_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16)


def _work_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32)


_FUNCTIONS: dict[torch.dtype, Callable[[Any], None]] = {
    torch.bfloat16: _work_bfloat16,
    torch.float32: _work_float32,
}

DTYPES = tuple(_FUNCTIONS)


@cache
def _compiled_for(dtype: torch.dtype) -> int:
    """Returns the address of a C function void (JOB *): compiled, or loaded, at the first call in a process."""
    return c_function(_FUNCTIONS[dtype], JOB)


# ---- public interface


class RowLoops:
    """Row-wise loops for rows of one dtype, float32 or bfloat16, on a CPU. They are compiled on construction.

    All tensors are contiguous and of that dtype, except weights, which are float32. One thread at a time may use
    them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._function = _compiled_for(dtype)
        self._call = callable_at(self._function)
        self._claimed = np.zeros(1, np.int64)
        self._claimed_at = self._claimed.ctypes.data
        self._job = np.zeros(1, JOB)
        self._job_at = self._job.ctypes.data
        self._job_bytes = memoryview(self._job.view(np.uint8))  # type: ignore[arg-type]
        self._stages: Stages | None = None

    @contextlib.contextmanager
    def recorded(self, stages: Stages) -> Iterator[None]:
        """Lets calls inside the context be recorded instead of run."""
        self._stages = stages
        try:
            yield
        finally:
            self._stages = None

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Computes out = rows / √(mean(rows²) + eps) · weight (Zhang and Sennrich 2019, arXiv 1910.07467).

        rows, out [rows, width], which may be the same tensor; weight [width] float32
        """
        self._run(_NORM, rows, out, weight=weight.data_ptr(), eps=eps)

    def add(self, rows: Tensor, more: Tensor, out: Tensor) -> None:
        """Computes out = rows + more, [rows, width] each. `out` may be one of the inputs."""
        self._run(_ADD, rows, out, more=self._address_of(more))

    def add_rms_norm(
        self, rows: Tensor, more: Tensor, weight: Tensor, eps: float, total: Tensor, out: Tensor
    ) -> None:
        """Computes total = rows + more, rounded, and out = rms_norm(total). Shapes as in `rms_norm`; `total` may be
        `rows`."""
        self._run(
            _ADD_NORM,
            rows,
            out,
            more=self._address_of(more),
            total=self._address_of(total),
            weight=weight.data_ptr(),
            eps=eps,
        )

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Computes out = silu(gate) · up. gate_up [rows, 2 · width], the gate first; out [rows, width]"""
        self._run(_SILU, gate_up, out)

    def gelu_tanh_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Computes out = gelu(gate) · up by the tanh approximation. gate_up [rows, 2 · width], the gate first; out
        [rows, width]"""
        self._run(_GELU, gate_up, out)

    def rotate(
        self,
        rows: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        eps: float,
        rotation: tuple[Tensor, Tensor] | None,
        query: Tensor,
        key: Tensor,
        pool: tuple[Tensor, Tensor, Tensor] | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Normalises queries and keys of all heads if weights are given, and rotates them by their positions.

        The rotation is RoPE (Su et al. 2021, arXiv 2104.09864); dimension i is paired with i + rotary_dim / 2.

        rows       [rows, q_heads + 2 · kv_heads, head_dim] queries, keys, values; if `gated`, a gate follows each
                   query head
        weights    [head_dim] float32, for the `rms_norm` of a head
        rotation   cosines and sines of each row's position, [rows, rotary_dim]; further dimensions are not rotated
        query, key [rows, q_heads, head_dim], [rows, kv_heads, head_dim], written
        pool       keys and values [slots, kv_heads, head_dim], and the slots [rows] int64 to which K and V are also
                   written
        """
        cos, sin = (None, None) if rotation is None else rotation
        keys, values, slots = (None, None, None) if pool is None else pool
        self._run(
            _ROTATE,
            rows,
            query,
            weight=0 if query_weight is None else query_weight.data_ptr(),
            key_weight=0 if key_weight is None else key_weight.data_ptr(),
            cos=self._address_of(cos),
            sin=self._address_of(sin),
            key=self._address_of(key),
            slots=0 if slots is None else slots.data_ptr(),
            pool_keys=self._address_of(keys),
            pool_values=self._address_of(values),
            q_heads=query.shape[1],
            kv_heads=key.shape[1],
            gated=int(gated),
            rotary_dim=0 if cos is None else cos.shape[-1],
            eps=eps,
        )

    def gate_heads(self, rows: Tensor, attended: Tensor, out: Tensor) -> None:
        """Computes out = attended · sigmoid(gate), with the gates of `rows` as in `rotate`.

        rows [rows, 2 · q_heads + 2 · kv_heads, head_dim]; attended, out [rows, q_heads, head_dim]
        """
        q_heads = out.shape[1]
        kv_heads = rows.shape[1] // 2 - q_heads
        self._run(_GATE, rows, out, more=self._address_of(attended), q_heads=q_heads, kv_heads=kv_heads)

    def _run(
        self,
        operation: int,
        given: Tensor,
        out: Tensor,
        more: int = 0,
        total: int = 0,
        weight: int = 0,
        key_weight: int = 0,
        cos: int = 0,
        sin: int = 0,
        key: int = 0,
        slots: int = 0,
        pool_keys: int = 0,
        pool_values: int = 0,
        q_heads: int = 0,
        kv_heads: int = 0,
        gated: int = 0,
        rotary_dim: int = 0,
        eps: float = 0.0,
    ) -> None:
        shape = out.shape
        rows = shape[0]
        _FIELDS.pack_into(
            self._job_bytes,
            0,
            operation,
            rows,
            shape[-1],
            self._claimed_at,
            self._address_of(given),
            more,
            total,
            self._address_of(out),
            weight,
            key_weight,
            cos,
            sin,
            key,
            slots,
            pool_keys,
            pool_values,
            q_heads,
            kv_heads,
            gated,
            rotary_dim,
            eps,
        )
        if self._stages is not None:
            self._stages.add(self._function, self._job, "claimed", 1)
            return
        self._claimed[0] = 0
        if rows < PARALLEL_FROM:
            self._call(self._job_at)
        else:
            run_on_threads(self._function, self._job_at, torch.get_num_threads())

    def _address_of(self, rows: Tensor | None) -> int:
        if rows is None:
            return 0
        assert rows.dtype is self.dtype
        assert rows.is_contiguous()
        return rows.data_ptr()
