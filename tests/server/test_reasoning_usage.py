"""The usage of each API tells how many tokens of an answer are reasoning, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.anthropic.streams import events_in, message_of
from server.conftest import user
from server.responses.events import checked, parsed
from server.responses.scripted import scripted_server
from waiting import HANG_S

THOUGHT = "It is täglich so."
ANSWERS = {
    f"<think>{THOUGHT}</think>Yes.": len(THOUGHT.encode()),
    f"<think>{THOUGHT}": len(THOUGHT.encode()),
    "No.": 0,
}


def script(prompt: str) -> str:
    return prompt.rpartition("say:")[2].partition("<|end|>")[0]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with scripted_server(script) as url, httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client


def posted(client: httpx.Client, path: str, **body: Any) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("choices", [1, 3])
def test_a_chat(client: httpx.Client, answer: str, choices: int) -> None:
    body = {"messages": user(f"say:{answer}"), "n": choices}
    whole = json.loads(posted(client, "/v1/chat/completions", **body))["usage"]
    options = {"include_usage": True}
    text = posted(client, "/v1/chat/completions", **body, stream=True, stream_options=options)
    streamed = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    assert whole["completion_tokens_details"] == streamed["completion_tokens_details"]
    assert whole["completion_tokens_details"]["reasoning_tokens"] == choices * ANSWERS[answer]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_response(client: httpx.Client, answer: str) -> None:
    body = {"input": f"say:{answer}"}
    whole = json.loads(posted(client, "/v1/responses", **body))
    for told in (whole, checked(parsed(posted(client, "/v1/responses", **body, stream=True)))):
        assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": ANSWERS[answer]}
    stored = client.get(f"/v1/responses/{whole['id']}").json()
    assert stored["usage"] == whole["usage"]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_message(client: httpx.Client, answer: str, display: str) -> None:
    thinking = {"type": "adaptive", "display": display}
    body = {"messages": user(f"say:{answer}"), "max_tokens": 100, "thinking": thinking}
    whole = json.loads(posted(client, "/v1/messages", **body))
    for told in (whole, message_of(list(events_in(posted(client, "/v1/messages", **body, stream=True))))):
        assert told["usage"]["output_tokens_details"] == {"thinking_tokens": ANSWERS[answer]}


def test_a_completion_is_not_parsed(client: httpx.Client) -> None:
    told = json.loads(posted(client, "/v1/completions", prompt="<|assistant|>", max_tokens=4))
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
