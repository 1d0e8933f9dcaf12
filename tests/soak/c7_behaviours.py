"""C7: behaviours 39 to 46 by named tests, and random schedules over a tier that refuses, loses and damages things.

A schedule is one to three lives of an engine on the oracle runtime above one tier, with crashes or clean ends between
them; requests of a later life go on from those of an earlier one. Half of the schedules have every family at once.
"""

from own_tests import show_schedules

from property.schedules import EVERYTHING, run_tiered_schedule

show_schedules(
    "C7",
    __doc__,
    lambda seed: run_tiered_schedule(seed, families=EVERYTHING if seed % 2 else None),
    range(39, 47),
    ("loads_finished", "loads_missed", "loads_cancelled", "refused_stores", "records_gone", "verified"),
    least=1500,
    default=1500,
    first=900_000,
)
