"""Stages in processes of their own: a stage that raises, crashes, hangs or exhausts memory ends alone.

A stage's process appends one JSON line per finished row to a file, so that rows survive a stage that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
Status = Literal["passed", "failed", "timed out", "skipped"]

_REASON_CHARS = 4000  # of a stage's error output, from its end


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: str
    status: Status
    reason: str  # why it did not pass; "" if it did
    wall_s: float
    limit_s: float
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def skipped(stage: str, reason: str) -> Outcome:
    return Outcome(stage, "skipped", reason, 0.0, 0.0, ())


def run_stage(stage: str, command: Sequence[str], rows: Path, limit_s: float) -> Outcome:
    """Runs the command for at most `limit_s` and reads the rows that it wrote. Ends every process that it started.

    A stage passes if its exit status is 0 and no row has a false "ok".
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True, text=True
        )
        try:
            exit_status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_status = None
        finally:
            _end_group(process)
        errors.seek(0)
        said = errors.read()[-_REASON_CHARS:].strip()
    wall_s = round(time.monotonic() - began, 2)
    found = tuple(read_rows(rows))
    if exit_status is None:
        reason = f"stopped after {limit_s:.0f} s\n{said}".strip()
        return Outcome(stage, "timed out", reason, wall_s, limit_s, found)
    if exit_status != 0:
        reason = f"exit status {exit_status}\n{said}".strip()
        return Outcome(stage, "failed", reason, wall_s, limit_s, found)
    wrong = [row for row in found if row.get("ok") is False]
    if wrong:
        reason = "\n".join(json.dumps(row) for row in wrong[:8])
        return Outcome(stage, "failed", f"{len(wrong)} rows are not ok\n{reason}", wall_s, limit_s, found)
    return Outcome(stage, "passed", "", wall_s, limit_s, found)


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Appends each row as soon as it is made."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print("  " + "  ".join(f"{name}={_shown(value)}" for name, value in row.items()), flush=True)


def read_rows(path: Path) -> list[Row]:
    """Reads all whole lines: a process that was stopped may leave half a line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ends the stage and the processes that it started, which are one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
