"""The Triton kernel equals the reference, on a CUDA device or, without one, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.batches import RaggedBatch, make_batch
from kernels.ragged import ragged_batches
from kernels.test_attention import assert_equals_reference, run
from rootstock.cache.families import ChunkedAttention, SlidingWindow
from rootstock.kernels import reference
from rootstock.kernels.cuda import triton_attention
from rootstock.kernels.cuda.triton_attention import (
    TritonAttention,
    chunk_shape,
    slice_positions,
    tile_records,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEAST_SPLITS = (3, 16, 256)


def attend(batch: RaggedBatch, least_split: int, block_size: int | None = None) -> Tensor:
    sinks = batch.scores.sinks
    there = replace(
        batch,
        query=batch.query.to(DEVICE),
        key=batch.key.to(DEVICE),
        value=batch.value.to(DEVICE),
        keys=batch.keys.to(DEVICE),
        values=batch.values.to(DEVICE),
        scores=replace(batch.scores, sinks=None if sinks is None else sinks.to(DEVICE)),
    )
    return run(TritonAttention(batch.block_size, DEVICE, least_split), there).cpu()


@given(ragged_batches(), st.sampled_from(LEAST_SPLITS))
@settings(max_examples=60 if triton_attention.INTERPRETED else 10)  # each compiles kernels on a device
def test_triton_attention_equals_the_reference(batch: RaggedBatch, least_split: int) -> None:
    assert_equals_reference(attend(batch, least_split), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_long_contexts_in_every_layout(dtype: torch.dtype, layout: str, block_size: int) -> None:
    lengths = [(300, 1), (257, 1), (290, 40), (0, 65), (0, 1)]
    batch = make_batch(
        lengths, block_size=block_size, layout=layout, dtype=dtype, head_dim=32, shared=256, sinks=True
    )
    for least_split in (30, 256):
        assert_equals_reference(attend(batch, least_split), batch)


@pytest.mark.parametrize(
    "family", [SlidingWindow(1, 1, 30), SlidingWindow(1, 1, 1), ChunkedAttention(1, 1, 64)]
)
def test_windows_and_chunks_in_long_prompts(family: SlidingWindow | ChunkedAttention) -> None:
    batch = make_batch([(0, 300), (200, 150), (400, 1)], q_heads=3, kv_heads=1, family=family)
    assert_equals_reference(attend(batch, 16), batch)


def test_dimensions_of_k_and_v_may_differ_and_be_no_powers_of_two() -> None:
    batch = make_batch([(40, 1), (10, 30)], head_dim=24, value_dim=40, softcap=20.0, sinks=True)
    assert_equals_reference(attend(batch, 16), batch)


def test_queries_may_be_a_view_across_heads() -> None:
    batch = make_batch([(40, 1), (10, 30)])
    heads_first = replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert_equals_reference(attend(heads_first, 16), batch)


def test_a_group_larger_than_a_tile_stays_together() -> None:
    batch = make_batch([(40, 1), (10, 9)], q_heads=71, kv_heads=1)
    assert_equals_reference(attend(batch, 16), batch)


def test_relative_error_in_bfloat16_is_a_rounding() -> None:
    batch = make_batch([(500, 1), (250, 64)], block_size=32, head_dim=64, dtype=torch.bfloat16, layout="runs")
    expected = reference.attend(batch.query, batch.keys, batch.values, batch.spans, batch.scores)
    out = attend(batch, 64).double()
    assert float((out - expected).norm() / expected.norm()) < 5e-3


def test_contexts_are_split_to_keep_the_device_busy() -> None:
    attention = TritonAttention(16, torch.device("cpu"), least_split=256)
    attention._processors = 132
    assert attention.splits(programs=8, longest=16384) == 32
    assert attention.splits(programs=8, longest=1024) == 4
    assert attention.splits(programs=8, longest=200) == 1
    assert attention.splits(programs=128, longest=16384) == 2
    assert attention.splits(programs=1024, longest=16384) == 1


def test_tiles_cover_each_row_once() -> None:
    batch = make_batch([(9, 1), (3, 6), (20, 5)])
    records, rows = tile_records(list(enumerate(batch.spans))[1:], 4)
    assert records.tolist() == [[1, 1, 3, 4, 0], [1, 5, 7, 2, 4], [2, 7, 20, 4, 6], [2, 11, 24, 1, 10]]
    assert rows.tolist() == list(range(1, 12))


def test_matrices_fit_registers_and_shared_memory() -> None:
    def rows(group: int, element_bytes: int, shared_kib: int = 99) -> list[int]:
        dims = (64, 128, 256, 512)
        return [chunk_shape(group, dim, element_bytes, 512, shared_kib << 10).rows for dim in dims]

    assert rows(1, 2) == [64, 64, 32, 16]
    assert rows(1, 4) == [32, 32, 16, 16]
    assert rows(1, 2, 227) == [128, 128, 32, 16]
    assert rows(1, 4, 227) == [32, 32, 16, 16]
    assert rows(71, 2)[0] == rows(71, 2, 227)[0] == 128
    assert [slice_positions(n) for n in (16, 512, 700, 1024, 4096)] == [64, 64, 32, 32, 16]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_devices_that_are_not_here(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_triton.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, str(script), str(capability), "attention"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "compiled" in ran.stdout


def test_the_interpreter_runs_the_kernel_only_without_a_device() -> None:
    assert triton_attention.INTERPRETED is (DEVICE.type == "cpu")
