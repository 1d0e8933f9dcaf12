"""Hints over HTTP: each API tells the decisions about them, whole and streamed, and prefixes are pinned by tenant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rootstock.config import ServerConfig
from server.anthropic.streams import events_in, message_of
from server.conftest import GREEDY, assert_error, served_by_oracle, user
from server.responses.events import checked, parsed

Json = dict[str, Any]
HINTS: Json = {"nvext": {"agent_hints": {"priority": 5, "osl": 10}, "session_control": {"session_id": "s"}}}
TOLD = {
    "nvext.agent_hints.osl": "refused",
    "nvext.agent_hints.priority": "accepted",
    "nvext.session_control.session_id": "accepted",
}
LONG = "How do trees grow, and why do they shed their leaves? " * 6
# Path, and the fields of a short answer.
APIS: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": user(LONG), "max_tokens": 4}),
    "completions": ("/v1/completions", {"prompt": LONG, "max_tokens": 4}),
    "messages": ("/v1/messages", {"messages": user(LONG), "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": LONG, "max_output_tokens": 4}),
}
each_api = pytest.mark.parametrize("api", APIS)


def verdicts(body: Json) -> dict[str, str]:
    return {hint["field"]: hint["verdict"] for hint in body["rootstock"]["hints"]}


def post(served: Any, api: str, headers: Any = None, **fields: Any) -> Any:
    path, needed = APIS[api]
    response = served.client.post(path, json={**GREEDY, **needed, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def streamed(served: Any, api: str, **fields: Any) -> Json:
    """Returns the object of a stream's end."""
    usage = {} if api in ("messages", "responses") else {"stream_options": {"include_usage": True}}
    text = post(served, api, stream=True, **usage, **fields).text
    if api == "messages":
        *_, last, _ = events_in(text)
        assert last["type"] == "message_delta"
        return dict(last)
    if api == "responses":
        return checked(parsed(text))
    *_, last, _ = (line.removeprefix("data: ") for line in text.split("\n\n")[:-1])
    found = json.loads(last)
    assert found["choices"] == []
    return dict(found)


# ---- decisions


@each_api
def test_each_api_tells_the_decisions_about_hints(served: Any, api: str) -> None:
    assert verdicts(post(served, api, **HINTS).json()) == TOLD
    assert verdicts(streamed(served, api, **HINTS)) == TOLD


@each_api
def test_an_answer_without_hints_tells_nothing(served: Any, api: str) -> None:
    assert "rootstock" not in post(served, api).json()
    assert "rootstock" not in streamed(served, api)


def test_a_stream_without_usage_has_no_chunk_for_hints(served: Any) -> None:
    chunks = served.chunks("/v1/chat/completions", messages=user("Hi"), max_tokens=2, **HINTS)
    assert all(chunk["choices"] for chunk in chunks)


@each_api
def test_a_header_of_an_agent_is_a_hint(served: Any, api: str) -> None:
    body = post(served, api, headers={"X-Claude-Code-Session-Id": "c"}).json()
    assert verdicts(body) == {"X-Claude-Code-Session-ID": "accepted"}


@each_api
def test_hints_change_no_answer(served: Any, api: str) -> None:
    def answer(**fields: Any) -> Any:
        body = post(served, api, **fields).json()
        return body.get("choices") or body.get("content") or body["output"][0]["content"]

    assert answer(**HINTS) == answer()


def test_a_wrong_hint_is_an_error_with_its_path(served: Any) -> None:
    wrong = {"nvext": {"agent_hints": {"priority": "high"}}}
    response = served.chat("Hi", **wrong)
    assert_error(response, 400, "invalid_parameter", "a valid integer", param="nvext.agent_hints.priority")


# ---- marks


def marked(text: str, ttl: str | None = None, **more: Any) -> Json:
    control = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    return {"type": "text", "text": text, "cache_control": control, **more}


def test_anthropics_usage_tells_how_long_created_tokens_are_kept(serve: Any) -> None:
    with serve() as served:
        system = [marked("You know all about trees. " * 4, "1h")]
        fields = {"system": system, "messages": [{"role": "user", "content": [marked("Why?")]}]}
        body = post(served, "messages", **fields).json()
        assert verdicts(body) == {
            "system[0].cache_control": "accepted",
            "messages[0].content[0].cache_control": "accepted",
        }
        usage = body["usage"]
        hour, short = (usage["cache_creation"][f"ephemeral_{ttl}_input_tokens"] for ttl in ("1h", "5m"))
        assert hour + short == usage["cache_creation_input_tokens"]
        assert 100 < hour < usage["cache_creation_input_tokens"]

        message = message_of(list(events_in(post(served, "messages", stream=True, **fields).text)))
        created = message["usage"]["cache_creation"]
        assert created == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
        fields["messages"][0]["content"][0]["text"] = "How?"
        created = post(served, "messages", **fields).json()["usage"]["cache_creation"]
        assert created["ephemeral_1h_input_tokens"] == 0  # the system prompt was there already
        assert created["ephemeral_5m_input_tokens"] > 0


@pytest.mark.parametrize(
    ("control", "param"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, "ttl"),
        ({"type": "ephemeral", "ttl": 300}, "ttl"),
        ({"type": "eternal"}, "type"),
        ({}, "type"),
    ],
)
def test_a_wrong_mark_is_refused(served: Any, control: Json, param: str) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": control}
    messages = [{"role": "user", "content": [part]}]
    path = f"messages[0].content[0].cache_control.{param}"
    for url in ("/v1/chat/completions", "/v1/messages"):
        response = served.client.post(url, json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 400
        assert path in response.json()["error"]["message"]


def test_breakpoints_of_openai_are_marks(served: Any) -> None:
    point = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    chat = [{"role": "user", "content": [{"type": "text", "text": LONG, **point}]}]
    path = "content[0].prompt_cache_breakpoint"
    assert verdicts(post(served, "chat", messages=chat).json()) == {f"messages[0].{path}": "accepted"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": LONG, **point}]}]
    assert verdicts(post(served, "responses", input=items).json()) == {f"input[0].{path}": "accepted"}


def test_a_mark_on_tools_ends_behind_the_tools(served: Any) -> None:
    tool = {"name": "look_up", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    body = post(served, "messages", tools=[tool]).json()
    assert set(verdicts(body)) == {"tools[0].cache_control"}


# ---- pins


@pytest.fixture
def shared() -> Iterator[Any]:
    keys = {"key-a": "ann", "key-b": "bob"}
    with served_by_oracle(
        server=ServerConfig(api_key="anyone", admin_key="admin", tenant_keys=keys)
    ) as found:
        yield found


def as_tenant(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def pin_path(api: str) -> str:
    return APIS[api][0].replace("/v1/", "/v1/cache/pin/")


@each_api
def test_the_prompt_of_each_api_can_be_pinned_listed_and_released(serve: Any, api: str) -> None:
    with serve() as served:
        _, fields = APIS[api]
        body = {name: value for name, value in fields.items() if not name.startswith("max")}
        refused = served.client.post(pin_path(api), json=body)
        assert_error(refused, 409, "pin_not_granted", "none of the prefix is cached")
        post(served, api)
        pinned = served.client.post(pin_path(api), json=body).json()
        assert pinned["tokens"] > 300
        assert pinned["tokens"] <= pinned["asked_tokens"]
        assert pinned["bytes"] > 0
        assert served.client.get("/v1/cache/pins").json() == {"pins": [pinned]}
        assert served.client.post(pin_path(api), json=body).json() == pinned  # once
        served.client.post("/v1/cache/clear")
        cached = served.client.post(pin_path(api).replace("/pin/", "/explain/"), json=body).json()
        assert cached["matched_tokens"] >= pinned["tokens"] - 1
        released = served.client.post("/v1/cache/release", json={"id": pinned["id"]}).json()
        assert released == {"id": pinned["id"], "released": True}
        again = served.client.post("/v1/cache/release", json={"id": pinned["id"]})
        assert_error(again, 404, "pin_not_found", pinned["id"], param="id")
        assert served.client.get("/v1/cache/pins").json() == {"pins": []}
        served.settled()


def test_a_tenant_sees_and_releases_its_own_pins_only(shared: Any) -> None:
    ann, bob, admin = map(as_tenant, ("key-a", "key-b", "admin"))
    body = {"prompt": LONG}

    def send(path: str, who: dict[str, str], **fields: Any) -> Any:
        return shared.client.post(path, json=fields, headers=who)

    def pins(who: dict[str, str]) -> list[Json]:
        found = shared.client.get("/v1/cache/pins", headers=who).json()["pins"]
        return list(found)

    assert send("/v1/completions", ann, **body, max_tokens=1).status_code == 200
    pinned = send("/v1/cache/pin", ann, **body).json()
    assert pinned["tenant"] == "ann"
    assert_error(send("/v1/cache/pin", bob, **body), 409, "pin_not_granted", "none of the prefix")
    assert (pins(ann), pins(bob), pins(admin)) == ([pinned], [], [pinned])
    assert_error(send("/v1/cache/release", bob, id=pinned["id"]), 404, "pin_not_found", param="id")
    assert pins(ann) == [pinned]
    for path in ("/v1/cache/pin", "/v1/cache/release"):  # a client without a tenant is no operator here
        fields = body if path.endswith("pin") else {"id": pinned["id"]}
        assert_error(send(path, as_tenant("anyone"), **fields), 403, "admin_only")
    assert shared.client.get("/v1/cache/pins", headers=as_tenant("anyone")).status_code == 403
    assert send("/v1/cache/release", admin, id=pinned["id"]).status_code == 200
    assert pins(ann) == []


def test_one_tenants_end_of_a_session_leaves_anothers_alone() -> None:
    keys = ServerConfig(tenant_keys={"key-a": "ann", "key-b": "bob"})
    ann, bob = as_tenant("key-a"), as_tenant("key-b")
    session = {"session_id": "s"}
    with served_by_oracle(server=keys, blocks=130) as served:  # for three such prompts

        def cached(who: dict[str, str], prompt: str = LONG, **control: Any) -> int:
            body = {
                "prompt": prompt,
                "max_tokens": 1,
                "nvext": {"session_control": control} if control else None,
            }
            usage = served.client.post("/v1/completions", json=body, headers=who).json()["usage"]
            tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
            return tokens

        assert (cached(bob, **session), cached(ann, **session)) == (0, 0)
        assert cached(bob, **session, action="close") > 300
        for text in "xyz":
            cached(bob, text * 300)
        assert cached(ann) > 300
        assert cached(bob) == 0


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": ["a", "b"]}, 400),
        ({"messages": []}, 400),
        ({"prompt": 5}, 400),
    ],
)
def test_a_wrong_prompt_is_not_pinned(served: Any, fields: Json, status: int) -> None:
    assert served.client.post("/v1/cache/pin", json=fields).status_code == status
    assert served.client.post("/v1/cache/release", json={"id": "x" * 5000}).status_code == 400
    assert served.client.post("/v1/cache/release", json={}).status_code == 400
