"""The real anthropic client, over HTTP, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from rootstock.config import ServerConfig
from rootstock.pipeline.model import ServedModel
from rootstock.server.formats.anthropic import routes
from rootstock.server.formats.anthropic.calls import messages_call
from rootstock.server.formats.anthropic.schema import MessagesRequest
from rootstock.server.wire.sender import Sender
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.output.deltas import ContentDelta, Delta, ReasoningDelta
from server.anthropic.streams import call
from server.conftest import served_by_oracle
from waiting import HANG_S

pytest.importorskip("anthropic.types")  # not "anthropic": the folder of other tests has this name
import anthropic

KEY = "sk-test"
MESSAGES: Any = [{"role": "user", "content": "Hello?"}]
ASKED: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 8}
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_by_oracle(server=ServerConfig(api_key=KEY, aliases=())) as served:
        yield served.url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = client.messages.create(
        **ASKED,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.0, "top_k": 5},
        stop_sequences=["never to be seen"],
        metadata={"user_id": "me"},
    )
    assert message.role == "assistant"
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.content[0].type == "text"
    assert message.usage.input_tokens == 1
    assert message.usage.cache_creation.ephemeral_5m_input_tokens == message.usage.cache_creation_input_tokens
    assert message._request_id.startswith("req_")


def test_a_stream_and_its_final_message(client: Any) -> None:
    with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert message.content[0].text == text
    assert message.usage.output_tokens >= 1
    assert client.messages.create(**ASKED, extra_body=GREEDY).content[0].text == text
    events = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]


def test_betas_counting_and_models(client: Any) -> None:
    message = client.beta.messages.create(
        **ASKED,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 2000},
    )
    assert message.context_management.applied_edits == []
    with client.beta.messages.stream(**ASKED, betas=["context-management-2025-06-27"]) as stream:
        assert stream.get_final_message().type == "message"
    assert client.messages.count_tokens(model="fake", messages=MESSAGES).input_tokens > 5
    assert client.beta.messages.count_tokens(model="fake", messages=MESSAGES).input_tokens > 5
    [model] = client.models.list()
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert client.models.retrieve("fake").created_at.tzinfo is not None


def test_errors_are_those_of_the_api(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="Ask for 'fake'") as caught:
        client.messages.create(**ASKED | {"model": "other"})
    assert caught.value.request_id.startswith("req_")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role"):
        client.messages.create(**ASKED | {"messages": [{"role": "wizard", "content": "x"}]})
    stranger = anthropic.Anthropic(base_url=url, auth_token="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**ASKED)


def test_the_async_client(url: str) -> None:
    async def ask() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) as client:
            whole = await client.messages.create(**ASKED, extra_body=GREEDY)
            async with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
                return whole, await stream.get_final_message()

    whole, streamed = asyncio.run(asyncio.wait_for(ask(), HANG_S))
    assert whole.content[0].text == streamed.content[0].text


# ---- scripted answers: the fake runtime writes no calls


class Scripted:
    """A parser that gives one answer's deltas at the end of a text that is empty."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas

    def push(self, text: str) -> list[Delta]:
        return []

    def finish(self) -> list[Delta]:
        return self._deltas


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[MessagesRequest]]:
    """Makes the server give these answers, one after another, and collects the requests."""

    def start(*answers: list[Delta]) -> list[MessagesRequest]:
        asked: list[MessagesRequest] = []

        def scripted_call(model: ServedModel, body: MessagesRequest, sender: Sender) -> Any:
            made = messages_call(model, body, sender)
            asked.append(body)  # one that is not refused: the runner asks for a thread first
            deltas = answers[len(asked) - 1]
            [request] = made.requests
            ends = replace(request.sampling, temperature=0.0, logit_bias={ByteTokenizer.END: 100.0})
            format = replace(made.format, new_parser=lambda: Scripted(deltas))  # type: ignore[type-var]
            return replace(made, format=format, requests=(replace(request, sampling=ends),))

        monkeypatch.setattr(routes, "messages_call", scripted_call)
        return asked

    return start


CALLS: list[Delta] = [
    ReasoningDelta("I should "),
    ReasoningDelta("look."),
    ContentDelta("Let me look."),
    *call(0, "weather", '{"city": ', '"Bern"}'),
    *call(1, "weather", '{"city": "Oslo"}'),
]
LAST: list[Delta] = [ContentDelta("Both are "), ContentDelta("sunny.")]


@pytest.mark.parametrize("beta", [False, True])
def test_thinking_and_calls_of_a_stream_are_read(client: Any, script: Any, beta: bool) -> None:
    script(CALLS)
    with (client.beta if beta else client).messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    thinking, text, bern, oslo = message.content
    assert thinking.thinking == "I should look."
    assert thinking.signature
    assert text.text == "Let me look."
    assert (bern.input, oslo.input) == ({"city": "Bern"}, {"city": "Oslo"})
    assert bern.id != oslo.id
    assert message.stop_reason == "tool_use"


def test_a_stream_with_a_malformed_call_is_read_to_its_end(client: Any, script: Any) -> None:
    script([*call(0, "weather", '{"city": ', "Bern}"), ContentDelta(" Sorry.")])
    with client.messages.stream(**ASKED) as stream:
        message = stream.get_final_message()
    assert message.content[1].text == '<call>{"city": Bern}</call> Sorry.'
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_calls_and_goes_on(client: Any, script: Any, stream: bool) -> None:
    asked = script(CALLS, LAST)

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: The city.
        """
        return f"sunny in {city}"

    runner = client.beta.messages.tool_runner(**ASKED, tools=[weather], stream=stream)
    message = runner.until_done()
    assert message.content[0].text == "Both are sunny."
    assert len(asked) == 2
    assert "sunny in Oslo" in str(asked[1].messages[-1])
    assert asked[1].messages[1]["content"][0]["thinking"] == "I should look."


def test_a_structured_answer_is_parsed(client: Any) -> None:
    class Town(BaseModel):
        name: Literal["Bern", "Oslo"]

    asked = ASKED | {"max_tokens": 1_000}  # white space is part of the answer
    for stream in (False, True):
        if stream:
            with client.messages.stream(**asked, output_format=Town) as events:
                message = events.get_final_message()
        else:
            message = client.messages.parse(**asked, output_format=Town)
        assert message.stop_reason == "end_turn"
        assert message.parsed_output.name in ("Bern", "Oslo")
