"""E4: `echo` with log-probabilities and many choices, beside a stream and /health.

A server in a process of its own serves the 80M model. One client streams tokens, one polls /health, and one asks for
32 choices of a prompt of 1,000 tokens with 20 log-probabilities a position, whole and then streamed. The same request
without log-probabilities is the comparison: its prompt takes the same forwards. Every prompt is new to the cache.

`score_chunk_ms` is the CPU time that scoring takes of the engine's thread for one chunk of a prompt, without the
forward.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from beside import Health, beside
from common import argument_parser, at_most, conclude, exactly
from peers import rootstock_server

SHOW = "E4"
CHOICES = 32
PROMPT_TOKENS = 1000
TOP_LOGPROBS = 20
MAX_TOKENS = 16
CHUNK_TOKENS = 512
STREAM_TOKENS = 4000
PAUSE_S = 0.01  # between two requests to /health


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--model", default="80m", choices=("80m", "tiny"), help="tiny: hardly any forward")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write(given.model, Path(folder) / given.model)
        with rootstock_server(path, "--chunk-tokens", str(CHUNK_TOKENS)) as process:
            figures = measure(Client(process.url), process.pid, given.rounds)
    figures |= {f"score_chunk_ms_{vocab}": score_chunk_ms(vocab) for vocab in (32_000, 152_000)}
    added = {f"{kind}_gap_over_plain_ms": at_most(100.0) for kind in ("whole", "stream")}
    latency = {f"{kind}_health_ms": at_most(200.0) for kind in ("whole", "stream")}
    conclude(SHOW, figures, {**added, **latency, "prompts_computed": exactly(1), "choices": exactly(CHOICES)})


def write(model: str, directory: Path) -> Path:
    if model == "tiny":
        from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model

        directory.mkdir()
        write_tiny_model(TinyModelSpec(), directory)
        return directory
    from llamas import write_streaming_llama

    return write_streaming_llama(directory)


class Client:
    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")
        self._rng = np.random.default_rng(0)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address, timeout=600)

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = self.connection()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def get(self, path: str) -> Any:
        connection = self.connection()
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        prompt: list[int] = self._rng.integers(300, 1000, tokens).tolist()
        return prompt

    def many_choices(self, **fields: Any) -> bytes:
        body = {
            "prompt": self.prompt(),
            "n": CHOICES,
            "max_tokens": MAX_TOKENS,
            "echo": True,
            "ignore_eos": True,
        }
        return self.post("/v1/completions", body | fields).read()


class Stream:
    """Stream of tokens, with the time of each line."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._streaming = threading.Event()
        self.token_at: list[float] = []

    def wait_until_begun(self) -> None:
        assert self._streaming.wait(60), "no stream"

    def run(self, over: threading.Event) -> None:
        body = {
            "prompt": self._client.prompt(64),
            "stream": True,
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        response = self._client.post("/v1/completions", body)
        while not over.is_set() and response.readline():
            self.token_at.append(time.perf_counter())
            if len(self.token_at) == 20:
                self._streaming.set()
        assert over.is_set(), "the stream ended first"
        response.close()

    @property
    def longest_gap_ms(self) -> float:
        return float(np.diff(self.token_at).max() * 1e3)


def measure(client: Client, pid: int, rounds: int) -> dict[str, Any]:
    client.many_choices()  # first uses allocate
    client.many_choices(logprobs=1)
    figures: dict[str, Any] = {"rss_before_mb": _memory_mb(pid, "VmRSS")}
    asks: dict[str, Callable[[], bytes]] = {
        "plain": lambda: client.many_choices(),
        "whole": lambda: client.many_choices(logprobs=TOP_LOGPROBS),
        "stream": lambda: client.many_choices(logprobs=TOP_LOGPROBS, stream=True),
    }
    for kind, ask in asks.items():
        gaps, healths, took = [], [], []
        for _ in range(rounds):
            before = client.get("/v1/cache/stats")["counters"]
            stream, health = Stream(client), Health(client.connection(), PAUSE_S)
            with beside(stream.run, health.run):
                stream.wait_until_begun()
                began = time.perf_counter()
                answer = ask()
                took.append(time.perf_counter() - began)
                streamed = len(stream.token_at)
                time.sleep(0.2)
            after = client.get("/v1/cache/stats")["counters"]
            gaps.append(stream.longest_gap_ms)
            healths.append(health.longest_ms)
        figures |= {
            f"{kind}_s": round(min(took), 2),
            f"{kind}_gap_ms": round(max(gaps), 1),
            f"{kind}_health_ms": round(max(healths), 1),
            f"{kind}_mb": round(len(answer) / 1e6, 1),
        }
        if kind == "whole":
            made = client.get("/v1/cache/stats")["counters"]["computed_tokens"] - before["computed_tokens"]
            assert made == after["computed_tokens"] - before["computed_tokens"]
            # Without decodes, and the rest of a block for each choice.
            own = made - streamed - CHOICES * (MAX_TOKENS + 32)
            figures["prompts_computed"] = 1 + max(0, own - 64) // PROMPT_TOKENS
            figures["choices"] = _complete_choices(answer)
        print(kind, {name: value for name, value in figures.items() if name.startswith(kind)}, flush=True)
    for kind in ("whole", "stream"):
        figures[f"{kind}_gap_over_plain_ms"] = round(figures[f"{kind}_gap_ms"] - figures["plain_gap_ms"], 1)
    return figures | {"peak_mb": _memory_mb(pid, "VmHWM")}


def _complete_choices(answer: bytes) -> int:
    """Counts choices with every requested log-probability and, for the prompt, those of the first choice."""
    choices = json.loads(answer)["choices"]
    first = choices[0]["logprobs"]["token_logprobs"][:PROMPT_TOKENS]
    return sum(
        len(choice["logprobs"]["top_logprobs"]) == PROMPT_TOKENS + MAX_TOKENS
        and choice["logprobs"]["token_logprobs"][:PROMPT_TOKENS] == first
        for choice in choices
    )


def score_chunk_ms(vocab: int) -> float:
    from rootstock.engine.sampling import score_prompt

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((CHUNK_TOKENS, vocab), dtype=np.float32)
    following = rng.integers(0, vocab, CHUNK_TOKENS).astype(np.int32)
    times = []
    for _ in range(5):
        began = time.thread_time()
        score_prompt(logits, following, TOP_LOGPROBS)
        times.append(time.thread_time() - began)
    return round(min(times) * 1e3, 1)


def _memory_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return round(int(line.split()[1]) / 1e3, 1)
    raise AssertionError(name)


if __name__ == "__main__":
    main()
