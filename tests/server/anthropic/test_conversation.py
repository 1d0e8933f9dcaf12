"""Requests of Anthropic's API as canonical conversations, and the errors of wrong ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.errors import RequestError
from rootstock.server.formats.anthropic.client_tools import CLIENT_TOOLS
from rootstock.server.formats.anthropic.conversation import conversation_of
from rootstock.server.formats.anthropic.signatures import holding, signature_of, text_held
from rootstock.server.formats.anthropic.tool_use_ids import call_id_of, tool_use_id
from rootstock.text.conversation.types import (
    Medium,
    Message,
    PrefixMark,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from rootstock.text.limits import MAX_MARKS

MARK = {"type": "ephemeral"}
MARKED = PrefixMark("cache_control", 300.0)
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hello"}


def translated(
    messages: Any, system: Any = None, tools: Any = None, choice: Any = None, **fields: Any
) -> Any:
    return conversation_of(messages, system, tools, choice, {}, **fields)


def parts(content: Any, role: str = "user") -> tuple[Any, ...]:
    [message] = translated([{"role": role, "content": content}]).messages
    return tuple(message.parts)


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


# ---- messages


def test_a_system_prompt_is_text_or_blocks_and_later_ones_keep_their_place() -> None:
    assert translated([USER], "Be brief.").messages[0] == Message("system", (Text("Be brief."),))
    found = translated(
        [
            USER,
            {"role": "system", "content": [text("Date: today")]},
            {"role": "assistant", "content": "Hi"},
            USER,
        ],
        [text("Be brief."), text("Really.", cache_control=MARK)],
    ).messages
    assert [message.role for message in found] == ["system", "user", "system", "assistant", "user"]
    assert found[0].parts == (Text("Be brief."), Text("Really.", mark=MARKED))
    assert found[2].parts == (Text("Date: today"),)


def test_a_system_message_that_is_cleared_at_the_next_user_message_is_shown_once() -> None:
    hint = {"role": "system", "content": "Now.", "clear_at": "next_user_message"}
    assert [message.role for message in translated([USER, hint]).messages] == ["user", "system"]
    assert [message.role for message in translated([USER, hint, USER]).messages] == ["user", "user"]
    kept = hint | {"clear_at": "never"}
    assert [message.role for message in translated([USER, kept, USER]).messages] == ["user", "system", "user"]


def test_an_answer_comes_back_with_its_thinking_its_text_and_its_calls() -> None:
    thinking = {"type": "thinking", "thinking": "Well.", "signature": signature_of("Well.")}
    call = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "look",
        "input": {"at": 1},
        "caller": {"type": "direct"},
    }
    content = [
        thinking,
        {"type": "redacted_thinking", "data": "x"},
        text("Let me look.", citations=None),
        call,
    ]
    found = translated([USER, {"role": "assistant", "content": content}, USER]).messages[1]
    assert found.parts == (Reasoning("Well."), Text("Let me look."), ToolCall("call_1", "look", {"at": 1}))


def test_thinking_is_used_whatever_its_signature_and_an_omitted_one_is_read_from_it() -> None:
    def of(thinking: str, signature: Any) -> Any:
        block = {"type": "thinking", "thinking": thinking, "signature": signature}
        return parts([block, text("a")], "assistant")[:-1]

    assert of("Well.", "of another server") == (Reasoning("Well."),)
    assert of("", holding("Hm.")) == (Reasoning("Hm."),)
    assert of("", signature_of("Hm.")) == ()
    assert of("", "rst1.%%%") == of("", "rst1./w==") == of("", 5) == ()


RESULTS: list[tuple[Any, tuple[Any, ...]]] = [
    ({}, ()),
    ({"content": None}, ()),
    ({"content": "4"}, (Text("4"),)),
    ({"content": []}, ()),
    ({"content": [text("4"), text("2")]}, (Text("4"), Text("2"))),
    ({"content": "4", "cache_control": MARK}, (Text("4", mark=MARKED),)),
    ({"cache_control": MARK}, (Text("", mark=MARKED),)),
    ({"content": [text("4", cache_control=MARK)]}, (Text("4", mark=MARKED),)),
    ({"content": [{"type": "tool_reference", "tool_name": "grep"}]}, (ToolReference("grep"),)),
    (
        {
            "content": [
                {"type": "search_result", "title": "T", "source": "S", "content": [text("a"), text("b")]}
            ]
        },
        (Text("T\nS\na\nb"),),
    ),
    (
        {"content": [{"type": "document", "title": "T", "source": {"type": "text", "data": "all"}}]},
        (Text("T\nall"),),
    ),
    (
        {"content": [{"type": "document", "source": {"type": "content", "content": [text("all")]}}]},
        (Text("all"),),
    ),
    (
        {"content": [{"type": "image", "source": {"type": "base64", "data": "x"}}]},
        (Text("[An image, which this model cannot see]", media=(Medium("image", ""),)),),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), RESULTS)
@pytest.mark.parametrize("is_error", [False, True])
def test_a_result_in_every_shape(fields: Any, expected: Any, is_error: bool) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": is_error, **fields}
    assert parts([result]) == (ToolResult("call_1", expected, is_error=is_error),)


def test_results_come_before_the_text_of_their_message_in_the_order_of_the_client() -> None:
    def result(id: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": id, "content": id}

    found = parts([text("a"), result("y"), text("b"), result("x")])
    assert [getattr(part, "call_id", None) or part.text for part in found] == ["y", "x", "a", "b"]


def test_calls_and_results_of_anthropics_servers_stay_in_the_history() -> None:
    found = parts(
        [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "zzz"}],
            },
            {"type": "server_tool_use", "id": "srvtoolu_2", "name": "tool_search_tool_bm25", "input": {}},
            {
                "type": "tool_search_tool_result",
                "tool_use_id": "srvtoolu_2",
                "content": {
                    "type": "tool_search_tool_search_result",
                    "tool_references": [{"type": "tool_reference", "tool_name": "grep"}],
                },
            },
            text("So"),
        ],
        "assistant",
    )
    assert found[0] == ToolCall("srvtoolu_1", "web_search", {"query": "q"})
    assert found[1] == ToolResult("srvtoolu_1", (Text('[{"type": "web_search_result", "url": "u"}]'),))
    assert found[3] == ToolResult("srvtoolu_2", (ToolReference("grep"),))


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert translated([USER]).options == {}
    options = translated([USER, {"role": "assistant", "content": "The answer is ("}]).options
    assert options == {"add_generation_prompt": False, "continue_final_message": True}


def test_tools_are_added_and_removed_in_mid_conversation() -> None:
    def change(kind: str) -> dict[str, Any]:
        return {"type": kind, "tool": {"type": "tool_reference", "tool_name": "grep"}}

    message = {"role": "system", "content": [change("tool_addition"), change("tool_removal")]}
    added, removed = translated([USER, message]).messages[1].parts
    assert added == ToolReference("grep")
    assert "grep" in removed.text


# ---- marks


def test_marks_stand_at_tools_and_texts_and_at_the_end_if_the_request_has_one() -> None:
    found = translated([USER], tools=[TOOL | {"cache_control": MARK}], last_mark=MARKED)
    assert found.tools[0].mark == MARKED
    assert found.messages[0].parts == (Text("Hello", mark=MARKED),)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "4"}]}
    assert translated([result], last_mark=MARKED).messages[0].parts[0].parts == (Text("4", mark=MARKED),)


def test_marks_are_counted_everywhere() -> None:
    marked = [text("a", cache_control=MARK)]
    result = [{"type": "tool_result", "tool_use_id": "x", "content": marked}]
    tools = [TOOL | {"name": f"t{i}", "cache_control": MARK} for i in range(MAX_MARKS - 2)]
    messages = [{"role": "user", "content": result}]
    assert translated(messages, marked, tools)
    with pytest.raises(RequestError, match="at most 64 times"):
        translated([*messages, {"role": "user", "content": marked}], marked, tools)


# ---- tools


def test_tools_of_the_client_and_those_that_anthropic_defines() -> None:
    deferred = TOOL | {"name": "later", "defer_loading": True, "strict": True, "type": "custom"}
    look, later, bash = translated(
        [USER], tools=[TOOL, deferred, {"type": "bash_20250124", "name": "bash"}]
    ).tools
    assert look == Tool("look", "Looks.", {"type": "object"})
    assert later == Tool("later", "Looks.", {"type": "object"}, strict=True, deferred=True)
    assert bash.parameters["properties"]["command"]["type"] == "string"
    for kind, tool in CLIENT_TOOLS.items():
        assert translated([USER], tools=[{"type": kind}]).tools == [tool]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "look"}, ToolChoice("required", ("look",))),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_the_choice_among_tools(choice: Any, expected: ToolChoice) -> None:
    assert translated([USER], tools=[TOOL], choice=choice).tool_choice == expected


# ---- ids


@given(st.text(max_size=40))
def test_ids_of_calls_come_back_as_they_were(id: str) -> None:
    shown = tool_use_id(id)
    assert call_id_of(shown) == id
    assert shown.startswith("toolu_")
    assert shown.replace("_", "").replace("-", "").isalnum()


@given(st.text(max_size=40) | st.from_regex(r"toolu_(0x)?[0-9a-zA-Z]*", fullmatch=True))
def test_any_id_of_a_client_is_taken(id: str) -> None:
    assert isinstance(call_id_of(id), str)
    assert call_id_of("toolu_01AbC") == "call_01AbC"


@given(st.text(max_size=40))
def test_a_signature_holds_any_text(text: str) -> None:
    assert text_held(holding(text)) == text


# ---- errors


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def assistant(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": list(blocks)}]


CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
WRONG: list[tuple[Any, str]] = [
    ([{"content": "x"}], r"'messages\[0\].role' is missing"),
    ([{"role": "tool", "content": "x"}], r"'messages\[0\].role' is 'tool', but must be 'user'"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
    ([USER, {"role": "user"}], r"'messages\[1\].content' is missing"),
    ([{"role": "user", "content": 5}], r"'messages\[0\].content' is 5, but must be a string or a list"),
    (user("x"), r"'messages\[0\].content\[0\]' is 'x', but must be an object"),
    (user({}), r"'messages\[0\].content\[0\].type' is missing"),
    (user({"type": 5}), r"content\[0\].type' is 5"),
    (user({"type": "smell"}), r"content\[0\].type' is 'smell', but must be 'text'"),
    (user(text("a"), {"type": "text"}), r"'messages\[0\].content\[1\].text' is missing"),
    (user({"type": "text", "text": None}), r"content\[0\].text' is missing"),
    (user({"type": "text", "text": ["a"]}), r"content\[0\].text' is \['a'\], but must be a string"),
    (user({"type": "document", "source": {"type": "memory"}}), "'content', 'base64', 'url' or 'file'"),
    (user({"type": "document"}), r"content\[0\].source' is None"),
    (user({"type": "document", "source": {"type": "text", "data": 1}}), r"source.data' is 1"),
    (user({"type": "search_result", "title": "t"}), r"content\[0\].source' is missing"),
    (user({"type": "tool_result"}), r"content\[0\].tool_use_id' is missing"),
    (user(RESULT | {"content": [{"type": "smell"}]}), r"content\[0\].content\[0\].type' is 'smell'"),
    (user(RESULT | {"content": {"a": 1}}), r"content\[0\].content' is \{'a': 1\}"),
    (user(RESULT | {"content": [{"type": "tool_reference"}]}), r"content\[0\].tool_name' is missing"),
    (assistant(CALL | {"input": [1]}, text("x")), r"messages\[1\].content\[0\].input' is \[1\]"),
    (assistant(CALL | {"name": "n" * 300}, text("x")), "at most 256 characters"),
    (assistant({"type": "tool_use", "name": "look"}), r"content\[0\].id' is missing"),
    (assistant(CALL), "followed by a user's message with the call's 'tool_result'"),
    (assistant({"type": "thinking", "thinking": 5}), r"content\[0\].thinking' is 5"),
    (
        [USER, {"role": "system", "content": [{"type": "smell"}]}],
        r"messages\[1\].content\[0\].type' is 'smell'",
    ),
]


@pytest.mark.parametrize(("messages", "part"), WRONG)
def test_a_wrong_message_is_refused_with_its_place(messages: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        translated(messages)
    assert len(caught.value.message) < 400


WRONG_TOOLS: list[tuple[Any, str]] = [
    ({"input_schema": {}}, r"'tools\[0\].name' is missing"),
    ({"name": "a"}, r"'tools\[0\].input_schema' is missing"),
    ({"name": "a", "input_schema": []}, r"'tools\[0\].input_schema' is \[\], but must be a JSON schema"),
    ({"name": 1, "input_schema": {}}, r"'tools\[0\].name' is 1"),
    ({"name": "a", "input_schema": {}, "description": 1}, r"'tools\[0\].description' is 1"),
    ({"type": "web_search_20250305", "name": "web_search"}, "The server searches nothing"),
    ({"type": "computer_20251124", "name": "computer"}, "not pictures of a screen"),
    ({"type": "tool_search_tool_bm25_20251119", "name": "t"}, "tool_reference"),
    ({"type": "mcp_toolset", "mcp_server_name": "t"}, "MCP"),
    ({"type": "wand_20260101"}, r"'tools\[0\].type' is 'wand_20260101'"),
    ({"type": 5}, r"'tools\[0\].type' is 5"),
]


@pytest.mark.parametrize(("tool", "part"), WRONG_TOOLS)
def test_a_wrong_tool_is_refused(tool: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        translated([USER], tools=[tool])


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ({"type": "tool", "name": "x"}, [TOOL]),
        ({"type": "tool"}, [TOOL]),
        ({"type": "some"}, [TOOL]),
        ({"type": "any"}, []),
    ],
)
def test_a_wrong_choice_is_refused(choice: Any, tools: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        translated([USER], tools=tools, choice=choice)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS = ["text", "thinking", "tool_use", "tool_result", "document", "search_result", "image", "a_tool_result"]
FIELDS = ["text", "thinking", "id", "name", "input", "tool_use_id", "content", "source", "signature", MARK]
blocks = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from([str(field) for field in FIELDS]), json_values, max_size=5),
)


@given(
    role=st.sampled_from(["user", "assistant", "system"]),
    content=st.lists(blocks, max_size=4) | json_values,
    system=st.lists(blocks, max_size=2) | json_values,
)
def test_any_json_is_translated_or_refused(role: str, content: Any, system: Any) -> None:
    with contextlib.suppress(RequestError):
        found = translated([{"role": role, "content": content}, USER], system)
        assert found.messages[-1].parts == (Text("Hello"),)
