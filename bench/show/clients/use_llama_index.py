"""llama-index's openai-like: chat, stream, tool round trip, structured prediction, image, effort, cached shares."""

from __future__ import annotations

import base64
from typing import Any

import checks
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=checks.MODEL,
    api_base=f"{checks.URL}/v1",
    api_key=checks.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32_768,
    max_retries=0,
)


def get_weather(city: str) -> str:
    """Tells the weather."""
    return checks.TOOL_RESULT


TOOLS = [FunctionTool.from_defaults(get_weather)]


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def chat() -> str:
    return checks.said(model.chat(asked(checks.ASK)).message.content)


def stream() -> str:
    return checks.streamed(part.delta for part in model.stream_chat(asked(checks.ASK)))


def call_in(answer: Any) -> Any:
    [call] = model.get_tool_calls_from_response(answer)
    return call


def converse(messages: list[ChatMessage]) -> str:
    """Executes a call, and adds all messages of the turn."""
    answer = model.chat_with_tools(TOOLS, chat_history=messages)
    call = call_in(answer)
    result = ChatMessage(
        role="tool", content=checks.TOOL_RESULT, additional_kwargs={"tool_call_id": call.tool_id}
    )
    messages += [answer.message, result]
    messages.append(model.chat_with_tools(TOOLS, chat_history=messages).message)
    checks.said(messages[-1].content, checks.TOOL_RESULT)
    return checks.called(call.tool_name, call.tool_kwargs["city"])


def tool() -> str:
    return converse(asked(checks.ASK_TOOL))


def tool_streamed() -> str:
    *_, last = model.stream_chat_with_tools(TOOLS, chat_history=asked(checks.ASK_TOOL))
    call = call_in(last)
    return checks.called(call.tool_name, call.tool_kwargs["city"])


def tool_required() -> str:
    call = call_in(model.chat_with_tools(TOOLS, chat_history=asked(checks.ASK), tool_required=True))
    return str(call.tool_name)


def structured() -> str:
    report = model.structured_predict(checks.Report, PromptTemplate(checks.ASK_JSON))
    return checks.parsed(report)


def second_turn() -> str:
    messages = [ChatMessage(role="system", content=checks.rules()), *asked(checks.ASK_TOOL)]
    converse(messages)
    return share_of(model.chat_with_tools(TOOLS, chat_history=[*messages, *asked(checks.ASK)]))


def share_of(answer: Any) -> str:
    usage = answer.raw.usage
    return checks.share(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)


def image_second_turn() -> str:
    image = ImageBlock(image=base64.b64decode(checks.IMAGE), image_mimetype=checks.IMAGE_TYPE)
    with_image = ChatMessage(role="user", blocks=[TextBlock(text=checks.ASK), image])
    messages = [ChatMessage(role="system", content=checks.rules()), with_image]
    messages.append(model.chat(messages).message)
    checks.said(messages[-1].content, checks.SEES)
    answer = model.chat([*messages, *asked(checks.ASK)])
    checks.said(answer.message.content, checks.SEES)
    return share_of(answer)


def effort() -> str:
    return checks.said(
        model.chat(asked(checks.ASK), reasoning_effort="high").message.content, checks.THINKS_HIGH
    )


checks.run(
    [chat, stream, tool, tool_streamed, tool_required, structured, second_turn, image_second_turn, effort]
)
