"""Answers in each format have the bytes that are recorded in `recorded/`, and the API and its metrics their names.

Clients see these bytes: a change of the code's structure changes none of them. Ids and times are replaced by their
kind. `ROOTSTOCK_RECORD=1 pytest tests/server/test_recorded_bytes.py` records them anew, which a change of behaviour
needs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootstock.config import ServerConfig
from server.responses.scripted import scripted_server
from waiting import HANG_S

RECORDED = Path(__file__).with_name("recorded")
Json = dict[str, Any]

SYSTEM = "You name trees. Answer briefly."
USER = "Which tree is tall?"
SCRIPT = {
    "Which tree is tall?": "<think>Trees…</think>The fir.",
    "Look it up.": '<think>I look.</think>One moment.<call look_up>{"tree": "fir"}</call>',
    "In JSON.": '{"tree":"fir"}',
}
SCHEMA: Json = {
    "type": "object",
    "properties": {"tree": {"enum": ["oak", "fir"]}},
    "required": ["tree"],
    "additionalProperties": False,
}
FUNCTION: Json = {"name": "look_up", "description": "Looks a tree up.", "parameters": SCHEMA}
SAMPLED: Json = {"temperature": 0, "cache_salt": "recorded"}
CHAT: Json = SAMPLED | {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
    "max_tokens": 40,
}
COMPLETION: Json = SAMPLED | {"prompt": "Once there was an oak", "max_tokens": 8}
MESSAGES: Json = SAMPLED | {
    "system": SYSTEM,
    "messages": [{"role": "user", "content": USER}],
    "max_tokens": 40,
}
RESPONSE: Json = SAMPLED | {"instructions": SYSTEM, "input": USER, "max_output_tokens": 40}
OPENAI_TOOL: Json = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [{"role": "user", "content": "Look it up."}],
    "max_tokens": 80,
}
ANTHROPIC_TOOL: Json = {
    "tools": [{"name": "look_up", "description": "Looks a tree up.", "input_schema": SCHEMA}],
    "messages": [{"role": "user", "content": "Look it up."}],
    "max_tokens": 80,
}
RESPONSES_TOOL: Json = {
    "tools": [{"type": "function", **FUNCTION}],
    "input": "Look it up.",
    "max_output_tokens": 80,
}
JSON_SCHEMA: Json = {"name": "tree", "schema": SCHEMA}
FORMATS: dict[str, tuple[str, Json, dict[str, Json]]] = {
    "chat": (
        "/v1/chat/completions",
        CHAT,
        {
            "plain": {},
            "two_choices": {"n": 2, "logprobs": True, "top_logprobs": 2},
            "tool": OPENAI_TOOL,
            "schema": {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}},
            "stop": {"stop": ["e"], "stream_options": {"include_usage": True}, "stream": True},
            "hints": {"rootstock": {"explain": True}, "prompt_cache_retention": "24h"},
            "wrong": {"temperature": "warm"},
            "unknown": {"tmperature": 1},
        },
    ),
    "completions": (
        "/v1/completions",
        COMPLETION,
        {"plain": {}, "scored": {"echo": True, "logprobs": 2}, "wrong": {"prompt": None}},
    ),
    "messages": (
        "/v1/messages",
        MESSAGES,
        {
            "plain": {},
            "tool": ANTHROPIC_TOOL,
            "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "wrong": {"max_tokens": -1},
        },
    ),
    "responses": (
        "/v1/responses",
        RESPONSE,
        {
            "plain": {},
            "tool": RESPONSES_TOOL,
            "schema": {"text": {"format": {"type": "json_schema", **JSON_SCHEMA}}},
            "not_stored": {"store": False, "include": ["reasoning.encrypted_content"]},
            "wrong": {"input": 3},
        },
    ),
}
VOLATILE = [
    (re.compile(r'"(created|created_at|completed_at|loaded_at)":\s*[0-9.]+'), r'"\1":TIME'),
    (
        re.compile(r"\b(chatcmpl|cmpl|msg|resp|fc|rs|call|toolu|req|ctc|item|srvtoolu)[-_][0-9a-zA-Z_-]{8,}"),
        r"\1_ID",
    ),
    (re.compile(r'"(\w+_(?:s|ms|seconds))":\s*[0-9.e-]+'), r'"\1":SECONDS'),
    (re.compile(r"\brs1\.[\w+/=]+"), "rs1.SEAL"),
    (re.compile(r'"obfuscation":"[^"]*"'), '"obfuscation":"…"'),
]


def answer_to(prompt: str) -> str:
    return next((text for asked, text in SCRIPT.items() if asked in prompt), "Once upon a time.")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A client of a server of its own: what is cached when a case is asked is fixed."""
    with (
        scripted_server(answer_to, ServerConfig(aliases=())) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


def normal(text: str) -> str:
    for pattern, replacement in VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def check(name: str, text: str) -> None:
    recorded = RECORDED / f"{name}.txt"
    if os.environ.get("ROOTSTOCK_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        recorded.write_text(text)
    assert text == recorded.read_text()


def answers(client: httpx.Client, name: str) -> str:
    """Asks all cases of a format, whole and streamed, and returns the answers without ids and times."""
    path, base, cases = FORMATS[name]
    found = []
    for case, stream in itertools.product(cases, (False, True)):
        client.post("/v1/cache/clear", json={})
        asked = {"stream": stream} | base | {"model": "fake"} | cases[case]
        answer = client.post(path, json=asked)
        kind = answer.headers["content-type"]
        head = f"== {case}{' streamed' if stream else ''}: {answer.status_code} {kind}"
        found.append(f"{head}\n{answer.text}\n")
    return normal("".join(found))


@pytest.mark.parametrize("name", FORMATS)
def test_answers_have_their_recorded_bytes(client: httpx.Client, name: str) -> None:
    check(name, answers(client, name))


def test_the_openapi_document_is_recorded(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    parts = document["paths"] | document["components"]["schemas"]
    lines = (f"{name} {json.dumps(part, sort_keys=True)}\n" for name, part in sorted(parts.items()))
    check("openapi", "".join(lines))


def test_the_names_of_metrics_are_recorded(client: httpx.Client) -> None:
    for name in FORMATS:  # some metrics begin with the first value
        answers(client, name)
    found = re.findall(r"^# TYPE (\S+) (\S+)", client.get("/metrics").text, re.M)
    check("metrics", "".join(f"{name} {kind}\n" for name, kind in sorted(found)))
