"""Cases of a measurement, each in a process of its own: a crash, a hang or a lack of memory ends one case only.

A case is sent to the process as JSON. The process appends its findings to a file, line by line, so that the figures
before a crash are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rootstock.runtime.host_memory import footprint_bytes
from rootstock.units import in_units

Figures = dict[str, Any]

_WATCH_S = 0.05  # between two looks at the process's memory
_END_S = 10.0  # for a killed process to end: one that waits for a device may not end at once
_MOST_BYTES = 1 << 20  # of a process's output
_FRAMES = 6  # of a traceback


@dataclass(frozen=True, slots=True)
class Job:
    """One case of a measurement."""

    measurement: str
    case: Mapping[str, Any]
    memory_bytes: int  # that the process may take
    seconds: float = 120.0  # that it may run
    model: str | None = None  # directory of the model


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a case. A case that failed may have figures from before its failure."""

    figures: Figures
    seconds: float
    error: str | None = None
    skipped: str | None = None
    timed_out: bool = False


class Skipped(Exception):
    """Refusal of a case, with its reason."""


Measure = Callable[[Job], Iterator[Figures]]
"""Measures a case and yields its figures as they are found. Raises Skipped."""


# ---- the parent


def run_case(job: Job, command: Sequence[str]) -> Outcome:
    """Runs a case by a command whose process calls `serve_case`. Raises nothing that the process causes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rootstock-") as folder:
        results, errors = Path(folder, "results"), Path(folder, "errors")
        ended = _run(command, {**asdict(job), "results": str(results)}, errors, job.seconds)
        seconds = time.monotonic() - began
        lines = _lines(results)
        printed = _read(errors)
    figures: Figures = {}
    last: dict[str, Any] = {}
    for line in lines:
        figures.update(line.get("figures", {}))
        last = line
    if ended is None:
        error = f"it took longer than {job.seconds:g} s, and was ended"
        return Outcome(figures, seconds, error, timed_out=True)
    if last.get("done"):
        return Outcome(figures, seconds)
    if "skipped" in last:
        return Outcome(figures, seconds, skipped=str(last["skipped"]))
    if "error" in last:
        return Outcome(figures, seconds, error=str(last["error"]))
    how = f"by signal {_signal_name(-ended)}" if ended < 0 else f"with status {ended}"
    return Outcome(figures, seconds, error=f"the process ended {how}\n{printed}".strip())


def _run(command: Sequence[str], request: Mapping[str, Any], errors: Path, seconds: float) -> int | None:
    """Runs a process. Returns its status; None: it was ended after `seconds`."""
    with errors.open("wb") as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            process.communicate(json.dumps(request).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
    return process.returncode


def _read(path: Path) -> str:
    """Returns a file's text: its beginning, if it is long."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in _read(path).splitlines():
        with contextlib.suppress(ValueError):  # a crash may have cut the last one
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


# ---- the process of a case


def serve_case(measurements: Mapping[str, Measure]) -> None:
    """Measures the case that stands in standard input, and ends the process."""
    request = json.load(sys.stdin)
    results = os.open(request.pop("results"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    job = Job(**request)

    def write(line: Mapping[str, Any]) -> None:
        os.write(results, json.dumps(line).encode() + b"\n")

    threading.Thread(target=_watch, args=(job.memory_bytes, os.getppid(), write), daemon=True).start()
    try:
        for figures in measurements[job.measurement](job):
            write({"figures": figures})
    except Skipped as refusal:
        write({"skipped": str(refusal)})
    except BaseException as error:
        write({"error": error_text(error)})
    else:
        write({"done": True})
    # Libraries may crash or hang when they are unloaded, and the case is over.
    os._exit(0)


def _watch(memory_bytes: int, parent: int, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Ends the process when it takes too much memory, or when nobody waits for it any more."""
    while os.getppid() == parent:
        footprint = footprint_bytes()
        if footprint is not None and footprint > memory_bytes:
            limit = in_units(memory_bytes)
            write({"error": f"it took {in_units(footprint)} of memory, more than its limit of {limit}"})
            break
        time.sleep(_WATCH_S)
    os._exit(1)


def error_text(error: BaseException) -> str:
    """Returns the message of an exception and where it was raised."""
    lines = traceback.format_exception_only(error)
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return "".join([*lines, *(f"  at {f.filename}:{f.lineno} in {f.name}\n" for f in frames)]).strip()
