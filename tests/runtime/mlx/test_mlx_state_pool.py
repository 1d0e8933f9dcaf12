"""Recurrent states on MLX: batches that stay joined, checkpoints that are references, rows as bytes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from rootstock.cache.plan import StateCopy
from rootstock.cache.types import SlotId
from rootstock.runtime.mlx.kv_pool import evaluate
from rootstock.runtime.mlx.state_pool import MlxStatePool, States
from rootstock.runtime.mlx.survey import MlxStateShape
from rootstock.units import MIB

SLOTS = 8
CONVOLUTION, RECURRENT = (0,), (2, 1)
SHAPES: dict[tuple[int, ...], tuple[MlxStateShape | None, ...]] = {
    CONVOLUTION: (MlxStateShape((3, 2), mx.bfloat16), None),
    RECURRENT: (MlxStateShape((4,), mx.float32), MlxStateShape((2, 2), mx.float32)),
}


def drawn(count: int, seed: int) -> States:
    """Draws the states of `count` sequences."""
    random = np.random.default_rng(seed)
    states: States = {
        path: [
            None
            if shape is None
            else mx.array(random.standard_normal((count, *shape.shape), np.float32)).astype(shape.dtype)
            for shape in shapes
        ]
        for path, shapes in SHAPES.items()
    }
    evaluate(array for arrays in states.values() for array in arrays if array is not None)
    return states


def rows(states: States, row: int) -> list[NDArray[Any]]:
    """Returns the state of one sequence of a batch."""
    return [
        np.array(array[row].astype(mx.float32))
        for arrays in states.values()
        for array in arrays
        if array is not None
    ]


def assert_row(ours: States, row: int, states: States, its_row: int) -> None:
    for a, b in zip(rows(ours, row), rows(states, its_row), strict=True):
        assert np.array_equal(a, b)


def copy(pool: MlxStatePool, *pairs: tuple[int, int]) -> None:
    pool.copy([StateCopy(SlotId(source), SlotId(target)) for source, target in pairs])


@pytest.fixture
def pool() -> MlxStatePool:
    return MlxStatePool(SHAPES, SLOTS)


def test_a_batch_stays_joined_while_the_same_sequences_run(pool: MlxStatePool) -> None:
    states = drawn(3, 1)
    pool.put([4, 0, 6], states)
    again = pool.joined([4, 0, 6])
    assert again is not states, "a model fills the lists that it is given"
    for path, arrays in states.items():
        assert all(ours is given for ours, given in zip(again[path], arrays, strict=True))


@pytest.mark.parametrize("slots", [[0], [6, 4], [0, 4, 6], [4, 0], [6, 0, 4]])
def test_other_sequences_get_their_own_states(pool: MlxStatePool, slots: Sequence[int]) -> None:
    put = [4, 0, 6]
    states = drawn(3, 1)
    pool.put(put, states)
    taken = pool.joined(slots)
    for row, slot in enumerate(slots):
        assert_row(taken, row, states, put.index(slot))


def test_batches_one_after_the_other_keep_the_states_of_those_that_pause(pool: MlxStatePool) -> None:
    """Runs random subsets, beside a plain dictionary."""
    random, latest = np.random.default_rng(0), dict[int, tuple[States, int]]()
    for step in range(40):
        slots = random.permutation(SLOTS)[: random.integers(1, SLOTS)].tolist()
        if step % 5 and all(slot in latest for slot in slots):
            taken = pool.joined(slots)
            for row, slot in enumerate(slots):
                assert_row(taken, row, *latest[slot])
        states = drawn(len(slots), 100 + step)
        pool.put(slots, states)
        latest |= {slot: (states, row) for row, slot in enumerate(slots)}
    assert len(latest) == SLOTS
    for slot, (states, row) in latest.items():
        assert_row(pool.joined([slot]), 0, states, row)


def test_an_array_that_the_model_never_sets_stays_none(pool: MlxStatePool) -> None:
    pool.put([1, 2], drawn(2, 1))
    assert pool.joined([2, 1])[CONVOLUTION][1] is None
    pool.place(3, pool.read(1))
    assert pool.joined([3])[CONVOLUTION][1] is None


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_of_the_pool_is_refused(pool: MlxStatePool, slot: int) -> None:
    with pytest.raises(AssertionError, match="no such slot"):
        pool.joined([slot])


def test_a_slot_that_no_forward_has_filled_has_no_state(pool: MlxStatePool) -> None:
    pool.put([1], drawn(1, 1))
    with pytest.raises(KeyError):
        pool.joined([2])


# ---- copies


def test_a_checkpoint_keeps_the_state_at_which_it_was_made(pool: MlxStatePool) -> None:
    states, later = drawn(2, 1), drawn(2, 2)
    pool.put([0, 1], states)
    copy(pool, (1, 5))
    pool.put([0, 1], later)
    assert_row(pool.joined([5]), 0, states, 1)
    assert_row(pool.joined([1, 0]), 0, later, 1)
    copy(pool, (5, 1))
    assert_row(pool.joined([1]), 0, states, 1)
    assert_row(pool.joined([0]), 0, later, 0)


def test_copies_are_made_one_after_the_other(pool: MlxStatePool) -> None:
    states = drawn(3, 1)
    pool.put([0, 1, 2], states)
    copy(pool, (0, 1), (1, 2), (2, 7))
    for slot in (1, 2, 7):
        assert_row(pool.joined([slot]), 0, states, 0)


def test_a_copy_of_an_unfilled_slot_leaves_its_target_unfilled(pool: MlxStatePool) -> None:
    pool.put([0], drawn(1, 1))
    copy(pool, (3, 0))
    with pytest.raises(KeyError):
        pool.joined([0])


# ---- bytes


def test_a_state_that_is_read_and_placed_elsewhere_is_the_same(pool: MlxStatePool) -> None:
    states = drawn(3, 1)
    pool.put([0, 1, 2], states)
    read = pool.read(1)
    assert [buffer.nbytes for buffer in read] == pool.buffer_bytes() == [12, 16, 16]
    pool.place(6, read)
    pool.place(2, read)  # of the same batch
    for slot in (1, 2, 6):
        assert_row(pool.joined([slot]), 0, states, 1)
    assert_row(pool.joined([0]), 0, states, 0)
    assert [array.dtype for arrays in pool.joined([6]).values() for array in arrays if array is not None] == [
        mx.bfloat16,
        mx.float32,
        mx.float32,
    ]


def test_bytes_are_those_of_the_arrays_layer_by_layer(pool: MlxStatePool) -> None:
    states = drawn(2, 1)
    pool.put([3, 4], states)
    kept = [array[1] for arrays in states.values() for array in arrays if array is not None]
    expected = [np.array(array.reshape(-1).view(mx.uint8)).tobytes() for array in kept]
    assert [buffer.tobytes() for buffer in pool.read(4)] == expected


def test_a_state_that_was_placed_is_a_copy_of_the_buffers(pool: MlxStatePool) -> None:
    states = drawn(1, 1)
    pool.put([0], states)
    buffers = pool.read(0)
    pool.place(1, buffers)
    for buffer in buffers:
        buffer[:] = 0
    assert_row(pool.joined([1]), 0, states, 0)


# ---- memory


def large(count: int) -> States:
    states: States = {(0,): [mx.random.normal((count, MIB // 4))]}
    evaluate(states[(0,)])
    return states


def used_by(pool: MlxStatePool, before: int) -> int:
    """Returns the MiB that are in use beyond `before` bytes."""
    return round((mx.get_active_memory() - before) / MIB)


def test_one_state_does_not_keep_the_memory_of_its_batch() -> None:
    before, pool = (
        mx.get_active_memory(),
        MlxStatePool({(0,): (MlxStateShape((MIB // 4,), mx.float32),)}, SLOTS),
    )
    pool.put(range(SLOTS), large(SLOTS))
    assert used_by(pool, before) == SLOTS
    copy(pool, (3, 3))
    pool.drop([slot for slot in range(SLOTS) if slot != 3])
    assert used_by(pool, before) == 1
    pool.drop([3])
    assert used_by(pool, before) == 0


def test_a_dropped_state_of_the_last_batch_leaves_the_others(pool: MlxStatePool) -> None:
    states = drawn(3, 1)
    pool.put([0, 1, 2], states)
    pool.drop([1, 7])
    taken = pool.joined([0, 2])
    assert_row(taken, 0, states, 0)
    assert_row(taken, 1, states, 2)
    with pytest.raises(KeyError):
        pool.joined([1])


def test_a_checkpoint_takes_memory_only_when_its_sequence_moves_on() -> None:
    before, pool = (
        mx.get_active_memory(),
        MlxStatePool({(0,): (MlxStateShape((MIB // 4,), mx.float32),)}, SLOTS),
    )
    pool.put([0], large(1))
    copy(pool, (0, 1), (1, 2))
    assert used_by(pool, before) == 1
    pool.put([0], large(1))
    assert used_by(pool, before) == 2
