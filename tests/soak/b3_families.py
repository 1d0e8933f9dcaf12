"""B3: behaviours 14 to 26, and random schedules on an oracle that has every family at once.

The oracle's state is a hash of everything seen so far, its windows and chunks forget, its full attention remembers:
resuming at a wrong position, releasing too early, or restoring another's state changes the output.
"""

from own_tests import STATE_MACHINE, show_schedules

from property.schedules import EVERYTHING, run_schedule

show_schedules(
    "B3",
    __doc__,
    lambda seed: run_schedule(seed, families=EVERYTHING),
    range(14, 27),
    ("preemptions", "checkpoints_hit", "checkpoints_evicted", "waited_for_prefix", "returned_rows"),
    least=2000,
    default=2000,
    first=500_000,
    tests=[STATE_MACHINE],
    families=[family.name for family in EVERYTHING],
)
