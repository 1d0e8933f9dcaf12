"""F6: A5, D1, D2, D4 and D6, short, of the commit before issue 13 and of this one, in turns within the hour.

Each script runs from its own commit with its own package. Judged is each figure that the script itself judges by a
bound: the median of the runs now may not be worse than the worst run before by more than 3 %.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, conclude, exactly
from f1_prose import BEFORE, extract

SCRIPTS = {
    "A5": ("a5_control_plane.py", "--rounds", "20"),
    "D1": ("d1_decode_attention.py", "--runs", "1"),
    "D2": ("d2_decode_step.py", "--batches", "1,8", "--contexts", "512", "--rounds", "3"),
    "D4": ("d4_agents_http.py", "--only", "dense", "--turns", "4"),
    "D6": ("d6_server_overhead.py",),
}
TOLERANCE = 0.03


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--before", default=BEFORE, help="a commit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="comma-separated")
    args = parser.parse_args()

    values: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    lower_is_better: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        extract(args.before, Path(folder))
        for number in range(args.rounds):
            sides = [(0, Path(folder)), (1, ROOT)]
            for show in args.only.split(","):
                for side, root in sides if number % 2 == 0 else reversed(sides):
                    result = run(root, SCRIPTS[show])
                    for name, bar in result["bars"].items():
                        value = result["figures"].get(name)
                        if bar[:2] == "==" or not isinstance(value, int | float):
                            continue
                        values[f"{show} {name}"][side].append(float(value))
                        lower_is_better[f"{show} {name}"] = bar[:2] == "<="
    worse = [name for name, sides in values.items() if is_worse(*sides, lower_is_better[name])]
    figures: dict[str, Any] = {name: {"before": b, "now": n} for name, (b, n) in values.items()}
    conclude(
        "F6",
        figures | {"compared": len(values), "worse": worse},
        {"worse": exactly([])},
    )


def is_worse(before: list[float], now: list[float], lower_is_better: bool) -> bool:
    if not before or not now:
        return True
    if lower_is_better:
        return statistics.median(now) > max(before) * (1 + TOLERANCE)
    return statistics.median(now) < min(before) * (1 - TOLERANCE)


def run(root: Path, script: tuple[str, ...]) -> dict[str, Any]:
    """Returns the script's result line, whether or not it met its own bars."""
    done = subprocess.run(
        [sys.executable, str(root / "bench/show" / script[0]), *script[1:]],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise RuntimeError(f"{script[0]} in {root} printed no result: {done.stderr[-2000:]}")
    print(f"{root.name or root} {lines[-1][:200]}", flush=True)
    result: dict[str, Any] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    main()
