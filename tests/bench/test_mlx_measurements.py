"""Measurements of the report of a Mac on the CPU, and with the Metal kernel's source run as C++."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_measurements as measured
import numpy as np
import pytest
from isolated import Figures, Job, Skipped, run_case
from mlx_measurements import MEASUREMENTS, FixedSplits
from mlx_report import COMMAND, FULL, SMALL, all_cases

from kernels.metal.emulation import COMPILER, Emulation
from rootstock.kernels.metal.launch import AttentionHeads, StepRows
from rootstock.kernels.metal.paged_attention import PagedKernel
from twins import mlx_models

GIB = 1 << 30
TIMES = {"min_ms", "median_ms", "runs"}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each timed function a few times. On a CPU mx.compile would call a C++ compiler."""
    for name, value in (("WARM_UP", 1), ("LEAST_RUNS", 2), ("MOST_RUNS", 2)):
        monkeypatch.setattr(measured, name, value)
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "llama"
    job = Job("model", {"config": dict(SMALL.model)}, GIB, model=str(directory))
    figures = figures_of(job)
    assert figures["parameters"] > 100_000
    assert figures["weights_mib"] < 0.7 * figures["parameters"] / (1 << 20)  # 4 bits, and scales
    return str(directory)


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replaces Metal by the emulation of its threads."""
    monkeypatch.setattr(measured, "has_metal", lambda: True)
    monkeypatch.setattr(measured, "PagedKernel", functools.partial(PagedKernel, Emulation(tmp_path)))


def figures_of(job: Job) -> Figures:
    """Measures a case in this process. Its figures are JSON."""
    figures: Figures = {}
    for found in MEASUREMENTS[job.measurement](job):
        figures.update(json.loads(json.dumps(found)))
    return figures


def figures_of_ways(job: Job) -> dict[str, Any]:
    """Returns the ways of a measurement that are measured. None of them has failed."""
    figures = figures_of(job)
    ways = {name: its for name, its in figures.items() if isinstance(its, dict)}
    assert [its["error"] for its in ways.values() if "error" in its] == []
    return ways


# ------------------------------------------------------------------------------------------ on the CPU


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("synchronize", [True, False])
def test_writes_are_in_place_and_copies_are_seen(synchronize: bool, scattered: bool) -> None:
    writes = {"pool_mib": 16, "writes": 4, "scattered": scattered}
    case = {**writes, "synchronize": synchronize, "slice_held": False}
    in_place = figures_of(Job("pool writes", case, GIB))
    assert (in_place["copied_by_address"], in_place["copied_by_peak_memory"]) == (0, 0)
    copied = figures_of(Job("pool writes", {**case, "slice_held": True}, GIB))
    assert (copied["copied_by_address"], copied["copied_by_peak_memory"]) == (4, 4)


def test_memory_follows_an_array() -> None:
    figures = figures_of(Job("memory", {"array_mib": 64}, 8 * GIB))
    with_array, cleared = figures["with_array"], figures["cache_cleared"]
    assert with_array["active_bytes"] - cleared["active_bytes"] >= 64 << 20
    assert with_array["footprint_bytes"] > figures["before"]["footprint_bytes"]
    assert figures["memory_limit_bytes"] <= figures["total_host_bytes"]


def test_attention_of_a_layer_is_timed_in_each_way() -> None:
    ways = figures_of_ways(Job("attention", {"rows": 2, "context": 64, "dtype": "float32"}, GIB))
    assert list(ways) == ["contiguous", "views", "gather_by_row", "gather"]
    assert all(its.keys() >= TIMES for its in ways.values())


def test_a_case_that_needs_too_much_memory_is_skipped() -> None:
    job = Job("attention", {"rows": 16, "context": 32768, "dtype": "bfloat16"}, GIB)
    with pytest.raises(Skipped, match="needs about"):
        figures_of(job)


@pytest.mark.parametrize("measurement", ["kernel", "attention by kernel"])
def test_without_metal_its_cases_are_skipped(measurement: str) -> None:
    with pytest.raises(Skipped, match="without Metal"):
        figures_of(Job(measurement, {}, GIB))


def test_a_real_case_runs_in_its_own_process() -> None:
    outcome = run_case(Job("device", {}, GIB), COMMAND)
    assert outcome.error is None
    assert outcome.figures["sum"] == 499500
    assert outcome.figures["metal"] is False


def test_a_step_is_timed_beside_mlx_lm(llama: str) -> None:
    for rows in (1, 2):
        ways = figures_of_ways(Job("step", {"rows": rows, "context": 64, "kernel": True}, GIB, model=llama))
        assert list(ways) == ["mlx-lm", "mlx-lm, a step ahead", "views", "gathers", "dense gather"]
        assert [its["pool_copies"] for its in list(ways.values())[2:]] == [0, 0, 0]


def test_a_packed_suffix_has_the_logits_of_two_calls(llama: str) -> None:
    ways = figures_of_ways(Job("suffix", {"decodes": 2, "context": 64, "kernel": False}, GIB, model=llama))
    assert list(ways) == ["views", "gathers", "dense gather"]
    for its in ways.values():
        assert its["difference"] < 1e-3
        assert its["packed"].keys() >= TIMES


def test_a_prompt_and_rows_are_timed(llama: str) -> None:
    ways = figures_of_ways(Job("prefill", {"tokens": 64, "chunk": 32}, GIB, model=llama))
    assert list(ways) == ["mlx-lm", "views", "gathers", "dense gather"]
    assert all(its["tokens_per_s"] > 0 for its in ways.values())
    figures = figures_of(Job("rows", {"blocks": 2}, GIB, model=llama))
    assert (
        figures["0 FullAttention"]["row_bytes"] == 32 * 2 * 2 * 64 * 4
    )  # positions, layers, K and V, float32
    assert figures["0 FullAttention"]["place"].keys() >= TIMES
    assert figures["pool_copies"] == 0


def test_a_load_tells_the_mode_and_no_path(llama: str) -> None:
    figures = figures_of(Job("load", {}, GIB, model=llama))
    assert figures["execution_mode"] == "batched"
    assert figures["counters"]["attentions_on_pools"] > 0
    assert figures["quantization"] == {"group_size": 64, "bits": 4}
    assert str(Path(llama).parent) not in json.dumps(figures)


def test_models_with_windows_and_states_are_measured(tmp_path: Path) -> None:
    window = str(mlx_models.save(tmp_path / "window", "gemma3_text"))
    figures_of_ways(Job("step", {"rows": 2, "context": 64, "kernel": False}, GIB, model=window))
    state = str(mlx_models.save(tmp_path / "state", "qwen3_next"))
    figures_of_ways(Job("step", {"rows": 2, "context": 64, "kernel": False}, GIB, model=state))
    assert any("RecurrentState" in name for name in figures_of(Job("rows", {"blocks": 2}, GIB, model=state)))
    with pytest.raises(Skipped, match="recurrent states"):
        figures_of(Job("suffix", {"decodes": 0, "context": 64, "kernel": False}, GIB, model=state))


# ------------------------------------------------------------------------------------------ on emulated Metal


@needs_compiler
@pytest.mark.usefixtures("on_metal")
def test_the_kernel_is_compared_with_plain_sums() -> None:
    case = dict(next(case for name, case in all_cases(SMALL) if name == "kernel"))
    figures = figures_of(
        Job("kernel", {**case, "q_heads": 4, "kv_heads": 2, "key_dim": 32, "value_dim": 32}, GIB)
    )
    assert figures["agrees"] is True
    assert len(figures["errors"]) == 8


@needs_compiler
@pytest.mark.usefixtures("on_metal")
def test_attention_by_the_kernel_is_timed_for_each_number_of_splits() -> None:
    case = {"rows": 1, "context": 64, "dtype": "float32", "splits": [1, 2]}
    ways = figures_of_ways(Job("attention by kernel", case, 16 << 20))
    assert list(ways) == ["chosen", "1 splits", "2 splits"]


@needs_compiler
@pytest.mark.usefixtures("on_metal")
def test_a_step_and_a_suffix_by_the_kernel(tmp_path: Path) -> None:
    model = str(mlx_models.save(tmp_path / "model", "llama"))
    ways = figures_of_ways(Job("step", {"rows": 2, "context": 64, "kernel": True}, GIB, model=model))
    assert ways["kernel"]["by_kernel"] > 0
    ways = figures_of_ways(Job("suffix", {"decodes": 1, "context": 64, "kernel": True}, GIB, model=model))
    assert ways["kernel"]["difference"] < 1e-3


def test_splits_are_as_many_as_asked() -> None:
    rows = StepRows(np.arange(8, dtype=np.int32)[None], *np.array([[0], [0], [256]], np.int32), block_size=32)
    heads = AttentionHeads(8, 2, 64, 64)
    assert [rows.launch(heads, FixedSplits(number=number)).splits for number in (1, 4, 64)] == [1, 4, 64]


# ------------------------------------------------------------------------------------------ the plan


def test_each_case_of_the_plan_has_a_measurement() -> None:
    for sizes in (SMALL, FULL):
        cases = all_cases(sizes)
        assert {name for name, _ in cases} | {"device"} == MEASUREMENTS.keys()
        assert len(cases) < 200
