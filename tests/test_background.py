"""Work in the background: its result, its error, and where it runs."""

from __future__ import annotations

import threading

import pytest

from rootstock.background import in_background
from rootstock.cli.starting import importing_server


def test_work_runs_beside_its_caller_until_the_result_is_asked_for() -> None:
    began, may_end = threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        assert may_end.wait(60)
        return threading.current_thread().name

    future = in_background(work, "test")
    assert began.wait(60)
    may_end.set()
    assert future.result() == "rootstock-test"


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    future = in_background(lambda: {}["absent"], "test")
    with pytest.raises(KeyError, match="absent"):
        future.result()


def test_the_servers_modules_are_imported_once_when_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr("rootstock.cli.starting.in_background", lambda work, name: begun.append(name))
    seen: list[tuple[str, float]] = []
    report = importing_server(lambda stage, done: seen.append((stage, done)))
    stages = [("download", 1.0), ("load", 0.0), ("load", 1.0), ("pack", 0.0)]
    for number, (stage, done) in enumerate(stages):
        report(stage, done)
        assert begun == (["imports"] if number else [])
    assert seen == stages
