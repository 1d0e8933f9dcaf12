"""Answers of every route, whole and streamed, in comparison with the types of the official SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import CompactedResponse, Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject

from clients.sdk_types import Findings, compared, events
from rootstock.config import ServerConfig
from server.responses.scripted import scripted_server
from waiting import HANG_S

Json = dict[str, Any]

# Answers of the model by the last message of a prompt.
SCRIPTS = {
    "text": "Hello.",
    "thought": "<think>Let me see.</think>It is so.",
    "call": '<think>I ask.</think>I look.<call weather>{"town": "Oslo"}</call>',
    "calls": '<call weather>{"town": "Oslo"}</call><call weather>{"town": "Bern"}</call>',
    "broken": "<call weather>{no</call>",
    "note": '<call note>{"input": "a \\"word\\""}</call>',
    "shell": '<call local_shell>{"command": ["ls"]}</call>',
    "search": '<call tool_search>{"query": "x"}</call>',
    "far": '<call far__look>{"town": "Oslo"}</call>',
    "empty": "",
    "fails": "It begins\f",
}
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
CHAT_TOOLS: list[Json] = [
    {"type": "function", "function": FUNCTION},
    {"type": "custom", "custom": {"name": "note"}},
]
RESPONSE_TOOLS: list[Json] = [
    {"type": "function", **FUNCTION, "strict": True},
    {"type": "function", "name": "bare"},
    {"type": "custom", "name": "note"},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client"},
    {"type": "namespace", "name": "far", "description": "d", "tools": [{"type": "function", "name": "look"}]},
]
FIELDS: dict[str, list[Json]] = {
    "/v1/chat/completions": [
        {},
        {"tools": CHAT_TOOLS, "n": 2},
        {"functions": [FUNCTION]},
        {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}},
        {"stop": ["o"], "prompt_cache_options": {"comparison_response_id": "chatcmpl-0"}},
    ],
    "/v1/responses": [
        {},
        {"tools": RESPONSE_TOOLS, "include": ["reasoning.encrypted_content"]},
        {"input": [{"role": "user", "content": "text"}, {"type": "compaction_trigger"}]},
        {"max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {
            "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "safety_identifier": "s",
            "prompt_cache_key": "k", "reasoning": {"effort": "low"}, "truncation": "auto",
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "store": False, "tool_choice": "none",
            "text": {"format": {"type": "text"}}, "tools": RESPONSE_TOOLS, "parallel_tool_calls": False,
            "prompt_cache_options": {"comparison_response_id": "resp_0"},
        },
    ],
    "/v1/messages": [
        {},
        {"tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"max_tokens": 3, "thinking": {"type": "enabled", "budget_tokens": 2, "display": "omitted"}},
        {"stop_sequences": ["o"], "diagnostics": {"previous_message_id": "msg_0"}},
    ],
}  # fmt: skip

# Fields beyond the SDKs' types, which clients ignore.
BEYOND = {
    "/v1/chat/completions": {
        # vLLM's: the string that has ended the answer; reasoning, under both of its names
        "Choice.stop_reason", "ChoiceDelta.reasoning", "ChoiceDelta.reasoning_content",
        "ChatCompletionMessage.reasoning", "ChatCompletionMessage.reasoning_content",
        # Our diagnosis of a miss, and custom tools, which the types have in whole answers only
        "ChatCompletion.prompt_cache_diagnostics", "ChatCompletionChunk.prompt_cache_diagnostics",
        "ChoiceDeltaToolCall.custom",
    },
    "/v1/responses": {
        # Required by the Open Responses specification, and sent by OpenAI
        "Response.frequency_penalty", "Response.presence_penalty", "Response.store",
        "Logprob.bytes", "LogprobTopLogprob.bytes", "ResponseCustomToolCall.status",
        "ResponseFunctionCallArgumentsDoneEvent.name",
        # Our facts about hints and misses
        "Response.rootstock", "PromptCacheDiagnosticsComparisonResponseNotFound.rootstock",
    },
    "/v1/messages": {"Diagnostics.rootstock"},
}  # fmt: skip
# Optional fields that are sent as null, because the APIs themselves send them so.
NULLS = {
    "/v1/chat/completions": {
        "ChatCompletionMessage.content", "ChatCompletionMessage.refusal", "Choice.finish_reason",
        "Choice.logprobs", "ChoiceLogprobs.refusal", "ChatCompletionChunk.usage",
    },
    "/v1/responses": {
        "Response.completed_at", "Response.error", "Response.incomplete_details", "Response.instructions",
        "Response.max_output_tokens", "Response.max_tool_calls", "Response.previous_response_id",
        "Response.prompt_cache_key", "Response.safety_identifier", "Response.usage", "Response.user",
        "Reasoning.effort", "Reasoning.summary", "FunctionTool.description", "FunctionTool.parameters",
        "ResponseError.param",
    },
    "/v1/messages": {
        "Message.stop_details", "Message.stop_reason", "Message.stop_sequence",
        "Delta.stop_details", "Delta.stop_sequence",
    },
}  # fmt: skip
# Fields that Python's types call optional although the APIs always send them: those of whole answers.
ALWAYS = {
    "/v1/chat/completions": {"usage"},
    "/v1/responses": {
        "background", "completed_at", "error", "frequency_penalty", "incomplete_details", "instructions",
        "max_output_tokens", "max_tool_calls", "metadata", "presence_penalty", "previous_response_id",
        "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store",
        "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
    },
    "/v1/messages": {"stop_reason", "stop_sequence", "stop_details"},
}  # fmt: skip


def script(prompt: str) -> str:
    last = prompt.rpartition("<|end|><|assistant|>")[0].rpartition("|>")[2]
    return SCRIPTS.get(last, "A summary.")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        scripted_server(script, ServerConfig(aliases=())) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


def answers(client: httpx.Client, path: str, whole: Any, streamed: Any) -> Findings:
    """Compares answers to each script with each set of fields, whole and streamed."""
    found = Findings()
    prompt = "input" if path == "/v1/responses" else "messages"
    for last in SCRIPTS:
        for fields in FIELDS[path]:
            body = {prompt: [{"role": "user", "content": last}], **fields}
            response = client.post(path, json=body)
            if response.is_success:
                assert response.json().keys() >= ALWAYS[path]
                found.add(compared(response.json(), whole))
            else:
                assert last == "fails", response.text
                assert response.status_code == 500
            for event in events(client.post(path, json=body | {"stream": True}).text):
                if event != "[DONE]" and "error" not in json.loads(event):
                    found.add(compared(json.loads(event), streamed))
    return found


def assert_as_listed(found: Findings, path: str) -> None:
    assert found.wrong == set()
    assert found.unknown == BEYOND[path]
    assert found.nulls == NULLS[path]


def test_chats(client: httpx.Client) -> None:
    path = "/v1/chat/completions"
    found = answers(client, path, ChatCompletion, ChatCompletionChunk)
    found.wrong = {one for one in found.wrong if not one.startswith("ChoiceDeltaToolCall.type: 'custom'")}
    assert_as_listed(found, path)


def test_responses(client: httpx.Client) -> None:
    assert_as_listed(answers(client, "/v1/responses", Response, ResponseStreamEvent), "/v1/responses")


def test_messages(client: httpx.Client) -> None:
    types = pytest.importorskip("anthropic.types")
    found = answers(client, "/v1/messages", types.Message, types.RawMessageStreamEvent)
    assert_as_listed(found, "/v1/messages")


def test_messages_have_no_null_that_anthropic_leaves_out(client: httpx.Client) -> None:
    """Without Anthropic's package as well: the AI SDK refuses `citations: null`."""
    for last in ("text", "thought", "call"):
        body = {"messages": [{"role": "user", "content": last}], "max_tokens": 200}
        message = client.post("/v1/messages", json=body).json()
        assert nulls_in(message) == {"stop_sequence", "stop_details"}
        stream = client.post("/v1/messages", json=body | {"stream": True}).text
        assert nulls_in(list(map(json.loads, events(stream)))) == NULLS_OF_STREAMED_MESSAGES


NULLS_OF_STREAMED_MESSAGES = {"stop_reason", "stop_sequence", "stop_details"}


def nulls_in(value: Any) -> set[str]:
    """Returns the names of all fields that are null."""
    if isinstance(value, list):
        return {name for each in value for name in nulls_in(each)}
    if not isinstance(value, dict):
        return set()
    return {key for key, each in value.items() if each is None}.union(*map(nulls_in, value.values()))


@pytest.mark.parametrize("extra", [{}, {"echo": True, "logprobs": 2, "n": 2}, {"stop": "o", "logprobs": 0}])
def test_completions(client: httpx.Client, extra: Json) -> None:
    body = {"prompt": ["<|user|>text<|end|><|assistant|>", "two"], "max_tokens": 4, **extra}
    found = compared(client.post("/v1/completions", json=body).json(), Completion)
    for event in events(client.post("/v1/completions", json=body | {"stream": True}).text):
        if event != "[DONE]":
            found.add(compared(json.loads(event), Completion))
    # A chunk before the last one has no reason to finish, and a prompt's first token no log-probability. The types
    # know neither, and OpenAI's API sends both as null.
    known = ("CompletionChoice.finish_reason: None", "Logprobs.to")
    assert {one for one in found.wrong if not one.startswith(known)} == set()
    assert found.unknown == {"CompletionChoice.stop_reason"}
    assert found.nulls <= {"CompletionChoice.logprobs"}


def test_objects_beside_answers(client: httpx.Client) -> None:
    items: list[Json] = [
        {"role": "user", "content": "call"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "custom_tool_call", "call_id": "b", "name": "note", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "x"},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "input_text", "text": "text"}]},
    ]
    made = client.post("/v1/responses", json={"input": items}).json()
    stored = client.get(f"/v1/responses/{made['id']}").json()
    assert stored == made
    counted = client.post("/v1/responses/input_tokens", json={"input": items}).json()
    listed = client.get(f"/v1/responses/{made['id']}/input_items").json()
    found = compared(counted, InputTokenCountResponse)
    compacted = client.post("/v1/responses/compact", json={"model": "fake", "input": items}).json()
    found.add(compared(compacted | {"output": compacted["output"][-1:]}, CompactedResponse))
    for item in compacted["output"][
        :-1
    ]:  # the type allows no messages of the user there; OpenAI's API has them
        found.add(compared(item, ResponseItem))
    for item in listed["data"]:
        found.add(compared(item, ResponseItem))
    for model in client.get("/v1/models").json()["data"]:
        found.wrong |= compared(model, Model).wrong
    for path, body in (("/v1/chat/completions", {}), ("/v1/responses", {}), ("/v1/nothing", {})):
        found.add(compared(client.post(path, json=body).json()["error"], ErrorObject))
    assert found.wrong == set()
    assert found.nulls == {"ErrorObject.param"}


def test_objects_beside_anthropics_answers(client: httpx.Client) -> None:
    types = pytest.importorskip("anthropic.types")
    body = {"messages": [{"role": "user", "content": "text"}]}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    found = compared(counted, types.MessageTokensCount)
    found.add(compared(client.post("/v1/messages", json={}).json(), types.ErrorResponse))
    for model in client.get("/v1/models").json()["data"]:
        found.add(compared(model, types.ModelInfo))
    assert found.wrong == set()
