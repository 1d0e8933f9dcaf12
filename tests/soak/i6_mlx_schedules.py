"""I6: at least 500 random schedules on the MLX runtime, and the families' behaviours in which a runtime has a part.

The schedules are those of A3, B3 and C7 with the MLX runtime in the place of the oracle: arrivals, aborts, forwards
that fail with and without the loss of the pools, preemptions, small budgets, chunks and blocks of all sizes, shared
prefixes, right and wrong drafts, idle work, hints, pins, public heads, tiers that refuse, lose and damage records,
restarts. The models are tiny ones of mlx-lm: full attention; full attention and windows; and states; and both;
windows and states; states alone; full attention and chunks, one sequence per forward.

Each token and its log-probability must be that of the model with mlx-lm's own cache, alone and token by token, in
float32; records of the same identity must have the same content; and no pool may be copied.

Behaviours 15, 17 and 22 to 25 have tests on the MLX runtime, which are run. The other ones of families (14, 16, 18 to
21, 26) are of the cache alone, without any runtime: B3 runs them.
"""

from own_tests import show_schedules

from property.mlx_schedules import KINDS, run_mlx_schedule, subject_of
from property.schedules import ScopedTierOutcome

show_schedules(
    "I6",
    __doc__,
    run_mlx_schedule,
    (15, 17, *range(22, 26)),
    tuple(ScopedTierOutcome.__dataclass_fields__),
    least=500,
    default=504,
    first=700_000,
    only="mlx",
    models={kind: [family.name for family in subject_of(kind).families or ()] for kind in KINDS},
)
