"""H3: tokens that the second turn of a reasoning model computes, with and without idle work, and the delay of others.

Two servers run side by side, one with idle work and one without. The model is a small, untrained Llama whose sampler
writes scripted answers with reasoning, and its chat template has the form of Qwen3's: it drops the reasoning of
earlier turns. Agents hold conversations of several turns with pauses between them. Others send single prompts at
random times, also into the pauses. Rounds alternate between the servers, each with the same arrivals for both.

Uncached tokens are those of second turns, as the servers' usage tells them. The time to the first token of the others
is measured by the client, over HTTP.

    python bench/show/h3_idle.py --rounds 10
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import ROOT, argument_parser, at_most, conclude

SHOW = "H3"
AGENTS, TURNS = 4, 3
OTHERS_PER_S = 3.0  # prompts of 512 tokens: the engine works for a third of the time or more
PAUSE_S = 4.0  # mean, between two turns of an agent: a person who reads, or a tool that runs
ROUND_S = 20.0  # in which others arrive
FOLLOW_UP_WORDS = 15  # a question behind an answer of 60 words, or the result of a tool
WORDS = "the reader asks which of the books in the small library tell about rivers and how far they run to the sea"
TEMPLATE = ROOT / "tests" / "engine" / "prompts" / "templates" / "qwen3.jinja"


# ------------------------------------------------------------------------------------------- a server


def text_of(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS.split(), words).tolist())


def serve(folder: Path, port: int, idle_work: str) -> None:
    """Runs a server until a signal ends the process."""
    import scripted_server
    from tokenizers import Tokenizer

    from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model
    from rootstock.cli import main as command

    def scripts_for(prompt: str) -> list[str]:
        seed = sum(prompt.encode()) % 100_003
        return [f"<think>\n{text_of(seed, 40)}\n</think>\n\n{text_of(seed + 1, 60)}"]

    scripted_server.scripts_for = scripts_for
    model = ensure_tiny_model(TinyModelSpec(layers=4), folder)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    scripted_server.use_sampler(scripted_server.scripted_sampler(tokenizer))
    template = TEMPLATE.read_text()
    for before, after in (
        ("'<|im_start|>' + message.role + '\\n'", "'<|' + message.role + '|>\\n'"),
        ("<|im_end|>", "<|turn_end|>"),
        *((f"<|im_start|>{role}", f"<|{role}|>") for role in ("system", "user", "assistant")),
    ):
        template = template.replace(before, after)
    file = folder / "template.jinja"
    file.write_text(template)
    sys.argv = ["rootstock", "serve", str(model), "--chat-template", str(file), "--device", "cpu"]
    sys.argv += ["--threads", "1", "--port", str(port), f"--{idle_work}"]
    command.main()


# ------------------------------------------------------------------------------------------- the load


@dataclass
class Told:
    second_turns: list[int] = field(default_factory=list)  # uncached tokens
    others_s: list[float] = field(default_factory=list)  # to the first token
    errors: int = 0


async def first_token(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[float, str, Any]:
    """Streams a request. Returns the time to its first event, its text, and its usage."""
    began, first, text, usage = time.perf_counter(), 0.0, "", None
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - began
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += (choice.get("delta") or {}).get("content") or ""
    return first, text, usage


async def agent(client: httpx.AsyncClient, seed: int, told: Told) -> None:
    rng = np.random.default_rng(seed)
    messages: list[dict[str, str]] = [{"role": "system", "content": text_of(0, 150)}]
    for turn in range(TURNS):
        await asyncio.sleep(float(rng.exponential(PAUSE_S)))
        words = FOLLOW_UP_WORDS if turn else 60
        messages.append({"role": "user", "content": f"{seed} {text_of(seed + turn, words)}"})
        body = {"messages": messages, "max_tokens": 400}
        _, text, usage = await first_token(client, "/v1/chat/completions", body)
        if turn == 1:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            told.second_turns.append(usage["prompt_tokens"] - cached)
        messages.append({"role": "assistant", "content": text})


async def others(client: httpx.AsyncClient, seed: int, told: Told) -> None:
    rng = np.random.default_rng(seed)
    tasks: list[asyncio.Task[None]] = []

    async def one(ids: list[int]) -> None:
        first, _, _ = await first_token(client, "/v1/completions", {"prompt": ids, "max_tokens": 1})
        told.others_s.append(first)

    end = time.perf_counter() + ROUND_S
    while time.perf_counter() < end:
        await asyncio.sleep(float(rng.exponential(1 / OTHERS_PER_S)))
        tasks.append(asyncio.create_task(one(rng.integers(20, 1000, 512).tolist())))
    await asyncio.gather(*tasks)


async def play(url: str, seed: int, told: Told) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        agents = [agent(client, seed * 100 + i, told) for i in range(AGENTS)]
        await asyncio.gather(others(client, seed, told), *agents)


def stats(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/cache/stats", timeout=60.0).json()
    return found


def until_idle(url: str) -> None:
    """Waits until a server has nothing left to do, so that it takes no time from the other one."""
    quiet = 0
    while quiet < 4:
        idle = stats(url)["idle"]
        quiet = quiet + 1 if idle is None or not idle["waiting"] else 0
        time.sleep(0.1)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--serve", nargs=3, metavar=("FOLDER", "PORT", "IDLE_WORK"), help="internal")
    given = options.parse_args()
    if given.serve is not None:
        serve(Path(given.serve[0]), int(given.serve[1]), given.serve[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        told = {"no-idle-work": Told(), "idle-work": Told()}
        try:
            for name in told:
                port = free_port()
                place = Path(folder) / name
                place.mkdir()
                command = [sys.executable, __file__, "--serve", str(place), str(port), name]
                servers[name] = (
                    f"http://127.0.0.1:{port}",
                    subprocess.Popen(command, stdout=subprocess.DEVNULL),
                )
            for url, process in servers.values():
                wait_for(url, process)
            for round in range(given.rounds + 1):
                for name in sorted(servers, reverse=bool(round % 2)):
                    url, _ = servers[name]
                    asyncio.run(play(url, round, told[name] if round else Told()))  # the first one warms up
                    until_idle(url)
                    print(f"round {round}, {name}", file=sys.stderr, flush=True)
            after = stats(servers["idle-work"][0])
        finally:
            for _, process in servers.values():
                process.terminate()
                process.wait()
    figures: dict[str, Any] = {}
    for name, one in told.items():
        key = name.replace("-", "_")
        figures[f"uncached_second_turn_{key}"] = statistics.median(one.second_turns)
        figures[f"others_ttft_p50_ms_{key}"] = 1000 * float(np.percentile(one.others_s, 50))
        figures[f"others_ttft_p95_ms_{key}"] = 1000 * float(np.percentile(one.others_s, 95))
        figures[f"others_{key}"] = len(one.others_s)
    figures["uncached_ratio"] = (
        figures["uncached_second_turn_idle_work"] / figures["uncached_second_turn_no_idle_work"]
    )
    figures["ttft_p95_ratio"] = (
        figures["others_ttft_p95_ms_idle_work"] / figures["others_ttft_p95_ms_no_idle_work"]
    )
    figures["idle_tokens"] = after["cache"]["idle_tokens"]
    figures["idle_hit_tokens"] = after["cache"]["idle_hit_tokens"]
    figures["longest_idle_step_ms"] = 1000 * after["idle"]["longest_step_s"]
    conclude(SHOW, figures, {"uncached_ratio": at_most(0.5), "ttft_p95_ratio": at_most(1.02)})


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"{SHOW}: a server ended before it was ready")


if __name__ == "__main__":
    main()
