"""Items of the Responses API as messages, and its tools as functions."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock.errors import InvalidParameter, RootstockError, Unsupported
from rootstock.server.formats.responses.items import messages_of
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.tools import ClientTool, Toolbox, ToolKind, tool_choice_of
from rootstock.text.constraints.asked import Lark
from rootstock.text.conversation.types import (
    Message,
    PrefixMark,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from rootstock.text.limits import MAX_MESSAGES

Json = dict[str, Any]


def translated(*items: Any, tools: Toolbox | None = None) -> list[Message]:
    return messages_of([], items, tools or Toolbox(), {"sealed": "of the seal"}.get)


def assistant(*parts: Any) -> Message:
    return Message("assistant", parts)


def function(name: str, **fields: Any) -> Json:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "a"}, Message("user", (Text("a"),))),
        ({"type": "message", "role": "developer", "content": "a"}, Message("developer", (Text("a"),))),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", (Text("a"), Text("b"))),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
                ],
            },
            Message("user", (Text("a", mark=PrefixMark("")),)),
        ),
        (
            {"role": "assistant", "id": "msg_1", "content": [{"type": "refusal", "refusal": "no"}]},
            assistant(Text("no")),
        ),
        (
            {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "t"}]},
            Message("user", (Text("t"),)),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "id": "fc_1"},
            assistant(ToolCall("c", "f", {"a": 1})),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "mcp__x__", "arguments": "{"},
            assistant(ToolCall("c", "mcp__x__f", "{")),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "text"},
            assistant(ToolCall("c", "p", {"input": "text"})),
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            assistant(ToolCall("c", "local_shell", {"command": ["ls"]})),
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}, "execution": "client"},
            assistant(ToolCall("c", "tool_search", {"query": "q"})),
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "out"},
            Message("tool", (ToolResult("c", (Text("out"),)),)),
        ),
        (
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            Message("tool", (ToolResult("c", (Text("o"),)),)),
        ),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "out"},
            Message("tool", (ToolResult("c", (Text("out"),)),)),
        ),
        (
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            assistant(Reasoning("r")),
        ),
        (
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "sealed"},
            assistant(Reasoning("of the seal")),
        ),
    ],
)  # fmt: skip
def test_an_item(item: Json, message: Message) -> None:
    assert translated(item) == [message]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "other"},
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
        {"type": "image_generation_call", "result": "x", "status": "completed"},
        {"type": "ghost_snapshot"},
    ],
)  # fmt: skip
def test_an_item_that_holds_no_text_for_the_model(item: Json) -> None:
    assert translated(item) == []


def test_a_turn_of_the_assistant_is_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}
    said = {"role": "assistant", "content": "t"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    shown = ToolCall("c", "f", {})
    result = Message("tool", (ToolResult("c", (Text("o"),)),))
    assert translated(reasoning, said, call, call, output, output, reasoning, said) == [
        assistant(Reasoning("r"), Text("t"), shown, shown),
        result,
        result,
        assistant(Reasoning("r"), Text("t")),
    ]
    # Two messages stay two, and reasoning after a text begins another one.
    assert translated(said, said, reasoning, said) == [
        assistant(Text("t")),
        assistant(Text("t")),
        assistant(Reasoning("r"), Text("t")),
    ]


def test_ids_change_nothing() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "user", "content": "x"}
    assert translated({**said, "id": "msg_1"}, {**call, "id": "fc_1"}) == translated(said, call)


def test_tools_that_a_search_finds_appear_where_they_are_found() -> None:
    tools = Toolbox()
    tools.add(
        [
            {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}},
            function("always"),
            function("late", defer_loading=True),
        ],
        "tools",
    )
    found = {
        "type": "tool_search_output",
        "call_id": "c",
        "tools": [
            function("late"),
            {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [function("find")]},
        ],
    }
    assert translated(found, tools=tools) == [
        Message("tool", (ToolResult("c", (ToolReference("late"), ToolReference("crm__find"))),))
    ]
    assert [(tool.name, tool.deferred) for tool in tools.shown] == [
        ("tool_search", False),
        ("always", False),
        ("late", True),
        ("crm__find", True),
    ]
    assert tools.client_tool("crm__find") == ClientTool(ToolKind.FUNCTION, "find", "crm")
    # Without a search, no request would show them.
    hosted = Toolbox()
    hosted.add([{"type": "tool_search"}, function("late", defer_loading=True)], "tools")
    assert [tool.deferred for tool in hosted.shown] == [False]
    assert hosted.ignored == ["tool_search"]


def test_tools_that_come_later_are_shown_in_their_place() -> None:
    tools = Toolbox()
    [message] = translated(
        {"type": "additional_tools", "role": "developer", "tools": [function("new")]}, tools=tools
    )
    assert message.role == "system"
    [part] = message.parts
    assert isinstance(part, Text)
    assert '"name": "new"' in part.text
    assert [(tool.name, tool.deferred) for tool in tools.shown] == [("new", True)]


def test_the_grammar_of_a_custom_tool_is_in_its_description() -> None:
    tools = Toolbox()
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools.add([{"type": "custom", "name": "p", "description": "Does it.", "format": format}], "tools")
    assert tools.shown[0].description == 'Does it.\n\nThe input follows this grammar (lark):\nstart: "a"'
    assert tools.shown[0].grammar == Lark('start: "a"')


@pytest.mark.parametrize(
    ("choice", "expected", "shown"),
    [
        (None, ToolChoice(), ["f", "p", "ns__g"]),
        ("none", ToolChoice("none"), ["f", "p", "ns__g"]),
        ("required", ToolChoice("required"), ["f", "p", "ns__g"]),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",)), ["f", "p", "ns__g"]),
        ({"type": "custom", "name": "p"}, ToolChoice("required", ("p",)), ["f", "p", "ns__g"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice("required", ("f",)),
            ["f", "p", "ns__g"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ns__g"}]},
            ToolChoice(),
            ["ns__g"],
        ),
    ],
)
def test_a_choice(choice: Any, expected: ToolChoice, shown: list[str]) -> None:
    tools = Toolbox()
    tools.add(
        [
            function("f"),
            {"type": "custom", "name": "p"},
            {"type": "namespace", "name": "ns", "tools": [function("g")]},
        ],
        "tools",
    )
    assert tool_choice_of(choice, tools, parallel=True) == expected
    assert [tool.name for tool in tools.shown] == shown


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 5000},
        {"role": "user", "content": [{"type": []}]},
        {"type": "function_call", "name": "f" * 1000, "arguments": "{}"},
        {"type": "function_call", "name": "f", "namespace": [], "arguments": "{}"},
        {"type": "function_call", "name": "", "arguments": "{}", "call_id": {}},
        {"type": "reasoning", "content": [{"text": "x"}] * 5000},
        {"type": "local_shell_call", "action": "ls"},
        {"type": "additional_tools", "tools": [{}]},
        {"type": "tool_search_output", "tools": [{"type": "namespace", "name": "n", "tools": 5}]},
        {"type": "x" * 100_000},
        {"type": ["message"]},
        "text",
        None,
    ],
)
def test_hostile_items_are_refused(item: Any) -> None:
    with pytest.raises((InvalidParameter, Unsupported)) as refused:
        translated(item)
    assert len(refused.value.message) < 500


def test_items_and_their_depth_are_bounded() -> None:
    with pytest.raises(InvalidParameter, match="at most 16,384"):
        translated(*[{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1))
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    with pytest.raises(InvalidParameter, match="nested"):
        translated({"role": "user", "content": "x", "extra": deep})
    marked = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    with pytest.raises(InvalidParameter, match="at most 64 times"):
        translated({"role": "user", "content": [marked] * 65})


def test_arguments_that_are_too_deep_stay_text() -> None:
    text = "[" * 100_000
    [message] = translated({"type": "function_call", "name": "f", "arguments": text})
    assert message == assistant(ToolCall(None, "f", text))


def test_seals() -> None:
    sealer = Sealer(b"k" * 32, "tenant")
    sealed = sealer.seal("a thought \ud834")
    assert sealer.open(sealed) == "a thought \ud834"
    assert Sealer(b"k" * 32, "tenant").open(sealed) == "a thought \ud834"
    for other in (Sealer(b"k" * 32, "other"), Sealer(b"o" * 32, "tenant")):
        assert other.open(sealed) is None
    for at in range(0, len(sealed), 5):
        forged = sealed[:at] + ("A" if sealed[at] != "A" else "B") + sealed[at + 1 :]
        assert sealer.open(forged) is None
    for text in ("", "rs1.", "rs1.AAAA", "rs1.!!", "gAAAAABo-another-servers", sealed[:-8], "ä", sealed[4:]):
        assert sealer.open(text) is None


def test_every_error_names_its_field() -> None:
    with pytest.raises(RootstockError) as error:
        translated({"role": "user", "content": "x"}, {"type": "function_call"})
    assert error.value.param == "input[1].name"
