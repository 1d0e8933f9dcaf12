"""The work on a body, from its JSON to its prompt, grows with its bytes and not faster, in each API.

Work is counted: calls of functions (also of those written in C, and each step of a generator), and the characters of
strings that are made of the body's strings. No test here measures time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from hostile_bodies import CHAT, COMPLETIONS, FAMILIES, MESSAGES, ODD_TEXTS, RESPONSES, Family, encoded
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.build import assemble
from rootstock.errors import RequestError
from rootstock.pipeline.model import ServedModel
from rootstock.server.formats.anthropic.calls import prepared_prompt as messages_prompt
from rootstock.server.formats.anthropic.schema import CountTokensRequest
from rootstock.server.formats.openai.calls import prepared_prompt
from rootstock.server.formats.openai.schema import PromptRequest
from rootstock.server.formats.responses.calls import Responses
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.store import ResponseStore
from rootstock.server.http import request_bodies
from rootstock.server.models.registry import served_model
from rootstock.server.wire.sender import Sender
from rootstock.testing.fake_runtime import FakeRuntime
from rootstock.text.prompts.fingerprint import Fingerprints
from rootstock.units import MIB
from text.prompts.chat_tokenizers import chat_tokenizer

Prepare = Callable[[dict[str, Any]], object]
SMALL, LARGE = 150, 1_200
MOST_GROWTH = 1.7  # of the work for a byte. Work that grows with the square of the size gives about 8


@dataclass
class Made:
    """Characters of the strings that were made of a body's strings."""

    chars: int = 0


class Counted(str):
    """A string that counts the characters of all strings that are made of it."""

    made: Made

    def of(self, text: str) -> Counted:
        self.made.chars += len(text)
        found = Counted(text)
        found.made = self.made
        return found

    def __add__(self, other: str) -> Counted:
        return self.of(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return self.of(str(other) + str(self))

    def __getitem__(self, at: Any) -> Counted:
        return self.of(str(self)[at])

    def __str__(self) -> str:
        return str.__str__(self)


def counted(value: Any, made: Made) -> Any:
    """Returns a JSON value whose strings count, but for the names of fields and types."""
    match value:
        case str():
            text = Counted(value)
            text.made = made
            return text
        case list():
            return [counted(each, made) for each in value]
        case dict():
            return {
                name: each if name in ("role", "type", "tool_choice", "anything") else counted(each, made)
                for name, each in value.items()
            }
        case _:
            return value


def work_on(body: dict[str, Any], prepare: Prepare) -> int:
    made, events = Made(), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal events
        events += event in ("call", "c_call")

    body = counted(body, made)
    sys.setprofile(count)
    try:
        prepare(body)
    except (RequestError, ValidationError):
        pass  # it may be refused, before or after some work
    finally:
        sys.setprofile(None)
    return events + made.chars // 64  # characters are copied at memory speed


@pytest.fixture(scope="module")
def prepares() -> Iterator[Mapping[str, Prepare]]:
    """The functions that make the prompt of a body. Its template shows no system message, and roles in turn only."""
    tokenizer = chat_tokenizer("gemma")
    made = assemble(FakeRuntime(1_000, 4_000_000), tokenizer, CacheConfig(budget_bytes=64 * MIB))
    model: ServedModel = served_model(made, ServerConfig(), Fingerprints())
    store = ResponseStore.open(None, MIB)
    sender = Sender("")
    responses = Responses(sender, store.of(""), Sealer(store.sealing_key, ""), 16 * MIB)

    def prepare_chat(body: dict[str, Any]) -> object:
        return prepared_prompt(model, PromptRequest.model_validate(body), sender)

    yield {
        CHAT: prepare_chat,
        COMPLETIONS: prepare_chat,
        MESSAGES: lambda body: messages_prompt(model, CountTokensRequest.model_validate(body), sender),
        RESPONSES: lambda body: responses.rendered_chat(model, ResponseRequest.model_validate(body)),
    }
    store.close()


_ONE_TEXT = [f"one text of {text.encode('unicode_escape').decode()}" for text in ODD_TEXTS]


@pytest.mark.parametrize(
    ("route", "make"),
    [
        pytest.param(route, make, id=f"{route}: {name}")
        for (route, name), make in FAMILIES.items()
        if name not in _ONE_TEXT[1:]
    ],
)
def test_the_work_on_a_body_grows_with_its_bytes(
    prepares: Mapping[str, Prepare], route: str, make: Family
) -> None:
    prepare = prepares[route]
    work_on(make(4), prepare)  # first uses compile and keep
    rates = []
    for size in (SMALL, LARGE):
        body = make(size)
        assert json.loads(encoded(body)) == body or "\ud800" in str(body)
        rates.append(work_on(body, prepare) / len(encoded(body)))
    small, large = rates
    assert large < MOST_GROWTH * small


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_long_texts_are_joined_once(prepares: Mapping[str, Prepare], role: str) -> None:
    def made(count: int) -> int:
        found = Made()
        body = {
            "messages": [{"role": role, "content": "word " * 200}] * count
            + [{"role": "user", "content": "x"}]
        }
        with suppress(RequestError):  # the template's, which sees the joined text
            prepares[CHAT](counted(body, found))
        return found.chars

    made(2)
    assert made(800) <= 10 * made(100)


def test_a_prompt_that_cannot_fit_is_refused_before_any_message_is_built(
    prepares: Mapping[str, Prepare], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rootstock.pipeline import model

    monkeypatch.setattr(model, "template_input", lambda *_: pytest.fail("it was built"))
    for route, body in (
        (CHAT, {"messages": [{"role": "system", "content": "word " * 1_000_000}] * 16}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 100_000}] * 160}]},
        ),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": "word " * 1_000_000}] * 16}),
        (CHAT, {"messages": [{"role": "assistant", "reasoning_content": "word " * 1_000_000}] * 16}),
        (MESSAGES, {"messages": [{"role": "user", "content": "word " * 1_000_000}] * 16}),
        (RESPONSES, {"input": [{"role": "user", "content": "word " * 1_000_000}] * 16, "store": False}),
    ):
        with pytest.raises(RequestError, match="characters, which make more than"):
            prepares[route](body)


# ---- memory that bodies took


@pytest.mark.parametrize(("bodies", "size", "returned"), [(3, 400_000, 1), (40, 30_000, 1), (3, 30_000, 0)])
def test_unused_memory_is_returned_after_large_or_many_bodies(
    monkeypatch: pytest.MonkeyPatch, bodies: int, size: int, returned: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(request_bodies, "return_free_memory", lambda: calls.append(None))
    monkeypatch.setattr(request_bodies, "_RETURN_AFTER_S", 0.01)
    queue = request_bodies.PreparationQueue(8, 8)
    received = {"type": "http.request", "body": b"x" * size, "more_body": False}

    async def receive() -> Any:
        return received

    async def prepare_all() -> None:
        for _ in range(bodies):
            request = Request({"type": "http", "method": "POST", "headers": []}, receive)
            monkeypatch.setattr(request, "is_disconnected", AsyncMock(return_value=False))
            await queue.run(request, lambda: None)
        while len(calls) < returned:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    asyncio.run(prepare_all())
    assert len(calls) >= returned
    assert returned or not calls
