"""Grammars of calls, checked by llguidance: it takes the text of calls and refuses others."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rootstock.errors import ConstraintRefused
from rootstock.text.constraints.asked import ANY_JSON_OBJECT, Constraint, JsonSchema, Lark
from rootstock.text.conversation.openai import custom_tool
from rootstock.text.conversation.types import Tool, ToolChoice
from rootstock.text.output.deltas import CallEnded
from rootstock.text.output.formats import OUTPUT_FORMATS, PLAIN, Harmony, OutputFormat
from rootstock.text.output.grammar import call_grammar, call_or_answer_grammar
from rootstock.text.output.parser import OutputParser
from rootstock.text.output.writing import written
from text.constraints.helpers import BYTES, VOCAB, accepts, byte_compiler, random_answer
from text.output import answers

pytest.importorskip("llguidance")

import llguidance.hf
from llguidance import LLMatcher

every_format = pytest.mark.parametrize("format", answers.CALL_FORMATS, ids=lambda format: format.name)
REQUIRED = ToolChoice("required")
TOOL = Tool(
    "look_up",
    None,
    {
        "type": "object",
        "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["word"],
        "additionalProperties": False,
    },
)


def byte_level(names: set[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=True, normalized=False) for name in ["<eos>", *sorted(names)]]
    tokenizer.add_special_tokens(added)
    return tokenizer


class Checker:
    """A tokenizer without the marks of a format, or with them as special tokens, and llguidance for it."""

    def __init__(self, format: OutputFormat, *, with_tokens: bool) -> None:
        found = {part for mark in format.marks for part in re.findall(r"<[^<>\s]*>|\[[A-Z_]+\]", mark)}
        names = found if with_tokens else set()
        self._tokenizer = byte_level(names)
        self.format = replace(format, tokens={name: self._tokenizer.token_to_id(name) for name in names})
        wrapped = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, eos_token="<eos>")
        self._matched = llguidance.hf.from_tokenizer(wrapped)

    def takes(self, grammar: str | None, text: str) -> bool:
        assert grammar is not None
        made = LLMatcher.grammar_from_lark(grammar)
        assert not LLMatcher.validate_grammar(made, self._matched)
        matcher = LLMatcher(self._matched, made)
        ids = self._tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def said(format: OutputFormat, calls: list[tuple[str, Any]]) -> str:
    text = written(format, calls)
    return text.removesuffix("<|call|>")  # the token that ends the answer


@pytest.mark.parametrize("with_tokens", [False, True], ids=["as text", "as tokens"])
@every_format
def test_a_grammar_takes_the_calls_of_its_format(format: OutputFormat, with_tokens: bool) -> None:
    checker = Checker(format, with_tokens=with_tokens)
    grammar = call_grammar(checker.format, answers.TOOLS, REQUIRED)
    rng = random.Random(format.name)
    keys = ["word", "limit", "share", "exact", "text"]  # in the order of the schema
    for _ in range(6):
        calls = [
            (name, {key: args[key] for key in keys if key in args})
            for name, args in answers.calls_for(format, rng)
        ]
        assert checker.takes(grammar, said(format, calls)), calls


@every_format
def test_a_grammar_refuses_other_text_tools_and_arguments(format: OutputFormat) -> None:
    checker = Checker(format, with_tokens=False)
    grammar = call_grammar(checker.format, [TOOL], REQUIRED)
    assert checker.takes(grammar, said(format, [("look_up", {"word": "owl"})]))
    assert checker.takes(grammar, said(format, [("look_up", {"word": "owl", "limit": 7})]))
    for text in (
        "",
        "Sure.",
        said(format, [("other", {"word": "owl"})]),
        said(format, [("look_up", {"word": "owl", "colour": "white"})]),
        said(format, [("look_up", {"word": "owl"})])[:-1],
    ):
        assert not checker.takes(grammar, text), text


def test_a_choice_names_tools_and_may_allow_one_call_only() -> None:
    checker = Checker(OUTPUT_FORMATS["hermes"], with_tokens=True)
    named = call_grammar(
        checker.format, answers.TOOLS, ToolChoice("required", ("list_birds",), parallel=False)
    )
    assert checker.takes(named, said(checker.format, [("list_birds", {})]))
    assert not checker.takes(named, said(checker.format, [("look_up", {})]))
    assert not checker.takes(named, said(checker.format, [("list_birds", {})] * 2))
    assert checker.takes(
        call_grammar(checker.format, answers.TOOLS, REQUIRED), said(checker.format, [("list_birds", {})] * 2)
    )


@pytest.mark.parametrize("with_tokens", [False, True], ids=["as text", "as tokens"])
@every_format
def test_beside_a_schema_the_model_may_call_or_answer(format: OutputFormat, with_tokens: bool) -> None:
    checker = Checker(format, with_tokens=with_tokens)
    schema = JsonSchema('{"type":"object","properties":{"bird":{"enum":["owl"]}},"required":["bird"]}')
    grammar = call_or_answer_grammar(checker.format, [TOOL], ToolChoice(), schema, "response_format")
    if isinstance(format.shape, Harmony):
        assert grammar is None
        return
    assert checker.takes(grammar, '{ "bird": "owl" }')
    assert checker.takes(grammar, said(format, [("look_up", {"word": "owl"})]))
    for text in ("", "An owl", '{"bird": "cat"}', "[]"):
        assert not checker.takes(grammar, text), text


def test_no_grammar_without_calls_or_tools() -> None:
    assert call_grammar(PLAIN, [TOOL], REQUIRED) is None
    assert call_or_answer_grammar(PLAIN, [TOOL], ToolChoice(), ANY_JSON_OBJECT, "x") is None
    assert call_or_answer_grammar(OUTPUT_FORMATS["hermes"], [], ToolChoice(), ANY_JSON_OBJECT, "x") is None
    assert call_grammar(OUTPUT_FORMATS["hermes"], [TOOL], ToolChoice("required", ("other",))) is None


NOTES = """
start: "** Notes" LF note+ "** End" LF?
note: "- " /[a-z"\\/ ]{1,8}/ LF -> line
%import common.LF
"""
GRAMMARS = (
    {"type": "grammar", "syntax": "regex", "definition": r'[a-z]{1,3}: "[^"\n]{0,4}\\"\n.'},
    {"type": "grammar", "grammar": {"syntax": "lark", "definition": NOTES}},
)


@pytest.mark.parametrize("input_format", GRAMMARS, ids=["regex", "lark"])
@every_format
def test_a_forced_call_of_a_custom_tool_follows_its_grammar(
    format: OutputFormat, input_format: dict[str, Any]
) -> None:
    tool = custom_tool("note", "Takes notes.", input_format, "format")
    assert tool.grammar is not None
    compiler = byte_compiler()
    alone = compiler.compile(Constraint(tool.grammar))
    grammar = call_grammar(format, [tool], ToolChoice("required", parallel=False))
    assert grammar is not None
    forced = compiler.compile(Constraint(Lark(grammar)))
    tried = (random_answer(forced, BYTES, VOCAB, BYTES.eos_token_ids, seed) for seed in range(8))
    ended = list(itertools.islice((answer for answer, ends in tried if ends), 3))
    assert ended
    for answer in ended:
        parser = OutputParser(format, [tool], "<|start|>assistant" if format.name == "harmony" else "")
        deltas = parser.push(answer) + parser.finish()
        [arguments] = [delta.arguments for delta in deltas if isinstance(delta, CallEnded)]
        assert arguments is not None, answer
        assert accepts(alone, arguments["input"].encode()), arguments


@every_format
def test_tools_that_are_not_strict_may_have_keywords_that_cannot_be_enforced(format: OutputFormat) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "(?=a)b"}},
            "phone": {"type": ["string", "null"], "format": "phone"},
            "odd": {"not": {"type": "string"}, "description": "x" * 100_000},
        },
    }
    grammar = call_grammar(format, [Tool("f", None, schema)], REQUIRED)
    assert grammar is not None
    assert len(grammar) < 10_000, "descriptions are no part of a grammar"
    byte_compiler().compile(Constraint(Lark(grammar)))
    huge = {"properties": {"a": {"items": {"type": "string", "pattern": "a{1000000000}"}}}}
    with pytest.raises(ConstraintRefused, match=r"'tools.f' cannot be enforced: its repetitions"):
        call_grammar(format, [Tool("f", None, huge)], REQUIRED)


def test_texts_of_an_enum_are_enforced_in_tags() -> None:
    format = OUTPUT_FORMATS["qwen3_coder"]
    tool = Tool("f", None, {"properties": {"unit": {"enum": ["mile", "kilo metre"]}}, "required": ["unit"]})
    checker = Checker(format, with_tokens=False)
    grammar = call_grammar(format, [tool], REQUIRED)
    assert checker.takes(grammar, said(format, [("f", {"unit": "kilo metre"})]))
    assert not checker.takes(grammar, said(format, [("f", {"unit": "yard"})]))


def test_a_header_of_gpt_oss_has_no_white_space_before_it() -> None:
    format = OUTPUT_FORMATS["harmony"]
    checker = Checker(format, with_tokens=False)
    text = said(format, [("look_up", {"word": "owl"})])
    assert not checker.takes(call_grammar(format, [TOOL], REQUIRED), "\n" + text)


def test_an_input_that_cannot_be_quoted_is_refused_with_the_reason() -> None:
    lark = 'start: "a" b\nb: %json {"type": "string"}'
    tool = custom_tool("f", None, {"type": "grammar", "syntax": "lark", "definition": lark}, "format")
    with pytest.raises(ConstraintRefused, match="'%json' cannot be enforced"):
        call_grammar(OUTPUT_FORMATS["hermes"], [tool], REQUIRED)
    grammar = call_grammar(OUTPUT_FORMATS["qwen3_coder"], [tool], REQUIRED)
    assert grammar is not None
    byte_compiler().compile(Constraint(Lark(grammar)))
