"""Pools: their families, their memory, and copies between rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import VOCAB, save, saved
from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    row_bytes,
)
from rootstock.cache.plan import BlockCopy, Plan, RowsReturned, StateCopy
from rootstock.cache.types import BlockId, SlotId
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.runtime.torch.lazy_rows import LazyRows
from rootstock.runtime.torch.runner import TorchRuntime
from rootstock.runtime.torch.state_pool import StateCache, StateKey, TorchStatePool, TorchStateShape
from rootstock.runtime.trial import relative_error
from runtime.torch.helpers import pool_of
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import load, loaded

HEADS = 2 * 16 * 2 * 4  # K and V of two heads of 16 floats


@pytest.mark.parametrize(
    ("model_type", "families"),
    [
        ("mistral", (SlidingWindow(3, 3 * HEADS, 7),)),
        ("gemma3_text", (FullAttention(1, HEADS), SlidingWindow(3, 3 * HEADS, 7))),
        ("llama4_text", (FullAttention(1, HEADS), ChunkedAttention(3, 3 * HEADS, 8))),
        # the last two of four layers use the K and V of others
        ("gemma3n_text", (FullAttention(1, HEADS), SlidingWindow(1, HEADS, 7))),
        (
            "deepseek_v3",
            (FullAttention(3, 3 * (24 + 8) * 4),),
        ),  # latents and rotary keys, for all heads together
        ("deepseek_v32", (FullAttention(3, 3 * (24 + 8 + 16) * 4),)),  # and indexer keys
        # of 128 values with a kernel of 4, and 4 heads of 16 by 16, in each of three layers
        ("qwen3_next", (FullAttention(1, HEADS), RecurrentState(3, 3 * (128 * 4 + 4 * 16 * 16) * 4))),
        ("mamba", (RecurrentState(3, 3 * 96 * (4 + 16) * 4),)),
        ("lfm2", (FullAttention(2, 2 * HEADS), RecurrentState(2, 2 * 64 * 3 * 4))),
        ("bloom", (FullAttention(3, 3 * 2 * HEADS),)),  # four heads, one sequence at a time
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_match_the_tensors_that_layers_keep(model_type: str, families: tuple[Family, ...]) -> None:
    runtime = loaded(model_type)
    assert runtime.description.families == families
    runtime.allocate([10] * len(families), 4)
    pool = pool_of(runtime)
    held = sum(tensor.nbytes for layer in pool.layers.values() for tensor in layer.tensors)
    held += pool.states.nbytes if pool.states is not None else 0
    assert held == sum(10 * row_bytes(family, 4) for family in families)


def test_a_window_as_long_as_the_context_is_full_attention(tmp_path: Path) -> None:
    save(tmp_path, "mistral", sliding_window=512)
    assert load(tmp_path).description.families == (FullAttention(3, 3 * HEADS),)


def test_windows_of_different_length_are_families_of_their_own() -> None:
    families = loaded("dots3_note_text").description.families
    assert [family.name for family in families] == ["full", "window(7)"]


def test_a_pool_takes_memory_when_it_is_written() -> None:
    """Measures another process, because this one would first take memory that it has freed."""
    script = f"""
import numpy as np
from rootstock.cache.families import row_bytes
from rootstock.config import ModelConfig
from rootstock.runtime.base import Batch, Segment
from rootstock.runtime.torch.runner import load_model

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

runtime = load_model(ModelConfig({str(saved("qwen3_next"))!r}, dtype="float32", device="cpu", threads=1))
rows = [(1 << 30) // row_bytes(family, 16) for family in runtime.description.families]
before = resident()
runtime.allocate(rows, 16)
table = np.arange(rows[0] - 8, rows[0], dtype=np.int32)
runtime.forward(Batch([Segment(np.arange(100, dtype=np.int32), 0, (table,), 1, rows[1] - 1)]))
print(resident() - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    grown = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert grown < 256 << 20, "of two pools of a gigabyte each"


ROLLUP = Path("/proc/self/smaps_rollup")  # counts pages; statm is late by up to some pages for each processor


def resident_bytes() -> int:
    [kib] = re.findall(r"^Rss: +(\d+) kB", ROLLUP.read_text(), re.MULTILINE)
    return int(kib) * 1024


@pytest.mark.skipif(not ROLLUP.exists(), reason="needs /proc")
def test_rows_that_are_given_back_take_no_memory_and_leave_their_neighbours_alone() -> None:
    rows = LazyRows((64, 1 << 18), torch.float32, torch.device("cpu"))  # of 1 MiB each
    rows.tensor.fill_(1)
    before = resident_bytes()
    returned = np.array([40, 3, 41, 7, 42], np.int32)
    rows.give_back(returned)
    assert before - resident_bytes() > 4 << 20  # of 5 MiB; this process may take some for other objects
    kept = [row for row in range(64) if row not in returned]
    assert (rows.tensor[kept] == 1).all()
    rows.tensor[40] = 2
    assert (rows.tensor[40] == 2).all()


def test_a_page_that_two_rows_share_is_given_back_with_neither() -> None:
    rows = LazyRows(
        (96, 10), torch.float32, torch.device("cpu")
    )  # 40 bytes each, blocks of 3 rows of 120 bytes
    rows.tensor.fill_(1)
    rows.give_back(np.array([5], np.int32), positions=3)
    assert (rows.tensor == 1).all()
    wide = LazyRows(
        (9, 1500), torch.float32, torch.device("cpu")
    )  # 6000 bytes each: one page and a part of another
    wide.tensor.fill_(1)
    wide.give_back(np.array([1, 2], np.int32))
    assert (wide.tensor[[0, *range(3, 9)]] == 1).all()


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next"])
def test_a_plan_gives_back_rows_of_the_family_that_it_names(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = loaded(model_type)
    runtime.allocate([10, 10], 4)
    pool = pool_of(runtime)
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        LazyRows, "give_back", lambda self, rows, positions=1: given.append((*rows, positions))
    )
    for family in (0, 1):
        given.clear()
        runtime.apply(Plan(returned=(RowsReturned(family, np.array([4, 8], np.int32)),)))
        if isinstance(runtime.description.families[family], RecurrentState):
            assert given == [(4, 8, 1)] * 6  # a convolution's and a recurrent state in each of three layers
        else:
            layers = [layer for layer in pool.layers.values() if layer.family == family]
            assert given == [(4, 8, 4)] * 2 * len(layers)


def test_states_larger_than_the_memory_are_refused_with_the_option() -> None:
    with pytest.raises(InvalidOption, match="--kv-budget"):
        loaded("mamba").allocate([1 << 45], 32)


def test_copies_stay_in_their_family() -> None:
    runtime = loaded("gemma3_text")
    runtime.allocate([4, 4], 2)
    pool = pool_of(runtime)
    with torch.inference_mode():
        for layer in pool.layers.values():
            for memory in layer.tensors:
                memory.copy_(torch.arange(8.0)[:, None, None].expand_as(memory))
    runtime.apply(Plan((BlockCopy(BlockId(0), BlockId(3), 2, 1), BlockCopy(BlockId(1), BlockId(2), 1, 0))))
    for layer in pool.layers.values():
        expected = [[0, 1, 2, 3, 2, 5, 6, 7], [0, 1, 2, 3, 4, 5, 0, 1]][layer.family]
        assert layer.keys[:, 0, 0].tolist() == expected
        assert layer.values[:, 0, 0].tolist() == expected


def test_states_are_copied_in_order() -> None:
    runtime = loaded("qwen3_next")
    runtime.allocate([2, 4], 2)
    states = pool_of(runtime).states
    assert states is not None
    with torch.inference_mode():
        for memory in states._memory.values():
            numbers = torch.arange(4.0).view(4, *[1] * (memory.tensor.dim() - 1))
            memory.tensor.copy_(numbers.expand_as(memory.tensor))
    order = [(0, 1), (1, 2), (3, 0)]
    runtime.apply(Plan(states=tuple(StateCopy(SlotId(s), SlotId(t)) for s, t in order)))
    for memory in states._memory.values():
        assert memory.tensor.flatten(1)[:, 0].tolist() == [3, 0, 0, 3]


def exact_and_rounded(model_type: str) -> list[TorchRuntime]:
    return [loaded(model_type, state_dtype=of_states) for of_states in ("auto", "bfloat16")]


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "bamba"])
def test_rounded_states_are_smaller_and_cost_less_than_a_hundredth_of_the_logits(model_type: str) -> None:
    """Over 64 decodes, each of which rounds the state again: measured 0.0012 to 0.0027."""
    tokens, figures = random_tokens(VOCAB, 80, 3), []
    for runtime in exact_and_rounded(model_type):
        allocate(runtime)
        figures.append(packed_logits(runtime, [tokens], [{0: 16}, *[{0: 1}] * 64])[0])
    exact, coarse = figures
    np.testing.assert_array_equal(coarse[:16], exact[:16])  # within a forward nothing is rounded
    assert 0 < relative_error(coarse, exact) < 0.01
    kept = [runtime.description.families[-1] for runtime in exact_and_rounded(model_type)]
    assert isinstance(kept[0], RecurrentState)
    assert isinstance(kept[1], RecurrentState)
    assert kept[1].bytes_per_state < 0.7 * kept[0].bytes_per_state


def test_rounded_states_are_never_exchanged_with_exact_ones() -> None:
    """The dtype of stored states is a part of the namespace."""
    found = [runtime.description.kv_dtype for runtime in exact_and_rounded("qwen3_next")]
    assert found == ["float32", "bfloat16+float32"]


def test_an_unknown_state_dtype_stops_the_start() -> None:
    with pytest.raises(InvalidOption, match="--state-dtype"):
        ModelConfig("any", state_dtype="int4")


def test_states_are_found_by_the_index_of_their_layer() -> None:
    """transformers 5.17 reads `cache.layers[i]`, later versions call the cache's methods."""
    shapes = [
        TorchStateShape(StateKey(3, "conv_states", 0), (2, 4), torch.float32, torch.float32, conv_kernel=4),
        TorchStateShape(StateKey(3, "recurrent_states", 0), (5,), torch.float32, torch.float32),
    ]
    pool, slots = TorchStatePool(shapes, 2, torch.device("cpu")), torch.tensor([1])
    pool.write(shapes[0], slots, torch.ones(1, 2, 4))
    pool.write(shapes[1], slots, torch.full((1, 5), 2.0))
    cache = StateCache(pool, slots, continues=True)
    layer = cache.layers[3]
    assert layer.conv_states[0] is cache.get_conv_state(3)
    assert layer.recurrent_states[0] is cache.get_recurrent_state(3)
    assert not layer.record_past
    layer.recurrent_states[0] += 1.0  # in place, as a mixer does
    cache.keep()
    assert pool.read(shapes[1], slots).tolist() == [[3.0] * 5]
    assert len(cache.layers) == 0
