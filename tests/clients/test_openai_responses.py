"""The real openai client's Responses API, sync and async, against a model that writes scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rootstock.config import ServerConfig
from server.responses.scripted import scripted_server

KEY = "sk-test"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Town(BaseModel):
    name: str
    people: int


def script(prompt: str) -> str:
    last = prompt.rpartition("<|end|><|assistant|>")[0].rpartition("|>")[2]
    if "<|tool|>" in prompt:
        return f"<think>It says {last}.</think>It is {last} there."
    if "weather" in last:
        return '<think>I ask.</think><call weather>{"town": "Oslo"}</call>'
    if "town" in last:
        return '{"name": "Oslo", "people": 700000}'
    return f"You said: {last}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server(script, ServerConfig(api_key=KEY, aliases=())) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_create_retrieve_list_and_delete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="hello", metadata={"a": "b"}, temperature=0)
    assert made.output_text == "You said: hello"
    assert made.status == "completed"
    assert made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens == 0
    assert client.responses.retrieve(made.id) == made
    [item] = client.responses.input_items.list(made.id)
    assert item.type == "message"
    assert client.responses.delete(made.id) is None
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(made.id)
    assert gone.value.code == "response_not_found"
    counted = client.responses.input_tokens.count(model="fake", input="hello")
    assert counted.input_tokens == made.usage.input_tokens


def test_a_conversation_by_its_last_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="one")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    assert second.output_text == "You said: two"
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="fake", input="x", previous_response_id="resp_0")
    assert unknown.value.code == "previous_response_not_found"


def test_a_round_trip_of_a_tool_with_a_stream(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    with client.responses.stream(model="fake", input=history, tools=[WEATHER], store=False) as stream:
        kinds = {event.type for event in stream}
        called = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= kinds
    [call] = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"town": "Oslo"}
    assert call.parsed_arguments == {"town": "Oslo"}
    history += called.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    with client.responses.stream(model="fake", input=history, tools=[WEATHER], store=False) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answered = stream.get_final_response()
    assert text == answered.output_text == "It is rain there."
    assert answered.usage is not None
    assert called.usage is not None
    assert answered.usage.input_tokens_details.cached_tokens >= called.usage.input_tokens - 64
    assert answered.usage.output_tokens_details.reasoning_tokens == len("It says rain.")


def test_parse_of_a_text(client: openai.OpenAI) -> None:
    # The text's format is asked for by words here: the scripted model follows no constraint.
    made = client.responses.create(model="fake", input="Which town?")
    assert Town.model_validate_json(made.output_text) == Town(name="Oslo", people=700_000)


def test_a_raw_stream_and_an_incomplete_answer(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="long", max_output_tokens=4, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == "You "


def test_errors_become_the_clients_own_exceptions(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="'temperature'"):
        client.responses.create(model="fake", input="x", temperature=-1)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(model="fake", input="x" * 20_000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError, match="'gpt-9'"):
        client.responses.create(model="gpt-9", input="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).responses.create(model="fake", input="x")


def test_the_async_client(url: str) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            async def one(i: int) -> str:
                async with client.responses.stream(model="fake", input=f"number {i}") as stream:
                    return (await stream.get_final_response()).output_text

            assert await asyncio.gather(*(one(i) for i in range(8))) == [
                f"You said: number {i}" for i in range(8)
            ]
            made = await client.responses.create(model="fake", input="kept")
            assert (await client.responses.retrieve(made.id)).output_text == "You said: kept"
            await client.responses.delete(made.id)

    asyncio.run(scenario())
