"""Compiling: hostile texts are refused with a reason, and compiled grammars are kept for each salt apart."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hostile_constraints import all_of_patterns, lark_chain, many_names, pattern_properties, ref_chain
from rootstock.errors import ConstraintRefused, InvalidParameter, RequestError, Unsupported
from rootstock.text.constraints.asked import (
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Lark,
    ReasoningBounds,
    Regex,
)
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.json_schema import FORMATS, json_schema_of, schemas_in
from rootstock.text.constraints.repetitions import largest_written_out, written_out
from rootstock.text.prompts.tenant_salt import PromptOwner
from text.constraints.helpers import BYTES, accepts, byte_compiler, random_answer

MANY = "{999999999999999999}"


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


def test_references_that_lead_back_to_themselves_are_refused() -> None:
    ring = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}
    for value in ({"$ref": "#"}, {"type": "array", "items": {"$ref": "#/$defs/a"}} | ring):
        with pytest.raises(ConstraintRefused, match="leads back to itself"):
            schema(value)
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    either = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}
    for value in (tree, either, ref_chain(40)):
        schema(value)


def values_below(length: int) -> Any:
    return ref_chain(length, lambda ref: {"type": "object", "properties": {"a": ref}})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (ref_chain(2_500), "a chain of 2,501, longer than 64"),
        (ref_chain(100, lambda ref: {"allOf": [{"minLength": 1}, ref]}), "a chain of 101"),
        (values_below(1_000), "1,001 deep into each other, more than 512"),
        (ref_chain(1_000, lambda ref: {"anyOf": [{"type": "null"}, ref]}), "1,001 deep into each other"),
    ],
)
def test_long_chains_of_references_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(ConstraintRefused, match=reason):
        schema(value)


def test_recursive_schemas_of_many_types_are_no_chain() -> None:
    types = {
        f"t{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/t{j}"} for j in range(30)}}
        for i in range(30)
    }
    byte_compiler().compile(Constraint(schema({"$defs": types, "$ref": "#/$defs/t0"})))
    byte_compiler().compile(Constraint(schema(values_below(200))))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (all_of_patterns(120), "120 schemas in one 'allOf', more than 100"),
        (pattern_properties(500), "500 names in one 'patternProperties', more than 100"),
        (many_names(5_000), "5,000 properties of one object that are not required, more than 1,000"),
    ],
)
def test_combinations_without_end_are_refused_before_they_are_compiled(value: Any, reason: str) -> None:
    assert reason in refused(schema(value)).message


def test_chains_of_rules_are_refused() -> None:
    assert "3,002 deep into each other, more than 1,000" in refused(Lark(lark_chain(3_000))).message
    byte_compiler().compile(Constraint(Lark(lark_chain(300))))


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
    assert largest_written_out('b: "x"{9} "y"\nstart: b b b b') == 30, "rules are not written out"
    assert largest_written_out('start: a ~ 3..5 // x{1000}\na: %json {"minLength": 3}') < 20


@pytest.mark.parametrize(
    "grammar",
    [
        Regex("a" + MANY * 700),
        Regex("(" * 700 + "a" + f"){MANY}" * 700),
        schema({"type": "string", "pattern": "(" * 9_000 + "a" + f"){MANY}" * 9_000}),
        schema({"type": "object", "patternProperties": {"a" + MANY * 700: {}}}),
        Lark("start: A0\n" + "\n".join(f"A{i}: A{i + 1}{MANY}" for i in range(900)) + '\nA900: "x"'),
        Lark("start: R\nR: /a" + MANY * 700 + "/"),
        Lark(f'start: %json {{"pattern": "a{MANY * 700}"}}'),
    ],
    ids=lambda grammar: str(grammar)[:40],
)
def test_the_number_of_parts_is_bounded_too(grammar: Grammar) -> None:
    """Repetitions of repetitions make numbers of more digits than Python prints."""
    error = refused(grammar)
    assert "repetitions" in error.message
    assert len(error.message) < 300


def test_schemas_that_do_not_begin_are_not_searched_for() -> None:
    # An error of the decoder counts the lines before it: one for each would take the square of the length.
    failed: list[int] = []

    class Noting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> Any:
            failed.append(idx)
            return super().raw_decode(s, idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "JSONDecoder", Noting)
        assert schemas_in("start: " + "%json " * 1_000 + '%json {"a": 1} %json [2]', "p") == [{"a": 1}, [2]]
    assert len(failed) == 2


def test_an_opening_without_its_end_is_searched_once() -> None:
    # They are one atom: a search for the end behind every opening would take the square of the length.
    assert written_out("[" * 1_000) == 1
    assert written_out("[a" * 1_000) == 1
    assert largest_written_out('start: "' + "a" * 1_000) == 1_001


def test_a_grammar_is_compiled_once_for_each_salt() -> None:
    compiler = byte_compiler()
    first = compiler.compile(Constraint(Regex("abc")), PromptOwner(salt="one")).grammar
    assert compiler.compile(Constraint(Regex("abc"), param="other"), PromptOwner(salt="one")).grammar is first
    assert compiler.compile(Constraint(Regex("abc")), PromptOwner(salt="two")).grammar is not first
    for number in range(70):
        compiler.compile(Constraint(Regex(f"x{number}")), PromptOwner(salt="one"))
    assert compiler.compile(Constraint(Regex("abc")), PromptOwner(salt="one")).grammar is not first, (
        "the oldest are dropped"
    )


def test_states_that_requests_share_are_built_anew_when_they_are_used_up() -> None:
    # Each character leads to a state of its own: some 30 answers use up what one grammar may have.
    value = schema({"type": "string", "pattern": "^[ab]*a[ab]{300}$"})
    compiler = byte_compiler()
    shared = compiler.compile(Constraint(value))

    def answer(constraint: CompiledConstraint, seed: int) -> tuple[str, bool]:
        return random_answer(constraint, BYTES, 300, BYTES.eos_token_ids, seed, most=900)

    answers = [answer(shared, seed) for seed in range(38)]
    renewed = compiler.compile(Constraint(value))
    assert renewed.grammar is not shared.grammar, "later requests get new states"
    for seed in range(26, 38):
        assert answers[seed] == answer(byte_compiler().compile(Constraint(value)), seed), "of a run alone"
    assert re.fullmatch('"[ab]*a[ab]{300}"', answers[-1][0])


def test_schemas_inside_a_grammar_are_bounded() -> None:
    for inner, reason in (
        ('{"type": "string", "pattern": "^a{100000000}$"}', "repetitions"),
        ('{"$ref": "#/x", "x": {"pattern": "^a{100000000}$"}}', "repetitions"),
        ('{"minimum": ' + "1" * 5_000 + ', "pattern": "^a{100000000}$"}', "not followed by JSON"),
        ('{"type": "string", "minLength": 1000000, "pattern": "^(ab|c)*$"}', "minLength"),
        ("{" * 2_000, "not followed by JSON"),
    ):
        assert reason in refused(Lark(f"start: a\na: %json {inner}")).message
    byte_compiler().compile(Constraint(Lark('start: "%json" a\na: %json {"type": "null"}')))


@pytest.mark.parametrize(
    ("format", "valid", "invalid"),
    [
        ("date", "2024-02-29 2000-02-29 1999-12-31", "2023-02-29 1900-02-29 0000-01-01 2024-04-31"),
        ("time", "23:59:59Z 00:00:00.5+01:30", "23:59:60Z 24:00:00Z 12:00:00 12:00:00+24:00"),
        (
            "date-time",
            "2024-02-29T10:00:00Z",
            "2024-02-29t10:00:00Z 2023-02-29T10:00:00Z 2024-01-01T10:00:60Z",
        ),
        ("duration", "P1Y2M3DT4H5M6S PT5M P3W", "P PT 1Y P1Y1W P1D2Y"),
        ("email", "a.b+c@example.org a@b", "a@ @b a..b@c a@-b a@b." + "c" * 64 + " a@" + "b." * 130 + "c"),
        ("hostname", "a a-b.example", "-a a- a..b " + "a" * 64 + " " + "a." * 130 + "b"),
        ("ipv4", "127.0.0.1", "256.0.0.1 1.2.3"),
        ("uuid", "00000000-0000-4000-8000-000000000000", "0-0-0-0-0"),
    ],
)
def test_formats_take_only_what_readers_take(format: str, valid: str, invalid: str) -> None:
    constraint = byte_compiler().compile(Constraint(schema({"type": "string", "format": format})))

    def takes(text: str) -> bool:
        return accepts(constraint, json.dumps(text).encode())

    assert [text for text in valid.split() if not takes(text)] == []
    assert [text for text in invalid.split() if takes(text)] == []


def test_a_format_beside_a_pattern_and_a_length_holds_too() -> None:
    value = {"type": "string", "format": "hostname", "pattern": "^x", "maxLength": 3}
    constraint = byte_compiler().compile(Constraint(schema(value)))
    for text, taken in (("xyz", True), ("x-", False), ("yz", False), ("xyzz", False)):
        assert accepts(constraint, json.dumps(text).encode()) is taken, text


def test_white_space_between_tokens_of_json_is_bounded() -> None:
    constraint = byte_compiler().compile(Constraint(schema({"type": "array", "items": {"enum": [1]}})))
    for seed in range(10):
        text, ended = random_answer(constraint, BYTES, 300, BYTES.eos_token_ids, seed, most=2_000)
        assert ended
        assert all(len(gap) <= 64 for gap in "".join(c if c.isspace() else "|" for c in text).split("|"))


def test_markers_and_budgets_are_checked() -> None:
    compiler = byte_compiler()
    for reasoning in (
        ReasoningBounds(""),
        ReasoningBounds("x" * 300),
        ReasoningBounds("</t>", budget_tokens=-1),
    ):
        with pytest.raises(InvalidParameter):
            compiler.compile(Constraint(None, reasoning))


def test_tokens_whose_text_depends_on_their_neighbours_cannot_be_constrained() -> None:
    class Mixing(type(BYTES)):  # type: ignore[misc]
        def decode(self, tokens: Any) -> str:
            return str(super().decode(sorted(tokens)))

    from rootstock.text.constraints.compiler import ConstraintCompiler

    compiler = ConstraintCompiler(Mixing(), 300, BYTES.eos_token_ids)
    compiler.prepare()
    with pytest.raises(Unsupported, match="side by side"):
        compiler.compile(Constraint(Regex("a"), param="guided_regex"))
