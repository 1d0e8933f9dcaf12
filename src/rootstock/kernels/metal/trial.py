"""Trial of the paged kernel at load: it must compile, and equal plain sums for the shapes that a model uses.

The model's own self-check runs the kernel too, but on contexts that are too short to be split.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from rootstock.kernels.metal.launch import StepRows
from rootstock.kernels.metal.paged_attention import LayerUse, PagedKernel

# (positions before, new rows) of the sequences of a step: a beginning, decodes, drafts, a context that is split
STEPS = (
    ((0, 1), (37, 1), (12, 1)),
    ((30, 5), (0, 16), (9, 1)),
    ((700, 1), (3, 1)),
    ((690, 3), (40, 1)),
)
WINDOW = 25
_MOST_CHARS = 300  # of a failure's message
# Largest error relative to the largest number of the answer. An output is rounded to its dtype, and a device's exp
# has a few more roundings than the host's.
TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}


def why_not(kernel: PagedKernel, uses: Iterable[LayerUse]) -> str | None:
    """Returns why the kernel must not be used for layers like these, or None. `PagedKernel.uses` has the layers of a
    model whose forward has run."""
    for use in sorted(uses, key=str):
        for number, lengths in enumerate(STEPS):
            for window in (None, WINDOW):
                try:
                    error = error_of(kernel, use, lengths, window, seed=number)
                except Exception as failure:  # the compiler of a device may raise anything
                    return (
                        f"the Metal kernel failed for {use}: {type(failure).__name__}: {_in_short(failure)}"
                    )
                if not error <= TOLERANCES[use.dtype]:
                    return f"the Metal kernel is wrong by {error:.1e} for {use}"
    return None


def _in_short(failure: Exception) -> str:
    """Returns the first line of a message, and the first error of a compiler, which stands in a later line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "error" in line]
    return ": ".join([*lines[:1], *errors[:1]])[:_MOST_CHARS]


def error_of(
    kernel: PagedKernel, use: LayerUse, lengths: tuple[tuple[int, int], ...], window: int | None, seed: int
) -> float:
    """Returns the largest error of a step's answer, relative to its largest number; infinity for a NaN."""
    random = np.random.default_rng(seed)
    heads, size = use.heads, use.block_size
    width = max(-(-(past + new) // size) for past, new in lengths)
    table = random.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    own = [(number, past + i) for number, (past, new) in enumerate(lengths) for i in range(new)]
    sequence_of, at = np.array(own, np.int32).T
    first = np.zeros_like(at) if window is None else np.maximum(0, at - window + 1)
    rows = StepRows(table, sequence_of, first, at + np.int32(1), size)

    def draw(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape, np.float32)).astype(use.dtype)

    def pool(dim: int) -> tuple[mx.array, mx.array, NDArray[np.float64]]:
        """Returns rows, their scales, and the numbers that they mean."""
        shape = (table.size * size, heads.kv_heads)
        if not use.is_quantized:
            rows = draw(*shape, dim)
            return rows, mx.ones(shape), _on_host(rows)
        codes = random.integers(-127, 128, (*shape, dim), np.int8)
        scales = random.uniform(0.002, 0.02, shape).astype(np.float32)
        return mx.array(codes), mx.array(scales), codes * scales[..., None].astype(np.float64)

    query = draw(len(at), heads.q_heads, heads.key_dim)
    keys, key_scales, k = pool(heads.key_dim)
    values, value_scales, v = pool(heads.value_dim)
    if use.shares_values:
        value_scales, v = key_scales, k[..., : heads.value_dim]
    sinks = draw(heads.q_heads) if use.has_sinks else None
    softcap = 5.0 if use.has_softcap else 0.0
    scale = heads.key_dim**-0.5
    out = kernel.attend(
        query,
        keys,
        None if use.shares_values else values,
        rows,
        scale=scale,
        scales=(key_scales, value_scales) if use.is_quantized else None,
        sinks=sinks,
        softcap=softcap,
        shared_value_dim=heads.value_dim,
    )
    answer = _on_host(out)
    expected = _attended(
        _on_host(query), k, v, rows, scale, softcap, None if sinks is None else _on_host(sinks)
    )
    error = np.abs(answer - expected).max() / np.abs(expected).max()
    return float(np.nan_to_num(error, nan=np.inf))


def _attended(
    query: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    rows: StepRows,
    scale: float,
    softcap: float,
    sinks: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """Computes [rows, q_heads, V] from gathers of each row's positions."""
    count, q_heads, dim = query.shape
    kv_heads = keys.shape[1]
    out = np.empty((count, q_heads, values.shape[2]))
    for row in range(count):
        positions = np.arange(rows.first[row], rows.ends[row])
        blocks = rows.table[rows.sequence_of[row], positions // rows.block_size].astype(np.int64)
        slots = blocks * rows.block_size + positions % rows.block_size
        q = query[row].reshape(kv_heads, -1, dim)
        scores = np.einsum("hgd,phd->hgp", q, keys[slots]) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        extra = (
            np.full((kv_heads, q.shape[1], 1), -np.inf) if sinks is None else sinks.reshape(kv_heads, -1, 1)
        )
        weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), extra))
        sums = weights.sum(-1, keepdims=True) + np.exp(
            extra - np.maximum(scores.max(-1, keepdims=True), extra)
        )
        out[row] = np.einsum("hgp,phv->hgv", weights / sums, values[slots]).reshape(q_heads, -1)
    return out


def _on_host(array: mx.array) -> NDArray[np.float64]:
    return np.array(array.astype(mx.float32)).astype(np.float64)
