"""The next turn of a conversation is cached in idle time, in each wire format, and answers stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rootstock.cache.families import Family
from rootstock.config import EngineConfig
from rootstock.testing.fake_runtime import FULL, STATE, window
from server.conftest import GREEDY, Served, served_by_oracle, user
from text.prompts.chat_tokenizers import chat_tokenizer
from waiting import wait_until

WORDS = (
    "The reader asks, the tool answers, and then you say what it means to a helpful assistant of a library. "
    * 2
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"const": WORDS}},
    "required": ["a"],
    "additionalProperties": False,
}
FIRST: dict[str, Any] = {"max_tokens": 400, **GREEDY, "reasoning_budget": 30}
FAMILIES = [(FULL,), (FULL, STATE), (FULL, window(24))]


def serve(families: tuple[Family, ...], *, idle_work: bool) -> Any:
    tokenizer = chat_tokenizer("qwen3_thinking")
    return served_by_oracle(
        EngineConfig(idle_work=idle_work), tokenizer=tokenizer, families=families, vocab_size=800
    )


@pytest.fixture(params=FAMILIES, ids=lambda families: "+".join(family.name for family in families))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param, idle_work=True) as made:
        yield made


def until_idle(served: Served, ends: int = 1) -> dict[str, dict[str, int]]:
    """Waits until so many next turns have ended, and returns the ends by kind."""

    def ended() -> dict[str, dict[str, int]]:
        idle = served.assembly.engine.stats().idle
        assert idle is not None
        return idle.ended

    wait_until(lambda: sum(ended().get("next_turn", {}).values()) >= ends)
    return ended()


def asked(messages: list[dict[str, Any]]) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return {"messages": messages, "response_format": response_format, **FIRST}


def conversation(served: Served, stream: bool = False) -> list[dict[str, Any]]:
    """Asks a question and returns the messages of the next request."""
    if stream:
        chunks = served.chunks("/v1/chat/completions", **asked(user("Which word?")))
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        answer = served.client.post("/v1/chat/completions", json=asked(user("Which word?"))).json()
        text = answer["choices"][0]["message"]["content"]
    assert json.loads(text) == {"a": WORDS}
    return [*user("Which word?"), {"role": "assistant", "content": text}, *user("And why?")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_answer_without_its_reasoning_is_cached_before_the_next_turn(
    served: Served, stream: bool
) -> None:
    following = conversation(served, stream)
    assert until_idle(served)["next_turn"] == {"cached": 1}
    answer = served.client.post("/v1/chat/completions", json={"messages": following, **FIRST}).json()
    usage = answer["usage"]
    uncached = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert uncached < 16, "more than the new message was computed"
    until_idle(served, 2)
    served.settled()


@pytest.mark.parametrize("families", FAMILIES, ids=lambda families: "+".join(f.name for f in families))
def test_answers_are_the_same_without_idle_work(families: tuple[Family, ...]) -> None:
    texts, uncached = [], []
    for idle_work in (True, False):
        with serve(families, idle_work=idle_work) as served:
            following = conversation(served)
            if idle_work:
                until_idle(served)
            body = {"messages": following, **FIRST, "max_tokens": 20}
            answer = served.client.post("/v1/chat/completions", json=body).json()
            texts.append(answer["choices"][0]["message"])
            usage = answer["usage"]
            uncached.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert texts[0] == texts[1]
    assert uncached[0] < 16 < uncached[1]


def test_anthropics_messages_have_it_too(served: Served) -> None:
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    first = {
        "model": served.assembly.description.name,
        "max_tokens": 1500,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": output,
    }
    response = served.client.post("/v1/messages", json=first | {"messages": user("Which word?")})
    assert response.status_code == 200, response.text
    until_idle(served)
    content = response.json()["content"]
    following = [*user("Which word?"), {"role": "assistant", "content": content}, *user("And why?")]
    answer = served.client.post("/v1/messages", json=first | {"messages": following, "max_tokens": 5}).json()
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_creation_input_tokens"] < 16


def test_responses_have_it_too(served: Served) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    first = {"temperature": 0, "max_output_tokens": 3500, "text": text}
    response = served.client.post("/v1/responses", json=first | {"input": "Which word?"})
    assert response.status_code == 200, response.text
    until_idle(served)
    following = first | {
        "input": "And why?",
        "previous_response_id": response.json()["id"],
        "max_output_tokens": 16,
    }
    usage = served.client.post("/v1/responses", json=following).json()["usage"]
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 16


def test_several_choices_have_no_next_turn(served: Served) -> None:
    body = asked(user("Which word?")) | {"n": 2}
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200
    served.settled()
    until_idle(served, 0)
    idle = served.assembly.engine.stats().idle
    assert idle is not None
    assert idle.ended == {}


def test_idle_work_stays_within_the_salt_of_its_conversation(served: Served) -> None:
    body = asked(user("Which word?")) | {"cache_salt": "one"}
    text = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    until_idle(served)
    following = [*user("Which word?"), {"role": "assistant", "content": text}, *user("And why?")]
    cached = []
    for salt in ("other", "one"):
        body = {"messages": following, **FIRST, "cache_salt": salt, "max_tokens": 2}
        usage = served.client.post("/v1/chat/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]


def test_the_metrics_count_idle_work(served: Served) -> None:
    conversation(served)
    until_idle(served)
    assert served.metric("rootstock_idle_work_total", kind="next_turn", ended="cached") == 1
    assert served.metric("rootstock_idle_tokens_total", event="computed") > 16
