"""Chats of the library, compared with chats of the server: calls, reasoning, schemas, hints, media."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import save_chat
from rootstock import LLM, RequestOutput, SamplingParams, TextDelta
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from rootstock.engine.build import build_engine
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from waiting import HANG_S

Json = dict[str, Any]
TOWN: Json = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": TOWN}}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN, "strict": True}}
ASKED: list[Json] = [{"role": "user", "content": "Where is it warm?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=120)
# A tiny model of random weights fills a schema with spaces where it is greedy.
SAMPLED = SamplingParams(temperature=1.5, seed=7, max_tokens=400)
NO_THINKING: Json = {"enable_thinking": False}
BUDGET = 64 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"), "full")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, dtype="float32", budget_bytes=BUDGET, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    """A client of a server of the same model."""
    config = ModelConfig(str(directory), dtype="float32", device="cpu")
    made = build_engine(config, CacheConfig(budget_bytes=BUDGET), EngineConfig())
    app = create_app(made, ServerConfig())
    with (
        made.engine,
        running(app, made.engine) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


# Options of the library, and the same as fields of a request to the server.
SAME: dict[str, tuple[Json, Json]] = {
    "plain": ({}, {}),
    "no thinking": ({"chat_template_kwargs": NO_THINKING}, {"chat_template_kwargs": NO_THINKING}),
    "forced call": (
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    "schema": (
        {"response_format": FORMAT, "chat_template_kwargs": NO_THINKING},
        {"response_format": FORMAT, "chat_template_kwargs": NO_THINKING},
    ),
    "reasoning budget": (
        {"reasoning_budget": 5, "response_format": FORMAT},
        {"reasoning_budget": 5, "response_format": FORMAT},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_the_library_answers_as_the_server_does(llm: LLM, client: httpx.Client, case: str) -> None:
    options, fields = SAME[case]
    [ours] = llm.chat(ASKED, GREEDY, **options)
    body = {"model": "any", "messages": ASKED, "temperature": 0, "max_tokens": 120, **fields}
    answer = client.post("/v1/chat/completions", json=body).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert ours.text == (message["content"] or "")
    assert ours.outputs[0].reasoning == message.get("reasoning_content", "")
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    assert [(call.name, call.text) for call in ours.tool_calls] == calls
    assert (ours.prompt_tokens, ours.completion_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_a_forced_call_is_parsed_and_can_be_sent_back(llm: LLM) -> None:
    [first] = llm.chat(ASKED, SAMPLED, tools=[TOOL], tool_choice="required")
    assert first.tool_calls
    assert {call.name for call in first.tool_calls} == {"weather"}
    assert {call.arguments["town"] for call in first.tool_calls} <= {"Oslo", "Rome"}
    sent = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in first.tool_calls
    ]
    following = [
        *ASKED,
        {"role": "assistant", "content": first.text, "tool_calls": sent},
        *({"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in first.tool_calls),
    ]
    [second] = llm.chat(following, SamplingParams(temperature=0, max_tokens=1), tools=[TOOL])
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 2


def test_a_schema_holds_for_the_answer(llm: LLM) -> None:
    [answer] = llm.chat(ASKED, SAMPLED, response_format=FORMAT, chat_template_kwargs=NO_THINKING)
    assert json.loads(answer.text)["town"] in ("Oslo", "Rome")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_has_the_parts_of_the_whole_answer(llm: LLM, is_async: bool) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": "required"}
    [whole] = llm.chat(ASKED, SAMPLED, **options)

    async def pieces() -> list[TextDelta]:
        return [piece async for piece in llm.achat_stream(ASKED, SAMPLED, **options)]

    streamed = asyncio.run(pieces()) if is_async else list(llm.chat_stream(ASKED, SAMPLED, **options))
    assert "".join(piece.text for piece in streamed) == whole.text
    assert "".join(piece.reasoning for piece in streamed) == whole.outputs[0].reasoning
    kinds = [type(delta).__name__ for piece in streamed for delta in piece.deltas]
    assert kinds[0] == "CallStarted"
    assert kinds[-1] == "CallEnded"


def test_hints_keep_a_conversation_and_wrong_ones_are_refused(llm: LLM) -> None:
    before = llm.stats().cache.accepted_hints
    llm.chat(ASKED, GREEDY, session="one", ttl_s=60.0, cache_salt="hints")
    assert llm.stats().cache.accepted_hints >= before + 2
    for option, value in (("ttl_s", 0), ("ttl_s", "1h"), ("ttl_s", True), ("session", 3)):
        with pytest.raises(InvalidParameter, match=option):
            llm.chat(ASKED, GREEDY, **{option: value})  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_refused_by_name(llm: LLM) -> None:
    for ask in (llm.chat, llm.chat_stream, llm.achat_stream, llm.explain_chat):
        with pytest.raises(TypeError, match="there is no option 'tool' here"):
            ask(ASKED, tool=[TOOL])  # type: ignore[operator]
    for complete in (llm.generate, llm.stream, llm.astream, llm.explain):
        with pytest.raises(
            TypeError, match="there is no option 'session' here: there are cache_salt, adapter"
        ):
            complete("text", session="one")  # type: ignore[operator]


@pytest.mark.parametrize("media", ["refuse", "mention"])
def test_media_are_refused_or_mentioned_in_the_prompt(directory: Path, media: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    asked = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    with LLM(directory, dtype="float32", budget_bytes=BUDGET, device="cpu", media=media) as llm:
        if media == "refuse":
            with pytest.raises(Unsupported, match="the model does not read it"):
                llm.chat(asked, GREEDY)
            return
        [answer] = llm.chat(asked, SamplingParams(max_tokens=1))
        assert isinstance(answer, RequestOutput)
        assert "image" in llm.tokenizer.decode(list(answer.prompt_token_ids))


def test_explain_tells_what_a_chat_with_tools_would_find(llm: LLM) -> None:
    llm.chat(ASKED, SamplingParams(max_tokens=1), tools=[TOOL], cache_salt="explained")
    found = llm.explain_chat(ASKED, tools=[TOOL], cache_salt="explained")
    other = llm.explain_chat(ASKED, cache_salt="explained")
    assert found.matched_tokens > other.matched_tokens
