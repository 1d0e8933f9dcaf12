"""`--public-prompts`: the heads that tenants share over HTTP, and the errors of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.engine.prompts.public_prompts import read_public_prompts
from rootstock.errors import InvalidOption
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
    return ServerConfig(tenant_keys=KEYS, admin_key="admin", public_prompts=file, aliases=(), **options)


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
