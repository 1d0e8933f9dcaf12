"""K and V on MLX: writes in place, copies of blocks, rows as bytes, int8 rows, and repair after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from rootstock.cache.plan import BlockCopy
from rootstock.cache.types import BlockId
from rootstock.runtime.mlx.kv_pool import EvaluationFailed, KVPool, LayerPool, evaluate
from rootstock.runtime.mlx.survey import MlxLayerShape
from runtime.mlx.helpers import failing_number

BLOCK_SIZE, BLOCKS = 4, 6
SLOTS = BLOCK_SIZE * BLOCKS
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
PATH = (0,)


def shape(
    dtype: mx.Dtype = mx.float32,
    family: int = 0,
    value_dim: int = VALUE_DIM,
    shares_values: bool = False,
    is_quantized: bool = False,
) -> MlxLayerShape:
    return MlxLayerShape(family, HEADS, KEY_DIM, value_dim, dtype, shares_values, is_quantized)


def pool_of(*shapes: MlxLayerShape) -> KVPool:
    families = 1 + max(each.family for each in shapes)
    return KVPool({(i,): each for i, each in enumerate(shapes)}, [BLOCKS] * families, BLOCK_SIZE)


def drawn(slots: int, dim: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Draws rows [1, heads, slots, dim], as a model gives them."""
    return mx.array(np.random.default_rng(seed).standard_normal((1, HEADS, slots, dim), np.float32)).astype(
        dtype
    )


def by_slot(given: mx.array) -> NDArray[Any]:
    """Returns rows as the pool keeps them, [slots, heads, dim]."""
    return np.array(given[0].transpose(1, 0, 2).astype(mx.float32))


def write(
    pool: KVPool, slots: range, seed: int = 0, path: tuple[int, ...] = PATH
) -> tuple[mx.array, mx.array]:
    layer = pool.layers[path]
    kept = layer.shape
    keys = drawn(len(slots), kept.key_dim, seed, kept.dtype)
    values = keys if kept.shares_values else drawn(len(slots), kept.value_dim, seed + 1, kept.dtype)
    layer.write(mx.array(list(slots)), keys, values)
    evaluate(pool.arrays)
    pool.count_copies()
    return keys, values


def fill(pool: KVPool) -> None:
    for path in pool.layers:
        write(pool, range(SLOTS), seed=10 * path[0], path=path)


def content(pool: KVPool) -> list[NDArray[Any]]:
    """Returns all arrays, in float32."""
    return [np.array(array.astype(mx.float32)) for array in pool.arrays]


# ---- writes


def test_rows_are_read_where_they_were_written() -> None:
    pool = pool_of(shape())
    keys, values = write(pool, range(5, 12))
    for slots in ((5, 12), mx.arange(5, 12)):
        assert np.array_equal(pool.layers[PATH].keys_at(slots), by_slot(keys))
        assert np.array_equal(pool.layers[PATH].values_at(slots), by_slot(values))
    rest = np.delete(content(pool)[0], range(5, 12), axis=0)
    assert not rest.any()


def test_several_sequences_are_written_one_after_the_other() -> None:
    pool, keys = pool_of(shape()), mx.concatenate([drawn(3, KEY_DIM, 1), drawn(3, KEY_DIM, 2)])
    values = mx.concatenate([drawn(3, VALUE_DIM, 3), drawn(3, VALUE_DIM, 4)])
    slots = mx.array([9, 2, 4, 0, 1, 20])
    pool.layers[PATH].write(slots, keys, values)
    expected = np.concatenate([by_slot(keys[:1]), by_slot(keys[1:])])
    assert np.array_equal(pool.layers[PATH].keys_at(slots), expected)


def test_writes_are_in_place() -> None:
    pool = pool_of(shape(), shape())
    for number in range(20):
        write(pool, range(number, number + 3), path=(number % 2,))
    assert pool.copies_seen == 0


def a_second_array(layer: LayerPool) -> Any:
    return mx.array(layer.keys)  # of the same buffer


def a_view(layer: LayerPool) -> Any:
    view = layer.keys_at((0, 4))
    mx.eval(view)
    return view


def a_gather_that_is_not_evaluated(layer: LayerPool) -> Any:
    return layer.keys_at(mx.array([0, 3, 5]))


def a_reference_cycle(layer: LayerPool) -> Any:
    cycle: list[Any] = [a_gather_that_is_not_evaluated(layer)]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("hold", [a_second_array, a_view, a_gather_that_is_not_evaluated, a_reference_cycle])
def test_whatever_holds_a_pool_makes_the_next_write_a_copy_that_is_counted(
    hold: Callable[[LayerPool], Any],
) -> None:
    pool = pool_of(shape(), shape())
    held = hold(pool.layers[PATH])
    write(pool, range(3))
    assert pool.copies_seen == 1, "of K of one layer"
    write(pool, range(3), path=(1,))
    assert pool.copies_seen == 1
    if isinstance(held, list):
        held.clear()
    del held
    write(pool, range(4))
    assert pool.copies_seen == 1, "a copy is held by nothing"


def test_a_device_without_addresses_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.runtime.mlx.kv_pool.address_of", lambda array: None)
    pool = pool_of(shape())
    write(pool, range(3))
    assert pool.copies_seen is None


def test_every_evaluation_is_followed_by_a_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal holds a command's inputs until its completion handler has run, which is after the results are there."""
    done: list[str] = []
    own_eval, own_synchronize = mx.eval, mx.synchronize
    monkeypatch.setattr(mx, "eval", lambda *arrays: (done.append("eval"), own_eval(*arrays)))
    monkeypatch.setattr(
        mx, "synchronize", lambda *streams: (done.append("synchronize"), own_synchronize(*streams))
    )
    pool = pool_of(shape())
    write(pool, range(8))
    pool.copy([BlockCopy(BlockId(0), BlockId(3), 2)])
    pool.place(0, 2, 3, pool.read(0, 0, 3))
    assert len(done) >= 8
    assert done[::2] == ["eval"] * (len(done) // 2)
    assert done[1::2] == ["synchronize"] * (len(done) // 2)


# ---- shapes


def test_values_that_are_the_keys_are_kept_once() -> None:
    pool = pool_of(shape(value_dim=KEY_DIM, shares_values=True))
    keys, _ = write(pool, range(6))
    assert len(pool.arrays) == 1
    assert np.array_equal(pool.layers[PATH].values_at((0, 6)), by_slot(keys))
    assert pool.layers[PATH].values is pool.layers[PATH].keys


def test_a_layer_may_keep_keys_alone() -> None:
    pool = pool_of(shape(value_dim=0))
    keys, _ = write(pool, range(6))
    assert len(pool.arrays) == 1
    assert np.array_equal(pool.layers[PATH].keys_at((0, 6)), by_slot(keys))
    assert pool.layers[PATH].values_at((0, 6)).shape == (6, HEADS, 0)
    assert pool.copies_seen == 0


# ---- int8


def test_int8_rows_are_within_half_a_code_of_what_was_written() -> None:
    pool = pool_of(shape(is_quantized=True))
    keys, values = write(pool, range(7))
    layer = pool.layers[PATH]
    for ours, given in ((layer.keys_at((0, 7)), keys), (layer.values_at((0, 7)), values)):
        exact = by_slot(given)
        scales = np.abs(exact).max(-1, keepdims=True) / 127  # of each position and head
        assert (np.abs(np.array(ours) - exact) <= 0.5001 * scales).all()
    assert np.array_equal(layer.keys_at((2, 6)), layer.keys_at(mx.arange(2, 6)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_int8_rows_are_read_in_the_models_dtype(dtype: mx.Dtype) -> None:
    layer = pool_of(shape(dtype, is_quantized=True)).layers[PATH]
    assert layer.keys_at((0, 2)).dtype == dtype
    assert [array.dtype for array in layer.arrays] == [mx.int8, mx.int8, mx.float32, mx.float32]


def test_int8_rows_of_zeros_stay_zeros() -> None:
    pool = pool_of(shape(is_quantized=True))
    zeros = mx.zeros((1, HEADS, 2, KEY_DIM))
    pool.layers[PATH].write(mx.array([3, 4]), zeros, zeros[..., :VALUE_DIM])
    assert not np.array(pool.layers[PATH].keys_at((0, SLOTS))).any()


# ---- copies of blocks


def copies(*given: tuple[int, int, int, int]) -> list[BlockCopy]:
    return [BlockCopy(BlockId(source), BlockId(target), n, family) for source, target, n, family in given]


@pytest.mark.parametrize("seed", range(8))
def test_copies_have_the_result_of_copying_one_after_the_other(seed: int) -> None:
    """Sources may be targets of earlier copies, and the other way round."""
    random = np.random.default_rng(seed)
    pool = pool_of(shape(), shape(family=1), shape(is_quantized=True))
    fill(pool)
    expected = content(pool)
    chosen = [
        (*(int(block) for block in random.choice(BLOCKS, 2, replace=False)), int(n), int(family))
        for n, family in zip(random.integers(1, BLOCK_SIZE + 1, 12), random.integers(0, 2, 12), strict=True)
    ]
    pool.copy(copies(*chosen))
    of_family = [layer.shape.family for layer in pool.layers.values() for _ in layer.arrays]
    for source, target, n, family in chosen:
        for its, array in zip(of_family, expected, strict=True):
            if its == family:
                first, into = source * BLOCK_SIZE, target * BLOCK_SIZE
                array[into : into + n] = array[first : first + n]
    for ours, right in zip(content(pool), expected, strict=True):
        assert np.array_equal(ours, right)
    pool.count_copies()
    assert pool.copies_seen == 0


def test_a_row_that_is_written_twice_has_the_later_content() -> None:
    pool = pool_of(shape())
    fill(pool)
    before = content(pool)[0]
    pool.copy(copies((0, 5, 4, 0), (1, 5, 2, 0)))
    after = content(pool)[0]
    assert np.array_equal(after[20:22], before[4:6])
    assert np.array_equal(after[22:24], before[2:4])


# ---- bytes of rows


@pytest.mark.parametrize(
    "kept",
    [
        shape(),
        shape(mx.float16),
        shape(mx.bfloat16),
        shape(is_quantized=True),
        shape(mx.bfloat16, is_quantized=True),
        shape(value_dim=KEY_DIM, shares_values=True),
        shape(value_dim=0),
    ],
    ids=["float32", "float16", "bfloat16", "int8", "int8 of bfloat16", "shared values", "keys alone"],
)
@pytest.mark.parametrize("tokens", [BLOCK_SIZE, 1])
def test_a_row_that_is_read_and_placed_elsewhere_has_the_same_content(
    kept: MlxLayerShape, tokens: int
) -> None:
    pool = pool_of(kept, shape(family=1), kept)
    fill(pool)
    before = content(pool)
    read = pool.read(0, 2, tokens)
    assert [buffer.nbytes for buffer in read] == pool.buffer_bytes(0, tokens)
    assert [buffer.dtype for buffer in read] == [np.uint8] * len(read)
    pool.place(0, 5, tokens, read)
    pool.count_copies()
    assert pool.copies_seen == 0
    for family, array, old in zip(families_of(pool), content(pool), before, strict=True):
        if family == 0:
            assert np.array_equal(array[20 : 20 + tokens], old[8 : 8 + tokens])
            array[20 : 20 + tokens] = old[20 : 20 + tokens]
        assert np.array_equal(array, old), "other rows are as they were"


def families_of(pool: KVPool) -> list[int]:
    return [layer.shape.family for layer in pool.layers.values() for _ in layer.arrays]


def test_bytes_are_those_of_the_tensors_layer_by_layer() -> None:
    pool = pool_of(shape(), shape())
    fill(pool)
    part = slice(3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2)
    assert [buffer.tobytes() for buffer in pool.read(0, 3, 2)] == [
        array[part].tobytes() for array in content(pool)
    ]


def test_what_was_placed_is_a_copy_of_the_buffers() -> None:
    pool = pool_of(shape())
    fill(pool)
    buffers = pool.read(0, 1, BLOCK_SIZE)
    pool.place(0, 4, BLOCK_SIZE, buffers)
    right = content(pool)[0]
    for buffer in buffers:
        buffer[:] = 0
    assert np.array_equal(content(pool)[0], right)


# ---- bounds: MLX checks none


@pytest.mark.parametrize(("block", "tokens"), [(BLOCKS, 1), (-1, 1), (0, BLOCK_SIZE + 1), (0, 0)])
def test_rows_outside_of_the_pool_are_refused(block: int, tokens: int) -> None:
    pool = pool_of(shape())
    with pytest.raises(AssertionError):
        pool.read(0, block, tokens)
    with pytest.raises(AssertionError):
        pool.place(0, block, tokens, [])
    with pytest.raises(AssertionError):
        pool.copy(copies((block, 1, tokens, 0)))
    with pytest.raises(AssertionError):
        pool.copy(copies((1, block, tokens, 0)))


# ---- failed evaluations


def write_what_fails(pool: KVPool) -> None:
    keys = drawn(2, KEY_DIM) + failing_number()
    pool.layers[PATH].write(mx.array([0, 1]), keys, drawn(2, VALUE_DIM))
    with pytest.raises(EvaluationFailed, match="GatherMM") as failed:
        evaluate(pool.arrays)
    assert isinstance(failed.value.cause, RuntimeError)


def test_a_failed_evaluation_fails_every_later_one_until_the_pools_are_renewed() -> None:
    pool = pool_of(shape(), shape())
    fill(pool)
    write_what_fails(pool)
    with pytest.raises(EvaluationFailed, match="GatherMM"):
        write(pool, range(8, 10))
    pool.renew()
    assert not any(array.any() for array in content(pool))
    keys, _ = write(pool, range(8, 10))
    assert np.array_equal(pool.layers[PATH].keys_at((8, 10)), by_slot(keys))
    assert pool.copies_seen == 0, "arrays that were made anew are no copies"
