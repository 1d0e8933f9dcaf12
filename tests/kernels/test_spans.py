"""Slots, shared blocks and slices against their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.batches import make_batch
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.spans import EVERYTHING, Span, common_blocks, slots_of
from rootstock.kernels.torch.sliced_attention import SlicedAttention, Tuning

tables = st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True).map(
    lambda ids: np.array(ids, np.int32)
)


@given(tables, st.integers(1, 5), st.data())
def test_slots_are_where_the_table_leads(table: np.ndarray, block_size: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(table) * block_size))
    first = data.draw(st.integers(0, end))
    expected = [int(table[p // block_size]) * block_size + p % block_size for p in range(first, end)]
    assert slots_of(table, first, end, block_size).tolist() == expected


@given(st.lists(tables, min_size=1, max_size=4), st.integers(0, 3))
def test_common_blocks_is_the_longest_shared_stretch(tables: list[np.ndarray], first: int) -> None:
    found = common_blocks(tables, first)
    stretches = [table[first : first + found].tolist() for table in tables]
    assert all(s == stretches[0] for s in stretches)
    longer = {tuple(table[first : first + found + 1].tolist()) for table in tables}
    assert len(longer) > 1 or min(len(table) for table in tables) <= first + found


@given(tables, st.integers(1, 5), st.integers(1, 30), st.data())
def test_slices_are_about_equal_and_together_everything(
    table: np.ndarray, block_size: int, tokens: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(1, len(table) * block_size))
    span = Span(0, 1, end - 1, table)
    slices = SlicedAttention(block_size, 1)._slices((0,), span, 0, end, tokens)
    found = [
        slot
        for part in slices
        for slot in (
            range(part.first_slot, part.first_slot + part.tokens)
            if part.slots is None
            else part.slots.tolist()
        )
    ]
    assert found == slots_of(table, 0, end, block_size).tolist()
    lengths = [part.tokens for part in slices]
    assert max(lengths) - min(lengths) <= 1
    assert len(slices) == 1 or max(lengths) <= 1.5 * tokens + 1


def test_a_prefix_that_decodes_share_is_read_once() -> None:
    batch = make_batch([(70, 1), (81, 1), (77, 1)], block_size=4, shared=64, layout="scattered")
    batch.spans.append(Span(3, 1, 4, np.array([90, 91], np.int32)))  # a stranger
    levels = SlicedAttention(4, 1, Tuning(share_from=32))._levels(batch.spans)
    assert [part.rows for part in levels[0].slices] == [(0, 1, 2), (3,)]
    assert [part.rows for part in levels[1].slices] == [(0,), (1,), (2,)]
    assert [part.tokens for level in levels for part in level.slices] == [64, 5, 7, 18, 14]


def test_a_chunk_is_divided_where_the_first_visible_position_changes() -> None:
    kernel = SlicedAttention(4, 1, Tuning(band_rows=(2, 6)))
    table = np.arange(20, dtype=np.int32)
    span = Span(3, 30, 21, table)  # positions 21 … 50

    def bands(family: TokenFamily) -> list[tuple[int, int, bool]]:
        """Returns for each band its first row, the positions that it reads from the pool, and True if some are
        masked."""
        found = []
        for band in kernel._bands(span, family):
            parts = band.common if band.edge is None else (*band.common, band.edge.part)
            found.append((band.rows.start, sum(part.tokens for part in parts), band.edge is not None))
        assert band.rows.stop == 3 + 30
        return found

    assert bands(EVERYTHING) == [(3, 21, False)]
    assert bands(ChunkedAttention(1, 1, 16)) == [(3, 5, False), (14, 0, False), (30, 0, False)]
    assert bands(ChunkedAttention(1, 1, 100)) == [(3, 21, False)]
    # Until position 40, all rows see from 0 on; then each band reads the 40 positions before it, less its first row.
    assert bands(SlidingWindow(1, 1, 40)) == [(3, 21, False), (22, 39, True), (28, 39, True)]
    # A window narrower than a band: the read positions include the band's own.
    assert bands(SlidingWindow(1, 1, 1))[:2] == [(3, 2, True), (5, 2, True)]


def test_sharing_follows_the_tree() -> None:
    """Two pairs share more than all four do."""
    common, left, right = list(range(4)), list(range(10, 22)), list(range(30, 42))
    own = [[50], [51], [52], [53]]
    spans = [
        Span(i, 1, 2 * 16, np.array(common + branch + tail, np.int32))
        for i, (branch, tail) in enumerate(zip([left, left, right, right], own, strict=True))
    ]
    levels = SlicedAttention(2, 1, Tuning(share_from=4))._levels(spans)
    assert [[part.rows for part in level.slices] for level in levels] == [
        [(0, 1, 2, 3)],
        [(0, 1), (2, 3)],
        [(0,), (1,), (2,), (3,)],
    ]
    # If the common part of all four is not worth a call, the pairs' slices begin at 0.
    levels = SlicedAttention(2, 1, Tuning(share_from=28))._levels(spans)
    assert [part.rows for part in levels[0].slices] == [(0, 1), (2, 3)]
    assert sum(part.tokens for part in levels[0].slices) == 64


def test_prefixes_may_branch_at_every_block() -> None:
    """Each of 1,500 decodes shares one block more with the next: a branching at every block."""
    steps = 1500
    stairs = np.arange(steps, dtype=np.int32)
    spans = [
        Span(i, 1, 2 * i + 1, np.append(stairs[:i], np.int32(steps + i)).astype(np.int32))
        for i in range(steps)
    ]
    levels = SlicedAttention(2, 1, Tuning(share_from=1))._levels(spans)
    read = [0] * steps
    for level in levels:
        for part in level.slices:
            for row in part.rows:
                read[row] += part.tokens
    assert read == [span.end for span in spans]
