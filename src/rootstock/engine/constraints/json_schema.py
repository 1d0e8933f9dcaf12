"""JSON schemas of requests: bounds on hostile ones, and small changes by which more of them can be enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rootstock.engine.constraints.asked import JsonSchema
from rootstock.engine.limits import (
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_VALUES,
    refuse_large,
)
from rootstock.errors import ConstraintRefused, InvalidParameter

# Formats of strings that llguidance enforces. A format is an annotation by the specification: others are dropped.
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)

_MAPS_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip


def json_schema_of(schema: Any, param: str, *, strict: bool = True) -> JsonSchema:
    """Checks a schema that a client sent: an object, a boolean, or either as JSON text.

    Raises InvalidParameter or ConstraintRefused. Whether the schema can be enforced shows when it is compiled.
    """
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if not isinstance(schema, Mapping | bool):
        raise InvalidParameter(param, schema, "a JSON schema, which is an object")
    refuse_large(schema, param, MAX_SCHEMA_CHARS)
    _refuse_complex(schema, param)
    try:
        text = json.dumps(_enforceable(schema), separators=(",", ":"), allow_nan=False)
        text.encode()
    except ValueError as error:  # a number that JSON lacks
        raise InvalidParameter(param, schema, "JSON, without NaN and infinite numbers") from error
    return JsonSchema(text, strict)


def without_patterns(text: str, is_supported: Callable[[str], bool]) -> str:
    """Drops the patterns of a schema that are not supported."""

    def change(schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str) and not is_supported(pattern):
            del schema["pattern"]

    return json.dumps(_changed(json.loads(text), change), separators=(",", ":"))


def patterns_of(text: str) -> list[str]:
    """Returns the regular expressions of a schema."""
    found: list[str] = []

    def look(schema: dict[str, Any]) -> None:
        found.extend(each for each in (schema.get("pattern"),) if isinstance(each, str))
        if isinstance(by_pattern := schema.get("patternProperties"), Mapping):
            found.extend(by_pattern)

    _changed(json.loads(text), look)
    return found


def _parsed(text: str, param: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintRefused(
            param, f"its schema has {len(text):,} characters, more than {MAX_SCHEMA_CHARS:,}"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(param, text, "a JSON schema, or its JSON text") from error


def _refuse_complex(schema: Any, param: str) -> None:
    values, level = 0, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        values += len(level)
        if values > MAX_SCHEMA_VALUES:
            raise ConstraintRefused(param, f"its schema has more than {MAX_SCHEMA_VALUES:,} values")
        level = [
            inner
            for each in level
            if isinstance(each, Mapping | list)
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return
    raise ConstraintRefused(param, f"its schema is nested more than {MAX_SCHEMA_DEPTH} deep")


def _enforceable(schema: Any) -> Any:
    return _changed(schema, _rewrite)


def _rewrite(schema: dict[str, Any]) -> None:
    schema.pop("x-guidance", None)  # settings of the compiler
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Booleans of JSON Schema's draft 4.
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)


def _changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Copies a schema and changes each schema within it."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    change(copy)
    for key, value in copy.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            copy[key] = {name: _changed(inner, change) for name, inner in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            copy[key] = [_changed(inner, change) for inner in value]
        elif key in _SCHEMAS:
            copy[key] = _changed(value, change)
    return copy
