"""llama-index's openai-like: chat, stream, a tool round trip, a structured prediction, the cached share of a turn."""

from __future__ import annotations

from typing import Any

import checks
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=checks.MODEL,
    api_base=f"{checks.URL}/v1",
    api_key=checks.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32_768,
    max_retries=0,
)


class Report(BaseModel):
    """A temperature."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Tells the weather."""
    return checks.TOOL_RESULT


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def chat() -> str:
    return checks.said(model.chat(asked(checks.ASK)).message.content)


def stream() -> str:
    return checks.streamed(part.delta for part in model.stream_chat(asked(checks.ASK)))


def tool() -> str:
    tools = [FunctionTool.from_defaults(get_weather)]
    messages = asked(checks.ASK_TOOL)
    answer = model.chat_with_tools(tools, chat_history=messages)
    [call] = model.get_tool_calls_from_response(answer)
    detail = checks.called(call.tool_name, call.tool_kwargs["city"])
    messages += [
        answer.message,
        ChatMessage(
            role="tool", content=checks.TOOL_RESULT, additional_kwargs={"tool_call_id": call.tool_id}
        ),
    ]
    checks.said(model.chat_with_tools(tools, chat_history=messages).message.content, checks.TOOL_RESULT)
    return detail


def structured() -> str:
    report = model.structured_predict(Report, PromptTemplate(checks.ASK_JSON))
    return checks.reported(report.city, report.degrees)


def second_turn() -> str:
    messages = [ChatMessage(role="system", content=checks.LONG), *asked(checks.ASK)]
    messages += [model.chat(messages).message, *asked(checks.ASK)]
    raw: Any = model.chat(messages).raw
    return checks.share(raw.usage.prompt_tokens_details.cached_tokens, raw.usage.prompt_tokens)


checks.run([chat, stream, tool, structured, second_turn])
