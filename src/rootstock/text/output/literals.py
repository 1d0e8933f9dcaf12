"""Readings of literals that are no JSON, which translate them to JSON while they come.

Python's: calls with keyword arguments, and values that a template prints with `repr`. Gemma's: objects with bare keys
and marks instead of quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rootstock.text.limits import MAX_JSON_DEPTH
from rootstock.text.output.calls import (
    MAX_HEADER_CHARS,
    REPLACEMENT,
    CallInProgress,
    is_surrogate_pair,
    json_text,
    json_value,
)
from rootstock.text.output.formats import BareKeyCalls, PythonicCalls
from rootstock.text.output.scanner import (
    EndOfText,
    Give,
    Malformed,
    Reading,
    Scanner,
    StopStrings,
    finished,
    result_of,
)

_END_OF_WORD = StopStrings(",:)}] \t\r\n")
_END_OF_KEY = StopStrings(":")
_END_OF_NAME = StopStrings("({")
_END_OF_KEYWORD = StopStrings("=")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_INTEGER = re.compile(r"[+-]?[0-9](?:_?[0-9])*")
_PYTHON_FLOAT = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?")
_ESCAPES = dict(zip("abfnrtv\\'\"\n", "\a\b\f\n\r\t\v\\'\"", strict=False)) | {"\n": ""}
_CODE_POINT_CHARS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")
_OCTAL = re.compile("[0-7]{1,3}")
_PYTHON_QUOTES = ('"""', "'''", '"', "'")


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation of literals. Python's strings have escapes; between marks every character is itself."""

    quotes: tuple[str, ...]
    has_escapes: bool
    has_bare_keys: bool
    ends: dict[str, StopStrings]  # of a string's text, by its quote

    @classmethod
    def of_python(cls) -> Notation:
        return cls(
            _PYTHON_QUOTES, True, False, {quote: StopStrings([quote, "\\"]) for quote in _PYTHON_QUOTES}
        )

    @classmethod
    def with_marks(cls, quote: str) -> Notation:
        return cls((quote,), False, True, {quote: StopStrings([quote])})


PYTHON = Notation.of_python()


class LiteralReader:
    def __init__(self, scanner: Scanner, notation: Notation, give: Give) -> None:
        self._scanner = scanner
        self._notation = notation
        self._give = give
        self._depth = 0

    def value(self) -> Reading[None]:
        self._depth += 1
        if self._depth > MAX_JSON_DEPTH:
            raise Malformed
        quote = yield from self.quote()
        first = yield from self._scanner.peek()
        if quote is not None:
            yield from self._string(quote)
        elif first == "":
            raise EndOfText
        elif first == "{":
            yield from self.items("}")
        elif first == "[":
            yield from self._list("]")
        elif first == "(":
            yield from self._list(")")
        else:
            yield from self._word()
        self._depth -= 1

    def quote(self) -> Reading[str | None]:
        """Returns the quote with which the text goes on."""
        seen = yield from self._scanner.peek(max(map(len, self._notation.quotes)))
        return next((quote for quote in self._notation.quotes if seen.startswith(quote)), None)

    def _list(self, end: str) -> Reading[None]:
        self._scanner.take(1)
        self._give("[")
        yield from self._separated(end, self.value)
        self._give("]")

    def items(self, end: str) -> Reading[None]:
        """Reads an object with its brackets."""
        self._scanner.take(1)
        self._give("{")
        yield from self._separated(end, self._item)
        self._give("}")

    def _item(self) -> Reading[None]:
        yield from self._key()
        self._give(": ")
        yield from self._scanner.skip_space()
        yield from self.value()

    def _separated(self, end: str, part: Callable[[], Reading[None]]) -> Reading[None]:
        """Reads parts with commas between them, and the bracket after the last one."""
        yield from self._scanner.skip_space()
        before = ""
        while not (yield from self._scanner.skips(end)):
            self._give(before)
            before = ", "
            yield from part()
            yield from self._separator(end)

    def _separator(self, end: str) -> Reading[None]:
        yield from self._scanner.skip_space()
        if (yield from self._scanner.skips(",")):
            yield from self._scanner.skip_space()
        elif (yield from self._scanner.peek()) != end:
            raise Malformed

    def _key(self) -> Reading[None]:
        quote = yield from self.quote()
        if quote is not None:
            yield from self._string(quote)
        elif self._notation.has_bare_keys:
            key: list[str] = []
            yield from self._scanner.before(_END_OF_KEY, key.append, MAX_HEADER_CHARS)
            self._give(f'"{json_text("".join(key).strip())}"')
        else:
            raise Malformed
        yield from self._scanner.skip_space()
        yield from self._scanner.expect(":")

    def _string(self, quote: str) -> Reading[None]:
        yield from self._scanner.expect(quote)
        self._give('"')
        while True:
            stop = yield from self._scanner.before(
                self._notation.ends[quote], lambda text: self._give(json_text(text))
            )
            self._scanner.take(len(stop))
            if stop == quote:
                break
            yield from self._escape()
        self._give('"')

    def _escape(self) -> Reading[None]:
        """Reads an escape of Python (Language Reference, 2.4.1.1) after its backslash."""
        first = yield from self._scanner.peek()
        if first == "":
            raise EndOfText
        if first in _ESCAPES:
            self._give(json_text(_ESCAPES[self._scanner.take(1)]))
        elif first in _CODE_POINT_CHARS:
            chars = _CODE_POINT_CHARS[first]
            digits = (yield from self._scanner.peek(1 + chars))[1:]
            if len(digits) < chars or not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
                raise Malformed
            self._scanner.take(1 + chars)
            point = int(digits, 16)
            if 0xD800 <= point < 0xE000:  # two escapes of JSON, if they are the halves of one character
                both = f"\\u{point:04x}" + (yield from self._scanner.peek(6))
                if is_surrogate_pair(both):
                    self._scanner.take(6)
                self._give(both if is_surrogate_pair(both) else REPLACEMENT)
            else:
                self._give(json_text(chr(point)))
        elif octal := _OCTAL.match((yield from self._scanner.peek(3))):
            self._give(json_text(chr(int(self._scanner.take(len(octal[0])), 8))))
        else:
            self._give(json_text("\\"))

    def _word(self) -> Reading[None]:
        pieces: list[str] = []
        yield from self._scanner.before(_END_OF_WORD, pieces.append, MAX_HEADER_CHARS)
        word = "".join(pieces)
        number = json_number(word)
        if word in _CONSTANTS:
            self._give(_CONSTANTS[word])
        elif number is not None:
            self._give(number)
        elif word and self._notation.has_bare_keys:
            self._give(f'"{json_text(word)}"')
        else:
            raise Malformed


def json_number(word: str) -> str | None:
    """Returns a number of Python in JSON."""
    if _JSON_NUMBER.fullmatch(word):
        return word
    if _PYTHON_INTEGER.fullmatch(word):
        digits = word.lstrip("+-").replace("_", "").lstrip("0") or "0"
        return f"-{digits}" if word.startswith("-") else digits
    if _PYTHON_FLOAT.fullmatch(word):
        try:
            number = repr(float(word))
        except ValueError:
            return None
        return number if _JSON_NUMBER.fullmatch(number) else None
    return None


def python_value(text: str) -> str | None:
    """Translates a literal of Python to JSON. None: the text is not a literal."""
    scanner = finished(f"{text.strip()}\n")
    pieces: list[str] = []

    def reading() -> Reading[None]:
        yield from LiteralReader(scanner, PYTHON, pieces.append).value()
        yield from scanner.skip_space()
        if (yield from scanner.peek()) != "":
            raise Malformed

    try:
        result_of(reading())
    except Malformed:
        return None
    translated = "".join(pieces)
    return translated if json_value(translated) is not None or translated == "null" else None


def read_pythonic_call(
    calls: PythonicCalls, scanner: Scanner, call: CallInProgress, *, known_only: bool
) -> Reading[bool]:
    """Reads one call, after the bracket of the list if it is the first one, and the text up to the next one."""
    yield from scanner.skips("[")
    yield from scanner.skip_space()
    name: list[str] = []
    if (yield from scanner.before(_END_OF_NAME, name.append, MAX_HEADER_CHARS)) != "(":
        raise Malformed
    if "".join(name).strip() == "print" and calls.opening:  # Gemma 3 prints the result
        name.clear()
        scanner.take(1)
        yield from scanner.before(_END_OF_NAME, name.append, MAX_HEADER_CHARS)
    call.start("".join(name), known_only=known_only or not calls.opening)
    scanner.keep_all()
    yield from _keyword_arguments(scanner, call)
    call.is_complete = True
    yield from scanner.skip_space()
    separated = yield from scanner.skips(",")
    yield from scanner.skip_space()
    following = yield from scanner.peek()
    if separated and following not in ("", "]"):
        return True
    for end in (")", "]"):
        if (yield from scanner.skips(end)):
            yield from scanner.skip_space()
    if calls.closing and not (yield from scanner.skips(calls.closing)):
        return (yield from scanner.peek()).isidentifier()  # one call per line
    return False


def _keyword_arguments(scanner: Scanner, call: CallInProgress) -> Reading[None]:
    yield from scanner.expect("(")
    yield from scanner.skip_space()
    reader = LiteralReader(scanner, PYTHON, call.write)
    before = "{"
    while not (yield from scanner.skips(")")):
        keyword: list[str] = []
        yield from scanner.before(_END_OF_KEYWORD, keyword.append, MAX_HEADER_CHARS)
        key = "".join(keyword).strip()
        if not key.isidentifier():
            raise Malformed
        scanner.take(1)
        call.write(f'{before}"{json_text(key)}": ')
        before = ", "
        yield from scanner.skip_space()
        yield from reader.value()
        yield from scanner.skip_space()
        if (yield from scanner.skips(",")):
            yield from scanner.skip_space()
        elif (yield from scanner.peek()) != ")":
            raise Malformed
    call.write("{}" if before == "{" else "}")


def read_bare_key_call(
    calls: BareKeyCalls, scanner: Scanner, call: CallInProgress, *, known_only: bool
) -> Reading[bool]:
    """Reads one call, after its opening, and the text up to the next one."""
    yield from scanner.skip_space()
    yield from scanner.expect("call:")
    name: list[str] = []
    if (yield from scanner.before(_END_OF_NAME, name.append, MAX_HEADER_CHARS)) != "{":
        raise Malformed
    call.start("".join(name), known_only=known_only)
    scanner.keep_all()
    yield from LiteralReader(scanner, Notation.with_marks(calls.quote), call.write).items("}")
    call.is_complete = True
    yield from scanner.skip_space()
    if (yield from scanner.skips(calls.closing)):
        yield from scanner.skip_space()
    return (yield from scanner.goes_on_with(calls.opening))
