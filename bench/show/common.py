"""Bars and the result line of a show script: one line of JSON, and exit status 0 only if every bar is met.

    conclude("A4", {"computed_tokens": 2080, "ratio": 1.0}, {"ratio": at_most(1.02)})

A bar carries the name of the figure that it judges. A figure that is missing, None or not a number misses its bar.
Importing this module puts `tests` on the path: shows share its small models and its drivers.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

ROOT = Path(__file__).parents[2]


def argument_parser(description: str | None) -> ArgumentParser:
    """Returns a parser whose help keeps the lines of a script's docstring."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


@dataclass(frozen=True, slots=True)
class Bar:
    relation: Literal["<=", ">=", "=="]
    bound: Any

    def is_met_by(self, figure: Any) -> bool:
        if self.relation == "==":
            return bool(figure == self.bound)
        if isinstance(figure, bool) or not isinstance(figure, Real) or math.isnan(figure):
            return False
        return bool(float(figure) <= self.bound if self.relation == "<=" else float(figure) >= self.bound)

    def __str__(self) -> str:
        return f"{self.relation} {self.bound}"


def at_most(bound: float) -> Bar:
    return Bar("<=", bound)


def at_least(bound: float) -> Bar:
    return Bar(">=", bound)


def exactly(value: object) -> Bar:
    return Bar("==", value)


def replace_section(page: Path, heading: str, section: str) -> None:
    """Replaces a page's section, from its heading to the next one of the same level, or adds it at the end."""
    text = page.read_text()
    before, found, rest = text.partition(f"\n{heading}\n")
    if not found:
        page.write_text(f"{text.rstrip()}\n\n{section}")
        return
    level = heading.split(" ")[0]
    after = rest.find(f"\n{level} ")
    page.write_text(f"{before}\n{section}" + ("" if after < 0 else rest[after:]))


def conclude(show: str, figures: Mapping[str, Any], bars: Mapping[str, Bar]) -> NoReturn:
    """Prints the missed bars and the final line, and exits."""
    assert bars, "a script that judges nothing shows nothing"
    missed = {name: bar for name, bar in bars.items() if not bar.is_met_by(figures.get(name))}
    for name, bar in missed.items():
        print(f"{show}: {name} is {figures.get(name)}, the bar is {bar}", flush=True)
    line = {
        "show": show,
        "figures": dict(figures),
        "bars": {name: str(bar) for name, bar in bars.items()},
        "met": not missed,
    }
    print(json.dumps(line, default=_plain), flush=True)
    sys.exit(0 if not missed else 1)


def could_not(show: str, reason: str) -> NoReturn:
    """Prints a result line that is not met, with the reason why nothing could be measured, and exits."""
    print(json.dumps({"show": show, "figures": {"could_not": reason}, "bars": {}, "met": False}), flush=True)
    sys.exit(1)


def _plain(value: Any) -> Any:
    """Converts NumPy scalars and arrays, and any other value to text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
