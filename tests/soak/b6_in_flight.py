"""B6: three agents ask at one instant with one system prompt of two thousand tokens, which is computed once.

Each has a question of its own after the same rules and tools. The computed prompt tokens are compared with the
least possible: the common prefix once, and the rest of each prompt. Without sharing the prefix counts three times.
"""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

from agent_world import Agent, prose, served
from common import argument_parser, at_least, at_most, conclude, exactly

from checkpoints import save_chat
from rootstock.text.prompts.text_alignment import shared

AMPLE_BYTES = 256 << 20
PREFIX_TOKENS = 2000
AGENTS = ("Ann", "Ben", "Cid")


def of_model(model: Path, chunk_tokens: int) -> dict[str, object]:
    rules = prose(random.Random(2), 330)
    with served(model, AMPLE_BYTES, chunk_tokens) as world:
        agents = [Agent(name, rules, turns=1, steps=0, seed=6) for name in AGENTS]
        prompts = [world.prompt_of(agent) for agent in agents]
        prefix = min(shared(prompts[0], other) for other in prompts[1:])
        calls = [world.ask(agent) for agent in agents]
        at_once = threading.Barrier(len(calls))

        def send(call: object) -> None:
            at_once.wait()
            call()  # type: ignore[operator]

        threads = [threading.Thread(target=send, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counters = world.made.engine.stats().counters
        asked = world.asked
    decoded = sum(len(request.said) - 1 for request in asked)  # the last token is sampled, not computed
    computed = counters.computed_tokens - decoded
    least = prefix + sum(len(prompt) - prefix for prompt in prompts)
    cached = sorted(request.cached for request in asked)
    print(
        f"{model.name}: {[len(prompt) for prompt in prompts]} prompt tokens with {prefix} in common; computed "
        f"{computed}, least {least}, without sharing {sum(map(len, prompts))}; cached {cached}"
    )
    return {
        "prefix_tokens": prefix,
        "computed_prompt_tokens": computed,
        "computed_without_sharing": sum(map(len, prompts)),
        "computed_over_least": round(computed / least, 4),
        "prefix_computed_times": round((computed - (least - prefix)) / prefix, 4),
        "requests_that_waited": sum(found >= prefix for found in cached),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    bars = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("states", "windows"):
            found = of_model(save_chat(Path(temporary) / name, name), options.chunk_tokens)
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
            bars |= {
                f"{name}_prefix_tokens": at_least(PREFIX_TOKENS),
                f"{name}_prefix_computed_times": at_most(1.0),
                f"{name}_requests_that_waited": exactly(len(AGENTS) - 1),
            }
    conclude("B6", figures, bars)


if __name__ == "__main__":
    main()
