"""langchain-openai: chat, stream, bound tools, `with_structured_output`, and the cached share of a second turn."""

from __future__ import annotations

from typing import Any

import checks
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool as tool_of
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=checks.MODEL, base_url=f"{checks.URL}/v1", api_key=checks.KEY, max_retries=0)  # type: ignore[arg-type]


class Report(BaseModel):
    """A temperature."""

    city: str
    degrees: int


@tool_of
def get_weather(city: str) -> str:
    """Tells the weather."""
    return checks.TOOL_RESULT


def chat() -> str:
    return checks.said(str(model.invoke(checks.ASK).content))


def stream() -> str:
    return checks.streamed(str(chunk.content) for chunk in model.stream(checks.ASK))


def tool() -> str:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(checks.ASK_TOOL)]
    answer = bound.invoke(messages)
    [call] = answer.tool_calls
    detail = checks.called(call["name"], call["args"]["city"])
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    checks.said(str(bound.invoke(messages).content), checks.TOOL_RESULT)
    return detail


def structured() -> str:
    report: Any = model.with_structured_output(Report, method="json_schema").invoke(checks.ASK_JSON)
    return checks.reported(report.city, report.degrees)


def structured_by_call() -> str:
    report: Any = model.with_structured_output(Report, method="function_calling").invoke(checks.ASK_JSON)
    return checks.reported(report.city, report.degrees)


def second_turn() -> str:
    messages: list[Any] = [SystemMessage(checks.LONG), HumanMessage(checks.ASK)]
    messages += [model.invoke(messages), HumanMessage(checks.ASK)]
    usage: Any = model.invoke(messages).usage_metadata
    return checks.share(usage["input_token_details"].get("cache_read"), usage["input_tokens"])


checks.run([chat, stream, tool, structured, structured_by_call, second_turn])
