"""Runs acceptance scripts, one after the other: `run.py` all, `run.py A1 A6` two, `run.py soak` those of tests/soak.

Scripts that measure are in this directory, those that prove correctness in tests/soak. Options go to each script:
`run.py C2 --cases 5`. Each is a process of its own, prints its result as one JSON line last (common.py), and exits
with 0 only if its bars are met. The exit status is 0 only if all bars were met.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
SOAK = TESTS / "soak"
SCRIPT_NAME = re.compile(r"([a-z]+)(\d+)_\w+\.py")  # a1_fresh_clone.py shows line A1


@dataclass(frozen=True, slots=True)
class Outcome:
    show: str
    seconds: float
    exit_status: int
    result: dict[str, Any] | None  # its JSON line; None if it printed none

    @property
    def met(self) -> bool:
        return self.exit_status == 0 and self.result is not None and self.result.get("met") is True

    @property
    def remark(self) -> str:
        if self.result is None:
            return f"no result line, exit status {self.exit_status}"
        figures, bars = self.result.get("figures", {}), self.result.get("bars", {})
        if "could_not" in figures:
            return f"could not: {figures['could_not']}"
        return ", ".join(f"{name} {_short(figures.get(name))} ({bar})" for name, bar in bars.items())


def main(arguments: Sequence[str]) -> int:
    options = list(itertools.dropwhile(lambda argument: not argument.startswith("-"), arguments))
    asked = arguments[: len(arguments) - len(options)]
    scripts = available_scripts()
    if asked == ["soak"]:
        asked = [show for show, script in scripts.items() if script.parent == SOAK]
    unknown = [show for show in asked if show.upper() not in scripts]
    if unknown:
        print(f"There is no show {', '.join(unknown)}; there are {', '.join(scripts)}.", file=sys.stderr)
        return 2
    chosen = [show.upper() for show in asked] or list(scripts)
    outcomes = [run(show, scripts[show], options) for show in chosen]
    print_summary(outcomes)
    return 0 if all(outcome.met for outcome in outcomes) else 1


def available_scripts() -> dict[str, Path]:
    """Returns the scripts by show, in the order of their letters and numbers."""
    found = [
        (match, path)
        for path in (*HERE.glob("*.py"), *SOAK.glob("*.py"))
        if (match := SCRIPT_NAME.fullmatch(path.name))
    ]
    found.sort(key=lambda each: (each[0][1], int(each[0][2])))
    return {f"{match[1].upper()}{match[2]}": path for match, path in found}


def run(show: str, script: Path, options: Sequence[str] = ()) -> Outcome:
    print(f"──── {show}  {script.name}", flush=True)
    began = time.monotonic()
    last = ""
    paths = [TESTS, HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(map(str, paths))} if script.parent == SOAK else {}
    with subprocess.Popen(
        [sys.executable, "-u", str(script), *options],
        env=os.environ | found,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        except BaseException:
            process.terminate()
            raise
    return Outcome(show, time.monotonic() - began, process.returncode, _result_in(last))


def print_summary(outcomes: Sequence[Outcome]) -> None:
    print("\nshow  met   seconds  figures (bars)")
    for outcome in outcomes:
        met = "yes" if outcome.met else "NO"
        print(f"{outcome.show:<5} {met:<4} {outcome.seconds:>8.1f}  {outcome.remark}")


def _result_in(line: str) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and "met" in result else None


def _short(figure: Any) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


if __name__ == "__main__":
    sys.exit(main([show for show in sys.argv[1:] if show]))
