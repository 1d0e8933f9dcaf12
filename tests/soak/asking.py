"""Asking an engine in this process for a few tokens at a time, many requests at once."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    RequestId,
    ResolvedSampling,
    StopParams,
    TokenEvent,
)
from rootstock.engine.tokenizer import HFTokenizer
from rootstock.runtime.torch.runner import load_model

PATIENCE_S = 120.0
BLOCK_SIZE = 16


def some_tokens(rng: random.Random, least: int, most: int) -> Tokens:
    """None of the special ones, which stand at both ends of the vocabulary."""
    return np.array([rng.randrange(20, 500) for _ in range(rng.randint(least, most))], np.int32)


def engine_on(model: Path, budget_bytes: int, tier: TierConfig | None, **config: int) -> Assembly:
    """Builds an engine on a checkpoint, in float32 on one thread. Without a tier it has no cache either."""
    runtime = load_model(ModelConfig(str(model), device="cpu", dtype="float32", threads=1), lambda *_: None)
    uncached = CacheConfig(BLOCK_SIZE, 64 << 20, enabled=False)
    cache = uncached if tier is None else CacheConfig(BLOCK_SIZE, budget_bytes)
    return assemble(runtime, HFTokenizer.load(str(model)), cache, EngineConfig(**config), tier)


@dataclass
class Answer:
    prompt: Tokens
    tokens: list[int]
    finished: bool = False  # else it failed

    @property
    def whole(self) -> Tokens:
        return np.concatenate((self.prompt, self.tokens)).astype(np.int32)


class Asker:
    """Requests to one engine, greedy; answers in the order in which they end."""

    def __init__(self, engine: Engine, answer_tokens: int) -> None:
        self._engine = engine
        self._answer_tokens = answer_tokens
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._count = 0

    def ask(self, prompt: Tokens) -> None:
        answer = Answer(prompt, [])

        def sink(event: Event) -> None:
            if isinstance(event, TokenEvent):
                answer.tokens.append(event.token)
            elif isinstance(event, Finished | Failed | Aborted):
                answer.finished = isinstance(event, Finished)
                self._ended.put(answer)

        self._count += 1
        stop = StopParams(max_tokens=self._answer_tokens, ignore_eos=True)
        sampling = ResolvedSampling(temperature=0.0)
        self._engine.submit(Request(RequestId(f"r{self._count}"), prompt, sampling, stop), sink)

    def next(self) -> Answer:
        return self._ended.get(timeout=PATIENCE_S)

    def ask_all(self, prompts: Sequence[Tokens]) -> list[Answer]:
        for prompt in prompts:
            self.ask(prompt)
        return [self.next() for _ in prompts]
