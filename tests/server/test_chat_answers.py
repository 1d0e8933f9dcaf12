"""Reasoning and tool calls in OpenAI's chat format, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from rootstock.engine.request import Finished, RequestId, TokenEvent, TokenLogprob, Usage
from rootstock.server.formats.openai.answers import OpenAIFormat
from rootstock.server.formats.openai.chat_answers import CallStyle, ChatFormat
from rootstock.server.wire.api_call import ChoiceHistory
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    ReasoningDelta,
)

HEAD = {"id": "an id", "object": "?", "created": 1, "model": "m"}
ID = RequestId("r")
DELTAS: dict[str, list[Delta]] = {
    "r": [ReasoningDelta("because ")],
    "t": [ContentDelta("yes ")],
    "c": [CallStarted(0, "call_0", "look_up"), CallArguments(0, '{"input":')],
    "a": [CallArguments(0, ' "oak"}')],
    "e": [CallEnded(0, {"input": "oak"}, "<raw 0>")],
    "2": [CallStarted(1, "call_1", "count"), CallArguments(1, "{}"), CallEnded(1, {}, "<raw 1>")],
    "b": [CallStarted(0, "call_0", "look_up"), CallArguments(0, "{x"), CallEnded(0, None, "<broken>")],
    ".": [],
}
PLAIN = CallStyle()
CUSTOM = CallStyle(custom=frozenset({"look_up"}))


class Scripted:
    """A parser that turns each letter of the text into given deltas."""

    def push(self, text: str) -> list[Delta]:
        return [delta for letter in text for delta in DELTAS[letter]]

    def finish(self) -> list[Delta]:
        return []


def events(text: str, logprob: bool = False) -> list[TokenEvent | Finished]:
    scored = TokenLogprob(1, -0.5) if logprob else None
    tokens: list[TokenEvent | Finished] = [TokenEvent(ID, 1, letter, scored) for letter in text]
    return [*tokens, Finished(ID, "stop", Usage(1, 0, len(text)))]


def format_of(style: CallStyle = PLAIN) -> OpenAIFormat:
    return OpenAIFormat(ChatFormat(HEAD, ByteTokenizer(), Scripted, style), include_usage=False)


def streamed(text: str, style: CallStyle = PLAIN, logprob: bool = False) -> list[dict[str, Any]]:
    writer = format_of(style).stream()
    chunks = ""
    for event in events(text, logprob):
        written = writer.tokens([(0, event)])  # None where the event changes more than the text
        chunks += "".join(writer.events(0, event)) if written is None else written
    return [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks.split("\n\n")[:-1]]


def whole(text: str, style: CallStyle = PLAIN) -> dict[str, Any]:
    history = ChoiceHistory()
    for event in events(text):
        history.add(event)
    body = format_of(style).whole([history], Usage(1, 0, len(text)))
    return next(iter(body["choices"]))


def together(choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Puts the deltas of a streamed choice together, as clients do."""
    message: dict[str, Any] = {}
    for choice in choices:
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    calls = message.setdefault("tool_calls", {})
                    joined = calls.setdefault(
                        call["index"], {"function": {"arguments": ""}, "custom": {"input": ""}}
                    )
                    joined |= {k: v for k, v in call.items() if k in ("id", "type")}
                    for kind, text in (("function", "arguments"), ("custom", "input")):
                        given = call.get(kind, {})
                        joined[kind] |= {**given, text: joined[kind][text] + given.get(text, "")}
            elif name == "function_call":
                joined = message.setdefault(name, {"arguments": ""})
                joined |= {**value, "arguments": joined["arguments"] + value.get("arguments", "")}
            else:
                message[name] = message.get(name, "") + value
    return message


def test_an_answer_with_calls_is_the_same_streamed_and_whole() -> None:
    choices = streamed("rtrcae2")
    message, choice = together(choices), whole("rtrcae2")
    assert choices[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == message["content"] == "yes "
    assert choice["message"]["reasoning_content"] == message["reasoning_content"] == "because because "
    assert choice["message"]["reasoning"] == message["reasoning"]
    for index, call in enumerate(choice["message"]["tool_calls"]):
        assert call["function"] == message["tool_calls"][index]["function"]
        assert call["id"] == message["tool_calls"][index]["id"] == f"call_{index}"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"input": "oak"}'


def test_a_broken_call_is_text_in_a_whole_answer_and_no_call_in_a_stream() -> None:
    choice, choices = whole("tb"), streamed("tb")
    assert choice["message"]["content"] == "yes <broken>"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"
    assert together(choices)["tool_calls"][0]["function"]["arguments"] == "{x"


def test_a_custom_tools_call_has_its_input_as_text() -> None:
    assert whole("cae", CUSTOM)["message"]["tool_calls"] == [
        {"id": "call_0", "type": "custom", "custom": {"name": "look_up", "input": "oak"}}
    ]
    call = together(streamed("cae", CUSTOM))["tool_calls"][0]
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "look_up", "input": "oak"}


@pytest.mark.parametrize("style", [CallStyle(parallel=False), CallStyle(legacy=True)])
def test_only_the_first_call_is_shown_where_several_are_not_wanted(style: CallStyle) -> None:
    message, told = whole("cae2", style)["message"], together(streamed("cae2", style))
    if style.legacy:
        assert message["function_call"] == told["function_call"]
        assert message["function_call"] == {"name": "look_up", "arguments": '{"input": "oak"}'}
        assert streamed("cae", style)[-1]["finish_reason"] == "function_call"
    else:
        assert len(message["tool_calls"]) == len(told["tool_calls"]) == 1


@pytest.mark.parametrize("style", [CallStyle(parallel=False), CallStyle(legacy=True)])
def test_a_call_that_is_not_shown_does_not_complete_a_malformed_one(style: CallStyle) -> None:
    assert streamed("b2", style)[-1]["finish_reason"] == "stop"


def test_each_token_has_its_log_probability_once_whatever_its_deltas_are() -> None:
    text = "r.tcae."
    choices = streamed(text, logprob=True)
    assert sum(choice["logprobs"] is not None for choice in choices) == len(text)
