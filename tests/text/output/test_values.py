from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.text.output.formats import ValueType
from rootstock.text.output.literals import json_number, python_value
from rootstock.text.output.values import MAX_HELD_VALUE_CHARS, ValueWriter, json_of, types_of

ALL = types_of({}, "x")

literals = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=literals)
def test_the_literals_of_python_become_json(value: Any) -> None:
    translated = python_value(repr(value))
    assert translated is not None
    assert json.loads(translated) == value


@given(text=st.text("[](){},:'\"\\ntTrueNone01.e+-_ux", max_size=30))
def test_other_python_is_refused_without_an_exception(text: str) -> None:
    translated = python_value(text)
    if translated is not None:
        json.loads(translated)


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("'a\\x41\\u00e9\\101\\n'", "aAéA\n"),
        ('"""two\nlines"""', "two\nlines"),
        ("(1, 2,)", [1, 2]),
        ("{'a': (), }", {"a": []}),
        ("[true, null]", [True, None]),
        ("'\\ud83d\\ude00'", "😀"),
        ("'\\d'", "\\d"),
    ],
)
def test_strings_and_tuples_of_python(python: str, expected: Any) -> None:
    translated = python_value(python)
    assert translated is not None
    assert json.loads(translated) == expected


@pytest.mark.parametrize("python", ["f(1)", "1 + 1", "x", "'a' 'b'", "[1", "{'a'}", "{1: 2}", "'\\xZZ'"])
def test_expressions_of_python_are_refused(python: str) -> None:
    assert python_value(python) is None


def test_hostile_nesting_of_python_is_refused() -> None:
    assert python_value("[" * 100_000) is None


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("7", "7"),
        ("-0.5", "-0.5"),
        ("1e5", "1e5"),
        ("1_000", "1000"),
        (".5", "0.5"),
        ("5.", "5.0"),
        ("+3", "3"),
    ],
)
def test_numbers(word: str, number: str) -> None:
    assert json_number(word) == number


@pytest.mark.parametrize("word", ["", "-", "inf", "nan", "0x10", "1__0", "٣", "1e999", "a"])
def test_words_that_are_no_numbers(word: str) -> None:
    number = json_number(word)
    assert number is None or math.isinf(float(number))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/Place"}, {"object"}),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/Loop"}, ALL),
        ({"$ref": "https://example.com"}, ALL),
        ({}, ALL),
        (True, ALL),
        ({"type": "strnig"}, ALL),
    ],
)
def test_the_types_of_a_parameter_by_its_schema(schema: Any, types: set[str]) -> None:
    parameters = {
        "properties": {"x": schema},
        "$defs": {"Place": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 9}},
    }
    assert types_of(parameters, "x") == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("7", {"string"}, "7"),
        ("7", {"integer"}, 7),
        ("7.0", {"integer"}, 7),
        ("7.5", {"integer"}, "7.5"),
        ("7.5", {"number"}, 7.5),
        ("True", {"boolean"}, True),
        ("maybe", {"boolean"}, "maybe"),
        ("None", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': None}", {"object"}, {"a": None}),
        ("[1, 2", {"array"}, "[1, 2"),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        ("7", ALL, 7),
        ("01", ALL, 1),
        ("seven", ALL, "seven"),
        ("", {"integer"}, ""),
    ],
)
def test_a_value_has_the_first_type_of_its_schema_that_it_is(text: str, types: set[str], value: Any) -> None:
    assert json.loads(json_of(text, frozenset(types))) == value


def written(type: ValueType, types: frozenset[str], padding: str, pieces: list[str]) -> str:
    given: list[str] = []
    writer = ValueWriter(type, types, padding, given.append)
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return "".join(given)


@given(pieces=st.lists(st.text('a"\\\n{}7', min_size=1, max_size=3)), padding=st.sampled_from(["", "\n"]))
def test_a_value_does_not_depend_on_how_it_is_cut(pieces: list[str], padding: str) -> None:
    text = "".join(pieces)
    for type in ValueType:
        for types in (ALL, frozenset({"string"}), frozenset({"object"})):
            whole = written(type, types, padding, [text] if text else [])
            assert written(type, types, padding, pieces) == whole
            json.loads(whole)


def test_a_value_that_is_too_long_to_wait_for_is_a_string() -> None:
    pieces = ["[" * 1000] * (MAX_HELD_VALUE_CHARS // 1000 + 2)
    assert json.loads(written(ValueType.OF_SCHEMA, frozenset({"array"}), "", pieces)) == "".join(pieces)
