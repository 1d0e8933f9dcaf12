"""anthropic: messages and streams, a tool round trip, a parsed object, an image, thinking, cached shares."""

from __future__ import annotations

from typing import Any

import checks
from anthropic import Anthropic

client = Anthropic(base_url=checks.URL, api_key=checks.KEY, max_retries=0)
TOOLS: Any = [{"name": checks.TOOL, "description": "Tells the weather.", "input_schema": checks.WEATHER}]


def ask(messages: list[Any], **fields: Any) -> Any:
    return client.messages.create(
        **{"model": checks.MODEL, "max_tokens": 500, "messages": messages, **fields}
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def call_in(answer: Any) -> Any:
    assert answer.stop_reason == "tool_use", answer
    [call] = [block for block in answer.content if block.type == "tool_use"]
    return call


def chat() -> str:
    return checks.said(text_of(ask([user(checks.ASK)])))


def stream() -> str:
    asked: Any = [user(checks.ASK)]
    with client.messages.stream(model=checks.MODEL, max_tokens=500, messages=asked) as events:
        return checks.streamed(events.text_stream)


def converse(messages: list[Any], **fields: Any) -> str:
    """Executes a call, and adds all messages of the turn."""
    answer = ask(messages, tools=TOOLS, **fields)
    call = call_in(answer)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": checks.TOOL_RESULT}
    messages += [{"role": "assistant", "content": answer.content}, user([result])]
    last = ask(messages, tools=TOOLS, **fields)
    checks.said(text_of(last), checks.TOOL_RESULT)
    messages.append({"role": "assistant", "content": last.content})
    return checks.called(call.name, call.input["city"])


def tool() -> str:
    return converse([user(checks.ASK_TOOL)])


def tool_streamed() -> str:
    asked: Any = [user(checks.ASK_TOOL)]
    with client.messages.stream(model=checks.MODEL, max_tokens=500, messages=asked, tools=TOOLS) as events:
        call = call_in(events.get_final_message())
    return checks.called(call.name, call.input["city"])


def structured() -> str:
    asked: Any = [user(checks.ASK_JSON)]
    answer = client.messages.parse(
        model=checks.MODEL, max_tokens=500, messages=asked, output_format=checks.Report
    )
    return checks.parsed(answer.parsed_output)


def second_turn() -> str:
    messages: list[Any] = [user(checks.ASK_TOOL)]
    converse(messages, system=checks.rules())
    return share_of(ask([*messages, user(checks.ASK)], system=checks.rules(), tools=TOOLS).usage)


def share_of(usage: Any) -> str:
    cached = usage.cache_read_input_tokens or 0
    return checks.share(cached, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0))


def image_second_turn() -> str:
    source = {"type": "base64", "media_type": checks.IMAGE_TYPE, "data": checks.IMAGE}
    messages: list[Any] = [user([{"type": "image", "source": source}, {"type": "text", "text": checks.ASK}])]
    first = ask(messages, system=checks.rules())
    checks.said(text_of(first), checks.SEES)
    messages += [{"role": "assistant", "content": first.content}, user(checks.ASK)]
    second = ask(messages, system=checks.rules())
    checks.said(text_of(second), checks.SEES)
    return share_of(second.usage)


def thinking() -> str:
    asked = {"type": "enabled", "budget_tokens": 1024}
    return checks.said(text_of(ask([user(checks.ASK)], max_tokens=2000, thinking=asked)), checks.THINKS)


def effort() -> str:
    answer = ask([user(checks.ASK)], thinking={"type": "adaptive"}, output_config={"effort": "high"})
    return checks.said(text_of(answer), checks.THINKS_HIGH)


checks.run([chat, stream, tool, tool_streamed, structured, second_turn, image_second_turn, thinking, effort])
