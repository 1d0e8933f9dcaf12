"""C7: behaviours 39 to 46 by named tests, and random schedules over a tier that refuses, loses and damages things.

A schedule is one to three lives of an engine on the oracle runtime above one tier, with crashes or clean ends between
them; requests of a later life go on from those of an earlier one. Half of the schedules have every family at once.
Runs the very tests of the repository, with other seeds than theirs.
"""

from __future__ import annotations

import argparse
import logging
import time

from common import at_least, conclude, exactly
from named_tests import held_behaviours, run_held

BEHAVIOURS = range(39, 47)
EXERCISED = (
    "loads_finished",
    "loads_missed",
    "loads_cancelled",
    "refused_stores",
    "records_gone",
    "verified",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1500)
    parser.add_argument("--first", type=int, default=900_000, help="the first seed")
    args = parser.parse_args()
    from property.schedules import EVERYTHING, TierOutcome, run_tiered_schedule

    held = held_behaviours(BEHAVIOURS)

    logging.disable(logging.CRITICAL)  # failures that are injected on purpose
    began = time.perf_counter()
    total, broken = TierOutcome(), 0
    for seed in range(args.first, args.first + args.schedules):
        try:
            total.add(run_tiered_schedule(seed, families=EVERYTHING if seed % 2 else None))
        except BaseException as error:
            broken += 1
            print(f"schedule {seed}: {error!r}", flush=True)
    schedules_s = time.perf_counter() - began

    named = run_held(held)
    conclude(
        "C7",
        {
            "behaviours_held": len(held),
            "behaviour_tests": sum(map(len, held.values())),
            "behaviour_tests_exit": named,
            "schedules": args.schedules,
            "schedules_broken": broken,
            "schedules_s": round(schedules_s, 1),
            **{name: getattr(total, name) for name in total.__dataclass_fields__},
        },
        {
            "behaviours_held": exactly(len(BEHAVIOURS)),
            "behaviour_tests_exit": exactly(0),
            "schedules": at_least(1500),
            "schedules_broken": exactly(0),
            **{name: at_least(1) for name in EXERCISED},
        },
    )


if __name__ == "__main__":
    main()
