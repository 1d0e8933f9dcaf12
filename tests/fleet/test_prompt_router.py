"""The router's prompts are those of a replica, for every API, template and tenant."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rootstock.cache.keys import Scope
from rootstock.cache.resumable_blocks import prefix_keys
from rootstock.config import Configuration, ServerConfig
from rootstock.engine.request import Request
from rootstock.fleet.prompt_keys import (
    UNKNOWN,
    PromptRouter,
    ReplicaFacts,
    api_of,
    prefix_of,
    response_prefix,
)
from rootstock.option_table import configuration_of
from server.conftest import Served, served_by_oracle
from text.prompts.chat_tokenizers import TEMPLATES, WITHOUT_TOOLS, chat_tokenizer

Json = dict[str, Any]
ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
KEYS = "keys:\n- {sha256: %s, tenant: blue}\n"


def words(rng: random.Random) -> str:
    return " ".join(rng.choice(("look", "up", "the", "word", "count", "é", "<|im_end|>")) for _ in range(9))


def chat_bodies(rng: random.Random, *, tools: bool) -> Iterator[Json]:
    messages: list[Json] = [
        {"role": "system", "content": words(rng)},
        {"role": "user", "content": words(rng)},
    ]
    yield {"messages": messages}
    parts = [{"type": "text", "text": words(rng)}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    yield {"messages": [{"role": "user", "content": parts}]}
    if tools:
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"word": "a"}'},
        }
        described = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
        history: list[Json] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "content": words(rng)},
        ]
        for choice in ("auto", "required", "none"):
            yield {"messages": [*messages, *history], "tools": [described], "tool_choice": choice}


def messages_bodies(rng: random.Random, *, tools: bool) -> Iterator[Json]:
    asked = {"role": "user", "content": [{"type": "text", "text": words(rng)}]}
    yield {"messages": [asked], "system": [{"type": "text", "text": words(rng)}]}
    yield {"messages": [asked]}
    if tools:
        call = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "a"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": words(rng)}
        history = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        yield {"messages": [asked, *history], "tools": [{"name": "look_up", "input_schema": SCHEMA}]}
        yield {"messages": [asked, *history]}


def responses_bodies(rng: random.Random, *, tools: bool) -> Iterator[Json]:
    yield {"input": words(rng), "instructions": words(rng)}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words(rng)}]}
    yield {"input": [said]}
    if tools:
        call = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": words(rng)}
        described = {"type": "function", "name": "look_up", "parameters": SCHEMA}
        yield {"input": [said, call, output], "tools": [described]}


def bodies(rng: random.Random, *, tools: bool) -> Iterator[tuple[str, Json]]:
    for api, made in (
        ("chat", chat_bodies(rng, tools=tools)),
        ("messages", messages_bodies(rng, tools=tools)),
        ("responses", responses_bodies(rng, tools=tools)),
        ("completions", iter([{"prompt": words(rng)}, {"prompt": [3, 4, 5] * 9}])),
    ):
        yield from ((api, body) for body in made)


class Asked:
    """A server, and the requests that its engine got."""

    def __init__(self, served: Served, patch: pytest.MonkeyPatch) -> None:
        self.served = served
        self.requests: list[Request] = []
        engine = served.assembly.engine
        submit = engine.submit

        def noted(request: Request, sink: Any) -> None:
            self.requests.append(request)
            submit(request, sink)

        patch.setattr(engine, "submit", noted)

    def keys(self) -> Any:
        """Returns the keys of the last request's blocks, as the engine announces them."""
        request = self.requests.pop()
        self.requests.clear()
        namespace = self.served.assembly.engine.namespace(request.salt, request.adapter)
        return prefix_keys(request.tokens, Scope(namespace, 0), 8)


def facts_of(served: Served) -> ReplicaFacts:
    return ReplicaFacts.of(served.assembly.engine.namespace(), 8, {})


def config(server: ServerConfig | None = None) -> Configuration:
    return replace(configuration_of("fake", {}), server=server or ServerConfig(aliases=()))


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_router_names_the_blocks_that_the_engine_names(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(template)
    router = PromptRouter(config(), tokenizer, 4_096)
    rng = random.Random(template)
    compared = 0
    with served_by_oracle(tokenizer=tokenizer, vocab_size=800) as served:
        asked, facts = Asked(served, monkeypatch), facts_of(served)
        for api, body in bodies(rng, tools=template not in WITHOUT_TOOLS):
            whole = {"max_tokens": 1} | body | {"model": "fake"}
            if api == "responses":
                whole["max_output_tokens"] = whole.pop("max_tokens")
            answer = served.client.post(ROUTES[api], json=whole)
            prompt = router.prompt(json.dumps(whole).encode(), "")
            if answer.status_code != 200:
                assert not asked.requests
                continue
            assert prompt.keys(facts).tolist() == asked.keys().tolist(), (api, body)
            compared += 1
    assert compared >= 6


def test_a_tenant_is_known_by_its_key_and_by_its_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerConfig(aliases=(), tenant_keys={"blue-key": "blue", "red-key": "red"})
    tokenizer = chat_tokenizer("qwen3")
    router = PromptRouter(config(server), tokenizer, 4_096)
    found = set()
    with served_by_oracle(server=server, tokenizer=tokenizer, vocab_size=800) as served:
        asked, facts = Asked(served, monkeypatch), facts_of(served)
        for key in ("blue-key", "red-key"):
            for salt in (None, "a", "b"):
                body = {"model": "fake", "max_tokens": 1, "cache_salt": salt}
                body["messages"] = [{"role": "user", "content": "look up the word count " * 4}]
                head = {"Authorization": f"Bearer {key}"}
                assert served.client.post(ROUTES["chat"], json=body, headers=head).status_code == 200
                prompt = router.prompt(json.dumps(body).encode(), head["Authorization"])
                keys = prompt.keys(facts).tolist()
                assert keys == asked.keys().tolist()
                found.add(tuple(keys))
    assert len(found) == 6


HOSTILE = [
    *(b"", b"[]", b"7", b'"a"', b"{", b"\xff\xfe", b"null", b"{}", b'{"messages": 7}', b'{"messages": []}'),
    *(b'{"prompt": {"a": 1}}', b'{"prompt": [99999999999999999999]}', b'{"input": [[[[]]]]}'),
    *(b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b'{"messages": [{"role": "user"}], "tools": [[]]}'),
    *(b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"prompt": "' + b"x" * 5_000_000 + b'"}'),
    *(b'{"messages": [7, null], "system": 7}', b'{"previous_response_id": "resp_none"}'),
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_a_body_that_makes_no_prompt_is_routed_without_one(body: bytes) -> None:
    router = PromptRouter(config(), chat_tokenizer("qwen3"), 4_096)
    assert router.prompt(body, "Bearer \xff\r\n") is UNKNOWN


def test_apis_are_known_by_their_fields() -> None:
    rng = random.Random(0)
    for api, body in bodies(rng, tools=True):
        is_plain = set(body) == {"messages"} and api == "messages"
        assert api_of(body) == api or is_plain


def test_a_response_is_continued_where_it_is_stored() -> None:
    prefix = response_prefix("k3j9x2ab")
    server = ServerConfig(aliases=(), response_id_prefix=prefix)
    tokenizer = chat_tokenizer("qwen3")
    with served_by_oracle(server=server, tokenizer=tokenizer, vocab_size=800) as served:
        body: Json = {"model": "fake", "input": "look up", "max_output_tokens": 1}
        first = served.client.post(ROUTES["responses"], json=body).json()
        body["previous_response_id"] = first["id"]
        assert served.client.post(ROUTES["responses"], json=body).status_code == 200
    prompt = PromptRouter(config(), tokenizer, 4_096).prompt(json.dumps(body).encode(), "")
    assert prompt.stored_by == prefix != response_prefix("another")


@pytest.mark.parametrize(
    "id", [None, 7, "", "resp_", "resp_zz" + "0" * 30, "resp_" + "0" * 31, ["resp_" + "0" * 32]]
)
def test_ids_of_other_servers_name_no_replica(id: Any) -> None:
    assert prefix_of(id) == ""


def test_a_wrong_key_costs_no_work_and_a_key_elsewhere_does(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerConfig(aliases=(), tenant_keys={"blue-key": "blue"})
    router = PromptRouter(config(server), chat_tokenizer("qwen3"), 4_096)
    body = json.dumps({"messages": [{"role": "user", "content": "look up the word"}]}).encode()
    assert len(router.prompt(body, "").tokens)
    assert len(router.prompt(body, "Bearer blue-key").tokens)
    monkeypatch.setattr("rootstock.fleet.prompt_keys.json.loads", None)
    assert router.prompt(body, "Bearer wrong") is UNKNOWN
