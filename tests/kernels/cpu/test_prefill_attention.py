"""Prefill attention by pairs of bfloat16: against the reference, and in other divisions of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernels.batches import RaggedBatch, make_batch
from kernels.ragged import ragged_batches
from kernels.test_attention import assert_equals_reference, run
from kernels.test_quantized_rows import run_rounded
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.api import Attention, StepAttention
from rootstock.kernels.cpu import amx_tiles
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.cpu.prefill_attention import PrefillAttention, with_prefill_loops
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention

needs_pair_products = pytest.mark.skipif(
    not has_pair_products(), reason="needs products of bfloat16 pairs (AVX512-BF16)"
)


class NeverAsked:
    def prepare(self, spans: object, family: object = None) -> StepAttention:
        raise AssertionError("the loops serve these layers")


def served(batch: RaggedBatch) -> PrefillAttention:
    return PrefillAttention(batch.block_size, NeverAsked())


def piece(batch: RaggedBatch, kernel: Attention, spans: list[Span], rows: Tensor) -> Tensor:
    """Attends to the batch's pools with spans of a step that has these rows of the batch, in order."""
    step = kernel.prepare(spans, batch.family)
    pools = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
    return step(batch.query[rows], batch.key[rows], batch.value[rows], *pools, batch.scores)


@needs_pair_products
@given(ragged_batches(plain=True, head_dims=(32, 64, 96, 128), dtypes=(torch.bfloat16,)))
@settings(max_examples=150)
def test_prefill_loops_equal_the_reference(batch: RaggedBatch) -> None:
    assert_equals_reference(run(served(batch), batch), batch)


@needs_pair_products
@given(ragged_batches(plain=True, head_dims=(32, 64, 96), dtypes=(torch.bfloat16,)))
@settings(max_examples=60)
def test_prefill_loops_over_rounded_rows(batch: RaggedBatch) -> None:
    """Positions that no row may see have NaN as their scale."""
    assert_equals_reference(*run_rounded(served(batch), batch))


@given(ragged_batches())
@settings(max_examples=60)
def test_other_layers_are_attended_by_the_other_backend(batch: RaggedBatch) -> None:
    gather = GatherAttention(batch.block_size, torch.device("cpu"))
    assert_equals_reference(run(PrefillAttention(batch.block_size, gather), batch), batch)


@needs_pair_products
@pytest.mark.parametrize("family", [EVERYTHING, SlidingWindow(1, 1, 130), ChunkedAttention(1, 1, 200)])
@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim"), [(1, 64, 64), (5, 128, 128), (8, 96, 64), (97, 32, 32)]
)
def test_prompts_over_several_blocks_and_tiles(
    family: TokenFamily, group: int, head_dim: int, value_dim: int
) -> None:
    batch = make_batch(
        [(0, 333), (517, 100), (64, 64), (1000, 1)],
        block_size=32,
        q_heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=torch.bfloat16,
        sinks=True,
        family=family,
    )
    assert_equals_reference(run(served(batch), batch), batch)


@needs_pair_products
@pytest.mark.parametrize("family", [EVERYTHING, SlidingWindow(1, 1, 100)])
@pytest.mark.parametrize("cuts", [(150, 150), (1, 63, 64, 172), (90, 1, 1, 208)])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    family: TokenFamily, cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(
        [(40, 300), (7, 20)],
        block_size=16,
        q_heads=6,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        family=family,
    )
    span, mate = batch.spans
    whole = piece(batch, served(batch), [replace(span, row=0)], torch.arange(span.new))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernel, past, parts = served(batch), span.past, []
    mates = torch.arange(mate.row, mate.row + mate.new)
    for new in cuts:
        first = span.row + past - span.past
        rows = torch.cat([mates, torch.arange(first, first + new)])
        spans = [replace(mate, row=0), Span(mate.new, new, past, span.blocks)]
        parts.append(piece(batch, kernel, spans, rows)[mate.new :])
        past += new
    assert torch.equal(torch.cat(parts), whole)


def test_the_loops_are_chosen_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = GatherAttention(16, torch.device("cpu"))
    for pairs, matrix_units in ((False, False), (True, True)):
        monkeypatch.setattr(
            "rootstock.kernels.cpu.prefill_attention.has_pair_products", lambda has=pairs: has
        )
        monkeypatch.setattr(amx_tiles, "are_there", lambda has=matrix_units: has)
        assert with_prefill_loops(16, gather) is gather
    monkeypatch.setattr(amx_tiles, "are_there", lambda: False)
    assert isinstance(with_prefill_loops(16, gather), PrefillAttention)
