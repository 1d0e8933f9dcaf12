"""Runs acceptance scripts of this directory, one after the other: `run.py`, `run.py A1`, `run.py A1 A6`.

Each script is a process of its own, prints its result as one JSON line last (common.py) and exits with 0 only if
its bars are met. So does this: 0 only if all were met.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
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


def main(asked: Sequence[str]) -> int:
    scripts = available_scripts()
    unknown = [show for show in asked if show.upper() not in scripts]
    if unknown:
        print(f"There is no show {', '.join(unknown)}; there are {', '.join(scripts)}.", file=sys.stderr)
        return 2
    chosen = [show.upper() for show in asked] or list(scripts)
    outcomes = [run(show, scripts[show]) for show in chosen]
    print_summary(outcomes)
    return 0 if all(outcome.met for outcome in outcomes) else 1


def available_scripts() -> dict[str, Path]:
    """Show → script, in the order of their letters and numbers."""
    found = [(match, path) for path in HERE.glob("*.py") if (match := SCRIPT_NAME.fullmatch(path.name))]
    found.sort(key=lambda each: (each[0][1], int(each[0][2])))
    return {f"{match[1].upper()}{match[2]}": path for match, path in found}


def run(show: str, script: Path) -> Outcome:
    print(f"──── {show}  {script.name}", flush=True)
    began = time.monotonic()
    last = ""
    with subprocess.Popen(
        [sys.executable, "-u", str(script)], stdout=subprocess.PIPE, text=True, errors="replace"
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
