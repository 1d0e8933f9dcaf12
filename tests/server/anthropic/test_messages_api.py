"""Anthropic's routes over the oracle runtime: answers, usage, errors, counting, tenants and volatile heads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.server.formats.anthropic.answers import MessageBody
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.anthropic.streams import events_in, message_of
from server.conftest import GREEDY, user

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
LINE = "x-anthropic-billing-header: cc_version=1.2.3.4a5; cc_entrypoint=cli;"


def ask(served: Any, text: str = "Hello?", headers: Any = None, **fields: Any) -> Any:
    body = {"model": "fake", "max_tokens": 8, "messages": user(text), **GREEDY, **fields}
    content = json.dumps(body)  # httpx spells no half of a surrogate pair
    return served.client.post(
        MESSAGES, content=content, headers={"content-type": "application/json", **(headers or {})}
    )


def streamed(served: Any, text: str = "Hello?", **fields: Any) -> list[Any]:
    response = ask(served, text, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"].startswith("req_")
    return list(events_in(response.text))


def assert_error(response: Any, status: int, kind: str, part: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert re.search(part, body["error"]["message"]), body
    assert len(body["error"]["message"]) < 400
    assert response.headers["request-id"] == body["request_id"]


# ---- answers


def test_an_answer_has_the_models_tokens_whole_and_streamed(served: Any) -> None:
    prompt = served.chat_prompt("What is a radix tree?")
    expected = ByteTokenizer().decode(served.greedy(prompt, 12))
    response = ask(served, "What is a radix tree?", max_tokens=12)
    message = response.json()
    MessageBody.model_validate(message, strict=True)  # as the OpenAPI document says
    assert response.headers["request-id"].startswith("req_")
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == [{"type": "text", "text": expected}]
    assert message["usage"]["output_tokens"] <= 12
    told = message_of(streamed(served, "What is a radix tree?", max_tokens=12))
    assert told["content"] == message["content"]
    assert told["stop_reason"] == message["stop_reason"]


def test_headers_query_and_unknown_fields_of_betas_change_nothing(served: Any) -> None:
    headers = {
        "anthropic-version": "2030-01-01",
        "anthropic-beta": "a-2026-01-01,b-2027-01-01",
        "x-api-key": "any",
    }
    fields = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu",
        "mcp_servers": [], "fallbacks": "default", "new_field": {"a": [1]},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 4000},
        "diagnostics": {"previous_message_id": None},
    }  # fmt: skip
    body = {"model": "fake", "max_tokens": 8, "messages": user("Hello?"), **GREEDY}
    plain = served.client.post(MESSAGES, json=body).json()
    told = served.client.post(f"{MESSAGES}?beta=true", json=body | fields, headers=headers).json()
    assert told["content"] == plain["content"]
    assert told["context_management"] == {"applied_edits": []}
    assert told["diagnostics"] is None


def test_usage_tells_tokens_read_and_created(served: Any) -> None:
    text = "How many leaves does the tree of this question have?"
    tokens = len(served.chat_prompt(text))
    before = served.assembly.engine.stats().counters.computed_tokens
    first = ask(served, text, max_tokens=1).json()["usage"]
    read = first["cache_read_input_tokens"]
    assert served.assembly.engine.stats().counters.computed_tokens - before == tokens - read
    assert first["cache_creation_input_tokens"] == tokens - 1 - read
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] == first["cache_creation_input_tokens"]
    assert first["input_tokens"] == 1
    again = message_of(streamed(served, text, max_tokens=1))["usage"]
    assert again["cache_read_input_tokens"] == tokens - 1
    assert again["cache_creation_input_tokens"] == 0
    assert again["input_tokens"] == 1


def test_without_prefix_caching_nothing_is_read_or_created(serve: Any) -> None:
    with serve(reuse=False) as served:
        for _ in range(2):
            usage = ask(served).json()["usage"]
            assert usage["input_tokens"] == len(served.chat_prompt("Hello?"))
            assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0


def test_more_tokens_than_fit_are_lowered_and_none_fill_the_cache_alone(serve: Any) -> None:
    with serve(context_limit=96) as served:
        response = ask(served, max_tokens=32_000)
        assert response.status_code == 200
        assert response.headers["x-max-tokens"] == str(96 - len(served.chat_prompt("Hello?")))
        assert response.json()["stop_reason"] in ("model_context_window_exceeded", "end_turn")
        for warm in (
            ask(served, "Warm", max_tokens=0).json(),
            message_of(streamed(served, "Warm", max_tokens=0)),
        ):
            assert warm["content"] == []
            assert warm["stop_reason"] == "max_tokens"
        assert warm["usage"]["cache_read_input_tokens"] == len(served.chat_prompt("Warm")) - 1


def test_a_stop_sequence_ends_the_answer_and_is_named(served: Any) -> None:
    text = ask(served, "stop here, please", max_tokens=20).json()["content"][0]["text"]
    stop = next(char for char in text[2:] if char.isprintable() and char not in text[:2] and char != "\ufffd")
    for message in (
        ask(served, "stop here, please", max_tokens=20, stop_sequences=["never", stop]).json(),
        message_of(streamed(served, "stop here, please", max_tokens=20, stop_sequences=["never", stop])),
    ):
        assert message["stop_reason"] == "stop_sequence"
        assert message["stop_sequence"] == stop
        assert message["content"][0]["text"] == text[: text.index(stop)]


def test_the_prompt_is_the_rendered_conversation(served: Any) -> None:
    body = {
        "system": [{"type": "text", "text": "You help."}],
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "text", "text": "I do."}]},
            {"role": "system", "content": "The date is new."},
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        ],
    }
    rendered = "<|begin|><|system|>You help.<|end|><|user|>Look.<|end|><|assistant|>I do.<|end|>"
    rendered += "<|system|>The date is new.<|end|><|user|>And?<|end|><|assistant|>"
    expected = len(ByteTokenizer().encode_chat(rendered))
    assert served.client.post(COUNT, json=body).json() == {"input_tokens": expected}
    usage = served.client.post(MESSAGES, json=body | {"max_tokens": 1}).json()["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == expected


def test_models_have_the_fields_of_both_apis(served: Any) -> None:
    listed = served.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "fake")
    [model] = listed["data"]
    assert model == model | {"type": "model", "object": "model", "display_name": "fake"}
    assert model["created_at"].endswith("+00:00")
    assert served.client.head("/").status_code == 200


# ---- volatile heads


def test_a_volatile_head_is_dropped_counted_and_explained(serve: Any) -> None:
    system = [{"type": "text", "text": LINE}, {"type": "text", "text": "You are a helper of many words." * 4}]
    with serve() as served:
        first = ask(served, "one", system=system).json()["usage"]
        other = [{"type": "text", "text": LINE.replace("4a5", "b0b")}, system[1]]
        second = ask(served, "two", system=other).json()["usage"]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] > 100
        labels = {"begins": "x-anthropic-billing-header:"}
        assert served.metric("rootstock_dropped_volatile_blocks_total", **labels) == 2
        assert served.metric("rootstock_dropped_volatile_characters_total", **labels) == 2 * len(LINE)
        messages = [{"role": "system", "content": system}, *user("one")]
        told = served.client.post("/v1/cache/explain", json={"messages": messages}).json()
        assert f"Dropped {len(LINE)} characters of a volatile block" in told["message"]
        assert told["dropped"] == [{"begins": "x-anthropic-billing-header:", "chars": len(LINE)}]
        assert told["matched_tokens"] > 100
    with serve(server=ServerConfig(drop_volatile=False)) as served:
        count = served.client.post(COUNT, json={"system": system, "messages": user("one")}).json()
        assert count["input_tokens"] == first["cache_creation_input_tokens"] + 1 + len(LINE) + 1
        assert (
            "Dropped"
            not in served.client.post("/v1/cache/explain", json={"messages": messages}).json()["message"]
        )


# ---- tenants


def test_tenants_share_nothing(serve: Any) -> None:
    server = ServerConfig(tenant_keys={"key-a": "a", "key-b": "b"})
    text = "a secret question of a tenant, of more than one block"
    with serve(server=server) as served:

        def read(key: str, **fields: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return int(ask(served, text, headers, **fields).json()["usage"]["cache_read_input_tokens"])

        assert read("key-a") == 0
        assert read("key-b") == 0
        assert read("key-a") == len(served.chat_prompt(text)) - 1
        assert read("key-a", cache_salt="mine") == 0
        assert_error(ask(served), 401, "authentication_error", "The API key is missing or wrong")
        refused = served.client.post(COUNT, json={"messages": user("x")})
        assert_error(refused, 401, "authentication_error", "key")


# ---- errors

SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
WRONG: list[tuple[Any, str]] = [
    ({"messages": None}, "'messages' is None"),
    ({"messages": []}, "a list of at least 1"),
    ({"messages": ["x"]}, r"messages\[0\]' is 'x', but must be an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"messages\[0\].content\[0\].text' is missing",
    ),
    ({"messages": [{"role": "user", "content": "half \ud83d"}]}, "surrogate"),
    ({"system": 5}, "'system' is 5"),
    ({"system": [{"type": "smell"}]}, r"system\[0\].type"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, r"stop_sequences\[0\]' is '', but must be a string of 1 to 512"),
    ({"stop_sequences": ["x"] * 17}, "at most 16"),
    ({"stop": ["x"]}, "Send 'stop_sequences'"),
    ({"tools": [{"name": "a"}]}, r"tools\[0\].input_schema' is missing"),
    ({"tools": {"a": 1}}, "'tools'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "The server searches nothing"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "without tools"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "left out where"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "summarizes nothing"),
    ({"mcp_servers": [{"type": "url"}]}, "calls no MCP servers"),
    ({"container": "c"}, "Nothing is run"),
    ({"n": 2}, "one message"),
]


@pytest.mark.parametrize(("fields", "part"), WRONG)
def test_wrong_requests_get_one_clear_error_in_anthropics_form(served: Any, fields: Any, part: str) -> None:
    assert_error(ask(served, **fields), 400, "invalid_request_error", part)


def test_errors_of_every_status_have_anthropics_form(serve: Any) -> None:
    with serve(server=ServerConfig(max_body_bytes=2048, aliases=())) as served:
        post = served.client.post
        assert_error(ask(served, model="other"), 404, "not_found_error", "Ask for 'fake'")
        assert_error(served.client.get(f"{MESSAGES}/x"), 404, "not_found_error", "There is no GET")
        assert_error(served.client.get(MESSAGES), 405, "invalid_request_error", "not allowed")
        assert_error(ask(served, "x" * 3000), 413, "request_too_large", "2,048 bytes")
        refused = post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
        assert_error(refused, 400, "invalid_request_error", "not JSON")
        refused = post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
        assert_error(refused, 415, "invalid_request_error", "application/json")
        assert_error(post(MESSAGES), 400, "invalid_request_error", "empty")
        assert_error(ask(served, headers={"host": "evil.example"}), 403, "permission_error", "not known")


def test_a_thread_is_refused_with_the_details_by_which_clients_go_on_without(served: Any) -> None:
    error = ask(served, thread={"type": "create"}).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(serve: Any) -> None:
    with serve(context_limit=64) as served:
        assert_error(ask(served, "long " * 20), 400, "invalid_request_error", "^prompt is too long")
        assert_error(ask(served, "long " * 2000), 400, "invalid_request_error", "^prompt is too long")


def test_a_failing_step_is_an_error_before_and_within_a_stream(serve: Callable[..., Any]) -> None:
    steps = 0

    def fault(_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps in (1, 4):
            raise ValueError("on purpose")

    with serve(fault=fault) as served:
        assert_error(ask(served), 500, "api_error", "forward pass")
        events = streamed(served, max_tokens=50)
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"


def test_edits_are_applied_and_told(serve: Any) -> None:
    def turn(id: str) -> list[Any]:
        call = {"type": "tool_use", "id": id, "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": id, "content": "content " * 10}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 100},
        "keep": {"type": "tool_uses", "value": 1},
    }
    body = {
        "messages": [*user("Read."), *turn("a"), *turn("b")],
        "max_tokens": 4,
        "context_management": {"edits": [edit]},
    }
    with serve() as served:
        plain = served.client.post(COUNT, json={"messages": body["messages"]}).json()["input_tokens"]
        counted = served.client.post(COUNT, json=body).json()
        cleared = len("content " * 10) - len("[cleared]")
        assert counted == {
            "input_tokens": plain - cleared,
            "context_management": {"original_input_tokens": plain},
        }
        told = served.client.post(MESSAGES, json=body).json()["context_management"]
        assert told["applied_edits"] == [
            {"type": edit["type"], "cleared_tool_uses": 1, "cleared_input_tokens": cleared}
        ]
