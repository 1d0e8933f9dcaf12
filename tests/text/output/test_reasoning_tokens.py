"""The tokens of an answer whose text is reasoning are counted, however the text is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.text.conversation.types import Tool
from rootstock.text.output.deltas import ContentDelta, Delta, Markup, ReasoningDelta, TextOnly, source
from rootstock.text.output.formats import OUTPUT_FORMATS, ReasoningMarks
from rootstock.text.output.parser import OutputParser
from rootstock.text.output.reasoning_tokens import CountingParser, parsed_answer, reasoning_tokens

HERMES = OUTPUT_FORMATS["hermes"].with_reasoning(ReasoningMarks("<think>", "</think>"))
TOOLS = [Tool("look_up")]
ANSWER = (
    "<think>\nIs it a tree? Look.\n</think>\n\nLet me look."
    '<tool_call>\n{"name": "look_up", "arguments": {"word": "oak"}}\n</tool_call>'
)


def parser() -> CountingParser:
    return CountingParser(OutputParser(HERMES, TOOLS))


def counted(texts: Sequence[str], held: str = "") -> int:
    """Counts the tokens of reasoning token by token, and asserts that a whole answer has the same number."""
    streamed, whole = parser(), parser()
    shown = [delta for text in (*texts, held) for delta in streamed.push(text)] + streamed.finish()
    assert not any(isinstance(delta, Markup) for delta in shown)
    parsed_answer(whole, [*texts, held])
    assert reasoning_tokens(streamed) == reasoning_tokens(whole)
    return reasoning_tokens(streamed)


@pytest.mark.parametrize(
    ("texts", "held", "expected"),
    [
        (["<think>", "\n", "Is", " it", "?", "\n", "</think>", "\n\n", "Yes"], "", 3),
        (["<think>", "a\n", "\nb", "</think>", "c"], "", 2),  # white space within the reasoning
        (["<th", "ink>a", "b.</", "think>\n"], "", 2),  # tokens with a part of a mark
        (["<think>", "", "", "\u2603", "</think>", "c"], "", 3),  # the bytes of one character
        (["<think>", "a", "", "\ufffd</think>", "c"], "", 2),  # a token without its own text, and the mark
        (["<think>", "a", ""], "bc", 2),  # held back until the end
        (["<think>", "a"], "bc", 1),
        (["a", "b"], "", 0),
        ([], "", 0),
        (["", ""], "", 0),
        (["<think>", "a", "</think>", "", "b"], "", 1),
    ],
)
def test_tokens_with_text_of_the_reasoning_count(texts: list[str], held: str, expected: int) -> None:
    assert counted(texts, held) == expected


def test_answers_without_reasoning_have_no_tokens_of_it() -> None:
    plain = TextOnly()
    assert parsed_answer(plain, ["<think>", "a", ""]) == [ContentDelta("<think>a")]
    assert reasoning_tokens(plain) == 0


def reasoning_spans() -> list[tuple[int, int]]:
    at, spans = 0, []
    one = OutputParser(HERMES, TOOLS)
    deltas: list[Delta] = [*one.push(ANSWER), *one.finish()]
    for delta in deltas:
        end = at + len(source(delta))
        if isinstance(delta, ReasoningDelta):
            spans.append((at, end))
        at = end
    return spans


@given(st.lists(st.integers(0, len(ANSWER)), max_size=40))
def test_any_split_counts_the_tokens_that_overlap_the_reasoning(cuts: list[int]) -> None:
    places = [0, *sorted(set(cuts) - {0, len(ANSWER)}), len(ANSWER)]
    spans = reasoning_spans()
    expected = sum(
        any(begin < last and first < end for first, last in spans) for begin, end in pairwise(places)
    )
    assert counted([ANSWER[begin:end] for begin, end in pairwise(places)]) == expected
