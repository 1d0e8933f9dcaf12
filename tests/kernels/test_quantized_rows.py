"""Pools in 8 bits: rows are rounded once, and kernels equal the reference over the rounded rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batches import RaggedBatch, make_batch
from kernels.ragged import ragged_batches, tunings
from kernels.test_attention import assert_equals_reference, numba_attention
from rootstock.cache.families import ChunkedAttention, SlidingWindow
from rootstock.kernels.api import Attention
from rootstock.kernels.cpu.kv_quantization import RoundingLoops
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.quantized_rows import RoundedRows, rounded, select_rows, widened
from rootstock.kernels.spans import EVERYTHING, slots_of
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.sliced_attention import SlicedAttention, Tuning


def pool_of(rows: Tensor) -> RoundedRows:
    """Rounds rows [slots, heads, dim]. NaN rows get NaN as their scale."""
    codes, scales = rounded(rows.nan_to_num(0.0))
    scales[rows.isnan().any(-1)] = torch.nan
    return RoundedRows(codes, scales.contiguous(), rows.dtype)


def run_rounded(kernel: Attention, batch: RaggedBatch) -> tuple[Tensor, RaggedBatch]:
    """Returns the kernel's result over the batch's pools in 8 bits, and the batch with the rounded rows."""
    keys, values = pool_of(batch.keys.flatten(0, 1)), pool_of(batch.values.flatten(0, 1))
    everything = torch.arange(len(keys.codes))
    slots = torch.cat(
        [torch.from_numpy(slots_of(s.blocks, s.past, s.end, batch.block_size)) for s in batch.spans]
    )
    held = replace(
        batch,
        key=select_rows(keys, slots),
        value=select_rows(values, slots),
        keys=select_rows(keys, everything).view_as(batch.keys),
        values=select_rows(values, everything).view_as(batch.values),
    )
    step = kernel.prepare(batch.spans, batch.family)
    with torch.inference_mode():
        return step(held.query, held.key, held.value, keys, values, held.scores), held


@given(ragged_batches(plain=True), tunings)
@settings(max_examples=60)
def test_sliced_attention_over_rounded_rows(batch: RaggedBatch, tuning: Tuning) -> None:
    assert_equals_reference(*run_rounded(SlicedAttention(batch.block_size, 1, tuning), batch))


@pytest.mark.skipif(not has_pair_products(), reason="needs products of bfloat16 pairs (AVX512-BF16)")
@given(
    ragged_batches(plain=True, head_dims=(32, 64, 96), dtypes=(torch.bfloat16,)),
    st.sampled_from([1, 8, 20]),
    st.sampled_from([4, 16, 48, 128]),
)
@settings(max_examples=100)
def test_pair_products_over_rounded_rows(batch: RaggedBatch, few_rows: int, least_item: int) -> None:
    """Positions that no row may see have NaN as their scale."""
    assert_equals_reference(*run_rounded(numba_attention(batch, few_rows, 0, least_item), batch))


@given(ragged_batches(), st.sampled_from([1, 1 << 24]))
@settings(max_examples=60)
def test_gathered_attention_over_rounded_rows(batch: RaggedBatch, most_scores: int) -> None:
    kernel = GatherAttention(batch.block_size, torch.device("cpu"), most_scores)
    assert_equals_reference(*run_rounded(kernel, batch))


@given(ragged_batches(), st.sampled_from([1, 8, 20]), st.sampled_from([0, 1 << 30]))
@settings(max_examples=150)
def test_compiled_attention_over_rounded_rows(batch: RaggedBatch, few_rows: int, serial_bytes: int) -> None:
    """Positions that no row may see have NaN as their scale."""
    assert_equals_reference(*run_rounded(numba_attention(batch, few_rows, serial_bytes), batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_attention_over_several_items_of_rounded_rows(dtype: torch.dtype) -> None:
    for block_size in (1, 7, 64):
        for family in (EVERYTHING, SlidingWindow(1, 1, 300), ChunkedAttention(1, 1, 1000)):
            batch = make_batch(
                [(700, 1), (129, 3), (60, 30), (9000, 2)],
                block_size=block_size,
                head_dim=40,
                dtype=dtype,
                sinks=True,
                family=family,
            )
            assert_equals_reference(*run_rounded(numba_attention(batch), batch))


@given(ragged_batches(plain=True), st.sampled_from([4, 16, 48]))
@settings(max_examples=60)
def test_prefixes_that_decodes_share_in_rounded_rows(batch: RaggedBatch, least_item: int) -> None:
    assert_equals_reference(*run_rounded(numba_attention(batch, least_item=least_item), batch))


def test_pools_of_a_dtype_without_loops_use_the_other_backend() -> None:
    batch = make_batch([(30, 1), (7, 4)], dtype=torch.float16)
    assert_equals_reference(*run_rounded(numba_attention(batch), batch))


# ---- rounding


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 3, 16, 65]),
    st.sampled_from([1, 5, 200]),
    st.integers(0, 1000),
)
@settings(max_examples=40)
def test_compiled_rounding_is_that_of_torch(dtype: torch.dtype, dim: int, tokens: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = 3
    rows = torch.randn(heads, tokens, dim, generator=random).mul(3).to(dtype).transpose(0, 1)  # strided
    slots = torch.randperm(300, generator=random)[:tokens]
    pools, reads = [], []
    for loops in (None, RoundingLoops(dtype)):
        codes, scales = torch.zeros(300, heads, dim, dtype=torch.int8), torch.zeros(300, heads)
        pool = RoundedRows(codes, scales, dtype, loops)
        reads.append(pool.write(slots, rows))
        assert torch.equal(reads[-1], select_rows(pool, slots)), "a step attends to what the pool holds"
        reads.append(pool.read(slice(20, 270), torch.empty(250, heads, dim, dtype=dtype)))
        pools.append(pool)
    assert torch.equal(pools[1].scales, pools[0].scales)
    # One multiplies and adds in one operation, the other in two.
    off = (pools[1].codes.int() - pools[0].codes.int()).abs()
    assert off.max() <= 1
    assert off.sum() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_comes_back_within_half_a_scale_and_zeros_as_zeros(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[3] = 0
    rows[4] = 1e-38 if dtype != torch.float16 else 0
    codes, scales = rounded(rows)
    back = widened(codes, scales, torch.empty_like(rows))
    assert not back[3:5].any()
    units = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    allowed = 0.5001 * scales.unsqueeze(-1) + units * rows.float().abs() + 1e-37
    assert bool(((back.float() - rows.float()).abs() <= allowed).all())
    error = (back.float() - rows.float()).square().mean().sqrt() / rows.float().square().mean().sqrt()
    assert error < 0.008


def test_rows_with_nan_or_infinity_are_read_as_nan() -> None:
    rows = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(2))
    rows[1, 0, 3] = torch.nan
    rows[2, 1, 5] = torch.inf
    for loops in (None, RoundingLoops(torch.float32)):
        pool = RoundedRows(torch.zeros(4, 2, 16, dtype=torch.int8), torch.zeros(4, 2), torch.float32, loops)
        read = pool.write(torch.arange(4), rows)
        assert read[1, 0].isnan().all()
        assert read[2, 1].isnan().all()
        assert torch.equal(select_rows(pool, torch.arange(4)).isnan(), read.isnan())
        others = torch.stack([read[0, 0], read[0, 1], read[1, 1], read[2, 0], read[3, 0], read[3, 1]])
        assert others.isfinite().all()


def test_rounding_rounded_rows_again_changes_nothing() -> None:
    rows = torch.randn(500, 4, 32, generator=torch.Generator().manual_seed(1))
    codes, scales = rounded(rows)
    again, _ = rounded(widened(codes, scales, torch.empty_like(rows)))
    assert torch.equal(again, codes)
