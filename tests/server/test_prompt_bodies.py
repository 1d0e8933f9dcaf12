"""Misspelled fields and parameters: no route that changes the server's state ignores them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from rootstock.config import EngineConfig, ServerConfig
from rootstock.errors import Unsupported
from rootstock.server.answers.prompt_bodies import MAX_UNKNOWN_FIELDS, refuse_misspelled
from rootstock.server.formats.anthropic.schema import CountTokensRequest
from rootstock.server.formats.openai.schema import REFUSED, PromptRequest
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.wire.fields import Wire
from server.conftest import Served, assert_error, served_by_oracle, user

STATE_ROUTES = ("/v1/cache/", "/v1/models/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
READS = "/v1/cache/explain"  # shows what the answering route would do with the same body, and changes nothing
PROMPT = "A prompt that is cached. " * 4

# The least body of each kind that does something.
BODIES: dict[str, dict[str, Any]] = {
    "ClearRequest": {},
    "ReleaseRequest": {"id": "x"},
    "ModelRequest": {"model": "fake"},
    "PromptOfApi": {"api": "completions", "body": {"prompt": PROMPT}},
    "PromptsOfApis": {"api": "completions", "body": {"prompt": PROMPT}},
    "HintedPrompt": {"api": "completions", "body": {"prompt": PROMPT}},
    "LoadAdapterRequest": {"lora_name": "a", "lora_path": "/x"},
    "UnloadAdapterRequest": {"lora_name": "a"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_by_oracle(EngineConfig(idle_work=True), ServerConfig(aliases=())) as one:
        one.complete(PROMPT, max_tokens=1)
        yield one


def state_routes(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the path of each POST route that changes something, and the name and the schema of its body."""
    document = app.openapi()
    for path, methods in document["paths"].items():
        if "post" not in methods or not path.startswith(STATE_ROUTES) or path.startswith(READS):
            continue
        content = methods["post"]["requestBody"]["content"]
        found = content.get("application/json", {}).get("schema", {})
        for each in (found, *found.get("anyOf", ())):
            name = each.get("$ref", "").rpartition("/")[2]
            if name:
                yield path, name, document["components"]["schemas"][name]


def misspelled(name: str) -> set[str]:
    """Returns names with one mistake: two letters swapped, a letter left out, doubled or added at the end."""
    found = {name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1)}
    found |= {name[:at] + name[at + 1 :] for at in range(len(name))}
    found |= {name[:at] + name[at] + name[at:] for at in range(len(name))} | {f"{name}s"}
    return found - {name}


def test_every_state_route_refuses_each_misspelled_field(served: Served) -> None:
    served.complete(PROMPT, max_tokens=1)
    before = served.client.get("/v1/cache/stats").json()["cache"]["cached_blocks"]
    assert before > 0
    paths = set()
    for path, kind, schema in state_routes(served.app):
        paths.add(path)
        is_closed = schema.get("additionalProperties") is False
        for name in schema["properties"]:
            if len(name) < 4 and not is_closed:
                continue  # one letter more is another word
            others = {"", *schema["properties"], *REFUSED}
            for wrong in sorted(misspelled(name) - others)[:1]:
                refused = served.client.post(path, json={**BODIES[kind], wrong: "x"})
                assert_error(refused, 400, "unsupported_parameter", param=wrong)
    assert len(paths) >= 8
    assert served.client.get("/v1/cache/stats").json()["cache"]["cached_blocks"] == before
    assert served.client.get("/v1/cache/pins").json() == {"pins": []}


@pytest.mark.parametrize(
    ("api", "schema", "body"),
    [
        ("chat", PromptRequest, {"messages": user(PROMPT)}),
        ("completions", PromptRequest, {"prompt": PROMPT}),
        ("messages", CountTokensRequest, {"messages": user(PROMPT)}),
        ("responses", ResponseRequest, {"input": PROMPT}),
    ],
)
def test_every_api_s_body_has_each_misspelled_field_refused(
    served: Served, api: str, schema: type[Wire], body: dict[str, Any]
) -> None:
    others = {"", *schema.model_fields, *REFUSED}
    for name in (name for name in schema.model_fields if len(name) >= 4):
        for wrong in sorted(misspelled(name) - others)[:1]:
            for path in ("/v1/cache/pin", "/v1/cache/warm"):
                refused = served.client.post(path, json={"api": api, "body": {**body, wrong: "x"}})
                assert_error(refused, 400, "unsupported_parameter", param=wrong)
    assert served.client.get("/v1/cache/pins").json() == {"pins": []}


@pytest.mark.parametrize("kind", [PromptRequest, CountTokensRequest, ResponseRequest])
def test_each_mistake_in_a_long_name_is_noticed(kind: type[Wire]) -> None:
    others = {"", *kind.model_fields, *REFUSED}
    for name in (name for name in kind.model_fields if len(name) >= 4):
        for wrong in misspelled(name) - others:
            with pytest.raises(Unsupported, match=wrong):
                refuse_misspelled(kind.model_construct(None, **{wrong: "x"}))


def test_every_state_route_refuses_parameters_that_it_does_not_have(served: Served) -> None:
    paths = [path for path, _, _ in state_routes(served.app) if path.startswith("/v1/cache/")]
    for path in paths:
        for wrong in ("modle", "cache_slat", "wiat", "model_"):
            refused = served.client.post(f"{path}?{wrong}=x", json={})
            assert_error(refused, 400, "unsupported_parameter", "Parameters", param=wrong)


@pytest.mark.parametrize(
    "body", [{"modle": "b"}, {"tier": "disk"}, {"cache_slat": "s"}, {"publc": True}, {"x": 1}, {"tiers": []},
             {"tiers": ["dsik"]}, {"tiers": "disk"}, {"tiers": ["disk"] * 3}],
)  # fmt: skip
def test_a_wrong_body_clears_nothing(served: Served, body: dict[str, Any]) -> None:
    served.complete(PROMPT, max_tokens=1)
    before = served.client.get("/v1/cache/stats").json()["cache"]["cached_blocks"]
    refused = served.client.post("/v1/cache/clear", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(next(iter(body)))
    assert served.client.get("/v1/cache/stats").json()["cache"]["cached_blocks"] == before > 0


def test_fields_of_the_answering_route_and_unlike_ones_are_ignored(served: Served) -> None:
    served.complete(PROMPT, max_tokens=1)
    others = {
        "temperature": 0.5,
        "stream": True,
        "guided_regex": "a",
        "metadata": {},
        "x_of_a_client": 1,
        "top_a": 0,
    }
    pinned = served.client.post("/v1/cache/pin/completions", json={"prompt": PROMPT, **others})
    assert pinned.status_code == 200, pinned.text
    assert served.client.post("/v1/cache/release", json={"id": pinned.json()["id"]}).status_code == 200
    message = {"messages": user(PROMPT), "max_tokens": 5, "stop_sequences": ["x"], "metadata": {}}
    assert served.client.post("/v1/cache/warm/messages", json=message).status_code == 200


def test_very_many_unknown_fields_are_refused_at_once(served: Served) -> None:
    body = {"prompt": PROMPT, **{f"x{at}": 1 for at in range(MAX_UNKNOWN_FIELDS + 1)}}
    assert_error(served.client.post("/v1/cache/pin", json=body), 400, "unsupported_parameter", "16")
    body = {"prompts": [body]}
    assert_error(served.client.post("/v1/cache/warm", json=body), 400, "unsupported_parameter", "16")
