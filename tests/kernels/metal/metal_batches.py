"""Ragged batches for the Metal kernels: the step that they attend, and the reference's answer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.batches import RaggedBatch
from rootstock.kernels import reference
from rootstock.kernels.metal.launch import StepRows
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.kernels.reference import first_seen

DTYPES = {
    torch.float32: mx.float32,
    torch.float16: mx.float16,
    torch.bfloat16: mx.bfloat16,
    torch.int8: mx.int8,
}
# Largest absolute error. The output is rounded to the dtype; the sums are in float32 always.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def step_rows(batch: RaggedBatch) -> StepRows:
    width = max(len(span.blocks) for span in batch.spans)
    table = np.zeros((len(batch.spans), width), np.int32)
    for row, span in zip(table, batch.spans, strict=True):
        row[: len(span.blocks)] = span.blocks
    own = [(number, span.past + i) for number, span in enumerate(batch.spans) for i in range(span.new)]
    sequence_of, positions = np.array(own, np.int32).T
    first = np.array([first_seen(batch.family, int(p)) for p in positions], np.int32)
    return StepRows(table, sequence_of, first, positions + np.int32(1), batch.block_size)


def to_mlx(tensor: torch.Tensor) -> mx.array:
    return mx.array(tensor.float().numpy()).astype(DTYPES[tensor.dtype])


def quantized(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a pool [blocks, size, heads, dim] to int8. Returns the codes and the scales [blocks, size, heads].
    The scale of a position that must not be read is not a number."""
    scales = pool.float().abs().amax(-1) / 127
    codes = (pool.float() / scales[..., None]).round()
    return codes.nan_to_num(1.0).to(torch.int8), scales


def attend(
    kernel: PagedKernel, batch: RaggedBatch, *, shared_value_dim: int = 0, is_quantized: bool = False
) -> NDArray[np.float32]:
    """Attends a batch. With `shared_value_dim` V is the beginning of K, with `is_quantized` the pools are int8."""
    scores = batch.scores
    keys, values, scales = batch.keys, batch.values, None
    if is_quantized:
        (keys, key_scales), (values, value_scales) = quantized(keys), quantized(values)
        value_scales = key_scales if shared_value_dim else value_scales
        scales = to_mlx(key_scales.flatten(0, 1)), to_mlx(value_scales.flatten(0, 1))
    out = kernel.attend(
        to_mlx(batch.query),
        to_mlx(keys.flatten(0, 1)),
        None if shared_value_dim else to_mlx(values.flatten(0, 1)),
        step_rows(batch),
        scale=scores.scale,
        scales=scales,
        sinks=None if scores.sinks is None else to_mlx(scores.sinks),
        softcap=scores.softcap or 0.0,
        shared_value_dim=shared_value_dim,
    )
    assert out.dtype == DTYPES[batch.query.dtype]
    return np.array(out.astype(mx.float32))


def expected(
    batch: RaggedBatch, *, shared_value_dim: int = 0, is_quantized: bool = False
) -> NDArray[np.float64]:
    keys, values = batch.keys, batch.values
    if is_quantized:
        keys, values = (codes.float() * scales[..., None] for codes, scales in map(quantized, (keys, values)))
    values = keys[..., :shared_value_dim] if shared_value_dim else values
    answer: NDArray[np.float64] = reference.attend(
        batch.query, keys, values, batch.spans, batch.scores, batch.family
    ).numpy()
    return answer


def worst_error(kernel: PagedKernel, batch: RaggedBatch, **options: Any) -> float:
    """Returns the largest absolute error; infinity for a NaN. The options are those of `attend`."""
    error = np.abs(attend(kernel, batch, **options) - expected(batch, **options))
    return float(np.nan_to_num(error, nan=np.inf).max())
