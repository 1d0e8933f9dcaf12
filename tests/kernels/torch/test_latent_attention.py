"""Attention over latents equals attention over the expanded K and V."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batches import RaggedBatch, make_batch
from kernels.ragged import families, tunings
from rootstock.cache.families import SlidingWindow
from rootstock.kernels import reference
from rootstock.kernels.api import Attention
from rootstock.kernels.cpu.attention import NumbaAttention
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.latent_attention import (
    LatentAttention,
    LatentStepAttention,
    gather_latents,
    sliced_latents,
)
from rootstock.kernels.torch.sliced_attention import Tuning

CPU = torch.device("cpu")


def latents(batch: RaggedBatch, nope: int, value_dim: int) -> tuple[RaggedBatch, Tensor]:
    """Returns a batch whose K are latents and whose V are rotary keys, with queries [tokens, q_heads, nope + rope],
    and the weight that expands latents, [q_heads, nope + value_dim, rank]."""
    rank, rope = batch.keys.shape[-1], batch.values.shape[-1]
    tokens, q_heads, _ = batch.query.shape
    random = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, q_heads, nope + rope, generator=random)
    up = torch.randn(q_heads, nope + value_dim, rank, generator=random) * rank**-0.5
    scores = replace(batch.scores, scale=(nope + rope) ** -0.5 * 1.3)  # as yarn's, not that of the dimensions
    return replace(batch, query=query.to(batch.query.dtype), scores=scores), up.to(batch.query.dtype)


def assert_equals_expanded(
    kernel: LatentAttention | Attention, batch: RaggedBatch, up: Tensor, tolerance: float
) -> None:
    step = kernel.prepare(batch.spans, batch.family)
    latent_step = step if isinstance(step, LatentStepAttention) else LatentStepAttention(step)
    keys, values = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
    with torch.inference_mode():
        out = latent_step(batch.query, batch.key, batch.value, keys, values, batch.scores, up)
        again = latent_step(batch.query, batch.key, batch.value, keys, values, batch.scores, up)
    assert torch.equal(out, again), "a step gives each layer the same"
    expected = reference.attend_latents(
        batch.query, batch.keys, batch.values, batch.spans, batch.scores, up, batch.family
    )
    assert out.shape == expected.shape
    assert out.dtype == batch.query.dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def latent_batches(draw: st.DrawFn) -> tuple[RaggedBatch, Tensor]:
    past_and_new = st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 20)))
    batch = make_batch(
        draw(st.lists(past_and_new, min_size=1, max_size=5)),
        block_size=draw(st.sampled_from([1, 4, 8])),
        q_heads=draw(st.sampled_from([1, 3, 4])),
        kv_heads=1,
        head_dim=draw(st.sampled_from([4, 16, 20])),
        value_dim=draw(st.sampled_from([2, 8])),
        layout=draw(st.sampled_from(["scattered", "runs", "contiguous"])),
        shared=draw(st.sampled_from([0, 16, 90])),
        seed=draw(st.integers(0, 2**16)),
        sinks=draw(st.booleans()),
        family=draw(families),
    )
    return latents(batch, nope=draw(st.sampled_from([1, 8])), value_dim=draw(st.sampled_from([1, 8, 24])))


@given(latent_batches(), tunings)
@settings(max_examples=100)
def test_attention_over_latents_equals_attention_over_expanded_rows(
    batch_and_up: tuple[RaggedBatch, Tensor], tuning: Tuning
) -> None:
    batch, up = batch_and_up
    assert_equals_expanded(LatentAttention(batch.block_size, CPU, 1, tuning), batch, up, 1e-5)


@given(latent_batches(), st.sampled_from([1, 8]))
@settings(max_examples=60)
def test_compiled_attention_over_latents(batch_and_up: tuple[RaggedBatch, Tensor], few_rows: int) -> None:
    batch, up = batch_and_up
    beside = sliced_latents(batch.block_size, 1, None)
    kernel = NumbaAttention(
        batch.block_size, beside, latents=True, few_rows=few_rows, serial_bytes=0, least_item=4 * few_rows
    )
    assert_equals_expanded(kernel, batch, up, 1e-5)


@given(latent_batches(), st.sampled_from([100, 1 << 24]))
@settings(max_examples=50)
def test_gathered_attention_over_latents(batch_and_up: tuple[RaggedBatch, Tensor], most_scores: int) -> None:
    batch, up = batch_and_up
    kernel = GatherAttention(batch.block_size, CPU, most_scores, gather_latents)
    assert_equals_expanded(kernel, batch, up, 1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_latents_in_bfloat16_err_by_roundings(window: int | None) -> None:
    lengths = [(300, 1), (257, 1), (100, 90), (0, 65)]
    family = {} if window is None else {"family": SlidingWindow(1, 1, window)}
    batch = make_batch(lengths, kv_heads=1, head_dim=64, value_dim=16, dtype=torch.bfloat16, **family)
    batch, up = latents(batch, nope=32, value_dim=32)
    beside = sliced_latents(batch.block_size, 160, None)
    for kernel in (
        LatentAttention(batch.block_size, CPU),
        NumbaAttention(batch.block_size, beside, latents=True),
    ):
        assert_equals_expanded(kernel, batch, up, 4e-2)
