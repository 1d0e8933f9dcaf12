"""Rows of a call on MLX, beside a position-by-position count of what each row sees and where it lies."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from rootstock.cache.families import SlidingWindow, TokenFamily
from rootstock.cache.types import NO_BLOCK
from runtime.mlx.helpers import BLOCKS, FAMILIES, FULL, SIZE, Call, drawn

ZERO_SLOT, PADDING_SLOT = SIZE * BLOCKS, SIZE * BLOCKS + 1

CALLS = pytest.mark.parametrize("seed", range(6))
OF_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


# ---- slots


@CALLS
@OF_FAMILY
def test_new_positions_are_written_to_their_slots_and_padding_to_its_own(
    family: TokenFamily, seed: int
) -> None:
    call = drawn(family, seed)
    slots = np.array(call.rows.write_slots).reshape(len(call.pasts), max(call.lengths))
    for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
        assert slots[row, :length].tolist() == [call.slot(row, p) for p in range(past, past + length)]
        assert (slots[row, length:] == PADDING_SLOT).all()


@CALLS
@OF_FAMILY
def test_positions_are_read_from_the_first_visible_one_on_and_zeros_after_the_end(
    family: TokenFamily, seed: int
) -> None:
    call = drawn(family, seed)
    rows, slots = call.rows, np.array(call.rows.read_slots)
    for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
        read = range(family.first_visible(past), past + length)
        assert slots[row, : len(read)].tolist() == [call.slot(row, p) for p in read]
        assert (slots[row, len(read) :] == ZERO_SLOT).all()
        assert (rows.starts[row], rows.ends[row]) == (read.start, read.stop)


@CALLS
@OF_FAMILY
def test_a_run_is_told_where_blocks_follow_each_other_and_nowhere_else(
    family: TokenFamily, seed: int
) -> None:
    scattered = drawn(family, seed)
    tables = [np.where(t == NO_BLOCK, t, 3 + np.arange(len(t), dtype=np.int32)) for t in scattered.tables]
    followed = Call(family, tables, scattered.pasts, scattered.lengths)
    for call in (scattered, followed):
        rows, slots = call.rows, np.array(call.rows.read_slots)
        for row, (start, end) in enumerate(zip(rows.starts, rows.ends, strict=True)):
            own = slots[row, : end - start]
            run = rows.run(row)
            if (np.diff(own) == 1).all():
                assert run == (own[0], own[-1] + 1)
            else:
                assert run is None
                assert call is scattered


@CALLS
@OF_FAMILY
def test_a_lone_sequence_is_written_to_a_run_where_its_new_slots_follow_each_other(
    family: TokenFamily, seed: int
) -> None:
    scattered = drawn(family, seed)
    assert scattered.rows.write_run is None or len(scattered.pasts) == 1
    for table, past, length in zip(scattered.tables, scattered.pasts, scattered.lengths, strict=True):
        for blocks in (table, np.where(table == NO_BLOCK, table, 3 + np.arange(len(table), dtype=np.int32))):
            call = Call(family, [blocks], [past], [length])
            slots = [call.slot(0, position) for position in range(past, past + length)]
            expected = (slots[0], slots[-1] + 1) if (np.diff(slots) == 1).all() else None
            assert call.rows.write_run == expected


# ---- what rows see


@pytest.mark.parametrize("window", [None, 3, 7])
@CALLS
@OF_FAMILY
def test_the_mask_shows_each_row_what_its_family_sees(
    family: TokenFamily, seed: int, window: int | None
) -> None:
    call = drawn(family, seed)
    rows = call.rows
    narrower = rows.window(window)
    mask, slots = np.array(rows.mask(narrower)), np.array(rows.read_slots)
    assert mask.shape == (len(call.pasts), 1, max(call.lengths), slots.shape[1])
    for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
        for new in range(length):
            expected = [call.slot(row, p) for p in call.seen(past + new, window)]
            assert slots[row, mask[row, 0, new]].tolist() == expected
    assert rows.mask(narrower) is rows.mask(narrower), "one array serves all layers"


@pytest.mark.parametrize("window", [None, 3])
@CALLS
@OF_FAMILY
def test_a_paged_kernel_sees_the_same(family: TokenFamily, seed: int, window: int | None) -> None:
    call = drawn(family, seed)
    rows = call.rows
    paged = rows.paged(rows.window(window))
    assert paged.block_size == SIZE
    for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
        for new in range(max(call.lengths)):
            number = row * max(call.lengths) + new
            assert paged.sequence_of[number] == row
            seen = range(paged.first[number], paged.ends[number])
            if new >= length:
                assert not seen
                continue
            assert list(seen) == call.seen(past + new, window)
            found = [paged.table[row, p // SIZE] * SIZE + p % SIZE for p in seen]
            assert found == [call.slot(row, p) for p in seen]


@CALLS
@OF_FAMILY
def test_causal_attention_is_allowed_only_where_it_equals_the_mask(family: TokenFamily, seed: int) -> None:
    for call in (drawn(family, seed), drawn(family, seed, count=1), drawn(family, seed, longest=1)):
        rows = call.rows
        for window in (rows.window(None), rows.window(3)):
            mask = np.array(rows.mask(window))
            new, width = mask.shape[2:]
            causal = np.tril(np.ones((new, width), bool), width - new)
            if rows.hides_nothing(window):
                assert (mask == causal).all()


def test_one_sequence_with_full_attention_needs_no_mask() -> None:
    assert drawn(FULL, 0, count=1).rows.hides_nothing(None)
    equal = Call(FULL, [np.arange(3, dtype=np.int32), np.arange(3, 6, dtype=np.int32)], [5, 5], [2, 2])
    assert equal.rows.hides_nothing(None)
    assert not equal.rows.hides_nothing(6), "the first of 7 positions is hidden from the last"
    assert equal.rows.hides_nothing(7)


def test_the_narrower_of_two_windows_counts() -> None:
    windowed, full = drawn(SlidingWindow(1, 1, 5), 0).rows, drawn(FULL, 0).rows
    assert [windowed.window(asked) for asked in (None, 3, 9)] == [5, 3, 5]
    assert [full.window(asked) for asked in (None, 3)] == [None, 3]


# ---- offsets


def test_the_offset_is_a_number_for_one_sequence_and_an_array_for_several() -> None:
    assert drawn(FULL, 1, count=1).rows.offset == drawn(FULL, 1, count=1).pasts[0]
    call = drawn(FULL, 1, count=3)
    offset = call.rows.offset
    assert isinstance(offset, mx.array)
    assert (offset.dtype, offset.tolist()) == (mx.int32, call.pasts)


# ---- tables that are wrong


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(AssertionError, match="too short"):
        Call(FULL, [np.array([1, 2], np.int32)], [8], [1]).rows  # noqa: B018


@pytest.mark.parametrize("block", [NO_BLOCK, BLOCKS, BLOCKS + 7])
def test_a_released_or_foreign_block_is_refused_where_a_row_sees_it(block: int) -> None:
    table = np.array([block, 2, 3], np.int32)
    for family in (FULL, SlidingWindow(1, 1, 7)):
        with pytest.raises(AssertionError, match="released or foreign"):
            Call(family, [table], [9], [1]).rows  # noqa: B018
    unseen = Call(SlidingWindow(1, 1, 5), [table], [9], [1])
    assert np.array(unseen.rows.read_slots).tolist() == [[unseen.slot(0, p) for p in range(5, 10)]]
