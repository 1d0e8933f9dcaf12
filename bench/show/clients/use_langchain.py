"""langchain-openai: chat, stream, bound tools, `with_structured_output`, an image, an effort, cached shares."""

from __future__ import annotations

from typing import Any

import checks
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool as tool_of
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=checks.MODEL, base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)  # type: ignore[arg-type]


@tool_of
def get_weather(city: str) -> str:
    """Tells the weather."""
    return checks.TOOL_RESULT


def chat() -> str:
    return checks.said(str(model.invoke(checks.ASK).content))


def stream() -> str:
    return checks.streamed(str(chunk.content) for chunk in model.stream(checks.ASK))


def call_in(answer: Any) -> Any:
    [call] = answer.tool_calls
    return call


def converse(messages: list[Any]) -> str:
    """Executes a call, and adds all messages of the turn."""
    bound = model.bind_tools([get_weather])
    messages.append(bound.invoke(messages))
    call = call_in(messages[-1])
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    messages.append(bound.invoke(messages))
    checks.said(str(messages[-1].content), checks.TOOL_RESULT)
    return checks.called(call["name"], call["args"]["city"])


def tool() -> str:
    return converse([HumanMessage(checks.ASK_TOOL)])


def tool_streamed() -> str:
    first, *others = model.bind_tools([get_weather]).stream(checks.ASK_TOOL)
    whole: Any = sum(others, start=first)
    call = call_in(whole)
    return checks.called(call["name"], call["args"]["city"])


def structured() -> str:
    report: Any = model.with_structured_output(checks.Report, method="json_schema").invoke(checks.ASK_JSON)
    return checks.parsed(report)


def structured_by_call() -> str:
    report: Any = model.with_structured_output(checks.Report, method="function_calling").invoke(
        checks.ASK_JSON
    )
    return checks.parsed(report)


def second_turn() -> str:
    messages: list[Any] = [SystemMessage(checks.rules()), HumanMessage(checks.ASK_TOOL)]
    converse(messages)
    return share_of(model.bind_tools([get_weather]).invoke([*messages, HumanMessage(checks.ASK)]))


def share_of(answer: Any) -> str:
    usage = answer.usage_metadata
    return checks.share(usage["input_token_details"].get("cache_read"), usage["input_tokens"])


def image_second_turn() -> str:
    image = {"type": "image", "base64": checks.IMAGE, "mime_type": checks.IMAGE_TYPE}
    asked = HumanMessage([{"type": "text", "text": checks.ASK}, image])
    messages: list[Any] = [SystemMessage(checks.rules()), asked]
    messages.append(model.invoke(messages))
    checks.said(str(messages[-1].content), checks.SEES)
    answer = model.invoke([*messages, HumanMessage(checks.ASK)])
    checks.said(str(answer.content), checks.SEES)
    return share_of(answer)


def effort() -> str:
    answer = model.model_copy(update={"reasoning_effort": "high"}).invoke(checks.ASK)
    return checks.said(str(answer.content), checks.THINKS_HIGH)


checks.run(
    [
        chat,
        stream,
        tool,
        tool_streamed,
        structured,
        structured_by_call,
        second_turn,
        image_second_turn,
        effort,
    ]
)
