"""Each API's bodies are explained by `/v1/cache/explain`, and by the paths that each API had there earlier."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock.config import ServerConfig
from server.conftest import GREEDY, assert_error, user

EXPLAIN = "/v1/cache/explain"
TEXT = "What is a radix tree, and what is it for?"
TOOL = {"type": "object", "properties": {"word": {"type": "string"}}}
# A body of each route, with fields of its answer, and the path of its text.
BODIES: dict[str, dict[str, Any]] = {
    "/messages": {
        "model": "fake",
        "system": "Be brief.",
        "messages": user(TEXT),
        "tools": [{"name": "look_up", "input_schema": TOOL}],
        "max_tokens": 1,
        "stop_sequences": ["never"],
        "stream": False,
        "diagnostics": {"previous_message_id": None},
    },
    "/responses": {
        "model": "fake",
        "instructions": "Be brief.",
        "input": TEXT,
        "tools": [{"type": "function", "name": "look_up", "parameters": TOOL}],
        "max_output_tokens": 1,
        "store": False,
    },
    "/chat/completions": {
        "model": "fake",
        "messages": [{"role": "system", "content": "Be brief."}, *user(TEXT)],
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": TOOL}}],
        "max_tokens": 1,
    },
    "/completions": {"model": "fake", "prompt": TEXT, "max_tokens": 1},
}
each_route = pytest.mark.parametrize("route", BODIES)


def answer(served: Any, path: str, body: Any, **more: Any) -> Any:
    response = served.client.post(path, json={**body, **more})
    assert response.status_code == 200, response.text
    return response.json()


@each_route
def test_a_prompt_is_explained_before_and_after_it_was_asked(serve: Any, route: str) -> None:
    with serve() as served:
        body = BODIES[route]
        told = answer(served, EXPLAIN + route, body)
        assert (told["cap"], told["matched_tokens"]) == ("nothing_cached", 0)
        asked = answer(served, f"/v1{route}", body, **GREEDY)
        told = answer(served, EXPLAIN + route, body)
        assert told["cap"] == "last_token"
        usage = asked["usage"]
        tokens = [
            usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_creation_input_tokens")
        ]
        assert told["prompt_tokens"] == sum(tokens)
        assert told["matched_tokens"] == told["prompt_tokens"] - 1
        assert answer(served, EXPLAIN + route, body, cache_salt="other")["cap"] == "nothing_cached"
        before = served.assembly.engine.stats().cache
        answer(served, EXPLAIN + route, body)
        assert served.assembly.engine.stats().cache == before, "an explanation changes nothing"


def test_one_prompt_has_one_explanation_in_every_format(serve: Any) -> None:
    with serve() as served:
        served.client.post("/v1/messages", json=BODIES["/messages"] | GREEDY)
        chats = [route for route in BODIES if route != "/completions"]
        told = [answer(served, EXPLAIN + route, BODIES[route]) for route in chats]
        assert told[0]["matched_tokens"] > 0
        assert told[0] == told[1] == told[2]
        assert answer(served, EXPLAIN, BODIES["/chat/completions"]) == told[0]


APIS = {
    "messages": "/messages",
    "responses": "/responses",
    "chat": "/chat/completions",
    "completions": "/completions",
}


@pytest.mark.parametrize("api", APIS)
def test_the_name_of_an_api_tells_how_to_read_a_body(serve: Any, api: str) -> None:
    with serve() as served:
        body = BODIES[APIS[api]]
        answer(served, f"/v1{APIS[api]}", body, **GREEDY)
        told = answer(served, EXPLAIN, {"api": api, "body": body})
        assert told["cap"] == "last_token"
        assert told == answer(served, EXPLAIN + APIS[api], body)
        pinned = answer(served, "/v1/cache/pin", {"api": api, "body": body})
        assert pinned["tokens"] > 0
        assert answer(served, f"/v1/cache/pin{APIS[api]}", body) == pinned
        wrong = served.client.post(EXPLAIN, json={"api": api, "body": {**body, "model": 5}})
        assert_error(wrong, 400, "invalid_parameter", param="model")


@pytest.mark.parametrize("path", [EXPLAIN, "/v1/cache/pin", "/v1/cache/warm"])
def test_an_unknown_api_is_refused_with_the_list_of_all(served: Any, path: str) -> None:
    refused = served.client.post(path, json={"api": "telegram", "body": {}})
    assert_error(refused, 400, "invalid_parameter", *APIS, param="api")
    assert_error(
        served.client.post(path, json={"api": "chat", "body": {}, "x": 1}), 400, "unsupported_parameter"
    )
    assert_error(
        served.client.post(path, json={"api": "chat", "body": 5}), 400, "invalid_parameter", "object"
    )


def test_a_response_is_explained_with_the_history_before_it(serve: Any) -> None:
    with serve() as served:
        first = answer(served, "/v1/responses", {"input": TEXT, "max_output_tokens": 8, **GREEDY})
        more = {"input": "Why?", "previous_response_id": first["id"]}
        told = answer(served, f"{EXPLAIN}/responses", more)
        assert told["matched_tokens"] >= first["usage"]["input_tokens"]
        assert told["sampled_tokens"] > 0


def test_edits_and_dropped_heads_are_part_of_the_explanation(serve: Any) -> None:
    with serve() as served:
        head = "x-anthropic-billing-header: cc_version=1.2.3.4a5;"
        told = answer(served, f"{EXPLAIN}/messages", BODIES["/messages"], system=f"{head}\nBe brief.")
        assert [dropped["chars"] for dropped in told["dropped"]] == [len(head) + 1]
        plain = answer(served, f"{EXPLAIN}/messages", BODIES["/messages"])
        assert told["prompt_tokens"] == plain["prompt_tokens"]


@each_route
def test_explanations_require_the_admin_key_if_there_is_one(serve: Any, route: str) -> None:
    with serve(server=ServerConfig(admin_key="admin")) as served:
        refused = served.client.post(EXPLAIN + route, json=BODIES[route])
        assert_error(refused, 403, "admin_only")
        headers = {"Authorization": "Bearer admin"}
        assert served.client.post(EXPLAIN + route, json=BODIES[route], headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("route", "change", "param"),
    [
        ("/messages", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ("/responses", {"input": None, "instructions": None}, "input"),
        ("/responses", {"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ("/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/completions", {"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_errors_name_the_formats_own_fields(served: Any, route: str, change: Any, param: str) -> None:
    response = served.client.post(EXPLAIN + route, json={**BODIES[route], **change})
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
