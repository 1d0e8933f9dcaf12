"""Greedy requests to an engine in this process: one whose times are kept, or many at once."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    RequestId,
    StopParams,
    TokenEvent,
)

PATIENCE_S = 120.0
BLOCK_SIZE = 16
_numbers = itertools.count()


def greedy(prompt: Tokens, tokens: int, **fields: Any) -> Request:
    """Returns a greedy request for exactly so many tokens, with an id of its own. `fields` are those of Request."""
    stop = StopParams(max_tokens=tokens, ignore_eos=True)
    fields = {"sampling": ResolvedSampling(temperature=0.0)} | fields
    return Request(RequestId(f"r{next(_numbers)}"), prompt, stop=stop, **fields)


@dataclass(frozen=True)
class TimedAnswer:
    tokens: list[int]
    ttft_s: float
    ttft_cpu_s: float  # processor time of this process until the first token
    cached_tokens: int


def generate(engine: Engine, request: Request) -> TimedAnswer:
    """Sends the request to a started engine and waits for its end, which must be `Finished`."""
    generated: list[int] = []
    ttft_s = ttft_cpu_s = 0.0
    began_s, began_cpu_s, end = time.perf_counter(), time.process_time(), None
    for event in engine.generate(request):
        if isinstance(event, TokenEvent):
            if not generated:
                ttft_s = time.perf_counter() - began_s
                ttft_cpu_s = time.process_time() - began_cpu_s
            generated.append(event.token)
        end = event
    assert isinstance(end, Finished), f"the request failed: {end}"
    return TimedAnswer(generated, ttft_s, ttft_cpu_s, end.usage.cached_tokens)


def some_tokens(rng: random.Random, least: int, most: int) -> Tokens:
    """Draws tokens other than the special ones, which are at both ends of the vocabulary."""
    return np.array([rng.randrange(20, 500) for _ in range(rng.randint(least, most))], np.int32)


def engine_on(model: Path, budget_bytes: int, tier: TierConfig | None, **config: int) -> Assembly:
    """Builds an engine on a checkpoint, in float32 on one thread. Without a tier it has no cache either."""
    return build_engine(
        ModelConfig(str(model), device="cpu", dtype="float32", threads=1),
        CacheConfig(BLOCK_SIZE, 64 << 20, enabled=False)
        if tier is None
        else CacheConfig(BLOCK_SIZE, budget_bytes),
        EngineConfig(**config),
        tier or TierConfig(),
    )


@dataclass
class Answer:
    prompt: Tokens
    tokens: list[int]
    finished: bool = False  # False: the request failed

    @property
    def whole(self) -> Tokens:
        return np.concatenate((self.prompt, self.tokens)).astype(np.int32)


class Asker:
    """Greedy requests to one engine. Their answers come in the order in which they end."""

    def __init__(self, engine: Engine, answer_tokens: int) -> None:
        self._engine = engine
        self._answer_tokens = answer_tokens
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def ask(self, prompt: Tokens) -> None:
        answer = Answer(prompt, [])

        def sink(event: Event) -> None:
            if isinstance(event, TokenEvent):
                answer.tokens.append(event.token)
            elif isinstance(event, Finished | Failed | Aborted):
                answer.finished = isinstance(event, Finished)
                self._ended.put(answer)

        self._engine.submit(greedy(prompt, self._answer_tokens), sink)

    def next(self) -> Answer:
        return self._ended.get(timeout=PATIENCE_S)

    def ask_all(self, prompts: Sequence[Tokens]) -> list[Answer]:
        for prompt in prompts:
            self.ask(prompt)
        return [self.next() for _ in prompts]
