"""Ollama's own client: chats and generations, whole and streamed, tools, structured output and the list of models."""

from __future__ import annotations

from typing import Any

import checks
from ollama import Client

client = Client(checks.URL)
model = checks.MODEL


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def ask(messages: list[Any], **fields: Any) -> Any:
    return client.chat(model=model, messages=messages, **fields)


def chat() -> str:
    return checks.said(ask([user(checks.ASK)]).message.content)


def stream() -> str:
    return checks.streamed(part.message.content for part in ask([user(checks.ASK)], stream=True))


def generate() -> str:
    return checks.said(client.generate(model=model, prompt=checks.ASK).response)


def converse(messages: list[Any]) -> str:
    """Executes a call, and adds all messages of the turn."""
    message = ask(messages, tools=checks.TOOLS).message
    [call] = message.tool_calls
    detail = checks.called(call.function.name, call.function.arguments["city"])
    messages += [message, {"role": "tool", "tool_name": checks.TOOL, "content": checks.TOOL_RESULT}]
    messages.append(ask(messages, tools=checks.TOOLS).message)
    checks.said(messages[-1].content, checks.TOOL_RESULT)
    return detail


def tool() -> str:
    return converse([user(checks.ASK_TOOL)])


def tool_streamed() -> str:
    parts = ask([user(checks.ASK_TOOL)], tools=checks.TOOLS, stream=True)
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    return checks.called(call.function.name, call.function.arguments["city"])


def structured() -> str:
    answer = ask([user(checks.ASK_JSON)], format=checks.Report.model_json_schema())
    return checks.parsed(checks.Report.model_validate_json(answer.message.content))


def share_of(messages: list[Any], **fields: Any) -> str:
    """Returns the cached share of a prompt, which the client's types leave out of an answer."""
    told: list[Any] = []

    def note(response: Any) -> None:
        response.read()
        told.append(response.json())

    Client(checks.URL, event_hooks={"response": [note]}).chat(model=model, messages=messages, **fields)
    return checks.share(told[0]["prompt_eval_cached_count"], told[0]["prompt_eval_count"])


def second_turn() -> str:
    messages: list[Any] = [{"role": "system", "content": checks.rules()}, user(checks.ASK_TOOL)]
    converse(messages)
    return share_of([*messages, user(checks.ASK)], tools=checks.TOOLS)


def image_second_turn() -> str:
    messages: list[Any] = [
        {"role": "system", "content": checks.rules()},
        user(checks.ASK, images=[checks.IMAGE]),
    ]
    messages.append(ask(messages).message)
    checks.said(messages[-1].content, checks.SEES)
    return share_of([*messages, user(checks.ASK)])


def effort() -> str:
    return checks.said(ask([user(checks.ASK)], think="high").message.content, checks.THINKS_HIGH)


def models() -> str:
    names = [one.model for one in client.list().models]
    assert f"{model}:latest" in names, names
    assert client.show(f"{model}:latest").capabilities, "the model has no capabilities"
    return ", ".join(f"{one.model} {one.context_length}" for one in client.ps().models)


checks.run(
    [chat, stream, generate, tool, tool_streamed, structured, second_turn, image_second_turn, effort, models]
)
