"""`--public-prompts`: the heads that tenants share over HTTP, and the errors of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import EngineConfig, ServerConfig
from rootstock.errors import InvalidOption
from rootstock.text.prompts.public_prompts import read_public_prompts
from server.conftest import Served
from server.test_access import CHAT, CLEAR, COMPLETIONS, EXPLAIN, code, key

SYSTEM = "You are a helpful assistant of the house."
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LINES: list[dict[str, Any]] = [
    {"system": SYSTEM},
    {"messages": [{"role": "system", "content": "With a tool."}], "tools": [TOOL]},
    {"text": "Once upon a time, "},
]
KEYS = {"key-a": "a", "key-b": "b"}


def config(folder: Path, *lines: Any, **options: Any) -> ServerConfig:
    file = folder / "public.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines or LINES))
    fields: dict[str, Any] = {"admin_key": "admin", **options}
    return ServerConfig(tenant_keys=KEYS, public_prompts=file, aliases=(), **fields)


def chat(served: Any, who: str, text: str, system: str = SYSTEM, **body: Any) -> int:
    """Returns the cached tokens of a chat."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    answer = served.client.post(CHAT, json={"messages": messages, "max_tokens": 1, **body}, headers=key(who))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def complete(served: Any, who: str, prompt: str) -> int:
    answer = served.client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}, headers=key(who))
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.behaviour(9)
def test_tenants_share_listed_prompts_and_nothing_that_follows(serve: Any, tmp_path: Path) -> None:
    with serve(server=config(tmp_path)) as served:
        assert chat(served, "key-a", "My secret is 1234") == 0
        head = chat(served, "key-b", "Quite another text")
        assert len(SYSTEM) <= head < len(SYSTEM) + 40
        assert chat(served, "key-b", "My secret is 12") == head, "as if the other tenant had asked nothing"
        assert chat(served, "key-a", "My secret is 1234 or 5678") > head + len("My secret is 12")
        assert chat(served, "key-b", "Hello", system="Not on the list") == 0
        assert chat(served, "key-a", "Hello", system="Not on the list") == 0
        begins_alike = 5  # as the other head
        assert chat(served, "key-a", "Hi", system="With a tool.", tools=[TOOL]) < begins_alike
        assert chat(served, "key-b", "Yo", system="With a tool.", tools=[TOOL]) > len("With a tool.")
        assert chat(served, "key-b", "Yo", system="With a tool.") < begins_alike, (
            "without its tools it is not listed"
        )
        prompt = "Once upon a time, "
        assert complete(served, "key-a", prompt + "alpha") == 0
        assert complete(served, "key-b", prompt + "alpha") == len(prompt)
        served.settled()


def test_every_api_shares_the_same_heads(serve: Any, tmp_path: Path) -> None:
    with serve(server=config(tmp_path)) as served:
        chat(served, "key-a", "One")
        head = chat(served, "key-b", "Two")
        messages = {"system": SYSTEM, "messages": [{"role": "user", "content": "Zoo"}], "max_tokens": 1}
        usage = served.client.post("/v1/messages", json=messages, headers=key("key-b")).json()["usage"]
        assert usage["cache_read_input_tokens"] == head
        response = {"instructions": SYSTEM, "input": "Four", "max_output_tokens": 16, "store": False}
        usage = served.client.post("/v1/responses", json=response, headers=key("key-b")).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == head
        asked = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Five"}]}
        told = served.client.post(EXPLAIN, json=asked, headers=key("admin")).json()
        assert told["matched_tokens"] == head


def test_a_salt_of_the_client_keeps_all_of_its_prompt_private(serve: Any, tmp_path: Path) -> None:
    with serve(server=config(tmp_path)) as served:
        chat(served, "key-a", "One")
        assert chat(served, "key-a", "Two", cache_salt="mine") == 0
        assert chat(served, "key-a", "Two and", cache_salt="mine") > len(SYSTEM)


def test_only_the_operator_clears_heads(serve: Any, tmp_path: Path) -> None:
    with serve(server=config(tmp_path)) as served:
        chat(served, "key-a", "One")
        public = {"public": True}
        assert code(served.client.post(CLEAR, json=public, headers=key("key-a"))) == "admin_only"
        head = chat(served, "key-b", "Two")
        assert served.client.post(CLEAR, json={}, headers=key("key-a")).json()["blocks"] > 0
        assert chat(served, "key-b", "Zoo") == head
        both = {"public": True, "cache_salt": "x"}
        assert code(served.client.post(CLEAR, json=both, headers=key("admin"))) == "invalid_parameter"
        assert served.client.post(CLEAR, json=public, headers=key("admin")).json()["blocks"] > 0
        assert chat(served, "key-b", "Four") == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "a JSON object"),
        ("[]", "an object with some of"),
        ('{"prompt": "x"}', "an object with some of"),
        ('{"text": ""}', "'text' and nothing else"),
        ('{"text": "x", "tools": []}', "'text' and nothing else"),
        ('{"text": "\\ud800"}', "can be used"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "system messages alone"),
        ('{"messages": 7}', "a list of objects"),
        ('{"system": 7}', "can be used"),
        ('{"system": "x", "tools": [7]}', "a list of objects"),
        ('{"system": "x", "tools": {"a": 1}}', "'tools' are a list"),
        ('{"tools": []}', "a system message, tools or a text"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text(f'{{"text": "x"}}\n\n{line}\n')
    with pytest.raises(InvalidOption, match=told) as refused:
        read_public_prompts(file)
    assert "line 3" in refused.value.message
    with pytest.raises(InvalidOption, match="can be read"):
        read_public_prompts(tmp_path / "absent")


# ---- an oracle for the texts behind a head

SECRET = "My secret is 1234 and my plan is to buy the house on the hill. " * 2
OTHER = "Tell me some more about trees, and then also about the grasses. " * 2
GUESSES = (SECRET, SECRET[:40], SECRET + "And", OTHER[:40])
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def observed(served: Served, who: str) -> Iterator[Any]:
    """Yields all that a tenant is told by routes about guessed texts behind the head and alone."""
    numbers = re.compile(r'"(id|created|created_at|completed_at|system_fingerprint)": ?("[^"]*"|[0-9.]+)')

    def told(method: str, path: str, body: Any = None) -> Any:
        response = served.client.request(method, path, json=body, headers=key(who))
        hints = {name: value for name, value in response.headers.items() if name.startswith(("x-", "retry"))}
        hints.pop("x-request-id", None)
        pin = re.findall(r"pin-[0-9a-f]+", response.text)
        return path, response.status_code, hints, pin, numbers.sub("", response.text)

    for text in GUESSES:
        chat_body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]}
        message = {"system": SYSTEM, "messages": [{"role": "user", "content": text}]}
        alone = {"prompt": text}
        for suffix, body in (("/chat/completions", chat_body), ("/messages", message), ("", alone)):
            yield told("POST", f"/v1/cache/explain{suffix}", body)
            yield told("POST", f"/v1/cache/pin{suffix}", body)
            yield told("POST", f"/v1/cache/warm{suffix}?wait=true", body)
        yield told("GET", "/v1/cache/pins")
        yield told("GET", "/v1/cache/volatile")
        yield told("POST", "/v1/chat/completions", {**chat_body, "max_tokens": 1, "temperature": 0})
        yield told("POST", "/v1/messages", {**message, "max_tokens": 1, "temperature": 0})
        response = {"instructions": SYSTEM, "input": text, "max_output_tokens": 16, "store": False}
        yield told("POST", "/v1/responses", {**response, "temperature": 0})
        yield told("POST", "/v1/completions", {**alone, "max_tokens": 1, "temperature": 0, "logprobs": 1})


@pytest.mark.parametrize("keeps", ["nothing", "a time to live", "pins"])
def test_no_route_tells_whether_another_tenant_has_used_a_text(
    serve: Any, tmp_path: Path, keeps: str
) -> None:
    """A tenant's guesses are answered alike, whether the other one has cached, retained or pinned the text or not."""

    def use(served: Served, text: str) -> list[str]:
        """Lets tenant a use a text behind the head and alone. Returns its pins."""
        ask = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        hint = {"nvext": HOUR} if keeps == "a time to live" else {}
        for path, body in (("chat/completions", {"messages": ask}), ("completions", {"prompt": text})):
            sent = {**body, **hint, "max_tokens": 1}
            answer = served.client.post(f"/v1/{path}", json=sent, headers=key("key-a"))
            assert answer.status_code == 200, answer.text
            again = served.client.post(f"/v1/{path}", json=sent, headers=key("key-a")).json()["usage"]
            assert again["prompt_tokens_details"]["cached_tokens"] >= len(text) - 1, "it is cached"
        if keeps != "pins":
            return []
        return [
            served.client.post(f"/v1/cache/pin/{path}", json=body, headers=key("key-a")).json()["id"]
            for path, body in (("chat/completions", {"messages": ask}), ("completions", {"prompt": text}))
        ]

    told, own = [], []
    options = config(tmp_path, admin_key=None)  # explaining is for tenants as well
    for text in (SECRET, OTHER):
        with serve(EngineConfig(idle_work=True), options, blocks=4000) as served:
            pins = use(served, text)
            seen = list(observed(served, "key-b"))
            for id in (*pins, "pin-of-nobody"):
                refused = served.client.post("/v1/cache/release", json={"id": id}, headers=key("key-b"))
                assert refused.status_code == 404
                assert refused.json()["error"]["code"] == "pin_not_found"
            assert len(served.client.get("/v1/cache/pins", headers=key("key-a")).json()["pins"]) == len(pins)
            told.append(seen)
            own.append(list(observed(served, "key-a")))
    assert len(told[0]) >= 60
    for with_secret, without in zip(*told, strict=True):
        assert with_secret == without
    assert own[0] != own[1], "the comparison would notice it"
    statuses = {(path, status) for path, status, *_ in told[0]}
    assert ("/v1/cache/pin/chat/completions", 200) in statuses, "the head is shared"
    assert ("/v1/cache/explain", 200) in statuses
