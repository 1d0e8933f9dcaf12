"""F3: lines of src, tests and bench, and the line coverage of the tests, before issue 13 and now.

Coverage needs the package `coverage` beside the development tools, and two runs of the suite in one process each
(`--coverage`, an hour at most); without it only lines are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, at_least, conclude
from f1_prose import BEFORE, extract, files_of_commit, files_of_tree

FEWER = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="a commit")
    parser.add_argument("--coverage", action="store_true")
    args = parser.parse_args()

    figures: dict[str, float] = {}
    for side, files in (("before", files_of_commit(args.before)), ("now", files_of_tree())):
        for area in ("src", "tests", "bench"):
            figures[f"{area}_{side}"] = sum(
                text.count("\n")
                for path, text in files.items()
                if path.startswith(f"{area}/") and path.endswith(".py")
            )
    figures["fewer"] = sum(
        figures[f"{area}_before"] - figures[f"{area}_now"] for area in ("src", "tests", "bench")
    )
    bars = {"fewer": at_least(FEWER)}
    if args.coverage:
        with tempfile.TemporaryDirectory() as folder:
            extract(args.before, Path(folder))
            figures["coverage_before"] = coverage(Path(folder))
        figures["coverage_now"] = coverage(ROOT)
        bars["coverage_now"] = at_least(figures["coverage_before"])
    conclude("F3", figures, bars)


def coverage(root: Path) -> float:
    """Returns the covered share of the package's lines, in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "COVERAGE_FILE": str(Path(folder, "data")),
            "PYTHONPATH": str(root / "src"),
        }
        command = [sys.executable, "-m", "coverage"]
        tests = [*command, "run", f"--source={root / 'src/rootstock'}", "-m", "pytest", "-q"]
        subprocess.run(tests, cwd=root, env=environment, check=True)
        report = Path(folder, "report.json")
        subprocess.run([*command, "json", "-o", str(report)], cwd=root, env=environment, check=True)
        totals = json.loads(report.read_text())["totals"]
    return round(float(totals["percent_covered"]), 2)


if __name__ == "__main__":
    main()
