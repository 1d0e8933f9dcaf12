"""Memory of sampled answers: the ids that the model generated after each prompt, and the calls in them.

A client returns an answer as text. Tokenizing this text need not give the ids that were sampled, and the KV cache
holds the rows of the sampled ids. `splicing.py` puts these ids back where a later prompt repeats the text.

An answer is kept by the text before it: its key is a digest of the rendered prompt up to its last piece, and the
tokens of that piece precede the sampled ids. The same text elsewhere in a conversation, or in another conversation,
is therefore another answer.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rootstock.cache.fair_memory import FairMemory, Key
from rootstock.cache.types import Tokens
from rootstock.errors import SpecialTokenInText
from rootstock.text.prompts.same_call import CallSpan, ReturnedCall, SampledCall, span_of
from rootstock.text.prompts.spelling import Spelled, Spelling
from rootstock.text.special_tokens import escape_strings
from rootstock.text.tokenizer import KeptTokens, ModelTokenizer

ANSWERS_TO_ONE_PROMPT = 8  # choices and repetitions that are kept; the oldest goes first
CALLS_TO_ONE_PROMPT = 2_048  # likewise; an answer has at most half as many
_TOKEN_BYTES = 64  # of a kept token: its id, its spelling, the positions of both
_ENTRY_BYTES = 1_024  # overhead of an answer or a call
_CHAR_BYTES = 4


@dataclass(slots=True)
class SpliceCounters:
    answers: int = 0  # remembered
    calls: int = 0  # remembered
    spliced_tokens: int = 0  # sampled ids that prompts got back
    restored_calls: int = 0  # calls that the client or the template had serialized again


@dataclass(frozen=True, eq=False)
class SampledAnswer:
    """An answer: the tokens of the prompt's last piece, and the ids that were sampled after them."""

    tokens: Tokens  # [prompt_tokens + sampled]
    prompt_tokens: int
    calls: dict[str, SampledCall]  # by id, changed by the memory; calls of other answers may be among them
    spelling: Spelling

    @cached_property
    def spelled(self) -> Spelled:
        return self.spelling.spelled(self.tokens)

    @cached_property
    def prompt_chars(self) -> int:
        """Length of the spelling of the prompt's last piece, with a character that the answer completes."""
        spelled = self.spelled
        return int(spelled.ends[bisect_left(spelled.counts, self.prompt_tokens)])

    def spans(self, returned: Mapping[str, ReturnedCall]) -> list[CallSpan]:
        """Returns the spans, in the spelling, of the calls that a client has sent back."""
        calls = [call for id, call in list(self.calls.items()) if call.is_same(returned.get(id))]
        if not calls:
            return []
        named = self.spelling.named(self.spelled)
        spans: list[CallSpan] = []
        at = 0
        for call in calls:
            found = named.text.find(call.raw, at)
            if found < 0:
                continue
            at = found + len(call.raw)
            start, end = named.start(found), named.end(at)
            if start is not None and end is not None:
                spans.append(span_of(self.spelled.text, start, end))
        return spans


@dataclass(eq=False)
class AnswerPlace:
    """The end of a prompt, to which answers are remembered. Any thread may add an answer and its calls."""

    memory: SampledAnswers
    owner: str
    key: Key
    tokens: Tokens  # of the prompt's last piece
    calls: dict[str, SampledCall] = field(default_factory=dict)

    def remember(self, ids: Sequence[int]) -> None:
        """Keeps the sampled ids of an answer, its end token included."""
        self.memory.add(self, np.array(ids, np.int32))

    def remember_call(self, id: str, name: str, arguments: Mapping[str, Any], raw: str) -> None:
        """Keeps a call of an answer. `raw` is its text as the model wrote it, with the markers around it."""
        self.memory.add_call(self, id, name, arguments, raw)


class SampledAnswers:
    """The answers of all tenants, up to `cap_bytes`, a fair share for each. For any thread.

    A tenant gets its own answers only: keys begin with the salt of the cache's namespace.
    """

    def __init__(self, tokenizer: ModelTokenizer, cap_bytes: int) -> None:
        self.spelling = Spelling(tokenizer)
        self.counters = SpliceCounters()
        self._tokenizer = tokenizer
        self._kept: FairMemory[tuple[SampledAnswer, ...]] = FairMemory(cap_bytes)
        self._lock = threading.Lock()  # of additions and counters

    @property
    def held_bytes(self) -> int:
        return self._kept.held_bytes

    @property
    def dropped(self) -> int:
        """Number of prompts whose answers had to make room for others."""
        return self._kept.dropped

    def find(self, owner: str, key: Key) -> tuple[SampledAnswer, ...]:
        """Returns the answers to a prompt, the oldest first."""
        return self._kept.get(owner, key) or ()

    def forget(self, salt: str | None) -> None:
        """Drops the answers of one salt, or all."""
        self._kept.forget(salt)

    def add(self, place: AnswerPlace, ids: Tokens) -> None:
        if not len(ids):
            return
        tokens = np.concatenate((place.tokens, ids))
        with self._lock:
            kept = self.find(place.owner, place.key)
            same = next((answer for answer in kept if np.array_equal(answer.tokens, tokens)), None)
            if same is None:
                answer = SampledAnswer(tokens, len(place.tokens), place.calls, self.spelling)
                kept = (*kept, answer)[-ANSWERS_TO_ONE_PROMPT:]
            else:
                # The first of equal answers stays, so that later prompts of its conversation keep their tokens. The
                # calls of this one have ids of their own.
                same.calls.update(place.calls)
                _drop_oldest(same.calls)
                place.calls = same.calls
            self._put(place, kept)
            self.counters.answers += 1

    def add_call(
        self, place: AnswerPlace, id: str, name: str, arguments: Mapping[str, Any], raw: str
    ) -> None:
        try:
            # The prompts of later requests have them so.
            told = escape_strings(arguments, lambda text: self._tokenizer.escape(text, KeptTokens.OF_ANSWERS))
            call = SampledCall(name, json.dumps(told), raw)
        except (SpecialTokenInText, TypeError, ValueError, RecursionError):
            return
        with self._lock:
            place.calls[id] = call
            _drop_oldest(place.calls)
            self.counters.calls += 1
            if kept := self.find(place.owner, place.key):
                self._put(place, kept)  # with the bytes of the call

    def count_splice(self, tokens: int, calls: int) -> None:
        with self._lock:
            self.counters.spliced_tokens += tokens
            self.counters.restored_calls += calls

    def _put(self, place: AnswerPlace, answers: tuple[SampledAnswer, ...]) -> None:
        nbytes = sum(_ENTRY_BYTES + _TOKEN_BYTES * len(answer.tokens) for answer in answers)
        calls = {id: call for answer in answers for id, call in answer.calls.items()}
        for id, call in calls.items():
            chars = len(id) + len(call.name) + len(call.arguments) + len(call.raw)
            nbytes += _ENTRY_BYTES + _CHAR_BYTES * chars
        self._kept.put(place.owner, place.key, answers, nbytes)


def _drop_oldest(calls: dict[str, SampledCall]) -> None:
    while len(calls) > CALLS_TO_ONE_PROMPT:
        del calls[next(iter(calls))]
