"""Incremental detokenization of one request: the pieces of text that are certain, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rootstock.cache.types import Tokens
from rootstock.text.tokenizer import ModelTokenizer, token_text

_UNDECODED = "\N{REPLACEMENT CHARACTER}"  # decoders return it for bytes that are no UTF-8, or not yet
_CONTEXT_TOKENS = 16
_WINDOW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StreamDelta:
    text: str
    stopped_by: str = ""  # the stop string before which the text ended; "": it goes on


class NoText:
    """The output of a model without a tokenizer."""

    def push(self, token: int) -> StreamDelta:
        return StreamDelta("")

    def finish(self) -> str:
        return ""


class Detokenizer:
    """Text of one request's output, as it becomes certain.

    The deltas and `finish()` together are `decode(context + tokens)` after `decode(context)`, cut before the first
    complete stop string (the longer of two that end at one place). With the end of the prompt as `context`, a
    tokenizer that drops the space before the first word drops none here.

    Special tokens are left out, except those in `visible`: they are shown by their names.

    Holds back a character whose bytes are incomplete, and text that may begin a stop string. Decodes a window of the
    last tokens only. (DecodeStream of tokenizers does the same, but drops incomplete bytes at the end, and raises if
    a decoder's text is not append-only.)
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        stop_strings: Sequence[str] = (),
        context: Sequence[int] | Tokens = (),
        visible: Collection[int] = (),
    ) -> None:
        assert all(stop_strings), "an empty stop string"
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        self._stop_strings = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._window = _clean_end(tokenizer, context)
        self._given_tokens = len(self._window)  # of the window: their text was given out
        self._context_text = tokenizer.decode(self._window)
        self._given_chars = len(self._context_text.rstrip(_UNDECODED))  # of the window's text
        self._held = ""  # may begin a stop string
        self._stopped = False

    def push(self, token: int) -> StreamDelta:
        """Returns the text that became certain with `token`. Do not call it after a stop string."""
        assert not self._stopped
        if self._tokenizer.is_hidden(token):
            return self._until_stop(self._named(token)) if token in self._visible else StreamDelta("")
        self._window.append(token)
        return self._until_stop(self._decode_window())

    def finish(self) -> str:
        """Returns the text held back, now that no token follows."""
        if self._stopped:
            return ""
        self._stopped = True
        text = self._tokenizer.decode(self._window)
        return self._held + text[self._given_in(text) :]

    def _named(self, token: int) -> str:
        """Returns the text before a special token, which completes no character, and the token's name."""
        text = self._tokenizer.decode(self._window)
        rest = text[self._given_in(text) :]
        if text.endswith(_UNDECODED):  # the bytes after the token are another character's
            self._window = []
            self._context_text = ""
        self._given_tokens = len(self._window)
        self._given_chars = len(text) if self._window else 0
        return rest + token_text(self._tokenizer, token)

    def _decode_window(self) -> str:
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_UNDECODED)
        delta = certain[self._given_in(text) :]
        self._given_chars = max(self._given_chars, len(certain))
        if len(certain) == len(text):
            self._shift()
        elif len(self._window) % _WINDOW_TOKENS == 0:
            delta += self._cut(text)
        return delta

    def _given_in(self, text: str) -> int:
        """Counts the characters of the window's text that were given out.

        A prompt may end inside a character, which the output completes, or with a U+FFFD of its own. The next token
        tells which.
        """
        if text.startswith(self._context_text):
            return max(self._given_chars, len(self._context_text))
        return self._given_chars

    def _shift(self) -> None:
        """Keeps only the newest tokens as the context of later ones, if they have text."""
        newest = self._window[self._given_tokens :]
        text = self._tokenizer.decode(newest)
        if text:
            self._window = newest
            self._given_chars = len(text)
            self._context_text = ""
        self._given_tokens = len(self._window)

    def _cut(self, text: str) -> str:
        """Gives out bytes that stay invalid, so that an output of invalid bytes does not grow the window."""
        for cut in range(len(self._window) - 4, 0, -1):  # a character has at most four bytes
            head, tail = (
                self._tokenizer.decode(self._window[:cut]),
                self._tokenizer.decode(self._window[cut:]),
            )
            if head + tail == text and len(head) >= self._given_in(text):
                delta = head[self._given_in(text) :]
                self._window = self._window[cut:]
                self._context_text = ""
                self._given_tokens = self._given_chars = 0
                return delta
        return ""

    def _until_stop(self, delta: str) -> StreamDelta:
        if not self._stop_strings:
            return StreamDelta(delta)
        text = self._held + delta
        found = [(at + len(stop), at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            self._stopped = True
            return StreamDelta(text[:at], stop)
        certain = self._first_that_may_begin_a_stop(text)
        self._held = text[certain:]
        return StreamDelta(text[:certain])

    def _first_that_may_begin_a_stop(self, text: str) -> int:
        for at in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            rest = text[at:]
            if any(stop.startswith(rest) for stop in self._stop_strings):
                return at
        return len(text)


def _clean_end(tokenizer: ModelTokenizer, context: Sequence[int] | Tokens) -> list[int]:
    """Returns the fewest tokens at the end of `context` that begin with a whole character."""
    visible = [int(token) for token in context[-_CONTEXT_TOKENS:] if not tokenizer.is_hidden(int(token))]
    for start in range(len(visible) - 1, -1, -1):
        text = tokenizer.decode(visible[start:])
        if text and not text.startswith(_UNDECODED):
            return visible[start:]
    return visible if len(context) <= _CONTEXT_TOKENS else []
