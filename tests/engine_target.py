"""Engine in this process as a target of workloads, which are token ids there."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock.bench.targets import Dialogue, Done, Sample
from rootstock.bench.workloads import ALPHABET, Symbols
from rootstock.cache.types import Tokens
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
from rootstock.errors import RootstockError

# Small ids are special tokens in most vocabularies.
_FIRST_TOKEN = 64


def as_tokens(symbols: Symbols, vocab_size: int) -> Tokens:
    """Returns token ids, different ones for different symbols if the vocabulary is large enough."""
    first = _FIRST_TOKEN if vocab_size >= _FIRST_TOKEN + ALPHABET else 0
    return np.asarray(first + symbols % (vocab_size - first), np.int32)


@dataclass(slots=True)
class TokenSample(Sample):
    prompt: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    answer_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))


class EngineTarget:
    """Started engine as a target. Answers have their full length and are greedy."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self._numbers = itertools.count()

    def open(self, prefix: Symbols) -> Dialogue:
        return _EngineDialogue(self, as_tokens(prefix, self.vocab_size))

    def next_id(self) -> RequestId:
        return RequestId(f"bench-{next(self._numbers)}")


class _EngineDialogue:
    def __init__(self, target: EngineTarget, history: NDArray[np.int32]) -> None:
        self._target = target
        self._history = history

    def ask(self, new: Symbols, answer_tokens: int, done: Done) -> None:
        prompt = np.concatenate([self._history, as_tokens(new, self._target.vocab_size)])
        sample = TokenSample(time.monotonic(), prompt_tokens=len(prompt), prompt=prompt)
        answer: list[int] = []

        def sink(event: Event) -> None:  # on the engine's thread
            match event:
                case TokenEvent():
                    sample.token_times.append(time.monotonic())
                    answer.append(event.token)
                case Finished(usage=usage):
                    sample.cached_tokens = usage.cached_tokens
                    sample.completion_tokens = usage.completion_tokens
                    self._end(sample, answer, done)
                case Failed(error=error):
                    sample.error = str(error)
                    self._end(sample, answer, done)
                case Aborted():
                    sample.error = "aborted"
                    self._end(sample, answer, done)
                case _:  # scores of a prompt, which are not requested here
                    pass

        request = Request(
            self._target.next_id(),
            prompt,
            ResolvedSampling(temperature=0.0),
            StopParams(max_tokens=answer_tokens, ignore_eos=True),
        )
        try:
            self._target.engine.submit(request, sink)
        except RootstockError as error:
            sample.error = str(error)
            self._end(sample, answer, done)

    def _end(self, sample: TokenSample, answer: list[int], done: Done) -> None:
        sample.ended_at = time.monotonic()
        sample.answer_tokens = np.array(answer, np.int32)
        sample.answer = sample.answer_tokens.tobytes()
        self._history = np.concatenate([sample.prompt, sample.answer_tokens])
        done(sample)
