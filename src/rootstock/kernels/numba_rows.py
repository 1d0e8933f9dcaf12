"""What a decoder layer does row by row between its linear layers, each in one pass over memory, in Numba.

Normalisation, the sum of a residual and normalisation, rotation of queries and keys with their normalisation, and the
gate of an MLP: a handful of operations each in torch, every one of which reads and writes memory and costs some
microseconds to start, which at few rows is most of the time. Here a row stays in registers in float32 from its first
value to its last, and is rounded once.

Rows are NumPy arrays: float32, or bfloat16 as uint16 (`bits_of`). Few rows are done by the calling thread, since to
start a second one costs more than they do; what a row's result is does not depend on that, nor on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock.kernels.numba_target import compiled, compiled_parallel, exp, narrow, nb, widen

Rows = NDArray[Any]  # float32, or bfloat16 as uint16

PARALLEL_FROM = 16  # rows


def bits_of(rows: Tensor) -> Rows:
    """The tensor's own memory: [...] float32 as it is, bfloat16 as uint16."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.uint16).numpy()
    assert rows.dtype == torch.float32
    return rows.numpy()


# ---- one row


@compiled
def _norm_row(row: Rows, weight: Rows, eps: np.float32, out: Rows) -> None:
    total = np.float32(0)
    for i in range(row.shape[0]):
        value = widen(row[i])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(row.shape[0]) + eps)
    for i in range(row.shape[0]):
        out[i] = narrow(widen(row[i]) * scale * weight[i], out)


@compiled
def _add_row(row: Rows, more: Rows, out: Rows) -> None:
    for i in range(row.shape[0]):
        out[i] = narrow(widen(row[i]) + widen(more[i]), out)


@compiled
def _silu_row(gate_up: Rows, out: Rows) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        # 1 / (1 + e^-|x|) cannot overflow; for x < 0 it is turned around.
        small = exp(-abs(gate))
        sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
        out[i] = narrow(gate * sigmoid * widen(gate_up[width + i]), out)


@compiled
def _gelu_row(gate_up: Rows, out: Rows) -> None:
    """tanh's approximation of the Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv 1606.08415)"""
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        # (1 + tanh z) / 2 = 1 / (1 + e^-2z), without the difference of nearly equal numbers.
        twice = np.float32(2 * 0.7978845608) * (gate + np.float32(0.044715) * gate * gate * gate)
        small = exp(-abs(twice))
        share = (np.float32(1) if twice >= 0 else small) / (np.float32(1) + small)
        out[i] = narrow(gate * share * widen(gate_up[width + i]), out)


@compiled
def _rotate_head(head: Rows, weight: Rows, eps: np.float32, cos: Rows, sin: Rows, out: Rows) -> None:
    """Normalised if there is a weight, then its first 2 · half dimensions rotated in pairs (i, i + half)."""
    dim = head.shape[0]
    half = cos.shape[0] // 2
    if weight.shape[0]:
        total = np.float32(0)
        for i in range(dim):
            value = widen(head[i])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
        for i in range(half):
            a = widen(head[i]) * scale * weight[i]
            b = widen(head[i + half]) * scale * weight[i + half]
            out[i] = narrow(a * widen(cos[i]) - b * widen(sin[i]), out)
            out[i + half] = narrow(b * widen(cos[i + half]) + a * widen(sin[i + half]), out)
        for i in range(2 * half, dim):
            out[i] = narrow(widen(head[i]) * scale * weight[i], out)
        return
    for i in range(half):
        a = widen(head[i])
        b = widen(head[i + half])
        out[i] = narrow(a * widen(cos[i]) - b * widen(sin[i]), out)
        out[i + half] = narrow(b * widen(cos[i + half]) + a * widen(sin[i + half]), out)
    for i in range(2 * half, dim):
        out[i] = head[i]


@compiled
def _rotate_row(
    row: Rows,
    query_weight: Rows,
    key_weight: Rows,
    eps: np.float32,
    cos: Rows,
    sin: Rows,
    query: Rows,
    key: Rows,
) -> None:
    q_heads = query.shape[0]
    for head in range(q_heads):
        _rotate_head(row[head], query_weight, eps, cos, sin, query[head])
    for head in range(key.shape[0]):
        _rotate_head(row[q_heads + head], key_weight, eps, cos, sin, key[head])


# ---- all rows


@compiled
def _norms(rows: Rows, weight: Rows, eps: np.float32, out: Rows) -> None:
    for r in range(rows.shape[0]):
        _norm_row(rows[r], weight, eps, out[r])


@compiled_parallel
def _norms_parallel(rows: Rows, weight: Rows, eps: np.float32, out: Rows) -> None:
    for r in nb.prange(rows.shape[0]):
        _norm_row(rows[r], weight, eps, out[r])


@compiled
def _sums(rows: Rows, more: Rows, out: Rows) -> None:
    for r in range(rows.shape[0]):
        _add_row(rows[r], more[r], out[r])


@compiled_parallel
def _sums_parallel(rows: Rows, more: Rows, out: Rows) -> None:
    for r in nb.prange(rows.shape[0]):
        _add_row(rows[r], more[r], out[r])


@compiled
def _sum_norms(rows: Rows, more: Rows, weight: Rows, eps: np.float32, total: Rows, out: Rows) -> None:
    for r in range(rows.shape[0]):
        _add_row(rows[r], more[r], total[r])
        _norm_row(total[r], weight, eps, out[r])


@compiled_parallel
def _sum_norms_parallel(
    rows: Rows, more: Rows, weight: Rows, eps: np.float32, total: Rows, out: Rows
) -> None:
    for r in nb.prange(rows.shape[0]):
        _add_row(rows[r], more[r], total[r])
        _norm_row(total[r], weight, eps, out[r])


@compiled
def _silus(gate_up: Rows, out: Rows) -> None:
    for r in range(out.shape[0]):
        _silu_row(gate_up[r], out[r])


@compiled_parallel
def _silus_parallel(gate_up: Rows, out: Rows) -> None:
    for r in nb.prange(out.shape[0]):
        _silu_row(gate_up[r], out[r])


@compiled
def _gelus(gate_up: Rows, out: Rows) -> None:
    for r in range(out.shape[0]):
        _gelu_row(gate_up[r], out[r])


@compiled_parallel
def _gelus_parallel(gate_up: Rows, out: Rows) -> None:
    for r in nb.prange(out.shape[0]):
        _gelu_row(gate_up[r], out[r])


@compiled
def _rotations(
    rows: Rows,
    query_weight: Rows,
    key_weight: Rows,
    eps: np.float32,
    cos: Rows,
    sin: Rows,
    query: Rows,
    key: Rows,
) -> None:
    for r in range(rows.shape[0]):
        _rotate_row(rows[r], query_weight, key_weight, eps, cos[r], sin[r], query[r], key[r])


@compiled_parallel
def _rotations_parallel(
    rows: Rows,
    query_weight: Rows,
    key_weight: Rows,
    eps: np.float32,
    cos: Rows,
    sin: Rows,
    query: Rows,
    key: Rows,
) -> None:
    for r in nb.prange(rows.shape[0]):
        _rotate_row(rows[r], query_weight, key_weight, eps, cos[r], sin[r], query[r], key[r])


# ---- what others call


def rms_norm(rows: Rows, weight: Rows, eps: np.float32, out: Rows) -> None:
    """out = rows / √(mean(rows²) + eps) · weight (Zhang and Sennrich 2019, arXiv 1910.07467)

    rows, out  [rows, width] of one dtype
    weight     [width] float32
    """
    (_norms if len(rows) < PARALLEL_FROM else _norms_parallel)(rows, weight, eps, out)


def add(rows: Rows, more: Rows, out: Rows) -> None:
    """out = rows + more, [rows, width] of one dtype each; `out` may be one of the others"""
    (_sums if len(rows) < PARALLEL_FROM else _sums_parallel)(rows, more, out)


def add_rms_norm(rows: Rows, more: Rows, weight: Rows, eps: np.float32, total: Rows, out: Rows) -> None:
    """total = rows + more, rounded; out = its `rms_norm`. Shapes as there; `total` may be `rows`."""
    (_sum_norms if len(rows) < PARALLEL_FROM else _sum_norms_parallel)(rows, more, weight, eps, total, out)


def silu_and_mul(gate_up: Rows, out: Rows) -> None:
    """out = silu(gate) · up; gate_up [rows, 2 · width], the gate first; out [rows, width]"""
    (_silus if len(out) < PARALLEL_FROM else _silus_parallel)(gate_up, out)


def gelu_tanh_and_mul(gate_up: Rows, out: Rows) -> None:
    """out = gelu(gate) · up, by tanh; gate_up [rows, 2 · width], the gate first; out [rows, width]"""
    (_gelus if len(out) < PARALLEL_FROM else _gelus_parallel)(gate_up, out)


def rotate(
    rows: Rows,
    query_weight: Rows,
    key_weight: Rows,
    eps: np.float32,
    cos: Rows,
    sin: Rows,
    query: Rows,
    key: Rows,
) -> None:
    """Queries and keys of all heads, each normalised if there are weights for that, and rotated by its position
    (Su et al. 2021, arXiv 2104.09864; dimension i is paired with i + rotary_dim / 2).

    rows          [rows, q_heads + kv_heads + …, head_dim] queries first, then keys; what follows is not read
    query_weight  [head_dim] float32 of the `rms_norm` of a query's head, or [0] for none; key_weight likewise
    cos, sin      [rows, rotary_dim] of each row's position; dimensions beyond rotary_dim are not rotated
    query, key    [rows, q_heads, head_dim], [rows, kv_heads, head_dim], written
    """
    work = _rotations if len(rows) < PARALLEL_FROM else _rotations_parallel
    work(rows, query_weight, key_weight, eps, cos, sin, query, key)
