"""The progress of one answer through its constraint, token by token.

An answer reasons first, if its constraint knows markers of reasoning, and follows the grammar after the end marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from rootstock.errors import CompilerBusy, ConstraintFailed
from rootstock.text.constraints.compiled import CompiledConstraint, Matcher, Words
from rootstock.text.constraints.host import GrammarLost
from rootstock.text.constraints.vocabulary import Ids, Vocabulary

# In errors of llguidance: limits of a lexer, which copies of a matcher share.
_SHARED_LIMITS = ("too many states", "too many expressions")
_MAX_DETAIL_CHARS = 300
_TOKENS_BETWEEN_REBUILDS = 64


# ---- restrictions of the next token


@dataclass(frozen=True, slots=True)
class Free:
    """Every token may come."""


@dataclass(frozen=True, slots=True)
class Forced:
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class Banned:
    """Some tokens may not come."""

    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Only the tokens of a grammar may come, and an end token if the answer may end here."""

    forbidden: NDArray[np.bool_]  # [vocab]
    may_end: bool


Restriction = Free | Forced | Banned | Masked


# ---- phases of an answer


@dataclass(frozen=True, slots=True)
class _Reasoning:
    tail: bytes = b""  # the end of the reasoning, as far as the end marker may have begun there


@dataclass(frozen=True, slots=True)
class _Writing:
    """A marker whose rest is forced."""

    rest: tuple[int, ...]
    then: _Phase


@dataclass(frozen=True, slots=True)
class _Answering:
    """An answer by the grammar. Before it has begun, the marker of reasoning may come instead."""

    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Unbound:
    """An answer without a grammar, in which reasoning may begin again."""

    tail: bytes = b""


_Phase = _Reasoning | _Writing | _Answering | _Unbound


class AnswerProgress:
    """Progress of one request's answer. `restriction` tells which token may come next, `accept` takes it.

    One thread uses it at a time: `prepare` may run on another thread while the model computes.
    """

    def __init__(self, constraint: CompiledConstraint) -> None:
        self._constraint = constraint
        self._vocabulary = constraint.vocabulary
        self._grammar = constraint.grammar
        self._reasoning = constraint.reasoning
        self._budget_left = None if self._reasoning is None else self._reasoning.budget_tokens
        self._matcher: Matcher | None = None  # made when it is needed: many requests only wait
        self._answer: list[int] = []  # tokens that the matcher has
        self._rebuilt_at: int | None = None  # tokens of the answer when the matcher was replaced
        self._mask: Masked | None = None  # of the next token, once it is computed
        self._phase: _Phase = _Unbound() if self._grammar is None else _Answering()
        if self._reasoning is not None and self._reasoning.starts_inside:
            self._phase = self._go_on_reasoning(b"")

    @property
    def needs_mask(self) -> bool:
        """True if `prepare` has anything to do."""
        return isinstance(self._phase, _Answering) and self._mask is None

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows nothing but the end of the answer. Raises ConstraintFailed."""
        if not isinstance(self._phase, _Answering) or not self._answer or self._matcher is None:
            return False
        self.settle()
        return self._matcher.is_stopped

    def settle(self) -> None:
        """Waits until the grammar has taken all accepted tokens. Raises ConstraintFailed."""
        if self._matcher is not None:
            self._matcher.settle()
            if self._matcher.error is not None and not self._rebuilt():
                raise _failed(self._matcher)

    def begin(self) -> None:
        """Begins the mask that `prepare` returns, once `send` is called."""
        if self.needs_mask:
            self._started().begin_mask()

    def send(self) -> None:
        """Sends the grammar the begun masks and accepted tokens of all its answers. Does not wait."""
        if self._matcher is not None:
            self._matcher.send()

    def prepare(self) -> None:
        """Computes the mask of the next token, if it needs one. An error of the grammar appears in `restriction`."""
        if self.needs_mask:
            self._mask = self._computed_mask()

    def restriction(self) -> Restriction:
        """Returns which token may come next. Raises ConstraintFailed."""
        match self._phase:
            case _Answering(is_begun):
                self.prepare()
                mask, matcher = self._mask, self._matcher
                assert mask is not None
                assert matcher is not None
                if matcher.error is not None:
                    raise _failed(matcher)
                return mask if is_begun else self._or_reasoning(mask)
            case _Reasoning(tail):
                return self._in_reasoning(tail)
            case _Writing(rest):
                return Forced(rest[0])
            case _Unbound():
                return Free()
            case other:
                assert_never(other)

    def accept(self, token: int) -> None:
        """Takes the next token, which is no end token. A grammar takes it later: `settle` waits for that."""
        match self._phase:
            case _Answering(is_begun):
                if not is_begun and self._begins_reasoning(token):
                    assert self._reasoning is not None
                    assert self._reasoning.start is not None
                    self._phase = _continued(self._reasoning.start.ids[1:], self._go_on_reasoning(b""))
                else:
                    self._consume(token)
                    self._phase = _Answering(is_begun=True)
                self._mask = None
            case _Reasoning(tail):
                self._reason(tail, token)
            case _Writing(rest, then):
                assert token == rest[0], "a forced token was not chosen"
                self._phase = _continued(rest[1:], then)
            case _Unbound(tail):
                self._watch(tail, token)
            case other:
                assert_never(other)

    def agreeing(self, draft: Sequence[int]) -> int:
        """Counts the first tokens of a draft that may come. An estimate in reasoning, which may end within it."""
        match self._phase:
            case _Answering():
                return self._started().agreeing(list(draft))
            case _Writing(rest):
                pairs = zip(draft, rest, strict=False)
                differs = (i for i, (drafted, forced) in enumerate(pairs) if drafted != forced)
                return next(differs, len(draft))
            case _:
                return len(draft)

    # ------------------------------------------------------------------------------------- the grammar

    def _started(self) -> Matcher:
        if self._matcher is None:
            assert self._grammar is not None
            self._matcher = self._grammar.matcher()
        return self._matcher

    def _computed_mask(self) -> Masked:
        matcher = self._started()
        mask = mask_of(matcher, self._vocabulary)
        if matcher.error is not None and self._rebuilt():
            mask = mask_of(self._started(), self._vocabulary)
        return mask

    def _consume(self, token: int) -> None:
        self._answer.append(token)
        self._started().take(token)

    def _rebuilt(self) -> bool:
        """Replaces a matcher that failed because the states shared with other requests reached their limit.

        Returns False if this answer alone reaches the limit, or would reach it again and again.
        """
        assert self._matcher is not None
        assert self._grammar is not None
        error = self._matcher.error or ""
        tokens = len(self._answer)
        too_soon = self._rebuilt_at is not None and tokens - self._rebuilt_at < _TOKENS_BETWEEN_REBUILDS
        if too_soon or not any(limit in error for limit in _SHARED_LIMITS):
            return False
        self._rebuilt_at = tokens
        try:
            alone = self._grammar.rebuild()
        except (GrammarLost, CompilerBusy):
            return False
        if alone is None:
            return False
        for token in self._answer:
            alone.take(token)
        alone.settle()
        if alone.error is not None:
            return False
        self._matcher = alone
        return True

    # -------------------------------------------------------------------------------------- reasoning

    def _after_reasoning(self) -> _Answering | _Unbound:
        return _Unbound() if self._grammar is None else _Answering(is_begun=True)

    def _may_reason(self, mask: Masked) -> bool:
        """Returns whether the marker of reasoning may stand before the answer whose first mask this is.

        The first token of a longer marker may also begin an answer. The grammar comes first then.
        """
        if self._reasoning is None or self._reasoning.start is None or self._reasoning.starts_inside:
            return False
        first, *rest = self._reasoning.start.ids
        return not rest or bool(mask.forbidden[first])

    def _or_reasoning(self, mask: Masked) -> Masked:
        """Adds the token that begins reasoning to the first mask of a grammar."""
        if not self._may_reason(mask):
            return mask
        assert self._reasoning is not None
        assert self._reasoning.start is not None
        forbidden = mask.forbidden.copy()
        forbidden[self._reasoning.start.ids[0]] = False
        return Masked(forbidden, mask.may_end)

    def _begins_reasoning(self, token: int) -> bool:
        start = None if self._reasoning is None else self._reasoning.start
        if start is None or token != start.ids[0]:
            return False
        self.prepare()
        assert self._mask is not None
        return self._may_reason(self._mask)

    def _in_reasoning(self, tail: bytes) -> Restriction:
        """Bans the end of the answer before its grammar began, and tokens whose end would be the answer's text."""
        if self._grammar is None:
            return Free()
        assert self._reasoning is not None
        beyond = self._reasoning.end.tokens_beyond(tail, self._vocabulary)
        return Banned(np.concatenate((self._vocabulary.eos_token_ids, beyond)))

    def _reason(self, tail: bytes, token: int) -> None:
        assert self._reasoning is not None
        text, end = tail + self._vocabulary.spelled([token]), self._reasoning.end
        at = text.find(end.spelled)
        if at >= 0:
            self._phase = self._after_reasoning()
            if isinstance(self._phase, _Unbound):
                self._phase = _Unbound(text[at + len(end.spelled) :])
            return
        if self._budget_left is not None:
            self._budget_left -= 1
        self._phase = self._go_on_reasoning(end.tail(text))

    def _go_on_reasoning(self, tail: bytes) -> _Reasoning | _Writing:
        if self._budget_left is None or self._budget_left > 0:
            return _Reasoning(tail)
        assert self._reasoning is not None
        return _Writing(self._reasoning.end.ids, self._after_reasoning())

    def _watch(self, tail: bytes, token: int) -> None:
        """Looks for reasoning that begins in an answer without a grammar. Each token of it counts."""
        start = None if self._reasoning is None else self._reasoning.start
        if start is None or self._budget_left is None:
            return
        text = tail + self._vocabulary.spelled([token])
        self._phase = self._go_on_reasoning(b"") if start.spelled in text else _Unbound(start.tail(text))


def _continued(rest: tuple[int, ...], then: _Phase) -> _Phase:
    return _Writing(rest, then) if rest else then


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> Masked:
    """Computes the mask of a matcher's next token. Check the matcher for errors."""
    return mask_from(matcher.mask(vocabulary.mask_words), vocabulary)


def mask_from(words: Words, vocabulary: Vocabulary) -> Masked:
    """Converts the words of a mask."""
    allowed = np.unpackbits(words.view(np.uint8), count=vocabulary.size + 1, bitorder="little")
    return Masked(allowed[: vocabulary.size] == 0, bool(allowed[vocabulary.end]))


def _failed(matcher: Matcher) -> ConstraintFailed:
    return ConstraintFailed(first_line(matcher.error or ""))


def first_line(message: str) -> str:
    """Returns the beginning of a message of llguidance, which may go on with the state of its parser."""
    for mark in ("<state>", "<non-verbose/>"):
        message = message.split(mark)[0]
    return " ".join(message.split())[:_MAX_DETAIL_CHARS].rstrip(". ")
