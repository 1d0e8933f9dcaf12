"""The runtime against transformers' logits and against the exported graph, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openvino_schedules import Schedules, reference_difference

FAMILIES = {
    "llama": ("full",),
    "mistral": ("window(40)",),
    "gpt_oss": ("full", "window(40)"),
    "lfm2": ("full", "state"),
    "granitemoehybrid": ("full", "state"),
    "qwen3_next": ("full", "state"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def schedules(request: pytest.FixtureRequest, exported: Callable[[str], Path]) -> Schedules:
    return Schedules(exported(request.param))


def test_families_come_from_the_graph(schedules: Schedules) -> None:
    names = tuple(family.name for family in schedules.runtime.description.families)
    assert names == FAMILIES[schedules.folder.name]


def test_logits_are_those_of_transformers(schedules: Schedules) -> None:
    assert reference_difference(schedules) < 1e-3


def test_random_schedules_compute_what_the_exported_graph_computes_in_one_pass(schedules: Schedules) -> None:
    """Chunks, batches, forks, copies and rows from the host, in blocks that others have used before."""
    for seed in range(6):
        schedules.run(seed)
    assert schedules.largest < 1e-3
    assert schedules.rows > 500
    assert {"step", "fork", "restore"} <= schedules.operations.keys()


def test_a_forward_does_not_depend_on_its_company(schedules: Schedules) -> None:
    """Bit by bit in a batch. A chunk of one row has another product than a longer one."""
    alone, batched, chunked = schedules.three_ways()
    assert np.array_equal(alone, batched)
    assert np.abs(alone - chunked).max() < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "mistral", "lfm2"])
def test_schedules_with_k_and_v_in_8_bits_stay_near_the_exact_ones(
    exported: Callable[[str], Path], architecture: str
) -> None:
    """Of models without experts, which a rounding may exchange."""
    schedules = Schedules(exported(architecture), "int8")
    for seed in range(4):
        schedules.run(seed)
    assert schedules.rows > 200
    assert 1e-4 < schedules.largest < 0.1
    alone, batched, _ = schedules.three_ways()
    assert np.array_equal(alone, batched)
