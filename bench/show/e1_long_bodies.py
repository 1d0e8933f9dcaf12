"""E1: long bodies beside running streams: the gaps between tokens, /health, and memory.

`rootstock serve` runs an 80M Llama in a process of its own, with 8 streams. Beside them a client sends conversations
of 360 kB, 3.6 MB, 8 MB and 63 MB of words to each route that reads one, and the longest prompts that are accepted.
The long bodies are refused, except for those whose tokens are only to be counted. The tokenizer is a byte-level BPE
with merges, and has tokens of 128 spaces, as real ones have: a text may therefore have 128 characters for each token
of the limit before its characters alone refuse it.

A stream's gap is the time between two of its chunks. A gap beside a body is compared with the longest gap of quiet
time. An accepted prompt is also computed: it is compared with as many token ids, which need no tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from beside import Health, beside
from common import Bar, argument_parser, at_least, at_most, conclude, exactly
from peers import PeerProcess, rootstock_server

SHOW = "E1"
STREAMS = 8
REFUSED_BYTES = {"360 kB": 360_000, "3.6 MB": 3_600_000, "8 MB": 8_000_000, "63 MB": 63_000_000}
CHAT, MESSAGES, COUNT, RESPONSES = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)
CONVERSATIONS = (CHAT, MESSAGES, COUNT, RESPONSES)
PROMPTS = ("/v1/completions", MESSAGES, RESPONSES)  # of accepted prompts, in turn
QUIET_S = 8.0
ANSWERED_WITHIN_S = (
    1_800.0  # a slow machine computes the longest prompt for several minutes beside the streams
)
CONTEXT = 16_384
CHUNK_TOKENS = 64  # of a step: a gap beside a chunk of 512 takes seconds, and varies by more than the bar
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")  # the first ids


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="of each body; the longest gap counts")
    options.add_argument("--part", choices=("refused", "accepted", "both"), default="both")
    options.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options for the server")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with rootstock_server(model, "--chunk-tokens", str(CHUNK_TOKENS), *given.serve) as process:
            figures = measure(Server(process), given.rounds, given.part)
    kept = at_most(max(100.0, 0.05 * figures["rss_before_mb"]))
    bars: dict[str, Bar] = {"worst_health_ms": at_most(200)}
    if given.part != "accepted":
        bars |= {
            "refused_or_counted": exactly(len(REFUSED_BYTES) * len(CONVERSATIONS) * given.rounds),
            "worst_gap_over_quiet_ms": at_most(100),
            "kept_after_refused_mb": kept,
        }
    if given.part != "refused":
        bars |= {
            "accepted": exactly(given.rounds),
            "routes_with_accepted": at_least(min(given.rounds, len(PROMPTS))),
            "accepted_gap_over_ids_ms": at_most(100),
            "kept_after_accepted_mb": kept,
        }
    conclude(SHOW, figures, bars)


# ---- the server


class Server:
    def __init__(self, process: PeerProcess) -> None:
        self._address = process.url.removeprefix("http://")
        self._pid = process.pid

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address, timeout=ANSWERED_WITHIN_S)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            # A body that is too large is refused before all of it is sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def uncached_mb(self) -> float:
        """Returns the resident memory without the cache's."""
        return self.rss_mb() - float(self.ask("GET", "/v1/cache/stats")[1]["cache"]["resident_bytes"]) / 1e6


def write_model(directory: Path) -> Path:
    """Writes the 80M Llama with a tokenizer that has merges, and a chat template."""
    from llamas import LONG_CONTEXT, write_llama
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    assert LONG_CONTEXT == CONTEXT
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=31_000,
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(2_000_000)], trainer)
    tokenizer.add_tokens([AddedToken(" " * length, normalized=False) for length in (32, 64, 128)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    wrapped.chat_template = template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    write_llama(
        directory, tokenizer.get_vocab_size()
    )  # each token that it can choose has text, and is a chunk
    wrapped.save_pretrained(directory)
    return directory


SYLLABLES = "ka to ri men so lu ver an dis pro te gol in ma su ber"


def words(count_bytes: int, seed: int = 0) -> str:
    """Draws made-up words: about four characters a token."""
    rng = np.random.default_rng(seed)
    made = ["".join(rng.choice(SYLLABLES.split(), rng.integers(1, 5))) for _ in range(20_000)]
    chosen = rng.zipf(1.3, count_bytes // 6 + 16) % len(made)
    return " ".join(made[index] for index in chosen)[:count_bytes].ljust(count_bytes, "x")


# ---- the measurement


class Streams:
    """Streams that run until the end of the block, each on a thread, and the gaps between two chunks.

    Tokens without a text of their own (`silent`) are not sampled: a stream has no chunk for them.
    """

    def __init__(self, server: Server, silent: Sequence[int] = range(len(SPECIAL))) -> None:
        self._server = server
        self._bias = {str(id): -100 for id in silent}
        self._gaps: queue.SimpleQueue[float] = queue.SimpleQueue()  # seconds
        self._begun = threading.Semaphore(0)

    def wait_until_begun(self) -> None:
        for _ in range(STREAMS):
            assert self._begun.acquire(timeout=120)

    def gaps_ms(self) -> list[float]:
        """Returns the gaps since the last call."""
        found = []
        while not self._gaps.empty():
            found.append(self._gaps.get() * 1000)
        return found

    def run(self, index: int, over: threading.Event) -> None:
        begun = False
        while not over.is_set():  # a stream ends with the context: then another begins
            connection = self._server.connect()
            body = {
                "prompt": [100 + index, 200, 300],
                "max_tokens": 8_000,
                "temperature": 0,
                "logit_bias": self._bias,
                "stream": True,
            }
            connection.request(
                "POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            last: float | None = None
            while not over.is_set():
                line = answer.readline()
                if line.startswith(b"data: [DONE]") or not line:
                    break
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                if last is not None:
                    self._gaps.put(now - last)
                elif not begun:
                    begun = True
                    self._begun.release()
                last = now
            connection.close()


@contextlib.contextmanager
def load(server: Server) -> Iterator[tuple[Streams, Health]]:
    """Runs the streams and a poll of /health until the end of the block."""
    streams, health = Streams(server), Health(server.connect(), pause_s=0.02)
    with beside(health.run, *(partial(streams.run, index) for index in range(STREAMS))):
        streams.wait_until_begun()
        yield streams, health


def measure(server: Server, rounds: int, part: str) -> dict[str, Any]:
    bodies = dict[str, dict[str, bytes]]()  # by size and route; made before: encoding would delay the polls
    for size, count_bytes in REFUSED_BYTES.items():
        text = words(count_bytes - 100, seed=1)
        chat = conversation_of(CHAT, text)
        bodies[size] = dict.fromkeys(CONVERSATIONS, chat) | {RESPONSES: conversation_of(RESPONSES, text)}
    figures: dict[str, Any] = {"refused_or_counted": 0, "accepted": 0}
    quiet: list[float] = []
    worst: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    # First uses allocate, scratch memory for the longest context too.
    with load(server):
        for route in CONVERSATIONS:
            server.ask("POST", route, conversation_of(route, words(30_000, seed=2)))
        server.ask("POST", "/v1/completions", prompt_of(longest_ids(seed=99)))
        time.sleep(2)
    figures["rss_before_mb"], before_mb = round(server.rss_mb(), 1), server.uncached_mb()
    if part == "accepted":
        return figures | accepted(server, rounds, before_mb)
    with load(server) as (streams, health):
        for _ in range(rounds):
            streams.gaps_ms()
            time.sleep(QUIET_S)
            quiet += streams.gaps_ms()
            for size, of_routes in bodies.items():
                for route, body in of_routes.items():
                    name = f"{size} to {route}"
                    began = time.perf_counter()
                    status, answer = server.ask("POST", route, body)
                    times.setdefault(name, []).append(time.perf_counter() - began)
                    counted = route == COUNT and status == 200 and answer["input_tokens"] > CONTEXT
                    figures["refused_or_counted"] += counted or status in (400, 413)
                    figures[f"answer to {name}"] = answer if counted else answer["error"]["message"]
                    time.sleep(0.5)
                    worst[name] = max(worst.get(name, 0.0), max(streams.gaps_ms()))
                    print(f"{name}: {times[name][-1]:.3f} s, longest gap {worst[name]:.1f} ms", flush=True)
        figures["worst_health_ms"] = round(health.longest_ms, 1)
    time.sleep(2)
    figures |= {
        "quiet_gap_ms": round(max(quiet), 1),
        "worst_gap_ms": {name: round(gap, 1) for name, gap in worst.items()},
        "worst_gap_over_quiet_ms": round(max(worst.values()) - max(quiet), 1),
        "seconds_until_answered": {name: round(max(each), 3) for name, each in times.items()},
        "kept_after_refused_mb": round(server.uncached_mb() - before_mb, 1),
    }
    print(json.dumps(figures), flush=True)
    if part == "both":
        of_refused = figures["worst_health_ms"]
        figures |= accepted(server, rounds, before_mb)
        figures["worst_health_ms"] = max(of_refused, figures["worst_health_ms"])
    return figures


def accepted(server: Server, rounds: int, before_mb: float) -> dict[str, Any]:
    """Measures the longest prompts that fit, as text and as token ids, each new to the cache.

    Each round sends the text to another route.
    """
    as_text: list[float] = []
    as_ids: list[float] = []
    count, routes = 0, set[str]()
    with load(server) as (streams, health):
        for turn in range(rounds):
            text, route = longest_accepted(server, seed=10 + turn), PROMPTS[turn % len(PROMPTS)]
            pairs: list[tuple[str | list[int], list[float]]] = [(longest_ids(turn), as_ids), (text, as_text)]
            if turn % 2:  # streams are longer and slower beside the second
                pairs.reverse()
            for prompt, gaps in pairs:
                streams.gaps_ms()
                as_chat = prompt is text and route in CONVERSATIONS
                to = route if as_chat else "/v1/completions"
                body = conversation_of(route, text) if as_chat else prompt_of(prompt)
                status, answer = server.ask("POST", to, body)
                if prompt is text and status == 200 and prompt_tokens(answer) > 0.95 * CONTEXT:
                    count += 1
                    routes.add(to)
                gaps.append(max(streams.gaps_ms()))
                print(f"accepted, {type(prompt).__name__} to {to}: gap {gaps[-1]:.1f} ms", flush=True)
    time.sleep(2)
    return {
        "accepted": count,
        "routes_with_accepted": len(routes),
        "accepted_gap_ms": round(max(as_text), 1),
        "accepted_gap_of_ids_ms": round(max(as_ids), 1),
        "accepted_gap_over_ids_ms": round(max(as_text) - max(as_ids), 1),
        "worst_health_ms": round(health.longest_ms, 1),
        "kept_after_accepted_mb": round(server.uncached_mb() - before_mb, 1),
    }


def longest_accepted(server: Server, seed: int) -> str:
    """Returns as much text as the context takes, by asking how many tokens a part of it has."""
    text = words(8 * CONTEXT, seed)
    part = text[:20_000]
    body = json.dumps({"prompt": part}).encode()
    status, answer = server.ask("POST", "/v1/cache/explain", body)
    assert status == 200, answer
    return text[: int(0.98 * CONTEXT * len(part) / answer["prompt_tokens"])]


def longest_ids(seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300, 3_000, int(0.98 * CONTEXT)).tolist()
    return ids


def prompt_of(prompt: str | list[int]) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 1}).encode()


def conversation_of(route: str, text: str) -> bytes:
    """Returns the body of a conversation with one message."""
    if route == RESPONSES:
        return json.dumps({"input": text, "max_output_tokens": 1}).encode()
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()


def prompt_tokens(answer: dict[str, Any]) -> int:
    """Returns the tokens of an answer's prompt, whose names differ between the APIs."""
    usage = answer["usage"]
    parts = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(part, 0) for part in parts)


if __name__ == "__main__":
    main()
