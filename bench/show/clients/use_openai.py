"""openai: chat completions, with its helpers for streams and for parsed objects, and the Responses API."""

from __future__ import annotations

import json
from typing import Any

import checks
from openai import OpenAI

client = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)


def ask(messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=checks.MODEL, messages=messages, **fields)


def tool_streamed() -> str:
    asked: Any = [{"role": "user", "content": checks.ASK_TOOL}]
    with client.chat.completions.stream(model=checks.MODEL, messages=asked, tools=checks.TOOLS) as events:
        return checks.call_in(events.get_final_completion().choices[0].message)


def structured() -> str:
    answer = client.chat.completions.parse(
        model=checks.MODEL,
        messages=[{"role": "user", "content": checks.ASK_JSON}],
        response_format=checks.Report,
    )
    return checks.parsed(answer.choices[0].message.parsed)


def responses() -> str:
    """Executes a call, whose result names the response before it."""
    tools: Any = [{"type": "function", **checks.TOOLS[0]["function"]}]
    first = client.responses.create(model=checks.MODEL, input=checks.ASK_TOOL, tools=tools)
    [call] = [item for item in first.output if item.type == "function_call"]
    detail = checks.called(call.name, json.loads(call.arguments)["city"])
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": checks.TOOL_RESULT}
    second = client.responses.create(
        model=checks.MODEL, input=[result], tools=tools, previous_response_id=first.id
    )
    checks.said(second.output_text, checks.TOOL_RESULT)
    return detail


def responses_stream() -> str:
    with client.responses.stream(model=checks.MODEL, input=checks.ASK) as events:
        return checks.streamed(event.delta for event in events if event.type == "response.output_text.delta")


def responses_structured() -> str:
    answer = client.responses.parse(model=checks.MODEL, input=checks.ASK_JSON, text_format=checks.Report)
    return checks.parsed(answer.output_parsed)


def responses_image_second_turn() -> str:
    image = {"type": "input_image", "image_url": checks.IMAGE_URL, "detail": "auto"}
    told: Any = [{"role": "user", "content": [{"type": "input_text", "text": checks.ASK}, image]}]
    fixed: Any = {"model": checks.MODEL, "instructions": checks.rules("Responses"), "store": False}
    first = client.responses.create(**fixed, input=told)
    checks.said(first.output_text, checks.SEES)
    told += [*first.output, {"role": "user", "content": checks.ASK}]
    second = client.responses.create(**fixed, input=told)
    checks.said(second.output_text, checks.SEES)
    usage: Any = second.usage
    return checks.share(usage.input_tokens_details.cached_tokens, usage.input_tokens)


def responses_effort() -> str:
    answer = client.responses.create(model=checks.MODEL, input=checks.ASK, reasoning={"effort": "high"})
    return checks.said(answer.output_text, checks.THINKS_HIGH)


checks.run(
    [
        *checks.of_chat_completions(ask),
        tool_streamed,
        structured,
        responses,
        responses_stream,
        responses_structured,
        responses_image_second_turn,
        responses_effort,
    ]
)
