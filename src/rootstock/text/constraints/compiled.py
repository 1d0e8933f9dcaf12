"""Compiled constraints: a grammar in a process of its own, its matchers, and the markers of reasoning as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rootstock.text.constraints.host import GrammarLost, GrammarProcess, MatcherRound
from rootstock.text.constraints.vocabulary import Ids, Vocabulary

_T = TypeVar("_T")
Words = NDArray[np.uint32]  # the bits of a mask, the lowest first


@dataclass(frozen=True, slots=True, eq=False)
class Marker:
    """A marker of reasoning: its tokens, and the bytes by which any spelling of it is found."""

    ids: tuple[int, ...]
    spelled: bytes
    overlong: tuple[int, ...]  # tokens that hold all of it and more text

    @staticmethod
    def of(text: str, vocabulary: Vocabulary) -> Marker:
        ids = vocabulary.encode_marker(text)
        spelled = vocabulary.spelled(ids)
        return Marker(ids, spelled, tuple(vocabulary.going_on_after(spelled)))

    def tail(self, text: bytes) -> bytes:
        """Returns the end of `text` in which the marker may have begun."""
        return text[max(0, len(text) - len(self.spelled) + 1) :]

    def tokens_beyond(self, tail: bytes, vocabulary: Vocabulary) -> Ids:
        """Returns the tokens that would complete the marker after `tail` and go on in the same token."""
        found = list(self.overlong)
        for known in range(1, len(self.spelled)):
            if tail.endswith(self.spelled[:known]):
                found += vocabulary.beginning_with(self.spelled[known:])
        return np.array(found, dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledReasoning:
    end: Marker
    start: Marker | None
    starts_inside: bool
    budget_tokens: int | None


class Matcher:
    """A matcher of one answer: which tokens may come next, and whether the answer is complete.

    It lives in the process of its grammar. `take`, `begin_mask` and `send` do not wait. One thread uses it at a time.
    """

    def __init__(self, process: GrammarProcess) -> None:
        self._process = process
        self._number = next(process.matchers)
        self._tokens: list[int] = []  # of the round
        self._round: MatcherRound | None = None  # with the last tokens, and the mask after them
        self._index = 0  # in the round
        self._is_settled = True
        self._stopped = False
        self.error: str | None = None

    def __del__(self) -> None:
        self._process.gone.append(self._number)

    @property
    def is_stopped(self) -> bool:
        """True if only the end of the answer may follow."""
        self.settle()
        return self._stopped and self.error is None

    def take(self, token: int) -> None:
        """Takes the next token. Whether it may come shows in `error` after `settle`."""
        if self._round is not None and self._round.is_open:
            self._tokens.append(token)
        else:
            self.settle()
            self._join([token])

    def begin_mask(self) -> None:
        """Begins the mask of the next token, which `mask` returns. It begins with each token that is taken, too."""
        if self._round is None:
            self._join([])

    def send(self) -> None:
        """Sends the tokens of all matchers of the grammar that it has not got, in one message."""
        if self._round is not None and self._round.is_open:
            self._tried(self._process.send)

    def settle(self) -> None:
        """Waits until all tokens are taken."""
        of, self._is_settled = None if self._is_settled else self._round, True
        if of is not None and self.error is None:
            head = self._tried(lambda: self._process.taken(of, self._index)) or {}
            self._note(head)
            self._stopped = bool(head.get("stopped"))

    def agreeing(self, tokens: list[int]) -> int:
        """Counts the first of these tokens that may come next."""
        self.settle()
        if self.error is not None:
            return 0
        question = {"do": "agree", "matcher": self._number, "tokens": tokens}
        answer = self._tried(lambda: self._process.answer(self._process.ask(question)))
        count = None if answer is None else answer.head.get("count")
        return count if isinstance(count, int) else 0

    def mask(self, words: int) -> Words:
        """Returns the mask of the next token: nothing if there is an error."""
        self.begin_mask()
        self.settle()
        of, self._round = self._round, None
        if of is None or self.error is not None:
            return mask_words(b"", words)
        head, body = self._tried(lambda: self._process.mask(of, self._index, 4 * words)) or ({}, b"")
        self._note(head)
        return mask_words(body, words)

    def _join(self, tokens: list[int]) -> None:
        self._round = None
        if self.error is not None:
            return
        joined = self._tried(lambda: self._process.join(self._number, tokens))
        if joined is not None:
            self._round, self._index = joined
            self._tokens, self._is_settled = tokens, False

    def _tried(self, call: Callable[[], _T]) -> _T | None:
        """Calls a function. Returns None if the process has ended, and notes why."""
        try:
            return call()
        except GrammarLost as error:
            self.error = str(error)
            return None

    def _note(self, head: dict[str, Any]) -> None:
        if self.error is None and (error := head.get("error")) is not None:
            self.error = str(error)


def mask_words(body: bytes, words: int) -> Words:
    """Reads the words of a mask. A body of another size allows nothing."""
    if len(body) != 4 * words:
        return np.zeros(words, dtype=np.uint32)
    return np.frombuffer(body, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar of which every request with it has a matcher. They share the states of its lexer, which only grow."""

    process: GrammarProcess
    # Returns a matcher that shares nothing: the shared states have a limit. None: that would take long.
    rebuild: Callable[[], Matcher | None]

    def matcher(self) -> Matcher:
        """Returns a matcher at the beginning of an answer."""
        return Matcher(self.process)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledConstraint:
    """A constraint that is ready for any number of requests at once. Any thread may use it."""

    vocabulary: Vocabulary
    grammar: CompiledGrammar | None
    reasoning: CompiledReasoning | None
