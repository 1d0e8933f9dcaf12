"""Compiling: hostile texts are refused with a reason, and compiled grammars are kept for each salt apart."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.constraints.helpers import BYTES, byte_compiler, random_answer
from rootstock.engine.constraints.asked import Choice, Constraint, Grammar, JsonSchema, Lark, Reasoning, Regex
from rootstock.engine.constraints.json_schema import FORMATS, json_schema_of
from rootstock.engine.constraints.repetitions import largest_written_out, written_out
from rootstock.errors import ConstraintRefused, InvalidParameter, RequestError, Unsupported


def refused(grammar: Grammar) -> ConstraintRefused:
    with pytest.raises(ConstraintRefused) as caught:
        byte_compiler().compile(Constraint(grammar, param="field"))
    assert caught.value.param == "field"
    assert len(caught.value.message) < 600
    return caught.value


def schema(value: Any, strict: bool = True) -> JsonSchema:
    return json_schema_of(value, "field", strict=strict)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (False, "empty"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "number", "not": {}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/schema.json"}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"$ref": "#"}, "no answer"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "anyOf"),
        ({"type": "string", "pattern": "a{1000000000}"}, "repetitions"),
        ({"patternProperties": {"((a{1000}){1000}){1000}": {}}}, "repetitions"),
    ],
)
def test_impossible_and_unsupported_schemas_are_refused_with_the_reason(value: Any, reason: str) -> None:
    assert re.search(reason, refused(schema(value)).message)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "array", "items": {"enum": list(range(20_000))}},
        {"properties": {f"p{'x' * 100}{i}": {} for i in range(3_000)}},
        "{" * 100,
        '{"type":"string"' + " " * 300_000,
        [1],
        3,
        "nonsense",
    ],
)
def test_huge_and_wrong_schemas_are_refused_before_they_are_compiled(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        schema(value)
    assert caught.value.param == "field"
    deep: Any = {"type": "string"}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(ConstraintRefused, match="nested"):
        schema(deep)


def test_a_schema_that_is_not_strict_ignores_keywords_that_cannot_be_enforced() -> None:
    value = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "(?=x)y"},
            "b": {"type": "array", "uniqueItems": True},
        },
        "required": ["a"],
    }
    refused(schema(value))
    byte_compiler().compile(Constraint(schema(value, strict=False)))


def test_formats_that_are_not_enforced_are_annotations_and_the_others_are_enforced() -> None:
    for format in sorted(FORMATS):
        byte_compiler().compile(Constraint(schema({"type": "string", "format": format})))
    properties = {
        "format": {"type": "string", "format": "phone"},
        "n": {"type": "integer", "format": "int32"},
    }
    text = schema({"type": "object", "properties": properties, "x-guidance": {"lenient": True}}).text
    assert json.loads(text) == {
        "type": "object",
        "properties": {"format": {"type": "string"}, "n": {"type": "integer"}},
    }


def test_bounds_of_draft_4_are_read() -> None:
    text = schema({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "exclusiveMaximum": False}).text
    assert json.loads(text) == {"type": "integer", "exclusiveMinimum": 3}


@pytest.mark.parametrize(
    "grammar",
    [
        Regex("("),
        Regex("(?=a)b"),
        Regex("a{1000000000}"),
        Regex("((a{1000}){1000}){1000}"),
        Regex("a" * 20_000),
        Regex(""),
        Choice(()),
        Choice(("",)),
        Choice(("x",) * 5_000),
        Lark("start: missing"),
        Lark("no grammar at all"),
        Lark("start: start"),
        Lark('start: %json {"$ref": "http://localhost/x"}'),
        Lark("start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'),
        Lark('start: ( "a"{1000} "(" ){1000000}'),
        Lark("start: <|no such token|>"),
    ],
    ids=lambda grammar: str(grammar)[:40],
)
def test_hostile_patterns_grammars_and_choices_are_refused(grammar: Grammar) -> None:
    refused(grammar)


def test_sizes_after_repetitions() -> None:
    assert written_out("^[0-9]{4}-[0-9]{2}$") == 9
    assert written_out("(ab{2,3}|c){2}") == 12
    assert written_out(r"\({4}[)(]{3}") == 7
    assert largest_written_out('start: A\nA: B B\nB: "abc"') == largest_written_out(
        'start: A\nB: "abc"\nA: B B'
    )
    assert largest_written_out("start: A\nA: B\nB: A") < 10
    assert largest_written_out('start: a ~ 3..5 // x{1000}\na: %json {"minLength": 3}') < 20


def test_an_opening_without_its_end_is_searched_once() -> None:
    # They are one atom: a search for the end behind every opening would take the square of the length.
    assert written_out("[" * 1_000) == 1
    assert written_out("[a" * 1_000) == 1
    assert largest_written_out('start: "' + "a" * 1_000) == 1_001


def test_a_grammar_is_compiled_once_for_each_salt() -> None:
    compiler = byte_compiler()
    first = compiler.compile(Constraint(Regex("abc")), "one").grammar
    assert compiler.compile(Constraint(Regex("abc"), param="other"), "one").grammar is first
    assert compiler.compile(Constraint(Regex("abc")), "two").grammar is not first
    for number in range(70):
        compiler.compile(Constraint(Regex(f"x{number}")), "one")
    assert compiler.compile(Constraint(Regex("abc")), "one").grammar is not first, "the oldest are dropped"


def test_white_space_between_tokens_of_json_is_bounded() -> None:
    constraint = byte_compiler().compile(Constraint(schema({"type": "array", "items": {"enum": [1]}})))
    for seed in range(10):
        text, ended = random_answer(constraint, BYTES, 300, BYTES.eos_token_ids, seed, most=2_000)
        assert ended
        assert all(len(gap) <= 64 for gap in "".join(c if c.isspace() else "|" for c in text).split("|"))


def test_markers_and_budgets_are_checked() -> None:
    compiler = byte_compiler()
    for reasoning in (Reasoning(""), Reasoning("x" * 300), Reasoning("</t>", budget_tokens=-1)):
        with pytest.raises(InvalidParameter):
            compiler.compile(Constraint(None, reasoning))


def test_tokens_whose_text_depends_on_their_neighbours_cannot_be_constrained() -> None:
    class Mixing(type(BYTES)):  # type: ignore[misc]
        def decode(self, tokens: Any) -> str:
            return str(super().decode(sorted(tokens)))

    from rootstock.engine.constraints.compiler import ConstraintCompiler

    compiler = ConstraintCompiler(Mixing(), 300, BYTES.eos_token_ids)
    compiler.prepare()
    with pytest.raises(Unsupported, match="side by side"):
        compiler.compile(Constraint(Regex("a"), param="guided_regex"))
