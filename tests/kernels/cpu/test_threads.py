"""Threads of compiled functions: how they wait for work, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rootstock.kernels.cpu import threads
from rootstock.kernels.cpu.threads import end_team
from rootstock.openmp import SPINS, wait_briefly
from waiting import HANG_S, join, wait_until


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def compute(threads: int) -> torch.Tensor:
    torch.set_num_threads(threads)
    return torch.ones(2000, 2000).exp().sum()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_a_team_that_ended_leaves_no_threads_and_starts_again() -> None:
    if threads._torch_openmp() is None:
        pytest.skip("torch computes with another runtime than libgomp")
    before, team, results = torch.get_num_threads(), set[str](), []

    def scenario() -> None:  # on a thread that has no team yet
        others = threads_of_this_process()
        results.append(compute(3))
        team.update(threads_of_this_process() - others)
        end_team()
        # The system lists a thread for a moment after its end.
        wait_until(lambda: len(team & threads_of_this_process()) == len(team) - 2)
        results.append(compute(3))
        end_team()

    thread = threading.Thread(target=scenario)
    thread.start()
    join(thread)
    torch.set_num_threads(before)
    assert len(team) >= 2
    assert results[0] == results[1]


def test_without_libgomp_there_is_no_team_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_torch_openmp", lambda: None)
    end_team()


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environments_setting_of_waiting_is_kept(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "7")
    before = dict(os.environ)
    wait_briefly()
    assert dict(os.environ) == before


def test_threads_wait_briefly_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)


def test_the_command_line_sets_the_waiting_time_before_torch_is_loaded() -> None:
    code = "import sys, rootstock.cli.main, rootstock.server.http.listen; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S).returncode == 0
