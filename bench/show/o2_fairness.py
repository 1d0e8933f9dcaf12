"""O2: a tenant with two agents beside one with a hundred, whose sessions need far more than the memory.

The world is that of O1. A *wait* is from the moment at which an agent sends a request to its first admission: it
includes the rest of the step that runs, which takes .9 s here. *Queued* is the wait without that rest, and *first*
the time to the first token after it. The small tenant is compared with itself alone on the machine, and without
admission by session.
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


def times(case: tuple[str, int, float, int, float]) -> dict[tuple[str, str], list[float]]:
    """Returns the times of each tenant's requests, by tenant and kind, after a quarter of the time."""
    family, large, wait_s, seed, until_s = case
    clients = [*agents(SMALL, seed, "small"), *agents(large, seed, "large")]
    world = World(FAMILIES[family], clients, MEMORY_TOKENS, wait_s).run(until_s)
    world.cache.check()
    found: dict[tuple[str, str], list[float]] = {}
    for at, agent, wait in world.waits:
        if at >= until_s / 4:
            found.setdefault((agent.tenant, "wait"), []).append(wait)
    for at, agent, end in world.ends:
        if at >= until_s / 4:
            found.setdefault((agent.tenant, "queued"), []).append(end.usage.queued_s)
            found.setdefault((agent.tenant, "first"), []).append(end.usage.ttft_s)
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
        played = dict(zip(cases, pool.map(times, list(cases.values()), chunksize=1), strict=True))
    for family in FAMILIES:
        for kind in kinds:
            of_kind = [found for (other, its, _), found in played.items() if (other, its) == (family, kind)]
            for tenant, what in sorted({key for found in of_kind for key in found}):
                all_s = [one_s for found in of_kind for one_s in found.get((tenant, what), ())]
                figures[f"{family}_{kind}_{tenant}_{what}_p95_s"] = round(float(np.quantile(all_s, 0.95)), 3)
                figures[f"{family}_{kind}_{tenant}_requests"] = len(all_s)
        for what in ("wait", "queued", "first"):
            alone, beside = (figures[f"{family}_{kind}_small_{what}_p95_s"] for kind in ("alone", "beside"))
            bars[f"{family}_beside_small_{what}_p95_s"] = at_most(round(MOST_RATIO * alone, 3))
            figures[f"{family}_{what}_ratio"] = round(beside / alone, 2) if alone else None
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
