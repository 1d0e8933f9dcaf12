"""The repository's own tests, for shows that run them: which hold a behaviour, and whether they pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

Held = dict[int, list[str]]  # names of tests, by the behaviour that they hold


def held_behaviours(numbers: Collection[int]) -> Held:
    """Tells which tests hold each of these behaviours, and prints it."""
    from docs.test_behaviours import numbers_held

    held = {number: names for number, names in numbers_held().items() if number in numbers}
    for number in numbers:
        print(f"{number}: {', '.join(held.get(number, ['nothing']))}")
    return held


def run_held(held: Mapping[int, list[str]]) -> int:
    """The exit status of all these tests."""
    return run_tests("tests", "-k", " or ".join(sorted({name for names in held.values() for name in names})))


def run_tests(*what: str) -> int:
    """pytest's exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *what], cwd=ROOT, check=False).returncode
