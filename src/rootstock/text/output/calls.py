"""Calls of an answer as they are read: their deltas, and the readings of calls whose arguments are JSON."""

from __future__ import annotations

import json
import math
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from rootstock.text.conversation.types import Tool
from rootstock.text.limits import MAX_JSON_DEPTH, MAX_NAME_CHARS
from rootstock.text.output.deltas import CallArguments, CallEnded, CallStarted, Delta
from rootstock.text.output.formats import CallIds, HeaderCalls, JsonCalls
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

MAX_CALLS = 1_024  # of one answer: those after them are text
MAX_HEADER_CHARS = 1_024

_NAME = re.compile(r"[\w.:/-]+")
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits
_NINE_CHARS = re.compile("[A-Za-z0-9]{9}")
_TEN_CHARS = re.compile("[a-z0-9]{10}")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id")
_KNOWN_KEYS = frozenset({*_NAME_KEYS, *_ARGUMENT_KEYS, *_ID_KEYS, "function", "type"})
_CLOSER_OF = {"{": "}", "[": "]"}
_END_OF_STRING = StopStrings(['"', "\\", *map(chr, range(0x20))])
# Escapes of the halves of surrogate pairs. No text in UTF-8 can have half of one alone.
_HALF = r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF_ALONE = re.compile(rf"(?P<whole>\\[^u]|{_PAIR})|{_HALF}", re.DOTALL)
REPLACEMENT = r"\ufffd"

RandomText = Callable[[int], str]  # of so many random letters and digits
NewId = Callable[[str, int, str | None], str]  # of a call's name, index, and the id that the model wrote


def call_ids(ids: CallIds, random_text: RandomText) -> NewId:
    """Returns the function that gives the calls of one answer their ids. No two are the same."""
    used: set[str] = set()

    def candidates(name: str, index: int, written: str | None) -> Iterator[str]:
        match ids:
            case CallIds.NINE_CHARS:
                if written and _NINE_CHARS.fullmatch(written):
                    yield written
                yield from (random_text(9) for _ in count())
            case CallIds.TEN_CHARS:
                if written and _TEN_CHARS.fullmatch(written):
                    yield written
                yield from (random_text(10).lower() for _ in count())
            case CallIds.NUMBERED:
                if written and _is_name(written):
                    yield written
                yield from (f"functions.{name}:{number}" for number in count(index))
            case CallIds.RANDOM:
                yield from (f"call_{random_text(24)}" for _ in count())

    def new_id(name: str, index: int, written: str | None) -> str:
        id = next(each for each in candidates(name, index, written) if each not in used)
        used.add(id)
        return id

    return new_id


def random_text(chars: int) -> str:
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(chars))


class Tools:
    """The request's tools."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters = {tool.name: tool.parameters or {} for tool in tools}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Returns the JSON schema of a tool's parameters; empty for an unknown tool."""
        return self._parameters.get(name, {})


class CallInProgress:
    """A call that is being read. It gives its deltas."""

    def __init__(self, index: int, tools: Tools, new_id: NewId, give: Callable[[Delta], None]) -> None:
        self._index = index
        self._tools = tools
        self._new_id = new_id
        self._give = give
        self._arguments: list[str] = []
        self.name: str | None = None  # once the call has started
        self.is_complete = False  # all arguments were read

    @property
    def parameters(self) -> Mapping[str, Any]:
        assert self.name is not None
        return self._tools.parameters(self.name)

    def start(self, name: str, written_id: str | None = None, *, known_only: bool) -> None:
        """Takes the name of the call. Raises Malformed for a text that is not a name.

        With `known_only`, raises Malformed for a name that no tool has.
        """
        name = name.strip()
        if name not in self._tools and (known_only or not _is_name(name)):
            raise Malformed
        self.name = name
        self._give(CallStarted(self._index, self._new_id(name, self._index, written_id), name))

    def write(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._give(CallArguments(self._index, text))

    def end(self, raw: str) -> None:
        text = "".join(self._arguments)
        self._give(CallEnded(self._index, json_object(text) if text else None, raw))


def _is_name(text: str) -> bool:
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def json_object(text: str) -> dict[str, Any] | None:
    """Parses JSON (RFC 8259), without the infinite numbers that Python reads. None: the text is no object."""
    value = json_value(text)
    return value if isinstance(value, dict) else None


def json_value(text: str) -> Any:
    """Parses JSON. Returns None for a text that is not JSON, and raises no error.

    An escape may be half of a surrogate pair, which UTF-8 does not have. It becomes U+FFFD.
    """
    try:
        return json.loads(without_halves(text), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def json_text(text: str) -> str:
    """Returns a text as the inside of a JSON string. The parts of a text give the parts of the string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def without_halves(text: str) -> str:
    """Returns JSON with U+FFFD for each half of a surrogate pair that stands alone."""
    return _HALF_ALONE.sub(lambda match: match["whole"] or REPLACEMENT, text)


def is_surrogate_pair(escapes: str) -> bool:
    """Returns whether two escapes of JSON are the halves of one character."""
    return re.fullmatch(_PAIR, escapes) is not None


class JsonReader:
    """Readings of JSON. `marks` are markers of the format, which no JSON holds outside of its strings."""

    def __init__(self, scanner: Scanner, marks: tuple[str, ...]) -> None:
        self._scanner = scanner
        self._outside = StopStrings(['"', "{", "}", "[", "]", *marks])
        self._end_of_scalar = StopStrings([*",}] \t\r\n", *marks])

    def value(self, give: Give) -> Reading[None]:
        """Reads a value and gives its text. Control characters in strings, which JSON forbids, are escaped."""
        match (yield from self._scanner.peek()):
            case "":
                raise EndOfText
            case "{" | "[":
                yield from self._container(give)
            case '"':
                yield from self.string(give)
            case _:
                yield from self._scanner.before(self._end_of_scalar, give, MAX_HEADER_CHARS)

    def _container(self, give: Give) -> Reading[None]:
        closers: list[str] = []
        while True:
            stop = yield from self._scanner.before(self._outside, give)
            if stop == '"':
                yield from self.string(give)
                continue
            if stop in _CLOSER_OF:
                closers.append(_CLOSER_OF[stop])
            elif stop != closers.pop():
                raise Malformed
            if len(closers) > MAX_JSON_DEPTH:
                raise Malformed
            give(self._scanner.take(1))
            if not closers:
                return

    def string(self, give: Give) -> Reading[None]:
        give(self._scanner.take(1))
        while True:
            stop = yield from self._scanner.before(_END_OF_STRING, give)
            if stop == '"':
                give(self._scanner.take(1))
                return
            if stop == "\\":
                give((yield from self._escape()))
            else:
                give(json_text(self._scanner.take(1)))

    def _escape(self) -> Reading[str]:
        scanner = self._scanner
        first = yield from scanner.peek(2)
        if len(first) < 2:
            raise EndOfText
        if first != "\\u" or not re.fullmatch(_HALF, (yield from scanner.peek(6))):
            return scanner.take(2)
        if is_surrogate_pair((yield from scanner.peek(12))):
            return scanner.take(12)
        scanner.take(6)
        return REPLACEMENT

    def short_text(self) -> Reading[str]:
        """Reads a string and returns its text. Raises Malformed for another value, and for a long one."""
        if (yield from self._scanner.peek()) != '"':
            raise Malformed
        pieces = [self._scanner.take(1)]
        left = MAX_HEADER_CHARS
        while len(pieces) == 1 or pieces[-1] != '"':
            before = len(pieces)
            stop = yield from self._scanner.before(_END_OF_STRING, pieces.append, left)
            chars = 2 if stop == "\\" else 1
            if len((yield from self._scanner.peek(chars))) < chars:
                raise EndOfText
            pieces.append(self._scanner.take(chars))
            left = max(0, left - sum(map(len, pieces[before:])))
        text = json_value(without_halves("".join(pieces)))
        if not isinstance(text, str):
            raise Malformed
        return text


def read_arguments(reader: JsonReader, scanner: Scanner, call: CallInProgress) -> Reading[None]:
    """Reads a value as a call's arguments, as it comes.

    Some models write the object as a string, or null for none.
    """
    first = yield from scanner.peek()
    if first == '"' or first == "n":
        pieces: list[str] = []
        yield from reader.value(pieces.append)
        text = "".join(pieces)
        within = "{}" if text == "null" else json_value(text)
        is_object = isinstance(within, str) and json_object(within) is not None
        call.write(without_halves(within) if is_object else text)
    else:
        yield from reader.value(call.write)
    call.is_complete = True


class JsonCall:
    """Reading of a call that is a JSON object, with its members in any order.

    With `named_by_key`, it may be an object of one member: a tool's name and the arguments.
    """

    def __init__(
        self,
        scanner: Scanner,
        call: CallInProgress,
        marks: tuple[str, ...],
        *,
        known_only: bool,
        named_by_key: bool,
    ) -> None:
        self._scanner = scanner
        self._call = call
        self._reader = JsonReader(scanner, marks)
        self._known_only = known_only
        self._named_by_key = named_by_key
        self._held: str | None = None  # arguments that come before the name
        self._id: str | None = None

    def read(self) -> Reading[None]:
        yield from self._members()
        if self._call.name is None:
            raise Malformed
        if not self._call.is_complete:  # there are no arguments
            self._call.write("{}")
            self._call.is_complete = True

    def _members(self) -> Reading[None]:
        scanner = self._scanner
        yield from scanner.expect("{")
        yield from scanner.skip_space()
        while not (yield from scanner.skips("}")):
            key = yield from self._reader.short_text()
            if self._named_by_key and self._call.name is None and key not in _KNOWN_KEYS:
                self._start(key)
                key = _ARGUMENT_KEYS[0]
            elif self._known_only and key not in _KNOWN_KEYS:
                raise Malformed  # an object of an answer in JSON: its text need not wait
            yield from scanner.skip_space()
            yield from scanner.expect(":")
            yield from scanner.skip_space()
            yield from self._member(key)
            yield from scanner.skip_space()
            if (yield from scanner.skips(",")):
                yield from scanner.skip_space()
            elif (yield from scanner.peek()) != "}":
                raise Malformed

    def _member(self, key: str) -> Reading[None]:
        first = yield from self._scanner.peek()
        if key in _NAME_KEYS or (key == "function" and first == '"'):
            name = yield from self._reader.short_text()
            if self._call.name is None:
                self._start(name)
        elif key == "function" and first == "{" and self._call.name is None:
            yield from self._members()
        elif key in _ARGUMENT_KEYS and not self._call.is_complete:
            yield from self._arguments()
        elif key in _ID_KEYS and first == '"':
            self._id = yield from self._reader.short_text()
        else:
            yield from self._reader.value(_ignore)

    def _arguments(self) -> Reading[None]:
        if self._call.name is not None:
            yield from read_arguments(self._reader, self._scanner, self._call)
            return
        pieces: list[str] = []
        yield from self._reader.value(pieces.append)
        self._held = "".join(pieces)

    def _start(self, name: str) -> None:
        self._call.start(name, self._id, known_only=self._known_only)
        self._scanner.keep_all()
        if self._held is not None:
            held = finished(self._held)
            result_of(read_arguments(JsonReader(held, ()), held, self._call))


def _ignore(_: str) -> None:
    pass


def read_json_call(
    calls: JsonCalls, scanner: Scanner, call: CallInProgress, marks: tuple[str, ...], *, known_only: bool
) -> Reading[bool]:
    """Reads one call and the text up to the next one. Returns whether there is one.

    At the first call of an array, the text goes on with the bracket, at others with an object.
    """
    yield from scanner.skips("[")
    yield from scanner.skip_space()
    try:
        known_only = known_only or not calls.opening
        named_by_key = not calls.name_key
        yield from JsonCall(scanner, call, marks, known_only=known_only, named_by_key=named_by_key).read()
    except EndOfText:
        raise
    except Malformed:
        if not call.is_complete:
            raise
    return (yield from _to_next_object(calls, scanner))


def _to_next_object(calls: JsonCalls, scanner: Scanner) -> Reading[bool]:
    yield from scanner.skip_space()
    for separator in (",", ";"):
        if (yield from scanner.skips(separator)):
            break
    yield from scanner.skip_space()
    if (yield from scanner.peek()) == "{":
        return True
    if (yield from scanner.skips("]")):
        yield from scanner.skip_space()
    if calls.closing:
        yield from scanner.skips(calls.closing)
    return False


def read_header_call(
    calls: HeaderCalls, scanner: Scanner, call: CallInProgress, marks: tuple[str, ...], *, known_only: bool
) -> Reading[bool]:
    """Reads one call, after its opening, and the text up to the next one. Returns whether there is one."""
    header: list[str] = []
    ends = StopStrings([calls.header_end, *((calls.opening,) if calls.closing else ("{",))])
    stop = yield from scanner.before(ends, header.append, MAX_HEADER_CHARS)
    found = re.fullmatch(calls.header, "".join(header).strip())
    if found is None or stop == calls.opening:
        raise Malformed
    if stop == calls.header_end:
        yield from scanner.expect(stop)
    call.start(found["name"], found.groupdict().get("id"), known_only=known_only)
    scanner.keep_all()
    yield from scanner.skip_space()
    yield from read_arguments(JsonReader(scanner, marks), scanner, call)
    yield from scanner.skip_space()
    for end in (calls.tail.strip(), calls.closing):
        if end and (yield from scanner.skips(end)):
            yield from scanner.skip_space()
    return (yield from to_next_opening(calls.opening, calls.section[1], scanner))


def to_next_opening(opening: str, section_end: str, scanner: Scanner) -> Reading[bool]:
    """Reads up to the opening of the next call, or behind the end of the section."""
    yield from scanner.skip_space()
    if (yield from scanner.goes_on_with(opening)):
        return True
    if section_end:
        yield from scanner.skips(section_end)
    return False
