"""Compiled constraints: a grammar in a process of its own, its matchers, and the markers of reasoning as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock.engine.constraints.host import GrammarLost, GrammarProcess
from rootstock.engine.constraints.vocabulary import Ids, Vocabulary

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

    It lives in the process of its grammar. `take` and `begin_mask` do not wait. One thread uses it at a time.
    """

    def __init__(self, process: GrammarProcess) -> None:
        self._process = process
        self._number = next(process.matchers)
        self._untold: list[int] = []  # tokens that the process does not know
        self._taking: int | None = None  # the question with the tokens before them
        self._masking: int | None = None
        self._stopped = False
        self.error: str | None = None

    def __del__(self) -> None:
        self._process.gone.append(self._number)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end may come."""
        self.settle()
        return self._stopped and self.error is None

    def take(self, token: int) -> None:
        """Takes the next token. Whether it may come shows in `error` after `settle`."""
        self._untold.append(token)
        if self._taking is None:  # not more than one at once: answers that nobody reads would fill the socket
            self._tell()

    def settle(self) -> None:
        """Waits until all tokens are taken."""
        while self._untold or self._taking is not None:
            self._tell()
            taking, self._taking = self._taking, None
            if taking is not None:
                self._stopped = bool(self._answered(taking).get("stopped"))

    def agreeing(self, tokens: list[int]) -> int:
        """Counts the first of these tokens that may come next."""
        self.settle()
        count = self._answered(self._asked("agree", tokens=tokens)).get("count")
        return count if isinstance(count, int) else 0

    def begin_mask(self) -> None:
        """Asks for the mask of the next token, which `mask` returns."""
        if self._masking is None:
            if self._untold:
                self.settle()
            self._masking = self._asked("mask")

    def mask(self, words: int) -> Words:
        """Returns the mask of the next token: nothing if there is an error."""
        self.begin_mask()  # after all tokens
        self.settle()
        found, self._masking = self._masking, None
        body = b""
        if found is not None and self.error is None:
            try:
                answer = self._process.answer(found)
            except GrammarLost as error:
                self.error = str(error)
            else:
                self._note(answer.head)
                body = answer.body
        return mask_words(body, words)

    def _tell(self) -> None:
        if self._untold and self._taking is None:
            told, self._untold = self._untold, []
            self._taking = self._asked("take", tokens=told)

    def _asked(self, do: str, **fields: Any) -> int | None:
        if self.error is not None:
            return None
        try:
            return self._process.ask({"do": do, "matcher": self._number, **fields})
        except GrammarLost as error:
            self.error = str(error)
            return None

    def _answered(self, asked: int | None) -> dict[str, Any]:
        if asked is None:
            return {}
        try:
            head = self._process.answer(asked).head
        except GrammarLost as error:
            self.error = str(error)
            return {}
        self._note(head)
        return head

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
