"""N3: speed of a 600M Llama that is served as it is stored, in formats of 8 and 4 bits.

Cells: a decode step of B sequences of 128 tokens, and the steps from a prompt to its first token, each by a real
engine in this process, relative to the same weights in bfloat16. Rounds alternate; a ratio is the median of rounds.

Peers, over HTTP: llama.cpp's server on the same GGUF file, and vLLM on the same W4A16 checkpoint. `one` is one agent
of two turns with 512 new tokens: its median time between tokens is the decode's, its median time to the first token
the prefill's. `eight` are eight agents of four turns that share a system prompt.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, at_most, conclude
from d4_agents_http import Load, of_peer, of_rootstock
from llamas import CONTEXT_LIMIT, random_prompts, say, write_chatting_llama
from our_side import Ours
from packed_models import FORMATS_OF_SPEED, GGUF, stored_model
from peers import PeerUnavailable, llama_server, vllm_server

from rootstock.bench.workloads import Sizes, make_workload

SHOW = "N3"
BATCHES, FIRST = (1, 4, 8, 16, 32), (512, 2048)
ROUNDS, STEPS, CONTEXT = 4, 8, 128
ONE = Sizes(1, 1, turns=2, prefix_tokens=64, new_tokens=(512, 512), answer_tokens=64)
EIGHT = Sizes(8, 8, turns=4, prefix_tokens=1024, new_tokens=(16, 160), answer_tokens=64)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="600m")
    options.add_argument("--formats", default=",".join(FORMATS_OF_SPEED), help="comma-separated")
    options.add_argument("--parts", default="cells,llama_cpp,vllm", help="comma-separated")
    options.add_argument("--llama-python", default=os.environ.get("ROOTSTOCK_LLAMA_PYTHON"))
    options.add_argument("--vllm-python", default=os.environ.get("ROOTSTOCK_VLLM_PYTHON"))
    given = options.parse_args()
    threads = torch.get_num_threads()
    figures: dict[str, Any] = {"threads": threads}
    bars: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        path = write_chatting_llama(given.model, Path(folder) / given.model)
        stored = {
            format: stored_model(path, format, given.llama_python) for format in given.formats.split(",")
        }
        found = {format: each for format, each in stored.items() if each is not None}
        if "cells" in given.parts:
            figures |= cells(path, found)
            for format in found:
                bars[f"{format}_worst"] = at_most(1.0)
                bars[f"{format}_decode_1"] = at_most(0.6 if format in ("W8A16", "FP8", "Q8_0") else 0.4)
        loads = {
            name: Load(make_workload("agents", 0, sizes)) for name, sizes in (("one", ONE), ("eight", EIGHT))
        }
        for format in (
            name for name in found if name in GGUF and name != "Q4_0" and "llama_cpp" in given.parts
        ):
            file = found[format]
            context = 8 * CONTEXT_LIMIT // 2
            make = partial(llama_server, given.llama_python, file, threads, 8, context)
            figures |= against(f"llama_cpp_{format}", file, threads, loads, make)
            bars |= {
                f"llama_cpp_{format}_decode": at_least(0.9),
                f"llama_cpp_{format}_prefill": at_least(1.0),
                f"llama_cpp_{format}_eight": at_least(2.0),
            }
        if "vllm" in given.parts and "W4A16" in found and given.vllm_python:
            make = partial(vllm_server, given.vllm_python, found["W4A16"], f"0-{threads - 1}", CONTEXT_LIMIT)
            figures |= against("vllm_W4A16", found["W4A16"], threads, loads, make)
            bars["vllm_W4A16_eight"] = at_least(1.3)
    conclude(SHOW, figures, bars)


def cells(path: Path, stored: dict[str, Path]) -> dict[str, Any]:
    """Returns the ratios of all formats, each in turn with bfloat16."""
    figures: dict[str, Any] = {}
    plain = Ours(path, "bfloat16", gib=1.5)
    for format, each in stored.items():
        sides = {"plain": plain, "packed": Ours(each, "bfloat16", gib=1.5)}
        worst = 0.0
        for kind, sizes in (("decode", BATCHES), ("first", FIRST)):
            for size in sizes:
                times: dict[str, list[float]] = {name: [] for name in sides}
                for side in sides.values():
                    if kind == "decode":  # prompts are found in the cache later, so that all decode at once
                        side.generate(list(prompts_of(size)), 1)
                for number in range(-1, ROUNDS):
                    for name in list(sides)[:: 1 if number % 2 else -1]:
                        took = measured(sides[name], kind, size, number)
                        if number >= 0:  # the first round warms
                            times[name].append(took)
                ratios = [a / b for a, b in zip(times["packed"], times["plain"], strict=True)]
                ratio = statistics.median(ratios)
                figures[f"{format}_{kind}_{size}"] = round(ratio, 3)
                worst = max(worst, ratio)
        figures[f"{format}_worst"] = round(worst, 3)
        say(f"{format}: { {k: v for k, v in figures.items() if k.startswith(format + '_')} }")
        del sides
    return figures


def prompts_of(size: int) -> np.ndarray:
    return random_prompts(size, CONTEXT, seed=size) % 1000 + 10


def measured(side: Ours, kind: str, size: int, number: int) -> float:
    if kind == "decode":
        return side.decode_step_s(prompts_of(size), STEPS)
    return side.first_token_s(random_prompts(1, size, seed=100 * size + number)[0] % 1000 + 10)


def against(name: str, path: Path, threads: int, loads: dict[str, Load], make: Any) -> dict[str, Any]:
    """Runs ours before and after a peer, and returns how many times as fast ours is."""
    before = of_rootstock(path, threads, loads)
    try:
        theirs = of_peer(make(), loads, str(path) if path.is_dir() else None)
    except PeerUnavailable as error:
        say(f"{name}: could not be measured: {error}")
        return {f"could_not_{name}": str(error)}
    after = of_rootstock(path, threads, loads)

    def times(of: Any) -> float:
        return round(statistics.mean(of(theirs) / of(ours) for ours in (before, after)), 3)

    figures = {
        f"{name}_decode": times(lambda outcomes: outcomes["one"].inter_token.p50),
        f"{name}_prefill": times(lambda outcomes: outcomes["one"].ttft.p50),
        f"{name}_eight": times(lambda outcomes: outcomes["eight"].wall_s),
    }
    for who, outcomes in (("ours", after), ("theirs", theirs)):
        for load, outcome in outcomes.items():
            say(
                f"{name} {who} {load}: {outcome.wall_s:.2f} s, first token {outcome.ttft.p50 * 1e3:.0f} ms, between "
                f"tokens {outcome.inter_token.p50 * 1e3:.1f} ms"
            )
    return figures


if __name__ == "__main__":
    main()
