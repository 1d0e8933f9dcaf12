"""Long greedy requests that overlap, on the real engine and the MLX runtime, step by step, and forwards that fail."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model as load_by_mlx_lm

from asking import greedy
from mlx_faults import FaultKind, failing
from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.engine.request import Aborted, Event, Failed, Finished, TokenEvent
from rootstock.errors import RootstockError
from rootstock.runtime.host_memory import footprint_bytes, return_free_memory
from rootstock.testing.byte_tokenizer import ByteTokenizer
from twins.mlx_served import load, own_greedy

OPEN = 4  # requests that decode at once
WAITING = 2  # further ones, while a forward fails
SYSTEM_TOKENS = 45  # that all prompts share
FAULTY_LINEAR = (
    9  # in the second of three or four blocks: earlier ones have written K and V, later ones have not
)


@dataclass
class Asked:
    """A request, and what has come of it."""

    prompt: Tokens
    most: int
    answer: list[int] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.answer.append(event.token)
        elif isinstance(event, Finished | Failed | Aborted):
            self.ends.append(event)

    @property
    def finished(self) -> bool:
        return len(self.ends) == 1 and isinstance(self.ends[0], Finished)

    @property
    def cached_tokens(self) -> int:
        (end,) = self.ends
        assert isinstance(end, Finished)
        return end.usage.cached_tokens

    @property
    def error(self) -> RootstockError:
        (end,) = self.ends
        assert isinstance(end, Failed)
        return end.error


@dataclass(frozen=True)
class Memory:
    """Memory while no request is in the engine and the cache is empty."""

    active_bytes: int  # of MLX's arrays
    resident_bytes: int  # of the process


class Decodes:
    """An engine on a checkpoint of mlx-lm, and mlx-lm's own model of the same checkpoint."""

    def __init__(self, directory: Path, budget_bytes: int, seed: int = 0) -> None:
        self.runtime = load(directory)
        made = assemble(
            self.runtime,
            ByteTokenizer(),
            CacheConfig(block_size=8, budget_bytes=budget_bytes),
            EngineConfig(
                max_batch=OPEN, chunk_tokens=24, idle_work=False, draft_tokens=0, memory_limit_bytes=0
            ),
        )
        self.engine = made.engine
        self.cache = made.engine._cache
        self.own: nn.Module = load_by_mlx_lm(directory)[0]
        self.decode_steps = 0
        self.asked: list[Asked] = []
        self._random = np.random.default_rng(seed)
        self._system = self._tokens(SYSTEM_TOKENS)

    def _tokens(self, count: int) -> Tokens:
        vocab = self.runtime.description.vocab_size
        return self._random.integers(4, vocab, count).astype(np.int32)

    def prompt(self) -> Tokens:
        return np.concatenate([self._system, self._tokens(int(self._random.integers(5, 60)))])

    def ask(self, prompt: Tokens, most: int) -> Asked:
        asked = Asked(prompt, most)
        self.asked.append(asked)
        self.engine.submit(greedy(prompt, most), asked)
        return asked

    def step(self) -> bool:
        """Runs a step. Returns False if there was nothing to do."""
        decodes = self.engine.scheduler.decodes
        worked = self.engine.step()
        self.decode_steps += decodes and worked
        return worked

    def run(self) -> None:
        """Runs all requests to their ends."""
        while self.step():
            pass
        self.cache.check()

    def decode(self, steps: int, least: int, most: int, *, collect_garbage: bool) -> None:
        """Runs at least so many steps that decode, with answers of `least` to `most` tokens, to the end of all."""
        if not collect_garbage:
            gc.disable()
        try:
            end, first = self.decode_steps + steps, len(self.asked)
            while self.decode_steps < end:
                if sum(not asked.ends for asked in self.asked[first:]) < OPEN:
                    self.ask(self.prompt(), int(self._random.integers(least, most)))
                self.step()
            self.run()
        finally:
            gc.enable()

    def memory(self) -> Memory:
        """Empties the cache and measures the memory, once all libraries have returned what they do not use."""
        self.engine.clear_cache()
        self.runtime.apply(self.cache.return_memory())
        self.cache.check()
        mx.clear_cache()
        return_free_memory()
        resident = footprint_bytes()
        assert resident is not None
        return Memory(mx.get_active_memory(), resident)

    def other_answers(self, asked: Sequence[Asked]) -> int:
        """Counts the answers, or beginnings of answers, that mlx-lm's own cache does not give."""
        return sum(each.answer != own_greedy(self.own, each.prompt, len(each.answer)) for each in asked)

    @property
    def pool_copies(self) -> int | None:
        return self.runtime.pool_copies

    @property
    def rows_in_use(self) -> int:
        """Counts leases, and rows that are in use, while no request is in the engine."""
        stats = self.cache.stats()
        return stats.leases + stats.live_blocks + sum(family.live_rows for family in stats.families)


@dataclass
class Failure:
    """Outcome of a forward that failed while requests were open."""

    kept_tokens: int  # that are cached just after it
    ends: Counter[str]  # of the open requests: "finished", or the error's code
    ended_once: bool
    other_answers: int  # also of beginnings before the failure
    rows_in_use: int  # after the last request has ended
    cached_again: list[int]  # tokens that each open request finds when it is sent again
    pool_copies: int | None


def fail(decodes: Decodes, kind: FaultKind, tokens: int, *, in_prefill: bool) -> Failure:
    """Fails a forward while requests decode and others wait, then sends the same requests again."""
    decodes.ask(decodes.prompt(), tokens)
    decodes.run()
    first = [decodes.ask(decodes.prompt(), tokens) for _ in range(OPEN + WAITING)]
    while not all(asked.answer for asked in first[: 1 if in_prefill else OPEN]):
        decodes.step()
    with failing(kind, FAULTY_LINEAR, RuntimeError("injected")):
        decodes.step()
    kept = decodes.cache.stats().cached_tokens
    decodes.run()
    in_use = decodes.rows_in_use
    ends = Counter("finished" if asked.finished else asked.error.code for asked in first)
    again = [decodes.ask(asked.prompt, tokens) for asked in first]
    decodes.run()
    return Failure(
        kept,
        ends,
        all(len(asked.ends) == 1 for asked in first),
        decodes.other_answers([*first, *again]),
        in_use + decodes.rows_in_use,
        [asked.cached_tokens for asked in again],
        decodes.pool_copies,
    )


def wrong_after_loss(lost: Failure) -> list[str]:
    """Names what is wrong after a forward that lost the pools."""
    wrong = {
        "a request did not fail once with pools_lost": lost.ends != {"pools_lost": OPEN + WAITING},
        "something was still cached": lost.kept_tokens > 0 or lost.cached_again[0] > 0,
    }
    return [*(name for name, holds in wrong.items() if holds), *_wrong_after_any(lost)]


def wrong_after_exception(raised: Failure) -> list[str]:
    """Names what is wrong after a forward that left the pools whole."""
    wrong = {
        "no request failed with step_failed": raised.ends["step_failed"] == 0,
        "a waiting request was not answered": raised.ends["finished"] < WAITING,
        "a request failed otherwise": raised.ends.keys() != {"step_failed", "finished"},
        "the cache was lost": raised.kept_tokens == 0 or min(raised.cached_again) == 0,
    }
    return [*(name for name, holds in wrong.items() if holds), *_wrong_after_any(raised)]


def _wrong_after_any(failure: Failure) -> list[str]:
    wrong = {
        "a request ended twice or never": not failure.ended_once,
        "answers differ": failure.other_answers > 0,
        "rows are still in use": failure.rows_in_use > 0,
        "a pool was copied": failure.pool_copies != 0,
    }
    return [name for name, holds in wrong.items() if holds]
