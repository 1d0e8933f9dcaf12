"""Comparison of the tool calls that clients send back with the sampled ones, for any serialization."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.text.tokenizer import Message

# Braces and brackets of one call that begin no JSON: each costs a look at the rest of the call.
_MOST_FAILURES = 64
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ReturnedCall:
    """A call of a conversation's history, as the client sends it."""

    name: str
    arguments: Any  # an object, or text that is not an object


def returned_calls(messages: Sequence[Message]) -> dict[str, ReturnedCall]:
    """Returns the calls of a conversation by id, without ids that several calls have."""
    calls: dict[str, ReturnedCall] = {}
    repeated: set[str] = set()
    for message in messages:
        for call in message.get("tool_calls") or ():
            id = call.get("id") if isinstance(call, Mapping) else None
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(id, str) and isinstance(function, Mapping):
                if id in calls:
                    repeated.add(id)
                calls[id] = ReturnedCall(str(function.get("name")), function.get("arguments"))
    return {id: call for id, call in calls.items() if id not in repeated}


def json_equal(one: Any, other: Any) -> bool:
    """Compares JSON values. A number equals a number of the same value, and never true or false."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(json_equal(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, list):
        return (
            isinstance(other, list)
            and len(one) == len(other)
            and all(json_equal(a, b) for a, b in zip(one, other, strict=True))
        )
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return isinstance(one, str) and isinstance(other, str) and one == other


def end_of_same_call(call: str, text: str, start: int) -> int | None:
    """Returns where `text` has ended the call that begins at `start`; None if it is another call than `call`.

    Both are one call if they differ only in the serialization of JSON and in the white space around JSON: names,
    markers and everything else are equal character by character.
    """
    at, other, failures = 0, start, 0
    while True:
        here = _next_json(call, at)
        if here is None:
            rest = call[at:]
            return other + len(rest) if text.startswith(rest, other) else None
        before = call[at:here].rstrip()
        if not text.startswith(before, other):
            return None
        there = _after_space(text, other + len(before))
        one, its = _json_at(call, here), _json_at(text, there)
        if one is None or its is None:  # a brace of plain text
            failures += 1
            plain = call[at : here + 1]
            if failures > _MOST_FAILURES or not text.startswith(plain, other):
                return None
            at, other = here + 1, other + len(plain)
            continue
        if not _are_equal(one[0], its[0]):
            return None
        at, other = one[1], its[1]
        if at < len(call):  # white space before the next marker
            at, other = _after_space(call, at), _after_space(text, other)


def _next_json(text: str, start: int) -> int | None:
    found = [at for at in (text.find("{", start), text.find("[", start)) if at >= 0]
    return min(found, default=None)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    if not text.startswith(("{", "["), at):
        return None
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return json_equal(one, other)
    except RecursionError:
        return False


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call that the model has written."""

    name: str
    arguments: str  # JSON
    raw: str  # the model's text of the call, with the markers around it

    def is_same(self, returned: ReturnedCall | None) -> bool:
        """Returns whether a client has sent this call back."""
        return (
            returned is not None
            and returned.name == self.name
            and _are_equal(json.loads(self.arguments), returned.arguments)
        )


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A part of a text that is a call, with the white space around it."""

    start: int
    end: int
    call_start: int
    call: str  # without the white space


def span_of(text: str, start: int, end: int) -> CallSpan:
    """Returns the span of the call text[start:end]. The template decides about the white space around a call."""
    first, last = start, end
    while first > 0 and text[first - 1].isspace():
        first -= 1
    return CallSpan(first, _after_space(text, last), start, text[start:end])


def after_same_call(span: CallSpan, text: str, start: int) -> int | None:
    """Returns where the same call, with the white space around it, ends in `text`; None if it is not there."""
    end = end_of_same_call(span.call, text, _after_space(text, start))
    return None if end is None else _after_space(text, end)
