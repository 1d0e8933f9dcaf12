"""Every kernel equals the reference, over random ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batches import RaggedBatch, make_batch
from kernels.ragged import families, ragged_batches, tunings
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels import reference
from rootstock.kernels.api import Attention
from rootstock.kernels.cpu.amx_tiles import are_there
from rootstock.kernels.cpu.attention import NumbaAttention, _lay_out
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.spans import EVERYTHING, Span, slots_of
from rootstock.kernels.torch import gathered_attention
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.sliced_attention import Scratch, SlicedAttention, Tuning

SLICED = Tuning(slice_bytes=7, chunk_slice_bytes=20, share_from=1)  # for positions of one byte


def run(kernel: Attention, batch: RaggedBatch) -> Tensor:
    keys, values = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
    step = kernel.prepare(batch.spans, batch.family)
    with torch.inference_mode():
        out = step(batch.query, batch.key, batch.value, keys, values, batch.scores)
        again = step(batch.query, batch.key, batch.value, keys, values, batch.scores)
    assert torch.equal(out, again), "a step gives each layer the same"
    return out


def run_rows(kernel: NumbaAttention, batch: RaggedBatch, spans: Sequence[Span]) -> Tensor:
    """Attends adjacent spans of the batch as a step of their own."""
    first, end = spans[0].row, spans[-1].row + spans[-1].new
    step = kernel.prepare([replace(span, row=span.row - first) for span in spans], batch.family)
    new, pools = slice(first, end), (batch.keys.flatten(0, 1), batch.values.flatten(0, 1))
    return step(batch.query[new], batch.key[new], batch.value[new], *pools, batch.scores)


def assert_equals_reference(out: Tensor, batch: RaggedBatch) -> None:
    expected = reference.attend(
        batch.query, batch.keys, batch.values, batch.spans, batch.scores, batch.family
    )
    assert out.shape == expected.shape
    assert out.dtype == batch.query.dtype
    # bfloat16 keeps 8 bits: weights, each piece and their sum are rounded to it.
    tolerance = 1e-5 if batch.query.dtype == torch.float32 else 2.5e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@given(ragged_batches(plain=True), tunings)
@settings(max_examples=150)
def test_sliced_attention_equals_the_reference(batch: RaggedBatch, tuning: Tuning) -> None:
    assert_equals_reference(run(SlicedAttention(batch.block_size, 1, tuning), batch), batch)


@given(ragged_batches(), st.sampled_from([1, 100, 1 << 24]))
@settings(max_examples=100)
def test_gathered_attention_equals_the_reference(batch: RaggedBatch, most_scores: int) -> None:
    kernel = GatherAttention(batch.block_size, torch.device("cpu"), most_scores)
    assert_equals_reference(run(kernel, batch), batch)


def numba_attention(
    batch: RaggedBatch, few_rows: int = 8, serial_bytes: int = 0, least_item: int = 128
) -> NumbaAttention:
    beside = GatherAttention(batch.block_size, torch.device("cpu"))
    return NumbaAttention(
        batch.block_size, beside, few_rows=few_rows, serial_bytes=serial_bytes, least_item=least_item
    )


@given(
    ragged_batches(),
    st.sampled_from([1, 8, 20]),
    st.sampled_from([0, 1 << 30]),
    st.sampled_from([4, 16, 48, 128]),
)
@settings(max_examples=300)
def test_compiled_attention_equals_the_reference(
    batch: RaggedBatch, few_rows: int, serial_bytes: int, least_item: int
) -> None:
    kernel = numba_attention(batch, few_rows, serial_bytes, least_item)
    assert_equals_reference(run(kernel, batch), batch)


@given(
    ragged_batches(head_dims=(32, 64, 96), block_sizes=(16, 32, 48), dtypes=(torch.bfloat16,)),
    st.sampled_from([1, 8, 20]),
    st.sampled_from([4, 16, 48, 128]),
)
@settings(max_examples=200)
@pytest.mark.skipif(not are_there(), reason="needs matrix units for bfloat16 (AMX)")
def test_attention_by_matrix_units_equals_the_reference(
    batch: RaggedBatch, few_rows: int, least_item: int
) -> None:
    kernel = numba_attention(batch, few_rows, 0, least_item)
    assert_equals_reference(run(kernel, batch), batch)


@given(
    ragged_batches(plain=True, head_dims=(32, 64, 96), dtypes=(torch.bfloat16,)),
    st.sampled_from([1, 8, 20]),
    st.sampled_from([4, 16, 48, 128]),
)
@settings(max_examples=200)
@pytest.mark.skipif(are_there() or not has_pair_products(), reason="needs AVX512-BF16, and no AMX")
def test_attention_by_pair_products_equals_the_reference(
    batch: RaggedBatch, few_rows: int, least_item: int
) -> None:
    kernel = numba_attention(batch, few_rows, 0, least_item)
    assert_equals_reference(run(kernel, batch), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_attention_over_several_items_of_work(dtype: torch.dtype) -> None:
    """Chunks of 128, 256 and 512 positions, tiles of 64, blocks that end within and without them."""
    for block_size in (1, 7, 16, 64):
        for family in (EVERYTHING, SlidingWindow(1, 1, 300), ChunkedAttention(1, 1, 1000)):
            lengths = [(700, 1), (129, 3), (2100, 1), (60, 30), (9000, 2)]
            batch = make_batch(
                lengths, block_size=block_size, head_dim=40, dtype=dtype, sinks=True, family=family
            )
            assert_equals_reference(run(numba_attention(batch), batch), batch)


def test_compiled_attention_of_a_row_does_not_depend_on_its_batch() -> None:
    batch = make_batch([(300, 1), (2500, 1), (64, 1), (900, 1)])
    out = run(numba_attention(batch), batch)
    for span in batch.spans:
        alone = run_rows(numba_attention(batch, serial_bytes=1 << 30), batch, [span])
        assert torch.equal(alone, out[span.row : span.row + 1])


def test_queries_of_compiled_attention_may_lie_in_any_order() -> None:
    batch = make_batch([(300, 1), (70, 4)])
    strided = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(
        run(numba_attention(batch), replace(batch, query=strided)), run(numba_attention(batch), batch)
    )


def test_pools_without_compiled_loops_use_the_other_backend() -> None:
    batch = make_batch([(30, 1), (7, 4)], dtype=torch.float16)
    assert_equals_reference(run(numba_attention(batch), batch), batch)


def test_a_prefix_of_all_and_one_of_some_are_each_read_once() -> None:
    batch = make_batch([(70, 1), (81, 1), (77, 4), (90, 1), (75, 20)], shared=64)
    batch.spans[1].blocks[16] = batch.spans[0].blocks[16]  # the first two share 68 positions
    few = [span for span in batch.spans if span.new <= 8]
    layout = _lay_out(few, batch.family, 4, 4)
    items = [(layout.partial_rows[item[3] : item[4]].tolist(), item[1], item[2]) for item in layout.items]
    of_all = [([0, 1, 6], at, at + 4) for at in range(0, 64, 4)]
    assert items[:17] == [*of_all, ([0, 1], 64, 68)]
    assert all(rows in ([0], [1], [2, 3, 4, 5], [6]) for rows, _, _ in items[17:])
    own = {row: min(first for rows, first, _ in items[17:] if rows == [row]) for row in (0, 1, 6)}
    assert own == {0: 68, 1: 68, 6: 64}
    assert_equals_reference(run(numba_attention(batch, least_item=4), batch), batch)


@st.composite
def branching_spans(draw: st.DrawFn, block_size: int) -> list[Span]:
    """Decodes and drafts whose tables branch off each other's anywhere before their new positions."""
    spans: list[Span] = []
    row = block = 0
    for _ in range(draw(st.integers(1, 12))):
        past, new = draw(st.integers(0, 60)), draw(st.sampled_from([1, 1, 1, 1, 3]))
        blocks = np.arange(block, block + -(-(past + new) // block_size), dtype=np.int32)
        if spans:
            other = draw(st.sampled_from(spans))
            common = draw(st.integers(0, min(past, other.past) // block_size))
            blocks[:common] = other.blocks[:common]
        spans.append(Span(row, new, past, blocks))
        row, block = row + new, block + len(blocks)
    return spans


@given(st.data(), families, st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 4, 6, 16]))
@settings(max_examples=150)
def test_every_row_reads_its_visible_positions_once_and_a_decode_as_if_it_were_alone(
    data: st.DataObject, family: TokenFamily, block_size: int, least_item: int
) -> None:
    spans = data.draw(branching_spans(block_size))
    layout = _lay_out(spans, family, block_size, least_item)
    for span in spans:
        for row in range(span.row, span.row + span.new):
            position = span.past + row - span.row
            _, first, end, begin_order, end_order = layout.rows[row]
            assert (first, end) == (family.first_visible(position), position + 1)
            partials = layout.order[begin_order:end_order]
            assert (layout.partial_rows[partials] == row).all()
            assert len(partials) == layout.counters[1 + row] == (layout.partial_rows == row).sum()
            items = layout.items[np.searchsorted(layout.items[:, 4], partials, side="right")]
            read: list[int] = []
            for table, item_first, item_end in items[:, :3]:
                seen = max(item_first, first), min(item_end, end)
                read += slots_of(layout.tables[table:], *seen, block_size).tolist()
            assert read == slots_of(span.blocks, first, end, block_size).tolist()
            if span.new == 1:
                alone = _lay_out([replace(span, row=0)], family, block_size, least_item)
                assert items[:, 1:3].tolist() == alone.items[:, 1:3].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_different_shapes_and_other_numbers_of_threads_share_a_step(dtype: torch.dtype) -> None:
    lengths = [(140, 1), (141, 1), (142, 1), (20, 3)]
    shapes = [(2, 1, 32), (40, 1, 64), (7, 7, 160), (4, 2, 32)]
    batches = [
        make_batch(lengths, block_size=16, q_heads=q, kv_heads=kv, head_dim=dim, dtype=dtype, shared=128)
        for q, kv, dim in shapes
    ]
    expected = [run(numba_attention(batch), batch) for batch in batches]
    threads = torch.get_num_threads()
    try:
        for before, after in ((1, 2), (2, 1)):
            torch.set_num_threads(before)
            step = numba_attention(batches[0]).prepare(batches[0].spans)
            torch.set_num_threads(after)
            for number in (0, 1, 2, 3, 2, 1, 0):
                batch = batches[number]
                pools = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
                out = step(batch.query, batch.key, batch.value, *pools, batch.scores)
                assert torch.equal(out, expected[number])
    finally:
        torch.set_num_threads(threads)
    for out, batch in zip(expected, batches, strict=True):
        assert_equals_reference(out, batch)


@pytest.mark.parametrize("head_dim", [24, 64])
def test_a_row_in_float32_does_not_depend_on_its_group(head_dim: int) -> None:
    lengths = [(700, 1), (650, 1), (3000, 1), (661, 1), (2999, 1), (655, 3)]
    batch = make_batch(lengths, block_size=16, head_dim=head_dim, shared=640, sinks=True)
    out = run(numba_attention(batch), batch)
    assert _lay_out(batch.spans, batch.family, 16, 128).most_readers == 3
    for span in batch.spans:
        alone = run_rows(numba_attention(batch), batch, [span])
        assert torch.equal(alone, out[span.row : span.row + span.new])


@pytest.mark.parametrize("family", [EVERYTHING, SlidingWindow(1, 1, 300), ChunkedAttention(1, 1, 100)])
def test_a_drafts_rows_in_float32_are_those_of_plain_decodes(family: TokenFamily) -> None:
    batch = make_batch([(700, 4), (150, 3)], block_size=16, head_dim=32, family=family)
    out = run(numba_attention(batch), batch)
    for span in batch.spans:
        for i in range(span.new):
            decode = Span(span.row + i, 1, span.past + i, span.blocks)
            alone = run_rows(numba_attention(batch), batch, [decode])
            assert torch.equal(alone, out[decode.row : decode.row + 1])


@pytest.mark.skipif(not (are_there() or has_pair_products()), reason="needs AMX or AVX512-BF16")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(14, 2), (2, 2), (12, 4)])
def test_a_row_in_bfloat16_does_not_depend_on_its_group(head_dim: int, q_heads: int, kv_heads: int) -> None:
    lengths = [(700 + i, 1) for i in range(21)]
    batch = make_batch(
        lengths,
        block_size=16,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        shared=640,
        sinks=True,
        dtype=torch.bfloat16,
    )
    out = run(numba_attention(batch), batch)
    assert_equals_reference(out, batch)
    for group in (batch.spans[:2], batch.spans[4:7], batch.spans[15:21]):
        some = run_rows(numba_attention(batch), batch, group)
        assert torch.equal(some, out[group[0].row : group[-1].row + 1])


@pytest.mark.parametrize("window", [1, 30, 300])
def test_windows_narrower_than_chunks_in_long_prompts(window: int) -> None:
    batch = make_batch(
        [(0, 700), (300, 600), (900, 1)], q_heads=2, kv_heads=1, family=SlidingWindow(1, 1, window)
    )
    for band_rows in ((1, 1), (64, 256), (5000, 5000)):
        tuning = Tuning(band_rows=band_rows)
        assert_equals_reference(run(SlicedAttention(batch.block_size, 1, tuning), batch), batch)


def test_decodes_share_a_prefix_from_their_first_visible_position() -> None:
    chunked = make_batch([(70, 1), (81, 1), (77, 1)], shared=64, family=ChunkedAttention(1, 1, 32))
    levels = SlicedAttention(4, 1, Tuning(share_from=32))._levels(chunked.spans, chunked.family)
    assert [part.rows for level in levels for part in level.slices] == [
        (0,),
        (1,),
        (2,),
    ]  # all shared is unseen
    forks = make_batch([(70, 1), (70, 1), (69, 1)], shared=64, family=SlidingWindow(1, 1, 40))
    kernel = SlicedAttention(4, 1, Tuning(share_from=32))
    levels = kernel._levels(forks.spans, forks.family)
    assert [(part.rows, part.tokens) for part in levels[0].slices] == [((0, 1), 33), ((2,), 40)]
    assert_equals_reference(run(kernel, forks), forks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "scattered", "runs"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_long_contexts_in_every_layout(dtype: torch.dtype, layout: str, block_size: int) -> None:
    batch = make_batch(
        [(300, 1), (257, 1), (290, 40), (0, 65), (0, 1)],
        block_size=block_size,
        layout=layout,
        dtype=dtype,
        head_dim=32,
        shared=256,
    )
    for tuning in (Tuning(), SLICED):
        assert_equals_reference(run(SlicedAttention(block_size, 1, tuning), batch), batch)


def test_one_scratch_serves_steps_of_any_size() -> None:
    kernel = SlicedAttention(4, 1)
    for past in (50, 10, 120, 0, 64):
        batch = make_batch([(past, 1), (past, 5)], seed=past)
        assert_equals_reference(run(kernel, batch), batch)


@pytest.mark.parametrize("past", [60, 2000])
def test_scratch_has_the_size_of_a_slice_for_every_context(past: int) -> None:
    scratch = Scratch()
    kernel = SlicedAttention(
        4, 1, Tuning(slice_bytes=30, chunk_slice_bytes=60, band_rows=(8, 16)), scratch.stage
    )
    for family in (EVERYTHING, SlidingWindow(1, 1, 500), SlidingWindow(1, 1, 4)):
        run(kernel, make_batch([(past, 1), (past, 20)], family=family))
    assert [len(keys) for keys, _ in scratch._scratch.values()] <= [60 * 3 // 2]


@pytest.mark.parametrize("sinks", [False, True])
def test_gathering_holds_a_bounded_number_of_scores(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for name in ("attend_dense", "_attend_plainly"):
        attend = getattr(gathered_attention, name)

        def counted(query: Tensor, key: Tensor, *rest: Any, attend: Any = attend) -> Tensor:
            held.append(query.shape[0] * query.shape[1] * key.shape[1])
            return attend(query, key, *rest)

        monkeypatch.setattr(gathered_attention, name, counted)
    batch = make_batch([(50, 30), (0, 40), (400, 1)], sinks=sinks, value_dim=12)
    assert_equals_reference(run(GatherAttention(4, torch.device("cpu"), 2000), batch), batch)
    assert max(held) <= 2000


def test_decodes_between_chunks_keep_their_rows() -> None:
    batch = make_batch([(9, 1), (3, 6), (20, 1), (0, 2), (33, 1)])
    assert_equals_reference(run(SlicedAttention(4, 1, SLICED), batch), batch)


def test_relative_error_in_bfloat16_is_a_rounding() -> None:
    batch = make_batch(
        [(500, 1), (250, 64), (0, 100)], block_size=32, head_dim=64, dtype=torch.bfloat16, layout="runs"
    )
    expected = reference.attend(
        batch.query, batch.keys, batch.values, batch.spans, batch.scores, batch.family
    )
    for tuning in (Tuning(), SLICED):
        out = run(SlicedAttention(32, 1, tuning), batch).double()
        assert float((out - expected).norm() / expected.norm()) < 5e-3
