"""O2: a tenant with two agents beside one with a hundred, whose sessions need far more than the memory.

The world is that of O1. A wait is from the moment at which an agent sends a request to its first admission: it
includes the rest of the step that runs. The small tenant is compared with itself alone on the machine, and
without admission by session.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
from common import argument_parser, at_most, conclude
from o1_oversubscription import FAMILIES, MEMORY_TOKENS, WAIT_S, World, agents

SHOW = "O2"
SMALL, LARGE = 2, 100
MOST_RATIO = 1.2


def waits(case: tuple[str, int, float, int, float]) -> dict[str, list[float]]:
    """Returns the waits of each tenant's requests, after a quarter of the time."""
    family, large, wait_s, seed, until_s = case
    clients = [*agents(SMALL, seed, "small"), *agents(large, seed, "large")]
    world = World(FAMILIES[family], clients, MEMORY_TOKENS, wait_s).run(until_s)
    world.cache.check()
    found: dict[str, list[float]] = {"small": [], "large": []}
    for at, agent, wait in world.waits:
        if at >= until_s / 4:
            found[agent.tenant].append(wait)
    return found


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--hours", type=float, default=1.2, help="of simulated time")
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    figures: dict[str, Any] = {}
    bars = {}
    kinds = {"alone": (0, WAIT_S), "beside": (LARGE, WAIT_S), "beside_without_admission": (LARGE, 0.0)}
    cases = {
        (family, kind, seed): (family, large, wait_s, seed, given.hours * 3600)
        for family in FAMILIES
        for kind, (large, wait_s) in kinds.items()
        for seed in range(1, given.seeds + 1)
    }
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        played = dict(zip(cases, pool.map(waits, list(cases.values()), chunksize=1), strict=True))
    for family in FAMILIES:
        p95 = {}
        for kind in kinds:
            of_kind = [found for (other, its, _), found in played.items() if (other, its) == (family, kind)]
            for tenant in ("small", "large"):
                all_waits = [wait for found in of_kind for wait in found[tenant]]
                if all_waits:
                    p95[tenant] = float(np.quantile(all_waits, 0.95))
                    figures[f"{family}_{kind}_{tenant}_p95_s"] = round(p95[tenant], 3)
                    figures[f"{family}_{kind}_{tenant}_requests"] = len(all_waits)
        ratio = figures[f"{family}_beside_small_p95_s"] / figures[f"{family}_alone_small_p95_s"]
        figures[f"{family}_beside_over_alone"] = round(ratio, 3)
        bars[f"{family}_beside_over_alone"] = at_most(MOST_RATIO)
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
