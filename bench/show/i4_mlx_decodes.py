"""I4: 10,000 decode steps on the MLX runtime without a copy of a pool, in flat memory, and forwards that fail.

Three small models of mlx-lm, saved by it and loaded by the real loader: full attention, full attention with windows,
full attention with recurrent states. Each serves greedy requests on the real engine (cache, scheduler), four at a
time, with prompts that share a beginning and answers of 200 to 1,500 tokens. New requests begin while others decode,
and old prefixes are evicted. Python's garbage collector is off after step 2,000: reference cycles that hold arrays
would grow, and would turn writes into copies of a pool.

- `pool_copies`: arrays of a pool that a write copied, by their addresses before and after each call
- `active_growth`: growth of the memory of MLX's arrays between step 2,000 and the last one, each time when the open
  requests have ended and the cache is emptied
- `resident_growth`: the same of the process's memory, as a share
- `other_answers`: answers that differ from those of mlx-lm's model with its own cache

Then forwards fail with four requests decoding and two waiting, or in the middle of a prompt, and the same requests
are sent again. `lost`: MLX fails to evaluate an array that K and V of later layers depend on, so that the pools are
made anew. Every open request fails once with `pools_lost`, and the cache is empty. `raised`: the model's code raises
while the graph is built. The requests of that step fail once, the waiting ones are answered, and the cache stays.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import argument_parser, at_least, at_most, conclude, exactly

from mlx_checkpoints import save_mlx_checkpoint
from twins.mlx_decodes import Decodes, fail, wrong_after_exception, wrong_after_loss

MODELS = {"llama": 3, "gemma3_text": 2, "qwen3_next": 2}  # and their layers
BUDGET_BYTES = 4 << 20
WARM_STEPS = 2000
ANSWERS = (200, 1500)  # tokens
TOKENS_UNTIL_FAILURE = 12


def measure(kind: str, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = {"num_hidden_layers": MODELS[kind]}
        decodes = Decodes(save_mlx_checkpoint(Path(folder), kind, config=config), BUDGET_BYTES)
        warm_steps = min(WARM_STEPS, steps // 5)
        decodes.decode(warm_steps, *ANSWERS, collect_garbage=True)
        warm = decodes.memory()
        decodes.decode(steps - decodes.decode_steps, *ANSWERS, collect_garbage=False)
        end = decodes.memory()
        served = decodes.asked[:]
        found: dict[str, Any] = {
            "families": [family.name for family in decodes.runtime.description.families],
            "decode_steps": decodes.decode_steps,
            "requests": len(served),
            "answered_tokens": sum(len(asked.answer) for asked in served),
            "evicted_blocks": decodes.cache.stats().evicted_blocks,
            "pool_copies": decodes.pool_copies,
            "active_bytes": end.active_bytes,
            "active_growth": end.active_bytes - warm.active_bytes,
            "resident_growth": round(end.resident_bytes / warm.resident_bytes - 1, 5),
            "unfinished": sum(not asked.finished for asked in served),
            "other_answers": decodes.other_answers(served),
            "steps_s": round(time.monotonic() - began, 1),
        }
        for in_prefill in (False, True):
            where = "in a prefill" if in_prefill else "in a decode"
            lost = fail(decodes, "evaluation", TOKENS_UNTIL_FAILURE, in_prefill=in_prefill)
            found[f"lost {where}"] = {"ends": lost.ends, "wrong": wrong_after_loss(lost)}
            raised = fail(decodes, "graph", TOKENS_UNTIL_FAILURE, in_prefill=in_prefill)
            found[f"raised {where}"] = {"ends": raised.ends, "wrong": wrong_after_exception(raised)}
    print(f"{kind}: {found}", flush=True)
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="decode steps of each model")
    parser.add_argument("--only", choices=MODELS, help="one model")
    options = parser.parse_args()
    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    logging.disable(logging.CRITICAL)  # failures that are injected on purpose
    models = {kind: measure(kind, options.steps) for kind in ([options.only] if options.only else MODELS)}
    each = list(models.values())
    figures = {
        "least_decode_steps": min(found["decode_steps"] for found in each),
        "pool_copies": sum(found["pool_copies"] for found in each),
        "least_evicted_blocks": min(found["evicted_blocks"] for found in each),
        "active_growth": max(found["active_growth"] for found in each),
        "resident_growth": max(found["resident_growth"] for found in each),
        "other_answers": sum(found["other_answers"] + found["unfinished"] for found in each),
        "wrong_after_failures": {
            f"{kind}, {name}": outcome["wrong"]
            for kind, found in models.items()
            for name, outcome in found.items()
            if isinstance(outcome, dict) and outcome["wrong"]
        },
        "models": models,
    }
    bars = {
        "least_decode_steps": at_least(options.steps),
        "pool_copies": exactly(0),
        "least_evicted_blocks": at_least(1),
        "active_growth": at_most(0),
        "resident_growth": at_most(0.02),
        "other_answers": exactly(0),
        "wrong_after_failures": exactly({}),
    }
    conclude("I4", figures, bars)


if __name__ == "__main__":
    main()
