"""Stages: all threads end one before any begins the next, and every run begins anew."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rootstock.kernels.cpu.compiler import c_function, fetch_add, nb, pointer_to
from rootstock.kernels.cpu.stages import Stages, can_run_stages

pytestmark = pytest.mark.skipif(not can_run_stages(), reason="torch's threads are not libgomp's")

JOB = np.dtype([("claimed", "i8"), ("count", "i8"), ("given", "i8"), ("out", "i8")])


def _add_neighbours(jobs: Any) -> None:
    """Claims numbers one by one: out[i] = given[i - 1] + given[i] + given[i + 1], around the end."""
    job = nb.carray(jobs, (1,))[0]
    claimed = nb.carray(pointer_to(job.claimed), (1,), np.int64)
    given = nb.carray(pointer_to(job.given), (job.count,), np.int64)
    out = nb.carray(pointer_to(job.out), (job.count,), np.int64)
    while True:
        i = fetch_add(claimed, 0, 1)
        if i >= job.count:
            return
        out[i] = given[i - 1] + given[i] + given[(i + 1) % job.count]


@cache
def add_neighbours() -> int:
    return c_function(_add_neighbours, JOB)


def recorded(given: np.ndarray[Any, Any], out: np.ndarray[Any, Any], count: int) -> Stages:
    stages = Stages()
    job = np.zeros(1, JOB)
    for stage in range(count):
        source, to = (given, out) if stage % 2 == 0 else (out, given)
        job["count"], job["given"], job["out"] = len(given), source.ctypes.data, to.ctypes.data
        stages.add(add_neighbours(), job, "claimed", 1)
    stages.close()
    return stages


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_each_stage_sees_all_of_the_stage_before(
    threads: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    begin = np.random.default_rng(0).integers(0, 9, 50)
    given, out = begin.copy(), np.zeros_like(begin)
    stages = recorded(given, out, count)
    expected = begin
    for _ in range(count):
        expected = np.roll(expected, 1) + expected + np.roll(expected, -1)
    for _ in range(200):
        given[:] = begin
        stages.run()
        np.testing.assert_array_equal((given, out)[count % 2], expected)


def test_addresses_are_changed_between_runs() -> None:
    first, second, out = np.arange(8), np.arange(8) * 10, np.zeros(8, np.int64)
    stages = Stages()
    job = np.zeros(1, JOB)
    job["count"], job["given"], job["out"] = 8, first.ctypes.data, out.ctypes.data
    stages.add(add_neighbours(), job, "claimed", 1)
    job["given"] = 0  # the recorded copy does not change
    (numbers,) = stages.close()
    stages.run()
    once = out.copy()
    numbers[list(numbers).index(first.ctypes.data)] = second.ctypes.data
    stages.run()
    np.testing.assert_array_equal(out, 10 * once)
