"""The report of a Mac (`make mac-report`): rows of cases that succeed, fail, crash or hang; texts without names."""

from __future__ import annotations

import getpass
import io
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_report
import pytest
from isolated import Job, Outcome, run_case
from mlx_report import FULL, SMALL, ReportConfig, Sizes, published, run_mlx_report
from rich.console import Console
from scrub import scrubber

from rootstock.errors import InvalidOption, StartupError

GIB = 1 << 30
MAC = str(mlx_report.HERE)
QUICK = replace(SMALL, rows=(1,), decodes=(0,), kernel_shapes=1)
# Measurements without MLX, most of which succeed.
SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, MAC)
from isolated import Skipped, serve_case

def good(job):
    yield {"first": 1.23456789, "case": dict(job.case)}
    yield {"second": float("nan")}

def device(job):
    yield {"metal": False}

def skipped(job):
    raise Skipped("it is of no use here")
    yield

def raising(job):
    yield {"before": 1}
    raise RuntimeError("cannot compile " + str(Path.home() / "secret" / "kernel.metal"))

def crashing(job):
    yield {"before": 1}
    print("the last words", file=sys.stderr, flush=True)
    os.abort()

def hanging(job):
    yield {"before": 1}
    time.sleep(3600)

def ending(job):
    sys.exit("gone")
    yield

def large(job):
    kept = b"x" * (400 << 20)
    yield {"kept": len(kept)}
    time.sleep(3600)

def load(job):
    yield {"counters": {"attentions_by_kernel": 0}}

NAMES = ("memory", "kernel", "pool writes", "model", "step", "suffix", "prefill", "rows", "attention")
serve_case({**dict.fromkeys(NAMES, good), "device": device, "load": load, **CHANGES})
"""


def command(tmp_path: Path, **changes: str) -> list[str]:
    """Returns a command for cases. `changes`: functions of SCRIPT by measurement."""
    script = tmp_path / "measurements.py"
    of_names = ", ".join(f"{name.replace('_', ' ')!r}: {function}" for name, function in changes.items())
    script.write_text(SCRIPT.replace("CHANGES", f"{{{of_names}}}").replace("MAC", repr(MAC)))
    return [sys.executable, str(script)]


def run(tmp_path: Path, sizes: Sizes = QUICK, **changes: str) -> tuple[int, list[dict[str, Any]], str]:
    """Returns the exit status, the rows and the output of a report."""
    printed, out = io.StringIO(), tmp_path / "report.jsonl"
    config = ReportConfig(out, None, sizes, command(tmp_path, **changes), memory_bytes=2 * GIB)
    status = run_mlx_report(config, Console(file=printed, width=120))
    return status, [json.loads(line) for line in out.read_text().splitlines()], printed.getvalue()


def of(rows: list[dict[str, Any]], measurement: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["measurement"] == measurement]


# ------------------------------------------------------------------------------------------ rows


def test_each_case_is_a_row_of_bounded_fields(tmp_path: Path) -> None:
    status, rows, printed = run(tmp_path)
    assert status == 0
    assert rows[0]["measurement"] == "machine"
    assert {"chip", "memory_gib", "system_version", "python", "rootstock", "packages"} <= rows[0][
        "figures"
    ].keys()
    for row in rows:
        assert row["schema"] == mlx_report.SCHEMA
        assert row.keys() - {"schema", "measurement", "case", "seconds"} <= {"figures", "error", "skipped"}
        assert isinstance(row["seconds"], float)
    (step,) = of(rows, "step")
    assert step["figures"] == {"first": 1.2346, "second": "nan", "case": step["case"]}
    assert of(rows, "attention by kernel")[0]["skipped"].startswith("the kernel does not work")
    assert len(printed.splitlines()) >= len(rows)
    assert str(tmp_path / "report.jsonl") in printed.replace("\n", "")


def test_a_case_that_fails_is_a_row_and_the_report_goes_on(tmp_path: Path) -> None:
    changes = {"memory": "raising", "pool_writes": "crashing", "suffix": "ending", "prefill": "skipped"}
    status, rows, printed = run(tmp_path, **changes)
    assert status == 0
    (memory,) = of(rows, "memory")
    assert memory["figures"] == {"before": 1}
    assert memory["error"].startswith("RuntimeError: cannot compile <path>")
    for crashed in of(rows, "pool writes"):
        assert crashed["figures"] == {"before": 1}
        assert crashed["error"].startswith("the process ended by signal SIGABRT")
        assert "the last words" in crashed["error"]
    assert of(rows, "suffix")[0]["error"].startswith("SystemExit: gone")
    assert of(rows, "prefill")[0]["skipped"] == "it is of no use here"
    assert of(rows, "attention")[0]["figures"]["first"] == 1.2346
    assert "7 with an error" in printed


def test_a_case_that_hangs_is_ended(tmp_path: Path) -> None:
    outcome = run_case(Job("rows", {}, GIB, seconds=1), command(tmp_path, rows="hanging"))
    assert outcome.timed_out
    assert outcome.error == "it took longer than 1 s, and was ended"


def test_after_two_cases_that_hang_the_rest_of_their_measurement_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(job: Job, command: object) -> Outcome:
        if job.measurement == "pool writes":
            return Outcome({}, 1.0, error="it took longer", timed_out=True)
        return Outcome({"metal": True}, 1.0)

    monkeypatch.setattr(mlx_report, "run_case", hanging)
    _, rows, _ = run(tmp_path)
    skipped = "earlier cases of this measurement took too long"
    assert [row.get("skipped") for row in of(rows, "pool writes")] == [None, None, *[skipped] * 3]


def test_a_case_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    job = Job("rows", {}, memory_bytes=256 << 20)
    outcome = run_case(job, command(tmp_path, rows="large"))
    assert outcome.error is not None
    assert outcome.error.endswith("more than its limit of 256.0 MiB")


def test_nothing_of_a_case_that_is_ended_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = [
        sys.executable,
        "-c",
        f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(3600)",
    ]
    seconds = 0.1
    while not told.exists() or not told.read_text():  # on a busy machine it may not have begun
        seconds *= 2
        assert run_case(Job("rows", {}, GIB, seconds), script).timed_out
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_a_report_without_a_model_has_the_cases_of_one_layer(tmp_path: Path) -> None:
    status, rows, _ = run(tmp_path, model="crashing")
    assert status == 1
    assert "error" in of(rows, "model")[0]
    assert not of(rows, "step")
    assert of(rows, "attention")


def test_mlx_that_does_not_start_ends_the_report(tmp_path: Path) -> None:
    status, rows, printed = run(tmp_path, device="crashing")
    assert status == 1
    assert [row["measurement"] for row in rows] == ["machine", "device"]
    assert "MLX does not start" in printed


def test_the_full_report_needs_metal(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--small"):
        run(tmp_path, FULL)
    assert not (tmp_path / "report.jsonl").exists()


def test_cases_after_the_time_of_the_report_are_skipped(tmp_path: Path) -> None:
    status, rows, _ = run(tmp_path, replace(QUICK, seconds=0))
    assert status == 1
    assert [row["measurement"] for row in rows[:3]] == ["machine", "device", "memory"]
    assert all(row["skipped"] == "the time of the report was over" for row in rows[2:])


def test_rows_are_kept_when_the_user_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(job: Job, command: object) -> Outcome:
        if job.measurement == "kernel":
            raise KeyboardInterrupt
        return Outcome({"metal": False}, 0.0)

    monkeypatch.setattr(mlx_report, "run_case", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [row["measurement"] for row in rows] == ["machine", "device", "memory"]


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("name", "told"), [("report.jsonl", "a new file"), ("no/report.jsonl", "a file to write")]
)
def test_only_a_new_file_is_written(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "report.jsonl").write_text("mine")
    with pytest.raises(InvalidOption, match=told):
        run_mlx_report(ReportConfig(tmp_path / name, None, QUICK, command(tmp_path)))
    assert (tmp_path / "report.jsonl").read_text() == "mine"


def test_without_mlx_the_error_tells_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_report, "is_installed", lambda runtime: False)
    with pytest.raises(StartupError, match="make setup"):
        run_mlx_report(ReportConfig(tmp_path / "report.jsonl"))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ texts


def test_texts_have_no_paths_and_no_names() -> None:
    home, user, host = str(Path.home()), getpass.getuser(), socket.gethostname()
    scrub = scrubber(["/Volumes/My Disk/secret model", "secret-model"])
    told = scrub(
        f"{home}/a b\n{home} {user.upper()}@{host}: '/Volumes/My Disk/secret model/config.json' secret-model\n"
        f'  File "{home}/venv/lib/python3.12/site-packages/mlx_lm/utils.py", line 3\n'
        f"  at {home}/src/rootstock/units.py:12 in run\n  at {home}/bench/mac/isolated.py:9 in run\n"
        f"/Volumes/My Disk/secret model is private ~/x/y"
    )
    for private in (home, "secret", "Disk", "venv", "/src/", "~/x"):
        assert private not in told
    words = told.replace(":", " ").replace("@", " ").split()
    assert user.upper() not in words
    assert host not in words
    assert (
        '"lib/python3.12/site-packages/mlx_lm/utils.py", line 3' in told
        or '"site-packages/mlx_lm/utils.py", line 3' in told
    )
    assert "at rootstock/units.py:12 in run" in told
    assert "at bench/mac/isolated.py:9 in run" in told


@pytest.mark.parametrize(
    "text",
    [
        "program_source:12:5: error: use of undeclared identifier 'simd_sum'",
        "mlx/backend/metal/device.cpp:42 32/8 heads",
        "see https://github.com/ml-explore/mlx/issues/1 and 3 / 4",
        "[metal::Device] Unable to build metal library from source",
    ],
)
def test_texts_without_personal_data_stay(text: str) -> None:
    assert scrubber()(text) == text


def test_values_of_a_row_are_bounded() -> None:
    found = published(
        {"text": "x" * 10_000, "list": list(range(1000)), "figures": [float("inf"), 1 / 3]}, str
    )
    assert len(found["text"]) < 4100
    assert len(found["list"]) == 64
    assert found["figures"] == ["inf", 0.33333]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_signal_is_named(tmp_path: Path) -> None:
    outcome = run_case(
        Job("rows", {}, GIB), [sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL})"]
    )
    assert outcome.error == "the process ended by signal SIGKILL"
