"""Choices of tools and custom tools in OpenAI's format."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock.errors import InvalidParameter
from rootstock.text.constraints.asked import Lark, Regex
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.types import Conversation, ToolChoice

Json = dict[str, Any]
NAMES = ["f", "g", "h"]


def function(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def chosen(choice: Any, tools: list[Json] | None = None) -> Conversation:
    made = [function(name) for name in NAMES] if tools is None else tools
    return conversation_of([{"role": "user", "content": "x"}], made, choice)


def allowed(mode: str, *names: str) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(n) for n in names]}}


@pytest.mark.parametrize(
    ("choice", "expected", "shown"),
    [
        (allowed("auto", "g"), ToolChoice(), ["g"]),
        (allowed("auto", "h", "f", "h"), ToolChoice(), ["f", "h"]),
        (allowed("auto"), ToolChoice(), []),
        (allowed("required", "g", "f"), ToolChoice("required", ("g", "f")), NAMES),
        (function("f"), ToolChoice("required", ("f",)), NAMES),
        ("required", ToolChoice("required"), NAMES),
    ],
)
def test_a_choice_of_tools(choice: Any, expected: ToolChoice, shown: list[str]) -> None:
    conversation = chosen(choice)
    assert conversation.tool_choice == expected
    assert [tool.name for tool in conversation.tools] == shown


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "other"),
        allowed("required", "other"),
        allowed("required"),
        allowed("any", "f"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("f")] * 2_000}},
        function("other"),
    ],
    ids=lambda choice: str(choice)[:80],
)
def test_a_wrong_choice_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chosen(choice)
    assert str(refused.value.param).startswith("tool_choice")


@pytest.mark.parametrize(
    ("syntax", "definition", "expected"),
    [("regex", "[a-c]+", Regex("[a-c]+")), ("lark", 'start: "a"', Lark('start: "a"'))],
)
def test_the_grammar_of_a_custom_tool(syntax: str, definition: str, expected: Lark | Regex) -> None:
    grammar = {"syntax": syntax, "definition": definition}
    for format in ({"type": "grammar", "grammar": grammar}, {"type": "grammar", **grammar}):
        tool = {"type": "custom", "custom": {"name": "p", "description": "Patches.", "format": format}}
        [made] = chosen("auto", [tool]).tools
        assert made.grammar == expected
        assert made.description == f"Patches.\n\nThe input follows this grammar ({syntax}):\n{definition}"


@pytest.mark.parametrize(
    "format",
    [
        "text",
        {"type": "json"},
        {"type": "grammar"},
        {"type": "grammar", "syntax": "gbnf", "definition": "x"},
        {"type": "grammar", "syntax": "lark", "definition": 3},
        {"type": "grammar", "syntax": "lark", "definition": "x" * 1_000_000},
        {"type": "grammar", "syntax": "regex", "definition": "\ud800"},
    ],
    ids=lambda format: str(format)[:60].encode("ascii", "replace").decode(),
)
def test_a_wrong_format_of_a_custom_tool_is_refused(format: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chosen("auto", [{"type": "custom", "custom": {"name": "p", "format": format}}])
    assert str(refused.value.param).startswith("tools[0].custom.format")
