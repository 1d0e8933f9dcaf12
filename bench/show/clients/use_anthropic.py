"""anthropic: messages, stream, a tool round trip, a JSON schema, and the cached share of a second turn."""

from __future__ import annotations

import json
from typing import Any

import checks
from anthropic import Anthropic

client = Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0)
TOOLS: Any = [{"name": checks.TOOL, "description": "Tells the weather.", "input_schema": checks.WEATHER}]


def ask(messages: list[Any], **fields: Any) -> Any:
    return client.messages.create(model=checks.MODEL, max_tokens=500, messages=messages, **fields)


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def chat() -> str:
    return checks.said(text_of(ask([{"role": "user", "content": checks.ASK}])))


def stream() -> str:
    asked: Any = [{"role": "user", "content": checks.ASK}]
    with client.messages.stream(model=checks.MODEL, max_tokens=500, messages=asked) as events:
        return checks.streamed(events.text_stream)


def tool() -> str:
    messages: list[Any] = [{"role": "user", "content": checks.ASK_TOOL}]
    answer = ask(messages, tools=TOOLS)
    assert answer.stop_reason == "tool_use", answer
    [call] = [block for block in answer.content if block.type == "tool_use"]
    detail = checks.called(call.name, call.input["city"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": checks.TOOL_RESULT}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    checks.said(text_of(ask(messages, tools=TOOLS)), checks.TOOL_RESULT)
    return detail


def structured() -> str:
    schema = {"format": {"type": "json_schema", "schema": checks.REPORT}}
    report = json.loads(text_of(ask([{"role": "user", "content": checks.ASK_JSON}], output_config=schema)))
    return checks.reported(report["city"], report["degrees"])


def second_turn() -> str:
    messages: list[Any] = [{"role": "user", "content": checks.ASK}]
    messages += [
        {"role": "assistant", "content": ask(messages, system=checks.LONG).content},
        {"role": "user", "content": checks.ASK},
    ]
    usage = ask(messages, system=checks.LONG).usage
    cached = usage.cache_read_input_tokens or 0
    return checks.share(cached, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0))


checks.run([chat, stream, tool, structured, second_turn])
