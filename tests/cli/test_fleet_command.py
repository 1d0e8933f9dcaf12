"""`rootstock fleet` on the command line: wrong options are refused before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from cli.running import Run


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--replicas", "0"), "--replicas"),
        (("--replicas", "8-2"), "--replicas"),
        (("--replicas", "65"), "--replicas"),
        (("--kv-events", "tcp://*:5557"), "--kv-events"),
        (("--port", "0"), "--port"),
        (("--max-batch", "0"), "--max-batch"),
    ],
)
def test_wrong_options_are_refused(rootstock: Run, arguments: tuple[str, ...], named: str) -> None:
    done = rootstock("fleet", "nowhere", *arguments)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert named in line


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_fleet_without_ray_names_the_extra(rootstock: Run) -> None:
    done = rootstock("fleet", "nowhere")
    assert (done.status, done.out) == (2, "")
    assert "rootstock[fleet]" in done.err


def test_the_help_shows_the_fleets_own_options(rootstock: Run) -> None:
    shown = rootstock("fleet", "--help").out
    assert "--replicas" in shown
    assert "--max-batch" not in shown
