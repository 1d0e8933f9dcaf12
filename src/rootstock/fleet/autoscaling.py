"""The number of replicas that a fleet needs, by its queue and by the time that its caches keep a prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence

BUSY_SHARE = 0.75  # of the requests that run at once: more replicas are wanted before requests wait
KEPT_S = 300.0  # a prefix should stay at least so long: most agents ask again within it


def wanted_replicas(
    requests: float, running_at_once: int, turnovers_per_s: Sequence[float], *, has_shared_tier: bool
) -> int:
    """Returns the number of replicas that a load needs.

    `requests` run or wait in the whole fleet, and one replica runs `running_at_once`. `turnovers_per_s` has how often
    each replica's cache evicts as many tokens as it holds. An evicted prefix costs a prefill, unless a shared tier
    has it.
    """
    by_queue = math.ceil(requests / max(1.0, BUSY_SHARE * running_at_once))
    by_cache = 0
    if not has_shared_tier:
        by_cache = math.ceil(round(KEPT_S * sum(turnovers_per_s), 3))
    return max(1, by_queue, by_cache)
