"""D6: overhead of the server: tokens/s through HTTP streaming against the engine in process, at 32 streams.

One process has the engine and the HTTP server, as `rootstock serve` has them. A round asks 32 requests at once,
either of the engine itself (`Engine.submit`, events to a sink) or through 32 connections of a client in a process of
its own; rounds alternate, the ratio is the median over pairs of neighbouring rounds. Prompts are cached beforehand,
so that nearly all of a round is decoding. Both sides detokenize: the tokenizer has a visible piece for each
token, so that every token is a chunk.

The client is as lean as possible (`streaming_client.py`), because it shares the cores with the engine. Further
figures are its CPU seconds, and the ratio with OpenAI's own client in its place, which parses every chunk into
objects.

Threads wait for each other as in the command line (`rootstock.openmp`).

The model is small on purpose: with short steps the server's work per token weighs most.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rootstock.openmp import wait_briefly

wait_briefly()  # torch reads it when it is loaded

import torch  # noqa: E402
from common import argument_parser, at_least, conclude  # noqa: E402
from llamas import write_streaming_llama  # noqa: E402
from rounds import ANYHOW, in_turn  # noqa: E402
from streaming_client import ClientProcess  # noqa: E402

from asking import greedy  # noqa: E402
from rootstock.config import CacheConfig, EngineConfig, ModelConfig  # noqa: E402
from rootstock.engine.build import build_engine  # noqa: E402
from rootstock.engine.engine import Engine  # noqa: E402
from rootstock.engine.request import Event, Failed, Finished  # noqa: E402
from rootstock.server.app import create_app  # noqa: E402
from rootstock.server.http.listen import running  # noqa: E402

SHOW = "D6"
STREAMS = 32
PROMPT_TOKENS = 64
TOKENS = 128
ROUNDS = 5
OPENAI_ROUNDS = 2


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="80m", choices=("80m", "600m"))
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--tokens", type=int, default=TOKENS)
    given = options.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = write_streaming_llama(Path(folder) / given.model, given.model)
        made = build_engine(
            ModelConfig(str(path), device="cpu", dtype="bfloat16"),
            CacheConfig(budget_bytes=2 * 1024**3),
            EngineConfig(max_batch=STREAMS),
        )
        app = create_app(made)
        with made.engine, running(app, made.engine) as url:
            figures = measure(made.engine, url, given.rounds, given.tokens)
    figures |= {"model": given.model, "streams": STREAMS, "threads": torch.get_num_threads()}
    conclude(SHOW, figures, {"http_to_in_process": at_least(0.97)})


def measure(engine: Engine, url: str, rounds: int, tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(300, 32_000, (STREAMS, PROMPT_TOKENS)).astype(np.int32)
    asked = prompts.tolist()
    answers: list[dict[str, Any]] = []

    def in_process() -> float:
        return in_process_s(engine, prompts, tokens)

    def over_http(client: ClientProcess) -> float:
        answers.append(client.ask(asked, tokens))
        assert answers[-1]["tokens"] == STREAMS * tokens, answers[-1]
        seconds: float = answers[-1]["seconds"]
        return seconds

    with ClientProcess(url) as client:
        client.ask(asked, 8)  # now everything is cached, and first uses have allocated
        in_process_s(engine, prompts, 8)
        lean = in_turn(
            "in process",
            in_process,
            lambda: over_http(client),
            (rounds, rounds),
            quiet=ANYHOW,
            other="over HTTP",
        )
        told = answers[-1]
    with ClientProcess(url, "--openai") as heavy:
        heavy.ask(asked, 8)
        openai = [in_process() / over_http(heavy) for _ in range(OPENAI_ROUNDS)]
    made = STREAMS * tokens
    return {
        "http_to_in_process": round(lean.ratio, 4),
        "spread": [round(min(lean.ratios), 4), round(max(lean.ratios), 4)],
        "in_process_tokens_per_s": round(made / lean.ours_ms * 1e3, 1),
        "http_tokens_per_s": round(made / lean.dense_ms * 1e3, 1),
        "chunks_per_token": round(told["chunks"] / made, 4),
        "client_cpu_share": round(told["cpu_s"] / told["seconds"], 4),
        "with_openai_client": round(statistics.median(openai), 4),
    }


def in_process_s(engine: Engine, prompts: np.ndarray, tokens: int) -> float:
    """Returns the seconds from the first submission to the last end."""
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    counts = [0] * len(prompts)

    def sink(event: Event, index: int) -> None:
        if isinstance(event, Finished | Failed):
            ended.put(event)
        else:
            counts[index] += 1

    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(greedy(prompt, tokens), lambda event, index=index: sink(event, index))
    ends = [ended.get() for _ in prompts]
    seconds = time.perf_counter() - began
    assert all(isinstance(end, Finished) for end in ends), ends
    assert counts == [tokens] * len(prompts)
    return seconds


if __name__ == "__main__":
    main()
