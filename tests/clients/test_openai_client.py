"""The real openai client, over HTTP, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rootstock.config import ServerConfig
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.conftest import served_by_oracle
from waiting import HANG_S

KEY = "sk-test"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_by_oracle(server=ServerConfig(api_key=KEY, aliases=())) as served:
        yield f"{served.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "rootstock"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=8, temperature=0, seed=1, user="me", prompt_cache_key="k"
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_a_streamed_chat_with_choices_usage_and_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "fake", "messages": MESSAGES, "max_tokens": 10, "n": 2, "seed": 4,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    texts, scored, usage = ["", ""], [0, 0], None
    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                scored[choice.index] += len(choice.logprobs.content)
    assert texts == [choice.message.content for choice in whole.choices]
    assert scored == [len(choice.logprobs.content or []) for choice in whole.choices if choice.logprobs]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_streaming_helper_assembles_the_answer(client: openai.OpenAI) -> None:
    # It insists on answers that end by themselves.
    fields: Any = {
        "model": "fake", "messages": MESSAGES, "temperature": 0,
        "logit_bias": {str(ByteTokenizer.END): 99}, "extra_body": {"min_tokens": 7},
    }  # fmt: skip
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_completions_and_their_stream(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "fake",
        "prompt": ["one", "two"],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
    }
    whole = client.completions.create(**fields, echo=True)
    assert [choice.text[:3] for choice in whole.choices] == ["one", "two"]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs[0] is None  # type: ignore[index]
    texts = ["", ""]
    for chunk in client.completions.create(**fields, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_fields_beyond_openais_go_through_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "cache_salt": "me"}
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_errors_become_the_clients_own_exceptions(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="4,096 tokens") as too_long:
        client.completions.create(model="fake", prompt="x" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="'temperature'"):
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="'gpt-9'"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


def test_the_async_client_runs_many_at_once_and_may_leave_a_stream(url: str) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            async def one(i: int) -> str:
                text = ""
                stream = await client.chat.completions.create(
                    model="fake", messages=[*MESSAGES, {"role": "user", "content": str(i)}],
                    max_tokens=20, temperature=0, stream=True,
                )  # fmt: skip
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            together = await asyncio.gather(*(one(i) for i in range(24)))
            alone = [await one(i) for i in range(24)]
            assert together == alone

            stream = await client.chat.completions.create(
                model="fake", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
            )
            async for _chunk in stream:
                break
            await stream.close()
            known = {"Authorization": f"Bearer {KEY}"}
            health = url.removesuffix("/v1") + "/health"
            async with asyncio.timeout(HANG_S):
                while (await client._client.get(health, headers=known)).json()["running"]:
                    await asyncio.sleep(0.005)

    asyncio.run(scenario())
