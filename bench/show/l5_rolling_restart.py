"""L5: a rolling restart of all replicas of a fleet under load: no request fails, and the hit rate comes back.

Three oracles with a shared tier (fleet_replicas.py) serve sessions that go on (fleet_load.py), from clients that
never ask again. After a while all replicas are replaced. The hit rate of the requests after that is compared with
the one before, over as many seconds.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from typing import Any

from common import argument_parser, at_least, conclude, could_not, exactly
from fleet_load import Load, Played
from fleet_sides import REPLICAS, started

from waiting import join

SHOW = "L5"
WARM_S = 15.0  # the caches fill


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--window", type=float, default=40.0, help="seconds before and after")
    given = options.parse_args()
    if importlib.util.find_spec("ray") is None:
        could_not(SHOW, "rootstock[fleet] is not installed")
    figures = restarted(given.seed, given.window)
    conclude(
        SHOW,
        figures,
        {
            "failed": exactly(0),
            "new_replicas": exactly(REPLICAS),
            "old_replicas": exactly(0),
            "hit_rate_after_to_before": at_least(0.9),
        },
    )


def restarted(seed: int, window_s: float) -> dict[str, Any]:
    with started("ours", shared=True) as side:
        load = Load(side.url, seed=seed, tries=1)
        stop = threading.Event()
        clients = threading.Thread(target=load.play_until, args=(stop.is_set,), name="clients")
        clients.start()
        try:
            time.sleep(WARM_S + window_s)
            old = side.replicas()
            began = time.perf_counter()
            side.restart()
            ended = time.perf_counter()
            new = side.replicas()
            time.sleep(window_s)
        finally:
            stop.set()
            join(clients)
    played = load.played
    windows = {
        "before": between(played, began - window_s, began),
        "during": between(played, began, ended),
        "after": between(played, ended, ended + window_s),
    }
    for error in played.errors[:20]:
        print(error, flush=True)
    figures: dict[str, Any] = {
        "failed": len(played.errors),
        "requests": len(played.answers),
        "new_replicas": len(new - old),
        "old_replicas": len(new & old),
        "restart_s": round(ended - began, 1),
    }
    for name, window in windows.items():
        figures[f"requests_{name}"] = len(window.answers)
        figures |= {f"{figure}_{name}": value for figure, value in window.figures().items()}
    figures["hit_rate_after_to_before"] = round(figures["hit_rate_after"] / figures["hit_rate_before"], 4)
    return figures


def between(played: Played, began: float, ended: float) -> Played:
    return Played([answer for answer in played.answers if began <= answer.began < ended])


if __name__ == "__main__":
    main()
