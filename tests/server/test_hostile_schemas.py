"""Schemas that no answer can follow, or that would take long, are errors that say why, wherever they come in."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from hostile_constraints import all_of_patterns, as_response_format, hostile_constraints
from rootstock.config import CacheConfig, EngineConfig, ServerConfig
from rootstock.engine.build import assemble
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from server.conftest import user
from waiting import HANG_S

Json = dict[str, Any]
JSON = {"content-type": "application/json"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def format_of(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


def chat(**fields: Any) -> Json:
    return {"messages": user("x"), "max_tokens": 8, **fields}


def responses(**fields: Any) -> Json:
    return {"input": "x", "max_output_tokens": 8, **fields}


def function(schema: Any) -> Json:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


PLACES: dict[str, tuple[str, Callable[[Any], Json]]] = {
    "response_format": (CHAT, lambda schema: chat(response_format=format_of(schema))),
    "guided_json": (CHAT, lambda schema: chat(guided_json=schema)),
    "structured_outputs": (CHAT, lambda schema: chat(structured_outputs={"json": schema})),
    "output_config": (
        MESSAGES,
        lambda schema: chat(output_config={"format": {"type": "json_schema", "schema": schema}}),
    ),
    "text.format": (
        RESPONSES,
        lambda schema: responses(text={"format": {"type": "json_schema", "name": "n", "schema": schema}}),
    ),
    "tools of chat": (CHAT, lambda schema: chat(tools=[function(schema)], tool_choice="required")),
    "tools of messages": (
        MESSAGES,
        lambda schema: chat(tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"}),
    ),
    "tools of responses": (
        RESPONSES,
        lambda schema: responses(
            tools=[{"type": "function", "name": "f", "parameters": schema}], tool_choice="required"
        ),
    ),
}


def nested(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def at(name: str, schema: Any) -> Json:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


HOSTILE: dict[str, tuple[Json, str]] = {
    "deep": (nested(70), "nested"),
    "itself": ({"type": "object", "allOf": [{"$ref": "#"}]}, "leads back to itself"),
    "a ring": (
        at("a", {"$ref": "#/$defs/a"}) | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "leads back to itself",
    ),
    "a huge enum": (at("a", {"enum": list(range(20_000))}), "values"),
    "a huge text": (at("a", {"description": "x" * 1_000_000}), "characters"),
    "a long pattern": (at("a", {"type": "array", "items": {"pattern": "(a|b)" * 60_000}}), "characters"),
    "a repetition": (at("a", {"type": "array", "items": {"pattern": "^a{1000000000}$"}}), "repetitions"),
    "repetitions within each other": (
        at("a", {"type": "array", "items": {"pattern": "^((a{999}){999}){999}$"}}),
        "repetitions",
    ),
    "a repetition behind a reference": (
        at("a", {"type": "array", "items": {"$ref": "#/x/y"}}) | {"x": {"y": {"pattern": "^a{999999999}$"}}},
        "repetitions|reference|exist",
    ),
    "endless elements": (at("a", {"type": "array", "minItems": 10**9}), "minItems"),
    "endless text": (at("a", {"type": ["string", "null"], "minLength": 10**9}), "minLength"),
    "more than all": (at("a", {"type": "array", "minItems": 5, "maxItems": 4}), "minItems|no answer|nsatisf"),
    "all combinations": (
        {"type": "object"}
        | {"allOf": [{"anyOf": [at(f"a{i}", {}), at(f"b{i}", {})]} for i in range(14)]},
        "too large|no answer",
    ),
    "a number out of range": (at("a", {"type": "integer", "minimum": 10**400}), "range|number"),
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    runtime = FakeRuntime(PADDED_LOGITS, 200_000, eos_token_ids=(ByteTokenizer.END,))
    made = assemble(runtime, ByteTokenizer(), CacheConfig(budget_bytes=1 << 26), EngineConfig())
    config = ServerConfig(tool_parser="hermes")
    app = create_app(made, config)
    with (
        made.engine,
        running(app, made.engine) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield client


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_an_error_that_says_why(client: httpx.Client, place: str, name: str) -> None:
    schema, reason = HOSTILE[name]
    path, body = PLACES[place]
    response = client.post(path, json=body(schema))
    assert response.status_code == 400, response.text[:500]
    message = response.json()["error"]["message"]
    assert re.search(reason, message), message
    assert len(message) < 600


@pytest.mark.parametrize("place", PLACES)
def test_a_usual_schema_is_taken(client: httpx.Client, place: str) -> None:
    path, body = PLACES[place]
    response = client.post(path, json=body(at("a", {"type": "string"})))
    assert response.status_code == 200, response.text


KEYWORDS = (
    "type", "properties", "items", "required", "enum", "const", "pattern", "minLength", "maxLength", "minimum",
    "maximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "$defs", "format", "minItems",
    "maxItems", "prefixItems", "additionalProperties", "patternProperties", "minProperties", "x-guidance",
    "exclusiveMinimum", "uniqueItems", "propertyNames", "definitions", "$id", "$schema", "$anchor", "title",
)  # fmt: skip
LEAVES = (
    None, True, False, 0, -1, 1.5, 1e308, 10**30, "", "string", "object", "array", "a{9}", "(", "#", "#/$defs/a",
    "date-time", "\ud800", "\x00", [], {}, ["a"], [1, "a", None],
)  # fmt: skip


def random_schema(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    if rng.random() < 0.2:
        return [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    schema: Json = {"type": rng.choice(("object", "array", "string", "number"))} if rng.random() < 0.7 else {}
    for keyword in rng.choices(KEYWORDS, k=rng.randint(0, 4)):
        inner = random_schema(rng, depth - 1)
        by_name = keyword in ("properties", "$defs", "patternProperties") and rng.random() < 0.9
        schema[keyword] = {"a": inner, "b": random_schema(rng, depth - 1)} if by_name else inner
    return schema


@pytest.mark.parametrize("place", PLACES)
def test_random_schemas_are_taken_or_refused(client: httpx.Client, place: str) -> None:
    path, body = PLACES[place]
    rng = random.Random(place)
    seen = set()
    for _ in range(60):
        schema = random_schema(rng, 4)
        response = client.post(path, content=json.dumps(body(schema)), headers=JSON)
        seen.add(response.status_code)
        if response.status_code == 200:
            continue
        # A grammar may reach a limit after the answer began. The tools of a request must be objects.
        assert response.status_code in (400, 500), (schema, response.text)
        error = response.json()["error"]
        assert response.status_code == 400 or error.get("code") == "constraint_failed", (schema, error)
    assert seen >= {200, 400}


CODE = {"syntax": "regex", "definition": r'[a-c]{3}"[0-9]{2}\n'}
CUSTOM_CALLS = {
    CHAT: chat(
        tools=[{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": CODE}}}],
        tool_choice={"type": "custom", "custom": {"name": "p"}},
        max_tokens=200,
    ),
    RESPONSES: responses(
        tools=[{"type": "custom", "name": "p", "format": {"type": "grammar", **CODE}}],
        tool_choice={"type": "custom", "name": "p"},
        max_output_tokens=200,
    ),
}


def input_of(path: str, answer: Json) -> str:
    if path == RESPONSES:
        [text] = [item["input"] for item in answer["output"] if item["type"] == "custom_tool_call"]
        return str(text)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    inner = (
        call["custom"]["input"] if "custom" in call else json.loads(call["function"]["arguments"])["input"]
    )
    return str(inner)


@pytest.mark.parametrize("path", CUSTOM_CALLS)
def test_a_forced_call_of_a_custom_tool_follows_its_grammar(client: httpx.Client, path: str) -> None:
    for seed in range(4):
        response = client.post(path, json=CUSTOM_CALLS[path] | {"seed": seed, "parallel_tool_calls": False})
        assert response.status_code == 200, response.text
        text = input_of(path, response.json())
        assert re.fullmatch(CODE["definition"], text), text


@pytest.mark.parametrize(
    ("place", "tools"),
    [
        ("response_format", "tools of chat"),
        ("output_config", "tools of messages"),
        ("text.format", "tools of responses"),
    ],
)
def test_beside_a_schema_a_model_may_call_a_tool(client: httpx.Client, place: str, tools: str) -> None:
    path, body = PLACES[place]
    asked = body({"const": "owl"}) | {"tools": PLACES[tools][1]({"type": "object"})["tools"]}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    begun = {}
    for first in ("<", '"'):  # which the model prefers
        found = client.post(path, json=asked | {limit: 40, "logit_bias": {str(ord(first)): 50}})
        assert found.status_code == 200, found.text
        begun[first] = "<tool_call>" in found.text, r"\"owl\"" in found.text
    assert begun == {"<": (True, False), '"': (False, True)}


@pytest.mark.parametrize("path", CUSTOM_CALLS)
def test_a_hostile_grammar_of_a_custom_tool_is_refused(client: httpx.Client, path: str) -> None:
    for definition in ("a{1000000000}", "(", "x" * 100_000):
        body = json.loads(
            json.dumps(CUSTOM_CALLS[path]).replace(json.dumps(CODE["definition"]), json.dumps(definition))
        )
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert len(response.json()["error"]["message"]) < 600


FATAL = dict(itertools.islice(hostile_constraints(0), 6))
FATAL["patterns that the bounds let pass"] = as_response_format(
    {"type": "string", "allOf": [all_of_patterns(60), all_of_patterns(60)]}
)
FATAL["brackets that the bounds let pass"] = {
    "guided_grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000
}


@pytest.mark.parametrize("name", FATAL)
def test_what_ended_a_server_once_is_an_error(client: httpx.Client, name: str) -> None:
    response = client.post(CHAT, json=chat(**FATAL[name]))
    assert response.status_code == 400, response.text[:500]
    assert len(response.json()["error"]["message"]) < 600
    assert client.post(CHAT, json=chat(guided_regex="[ab]{3}")).status_code == 200
