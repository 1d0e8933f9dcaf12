"""A6: against dense batched `transformers.generate`, in the same process, model, dtype and threads.

Decode: the time of one step with B sequences of 512 tokens each, prefill excluded on both sides. Ours are engine
steps in which all B decode; theirs are the times between two calls of a logits processor, inside one `generate` that
was handed a filled DynamicCache. Rounds alternate between the two sides, and a ratio is a median of rounds.

Agents: the `agents` workload end to end. Ours starts with an empty cache; theirs is one left-padded `generate` a turn
over all agents' prompts.

In bfloat16 the two sides may choose different tokens, so float32 shows first that they do the same work.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import at_least, at_most, conclude, exactly
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from rootstock.bench.play import play
from rootstock.bench.targets import EngineTarget
from rootstock.bench.workloads import Sizes, Workload, as_tokens, make_workload
from rootstock.cache import KVCache
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Failed, Request, RequestId, SamplingParams, StopParams, TokenEvent
from rootstock.runtime.torch_model import load_model

SHOW = "A6"
VOCAB = 32_000
CONTEXT_TOKENS = 512
BATCHES = (1, 4, 16)
STEPS = 16  # timed, of each round
ROUNDS = 5
AGENT_ROUNDS = 2
AGENTS = Sizes(8, 8, turns=6, prefix_tokens=1024, new_tokens=(16, 96), answer_tokens=32)

MODELS: dict[str, dict[str, Any]] = {
    "80m": {
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_hidden_layers": 13,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "600m": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
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
    # Below some 0.8 others were at work on these cores, and times of several threads mean little: they wait for
    # one another.
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
    prompts = random_prompts(max(BATCHES))
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
    ours.decode_step_s(prompts)  # what is made on first use is made on both sides
    dense.decode_step_s(prompts)
    pairs = []
    for i in range(rounds):
        # Who goes first changes, so that neither always finds the machine in the other's state.
        if i % 2:
            theirs_s = dense.decode_step_s(prompts)
            ours_s = ours.decode_step_s(prompts)
        else:
            ours_s = ours.decode_step_s(prompts)
            theirs_s = dense.decode_step_s(prompts)
        pairs.append((ours_s, theirs_s))
    ratio = statistics.median(ours_s / theirs_s for ours_s, theirs_s in pairs)
    ours_ms, theirs_ms = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    say(f"{name} B={batch}: a step takes {ours_ms:.2f} ms, dense {theirs_ms:.2f} ms, ratio {ratio:.3f}")
    return {
        f"decode_ratio_{name}_b{batch}": round(ratio, 4),
        f"decode_ms_{name}_b{batch}": round(ours_ms, 3),
        f"dense_ms_{name}_b{batch}": round(theirs_ms, 3),
    }


def compare_agents(ours: Ours, dense: Dense) -> dict[str, Any]:
    workload = make_workload("agents", 0, AGENTS)
    pairs, computed, prompt_tokens = [], 0, 0
    ours.start()
    for _ in range(AGENT_ROUNDS):
        ours_s, computed, prompt_tokens = ours.agents_s(workload)
        theirs_s = dense.agents_s(workload)
        say(f"agents: {ours_s:.2f} s, dense {theirs_s:.2f} s, {theirs_s / ours_s:.2f} times faster")
        pairs.append((ours_s, theirs_s))
    ours.stop()
    return {
        "agents_times_faster": round(statistics.median(theirs / mine for mine, theirs in pairs), 3),
        "agents_s": round(statistics.median(mine for mine, _ in pairs), 3),
        "agents_dense_s": round(statistics.median(theirs for _, theirs in pairs), 3),
        "agents_prompt_tokens": prompt_tokens,
        "agents_computed_tokens": computed,
    }


def float32_tokens_equal(path: Path) -> bool:
    """Prompts of different lengths, so that the dense side's padding is under test as well."""
    ours, dense = Ours(path, "float32", gib=0.5), Dense(path, torch.float32)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (40, 64, 97, 128)]
    return ours.generate(prompts, 24) == dense.generate(prompts, 24)


# ---- ours


class Ours:
    """An engine without a tokenizer: the dense side makes no text either."""

    def __init__(self, path: Path, dtype: str, gib: float) -> None:
        runtime = load_model(ModelConfig(str(path), device="cpu", dtype=dtype))
        self.parameters = runtime.description.parameters
        config = CacheConfig()
        cache = KVCache(runtime.description.families, int(gib * 1024**3), config.block_size)
        runtime.allocate((cache.pool.total_blocks,), config.block_size)
        self._engine = Engine(runtime, cache, EngineConfig())
        self._requests = 0

    def decode_step_s(self, prompts: np.ndarray) -> float:
        """Median seconds of the steps in which every prompt has one token to decode."""
        got = self._submit(list(prompts), STEPS + 2)
        while min(map(len, got)) == 0:
            assert self._engine.step(), "nothing to do, and no first token"
        times = []
        for _ in range(STEPS):
            before = sum(map(len, got))
            began = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - began)
            assert sum(map(len, got)) == before + len(prompts), "not every sequence decoded in this step"
        while self._engine.step():
            pass
        return statistics.median(times)

    def generate(self, prompts: list[np.ndarray], tokens: int) -> list[list[int]]:
        got = self._submit(prompts, tokens)
        while self._engine.step():
            pass
        return got

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def agents_s(self, workload: Workload) -> tuple[float, int, int]:
        """(seconds, prompt tokens computed, prompt tokens), with nothing cached at the start."""
        self._engine.clear_cache()
        played = play(workload, EngineTarget(self._engine, VOCAB))
        assert all(sample.error is None for sample in played.flat)
        prompt_tokens = sum(sample.prompt_tokens or 0 for sample in played.flat)
        cached_tokens = sum(sample.cached_tokens or 0 for sample in played.flat)
        return played.wall_s, prompt_tokens - cached_tokens, prompt_tokens

    def _submit(self, prompts: list[np.ndarray], tokens: int) -> list[list[int]]:
        """The lists that the tokens of each prompt's answer will go to."""
        got: list[list[int]] = [[] for _ in prompts]

        def sink(answer: list[int], event: Event) -> None:
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenEvent):
                answer.append(event.token)

        for prompt, answer in zip(prompts, got, strict=True):
            self._requests += 1
            request = Request(
                RequestId(f"r{self._requests}"),
                prompt,
                SamplingParams(temperature=0.0),
                StopParams(max_tokens=tokens, ignore_eos=True),
            )
            self._engine.submit(request, lambda event, answer=answer: sink(answer, event))
        return got


# ---- theirs


class Stopwatch:
    """A logits processor: called once after every forward of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class Dense:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each prompt, of each layer: K, V

    def prefill(self, prompts: np.ndarray) -> None:
        """K and V of all but the last token of each prompt, one prompt at a time."""
        for prompt in prompts:
            cache = DynamicCache(config=self._model.config)
            ids = torch.from_numpy(prompt[None, :-1].astype(np.int64))
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._rows.append([(layer.keys, layer.values) for layer in cache.layers])

    def decode_step_s(self, prompts: np.ndarray) -> float:
        """Median seconds between two forwards of `generate`, after the first one."""
        watch = Stopwatch()
        self._generate(
            torch.from_numpy(prompts.astype(np.int64)), None, STEPS + 1, watch, self._filled(len(prompts))
        )
        times = np.diff(watch.times)
        assert len(times) == STEPS
        return float(np.median(times))

    def generate(self, prompts: list[np.ndarray], tokens: int) -> list[list[int]]:
        """One left-padded batch."""
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        out = self._generate(ids, mask, tokens)
        return [list(map(int, row)) for row in out[:, width:]]

    def agents_s(self, workload: Workload) -> float:
        """A turn of all agents is one batch, computed from its first token on: that is what `generate` does."""
        histories = [as_tokens(each.prefix, VOCAB) for each in workload.conversations]
        began = time.monotonic()
        for turn in range(workload.sizes.turns):
            for i, conversation in enumerate(workload.conversations):
                new = as_tokens(conversation.turns[turn].new, VOCAB)
                histories[i] = np.concatenate([histories[i], new])
            answers = self.generate(histories, workload.sizes.answer_tokens)
            histories = [
                np.concatenate([history, np.array(answer, np.int32)])
                for history, answer in zip(histories, answers, strict=True)
            ]
        return time.monotonic() - began

    def _filled(self, batch: int) -> DynamicCache:
        """A cache of its own with the first `batch` prompts: generate writes into it."""
        cache = DynamicCache(config=self._model.config)
        for layer, rows in enumerate(zip(*self._rows[:batch], strict=True)):
            keys, values = zip(*rows, strict=True)
            cache.update(torch.cat(keys), torch.cat(values), layer)
        return cache

    def _generate(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        tokens: int,
        watch: Stopwatch | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            past_key_values=cache,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            use_cache=True,
            logits_processor=[watch] if watch else [],
        )
        assert isinstance(out, torch.Tensor)
        return out


# ---- the models


def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **MODELS[name],
    )
    path = folder / name
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    say(f"{name}: a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million random weights")
    model.save_pretrained(path)
    return path


def random_prompts(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCAB, (count, CONTEXT_TOKENS)).astype(np.int32)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
