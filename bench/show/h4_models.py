"""H4, first half: several models of one server. Memory moves to the model where it saves the most, and models are
loaded on demand.

*One budget.* Two models with different bytes and prefill times per token share a budget of cache. Most requests of a
phase go to one of them, and the next phase belongs to the other one. Each request continues one of the model's
conversations. The same requests run with the shared budget and with every fixed split of it. The figures are the
share of prompt tokens that were cached, and the share of prefill time that they saved, each relative to the best
split.

*Load on demand.* A server with one model gets a request for another one. Its time to the answer is compared with the
load of the same model by a new process whose libraries are imported already. Then the model is unloaded, and the
server's resident memory is compared with that before the load. In float32 both models answer as they do alone.

The LoRA half of the show is `h8_adapters.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import Bar, argument_parser, at_least, at_most, conclude, exactly

from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model
from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.lease import Admitted, Deferred, ReleaseReason
from rootstock.cache.shared_budget import SharedBudget
from rootstock.cache.types import Tokens

SHOW = "H4 models"
BLOCK = 16
NAMESPACE = Namespace("weights", "float32")
SPLITS = tuple(i / 20 for i in range(1, 20))

# ---- one budget


@dataclass(frozen=True)
class Kind:
    """A model of the simulated server."""

    bytes_per_token: int
    seconds_per_token: float
    conversations: int


KINDS = (Kind(1_000, 1e-4, 24), Kind(4_000, 8e-4, 12))


@dataclass(frozen=True)
class Asked:
    at_s: float
    model: int
    tokens: Tokens


def requests_of(phases: int, per_phase: int, seed: int) -> list[Asked]:
    """Makes the requests: nine in ten of a phase go to its model."""
    random = np.random.default_rng(seed)
    histories: list[dict[int, Tokens]] = [{}, {}]
    asked, now = [], 0.0
    for phase in range(phases):
        for _ in range(per_phase):
            now += float(random.exponential(1.0))
            model = phase % 2 if random.random() < 0.9 else 1 - phase % 2
            who = int(random.integers(KINDS[model].conversations))
            history = histories[model].get(who, np.empty(0, np.int32))
            if len(history) > 4_000:
                history = history[:0]  # a new conversation
            new = random.integers(0, 30_000, int(random.integers(100, 400))).astype(np.int32)
            tokens = np.concatenate((history, new))
            histories[model][who] = tokens
            asked.append(Asked(now, model, tokens))
    return asked


def served(
    asked: Sequence[Asked], make: Callable[[Callable[[], float]], Sequence[KVCache]]
) -> tuple[float, float]:
    """Runs the requests. Returns the shares of cached tokens, and of prefill time saved."""
    now = [0.0]
    caches = make(lambda: now[0])
    tokens = hits = 0
    seconds = saved = 0.0
    for one in asked:
        now[0] = one.at_s
        cache, price = caches[one.model], KINDS[one.model].seconds_per_token
        answer = cache.admit(cache.match(one.tokens, NAMESPACE))
        tokens += len(one.tokens)
        seconds += price * len(one.tokens)
        if not isinstance(answer, Admitted):
            continue  # the split has no room for it
        lease = answer.lease
        hits += lease.hit_tokens
        saved += price * lease.hit_tokens
        assert not isinstance(cache.extend(lease, 0), Deferred)
        cache.commit(lease, lease.tokens[lease.num_computed_tokens :].copy())
        cache.release(lease, ReleaseReason.FINISHED)
    return hits / tokens, saved / seconds


def budget_figures(phases: int, per_phase: int, share_of_need: float, seed: int) -> dict[str, float]:
    asked = requests_of(phases, per_phase, seed)
    need = sum(2_500 * kind.bytes_per_token * kind.conversations for kind in KINDS)
    total = int(share_of_need * need)

    def split(share: float) -> Callable[[Callable[[], float]], list[KVCache]]:
        parts = (int(total * share), int(total * (1 - share)))
        return lambda clock: [
            KVCache([FullAttention(1, kind.bytes_per_token)], part, BLOCK, clock=clock)
            for kind, part in zip(KINDS, parts, strict=True)
        ]

    def shared(clock: Callable[[], float]) -> list[KVCache]:
        budget, made = SharedBudget(total), []
        for kind in KINDS:
            share = budget.join()
            share.price = kind.seconds_per_token / kind.bytes_per_token
            families = [FullAttention(1, kind.bytes_per_token)]
            made.append(KVCache(families, total, BLOCK, clock=clock, share=share))
        return made

    fixed = [served(asked, split(share)) for share in SPLITS]
    tokens, seconds = served(asked, shared)
    return {
        "hit_rate": tokens,
        "best_split_hit_rate": max(one[0] for one in fixed),
        "saved_time": seconds,
        "best_split_saved_time": max(one[1] for one in fixed),
        "equal_split_saved_time": fixed[len(SPLITS) // 2][1],
    }


def budget_ratios(phases: int, per_phase: int) -> dict[str, float]:
    """Runs all budgets and seeds. Returns the least ratio of the shared budget to the best split."""
    ratios: dict[str, list[float]] = {"hit_rate_to_best_split": [], "saved_time_to_best_split": []}
    for share_of_need in (0.25, 0.5, 0.75):
        for seed in range(2):
            found = budget_figures(phases, per_phase, share_of_need, seed)
            print(json.dumps({"budget": share_of_need, "seed": seed, **found}), flush=True)
            ratios["hit_rate_to_best_split"].append(found["hit_rate"] / found["best_split_hit_rate"])
            ratios["saved_time_to_best_split"].append(found["saved_time"] / found["best_split_saved_time"])
    return {name: min(of) for name, of in ratios.items()}


# ---- loads on demand

LARGE = TinyModelSpec(
    vocab_size=1024,
    hidden_size=768,
    intermediate_size=2048,
    layers=10,
    heads=8,
    kv_heads=4,
    corpus_lines=1500,
    seed=5,
)
SMALL = TinyModelSpec(vocab_size=1024, layers=2, corpus_lines=1500, seed=6)
LOAD = """
import sys, time
import torch, transformers
import rootstock.runtime.torch.runner
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.build import build_engine
began = time.perf_counter()
model = ModelConfig(sys.argv[1], device="cpu", dtype="float32")
build_engine(model, CacheConfig(budget_bytes=1 << 26), EngineConfig())
print(time.perf_counter() - began)
"""


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, int]]:
    """Runs `rootstock serve`. Yields its URL and its process."""
    command = [sys.executable, "-m", "rootstock", "serve", *arguments, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--dtype", "float32", "--kv-budget", "64MiB"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", ready)
        assert found, ready
        yield found[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def resident_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system tells no resident memory")


def ask(url: str, model: str, text: str) -> str:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
    body |= {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def load_figures(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        for spec, path in ((SMALL, small), (LARGE, large)):
            path.mkdir()
            write_tiny_model(spec, path)
        file = Path(folder) / "models.yaml"
        file.write_text(
            f"small: {{model: {small}, pin: true}}\nlarge: {{model: {large}, load: demand}}\n",
            encoding="utf-8",
        )
        alone = {}
        for name, path in (("small", small), ("large", large)):
            with server(str(path)) as (url, _):
                alone[name] = ask(url, name, "Tell me a story.")
        cold, on_demand, returned = [], [], []
        with server("--models", str(file)) as (url, process):
            right = ask(url, "small", "Tell me a story.") == alone["small"]
            for _ in range(rounds):
                done = subprocess.run(
                    [sys.executable, "-c", LOAD, str(large)], capture_output=True, text=True, check=True
                )
                cold.append(float(done.stdout))
                before = resident_bytes(process)
                began = time.perf_counter()
                answer = ask(url, "large", "Tell me a story.")
                on_demand.append(time.perf_counter() - began)
                right = right and answer == alone["large"]
                loaded = resident_bytes(process)
                body = {"model": "large"}
                httpx.post(f"{url}/v1/models/unload", json=body, timeout=600).raise_for_status()
                returned.append((loaded - resident_bytes(process)) / (loaded - before))
        weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    return {
        "weights_bytes": weights,
        "cold_load_s": statistics.median(cold),
        "on_demand_s": statistics.median(on_demand),
        "on_demand_to_cold": statistics.median(
            one / other for one, other in zip(on_demand, cold, strict=True)
        ),
        "returned_memory": returned[-1],  # the first load also imports and compiles for good
        "same_answers_as_alone": right,
    }


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--phases", type=int, default=12)
    options.add_argument("--per-phase", type=int, default=150)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", choices=("budget", "loads"), action="append", default=[])
    given = options.parse_args()
    chosen = given.only or ["budget", "loads"]
    figures: dict[str, Any] = {"processors": os.cpu_count()}
    bars: dict[str, Bar] = {}
    if "budget" in chosen:
        ratios = budget_ratios(given.phases, given.per_phase)
        figures |= ratios
        bars |= {name: at_least(0.95) for name in ratios}
    if "loads" in chosen:
        figures |= load_figures(given.rounds)
        bars |= {
            "on_demand_to_cold": at_most(1.2),
            "returned_memory": at_least(0.8),
            "same_answers_as_alone": exactly(True),
        }
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
