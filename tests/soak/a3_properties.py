"""A3: at least 2,000 random schedules on the oracle runtime, the state machine, and every behaviour in force.

Runs the repository's own tests, with more schedules than `make test`, and counts the events of the schedules.
"""

from own_tests import STATE_MACHINE, show_schedules

from docs.test_behaviours import IN_FORCE
from property.schedules import run_schedule

show_schedules(
    "A3",
    __doc__,
    lambda seed: run_schedule(seed, drafts=bool(seed % 2)),
    IN_FORCE,
    ("preemptions", "evicted_blocks", "aborted", "failed"),
    least=2000,
    default=4000,
    first=100_000,
    tests=[STATE_MACHINE],
)
