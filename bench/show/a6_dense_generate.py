"""A6: against dense batched `transformers.generate`, in the same process, model, dtype and threads.

Decode: the time of one step with B sequences of 512 tokens each, prefill excluded on both sides. Ours are engine
steps in which all B decode; theirs are the times between two calls of a logits processor, inside one `generate` that
was handed a filled DynamicCache. Rounds alternate between the two sides, and a ratio is a median of rounds.

Agents: the `agents` workload end to end. Ours starts with an empty cache; theirs is one left-padded `generate` a turn
over all agents' prompts.

In bfloat16 the two sides may choose different tokens, so float32 shows first that they do the same work.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, at_most, conclude, exactly
from dense_side import Dense
from llamas import MODELS, VOCAB, random_prompts, save_model, say
from our_side import Ours
from rounds import ANYHOW, in_turn

from rootstock.bench.workloads import Sizes, make_workload

SHOW = "A6"
CONTEXT_TOKENS = 512
BATCHES = (1, 4, 16)
STEPS = 16  # timed, of each round
ROUNDS = 5
AGENT_ROUNDS = 2
AGENTS = Sizes(8, 8, turns=6, prefix_tokens=1024, new_tokens=(16, 96), answer_tokens=32)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--skip-agents", action="store_true")
    options.add_argument("--threads", type=int, help="of both sides; as many as torch takes unless given")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)

    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": "bfloat16"}
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name in given.models.split(","):
            path = save_model(name, Path(folder))
            if name == "80m":
                figures["float32_tokens_equal"] = float32_tokens_equal(path)
                say(f"float32: the same tokens: {figures['float32_tokens_equal']}")
            figures |= compare_on(
                name, path, given.rounds, with_agents=name == "80m" and not given.skip_agents
            )
    # Below about 0.8 other processes used these cores, and times of threads that wait for each other mean little.
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    figures["cpu_share"] = round(cpu_s / wall_s / torch.get_num_threads(), 3)
    bars = {
        f"decode_ratio_{name}_b{batch}": at_most(1.25)
        for name in given.models.split(",")
        for batch in BATCHES
    }
    figures["decode_ratios_at_goal"] = sum(figures[name] <= 1.0 for name in bars)
    if "80m" in given.models:
        bars["float32_tokens_equal"] = exactly(True)
    if "agents_times_faster" in figures:
        bars["agents_times_faster"] = at_least(3.0)
    conclude(SHOW, figures, bars)


def compare_on(name: str, path: Path, rounds: int, with_agents: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    ours, dense = Ours(path, "bfloat16", gib=2.0), Dense(path, torch.bfloat16)
    figures[f"parameters_{name}"] = ours.parameters
    prompts = random_prompts(max(BATCHES), CONTEXT_TOKENS)
    dense.prefill(prompts)
    for batch in BATCHES:
        figures |= compare_decode(name, batch, prompts[:batch], ours, dense, rounds)
    if with_agents:
        figures |= compare_agents(ours, dense)
    del ours, dense
    gc.collect()
    return figures


def compare_decode(
    name: str, batch: int, prompts: np.ndarray, ours: Ours, dense: Dense, rounds: int
) -> dict[str, Any]:
    ours.generate(list(prompts), 1)  # now they are cached, and will all begin to decode in one step
    ours.decode_step_s(prompts, STEPS)  # first uses allocate, on both sides
    dense.decode_step_s(prompts, STEPS)
    timed = in_turn(
        f"{name} B={batch}",
        lambda: ours.decode_step_s(prompts, STEPS),
        lambda: dense.decode_step_s(prompts, STEPS),
        (rounds, rounds),
        quiet=ANYHOW,
    )
    return {
        f"decode_ratio_{name}_b{batch}": round(timed.ratio, 4),
        f"decode_ms_{name}_b{batch}": round(timed.ours_ms, 3),
        f"dense_ms_{name}_b{batch}": round(timed.dense_ms, 3),
    }


def compare_agents(ours: Ours, dense: Dense) -> dict[str, Any]:
    workload = make_workload("agents", 0, AGENTS)
    pairs, computed, prompt_tokens = [], 0, 0
    ours.engine.start()
    for _ in range(AGENT_ROUNDS):
        ours_s, computed, prompt_tokens = ours.agents_s(workload)
        theirs_s = dense.agents_s(workload)
        say(f"agents: {ours_s:.2f} s, dense {theirs_s:.2f} s, {theirs_s / ours_s:.2f} times faster")
        pairs.append((ours_s, theirs_s))
    ours.engine.stop()
    return {
        "agents_times_faster": round(statistics.median(theirs / mine for mine, theirs in pairs), 3),
        "agents_s": round(statistics.median(mine for mine, _ in pairs), 3),
        "agents_dense_s": round(statistics.median(theirs for _, theirs in pairs), 3),
        "agents_prompt_tokens": prompt_tokens,
        "agents_computed_tokens": computed,
    }


def float32_tokens_equal(path: Path) -> bool:
    """Compares greedy answers to prompts of different lengths, so that the dense side pads them."""
    ours, dense = Ours(path, "float32", gib=0.5), Dense(path, torch.float32)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (40, 64, 97, 128)]
    return ours.generate(prompts, 24) == dense.generate(prompts, 24)


if __name__ == "__main__":
    main()
