"""The checks of bench/gpu without a device: their options, the isolation of stages, and their report."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import run_all
from isolation import Outcome, read_rows, run_stage, write_rows
from report import Results, as_markdown
from run_all import NAMES, STAGES, Options, Stage, parse_options

GPU = Path(run_all.__file__).parent
LONG_S = 600.0  # never reached


def python(code: str, rows: Path) -> list[str]:
    lines = f"import sys; sys.path.insert(0, {str(GPU)!r})\nfrom isolation import write_rows\n"
    lines += f"from pathlib import Path\nrows = Path({str(rows)!r})\n"
    return [sys.executable, "-c", lines + code]


def test_options_name_stages_and_where_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert parse_options([]) == Options(False, NAMES, run_all.BUDGET_S, GPU)
    monkeypatch.setenv("OUT", str(tmp_path))
    given = parse_options(["--only", "server, tiers", "--budget", "30"])
    assert given == Options(False, ("server", "tiers"), 30.0, tmp_path)
    assert parse_options(["--interpret"]).interpret
    for wrong in (["--only", "nothing"], ["--only", ""], ["--budget", "0"]):
        with pytest.raises(SystemExit):
            parse_options(wrong)


def test_all_stages_fit_ten_minutes_and_exist() -> None:
    assert run_all.BUDGET_S <= 600
    for stage in STAGES:
        assert f"def {stage.name}(bench: Bench)" in (GPU / f"{stage.module}.py").read_text()


def test_a_stage_that_ends_well_has_passed_unless_a_row_is_wrong(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    right = run_stage("right", python("write_rows([{'a': 1, 'ok': True}], rows)", rows), rows, LONG_S)
    assert (right.status, right.reason, right.rows) == ("passed", "", ({"a": 1, "ok": True},))
    wrong = run_stage("wrong", python("write_rows([{'a': 2, 'ok': False}], rows)", rows), rows, LONG_S)
    assert wrong.status == "failed"
    assert '{"a": 2, "ok": false}' in wrong.reason


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise ValueError('no such kernel')", "ValueError: no such kernel"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
    ],
)
def test_a_stage_that_raises_or_crashes_keeps_its_rows(tmp_path: Path, end: str, reason: str) -> None:
    rows = tmp_path / "rows"
    outcome = run_stage("stage", python(f"write_rows([{{'a': 1}}], rows)\n{end}", rows), rows, LONG_S)
    assert outcome.status == "failed"
    assert reason in outcome.reason
    assert outcome.rows == ({"a": 1},)


def test_a_stage_that_hangs_is_stopped_with_the_processes_that_it_started(tmp_path: Path) -> None:
    """The grandchild holds one end of a pipe, which reads as ended once that process is gone."""
    rows, pipe = tmp_path / "rows", tmp_path / "pipe"
    grandchild = f"import threading; held = open({str(pipe)!r}, 'w'); threading.Event().wait()"
    code = f"import subprocess\nsubprocess.run([sys.executable, '-c', {grandchild!r}])"
    os.mkfifo(pipe)
    ended = threading.Event()

    def read() -> None:
        with pipe.open() as file:
            file.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    outcome = run_stage("stage", python(code, rows), rows, 2.0)
    assert outcome.status == "timed out"
    if not ended.wait(1.0):  # the grandchild was ended before it opened the pipe
        os.close(os.open(pipe, os.O_RDWR))
    assert ended.wait(60.0)


def test_half_a_line_of_a_stopped_stage_is_left_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    write_rows([{"a": 1}], rows)
    with rows.open("a") as file:
        file.write('{"a": ')
    assert read_rows(rows) == [{"a": 1}]
    assert read_rows(tmp_path / "none") == []


def test_stages_go_on_after_a_failure_and_stop_when_the_budget_is_spent(tmp_path: Path) -> None:
    stages = [Stage(name, LONG_S, "module") for name in ("first", "second", "third")]
    times = iter([0.0, 0.0, 10.0, 95.0])
    commands = {"first": "raise ValueError", "second": "", "third": ""}
    made = run_all.outcomes(
        stages,
        lambda stage, rows: python(commands[stage.name], rows),
        tmp_path,
        Options(False, NAMES, 100.0, tmp_path),
        clock=lambda: next(times),
    )
    assert [(each.stage, each.status, each.limit_s) for each in made] == [
        ("first", "failed", 100.0),
        ("second", "passed", 90.0),
        ("third", "skipped", 0.0),
    ]


def test_without_a_device_stages_that_need_one_are_skipped(tmp_path: Path) -> None:
    stages = [Stage("graphs", LONG_S, "module", needs_device=True)]
    options = Options(True, NAMES, LONG_S, tmp_path)
    (outcome,) = run_all.outcomes(stages, lambda stage, rows: [], tmp_path, options)
    assert (outcome.status, outcome.reason) == ("skipped", "needs a CUDA device")


def test_the_report_has_figures_of_rows_and_reasons_of_failures(tmp_path: Path) -> None:
    decodes = (
        {"copy_tb_per_s": 4.3, "read_tb_per_s": 3.9},
        {"batch": 8, "context": 512, "triton_us": 12.34, "share_of_copy": 0.5, "triton_to_dense": 0.75},
        {"batch": 128, "context": 131072, "not_measured": "K and V exceed the device's memory"},
    )
    stages = [
        Outcome("environment", "passed", "", 3.0, 60.0, ({"device": "a device"},)),
        Outcome("decode_speed", "passed", "", 20.0, 90.0, decodes),
        Outcome("server", "timed out", "stopped after 200 s\nlast | line", 200.0, 200.0, ()),
    ]
    results = Results(False, {"torch": "2.11.0"}, "abc", stages)
    run_all.write_results(results, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [stage["status"] for stage in written["stages"]] == ["passed", "passed", "timed out"]
    assert written["stages"][1]["rows"][1]["triton_us"] == 12.34
    table = (tmp_path / "results.md").read_text()
    assert table == as_markdown(results)
    assert table.startswith("a device; commit abc; torch 2.11.0.")
    assert "4.30 TB/s" in table
    assert "| 8 | 512 | 12.3 | 0.50 | 0.75 |" in table
    assert "| server | timed out | 200.0 | 0 | 0 | stopped after 200 s |" in table
    assert "### server timed out\n\n```\nstopped after 200 s\nlast | line\n```" in table
