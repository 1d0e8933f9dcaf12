"""J2: the checkpoints that later requests resume at, in long tool loops and on repeated prompts.

*grid*: conversations on the oracle runtime, of 10 to 200 tool rounds, in caches with room for 2 to 40 checkpoints
beside K and V, with recurrent states, windows, chunks, and windows and states together. The next user turn drops what
followed the last one, or keeps it; clients mark each prompt's end, or not; they repeat each answer as it was sampled,
or in part, or not at all; turns follow each other. The hits of the next user turn and of a new session are compared
with a cache that keeps just the newest checkpoint, the last user turn's and the system's, or the best two of them.
Each must find 95 % as much.

*architectures*: a tiny model of each served architecture gets one prompt three times from the real engine. From the
second time on it must find all of it but the last token, which is always computed.

`--part` runs one of them; `--only`, `--families`, `--rounds` and `--rooms` choose cases.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, conclude, exactly
from ties import run_quietly

from asking import greedy
from checkpoints import save
from engine.tool_loops import Loop, play
from rootstock.cache import KVCache
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Finished
from twins.architectures import ARCHITECTURES, VOCAB
from twins.driving import pool_bytes, random_tokens
from twins.torch_models import load

SHOW = "J2"
BLOCK_SIZE = 16
PROMPT_TOKENS = 53


def loops(families: list[str], rounds: list[int], rooms: list[int]) -> Iterator[Loop]:
    for family, count, room in itertools.product(families, rounds, rooms):
        yield Loop(family, count, room)
        yield Loop(family, count, room, tokens_per_s=20.0)
        yield Loop(family, count, room, marks=True)
        yield Loop(family, count, room, repeats=0)
        yield Loop(family, count, room, repeats=6)
        if count <= 70:
            yield Loop(family, count, room, turns=3)
            yield Loop(family, count, room, turns=2, drops=False)


def grid(families: list[str], rounds: list[int], rooms: list[int]) -> dict[str, Any]:
    worst: dict[str, float] = dict.fromkeys(("ratio", "next_turn", "new_session", "round"), 1.0)
    count, below = 0, []
    for loop in loops(families, rounds, rooms):
        found = play(loop)
        count += 1
        ratios = {"ratio": found.ratio, "round": found.least_of_a_round}
        if loop.room >= 3:  # there is room for all three
            ratios["next_turn"] = found.next_turn / found.best_next_turn
            ratios["new_session"] = found.new_session / found.best_new_session
        worst = {name: min(least, ratios.get(name, 1.0)) for name, least in worst.items()}
        if min(ratios.values()) < 0.95:
            below.append(str(loop))
            print(f"{loop}: {found}", flush=True)
    return {"grid_cases": count, "grid_below": below} | {
        f"least_{name}": round(worst[name], 4) for name in worst
    }


def cached_tokens(model_type: str) -> list[int]:
    """Returns the cached tokens of one prompt that is sent three times."""
    with tempfile.TemporaryDirectory() as folder:
        runtime = load(save(Path(folder) / model_type, model_type))
        families = runtime.description.families
        cache = KVCache(families, pool_bytes(families, BLOCK_SIZE), BLOCK_SIZE)
        runtime.allocate(cache.rows, BLOCK_SIZE)
        engine = Engine(runtime, cache, EngineConfig(max_batch=1))
        prompt, found = random_tokens(VOCAB, PROMPT_TOKENS, 1), []
        for _ in range(3):
            events: list[Event] = []
            engine.submit(greedy(prompt, 8), events.append)
            while engine.step():
                pass
            (ended,) = (event for event in events if isinstance(event, Finished))
            found.append(ended.usage.cached_tokens)
        cache.check()
    return found


def architectures(model_types: list[str]) -> dict[str, Any]:
    others = {}
    for model_type in model_types:
        found = cached_tokens(model_type)
        if found != [0, PROMPT_TOKENS - 1, PROMPT_TOKENS - 1]:
            others[model_type] = found
            print(f"{model_type}: {found} of {PROMPT_TOKENS}", flush=True)
    return {"architectures": len(model_types), "repeated_prompts_that_miss": others}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=("grid", "architectures"))
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--families", default="states,windows,chunked,mixed")
    parser.add_argument("--rounds", default="10,30,70,200")
    parser.add_argument("--rooms", default="2,3,4,8,20,40")
    options = parser.parse_args()
    began, figures, bars = time.monotonic(), dict[str, Any](), {}
    if options.part != "architectures":
        rounds, rooms = (
            [int(each) for each in given.split(",")] for given in (options.rounds, options.rooms)
        )
        figures |= grid(options.families.split(","), rounds, rooms)
        bars |= {f"least_{name}": at_least(0.95) for name in ("ratio", "next_turn", "new_session", "round")}
    if options.part != "grid":
        run_quietly()
        figures |= architectures(options.only.split(",") if options.only else list(ARCHITECTURES))
        bars["repeated_prompts_that_miss"] = exactly({})
    figures["seconds"] = round(time.monotonic() - began, 1)
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
