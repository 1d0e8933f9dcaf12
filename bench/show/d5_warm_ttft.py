"""D5: time to the first token of a warm prompt of 4k with 32 new tokens, against the compute floor of 32 tokens.

The floor is one forward of 32 tokens over 4,096 cached positions by the runtime alone: a batch of the engine is
recorded and run again on the engine's thread, with no scheduling, sampling, text or HTTP. A round measures the
floor, then a request of the engine (submission to first token event), then one over HTTP (the first byte sent to the
first event received, by a client in a process of its own). Every request has the 4,096 cached tokens and 32 that were
never seen. Ratios are medians over rounds, each against the floors before and after it. Prompts are token ids, so
that no time includes tokenization.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_most, conclude
from llamas import write_streaming_llama
from streaming_client import ClientProcess

from asking import greedy
from rootstock.config import CacheConfig, ModelConfig
from rootstock.engine.build import assemble
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Failed, Finished, TokenEvent
from rootstock.runtime.base import Batch, Logits
from rootstock.runtime.torch.runner import load_model
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.text.tokenizer import HFTokenizer

SHOW = "D5"
CACHED_TOKENS = 4096
NEW_TOKENS = 32
ROUNDS = 25


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="80m", choices=("80m", "600m"))
    options.add_argument("--rounds", type=int, default=ROUNDS)
    given = options.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = write_streaming_llama(Path(folder) / given.model, given.model)
        runtime = load_model(ModelConfig(str(path), device="cpu", dtype="bfloat16"))
        made = assemble(runtime, HFTokenizer.load(str(path)), CacheConfig(budget_bytes=2 * 1024**3))
        engine = made.engine
        batches: list[Batch] = []
        forward = runtime.forward

        def remembered(batch: Batch) -> Logits:
            batches.append(batch)
            return forward(batch)

        with engine, running(create_app(made), engine) as url:
            runtime.forward = remembered  # type: ignore[method-assign]
            ask_engine(engine, prompt(0))
            ask_engine(engine, prompt(1))
            runtime.forward = forward  # type: ignore[method-assign]
            floor = [batch for batch in batches if _is_warm(batch)][-1]

            def floor_s() -> float:
                began = time.perf_counter()
                forward(floor)
                return time.perf_counter() - began

            figures = measure(engine, url, lambda: engine.call(floor_s), given.rounds)
    figures |= {"model": given.model, "threads": torch.get_num_threads()}
    conclude(SHOW, figures, {"http_to_floor": at_most(1.3), "engine_to_floor": at_most(1.3)})


def measure(engine: Engine, url: str, floor_s: Any, rounds: int) -> dict[str, Any]:
    floors, inside, over_http = [], [], []
    with ClientProcess(url) as client:
        for _ in range(3):  # first uses allocate
            floor_s()
            assert ask_http(client, prompt(2)) > 0
        floors.append(floor_s())
        for i in range(rounds):
            inside.append(ask_engine(engine, prompt(2 * i + 3)))
            over_http.append(ask_http(client, prompt(2 * i + 4)))
            floors.append(floor_s())
    around = [(before + after) / 2 for before, after in pairwise(floors)]
    figures: dict[str, Any] = {"floor_ms": round(statistics.median(floors) * 1e3, 3)}
    for name, times in (("engine", inside), ("http", over_http)):
        ratios = [each / floor for each, floor in zip(times, around, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        figures[f"{name}_to_floor"] = round(statistics.median(ratios), 4)
        figures[f"{name}_quartiles"] = [round(quartiles[0], 4), round(quartiles[2], 4)]
        figures[f"{name}_ms"] = round(statistics.median(times) * 1e3, 3)
    return figures


def _is_warm(batch: Batch) -> bool:
    return [(each.past, len(each.tokens)) for each in batch.segments] == [(CACHED_TOKENS, NEW_TOKENS)]


def prompt(seed: int) -> np.ndarray:
    """Returns the same 4,096 tokens for every seed, and 32 of its own."""
    shared = np.random.default_rng(0).integers(300, 32_000, CACHED_TOKENS)
    own = np.random.default_rng([seed, 1]).integers(300, 32_000, NEW_TOKENS)
    return np.concatenate([shared, own]).astype(np.int32)


def ask_engine(engine: Engine, tokens: np.ndarray) -> float:
    """Returns the seconds to the first token event."""
    events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    request = greedy(tokens, 2)
    began = time.perf_counter()
    engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
    first_at, event = events.get()
    assert isinstance(event, TokenEvent), event
    while not isinstance(event, Finished | Failed):
        _, event = events.get()
    return first_at - began


def ask_http(client: ClientProcess, tokens: np.ndarray) -> float:
    answer = client.ask([tokens.tolist()], 2)
    assert answer["cached_tokens"] >= CACHED_TOKENS, answer
    first_s: float = answer["first_s"][0]
    return first_s


if __name__ == "__main__":
    main()
