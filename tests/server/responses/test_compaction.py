"""Compaction of a conversation: by its route, by an item of a request, and in later prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rootstock.config import ServerConfig
from rootstock.server.formats.responses import compaction
from rootstock.server.formats.responses.answers import CompactionBody
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.conftest import assert_error
from server.responses.events import parsed
from server.responses.scripted import scripted_server
from waiting import HANG_S

Json = dict[str, Any]
PATH, COMPACT = "/v1/responses", "/v1/responses/compact"
TRIGGER: Json = {"type": "compaction_trigger"}
TOOL: Json = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
# The last text that asks for a summary stands for the whole request.
SUMMARY = "The user wants tea. I looked: there is water.\nNext: boil it."
CONVERSATION: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Make tea."},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look first."}]},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "water"},
    {"role": "assistant", "content": "There is water."},
    {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
]
PROMPTS: list[str] = []  # that the model has seen


def script(prompt: str) -> str:
    PROMPTS.append(prompt)
    last = prompt.rpartition("<|end|><|assistant|>")[0].rpartition("|>")[2]
    if last != compaction.REQUEST:
        return last.removeprefix("say:") if last.startswith("say:") else "ok"
    if "Please sing." in prompt:
        return "<think>La la.</think>"
    if "Please call." in prompt:
        return '<call look>{"at": 1}</call>'
    return f"<think>What matters?</think>{SUMMARY}"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        scripted_server(script, ServerConfig(aliases=())) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


def compacted(client: httpx.Client, **fields: Any) -> list[Json]:
    answer = client.post(COMPACT, json={"model": "fake", **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    CompactionBody.model_validate(body, strict=True)
    output: list[Json] = body["output"]
    assert output[-1].keys() == {"id", "type", "encrypted_content"}
    return output


def prompt_of(client: httpx.Client, items: list[Json], **fields: Any) -> str:
    """Returns the prompt that the model sees."""
    del PROMPTS[:]
    answer = client.post(PATH, json={"input": items, "store": False, **fields})
    assert answer.status_code == 200, answer.text
    return PROMPTS[0]


def test_messages_of_the_user_stay_and_a_sealed_summary_stands_for_the_rest(client: httpx.Client) -> None:
    output = compacted(client, input=CONVERSATION, instructions="Help.", tools=[TOOL])
    texts = [(item["role"], item["content"][0]["text"]) for item in output[:-1]]
    assert texts == [("developer", "Be brief."), ("user", "Make tea."), ("user", "Go on.")]
    assert output[-1]["type"] == "compaction"
    assert "water" not in str(output)
    prompt = prompt_of(client, [*output, {"role": "user", "content": "And now?"}])
    assert f"{compaction.shown(SUMMARY)}<|end|>" in prompt
    for text in ("Be brief.", "Make tea.", "Go on.", "And now?"):
        assert prompt.count(text) == 1
    assert "I look first." not in prompt
    assert "What matters?" not in prompt


def test_the_request_for_a_summary_goes_on_from_the_conversations_own_prompt(client: httpx.Client) -> None:
    """Its tools and instructions are in the prompt, so that the cache has the conversation."""
    fields = {"instructions": "Help.", "tools": [TOOL]}
    before = prompt_of(client, CONVERSATION, **fields)
    del PROMPTS[:]
    compacted(
        client, input=CONVERSATION, tool_choice="required", text={"format": {"type": "json_object"}}, **fields
    )
    asked = PROMPTS[0]
    assert asked.startswith(before.removesuffix("<|assistant|>"))
    usage = client.post(COMPACT, json={"model": "fake", "input": CONVERSATION, **fields}).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_at_the_end_of_the_input_makes_a_response_of_one_compaction(
    client: httpx.Client, stream: bool
) -> None:
    """Codex accepts nothing but a completed response with exactly one such item."""
    answer = client.post(PATH, json={"input": [*CONVERSATION, TRIGGER], "tools": [TOOL], "stream": stream})
    if stream:
        events = parsed(answer.text)
        kinds = [event["type"].removeprefix("response.") for event in events if "response" not in event]
        assert kinds == ["output_item.added", "output_item.done"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        response = events[-1]["response"]
    else:
        response = answer.json()
    assert response["status"] == "completed"
    [item] = response["output"]
    assert item["type"] == "compaction"
    # The client keeps its whole history, the item at its end: what the item replaces is not shown.
    later = {"role": "user", "content": "Well?"}
    prompt = prompt_of(client, [*CONVERSATION, item, later])
    assert "There is water." not in prompt
    assert SUMMARY in prompt
    assert prompt == prompt_of(client, [*CONVERSATION, {"type": "item_reference", "id": item["id"]}, later])
    chained = {"previous_response_id": response["id"], "store": False}
    assert prompt == prompt_of(client, [later], **chained)


def test_a_second_compaction_replaces_the_first(client: httpx.Client) -> None:
    first = compacted(client, input=CONVERSATION)
    assistant = {"role": "assistant", "content": "It boils."}
    second = compacted(client, input=[*first, assistant, {"role": "user", "content": "More."}])
    assert [item["type"] for item in second].count("compaction") == 1
    assert len(second) == len(first) + 1
    assert second[-1]["encrypted_content"]


def test_stored_responses_are_compacted_and_the_compaction_is_not_stored(client: httpx.Client) -> None:
    made = client.post(PATH, json={"input": "say:one"}).json()
    answer = client.post(
        COMPACT, json={"model": "fake", "previous_response_id": made["id"], "input": "two"}
    ).json()
    assert [item["content"][0]["text"] for item in answer["output"][:-1]] == ["say:one", "two"]
    assert_error(client.get(f"{PATH}/{answer['id']}"), 404, "response_not_found")


@pytest.mark.parametrize(
    ("word", "summary"),
    [("sing", "La la."), ("call", '<call look>{"at": 1}</call>')],
    ids=["thought", "call"],
)
def test_a_model_that_writes_no_summary_still_ends_with_one_item(
    client: httpx.Client, word: str, summary: str
) -> None:
    output = compacted(client, input=f"Please {word}.", tools=[TOOL])
    assert compaction.shown(summary) in prompt_of(client, output)


def test_a_summary_is_used_as_far_as_it_was_written(client: httpx.Client) -> None:
    fields = {"input": [*CONVERSATION, TRIGGER], "max_output_tokens": 40}
    response = client.post(PATH, json=fields).json()
    assert response["status"] == "completed"
    assert response["incomplete_details"] is None
    assert compaction.shown(SUMMARY[: 40 - len("<think>What matters?</think>")].strip()) in prompt_of(
        client, response["output"]
    )


@pytest.mark.parametrize("kind", sorted(compaction.KINDS))
@pytest.mark.parametrize("sealed", ["rs1.x", "", None, "of another server"])
def test_a_compaction_that_cannot_be_opened_says_so_in_the_prompt(
    client: httpx.Client, kind: str, sealed: str | None
) -> None:
    """An agent sends it with every later request: an error would end its session."""
    item = {"type": kind, "encrypted_content": sealed}
    prompt = prompt_of(client, [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}])
    assert compaction.shown(None) in prompt


def test_a_compaction_is_bound_to_its_tenant(client: httpx.Client) -> None:
    output = compacted(client, input=CONVERSATION)
    del PROMPTS[:]
    client.post(PATH, json={"input": output}, headers={"X-Cache-Salt": "another"})
    assert SUMMARY not in PROMPTS[0]
    assert compaction.shown(None) in PROMPTS[0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"input": [TRIGGER, *CONVERSATION]}, "input[0].type"),
        (PATH, {"input": [TRIGGER]}, "input"),
        (COMPACT, {"input": CONVERSATION, "model": None}, "model"),
        (COMPACT, {"input": CONVERSATION, "model": ""}, "model"),
        (COMPACT, {"input": [*CONVERSATION, TRIGGER]}, f"input[{len(CONVERSATION)}].type"),
        (COMPACT, {}, "input"),
        (COMPACT, {"input": "x", "stream": True}, "stream"),
        (COMPACT, {"input": [{"type": "compaction", "encrypted_content": 5}]}, "input[0].encrypted_content"),
        (PATH, {"input": "x", "context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
def test_a_wrong_request_is_refused_with_the_place(
    client: httpx.Client, path: str, fields: Json, param: str
) -> None:
    answer = client.post(path, json={"model": "fake", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_length_of_a_summary_has_a_bound(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from rootstock.server.formats.responses import calls

    monkeypatch.setattr(calls, "MAX_SUMMARY_TOKENS", 30)
    usage = client.post(COMPACT, json={"model": "fake", "input": CONVERSATION}).json()["usage"]
    assert usage["output_tokens"] == 30
    assert len(ByteTokenizer().encode(SUMMARY)) > 30
