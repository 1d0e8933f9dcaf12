"""F3: lines of src, tests and bench, and the line coverage of the tests, before issue 13 and now.

`--coverage` runs the suite of both commits with pytest-xdist and pytest-cov (an hour at most), each with its own
tests and its own package. Processes that tests start count as well. Failing tests do not end a run: they are figures.
The interpreter that runs this script needs the packages `coverage` (7.10 or later) and `pytest-cov`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, at_least, conclude, exactly
from e5_busy_tests import counts_of
from f1_prose import BEFORE, extract, files_of_commit, files_of_tree

FEWER = 3000
AREAS = ("src", "tests", "bench")
SETTINGS = """[run]
parallel = true
sigterm = true
patch = subprocess
source = {source}
data_file = {folder}/data
"""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--before", default=BEFORE, help="a commit")
    parser.add_argument("--coverage", action="store_true", help="measure the coverage as well")
    parser.add_argument("--processes", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--paths", nargs="*", default=[], help="tests to run instead of all")
    args = parser.parse_args()

    figures: dict[str, Any] = {}
    for side, files in (("before", files_of_commit(args.before)), ("now", files_of_tree())):
        for area in AREAS:
            figures[f"{area}_{side}"] = sum(
                text.count("\n")
                for path, text in files.items()
                if path.startswith(f"{area}/") and path.endswith(".py")
            )
    figures["fewer"] = sum(figures[f"{area}_before"] - figures[f"{area}_now"] for area in AREAS)
    bars = {"fewer": at_least(FEWER)}
    if args.coverage:
        with tempfile.TemporaryDirectory() as folder:
            extract(args.before, Path(folder))
            figures |= covered(Path(folder), "before", args.processes, args.paths)
        figures |= covered(ROOT, "now", args.processes, args.paths) | {"restricted_to": args.paths}
        bars |= {"coverage_now": at_least(figures["coverage_before"]), "restricted_to": exactly([])}
    conclude("F3", figures, bars)


def covered(root: Path, side: str, processes: int, paths: Sequence[str]) -> dict[str, Any]:
    """Runs the tests of the tree `root`. Returns its covered lines in per cent, its tests and their failures."""
    with tempfile.TemporaryDirectory() as folder:
        settings, report, results = (Path(folder, name) for name in ("rc", "report.json", "results.xml"))
        settings.write_text(SETTINGS.format(source=root / "src/rootstock", folder=folder))
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "worksteal"]
        command += ["--cov", f"--cov-config={settings}", f"--cov-report=json:{report}"]
        status = subprocess.run(
            [*command, f"--junit-xml={results}", *paths],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            check=False,
        ).returncode
        if status not in (0, 1):  # 1: tests failed
            raise RuntimeError(f"pytest in {root} ended with status {status}")
        tests, failures = counts_of(results)
        totals = json.loads(report.read_text())["totals"]
    return {
        f"coverage_{side}": round(float(totals["percent_covered"]), 2),
        f"covered_lines_{side}": totals["covered_lines"],
        f"test_cases_{side}": tests,
        f"failures_{side}": failures,
    }


if __name__ == "__main__":
    main()
