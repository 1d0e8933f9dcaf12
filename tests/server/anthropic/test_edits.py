"""Edits of the history: which parts they remove, and what they report."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock.errors import RequestError
from rootstock.server.formats.anthropic.edits import edited, edits_of
from rootstock.text.conversation.types import Conversation, Message, Reasoning, Text, ToolCall, ToolResult

THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"


def answer(*parts: Any) -> Message:
    return Message("assistant", parts)


def question(text: str) -> Message:
    return Message("user", (Text(text),))


def result(id: str) -> Message:
    return Message("user", (ToolResult(id, (Text("result " * 10),)),))


CONVERSATION = Conversation(
    [
        question("one"),
        answer(Reasoning("r1"), ToolCall("a", "read", {"path": "x"})),
        result("a"),
        answer(Reasoning("r2"), ToolCall("b", "grep", {"for": "y"})),
        result("b"),
        answer(Text("Done.")),
        question("two"),
        answer(Reasoning("r3"), ToolCall("c", "read", {"path": "z"})),
        result("c"),
    ]
)


def words(conversation: Conversation) -> int:
    """Counts words, as if they were tokens."""
    return sum(
        len(part.text.split())
        if isinstance(part, Text | Reasoning)
        else sum(len(inner.text.split()) for inner in part.parts if isinstance(inner, Text))
        if isinstance(part, ToolResult)
        else 1
        for message in conversation.messages
        for part in message.parts
    )


def applied(**edit: Any) -> tuple[Conversation, Any]:
    found = edited(CONVERSATION, edits_of({"edits": [edit]}, "context_management", 2), words)
    return found.conversation, found.applied


def reasoning_in(conversation: Conversation) -> list[str]:
    return [part.text for each in conversation.messages for part in each.parts if isinstance(part, Reasoning)]


def results_in(conversation: Conversation) -> list[str]:
    return [
        part.parts[0].text[:9]
        for each in conversation.messages
        for part in each.parts
        if isinstance(part, ToolResult) and isinstance(part.parts[0], Text)
    ]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}, {"type": "thinking_turns", "value": 2}])
def test_thinking_that_is_kept_changes_nothing(keep: Any) -> None:
    conversation, told = applied(type=THINKING, keep=keep)
    assert conversation is CONVERSATION or conversation == CONVERSATION
    assert told == ()


@pytest.mark.parametrize(("value", "left", "turns"), [(1, ["r3"], 1), (0, [], 2)])
def test_thinking_of_older_turns_is_removed(value: int, left: list[str], turns: int) -> None:
    conversation, told = applied(type=THINKING, keep={"type": "thinking_turns", "value": value})
    assert reasoning_in(conversation) == left
    removed = 3 - len(left)
    assert told == ({"type": THINKING, "cleared_thinking_turns": turns, "cleared_input_tokens": removed},)
    assert applied(type=THINKING)[0] == applied(type=THINKING, keep={"type": "thinking_turns", "value": 1})[0]


def test_results_of_older_calls_are_replaced_over_the_trigger() -> None:
    uses = {"type": "tool_uses", "value": 1}
    conversation, told = applied(type=TOOL_USES, keep=uses, trigger={"type": "tool_uses", "value": 2})
    assert results_in(conversation) == ["[cleared]", "[cleared]", "result re"]
    assert told == ({"type": TOOL_USES, "cleared_tool_uses": 2, "cleared_input_tokens": 18},)
    conversation, told = applied(type=TOOL_USES, keep=uses, trigger={"type": "input_tokens", "value": 20})
    assert len(told) == 1
    calls = [part for each in conversation.messages for part in each.parts if isinstance(part, ToolCall)]
    assert all(call.arguments for call in calls)


@pytest.mark.parametrize(
    "fields",
    [
        {},  # below 100,000 tokens
        {"trigger": {"type": "tool_uses", "value": 3}},
        {"trigger": {"type": "input_tokens", "value": 500}},
        {
            "trigger": {"type": "tool_uses", "value": 0},
            "clear_at_least": {"type": "input_tokens", "value": 99},
        },
        {"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 3}},
        {"trigger": {"type": "tool_uses", "value": 0}, "exclude_tools": ["read", "grep"]},
    ],
)
def test_results_stay_below_the_trigger(fields: Any) -> None:
    assert applied(**{"type": TOOL_USES, "keep": {"type": "tool_uses", "value": 0}} | fields) == (
        CONVERSATION,
        (),
    )


@pytest.mark.parametrize(("inputs", "left"), [(True, [False, False, True]), (["grep"], [True, False, True])])
def test_arguments_are_removed_where_asked(inputs: Any, left: list[bool]) -> None:
    conversation, _ = applied(
        type=TOOL_USES,
        keep={"type": "tool_uses", "value": 1},
        trigger={"type": "tool_uses", "value": 0},
        clear_tool_inputs=inputs,
    )
    calls = [part for each in conversation.messages for part in each.parts if isinstance(part, ToolCall)]
    assert [bool(call.arguments) for call in calls] == left


@pytest.mark.parametrize(
    ("edits", "part"),
    [
        ("all", "a list of edits"),
        ([5], r"edits\[0\]"),
        ([{"type": "compact_20260112"}], "summarizes nothing"),
        ([{"type": THINKING}] * 3, "at most 2"),
        ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": -1}}], r"edits\[0\].keep"),
        ([{"type": THINKING, "keep": "some"}], r"edits\[0\].keep"),
        ([{"type": TOOL_USES, "trigger": {"type": "input_tokens", "value": True}}], r"edits\[0\].trigger"),
        ([{"type": TOOL_USES, "exclude_tools": "read"}], r"edits\[0\].exclude_tools"),
        ([{"type": TOOL_USES, "exclude_tools": [1]}], r"exclude_tools\[0\]"),
        ([{"type": TOOL_USES, "clear_tool_inputs": 1}], "clear_tool_inputs"),
    ],
)
def test_wrong_edits_are_refused(edits: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        edits_of({"edits": edits}, "context_management", 2)
