"""Fields of structured output become one constraint, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rootstock.errors import RequestError
from rootstock.text.constraints.asked import ANY_JSON_OBJECT, Choice, Grammar, JsonSchema, Lark, Regex
from rootstock.text.constraints.openai_fields import constraint_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "guided_choice": [], "structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_JSON_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JsonSchema(TEXT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            JsonSchema(TEXT, strict=False),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            JsonSchema(TEXT, strict=True),
        ),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT)),
        ({"guided_json": TEXT}, JsonSchema(TEXT)),
        ({"guided_json": {}}, JsonSchema("{}")),
        ({"json_schema": TEXT}, JsonSchema(TEXT)),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"regex": "a+"}, Regex("a+")),
        ({"guided_choice": ["a", "b"]}, Choice(("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, Lark('start: "a"')),
        ({"guided_json_object": True}, ANY_JSON_OBJECT),
        ({"guided_json_object": False}, None),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JsonSchema(TEXT)),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, Regex("a")),
        ({"structured_outputs": {"choice": ["a"]}}, Choice(("a",))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark('start: "a"')),
        ({"structured_outputs": {"json_object": True}}, ANY_JSON_OBJECT),
    ],
)
def test_fields_become_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    constraint = constraint_of(fields)
    assert (None if constraint is None else constraint.grammar) == grammar
    if constraint is not None:
        assert constraint.param in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"ebnf": 'root  ::= "a" | b\nb ::= "c"'}, "ebnf"),
        ({"structural_tag": {"tags": []}}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        constraint_of(fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400
