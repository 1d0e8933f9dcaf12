"""Splicing: a rendered conversation's tokens, with the sampled ids of the model's own answers in their places.

The result spells the same as the tokenizer's own tokens of the rendered text: control token for control token, and
character for character between them. The only exception is a tool call that the client has sent back with the same
id, name and arguments: it gets the serialization that the model wrote, which says the same call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock.cache.types import NO_TOKENS, Tokens
from rootstock.text.prompts.same_call import CallSpan, ReturnedCall, after_same_call
from rootstock.text.prompts.sampled_answers import AnswerPlace, SampledAnswer, SampledAnswers
from rootstock.text.prompts.spelling import Spelled, Spelling, marks_in
from rootstock.text.prompts.tenant_salt import PromptOwner
from rootstock.text.prompts.text_alignment import common_chars

Encode = Callable[[int], Tokens]  # encodes a piece of the text, by its index


@dataclass(frozen=True, slots=True)
class SplicedPart:
    """Consecutive pieces of a rendered text and their tokens."""

    text: str
    tokens: Tokens
    is_spliced: bool


@dataclass(frozen=True, slots=True)
class SplicedText:
    parts: tuple[SplicedPart, ...]
    place: AnswerPlace
    sampled_tokens: int  # ids that come from answers
    restored_calls: int  # calls with the serialization that the model wrote

    def tokens(self) -> Tokens:
        """Returns the tokens of all parts. The caller owns the array."""
        return np.concatenate([NO_TOKENS, *(part.tokens for part in self.parts)])


@dataclass(frozen=True, slots=True)
class Asker:
    """The sender of a prompt: its owner, and the calls that it sends back."""

    owner: PromptOwner
    returned: Mapping[str, ReturnedCall]


def splice(pieces: list[str], encode: Encode, answers: SampledAnswers, asker: Asker) -> SplicedText:
    """Encodes the pieces of a rendered text, one by one, or several at once from a remembered answer."""
    parts: list[SplicedPart] = []
    owner, salt = asker.owner.share, asker.owner.salt
    before = xxhash.xxh3_128()  # of the text before the next piece
    sampled = calls = at = 0
    digest = before.digest()
    while at < len(pieces):
        digest = before.digest()
        found: _Splice | None = None
        for answer in answers.find(owner, (salt, digest)):
            other = _Alignment(answer, pieces, at, encode, answers.spelling, asker.returned).splice()
            if other is not None and (found is None or other.chars > found.chars):
                found = other
        if found is None:
            part, count = SplicedPart(pieces[at], encode(at), is_spliced=False), 1
        else:
            count = found.pieces
            part = SplicedPart("".join(pieces[at : at + count]), found.tokens, is_spliced=True)
            sampled += found.sampled
            calls += found.calls
        parts.append(part)
        before.update(part.text.encode())
        at += count
    last = parts[-1].tokens if parts else NO_TOKENS
    place = AnswerPlace(answers, owner, (salt, digest), last)
    return SplicedText(tuple(parts), place, sampled, calls)


@dataclass(frozen=True, slots=True)
class _Splice:
    tokens: Tokens
    pieces: int
    sampled: int
    calls: int  # serialized again by the client or the template
    chars: int


class _Alignment:
    """The alignment of an answer with the text from one piece on. Both are compared as spellings."""

    def __init__(
        self,
        answer: SampledAnswer,
        pieces: list[str],
        first: int,
        encode: Encode,
        spelling: Spelling,
        returned: Mapping[str, ReturnedCall],
    ) -> None:
        self._answer = answer
        self._pieces = pieces
        self._first = first
        self._encode = encode
        self._spelling = spelling
        self._returned = returned
        self._text = ""  # of the pieces that were looked at
        self._starts: list[int] = []  # of these pieces in it
        self._spelled: dict[int, Spelled] = {}  # pieces that a cut lies in: many cuts may lie in one
        # Equal runs: (start in the answer, start in the text, characters).
        self._equal: list[tuple[int, int, int]] = []

    def splice(self) -> _Splice | None:
        """Returns the tokens of the pieces, with as many sampled ids as the text allows; None if it allows none."""
        calls = self._align()
        for attempt, (end, count, at) in enumerate(self._cuts()):
            if (
                at <= self._answer.prompt_chars
            ):  # ids without text may stand there: nothing was returned of them
                return None
            piece = bisect_right(self._starts, end) - 1
            if end == len(self._text):
                rest: Tokens | None = NO_TOKENS
                piece += 1
            elif end == self._starts[piece]:
                rest = NO_TOKENS
            else:
                rest = self._rest(piece, end - self._starts[piece], anew=attempt == 0)
                piece += 1
            if rest is not None and piece:
                tokens = np.concatenate((self._answer.tokens[:count], rest))
                before = sum(start < at for start in calls)
                return _Splice(tokens, piece, count - self._answer.prompt_tokens, before, end)
        return None

    def _align(self) -> list[int]:
        """Finds the equal runs of both. Returns where in the answer a call begins that the text serializes again."""
        own = self._answer.spelled.text
        spans: list[CallSpan] | None = None
        skipped: list[int] = []
        at = here = run = 0  # in the answer, in the text, and where the current run begins in the answer
        while True:
            count = common_chars(own[at:], self._text[here:])
            if count or skipped:  # an answer may be cut right behind a call
                self._equal.append((at, here, count))
                at, here = at + count, here + count
            if at == len(own):
                return skipped
            if here == len(self._text) and self._extend():
                continue
            if spans is None:
                spans = self._answer.spans(self._returned)
            span = next(
                (each for each in spans if run <= each.call_start and each.start <= at <= each.end), None
            )
            if span is None:
                return skipped
            start = here - (at - max(run, span.start))
            self._extend_beyond(start, span)
            end = after_same_call(span, self._text, start)
            if end is None:
                return skipped
            skipped.append(span.call_start)
            at, here = span.end, end
            run = at

    def _extend(self) -> bool:
        """Adds the next piece to the text. Returns False if there is none."""
        at = self._first + len(self._starts)
        if at >= len(self._pieces):
            return False
        self._starts.append(len(self._text))
        self._text += self._spelling.text(self._encode(at))
        return True

    def _extend_beyond(self, start: int, span: CallSpan) -> None:
        """Adds pieces until the text has more control tokens after `start` than the call."""
        control_tokens = sum(1 for _ in marks_in(span.call))
        while sum(1 for _ in marks_in(self._text[start:])) <= control_tokens and self._extend():
            pass

    def _cuts(self) -> Iterator[tuple[int, int, int]]:
        """Yields (end in the text, tokens of the answer, end in the answer) of possible cuts, the deepest first."""
        for start, here, count in reversed(self._equal):
            for end, tokens in self._answer.spelled.cuts(start, start + count):
                yield here + end - start, tokens, end

    def _rest(self, piece: int, chars: int, *, anew: bool) -> Tokens | None:
        """Returns tokens of a piece after its first characters: the tokenizer's own, or else the text's tokens."""
        own = self._spelled.get(piece)
        if own is None:
            own = self._spelled[piece] = self._spelling.spelled(self._encode(self._first + piece))
        count = own.count_at(chars)
        if count is not None:
            return own.tokens[count:]
        if not anew:
            return None
        rest = own.text[chars:]
        marks = next(marks_in(rest), None)
        plain = rest if marks is None else rest[: marks[0]]
        tokens = self._spelling.encode_plain(plain)
        if tokens is None or marks is None:
            return tokens
        after = own.count_at(chars + marks[0])
        assert after is not None, "control tokens are whole"
        return np.concatenate((tokens, own.tokens[after:]))
