"""E5: the whole test suite three times beside 8 busy processes, after one run alone. No test may fail in any of them.

The busy processes compute in Python, two of them walk through memory. They end with this script, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, argument_parser, at_least, conclude, exactly
from neighbours import Neighbours

WALKED_BYTES = 256 * 2**20
WALKERS = 2
ENDS_WITHIN_S = 30.0  # a pytest that is interrupted, with the servers that its tests have started

# Ends as well when it has another parent: when this script was killed.
COMPUTES = """
import os, sys
parent, total = int(sys.argv[1]), 0
while os.getppid() == parent:
    for i in range(200_000):
        total += i * i
"""
WALKS = """
import os, sys
parent, memory = int(sys.argv[1]), bytearray(int(sys.argv[2]))
begin = 0
while os.getppid() == parent:
    for at in range(begin, min(begin + 2**20, len(memory)), 64):
        memory[at] = (memory[at] + 1) & 255
    begin = (begin + 2**20) % len(memory)
"""


@dataclass(frozen=True, slots=True)
class Run:
    minutes: float
    tests: int
    failures: int  # and errors; a run that ends without a report is one
    others_share: float | None  # of the processor time, the busy processes included


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--busy", type=int, default=8, help="busy processes")
    parser.add_argument("--paths", nargs="*", default=[], help="tests to run instead of all")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: through every `finally`

    quiet = run_suite(args.paths)
    print(f"alone: {told(quiet)}", flush=True)
    runs: list[Run] = []
    with busy_processes(args.busy) as processes:
        for number in range(1, args.runs + 1):
            runs.append(run_suite(args.paths))
            print(f"beside {args.busy} busy processes, run {number}: {told(runs[-1])}", flush=True)
        still_busy = sum(process.poll() is None for process in processes)
    conclude(
        "E5",
        {
            "tests": quiet.tests,
            "tests_beside": min((run.tests for run in runs), default=0),
            "minutes_alone": quiet.minutes,
            "minutes_beside": [run.minutes for run in runs],
            "others_share_alone": quiet.others_share,
            "others_share_beside": [run.others_share for run in runs],
            "failures_alone": quiet.failures,
            "failures_beside": sum(run.failures for run in runs),
            "runs": len(runs),
            "still_busy": still_busy,
            "restricted_to": args.paths,
        },
        {
            "tests": at_least(1),
            "tests_beside": exactly(quiet.tests),
            "failures_alone": exactly(0),
            "failures_beside": exactly(0),
            "runs": at_least(3),
            "still_busy": at_least(8),
            "restricted_to": exactly([]),
        },
    )


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts busy processes, and ends them with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            program = WALKS if number < WALKERS else COMPUTES
            command = [sys.executable, "-c", program, str(os.getpid()), str(WALKED_BYTES)]
            started.append(subprocess.Popen(command))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def run_suite(paths: Sequence[str]) -> Run:
    """Runs `make test` in a process group of its own, in this session: the scheduler shares processors by session."""
    neighbours, began = Neighbours(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        process = subprocess.Popen(
            ["make", "test", f"ARGS=--junit-xml={report} {' '.join(paths)}"], cwd=ROOT, process_group=0
        )
        try:
            status = process.wait()
        except BaseException:
            _interrupt(process)
            raise
        minutes = round((time.monotonic() - began) / 60, 2)
        tests, failures = counts_of(report)
    return Run(minutes, tests, max(failures, int(status != 0)), neighbours.share())


def counts_of(report: Path) -> tuple[int, int]:
    """Counts tests, and those that failed or could not be set up, whose names it prints."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return 0, 1
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    for case in bad:
        print(f"failed: {case.get('classname')}::{case.get('name')}", flush=True)
    return len(cases), len(bad)


def told(run: Run) -> str:
    others = "" if run.others_share is None else f", others had {run.others_share:.0%} of the processors"
    return f"{run.tests} tests, {run.failures} failures, {run.minutes:.1f} minutes{others}"


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the tests, so that they end the processes that they have started."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
