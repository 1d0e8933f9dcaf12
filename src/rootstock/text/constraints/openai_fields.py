"""Structured output: the fields of OpenAI, vLLM, SGLang and llama.cpp that constrain an answer, as one constraint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rootstock.errors import InvalidParameter, MissingParameter, Unsupported
from rootstock.text.constraints.asked import (
    ANY_JSON_OBJECT,
    Choice,
    Constraint,
    Grammar,
    Lark,
    Regex,
)
from rootstock.text.constraints.json_schema import json_schema_of, named_schema
from rootstock.text.limits import refuse_surrogates

_NEUTRAL: tuple[Any, ...] = ("", [], {}, False)
_OF_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Translates the fields of a request; at most one of them may ask for a grammar. None: the answer is free.

    Checks the shape of the values. Whether a grammar can be enforced shows when it is compiled. Raises
    InvalidParameter, MissingParameter, ConstraintRefused and Unsupported.
    """
    found: list[Constraint] = []
    for name, grammar_of in _FIELDS.items():
        value = fields.get(name)
        if value is None or (value in _NEUTRAL and name not in _EMPTY_COUNTS):
            continue
        grammar = grammar_of(value, name)
        if grammar is not None:
            found.append(Constraint(grammar, param=name))
    if len(found) > 1:
        second = found[1].param
        raise InvalidParameter(second, fields[second], f"left out where '{found[0].param}' is sent")
    return found[0] if found else None


def _response_format(value: Any, path: str) -> Grammar | None:
    format = _object(value, path)
    match format.get("type"):
        case "text":
            return None
        case "json_object":
            schema = format.get("schema")
            return ANY_JSON_OBJECT if schema is None else json_schema_of(schema, f"{path}.schema")
        case "json_schema":
            inner = f"{path}.json_schema"
            if format.get("json_schema") is None:
                raise MissingParameter(inner)
            return named_schema(_object(format["json_schema"], inner), inner)
        case "structural_tag":
            raise _no_structural_tags(f"{path}.type")
        case None:
            raise MissingParameter(f"{path}.type")
        case other:
            raise InvalidParameter(f"{path}.type", other, "'text', 'json_object' or 'json_schema'")


def _structured_outputs(value: Any, path: str) -> Grammar | None:
    options = _object(value, path)
    found = [
        (name, grammar)
        for name, grammar_of in _OF_STRUCTURED_OUTPUTS.items()
        if options.get(name) is not None and options[name] is not False
        if (grammar := grammar_of(options[name], f"{path}.{name}")) is not None
    ]
    for name, setting in options.items():
        known = name in _OF_STRUCTURED_OUTPUTS or name.startswith(("disable_", "_"))
        if not known and setting is not None:
            raise Unsupported(f"{path}.{name[:80]}", "It is not implemented. Leave it out.")
    if len(found) != 1:
        names = ", ".join(f"'{name}'" for name in _OF_STRUCTURED_OUTPUTS)
        raise InvalidParameter(path, value, f"an object with exactly one of {names}")
    return found[0][1]


def _schema(value: Any, path: str) -> Grammar:
    return json_schema_of(value, path)


def _regex(value: Any, path: str) -> Grammar:
    return Regex(_text(value, path))


def _grammar(value: Any, path: str) -> Grammar:
    text = _text(value, path)
    if _OF_GBNF.search(text):
        remedy = "Rules with '::=' (GBNF, EBNF) are not read. Write the grammar in llguidance's Lark: 'start: ...'."
        raise Unsupported(path, remedy)
    return Lark(text)


def _choice(value: Any, path: str) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidParameter(path, value, "a list of strings")
    for each in value:
        refuse_surrogates(each, path)
    return Choice(tuple(value))


def _any_object(value: Any, path: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidParameter(path, value, "true or false")
    return ANY_JSON_OBJECT if value else None


def _structural_tag(value: Any, path: str) -> Grammar:
    raise _no_structural_tags(path)


def _no_structural_tags(path: str) -> Unsupported:
    remedy = "Structural tags are not implemented: send 'tools' with 'tool_choice', or a Lark grammar."
    return Unsupported(path, remedy)


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidParameter(path, value, "an object")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(path, value, "a string")
    refuse_surrogates(value, path)
    return value


_Translate = Callable[[Any, str], Grammar | None]

_OF_STRUCTURED_OUTPUTS: Mapping[str, _Translate] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
    "structural_tag": _structural_tag,
}
_FIELDS: Mapping[str, _Translate] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_json_object": _any_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,  # SGLang, llama.cpp
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,  # llama.cpp
    "structural_tag": _structural_tag,
}
CONSTRAINT_FIELDS = frozenset(_FIELDS)
# Their empty value is a schema, which any JSON value follows, or is wrong.
_EMPTY_COUNTS = frozenset({"guided_json", "json_schema", "response_format"})
