"""D4: the `agents` workload end to end over HTTP, against dense `generate`, transformers' server and llama.cpp's.

Eight agents with one system prompt of 2,048 words (a word is a token), eight turns of 16 to 160 new words, 64 tokens
out. All sides have the same weights in bfloat16 (or --dtype), tokenizer, chat template and number of threads. All
answers are greedy and have 64 tokens, because the model cannot generate an end (llamas.py).

  ours           `rootstock serve`, defaults but for dtype, threads and the memory of its cache
  dense          one left-padded `transformers.generate` a turn over all agents' prompts, in this process: no HTTP
  transformers   `transformers serve --continuous-batching`, pages of 32 tokens, as many as the workload needs twice
  llama.cpp      its own server (package xllamacpp) on a GGUF file of the same weights, with the slots that did best

Options or the environment (ROOTSTOCK_TRANSFORMERS_PYTHON, ROOTSTOCK_LLAMA_PYTHON) name the interpreters of the peers.
A missing peer is reported, and misses its bar.

Each server starts with nothing cached and is stopped before the next; a first short request is outside the time.
Ours is run before and after each of the others, and a ratio is that peer's wall time by the mean of the two.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, conclude
from dense_side import Dense, Stopwatch
from llamas import say, write_chatting_llama
from neighbours import Neighbours
from peers import PeerProcess, PeerUnavailable, llama_server, transformers_server
from transformers import AutoTokenizer

from rootstock.bench.play import play
from rootstock.bench.rows import Quantiles, quantiles
from rootstock.bench.serving import ServerProcess
from rootstock.bench.targets import UrlTarget
from rootstock.bench.workloads import (
    Sizes,
    Workload,
    WorkloadConversation,
    WorkloadTurn,
    as_text,
    make_workload,
)
from rootstock.errors import StartupError

SHOW = "D4"
SIZES = Sizes(8, 8, turns=8, prefix_tokens=2048, new_tokens=(16, 160), answer_tokens=64)
KV_BUDGET = "4GiB"
PAGE_TOKENS = 32
BATCH_TOKENS = 512
# One slot finds the system prompt that every agent shares. With eight, each slot computes it anew, and a step of
# eight decodes takes eight times as long as one: two turns took 75.6 s instead of 33.6.
LLAMA_SLOTS = 1
# Upper bound of a conversation: prefix, turns, answers, and the template's tokens between them.
LONGEST_TOKENS = SIZES.prefix_tokens + SIZES.turns * (SIZES.new_tokens[1] + SIZES.answer_tokens + 16) + 64
BARS = {"dense": 5.0, "transformers": 5.0, "llama_cpp": 1.5}


@dataclass(frozen=True)
class Outcome:
    wall_s: float
    ttft: Quantiles
    inter_token: Quantiles
    completion_tokens: int
    prompt_tokens: int | None  # None: the server does not report them


@dataclass(frozen=True)
class Load:
    """A workload, and the state of the server's cache and of the machine when it is played."""

    workload: Workload
    warm: bool = False  # the system prompt is cached
    busy: bool = False  # another process uses all of one core


# Returns an outcome for each load, by its name. Raises PeerUnavailable.
Side = Callable[[], Mapping[str, Outcome]]


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="80m")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--threads", type=int, help="of all sides; as many as torch takes unless given")
    options.add_argument("--only", default=",".join(BARS), help="which peers, comma-separated")
    options.add_argument("--turns", type=int, default=SIZES.turns)
    options.add_argument(
        "--transformers-python",
        default=os.environ.get("ROOTSTOCK_TRANSFORMERS_PYTHON", sys.executable),
        help="an interpreter with transformers and accelerate",
    )
    options.add_argument(
        "--llama-python",
        default=os.environ.get("ROOTSTOCK_LLAMA_PYTHON"),
        help="an interpreter with xllamacpp and gguf",
    )
    options.add_argument("--llama-slots", type=int, default=LLAMA_SLOTS, help="slots of its server")
    options.add_argument("--llama-dtype", default="bfloat16", help="of the GGUF file's matrices: or float16")
    options.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="of transformers' server")
    options.add_argument("--dtype", default="bfloat16", help="of the others: float32 where that is emulated")
    given = options.parse_args()
    threads = given.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    sizes = Sizes(SIZES.conversations, SIZES.at_once, given.turns, SIZES.prefix_tokens, SIZES.new_tokens, 64)
    workload = make_workload("agents", 0, sizes)
    loads = {"": Load(workload)}
    figures: dict[str, Any] = {"threads": threads, "dtype": given.dtype, "model": given.model}
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        path = write_chatting_llama(given.model, Path(folder) / "model")

        def ours() -> Mapping[str, Outcome]:
            return of_rootstock(path, threads, loads, dtype=given.dtype)

        def dense() -> Mapping[str, Outcome]:
            return {"": of_dense(path, workload, getattr(torch, given.dtype))}

        def transformers() -> Mapping[str, Outcome]:
            blocks = 2 * sizes.conversations * -(-LONGEST_TOKENS // PAGE_TOKENS)
            python = given.transformers_python
            peer = transformers_server(
                python, path, threads, blocks, PAGE_TOKENS, given.batch_tokens, given.dtype
            )
            return of_peer(peer, loads, str(path))

        def llama_cpp() -> Mapping[str, Outcome]:
            if given.llama_python is None:
                raise PeerUnavailable("neither --llama-python nor ROOTSTOCK_LLAMA_PYTHON is given")
            gguf = as_gguf(given.llama_python, path, given.llama_dtype)
            slots = given.llama_slots
            context = slots * -(-LONGEST_TOKENS // 256) * 256
            return of_peer(llama_server(given.llama_python, gguf, threads, slots, context), loads)

        sides: dict[str, Side] = {"dense": dense, "transformers": transformers, "llama_cpp": llama_cpp}
        asked = [name for name in sides if name in given.only.split(",")]
        figures |= compare(ours, {name: sides[name] for name in asked}, given.rounds)
    figures["others_share"] = neighbours.share()
    conclude(SHOW, figures, {f"times_faster_than_{name}": at_least(BARS[name]) for name in asked})


def compare(ours: Side, peers: dict[str, Side], rounds: int) -> dict[str, Any]:
    """Runs ours before and after each peer. Names of figures end with the name of a load, if it has one."""
    figures: dict[str, Any] = {}
    runs: dict[str, list[Mapping[str, Outcome]]] = {name: [] for name in ("ours", *peers)}
    ratios: dict[tuple[str, str], list[float]] = {}

    def run(name: str, side: Side) -> Mapping[str, Outcome]:
        outcomes = side()
        runs[name].append(outcomes)
        for load, outcome in outcomes.items():
            say(
                f"{joined(name, load)}: {outcome.wall_s:.2f} s, first token after {outcome.ttft.p50 * 1e3:.0f} ms "
                f"(p95 {outcome.ttft.p95 * 1e3:.0f}), between tokens p95 {outcome.inter_token.p95 * 1e3:.1f} ms, "
                f"{outcome.completion_tokens} tokens, prompts of {outcome.prompt_tokens}"
            )
        return outcomes

    before = run("ours", ours)
    for _ in range(rounds):
        for name, side in peers.items():
            try:
                theirs = run(name, side)
            except PeerUnavailable as error:
                say(f"{name}: could not be measured: {error}")
                figures[f"could_not_{name}"] = str(error)
                continue
            after = run("ours", ours)
            for load, outcome in theirs.items():
                mine = statistics.mean((before[load].wall_s, after[load].wall_s))
                ratios.setdefault((name, load), []).append(outcome.wall_s / mine)
            before = after
    for (name, load), found in ratios.items():
        figures[joined(f"times_faster_than_{name}", load)] = round(statistics.median(found), 3)
    for name, outcomes in runs.items():
        for load in outcomes[0] if outcomes else ():
            figures |= described(joined(name, load), [each[load] for each in outcomes])
    return figures


def joined(*names: str) -> str:
    return "_".join(filter(None, names))


def described(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns medians over the runs of one side."""

    def median(of: Callable[[Outcome], float], digits: int) -> float:
        return round(statistics.median(of(outcome) for outcome in outcomes), digits)

    return {
        f"wall_s_{name}": median(lambda o: o.wall_s, 2),
        f"ttft_p50_ms_{name}": median(lambda o: o.ttft.p50 * 1e3, 1),
        f"ttft_p95_ms_{name}": median(lambda o: o.ttft.p95 * 1e3, 1),
        f"inter_token_p50_ms_{name}": median(lambda o: o.inter_token.p50 * 1e3, 2),
        f"inter_token_p95_ms_{name}": median(lambda o: o.inter_token.p95 * 1e3, 2),
        f"completion_tokens_{name}": outcomes[-1].completion_tokens,
        f"prompt_tokens_{name}": outcomes[-1].prompt_tokens,
    }


# ---- over HTTP


def of_rootstock(
    path: Path, threads: int, loads: Mapping[str, Load], *more: str, dtype: str = "bfloat16"
) -> Mapping[str, Outcome]:
    options = ["--port", "0", "--dtype", dtype, "--threads", str(threads), "--kv-budget", KV_BUDGET]
    with ServerProcess([str(path), *options, *more]) as server:
        return {name: over_http(server.url, load) for name, load in loads.items()}


def of_peer(peer: PeerProcess, loads: Mapping[str, Load], model: str | None = None) -> Mapping[str, Outcome]:
    with peer:
        try:
            return {name: over_http(peer.url, load, model) for name, load in loads.items()}
        except (StartupError, AssertionError) as error:
            raise PeerUnavailable(f"{error}; {peer.last_lines()}") from error


def over_http(url: str, load: Load, model: str | None = None) -> Outcome:
    """Plays a load. No prompt of it shares a prefix with one of another load."""
    with UrlTarget(url, load.workload.sizes.at_once, model) as target:
        if load.warm:
            play(warming(load.workload), target)
        with busy_core() if load.busy else contextlib.nullcontext():
            played = play(load.workload, target)
    failed = [sample.error for sample in played.flat if sample.error is not None]
    assert not failed, f"{len(failed)} requests failed: {failed[0]}"
    prompts = [sample.prompt_tokens for sample in played.flat]
    return outcome_of(
        played.wall_s,
        [(sample.sent_at, sample.token_times) for sample in played.flat],
        sum(sample.completion_tokens for sample in played.flat),
        None if None in prompts else sum(prompt for prompt in prompts if prompt is not None),
    )


def outcome_of(
    wall_s: float,
    requests: Sequence[tuple[float, Sequence[float]]],
    completion_tokens: int,
    prompt_tokens: int | None,
) -> Outcome:
    """Returns an outcome of requests, each of which has the times when it was sent and when its tokens came."""
    ttft = quantiles([times[0] - sent for sent, times in requests])
    inter_token = quantiles(np.concatenate([np.diff(times) for _, times in requests]).tolist())
    assert ttft is not None
    assert inter_token is not None
    return Outcome(wall_s, ttft, inter_token, completion_tokens, prompt_tokens)


def warming(workload: Workload) -> Workload:
    """Returns one request with the system prompt of all conversations, and with no turn of theirs."""
    prefix = workload.conversations[0].prefix
    conversation = WorkloadConversation(prefix, (WorkloadTurn(prefix[:1], 1),))
    return replace(workload, conversations=(conversation,))


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def as_gguf(python: str, path: Path, dtype: str) -> Path:
    gguf = path.with_suffix(f".{dtype}.gguf")
    if not gguf.exists():
        converter = Path(__file__).with_name("llama_gguf.py")
        done = subprocess.run(
            [python, str(converter), str(path), str(gguf), dtype], capture_output=True, text=True
        )
        if done.returncode:
            raise PeerUnavailable(f"no GGUF file: {done.stderr.strip()[-300:]}")
    return gguf


# ---- dense


def of_dense(path: Path, workload: Workload, dtype: torch.dtype = torch.bfloat16) -> Outcome:
    """Runs each turn of all agents as one batch, which `generate` computes from its first token on."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    dense = Dense(path, dtype)
    with torch.inference_mode():
        dense.generate([np.arange(16, dtype=np.int32)], 4)
        return dense_turns(tokenizer, dense, workload)


def dense_turns(tokenizer: Any, dense: Dense, workload: Workload) -> Outcome:
    conversations = [[{"role": "system", "content": as_text(each.prefix)}] for each in workload.conversations]
    first_tokens: list[float] = []
    between: list[float] = []
    prompt_tokens = completion_tokens = 0
    began = time.monotonic()
    for turn in range(workload.sizes.turns):
        sent = time.perf_counter()
        prompts = []
        for messages, conversation in zip(conversations, workload.conversations, strict=True):
            messages.append({"role": "user", "content": as_text(conversation.turns[turn].new)})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append(np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32))
        watch = Stopwatch()
        answers = dense.generate(prompts, workload.sizes.answer_tokens, watch)
        for messages, answer in zip(conversations, answers, strict=True):
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
        first_tokens += [watch.times[0] - sent] * len(prompts)
        between += np.diff(watch.times).tolist() * len(prompts)
        prompt_tokens += sum(map(len, prompts))
        completion_tokens += sum(map(len, answers))
    wall_s = time.monotonic() - began
    ttft, inter_token = quantiles(first_tokens), quantiles(between)
    assert ttft is not None
    assert inter_token is not None
    return Outcome(wall_s, ttft, inter_token, completion_tokens, prompt_tokens)


if __name__ == "__main__":
    main()
