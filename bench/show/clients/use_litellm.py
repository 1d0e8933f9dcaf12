"""litellm: the same over its own functions, with the provider for OpenAI-compatible servers."""

from __future__ import annotations

import json
from typing import Any

import checks
import litellm
from pydantic import BaseModel

TOOLS: Any = [{"type": "function", "function": {"name": checks.TOOL, "parameters": checks.WEATHER}}]


class Report(BaseModel):
    city: str
    degrees: int


def ask(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{checks.MODEL}",
        api_base=f"{checks.URL}/v1",
        api_key=checks.KEY,
        num_retries=0,
        messages=messages,
        **fields,
    )


def chat() -> str:
    return checks.said(ask([{"role": "user", "content": checks.ASK}]).choices[0].message.content)


def stream() -> str:
    chunks = ask([{"role": "user", "content": checks.ASK}], stream=True)
    return checks.streamed(chunk.choices[0].delta.content for chunk in chunks)


def tool() -> str:
    messages: list[Any] = [{"role": "user", "content": checks.ASK_TOOL}]
    message = ask(messages, tools=TOOLS).choices[0].message
    [call] = message.tool_calls
    detail = checks.called(call.function.name, json.loads(call.function.arguments)["city"])
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": checks.TOOL_RESULT}]
    checks.said(ask(messages, tools=TOOLS).choices[0].message.content, checks.TOOL_RESULT)
    return detail


def structured() -> str:
    answer = ask([{"role": "user", "content": checks.ASK_JSON}], response_format=Report)
    report = Report.model_validate_json(answer.choices[0].message.content)
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
