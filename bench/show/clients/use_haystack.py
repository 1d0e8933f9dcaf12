"""Haystack: its generators of chat completions and of responses, and its agent, which calls a tool by itself."""

from __future__ import annotations

from typing import Any

import checks
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

SERVER: Any = {
    "model": checks.MODEL,
    "api_base_url": f"{checks.URL}/v1",
    "api_key": Secret.from_token(checks.KEY),
    "max_retries": 0,
}
model = OpenAIChatGenerator(**SERVER)
user = ChatMessage.from_user


def get_weather(city: str) -> str:
    """Tells the weather."""
    return checks.TOOL_RESULT


WEATHER = create_tool_from_function(get_weather)


def ask(*messages: ChatMessage, **fields: Any) -> ChatMessage:
    [answer] = model.run(list(messages), generation_kwargs=fields)["replies"]
    return answer


def chat() -> str:
    return checks.said(ask(user(checks.ASK)).text)


def stream() -> str:
    pieces: list[str] = []
    model.run([user(checks.ASK)], streaming_callback=lambda chunk: pieces.append(chunk.content))
    return checks.streamed(pieces)


def converse(*messages: ChatMessage, **fields: Any) -> tuple[str, list[ChatMessage]]:
    """Lets the agent call the tool and answer, and returns all messages of the turn."""
    turn = Agent(chat_generator=model, tools=[WEATHER]).run(list(messages), **fields)["messages"]
    [call] = [call for message in turn for call in message.tool_calls]
    checks.said(turn[-1].text, checks.TOOL_RESULT)
    return checks.called(call.tool_name, call.arguments["city"]), turn


def tool() -> str:
    return converse(user(checks.ASK_TOOL))[0]


def tool_streamed() -> str:
    return converse(user(checks.ASK_TOOL), streaming_callback=lambda chunk: None)[0]


def structured() -> str:
    answer = ask(user(checks.ASK_JSON), response_format=checks.Report).text
    return checks.parsed(checks.Report.model_validate_json(answer or ""))


def share_of(answer: ChatMessage) -> str:
    usage = answer.meta["usage"]
    return checks.share(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


def second_turn() -> str:
    _, turn = converse(ChatMessage.from_system(checks.rules()), user(checks.ASK_TOOL))
    [answer] = model.run([*turn, user(checks.ASK)], tools=[WEATHER])["replies"]
    return share_of(answer)


def image_second_turn() -> str:
    picture = user(content_parts=[checks.ASK, ImageContent(checks.IMAGE, checks.IMAGE_TYPE)])
    messages = [ChatMessage.from_system(checks.rules()), picture]
    messages.append(ask(*messages))
    checks.said(messages[-1].text, checks.SEES)
    answer = ask(*messages, user(checks.ASK))
    checks.said(answer.text, checks.SEES)
    return share_of(answer)


def effort() -> str:
    return checks.said(ask(user(checks.ASK), reasoning_effort="high").text, checks.THINKS_HIGH)


def responses() -> str:
    [answer] = OpenAIResponsesChatGenerator(**SERVER).run([user(checks.ASK)])["replies"]
    return checks.said(answer.text)


checks.run([chat, stream, tool, tool_streamed, structured, second_turn, image_second_turn, effort, responses])
