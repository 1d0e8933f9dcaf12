"""A small mlx-lm model served by the real engine on the MLX runtime, and the same requests by mlx-lm alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_cache

from asking import greedy
from rootstock.cache import KVCache
from rootstock.cache.families import FullAttention
from rootstock.cache.lease import Lease
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.build import assemble
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Finished, TokenEvent
from rootstock.runtime.base import Batch, Logits, ModelDescription, Segment
from rootstock.runtime.mlx.load import load_model
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.mlx.self_check import noise, own_logits
from rootstock.runtime.trial import Measure, ScoredRows, TrialResult, compare
from rootstock.testing.byte_tokenizer import ByteTokenizer
from twins.driving import Scoring, lease_of
from twins.mlx_architectures import VOCAB

BLOCK_SIZE = 8
CHUNK_TOKENS = 24
ANSWER_TOKENS = 12
BUDGET_BYTES = 24 << 20
FIRST_PROMPT = 70
# How much of the first prompt the others share: whole blocks, parts of a block, all of it.
SHARED = (40, 43, 64, FIRST_PROMPT)
NEW_TOKENS = (17, 9, 30, 5)


def random_tokens(length: int, seed: int) -> Tokens:
    """Draws tokens other than the special ones."""
    return np.random.default_rng(seed).integers(4, VOCAB, length).astype(np.int32)


def load(directory: Path, **options: Any) -> MlxRuntime:
    return load_model(ModelConfig(str(directory), dtype="float32", runtime="mlx", **options))


@dataclass
class Served:
    """Requests and answers of one engine."""

    prompts: list[Tokens] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def serve(runtime: Any) -> tuple[Served, KVCache]:
    """Serves a first prompt, four at once that share parts of it, and the first one's next turn."""
    recorder = runtime if isinstance(runtime, Recorder) else None
    made = assemble(
        runtime,
        ByteTokenizer(),
        CacheConfig(block_size=BLOCK_SIZE, budget_bytes=BUDGET_BYTES),
        EngineConfig(max_batch=4, chunk_tokens=CHUNK_TOKENS, idle_work=False),
    )
    cache: KVCache = made.engine._cache
    if recorder is not None:
        recorder.cache = cache
    served = Served()
    first = random_tokens(FIRST_PROMPT, 1)
    _ask(made.engine, served, [first])
    others = [
        np.concatenate([first[:shared], random_tokens(new, 10 + number)])
        for number, (shared, new) in enumerate(zip(SHARED, NEW_TOKENS, strict=True))
    ]
    for other, shared in zip(others, SHARED, strict=True):
        if shared < len(first) and other[shared] == first[shared]:
            other[shared] = 4 + (other[shared] - 3) % (VOCAB - 4)
    _ask(made.engine, served, others)
    next_turn = np.concatenate([first, np.array(served.answers[0], np.int32), random_tokens(11, 30)])
    _ask(made.engine, served, [next_turn])
    cache.check()
    return served, cache


def _ask(engine: Engine, served: Served, prompts: Sequence[Tokens]) -> None:
    """Asks prompts at once and steps the engine until all are answered."""
    begin = len(served.prompts)
    for prompt in prompts:
        number = len(served.prompts)
        served.prompts.append(prompt)
        served.answers.append([])
        served.cached.append(0)

        def sink(event: Event, number: int = number) -> None:
            if isinstance(event, TokenEvent):
                served.answers[number].append(event.token)
            elif isinstance(event, Finished):
                served.cached[number] = event.usage.cached_tokens
            else:
                served.failed.append(str(event))

        marks = [position for position in SHARED if position < len(prompt)]
        boundaries = tuple(Boundary(position, CheckpointKind.MARK) for position in marks)
        engine.submit(greedy(prompt, ANSWER_TOKENS, boundaries=boundaries), sink)
    while engine.step():
        pass
    assert served.failed or all(len(answer) == ANSWER_TOKENS for answer in served.answers[begin:])


def own_greedy(model: nn.Module, prompt: Tokens, tokens: int = ANSWER_TOKENS) -> list[int]:
    """Generates with mlx-lm's own cache: the prompt in one pass, then token by token."""
    caches, answer = mlx_cache.make_prompt_cache(model), list[int]()
    tail = prompt
    for _ in range(tokens):
        logits: mx.array = model(mx.array(tail[None]), cache=caches)[0, -1]
        answer.append(int(mx.argmax(logits).item()))
        tail = np.array(answer[-1:], np.int32)
    return answer


class Recorder(Scoring):
    """Runtime that scores every row, and keeps the logits by kind of row."""

    def __init__(self, runtime: MlxRuntime) -> None:
        super().__init__(runtime)
        self.cache: KVCache | None = None
        self.rows: dict[str, list[ScoredRows]] = {}
        self.sequences: dict[str, Tokens] = {}
        self.forwards_of_several = 0
        self._begun: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def forward(self, batch: Batch) -> Logits:
        self.forwards_of_several += len(batch.segments) > 1
        return super().forward(batch)

    def _keep(self, segment: Segment, rows: Logits) -> None:
        assert self.cache is not None
        lease = lease_of(self.cache, segment)
        past, end = segment.past, segment.past + len(segment.tokens)
        name = str(lease.id)
        self.sequences[name] = np.concatenate([lease.tokens[:past], segment.tokens])
        scored = ScoredRows(name, slice(past, end), min(end, lease.prompt_tokens), rows)
        self.rows.setdefault(self._kind(lease, past), []).append(scored)
        self._begun.add(lease.id)

    def _kind(self, lease: Lease, past: int) -> str:
        if past >= lease.prompt_tokens:
            return "decode"
        if lease.id in self._begun:
            return "later chunk"
        if past == 0:
            return "first chunk"
        families = self.description.families
        if any(not isinstance(family, FullAttention) for family in families):
            return "restored"
        return "copied" if past % BLOCK_SIZE else "shared"


def compared(recorder: Recorder, model: nn.Module) -> TrialResult:
    """Compares the recorded rows with mlx-lm's model and its own cache. Raises Disagreement."""
    sequences = recorder.sequences
    one_pass = {name: own_logits(model, tokens) for name, tokens in sequences.items()}

    def decoded(rows: ScoredRows) -> Logits:
        return own_logits(model, sequences[rows.sequence][: rows.positions.stop], rows.prefilled)[
            rows.positions
        ]

    def own_noise(measure: Measure) -> float:
        return noise(model, max(sequences.values(), key=len), "float32", measure)

    return compare(recorder.rows, one_pass, decoded, own_noise, "float32")


def names_of(description: ModelDescription) -> str:
    return ", ".join(family.name for family in description.families)
