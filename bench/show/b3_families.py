"""B3: behaviours 14 to 26, and random schedules on an oracle that has every family at once.

The oracle's state is a hash of everything seen so far, its windows and chunks forget, its full attention remembers:
whatever is resumed at a wrong position, released too early, or restored from another's state changes the output. Runs
the very tests of the repository, with other seeds than theirs.
"""

from __future__ import annotations

import argparse
import logging
import time

from common import at_least, conclude, exactly
from named_tests import held_behaviours, run_held, run_tests

BEHAVIOURS = range(14, 27)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=500_000, help="the first seed")
    args = parser.parse_args()
    from property.schedules import EVERYTHING, Outcome, run_schedule

    held = held_behaviours(BEHAVIOURS)

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

    machine = run_tests("tests/property/test_cache_state_machine.py")
    named = run_held(held)
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


if __name__ == "__main__":
    main()
