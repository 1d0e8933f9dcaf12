"""Compiled constraints: a grammar's matcher, and the markers of reasoning as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from rootstock.engine.constraints.vocabulary import Ids, Vocabulary


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


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar that every request with it copies. Copies share the states of its lexer, which only grow."""

    matcher: LLMatcher  # at the beginning of an answer; never advanced
    rebuild: Callable[[], LLMatcher]  # one that shares nothing: the shared states have a limit


@dataclass(frozen=True, slots=True, eq=False)
class CompiledConstraint:
    """A constraint that is ready for any number of requests at once. Any thread may use it."""

    vocabulary: Vocabulary
    grammar: CompiledGrammar | None
    reasoning: CompiledReasoning | None


def parser_limits() -> LLParserLimits:
    """Returns limits of one grammar: some 20 ms of work to begin, 10 ms for each token, 40 MB of lexer states.

    An object may have 1,000 properties that are not required: each takes four items of a row.
    """
    return LLParserLimits(
        max_items_in_row=4_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
