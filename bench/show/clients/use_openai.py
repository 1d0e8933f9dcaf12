"""openai: chat, stream, a tool round trip, a parsed object, and the cached share of a second turn."""

from __future__ import annotations

import json
from typing import Any

import checks
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)
TOOLS: Any = [{"type": "function", "function": {"name": checks.TOOL, "parameters": checks.WEATHER}}]


class Report(BaseModel):
    city: str
    degrees: int


def ask(messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=checks.MODEL, messages=messages, **fields)


def chat() -> str:
    return checks.said(ask([{"role": "user", "content": checks.ASK}]).choices[0].message.content)


def stream() -> str:
    chunks = ask([{"role": "user", "content": checks.ASK}], stream=True)
    return checks.streamed(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)


def tool() -> str:
    messages: list[Any] = [{"role": "user", "content": checks.ASK_TOOL}]
    answer = ask(messages, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls", answer.choices[0]
    [call] = answer.choices[0].message.tool_calls
    detail = checks.called(call.function.name, json.loads(call.function.arguments)["city"])
    messages += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": checks.TOOL_RESULT},
    ]
    checks.said(ask(messages, tools=TOOLS).choices[0].message.content, checks.TOOL_RESULT)
    return detail


def structured() -> str:
    answer = client.chat.completions.parse(
        model=checks.MODEL, messages=[{"role": "user", "content": checks.ASK_JSON}], response_format=Report
    )
    report = answer.choices[0].message.parsed
    assert report is not None
    return checks.reported(report.city, report.degrees)


def second_turn() -> str:
    messages: list[Any] = [
        {"role": "system", "content": checks.LONG},
        {"role": "user", "content": checks.ASK},
    ]
    messages += [ask(messages).choices[0].message, {"role": "user", "content": checks.ASK}]
    usage = ask(messages).usage
    return checks.share(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)


checks.run([chat, stream, tool, structured, second_turn])
