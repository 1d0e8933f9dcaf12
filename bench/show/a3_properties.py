"""A3: at least 2,000 random schedules on the oracle runtime, the state machine, and every behaviour in force.

Runs the very tests of the repository, with more schedules than `make test`, and counts what they exercised.
"""

from __future__ import annotations

import argparse
import logging
import os
import time

from common import at_least, conclude, exactly
from named_tests import run_held, run_tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=4000)
    parser.add_argument("--first", type=int, default=100_000, help="the first seed: others than the tests'")
    args = parser.parse_args()
    from docs.test_behaviours import IN_FORCE, numbers_held
    from property.schedules import Outcome, run_schedule

    logging.disable(logging.CRITICAL)  # thousands of failures that are injected on purpose
    began = time.perf_counter()
    total, broken = Outcome(), []
    for seed in range(args.first, args.first + args.schedules):
        try:
            total.add(run_schedule(seed, drafts=bool(seed % 2)))
        except BaseException as error:
            broken.append((seed, repr(error)))
            print(f"schedule {seed}: {error!r}", flush=True)
    schedules_s = time.perf_counter() - began

    os.environ.pop("ROOTSTOCK_SOAK", None)
    machine = run_tests("tests/property/test_cache_state_machine.py")
    named = run_held(numbers_held())
    figures = {
        "schedules": args.schedules,
        "schedules_broken": len(broken),
        "schedules_s": round(schedules_s, 1),
        **{name: getattr(total, name) for name in total.__dataclass_fields__},
        "state_machine_exit": machine,
        "behaviour_tests": sum(map(len, numbers_held().values())),
        "behaviour_tests_exit": named,
        "behaviours_in_force": len(IN_FORCE),
        "behaviours_held": len(IN_FORCE & set(numbers_held())),
    }
    conclude(
        "A3",
        figures,
        {
            "schedules": at_least(2000),
            "schedules_broken": exactly(0),
            "state_machine_exit": exactly(0),
            "behaviour_tests_exit": exactly(0),
            "behaviours_held": exactly(len(IN_FORCE)),
            **{name: at_least(1) for name in ("preemptions", "evicted_blocks", "aborted", "failed")},
        },
    )


if __name__ == "__main__":
    main()
