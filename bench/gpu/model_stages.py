"""Models on the device: the self-check of a load, CUDA graphs, tiers, and the server under the agents workload."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from devices import Bench
from isolation import Row
from llamas import MODELS, write_chatting_llama

from asking import generate, greedy
from checkpoints import save
from rootstock.bench.play import play
from rootstock.bench.rows import quantiles
from rootstock.bench.serving import ServerProcess
from rootstock.bench.targets import UrlTarget
from rootstock.bench.tiny_model import DEMO_SPEC, write_tiny_model
from rootstock.bench.workloads import Sizes, make_workload
from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import build_engine
from rootstock.engine.engine import Engine
from rootstock.engine.request import Request
from rootstock.runtime.base import Batch, Logits, Segment
from rootstock.runtime.torch import runner

BLOCK_SIZE = 32
# About 1.1 billion parameters, in the shapes of Llama 3.2 1B.
ONE_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# Full attention; windows and softcaps; windows; sinks; chunks; latents; recurrent states.
CHECKED = {
    "bfloat16": "llama gemma2 gemma3_text gpt_oss llama4_text deepseek_v3 qwen3_next mamba2",
    "float32": "llama gemma2 gpt_oss",
}


class Warnings(logging.Handler):
    """Warnings that Rootstock logs: each fallback is one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    handler, log = Warnings(), logging.getLogger("rootstock")
    log.addHandler(handler)
    try:
        yield handler.messages
    finally:
        log.removeHandler(handler)


@contextmanager
def triton_everywhere(bench: Bench) -> Iterator[None]:
    """Makes Triton's kernels serve a CPU too, by its interpreter."""
    with ExitStack() as stack:
        if bench.interpreted:
            stack.enter_context(mock.patch.object(runner, "compiled_for", return_value="triton"))
        yield


# ---- the model of the later stages


def model(bench: Bench) -> Iterator[Row]:
    began = time.monotonic()
    if bench.interpreted:
        bench.model.mkdir()
        write_tiny_model(DEMO_SPEC, bench.model)
    else:
        assert "600m" in MODELS
        with torch.device(bench.device):  # random weights are drawn on the device
            write_chatting_llama("600m", bench.model, **ONE_BILLION)
    weights = sum(file.stat().st_size for file in bench.model.glob("*.safetensors"))
    yield {"weights_gib": weights / 2**30, "seconds": time.monotonic() - began}


# ---- self-check


def self_check(bench: Bench) -> Iterator[Row]:
    """Loads tiny models of each kind of layer. A row is ok if the model runs packed, by the kernels meant for it."""
    checked = {"float32": "llama gemma2"} if bench.interpreted else CHECKED
    for dtype, model_types in checked.items():
        for model_type in model_types.split():
            row: Row = {"model_type": model_type, "dtype": dtype}
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder, warnings_logged() as warnings:
                try:
                    with triton_everywhere(bench):
                        path = save(Path(folder), model_type)
                        loaded = runner.load_model(ModelConfig(str(path), str(bench.device.type), dtype))
                except Exception as failure:  # each model is a check of its own
                    yield row | {"error": f"{type(failure).__name__}: {failure}"[:500], "ok": False}
                    continue
            described = loaded.description
            yield row | {
                "execution_mode": described.execution_mode,
                "mode_reason": described.mode_reason,
                "warnings": warnings,
                "seconds": time.monotonic() - began,
                "ok": described.execution_mode.startswith("packed") and not warnings,
            }


# ---- CUDA graphs


def cuda_graphs(bench: Bench) -> Iterator[Row]:
    """Compares decodes with graphs and without: the time of a step, and the error of the logits.

    The error is the root mean square of the difference to float32, in standard deviations. Graphs may split contexts
    differently, so they may round differently, but not worse.
    """
    context, steps = (1024, 16) if not bench.interpreted else (40, 3)
    batches = (1, 2, 5, 8, 16, 32, 64) if not bench.interpreted else (1, 3)
    with warnings_logged() as warnings, triton_everywhere(bench):
        began = time.monotonic()
        plain = loaded(bench, batches, context + steps, graphs=False)
        plain_s = time.monotonic() - began
        began = time.monotonic()
        graphs = loaded(bench, batches, context + steps, graphs=not bench.interpreted)
        yield {
            "load_s": plain_s,
            "load_and_record_s": time.monotonic() - began,
            "warnings": list(warnings),
            "ok": not warnings,
        }
        exact = loaded(bench, batches, context + steps, graphs=False, dtype="float32")
        vocab, width = plain.description.vocab_size, blocks_of(context + steps)
        random = np.random.default_rng(0)
        for batch in batches:
            tables = random.permutation(batch * width).astype(np.int32).reshape(batch, width)
            prompts = random.integers(64, vocab, (batch, context), np.int32)
            sides = [Decodes(side, tables, prompts) for side in (exact, plain, graphs)]
            tokens = random.integers(64, vocab, batch, np.int32)
            errors: dict[str, list[float]] = {"plain": [], "graphs": []}
            for _ in range(steps):
                expected, *others = (side.step(tokens) for side in sides)
                for error, logits in zip(errors.values(), others, strict=True):
                    error.append(float(((logits - expected) ** 2).mean() ** 0.5 / expected.std()))
                tokens = expected.argmax(-1).astype(np.int32)
            plain_error, graph_error = (float(np.mean(error)) for error in errors.values())
            plain_s, graph_s = (float(np.median(side.times[2:])) for side in sides[1:])
            yield {
                "batch": batch,
                "context": context,
                "plain_ms": plain_s * 1e3,
                "graphs_ms": graph_s * 1e3,
                "graphs_to_plain": graph_s / plain_s,
                "plain_error": plain_error,
                "graphs_error": graph_error,
                "ok": graph_error <= 1.2 * plain_error + 1e-6,
            }


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def loaded(
    bench: Bench, batches: Sequence[int], tokens: int, *, graphs: bool, dtype: str | None = None
) -> runner.TorchRuntime:
    config = ModelConfig(str(bench.model), bench.device.type, dtype or bench.dtype, cuda_graphs=graphs)
    made = runner.load_model(config)
    made.allocate([max(batches) * blocks_of(tokens) for _ in made.description.families], BLOCK_SIZE)
    return made


class Decodes:
    """Sequences that were prefilled, and decode together."""

    def __init__(self, runtime: runner.TorchRuntime, tables: Any, prompts: Any) -> None:
        self._runtime = runtime
        self._tables = tables
        self._past = prompts.shape[1]
        self.times: list[float] = []  # seconds of each step
        for table, prompt in zip(tables, prompts, strict=True):
            runtime.forward(Batch([Segment(prompt, 0, (table,), 1)]))

    def step(self, tokens: Tokens) -> Logits:
        """Computes one token of each sequence. Returns [sequences, vocab]."""
        segments = [
            Segment(tokens[row : row + 1], self._past, (table,), 1) for row, table in enumerate(self._tables)
        ]
        began = time.perf_counter()
        logits = self._runtime.forward(Batch(segments))  # returns when the logits are on the host
        self.times.append(time.perf_counter() - began)
        self._past += 1
        return logits


# ---- tiers


def tiers(bench: Bench) -> Iterator[Row]:
    """Computes a prompt, finds it in memory, and restores it from the host tier and, after a restart, from the disk.

    In float32 every way must answer with the same tokens. The engine loads even where computing would take less time.
    """
    prompt_tokens, answer_tokens = (4096, 16) if not bench.interpreted else (200, 4)
    for dtype in ("float32",) if bench.interpreted else ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(dir=bench.folder) as disk:
            host = [] if bench.interpreted else [("host tier", TierConfig(host_budget_bytes=8 << 30))]
            computed: list[int] | None = None
            for tier, config in [*host, ("disk tier", TierConfig(Path(disk)))]:
                for restart in (False, True) if tier == "disk tier" else (False,):
                    with engine_of(bench, dtype, prompt_tokens, config) as asker:
                        ways = ["computed", "memory", tier] if not restart else [f"{tier}, restarted"]
                        for way in ways:
                            if way == tier:
                                asker.evict(prompt_tokens)
                            row = asker.ask(way, prompt_tokens, answer_tokens)
                            answer = row.pop("answer")
                            computed = computed if computed is not None else answer
                            row |= {"dtype": dtype, "same_answer": answer == computed}
                            restored = way not in ("computed", "memory")
                            enough = row["cached_tokens"] >= prompt_tokens - 2 * BLOCK_SIZE
                            right = answer == computed or dtype != "float32"
                            found = way == "computed" or enough
                            yield row | {"ok": right and found and (row["loaded_mib"] > 0) == restored}


@contextmanager
def engine_of(bench: Bench, dtype: str, prompt_tokens: int, tier: TierConfig) -> Iterator[TierAsker]:
    """Starts an engine whose memory has room for two such prompts."""
    config = ModelConfig(str(bench.model), bench.device.type, dtype)
    shape = json.loads((bench.model / "config.json").read_text(encoding="utf-8"))
    row_bytes = shape["num_key_value_heads"] * shape["head_dim"] * (4 if dtype == "float32" else 2)
    budget = int(2.5 * prompt_tokens * 2 * row_bytes * shape["num_hidden_layers"])
    made = build_engine(config, CacheConfig(BLOCK_SIZE, budget), EngineConfig(), tier)
    with made.engine:
        yield TierAsker(made.engine, made.description.vocab_size)


class TierAsker:
    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        tiering: Any = engine.tier_connector
        choose = tiering.choose

        def choose_to_load(match: Any) -> Any:
            hit, choice = choose(match)
            return hit, None if choice is None else replace(choice, load=True)

        engine.call(lambda: setattr(tiering, "choose", choose_to_load))
        tiering.overdue = list  # a first load may take longer than foreseen

    def ask(self, way: str, prompt_tokens: int, answer_tokens: int) -> Row:
        before = self._loaded()
        heard = generate(self._engine, self._request(0, prompt_tokens, answer_tokens))
        loaded_bytes, load_s = (new - old for new, old in zip(self._loaded(), before, strict=True))
        return {
            "from": way,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": heard.cached_tokens,
            "ttft_ms": heard.ttft_s * 1e3,
            "loaded_mib": loaded_bytes / 2**20,
            "load_gb_per_s": loaded_bytes / load_s / 1e9 if load_s else None,
            "answer": heard.tokens,
        }

    def evict(self, prompt_tokens: int) -> None:
        """Fills the memory with other prompts, and waits until the tier has the evicted blocks."""
        for seed in range(1, 5):
            generate(self._engine, self._request(seed, prompt_tokens, 1))
        tiering: Any = self._engine.tier_connector
        self._engine.call(tiering.flush)

    def _request(self, seed: int, prompt_tokens: int, answer_tokens: int) -> Request:
        prompt = np.random.default_rng(seed).integers(64, self._vocab_size, prompt_tokens, np.int32)
        return greedy(prompt, answer_tokens)

    def _loaded(self) -> tuple[int, float]:
        counters = self._engine.tier_connector.counters  # type: ignore[union-attr]
        return counters.loaded_bytes, counters.load_s


# ---- the server


def server(bench: Bench) -> Iterator[Row]:
    """Runs the agents workload over HTTP on `rootstock serve`, with CUDA graphs, without, and without its cache."""
    variants: dict[str, list[str]] = {
        "CUDA graphs": [],
        "plain": ["--eager"],
        "no cache": ["--no-cache"],
    }
    sizes = [
        Sizes(n, n, turns=8, prefix_tokens=2048, new_tokens=(16, 160), answer_tokens=64) for n in (8, 32)
    ]
    if bench.interpreted:
        del variants["CUDA graphs"]
        sizes = [Sizes(3, 3, turns=2, prefix_tokens=100, new_tokens=(8, 20), answer_tokens=8)]
    options = [str(bench.model), "--port", "0", "--device", bench.device.type, "--dtype", bench.dtype]
    for name, further in variants.items():
        began = time.monotonic()
        with ServerProcess([*options, *further], ready_within_s=120.0) as running:
            started_s = time.monotonic() - began
            for size in sizes:
                yield {"server": name, "start_s": started_s} | of_agents(running.url, size)


def of_agents(url: str, sizes: Sizes) -> Row:
    workload = make_workload("agents", 0, sizes)
    with UrlTarget(url, sizes.at_once) as target:
        played = play(workload, target)
    good = [sample for sample in played.flat if sample.error is None]
    failed = [sample.error for sample in played.flat if sample.error is not None]
    row: Row = {"agents": sizes.conversations, "requests": len(played.flat), "ok": not failed}
    if failed:
        return row | {"failed": len(failed), "error": str(failed[0])[:300]}
    ttft = quantiles([sample.token_times[0] - sample.sent_at for sample in good])
    between = quantiles(np.concatenate([np.diff(sample.token_times) for sample in good]).tolist())
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in good)
    assert ttft is not None
    assert between is not None
    return row | {
        "wall_s": played.wall_s,
        "tokens_per_s": sum(sample.completion_tokens for sample in good) / played.wall_s,
        "ttft_p50_ms": ttft.p50 * 1e3,
        "ttft_p95_ms": ttft.p95 * 1e3,
        "between_tokens_p50_ms": between.p50 * 1e3,
        "between_tokens_p95_ms": between.p95 * 1e3,
        "prompt_tokens": prompt_tokens,
        "cached_share": sum(sample.cached_tokens or 0 for sample in good) / max(1, prompt_tokens),
    }
