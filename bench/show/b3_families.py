"""B3: behaviours 14 to 26, and random schedules on an oracle that has every family at once.

The oracle's state is a hash of everything seen so far, its windows and chunks forget, its full attention remembers:
whatever is resumed at a wrong position, released too early, or restored from another's state changes the output. Runs
the very tests of the repository, with other seeds than theirs.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from pathlib import Path

from common import at_least, conclude, exactly

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
BEHAVIOURS = range(14, 27)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=500_000, help="the first seed")
    args = parser.parse_args()
    from docs.test_behaviours import numbers_held
    from property.schedules import EVERYTHING, Outcome, run_schedule

    held = {number: names for number, names in numbers_held().items() if number in BEHAVIOURS}
    for number in BEHAVIOURS:
        print(f"{number}: {', '.join(held.get(number, ['nothing']))}")

    logging.disable(logging.CRITICAL)  # failures that are injected on purpose
    began = time.perf_counter()
    total, broken = Outcome(), 0
    for seed in range(args.first, args.first + args.schedules):
        try:
            total.add(run_schedule(seed, families=EVERYTHING))
        except BaseException as error:
            broken += 1
            print(f"schedule {seed}: {error!r}", flush=True)
    schedules_s = time.perf_counter() - began

    machine = _pytest("tests/property/test_cache_state_machine.py")
    named = _pytest("tests", "-k", " or ".join(sorted({n for names in held.values() for n in names})))
    figures = {
        "behaviours_held": len(held),
        "behaviour_tests": sum(map(len, held.values())),
        "behaviour_tests_exit": named,
        "state_machine_exit": machine,
        "families": [family.name for family in EVERYTHING],
        "schedules": args.schedules,
        "schedules_broken": broken,
        "schedules_s": round(schedules_s, 1),
        **{name: getattr(total, name) for name in total.__dataclass_fields__},
    }
    exercised = (
        "preemptions",
        "checkpoints_hit",
        "checkpoints_evicted",
        "waited_for_prefix",
        "returned_rows",
    )
    conclude(
        "B3",
        figures,
        {
            "behaviours_held": exactly(len(BEHAVIOURS)),
            "behaviour_tests_exit": exactly(0),
            "state_machine_exit": exactly(0),
            "schedules": at_least(2000),
            "schedules_broken": exactly(0),
            **{name: at_least(1) for name in exercised},
        },
    )


def _pytest(*what: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *what], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    main()
