"""Fixtures that run the command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from cli.running import Process, Ran, Run, serve_oracle
from rootstock.cli import main


@pytest.fixture
def rootstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process, without options from the environment."""
    root = logging.getLogger()
    handlers = list(root.handlers)

    def run(*arguments: object) -> Ran:
        monkeypatch.delenv("FORCE_COLOR", raising=False)  # no bars of progress
        monkeypatch.setattr(sys, "argv", ["rootstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        captured = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        assert "Traceback" not in captured.err
        return Ran(status, captured.out, captured.err)

    for name in os.environ:
        if name.startswith("ROOTSTOCK_"):
            monkeypatch.delenv(name)
    yield run
    root.handlers[:] = handlers  # those of the command write to this test's standard error


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts a server in a process of its own, which the end of the test ends."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(serve_oracle(*arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
