"""Runs the repository's own tests for a show, and random schedules with other seeds than theirs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from common import Bar, argument_parser, at_least, conclude, exactly

from docs.test_behaviours import numbers_held
from property.schedules import Outcome

ROOT = Path(__file__).parents[2]
STATE_MACHINE = "tests/property/test_cache_state_machine.py"


def run_tests(*arguments: str, environment: Mapping[str, str] | None = None) -> int:
    """Returns pytest's exit status."""
    known = {name: value for name, value in os.environ.items() if name != "ROOTSTOCK_SOAK"}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=known | dict(environment or {}), check=False).returncode


def show_schedules(
    show: str,
    description: str | None,
    run_schedule: Callable[[int], Outcome],
    behaviours: Collection[int],
    exercised: Collection[str],
    *,
    least: int,  # schedules
    default: int,
    first: int,
    tests: Collection[str] = (),
    only: str = "",
    **more: Any,
) -> None:
    """Runs schedules from seed `first` on and all tests that hold these behaviours, and judges both.

    `exercised` names the counts of an outcome that must not be zero. `only` is a part of the names of the tests that
    run, or of their parameters, files or folders. `more` are further figures.
    """
    parser = argument_parser(description)
    parser.add_argument("--schedules", type=int, default=default)
    parser.add_argument("--first", type=int, default=first, help="the first seed")
    args = parser.parse_args()
    held = {number: names for number, names in numbers_held().items() if number in behaviours}
    for number in sorted(behaviours):
        print(f"{number}: {', '.join(held.get(number, ['nothing']))}")

    logging.disable(logging.CRITICAL)  # failures that are injected on purpose
    began, broken = time.perf_counter(), 0
    total: Outcome | None = None
    for seed in range(args.first, args.first + args.schedules):
        try:
            outcome = run_schedule(seed)
        except BaseException as error:
            broken += 1
            print(f"schedule {seed}: {error!r}", flush=True)
        else:
            if total is None:
                total = outcome
            else:
                total.add(outcome)
    figures = {
        "schedules": args.schedules,
        "schedules_broken": broken,
        "schedules_s": round(time.perf_counter() - began, 1),
        **({} if total is None else {name: getattr(total, name) for name in total.__dataclass_fields__}),
        "behaviours_held": len(held),
        "behaviour_tests": sum(map(len, held.values())),
        **more,
    }
    bars: dict[str, Bar] = {
        "schedules": at_least(least),
        "schedules_broken": exactly(0),
        "behaviours_held": exactly(len(behaviours)),
        "behaviour_tests_exit": exactly(0),
        **{name: at_least(1) for name in exercised},
    }
    if tests:
        figures["state_machine_exit"] = run_tests(*tests)
        bars["state_machine_exit"] = exactly(0)
    named = " or ".join(sorted({name for names in held.values() for name in names}))
    chosen = f"({named}) and {only}" if only else named
    figures["behaviour_tests_exit"] = run_tests("tests", "-k", chosen)
    conclude(show, figures, bars)
