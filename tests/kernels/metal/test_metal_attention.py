"""The Metal kernels equal the reference, thread by thread in C++, and their launches cover each row once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batches import make_batch
from kernels.metal.emulation import COMPILER, Emulation, EmulationError
from kernels.metal.metal_batches import TOLERANCES, attend, step_rows, worst_error
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.metal.launch import MOST_NUMBERS, AttentionHeads, Occupancy, StepRows
from rootstock.kernels.metal.paged_attention import MOST_ROWS, PagedKernel
from rootstock.kernels.metal.source import LANES, SIMDGROUPS
from rootstock.kernels.metal.trial import why_not
from rootstock.kernels.spans import EVERYTHING

if COMPILER is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

WHOLE = Occupancy(threadgroups=1)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SPLIT = Occupancy(threadgroups=1000, least_split=3)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("occupancy", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("made", "lengths"),
    [
        pytest.param({"q_heads": 4, "kv_heads": 4, "head_dim": 64}, [(36, 1), (0, 1), (90, 1)], id="MHA"),
        pytest.param(
            {
                "q_heads": 8,
                "kv_heads": 2,
                "head_dim": 128,
                "dtype": torch.bfloat16,
                "block_size": 16,
                "family": SlidingWindow(1, 1, 20),
                "sinks": True,
            },
            [(70, 1), (50, 8), (3, 16)],
            id="GQA, window, sinks, drafts, bfloat16",
        ),
        pytest.param(
            {
                "q_heads": 16,
                "kv_heads": 1,
                "head_dim": 80,
                "dtype": torch.float16,
                "softcap": 3.0,
                "block_size": 5,
            },
            [(61, 1), (30, 3)],
            id="MQA, head size 80, softcap, float16",
        ),
        pytest.param(
            {"q_heads": 6, "kv_heads": 2, "head_dim": 192, "value_dim": 128, "block_size": 12},
            [(40, 1), (9, 1)],
            id="V smaller than K",
        ),
    ],
)
def test_the_kernel_equals_the_reference(
    made: dict[str, Any], lengths: list[tuple[int, int]], occupancy: Occupancy, compiled: Path
) -> None:
    for order in (0, 1):
        batch = make_batch(lengths, seed=order, **made)
        kernel = PagedKernel(Emulation(compiled, reversed=order), occupancy)
        assert worst_error(kernel, batch) <= TOLERANCES[batch.query.dtype]


@pytest.mark.parametrize("occupancy", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("shared_value_dim", [0, 24], ids=["K and V", "V in K"])
def test_pools_of_int8_equal_the_reference_on_the_numbers_that_they_mean(
    shared_value_dim: int, occupancy: Occupancy, compiled: Path
) -> None:
    for order, dtype in enumerate((torch.float32, torch.bfloat16)):
        fields: dict[str, Any] = {
            "q_heads": 6,
            "kv_heads": 2,
            "head_dim": 40,
            "block_size": 7,
            "dtype": dtype,
        }
        batch = make_batch([(70, 1), (30, 5)], sinks=True, softcap=3.0, seed=order, **fields)
        kernel = PagedKernel(Emulation(compiled, reversed=order), occupancy)
        error = worst_error(kernel, batch, shared_value_dim=shared_value_dim, is_quantized=True)
        assert error <= TOLERANCES[dtype]
        assert {use.is_quantized for use in kernel.uses} == {True}


lengths = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 90)), st.one_of(st.just(1), st.integers(1, MOST_ROWS))),
    min_size=1,
    max_size=5,
)
families = st.one_of(
    st.just(EVERYTHING),
    st.integers(1, 60).map(lambda window: SlidingWindow(1, 1, window)),
    st.integers(1, 60).map(lambda chunk: ChunkedAttention(1, 1, chunk)),
)


@given(
    lengths,
    families,
    st.builds(Occupancy, st.sampled_from([1, 9, 100]), st.sampled_from([1, 8, 30])),
    st.sampled_from(["scattered", "runs", "contiguous"]),
    st.sampled_from([0, 16, 90]),
    st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_ragged_batches_equal_the_reference(
    compiled: Path,
    lengths: list[tuple[int, int]],
    family: TokenFamily,
    occupancy: Occupancy,
    layout: str,
    shared: int,
    seed: int,
) -> None:
    batch = make_batch(
        lengths,
        q_heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=7,
        layout=layout,
        shared=shared,
        seed=seed,
        sinks=True,
        family=family,
    )
    assert worst_error(PagedKernel(Emulation(compiled), occupancy), batch) <= 1e-5


@pytest.mark.parametrize("occupancy", [WHOLE, SPLIT], ids=["whole", "split"])
def test_v_may_be_the_beginning_of_k_and_a_group_may_fill_several_threadgroups(
    occupancy: Occupancy, compiled: Path
) -> None:
    batch = make_batch([(30, 1), (20, 1)], q_heads=128, kv_heads=1, head_dim=96)
    emulation = Emulation(compiled)
    assert worst_error(PagedKernel(emulation, occupancy), batch, shared_value_dim=64) <= 1e-5
    assert emulation.launched[0].grid[0] == 2, "128 query heads are more than a threadgroup's 64 lines"


@pytest.mark.parametrize("occupancy", [WHOLE, SPLIT], ids=["whole", "split"])
def test_rows_that_see_nothing_are_zeros(occupancy: Occupancy, compiled: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    pool = mx.array(draw((60, 2, 32)), mx.float32)
    rows = StepRows(
        np.arange(18, dtype=np.int32).reshape(3, 6),
        np.array([0, 0, 1, 2, 2, 2], np.int32),
        np.array([0, 0, 5, 9, 9, 2], np.int32),
        np.array([0, 7, 5, 3, 9, 2], np.int32),
        3,
    )
    query = mx.array(draw((6, 6, 32)), mx.float32)
    for sinks in (None, mx.zeros(6)):
        kernel = PagedKernel(Emulation(compiled), occupancy)
        out = np.array(kernel.attend(query, pool, pool, rows, scale=1.0, sinks=sinks))
        assert np.isfinite(out).all()
        assert [bool(row.any()) for row in out] == [False, True, False, False, False, False]


@pytest.mark.parametrize("new", [1, 4])
def test_a_position_is_read_once_for_its_query_heads_and_rows(new: int, compiled: Path) -> None:
    emulation = Emulation(compiled)
    batch = make_batch([(90, new)], q_heads=6, kv_heads=2, head_dim=32, block_size=7, sinks=True)
    attend(PagedKernel(emulation, SPLIT), batch)
    (launched,) = (each for each in emulation.launched if "paged" in each.name)
    rows = step_rows(batch)
    positions = np.arange(90 + new)
    slots = rows.table[0, positions // 7] * 7 + positions % 7
    simdgroups = -(
        -new * 3 // 8
    )  # that have the 3 · new lines of a KV head: one memory read serves all of them
    for pool in (launched.reads["keys"], launched.reads["values"]):
        assert (pool[slots] == simdgroups).all()
        assert pool.sum() == pool[slots].sum()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (f"{BARRIER}\n#pragma", "\n#pragma", "read before it is written"),
        (f"{BARRIER}\n    }}", "\n    }", "without a barrier"),
        ("if (split > 0 && from >= to)", "if (simd == 7)", "at a barrier"),
        ("table + tile[0]", "table + tile[0] + 99", "of a buffer"),
        ("mine > 0; at +=", "mine > lane; at +=", "at a simd_sum"),
    ],
)
def test_the_emulation_reports_undefined_behaviour(old: str, new: str, told: str, compiled: Path) -> None:
    batch = make_batch([(36, 1)], q_heads=6, kv_heads=2, head_dim=32, block_size=7)
    with pytest.raises(EmulationError, match=told):
        attend(PagedKernel(Emulation(compiled, replace={old: new}), WHOLE), batch)


def test_steps_of_a_layer_need_four_kernels_and_a_merge(compiled: Path) -> None:
    """Metal compiles each of them, so lengths and numbers of rows must not be part of a kernel."""
    emulation = Emulation(compiled)
    for lengths in ([(3, 1)], [(80, 1), (90, 1)], [(9, 2)], [(80, 15), (4, 1)], [(85, 16)] * 9):
        for occupancy in (WHOLE, SPLIT):
            batch = make_batch(lengths, q_heads=6, kv_heads=2, head_dim=32, block_size=7, sinks=True)
            attend(PagedKernel(emulation, occupancy), batch)
    assert emulation.kernels == 5


@pytest.mark.parametrize("sinks", [None, mx.zeros(6)], ids=["plain", "sinks"])
def test_the_trial_at_load_tells_why_the_kernel_cannot_be_used(
    sinks: mx.array | None, compiled: Path
) -> None:
    def used(kernel: PagedKernel) -> PagedKernel:
        rows = StepRows(np.zeros((1, 1), np.int32), *np.array([[0], [0], [1]], np.int32), 7)
        pool = mx.ones((7, 2, 32))
        mx.eval(kernel.attend(mx.ones((1, 6, 32)), pool, pool, rows, scale=1.0, sinks=sinks))
        return kernel

    right = used(PagedKernel(Emulation(compiled)))
    uses = right.uses
    assert why_not(right, uses) is None
    quantized = {replace(use, is_quantized=True) for use in uses}
    assert why_not(right, quantized) is None
    forgotten = PagedKernel(Emulation(compiled, replace={"score *= key_scale[t];": ""}))
    assert "blocks of 7, int8 pools" in str(why_not(forgotten, quantized))
    swapped = used(
        PagedKernel(Emulation(compiled, replace={"(slot * HEADS + head) * D": "slot * HEADS * D"}))
    )
    assert (told := why_not(swapped, swapped.uses)) is not None
    assert told.startswith("the Metal kernel is wrong by")
    assert "6/2 heads of 32 and 32 numbers in float32, blocks of 7" in told
    broken = PagedKernel(lambda *_: fail)
    assert why_not(broken, uses) == (
        f"the Metal kernel failed for {next(iter(uses))}: RuntimeError: Unable to build metal library: "
        "program_source:2:5: error: unknown type"
    )


def fail(**_: Any) -> Any:
    raise RuntimeError(
        "Unable to build metal library\nprogram_source:1:1: warning: unused\nprogram_source:2:5: error: unknown type"
    )


# ------------------------------------------------------------------------------------------ launches

heads = st.builds(
    lambda kv_heads, group, key_dim, value_dim: AttentionHeads(
        kv_heads * group, kv_heads, key_dim, value_dim
    ),
    st.integers(1, 4),
    st.one_of(st.integers(1, 16), st.sampled_from([20, 71, 128])),
    st.sampled_from([64, 80, 96, 112, 128, 192, 256, 576]),
    st.sampled_from([64, 80, 96, 112, 128, 192, 256, 512]),
)


@given(heads, lengths)
def test_launches_cover_each_row_once_within_the_registers(
    heads: AttentionHeads, lengths: list[tuple[int, int]]
) -> None:
    rows = step_rows(make_batch(lengths, q_heads=1, kv_heads=1, head_dim=1))
    launch = rows.launch(heads, SPLIT)
    tiles = np.array(launch.tiles)[:, :7]
    covered = [row for _, first, count, *_ in tiles for row in range(first, first + count)]
    assert covered == list(range(len(rows.sequence_of)))
    for table, first, count, begin, end, span, groups in tiles:
        its = slice(first, first + count)
        assert (rows.sequence_of[its] * rows.table.shape[1] == table).all()
        assert (begin, end) == (rows.first[its].min(), rows.ends[its].max())
        assert span * launch.splits >= end - begin
        assert SIMDGROUPS % groups == 0
        a_threadgroup = -(-count * heads.group // launch.pieces)
        assert -(-a_threadgroup // groups) <= launch.lines
    numbers = -(-heads.key_dim // LANES) + -(-heads.value_dim // LANES)
    assert launch.lines * numbers <= MOST_NUMBERS
    assert PagedKernel.serves(heads.q_heads, heads.kv_heads, heads.key_dim, heads.value_dim, MOST_ROWS)


def test_contexts_are_split_to_keep_the_device_busy() -> None:
    occupancy = Occupancy(threadgroups=256, least_split=256)
    assert occupancy.splits(8, 16384) == 32
    assert occupancy.splits(8, 1024) == 4
    assert occupancy.splits(8, 200) == 1
    assert occupancy.splits(1000, 16384) == 1
    assert occupancy.splits(1, 10**6) == 64


def test_shapes_that_no_kernel_takes() -> None:
    assert PagedKernel.serves(8, 2, 128, 128, 16)
    assert not PagedKernel.serves(8, 2, 128, 128, 17)
    assert not PagedKernel.serves(8, 3, 128, 128, 1)
    assert not PagedKernel.serves(8, 2, 577, 128, 1)
    assert not PagedKernel.serves(8, 2, 128, 513, 1)


def test_tables_that_are_too_short_are_refused() -> None:
    ends = np.array([9], np.int32)
    with pytest.raises(AssertionError, match="no block"):
        StepRows(np.zeros((1, 2), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32), ends, 4)
