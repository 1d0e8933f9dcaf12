"""The grammar of Anthropic's events, and a parser whose deltas a test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rootstock.engine.request import Finished, RequestId, TokenEvent, Usage
from rootstock.server.formats.anthropic.answers import MessageFormat, MessageWriter, PromptUsage
from rootstock.server.formats.anthropic.block_events import AnswerStyle
from rootstock.text.output.deltas import CallArguments, CallEnded, CallStarted, ContentDelta, Delta

Json = dict[str, Any]

DELTAS_OF = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
EMPTY = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}, "caller": {"type": "direct"}},
}


class ScriptedParser:
    """A parser that answers the text "3" with the third list of deltas, and other text with that text."""

    def __init__(self, script: Sequence[Sequence[Delta]]) -> None:
        self._script = script

    def push(self, text: str) -> list[Delta]:
        found = list[Delta]()
        for word in text.split():
            found += self._script[int(word)] if word.isdigit() else [ContentDelta(word)]
        return found

    def finish(self) -> list[Delta]:
        return []


def call(index: int, name: str, *arguments: str, id: str | None = None) -> list[Delta]:
    """The deltas of a call, which is malformed unless its arguments are an object."""
    text = "".join(arguments)
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        parsed = None
    started = CallStarted(index, id or f"call_{index}abc", name)
    return [
        started,
        *(CallArguments(index, part) for part in arguments),
        CallEnded(index, parsed if isinstance(parsed, dict) else None, f"<call>{text}</call>"),
    ]


def format_of(
    script: Sequence[Sequence[Delta]], style: AnswerStyle | None = None, **fields: Any
) -> MessageFormat:
    return MessageFormat(
        **{
            "id": "msg_1",
            "model": "fake",
            "new_parser": lambda: ScriptedParser(script),
            "prompt": PromptUsage(100, 99),
            "context_limit": 4096,
            "style": style or AnswerStyle(),
            "applied_edits": None,
            "diagnose": None,
        }
        | fields
    )


def finished(**fields: Any) -> Finished:
    return Finished(RequestId("1"), **{"reason": "stop", "usage": Usage(100, 60, 7)} | fields)


def streamed(
    script: Sequence[Sequence[Delta]],
    style: AnswerStyle | None = None,
    end: Finished | None = None,
    **fields: Any,
) -> list[Json]:
    """The events of a stream with one token for each list of deltas."""
    end = end or finished()
    return list(events_in(sse(format_of(script, style, **fields).stream(), len(script), end)))


def sse(writer: MessageWriter, tokens: int, end: Finished) -> str:
    text = writer.begin()
    for number in range(tokens):
        token = TokenEvent(RequestId("1"), number, f" {number} ", cached_tokens=60 if number == 0 else 0)
        fast = writer.tokens([(0, token)])
        text += "".join(writer.events(0, token)) if fast is None else fast
    return text + "".join(writer.events(0, end)) + writer.end([end], end.usage)


def events_in(text: str) -> Iterator[Json]:
    """Yields the data of server-sent events whose names are those of their data."""
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        body: Json = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        yield body


def message_of(events: Sequence[Json]) -> Json:
    """Returns the message that events add up to, and asserts their grammar."""
    rest = [event for event in events if event["type"] != "ping"]
    start, *rest, delta, stop = rest
    assert start["type"] == "message_start"
    message: Json = start["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    assert delta["type"] == "message_delta"
    assert stop == {"type": "message_stop"}
    assert all(event["type"].startswith("content_block_") for event in rest)
    is_open = False
    for event in rest:
        index = event["index"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert index == len(message["content"])
                block = dict(event["content_block"])
                kind = block["type"]
                assert block == block | EMPTY[kind]
                message["content"].append(block)
                partial, is_open, is_signed = "", True, False
            case "content_block_delta":
                assert is_open
                assert index == len(message["content"]) - 1
                assert not is_signed  # the signature is the last delta
                delta_kind = event["delta"]["type"]
                is_signed = delta_kind == "signature_delta"
                field = DELTAS_OF[kind][delta_kind]
                assert set(event["delta"]) == {"type", field}
                if kind == "tool_use":
                    partial += event["delta"][field]
                else:
                    block[field] += event["delta"][field]
            case "content_block_stop":
                assert is_open
                assert index == len(message["content"]) - 1
                assert is_signed == (kind == "thinking")
                is_open = False
                if kind == "tool_use":
                    try:
                        block["input"] = json.loads(partial)
                    except ValueError:
                        block["input"] = partial
    assert not is_open
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    if "context_management" in delta:
        message["context_management"] = delta["context_management"]
    return message
