"""Requests of the shape that Claude Code sends: each prompt extends the one before, whatever the template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rootstock.config import CacheConfig
from rootstock.engine.build import assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.pipeline.model import ChatRules, ServedModel
from rootstock.server.formats.anthropic.calls import counted_tokens, messages_call
from rootstock.server.formats.anthropic.schema import MessagesRequest
from rootstock.server.formats.anthropic.signatures import signature_of
from rootstock.server.wire.sender import Sender
from rootstock.testing.fake_runtime import FakeRuntime
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer
from text.prompts.chat_tokenizers import chat_tokenizer

Json = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
LIMIT = 1 << 17


def model_of(template: str, context_limit: int = LIMIT, **fields: Any) -> ServedModel:
    tokenizer = PromptTokenizer(chat_tokenizer(template), context_limit)
    runtime = FakeRuntime(800, context_limit)
    made = assemble(runtime, chat_tokenizer(template), CacheConfig(8, 1 << 20))
    return ServedModel(
        800,
        SamplingDefaults(),
        context_limit,
        8,
        made.engine,
        made.description,
        made.block_size,
        name="fake",
        tokenizer=tokenizer,
        **fields,
    )


def text(text: str, **fields: Any) -> Json:
    return {"type": "text", "text": text, **fields}


def tool(name: str, **fields: Any) -> Json:
    properties = {"path": {"type": "string", "description": f"The path that {name} takes"}}
    schema = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return {"name": name, "description": f"{name} does its work. " * 8, "input_schema": schema, **fields}


TOOLS = [tool(f"Tool{number:02}") for number in range(27)]
DEFERRED = [tool(f"mcp__deferred{number}", defer_loading=True) for number in range(5)]


def request(
    turns: list[Json],
    *,
    version: str = "4a5",
    tools: list[Json] | None = None,
    status: str = "clean",
    date: str = "2026-01-01",
) -> Json:
    """A request with the fields, the marks and the messages of Claude Code; `turns` follow the first question."""
    head = [
        {
            "role": "user",
            "content": [text(f"<system-reminder>\nDate: {date}\n</system-reminder>"), text("Begin.")],
        },
        {"role": "system", "content": "The tools of the session stay the same."},
    ]
    messages = [*head, *turns]
    last = dict(messages[-1])
    if last["role"] == "user":
        content = last["content"] if isinstance(last["content"], list) else [text(last["content"])]
        last["content"] = [*content[:-1], {**content[-1], **MARK}]
        messages[-1] = last
    return {
        "model": "fake",
        "max_tokens": 32_000,
        "stream": True,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": json.dumps({"session": 1})},
        "system": [
            text(f"x-anthropic-billing-header: cc_version=9.9.9.{version}; cc_entrypoint=cli;"),
            text("You are a coding agent.", **MARK),
            text("Rules of the house. " * 60 + f"\nStatus: {status}", **MARK),
        ],
        "tools": TOOLS if tools is None else tools,
        "messages": messages,
    }


def call(id: str, name: str, thinking: str = "", **arguments: Any) -> Json:
    content: list[Json] = []
    if thinking:
        content.append({"type": "thinking", "thinking": thinking, "signature": signature_of(thinking)})
    content.append(text("I look."))
    content.append({"type": "tool_use", "id": id, "name": name, "input": arguments})
    return {"role": "assistant", "content": content}


def result(id: str, content: Any, *more: Json) -> Json:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": id, "content": content}, *more],
    }


def rounds(*beside: Json) -> Iterator[list[Json]]:
    """The growing turns of a session with results, text beside one of them, and a later system message."""
    turns = [call("toolu_a", "Tool01", "Well.", path="a.txt"), result("toolu_a", "content of a")]
    yield list(turns)
    turns += [call("toolu_b", "Tool02", "", path="b"), result("toolu_b", [text("b")], *beside)]
    yield list(turns)
    turns += [{"role": "system", "content": [text("The user has opened a file.")]}]
    turns += [call("toolu_c", "Tool03", path="c"), result("toolu_c", None)]
    yield list(turns)


def prompt(model: ServedModel, body: Json) -> Any:
    made = messages_call(model, MessagesRequest.model_validate(body), Sender(""))
    tokens = made.requests[0].tokens
    assert counted_tokens(model, MessagesRequest.model_validate(body), Sender(""))["input_tokens"] == len(
        tokens
    )
    return tokens


def common(a: Any, b: Any) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


TEMPLATES = ("qwen3", "chatml", "llama_3")


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_request_of_a_session_extends_the_last_one(template: str) -> None:
    model = model_of(template)
    # After a question of the user, Qwen's template renders the answers before it without their reasoning.
    beside = [] if template == "qwen3" else [text("Go on with it.")]
    prompts = [prompt(model, request(turns)) for turns in rounds(*beside)]
    ending = 16  # tokens that open the assistant's answer: the next request has its text there
    for one, next_one in pairwise(prompts):
        assert len(next_one) > len(one)
        assert common(one, next_one) >= len(one) - ending


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_session_shares_the_head_although_its_version_differs(template: str) -> None:
    model = model_of(template)
    one = prompt(model, request([]))
    other = prompt(model, request([{"role": "user", "content": "Another task."}], version="b0b"))
    assert common(one, other) >= 0.93 * len(one)
    kept = model_of(template, rules=ChatRules(drop_volatile=False))
    two, third = (prompt(kept, request([], version=version)) for version in ("4a5", "b0b"))
    assert common(two, third) < common(one, other)


def test_marks_move_without_a_trace_in_the_prompt() -> None:
    model = model_of("qwen3")
    body = request([])
    plain = json.loads(
        json.dumps(body), object_hook=lambda each: {k: v for k, v in each.items() if k != "cache_control"}
    )
    assert np.array_equal(prompt(model, body), prompt(model, plain))


@pytest.mark.parametrize("template", ["qwen3", "llama_3"])
def test_deferred_tools_leave_the_head_and_appear_at_their_reference(template: str) -> None:
    model = model_of(template)
    turns = [call("toolu_s", "Tool05", path="mcp")]
    before = prompt(model, request([*turns, result("toolu_s", "none yet")]))
    reference = [{"type": "tool_reference", "tool_name": "mcp__deferred3"}]
    tools = sorted([*TOOLS, *DEFERRED], key=lambda each: each["name"].lower())
    after = prompt(model, request([*turns, result("toolu_s", reference)], tools=tools))
    assert common(before, after) >= 0.95 * len(before)
    shown = chat_tokenizer(template).decode(after.tolist())
    assert shown.count("mcp__deferred3 does its work") == 8
    assert "mcp__deferred2" not in shown


def test_a_template_that_refuses_late_system_messages_gets_their_text_in_their_place() -> None:
    turns: list[Json] = [
        {"role": "assistant", "content": [text("I have begun.")]},
        {"role": "user", "content": "On."},
    ]
    hint = {"role": "system", "content": [text("The user has opened a file.")]}
    model = model_of("strict")
    prompts = [
        prompt(model, request(each, tools=[]))
        for each in (turns[:0], turns, [*turns, hint], [*turns, hint, turns[0], turns[1]])
    ]
    shown = chat_tokenizer("strict").decode(prompts[-1].tolist())
    parts = ("Rules of the house", "Begin.", "The tools of the session", "I have begun.", "On.", "has opened")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    for one, next_one in pairwise(prompts):
        assert common(one, next_one) >= len(one) - 16


@pytest.mark.parametrize("template", TEMPLATES)
def test_max_tokens_are_lowered_to_the_room_that_is_left(template: str) -> None:
    tokens = len(prompt(model_of(template), request([])))
    model = model_of(template, tokens + 50)
    made = messages_call(model, MessagesRequest.model_validate(request([])), Sender(""))
    assert made.requests[0].stop.max_tokens == 50
    assert made.stream


def test_the_request_for_a_title_has_no_tools_and_a_schema() -> None:
    body = request([])
    del body["tools"]
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    assert MessagesRequest.model_validate(body).json_schema() == (
        json.dumps(schema),
        "output_config.format.schema",
    )
