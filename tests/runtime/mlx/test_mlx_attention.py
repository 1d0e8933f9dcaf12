"""Attention on the pools equals attention by hand, and serves the arrays of stand-ins alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from rootstock.cache.families import SlidingWindow, TokenFamily
from rootstock.runtime.mlx.attention import PoolAttention, attention_on_pools
from rootstock.runtime.mlx.kv_pool import LayerPool
from rootstock.runtime.mlx.stand_ins import GivenArrays, StandIn, Visible
from rootstock.runtime.mlx.survey import MlxLayerShape
from runtime.mlx.helpers import BLOCKS, FAMILIES, FULL, SIZE, Call, drawn

HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 3, 8, 4
SCALE = 0.4
GIVEN = GivenArrays()  # of all layers


def normal(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return random.standard_normal(shape, np.float32)


@dataclass
class Layer:
    """An attention layer before a call: a pool with the earlier positions, and the call's own rows."""

    call: Call
    is_quantized: bool = False
    shares_values: bool = False
    pool: LayerPool = field(init=False)
    stand_in: StandIn = field(init=False)

    def __post_init__(self) -> None:
        value_dim = KEY_DIM if self.shares_values else VALUE_DIM
        shape = MlxLayerShape(0, HEADS, KEY_DIM, value_dim, mx.float32, self.shares_values, self.is_quantized)
        self.pool = LayerPool(shape, SIZE * BLOCKS)
        call, random = self.call, np.random.default_rng(1)
        self.positions = [  # of each sequence: K and V [heads, positions, dim]
            (normal(random, HEADS, past + length, KEY_DIM), normal(random, HEADS, past + length, value_dim))
            for past, length in zip(call.pasts, call.lengths, strict=True)
        ]
        if self.shares_values:
            self.positions = [(keys, keys) for keys, _ in self.positions]
        new, count = max(call.lengths), len(call.pasts)
        self.query = normal(random, count, GROUP * HEADS, new, KEY_DIM)
        self.new_keys = normal(random, count, HEADS, new, KEY_DIM)  # also those of padding
        self.new_values = normal(random, count, HEADS, new, value_dim)
        for row, (past, length) in enumerate(zip(call.pasts, call.lengths, strict=True)):
            keys, values = self.positions[row]
            self.new_keys[row, :, :length], self.new_values[row, :, :length] = (
                keys[:, past:],
                values[:, past:],
            )
            start = call.family.first_visible(past)
            if start < past:
                slots = mx.array([call.slot(row, p) for p in range(start, past)])
                self.pool.write(
                    slots, mx.array(keys[None, :, start:past]), mx.array(values[None, :, start:past])
                )
        self.stand_in = StandIn(call.rows, self.pool, GIVEN)

    def fetch(self) -> tuple[mx.array, mx.array]:
        keys = mx.array(self.new_keys)
        return self.stand_in.update_and_fetch(keys, keys if self.shares_values else mx.array(self.new_values))

    def attend(self, sinks: mx.array | None = None, window: int | None = None) -> mx.array:
        """Calls attention as a model does."""
        mask = self.stand_in.make_mask(max(self.call.lengths), window_size=window)
        keys, values = self.fetch()
        return attend(self.query, keys, values, mask, sinks=sinks)

    def by_hand(self, sinks: mx.array | None = None, window: int | None = None) -> list[NDArray[np.float64]]:
        """Computes [q_heads, new, dim] of each sequence, position by position."""
        results = []
        for row, (past, length) in enumerate(zip(self.call.pasts, self.call.lengths, strict=True)):
            keys, values = self.positions[row]
            out = np.empty((GROUP * HEADS, length, values.shape[2]))
            for new in range(length):
                seen = self.call.seen(past + new, window)
                for head in range(GROUP * HEADS):
                    scores = SCALE * keys[head // GROUP, seen].astype(np.float64) @ self.query[row, head, new]
                    more = [] if sinks is None else [float(sinks[head])]
                    weights = np.exp(np.append(scores, more) - scores.max())
                    out[head, new] = (weights / weights.sum())[: len(seen)] @ values[head // GROUP, seen]
            results.append(out)
        return results


def attend(query: NDArray[np.float32], keys: Any, values: Any, mask: Any, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        mx.array(query), keys, values, scale=SCALE, mask=mask, **options
    )


def assert_equal(
    call: Call, ours: mx.array, expected: list[NDArray[np.float64]], tolerance: float = 1e-5
) -> None:
    for row, length in enumerate(call.lengths):
        assert np.abs(np.array(ours[row, :, :length]) - expected[row]).max() <= tolerance


OF_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


# ---- results


@pytest.mark.parametrize("on_pools", [True, False], ids=["on the pools", "by the model"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("seed", range(4))
@OF_FAMILY
def test_attention_sees_what_the_family_sees(
    family: TokenFamily, seed: int, has_sinks: bool, on_pools: bool
) -> None:
    layer = Layer(drawn(family, seed))
    sinks = mx.array([0.5, -1.0, 2.0, 0.0, 1.0, -0.3]) if has_sinks else None
    attention = PoolAttention(None)
    with attention_on_pools(attention if on_pools else None, GIVEN):
        ours = layer.attend(sinks)
    assert attention.counters.on_pools == on_pools
    assert_equal(layer.call, ours, layer.by_hand(sinks))


@OF_FAMILY
def test_a_model_may_ask_for_a_narrower_window(family: TokenFamily) -> None:
    layer = Layer(drawn(family, 2))
    with attention_on_pools(PoolAttention(None), GIVEN):
        assert_equal(layer.call, layer.attend(window=3), layer.by_hand(window=3))


@pytest.mark.parametrize("new", [1, 5])
@OF_FAMILY
def test_blocks_that_follow_each_other_are_read_as_a_view(family: TokenFamily, new: int) -> None:
    tables = [np.arange(first, first + 8, dtype=np.int32) for first in (2, 20)]
    layer = Layer(Call(family, tables, [13, 22], [new, 1]))
    assert None not in [layer.stand_in.rows.run(row) for row in (0, 1)]
    with attention_on_pools(PoolAttention(None), GIVEN):
        assert_equal(layer.call, layer.attend(), layer.by_hand())


def test_a_model_may_use_the_attributes_of_its_cache_for_something_else() -> None:
    layer = Layer(Call(FULL, [np.arange(8, dtype=np.int32)], [13], [2]))
    with attention_on_pools(PoolAttention(None), GIVEN):
        keys, values = layer.fetch()
        layer.stand_in.keys = layer.stand_in.values = mx.zeros(keys.shape)
        assert_equal(layer.call, attend(layer.query, keys, values, "causal"), layer.by_hand())


def test_values_may_be_the_keys() -> None:
    layer, attention = Layer(drawn(FULL, 1), shares_values=True), PoolAttention(None)
    with attention_on_pools(attention, GIVEN):
        assert_equal(layer.call, layer.attend(), layer.by_hand())
    assert attention.counters.on_pools == 1


@OF_FAMILY
def test_int8_rows_are_read_with_their_scales(family: TokenFamily) -> None:
    layer = Layer(drawn(family, 1), is_quantized=True)
    with attention_on_pools(PoolAttention(None), GIVEN):
        assert_equal(layer.call, layer.attend(), layer.by_hand(), tolerance=0.05)


def test_rows_beyond_a_sequences_end_may_hold_anything_but_the_slot_of_zeros() -> None:
    """A masked position whose V is not a number would spoil the result."""
    for attention in (PoolAttention(None), None):
        layer = Layer(drawn(FULL, 6, count=3))
        used = {layer.call.slot(row, p) for row, past in enumerate(layer.call.pasts) for p in range(past)}
        others = mx.array([slot for slot in range(SIZE * BLOCKS) if slot not in used] + [SIZE * BLOCKS + 1])
        for array in layer.pool.arrays:
            array[others] = float("nan")
        with attention_on_pools(attention, GIVEN):
            assert_equal(layer.call, layer.attend(), layer.by_hand())


# ---- which calls are served


def unchanged(layer: Layer, other: Layer) -> tuple[Any, ...]:
    mask = layer.stand_in.make_mask(max(layer.call.lengths))
    return (*layer.fetch(), mask)


def mask_of_another_layer(layer: Layer, other: Layer) -> tuple[Any, ...]:
    twin = StandIn(layer.stand_in.rows, layer.pool, GIVEN)  # models make one mask for all layers of a kind
    return (*layer.fetch(), twin.make_mask(max(layer.call.lengths)))


def changed_keys(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, values, mask = unchanged(layer, other)
    return keys * 1, values, mask


def changed_values(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, values, mask = unchanged(layer, other)
    return keys, values * 1, mask


def exchanged(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, _, mask = unchanged(layer, other)
    return keys, keys, mask  # V is another array


def values_of_another_layer(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, _, mask = unchanged(layer, other)
    return keys, other.fetch()[1], mask


def changed_mask(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, values, mask = unchanged(layer, other)
    return keys, values, mx.logical_and(mask, True)


def mask_of_another_call(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, values, _ = unchanged(layer, other)
    return keys, values, other.stand_in.make_mask(max(layer.call.lengths))


def mask_that_is_k(layer: Layer, other: Layer) -> tuple[Any, ...]:
    keys, values, _ = unchanged(layer, other)
    return keys, values, keys


@pytest.mark.parametrize(
    ("given", "is_served"),
    [
        (unchanged, True),
        (mask_of_another_layer, True),
        (changed_keys, False),
        (changed_values, False),
        (exchanged, False),
        (values_of_another_layer, False),
        (changed_mask, False),
        (mask_of_another_call, False),
        (mask_that_is_k, False),
    ],
)
def test_only_the_unchanged_arrays_of_a_stand_in_are_served(
    given: Callable[[Layer, Layer], tuple[Any, ...]], is_served: bool
) -> None:
    call = drawn(FULL, 4, count=3)
    layer, other = Layer(call), Layer(call)
    visible = GIVEN.visible(*given(layer, other))
    assert visible == (Visible(layer.stand_in, None) if is_served else None)


def test_changed_arrays_go_to_mlxs_own_function() -> None:
    """A model may hide more than the stand-in's mask does, and then computes with the dense rows."""
    layer, attention = Layer(drawn(FULL, 4, count=3)), PoolAttention(None)
    new = max(layer.call.lengths)
    hides_more = SlidingWindow(1, 1, 3)
    with attention_on_pools(attention, GIVEN):
        mask = layer.stand_in.make_mask(new, return_array=True)
        keys, values = layer.fetch()
        queries = mx.array(layer.call.pasts)[:, None, None, None] + mx.arange(new)[:, None]
        near = mx.arange(keys.shape[2]) > queries - hides_more.window
        ours = attend(layer.query, keys, values, mx.logical_and(mask, near))
    assert attention.counters.on_pools == 0
    assert_equal(layer.call, ours, layer.by_hand(window=3))


def test_an_option_that_is_not_known_goes_to_mlxs_own_function() -> None:
    layer, attention = Layer(drawn(FULL, 4, count=3)), PoolAttention(None)
    with attention_on_pools(attention, GIVEN):
        mask = layer.stand_in.make_mask(max(layer.call.lengths))
        ours = attend(layer.query, *layer.fetch(), mask, stream=mx.cpu)
    assert attention.counters.on_pools == 0
    assert_equal(layer.call, ours, layer.by_hand())


def test_arrays_of_other_models_are_left_alone() -> None:
    random, attention = np.random.default_rng(0), PoolAttention(None)
    query, rows = normal(random, 1, 4, 3, 8), mx.array(normal(random, 1, 4, 3, 8))
    outside = attend(query, rows, rows, "causal")
    with attention_on_pools(attention, GIVEN):
        assert np.array_equal(attend(query, rows, rows, "causal"), outside)
    assert attention.counters.on_pools == 0


# ---- where it is in force


def test_attention_on_pools_ends_with_its_context() -> None:
    layer, attention = Layer(drawn(FULL, 1)), PoolAttention(None)
    mask = layer.stand_in.make_mask(max(layer.call.lengths))
    keys, values = layer.fetch()
    with contextlib.suppress(ZeroDivisionError), attention_on_pools(attention, GIVEN):
        attend(layer.query, keys, values, mask)
        raise ZeroDivisionError
    assert attention.counters.on_pools == 1
    assert_equal(layer.call, attend(layer.query, keys, values, mask), layer.by_hand())
    assert attention.counters.on_pools == 1


def test_each_thread_has_its_own_attention() -> None:
    layer, ours, theirs = Layer(drawn(FULL, 1)), PoolAttention(None), PoolAttention(None)
    mask = layer.stand_in.make_mask(max(layer.call.lengths))
    keys, values = layer.fetch()

    def attend_elsewhere() -> None:
        attend(layer.query, keys, values, mask)  # without a context
        with attention_on_pools(theirs, GIVEN):
            attend(layer.query, keys, values, mask)
            attend(layer.query, keys, values, mask)

    with attention_on_pools(ours, GIVEN):
        thread = threading.Thread(target=attend_elsewhere)
        thread.start()
        thread.join()
        attend(layer.query, keys, values, mask)
    assert (ours.counters.on_pools, theirs.counters.on_pools) == (1, 2)


# ---- a kernel


class Echo:
    """Kernel whose result is the query."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []

    def serves(self, q_heads: int, kv_heads: int, key_dim: int, value_dim: int, rows: int) -> bool:
        assert (q_heads, kv_heads, key_dim, value_dim) == (GROUP * HEADS, HEADS, KEY_DIM, VALUE_DIM)
        return rows <= 4

    def attend(
        self, query: mx.array, keys: mx.array, values: mx.array, rows: Any, **options: Any
    ) -> mx.array:
        assert options["scale"] == SCALE
        assert (options["scales"] is not None) == (keys.dtype == mx.int8)
        assert len(rows.sequence_of) == len(query)
        self.windows.append((rows.ends - rows.first).tolist())
        return query[..., :VALUE_DIM]


@pytest.mark.parametrize(
    ("longest", "is_quantized", "is_used"), [(4, False, True), (9, False, False), (4, True, True)]
)
def test_a_kernel_serves_few_rows(longest: int, is_quantized: bool, is_used: bool) -> None:
    call = drawn(SlidingWindow(1, 1, 5), 5, count=3, longest=longest)
    assert (max(call.lengths) <= 4) == (longest == 4)
    layer, kernel = Layer(call, is_quantized), Echo()
    attention = PoolAttention(kernel)  # type: ignore[arg-type]
    with attention_on_pools(attention, GIVEN):
        ours = layer.attend()
    assert (attention.counters.on_pools, attention.counters.by_kernel) == (1, int(is_used))
    if is_used:
        assert np.array_equal(ours, layer.query[..., :VALUE_DIM]), "each row's result is at its place"
        (seen,) = kernel.windows
        expected = [
            len(call.seen(past + new)) if new < length else 0
            for past, length in zip(call.pasts, call.lengths, strict=True)
            for new in range(max(call.lengths))
        ]
        assert [max(0, count) for count in seen] == expected
    else:
        assert_equal(call, ours, layer.by_hand(), tolerance=0.05 if is_quantized else 1e-5)
