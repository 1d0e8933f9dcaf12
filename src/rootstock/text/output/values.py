"""Values that stand in tags without JSON's quotes: their types by the tool's JSON schema, and their JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rootstock.text.output.calls import json_text, json_value, without_halves
from rootstock.text.output.formats import ValueType
from rootstock.text.output.literals import json_number, python_value
from rootstock.text.output.scanner import Give

MAX_HELD_VALUE_CHARS = 2**20  # of a value that may be no string: a longer one is a string

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_SCHEMAS = 256  # looked at for the type of one parameter
_STRING = frozenset({"string"})
_INTEGRAL = re.compile(r"(-?[0-9]+)\.0*")


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Returns the types that a parameter may have by its tool's schema. All of them: the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    found = _types(schema, parameters)
    return frozenset(found) or _TYPES


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Collects the types of a schema and of those that it names, a bounded number."""
    found: set[str] = set()
    waiting, seen = [schema], 0
    while waiting and seen < _MAX_SCHEMAS:
        each = waiting.pop()
        seen += 1
        if not isinstance(each, Mapping):
            continue
        named = each.get("type")
        named_types = named if isinstance(named, list) else [named]
        found |= {type for type in named_types if isinstance(type, str) and type in _TYPES}
        if named is not None:
            continue
        enum = each.get("enum")
        values = [*(enum if isinstance(enum, list) else []), *([each["const"]] if "const" in each else [])]
        found |= {_type_of(value) for value in values}
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(each.get(key), list):
                waiting += each[key]
        if isinstance(each.get("$ref"), str):
            waiting.append(_named(each["$ref"], root))
    return found


def _named(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a reference within the tool's own, such as #/$defs/Place."""
    schema: Any = root
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        schema = (
            schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        )
    return schema


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_of(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of a value's text: of the first of `types` that it is, or of a string.

    Some templates print null, booleans and objects as Python does. Models that learn from them do so, too.
    """
    word = text.strip()
    lowered = word.lower()
    if "null" in types and lowered in ("null", "none"):
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if types & {"integer", "number"} and (number := json_number(word)) is not None:
        integral = _INTEGRAL.fullmatch(number) if "number" not in types else None
        if "number" in types or integral or number.lstrip("-").isdigit():
            return integral[1] if integral else number
    kind = {"{": "object", "[": "array"}.get(word[:1])
    if kind is not None and kind in types:
        if isinstance(json_value(word), dict | list):
            return without_halves(word)
        if (translated := python_value(word)) is not None:
            return translated
    return f'"{json_text(text)}"'


class ValueWriter:
    """Translation of one value to JSON while it comes. A string is given at once, another value at its end."""

    def __init__(self, type: ValueType, types: frozenset[str], padding: str, give: Give) -> None:
        self._type = type
        self._types = types
        self._padding = padding
        self._give = give
        self._pieces: list[str] = []
        self._chars = 0
        self._is_string = type is ValueType.STRING or (type is ValueType.OF_SCHEMA and types == _STRING)
        self._has_begun = False
        self._held = ""  # may be the padding after the value

    def write(self, text: str) -> None:
        if self._padding:
            text = self._without_padding(text)
        if text:
            self._write(text)

    def _without_padding(self, text: str) -> str:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix(self._padding)
        text = self._held + text
        self._held = self._padding if text.endswith(self._padding) else ""
        return text.removesuffix(self._padding)

    def _write(self, text: str) -> None:
        if self._is_string:
            self._give(json_text(text) if self._chars else '"' + json_text(text))
            self._chars += len(text)
            return
        self._pieces.append(text)
        self._chars += len(text)
        if self._chars > MAX_HELD_VALUE_CHARS:
            self._is_string = True
            self._give('"' + json_text("".join(self._pieces)))
            self._pieces.clear()

    def end(self) -> None:
        if self._is_string:
            self._give('"' if self._chars else '""')
            return
        text = "".join(self._pieces)
        if self._type is ValueType.JSON:
            is_json = json_value(text) is not None or text.strip() == "null"
            self._give(without_halves(text) if is_json else json_of(text, _TYPES))
        else:
            self._give(json_of(text, self._types))
