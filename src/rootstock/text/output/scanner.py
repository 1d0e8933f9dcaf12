"""Reading a text that is still coming.

A reader is a generator: it yields where it needs more text, and goes on when `push` has brought some. It sees a
character only when enough text follows to decide about it. The result therefore does not depend on how the text is
cut into pieces. Decided text is consumed at once, so that little text waits and no text is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from rootstock.text.special_tokens import any_of

T = TypeVar("T")
Reading = Generator[None, None, T]
Give = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text is not of the form that is read."""


class EndOfText(Malformed):
    """The text ends within the form that is read."""


class StopStrings:
    """Strings to find. Of two that begin at one place, the longer one counts."""

    def __init__(self, strings: Iterable[str]) -> None:
        strings = frozenset(strings) - {""}
        self._found = any_of(strings) if strings else None
        self._beginnings = frozenset(string[:end] for string in strings for end in range(1, len(string)))
        self._longest = max(map(len, strings), default=1)

    def search(self, text: str, start: int, *, ended: bool) -> tuple[int, int]:
        """Returns where the first string begins and ends; two equal places: there is none before them.

        Text after the places may begin a string, unless the text has `ended`.
        """
        undecided = len(text) if ended else self._undecided_from(text, start)
        match = self._found.search(text, start) if self._found else None
        if match is not None and match.start() < undecided:
            return match.span()
        return undecided, undecided

    def _undecided_from(self, text: str, start: int) -> int:
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)


class Scanner:
    """The text that was pushed and is not consumed yet, and the consumed text of the call that is being read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None
        self._may_keep: int | None = None  # characters; None: any number

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def keep(self, most_chars: int) -> None:
        """Begins to keep the consumed text. Readers raise Malformed after `most_chars`, until `keep_all`."""
        self._kept = []
        self._may_keep = most_chars

    def keep_all(self) -> None:
        self._may_keep = None

    def kept(self) -> str:
        """Returns the text consumed since `keep`, and forgets it."""
        assert self._kept is not None, "keep() was called"
        kept = "".join(self._kept)
        self._kept = None
        self._may_keep = None
        return kept

    def take(self, chars: int) -> str:
        """Consumes characters that were seen."""
        taken = self._text[self._at : self._at + chars]
        assert len(taken) == chars
        self._at += chars
        if self._kept is not None:
            self._kept.append(taken)
        if self._may_keep is not None:
            self._may_keep = max(0, self._may_keep - chars)
        return taken

    def peek(self, chars: int = 1) -> Reading[str]:
        """Reads the next characters, fewer at the end of the text, without consuming them."""
        while len(self._text) - self._at < chars and not self._ended:
            yield
        return self._text[self._at : self._at + chars]

    def goes_on_with(self, string: str) -> Reading[bool]:
        while True:
            seen = self._text[self._at : self._at + len(string)]
            if seen == string or self._ended or not string.startswith(seen):
                return seen == string
            yield

    def skips(self, string: str) -> Reading[bool]:
        """Consumes `string` if the text goes on with it."""
        skipped = yield from self.goes_on_with(string)
        if skipped:
            self.take(len(string))
        return skipped

    def expect(self, string: str) -> Reading[None]:
        if not (yield from self.skips(string)):
            raise EndOfText if not (yield from self.peek()) else Malformed

    def skip_space(self) -> Reading[None]:
        """Consumes whitespace. Stops before the first other character, or at the end of the text."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._refuse_more(match.end() - self._at)
            self.take(match.end() - self._at)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def before(self, stops: StopStrings, give: Give, most_chars: int | None = None) -> Reading[str]:
        """Consumes and gives the text before the first of `stops`, and returns that, which is not consumed.

        Raises EndOfText after the last character, and Malformed after `most_chars` of them.
        """
        left = most_chars
        while True:
            start, end = stops.search(self._text, self._at, ended=self._ended)
            chars = start - self._at
            most = min((each for each in (left, self._may_keep) if each is not None), default=chars)
            if chars:
                give(self.take(min(chars, most)))
            if chars > most:
                raise Malformed
            if left is not None:
                left -= chars
            if start < end:
                return self._text[start:end]
            if self._ended:
                raise EndOfText
            yield

    def _refuse_more(self, chars: int) -> None:
        if self._may_keep is not None and chars > self._may_keep:
            self.take(self._may_keep)
            raise Malformed


def finished(text: str) -> Scanner:
    """Returns a scanner of a whole text."""
    scanner = Scanner()
    scanner.push(text)
    scanner.end()
    return scanner


def result_of(reading: Reading[T]) -> T:
    """Runs a reading of a `finished` text."""
    try:
        next(reading)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("a reading waits for more of a text that has ended")
