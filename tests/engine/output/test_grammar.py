"""Grammars of calls, checked by llguidance: it takes the text of calls and refuses others."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.output import answers
from rootstock.engine.conversation.types import Tool, ToolChoice
from rootstock.engine.output.formats import OUTPUT_FORMATS, PLAIN, OutputFormat
from rootstock.engine.output.grammar import call_grammar
from rootstock.engine.output.writing import written

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


def test_no_grammar_without_calls_or_tools() -> None:
    assert call_grammar(PLAIN, [TOOL], REQUIRED) is None
    assert call_grammar(OUTPUT_FORMATS["hermes"], [TOOL], ToolChoice("required", ("other",))) is None
