"""Spelled tokens: the text of tokens, in which each control token is a mark that no text can contain.

Two token sequences with the same spelling say the same to a client. Plain text that looks like a control token is
spelled differently from the control token.
"""

from __future__ import annotations

import codecs
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.errors import SpecialTokenInText
from rootstock.text.tokenizer import KeptTokens, ModelTokenizer

# A mark is two halves of surrogate pairs, in base 2,048. No decoder yields them, and clients' texts with them are
# refused.
_FIRST_HALF = 0xD800
_BASE = 2_048
MARK_CHARS = 2
_MARKS = re.compile("[\ud800-\udfff]{2}")


@dataclass(frozen=True, slots=True, eq=False)
class Spelled:
    """Tokens, their spelling, and the positions in it at which whole characters end together with tokens."""

    tokens: Tokens
    text: str
    ends: NDArray[np.int32]  # ascending positions in the text; 0 first
    counts: NDArray[np.int32]  # the number of tokens before each of them

    def cuts(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields (position, tokens before it) of the possible cuts of the tokens, from `last` down to `first`."""
        at = bisect_right(self.ends, last) - 1
        while at >= 0 and self.ends[at] >= first:
            yield int(self.ends[at]), int(self.counts[at])
            at -= 1

    def count_at(self, position: int) -> int | None:
        """Returns the number of tokens before a position; None if a token or a character lies across it."""
        at = bisect_right(self.ends, position) - 1
        return int(self.counts[at]) if self.ends[at] == position else None


class Spelling:
    """The spelling of a tokenizer's tokens. For any thread."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}  # of text tokens
        self._whole: dict[int, str] = {}  # the spelling of tokens that are whole characters or control tokens

    def spelled(self, tokens: Tokens) -> Spelled:
        """Spells tokens. Bytes that are no UTF-8 become U+FFFD, as in the text that clients get."""
        parts: list[str] = []
        ends, counts = [0], [0]
        chars, pending = 0, False
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = self._whole
        for before, token in enumerate(tokens.tolist()):
            text = whole.get(token)
            if text is None:
                text = self._learned(token)
            if pending and (text is None or not is_mark(text)):
                text = decoder.decode(self._bytes[token])
            elif pending:  # a control token ends the incomplete character
                broken = decoder.decode(b"", final=True)
                parts.append(broken)
                chars += len(broken)
                ends.append(chars)
                counts.append(before)
                decoder.reset()
            elif text is None:
                text = decoder.decode(self._bytes[token])
            assert text is not None
            parts.append(text)
            chars += len(text)
            pending = bool(decoder.getstate()[0])
            if not pending:
                ends.append(chars)
                counts.append(before + 1)
        if pending:
            broken = decoder.decode(b"", final=True)
            parts.append(broken)
            ends.append(chars + len(broken))
            counts.append(len(tokens))
        return Spelled(tokens, "".join(parts), np.array(ends, np.int32), np.array(counts, np.int32))

    def text(self, tokens: Tokens) -> str:
        """Returns the spelling alone, several times as fast."""
        try:
            return "".join(map(self._whole.__getitem__, tokens.tolist()))
        except KeyError:  # a token that is new, or a part of a character
            return self.spelled(tokens).text

    def _learned(self, token: int) -> str | None:
        """Returns the spelling of a token that was not seen before; None for a part of a character."""
        if self._tokenizer.is_added(token):
            self._whole[token] = text = mark_of(token)
            return text
        raw = self._bytes[token] = self._tokenizer.token_bytes(token)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return None
        self._whole[token] = text
        return text

    def named(self, spelled: Spelled) -> Named:
        """Names the control tokens, except those that clients never see."""
        parts: list[str] = []
        places = [(0, 0)]
        at = chars = 0
        for position, token in marks_in(spelled.text):
            is_hidden = self._tokenizer.is_hidden(token)
            name = "" if is_hidden else self._tokenizer.token_bytes(token).decode(errors="replace")
            parts += (spelled.text[at:position], name)
            chars += position - at
            places.append((chars, position))
            at, chars = position + MARK_CHARS, chars + len(name)
            places.append((chars, at))
        return Named("".join([*parts, spelled.text[at:]]), places)

    def encode_plain(self, text: str) -> Tokens | None:
        """Tokenizes text without control tokens; None if no tokens of this tokenizer spell it exactly."""
        try:
            tokens = self._tokenizer.encode_chat(self._tokenizer.escape(text, KeptTokens.NONE))
        except SpecialTokenInText:
            return None
        return tokens if self.text(tokens) == text else None


def mark_of(token: int) -> str:
    high, low = divmod(token, _BASE)
    assert 0 <= high < _BASE
    return chr(_FIRST_HALF + high) + chr(_FIRST_HALF + low)


def is_mark(text: str) -> bool:
    return len(text) == MARK_CHARS and _FIRST_HALF <= ord(text[0]) < _FIRST_HALF + _BASE


def marks_in(text: str) -> Iterator[tuple[int, int]]:
    """Yields (position, control token) of the marks in a spelling."""
    for mark in _MARKS.finditer(text):
        high, low = (ord(half) - _FIRST_HALF for half in mark[0])
        yield mark.start(), high * _BASE + low


@dataclass(frozen=True, slots=True)
class Named:
    """A spelling with the names of its control tokens in place of their marks."""

    text: str
    _places: list[tuple[int, int]]  # (in the text, in the spelling): before and after each mark, ascending

    def start(self, position: int) -> int | None:
        """Translates the start of a part of the text to the spelling; None within the name of a control token."""
        return self._translated(bisect_right(self._places, (position, sys.maxsize)) - 1, position)

    def end(self, position: int) -> int | None:
        """Translates the end of a part like `start`. Hidden control tokens at the end are not in the part."""
        at = bisect_left(self._places, (position, -1))
        is_place = at < len(self._places) and self._places[at][0] == position
        return self._translated(at if is_place else at - 1, position)

    def _translated(self, at: int, position: int) -> int | None:
        chars, spelled = self._places[at]
        is_before_mark = at % 2 == 1
        return None if is_before_mark and position > chars else spelled + position - chars
