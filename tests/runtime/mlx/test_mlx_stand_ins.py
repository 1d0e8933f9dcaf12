"""Stand-ins for mlx-lm's caches: what a model writes, reads back, and is told about positions and masks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rootstock.cache.families import SlidingWindow
from rootstock.runtime.mlx.kv_pool import LayerPool
from rootstock.runtime.mlx.stand_ins import GivenArrays, StandIn, Visible
from rootstock.runtime.mlx.survey import MlxLayerShape
from runtime.mlx.helpers import BLOCKS, FULL, SIZE, Call, drawn

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
WINDOW = SlidingWindow(1, 1, 5)


def made(call: Call, shares_values: bool = False, grouped_masks: bool = False) -> StandIn:
    shape = MlxLayerShape(
        0, HEADS, KEY_DIM, KEY_DIM if shares_values else VALUE_DIM, mx.float32, shares_values
    )
    return StandIn(call.rows, LayerPool(shape, SIZE * BLOCKS), GivenArrays(), grouped_masks)


def new_rows(call: Call, dim: int, seed: int) -> mx.array:
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((len(call.pasts), HEADS, max(call.lengths), dim), np.float32))


def update(stand_in: StandIn, call: Call) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    keys, values = new_rows(call, KEY_DIM, 1), new_rows(call, VALUE_DIM, 2)
    return keys, values, *stand_in.update_and_fetch(keys, values)


@pytest.mark.parametrize("family", [FULL, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("seed", range(5))
def test_a_model_gets_all_visible_rows_back(family: Any, seed: int) -> None:
    call = drawn(family, seed)
    stand_in = made(call)
    keys, values, all_keys, all_values = update(stand_in, call)
    for ours, given in ((all_keys, keys), (all_values, values)):
        assert ours.shape[:2] == (len(call.pasts), HEADS)
        for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
            before = past - family.first_visible(past)
            assert not np.array(ours[row, :, :before]).any(), "nothing is written there yet"
            assert np.array_equal(ours[row, :, before : before + length], given[row, :, :length])
            assert not np.array(ours[row, :, before + length :]).any(), "zeros after the end"


def test_a_second_call_finds_the_rows_of_the_first() -> None:
    call = drawn(FULL, 3, count=1)
    stand_in = made(call)
    keys, *_ = update(stand_in, call)
    (past,), (length,) = call.pasts, call.lengths
    later = StandIn(
        Call(FULL, [np.append(call.tables[0], [60, 61])], [past + length], [2]).rows,
        stand_in.pool,
        GivenArrays(),
    )
    found, _ = later.update_and_fetch(mx.ones((1, HEADS, 2, KEY_DIM)), mx.ones((1, HEADS, 2, VALUE_DIM)))
    assert np.array_equal(found[:, :, past : past + length], keys)
    assert np.array(found[:, :, past + length :] == 1).all()


def test_values_that_are_the_keys_are_one_array() -> None:
    call = drawn(FULL, 1)
    stand_in = made(call, shares_values=True)
    rows = new_rows(call, KEY_DIM, 1)
    keys, values = stand_in.update_and_fetch(rows, rows)
    assert keys is values


def test_arrays_of_the_pool_are_dropped_after_the_call() -> None:
    call = drawn(FULL, 1)
    stand_in = made(call)
    keys, values = update(stand_in, call)[2:]
    assert stand_in.keys_and_values() == stand_in.state
    assert stand_in.keys is keys
    assert stand_in.values is values
    stand_in.drop_arrays()
    assert stand_in.state == (None, None)


def test_given_arrays_are_found_until_the_call_ends() -> None:
    call, given = drawn(FULL, 1), GivenArrays()
    stand_in = StandIn(call.rows, made(call).pool, given)
    keys, values = update(stand_in, call)[2:]
    assert given.visible(keys, values, None) == Visible(stand_in, None)
    assert given.visible(keys, values, "causal") == Visible(stand_in, None)
    for array in (keys * 1, keys[:], keys.transpose(0, 1, 2, 3), keys.astype(keys.dtype), mx.array(keys)):
        assert given.visible(array, values, None) is None
    given.clear()
    assert given.visible(keys, values, None) is None


def test_the_offset_advances_by_the_new_rows() -> None:
    one, several = drawn(FULL, 2, count=1), drawn(FULL, 2, count=3)
    for call in (one, several):
        stand_in = made(call)
        before = np.array(stand_in.offset)
        assert np.array_equal(before, call.pasts[0] if call is one else call.pasts)
        update(stand_in, call)
        assert np.array_equal(np.array(stand_in.offset), before + max(call.lengths))


def test_sizes_are_those_of_the_longest_sequence() -> None:
    call = Call(FULL, [np.arange(8, dtype=np.int32), np.arange(8, 16, dtype=np.int32)], [0, 6], [9, 1])
    stand_in = made(call)
    assert stand_in.size() == 6
    assert not stand_in.empty()
    assert not stand_in.is_trimmable()
    assert made(Call(FULL, call.tables, [0, 0], [9, 1])).empty()
    stand_in.maybe_trim_front()
    assert made(Call(WINDOW, call.tables[:1], [20], [1])).start_position == 16


# ---- masks


def one(family: Any, past: int, new: int) -> Call:
    return Call(family, [np.arange(16, dtype=np.int32)], [past], [new])


def test_one_sequence_gets_the_masks_that_mlx_knows() -> None:
    assert made(one(FULL, 5, 1)).make_mask(1) is None
    assert made(one(FULL, 5, 3)).make_mask(3) == "causal"
    assert made(one(WINDOW, 9, 1)).make_mask(1) is None, "it reads its window alone"
    assert isinstance(made(one(FULL, 5, 3)).make_mask(3, return_array=True), mx.array)


def test_windows_are_masked_where_a_row_reads_more_than_its_own() -> None:
    mask = made(one(WINDOW, 9, 3)).make_mask(3)
    assert isinstance(mask, mx.array)
    assert np.array(mask)[0, 0].astype(int).tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1, 1],
    ]
    asked = made(one(FULL, 4, 1)).make_mask(1, window_size=2)
    assert isinstance(asked, mx.array)
    assert np.array(asked)[0, 0].astype(int).tolist() == [[0, 0, 0, 1, 1]]


def test_sequences_of_unlike_lengths_get_an_array() -> None:
    call = drawn(FULL, 4, count=3, longest=1)
    assert len(set(call.pasts)) > 1
    mask = made(call).make_mask(1)
    assert isinstance(mask, mx.array)
    assert np.array(mask).sum(-1).reshape(-1).tolist() == [past + 1 for past in call.pasts]


def test_grouped_masks_have_a_dimension_more_for_several_sequences() -> None:
    several, alone = drawn(FULL, 4, count=3), one(WINDOW, 9, 3)
    new = max(several.lengths)
    plain, grouped = (made(several, grouped_masks=grouped).make_mask(new) for grouped in (False, True))
    assert isinstance(plain, mx.array)
    assert isinstance(grouped, mx.array)
    assert grouped.shape == (3, 1, *plain.shape[1:])
    assert np.array_equal(grouped[:, 0], plain)
    ungrouped = made(alone, grouped_masks=True).make_mask(3)
    assert isinstance(ungrouped, mx.array)
    assert ungrouped.ndim == 4


def test_a_mask_of_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for a mask of 4 positions in a call of 3"):
        made(one(FULL, 5, 3)).make_mask(4)
