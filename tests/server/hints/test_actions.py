"""The actions of `kv_hints` as the clients of vLLM, Dynamo and SGLang write them, with a request and without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock.cache.retention.hint_types import ActKind, CacheHints, PrefixAct, RetentionWish
from rootstock.config import EngineConfig, ServerConfig, TierConfig
from rootstock.errors import InvalidParameter
from rootstock.server.wire.hints.directives import MAX_DIRECTIVES
from rootstock.server.wire.hints.fields import MAX_ACTIONS
from rootstock.server.wire.hints.headers import MAX_SESSION_CHARS
from server.conftest import GREEDY, Served, assert_error, served_by_oracle, user
from server.hints.test_routes import APIS, LONG, as_tenant, each_api, post, verdicts
from server.hints.test_sent import cache, read, told
from waiting import wait_until

Json = dict[str, Any]
ACTION = "kv_hints.actions[0]"


# ---- the forms that other projects' clients write


def action(type: str, payload: Json | None = None, version: str = "1.0") -> Json:
    return {"action_id": "a1", "action_type": type, "action_version": version, "payload": payload or {}}


def envelope(*actions: Json) -> Json:
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions)}}


def directives(type: str, *found: Json) -> Json:
    """vLLM's payload of `kv.retain`, which our own actions have as well."""
    return action(type, {"scope": None, "directives": list(found)})


def set_priority(value: int | None, **fields: Any) -> Json:
    """vLLM's native action: a claim on the cached copies of a request."""
    claim = {"target": "request_cached", "location": "local_g1", "claim_id": "router/s", "revision": 1}
    return action("vllm.set_priority", {**claim, "value": value, **fields})


def of_policy(type: str, **fields: Any) -> Json:
    """The action of Dynamo's policy for sessions, which names blocks by hashes in decimals."""
    payload = {"execute_at": "request_completion", "include_current_request": True, "block_hashes": ["11"]}
    return action(type, {**fields, **payload})


def of_sglang(type: str, **payload: Any) -> Json:
    return action(type, payload)


def acts(*found: PrefixAct, session: str | None = None) -> CacheHints:
    field = "prompt_cache_key" if session else ""
    return CacheHints("ann", session, field, acts=found, may_pin=True)


def retained(path: str, **fields: Any) -> CacheHints:
    return CacheHints("ann", retentions=(RetentionWish(path, **fields),))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (set_priority(10, ttl_seconds=60), retained(ACTION, ttl_s=60.0, priority=10)),
        (set_priority(None), acts(PrefixAct(ACTION, ActKind.RELEASE))),
        (of_policy("kv.retain", priority=3, ttl_seconds=2.5), retained(ACTION, ttl_s=2.5, priority=3)),
        (of_policy("kv.evict"), acts(PrefixAct(ACTION, ActKind.DEMOTE))),
        (of_sglang("kv.deref"), acts(PrefixAct(ACTION, ActKind.DEMOTE))),
        (
            of_sglang("kv.demote", session_id="s", session_generation=1),
            acts(PrefixAct(ACTION, ActKind.DEMOTE, session="s")),
        ),
        (of_sglang("kv.release", session_id="s"), acts(PrefixAct(ACTION, ActKind.RELEASE, session="s"))),
        (
            directives("kv.retain", {"priority": 0, "start": 3, "end": 9}),
            acts(PrefixAct(f"{ACTION}.payload.directives[0]", ActKind.RELEASE, 3, 9)),
        ),
        (
            directives("kv.demote", {"start": 5}, {"covers_output": True}),
            acts(
                PrefixAct(f"{ACTION}.payload.directives[0]", ActKind.DEMOTE, 5),
                PrefixAct(f"{ACTION}.payload.directives[1]", ActKind.DEMOTE, None),
            ),
        ),
        (
            directives("kv.pin", {"end": 7}),
            acts(PrefixAct(f"{ACTION}.payload.directives[0]", ActKind.PIN, 0, 7)),
        ),
        (action("kv.pin"), acts(PrefixAct(ACTION, ActKind.PIN))),
    ],
)
def test_each_form_of_an_action_is_read(sent: Json, expected: CacheHints) -> None:
    assert cache(envelope(sent)) == expected


@pytest.mark.parametrize("sent", [of_policy("kv.evict"), of_sglang("kv.deref")])
def test_an_end_that_routers_send_is_the_end_of_the_named_session(sent: Json) -> None:
    found = cache({**envelope(sent), "prompt_cache_key": "s"})
    assert found == acts(PrefixAct(ACTION, ActKind.DEMOTE, session="s"), session="s")


def test_hashes_of_blocks_are_not_looked_up() -> None:
    assert told(read(envelope(of_policy("kv.evict")))) == {ACTION: "clipped"}
    others = action("kv.retain", {"priority": 1, "include_current_request": False, "block_hashes": ["1"]})
    assert told(read(envelope(others))) == {ACTION: "refused"}
    # Dynamo's transfer from another worker.
    fetch = action("kv.fetch", {"source_control_endpoint": "tcp://127.0.0.1:1", "block_hashes": [11, 22]})
    found = read(envelope(fetch))
    assert (found.cache, told(found)) == (None, {ACTION: "refused"})


def test_a_prefetch_with_a_request_comes_too_late() -> None:
    found = read(envelope(of_sglang("kv.prefetch")))
    assert (found.cache, told(found)) == (None, {ACTION: "refused"})
    [hint] = found.told([])["rootstock"]["hints"]
    assert "/v1/cache/hints" in hint["reason"]


@pytest.mark.parametrize("type", ["kv.pin", "kv.prefetch"])
def test_a_session_has_no_prompt_to_pin_or_prefetch(type: str) -> None:
    assert told(read(envelope(action(type, {"session_id": "s"})))) == {ACTION: "refused"}


def test_sessions_of_actions_belong_to_their_salt() -> None:
    fields = {**envelope(of_sglang("kv.demote", session_id="s")), "cache_salt": "x"}
    body = {"messages": user("Hi"), "prompt_cache_key": "s", **fields}
    from rootstock.server.formats.openai.schema import ChatCompletionRequest
    from rootstock.server.wire.hints.headers import HeaderHints
    from rootstock.server.wire.hints.sent import sent_hints
    from rootstock.text.prompts.tenant_salt import PromptOwner

    found = sent_hints(ChatCompletionRequest(**body), HeaderHints(), PromptOwner.of("", "x")).cache
    assert found is not None
    assert found.acts[0].session == found.session != "s"


# ---- parents of sessions


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"nvext": {"agent_context": {"session_id": "s", "parent_session_id": "p"}}}, {}),
        ({"agent_hint": {"session_id": "s", "parent_session_id": "p"}}, {}),
        ({"prompt_cache_key": "s"}, {"x_dynamo_parent_session_id": "p"}),
        (
            {"nvext": {"agent_context": {"session_id": "s", "parent_session_id": "p"}}},
            {"x_dynamo_parent_session_id": "other"},
        ),
    ],
)
def test_the_parent_of_a_session_is_read(fields: Json, headers: dict[str, str]) -> None:
    assert (cache(fields, **headers).session, cache(fields, **headers).parent) == ("s", "p")


def test_a_long_parent_is_refused() -> None:
    found = read({"prompt_cache_key": "s"}, x_dynamo_parent_session_id="p" * (MAX_SESSION_CHARS + 1))
    assert found.cache == CacheHints("ann", "s", "prompt_cache_key")
    assert told(found) == {"X-Dynamo-Parent-Session-ID": "refused"}


def test_dynamos_intent_to_evict_a_session_ends_it() -> None:
    fields = {"nvext": {"agent_context": {"session_id": "s", "kv_hints": {"evict_session": True}}}}
    assert cache(fields).ends_session


# ---- hostile input


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (directives("kv.demote", {"begin": 3}), f"{ACTION}.payload.directives[0]"),
        (directives("kv.demote", {"priority": 3}), f"{ACTION}.payload.directives[0]"),
        (directives("kv.pin", {"end": True}), f"{ACTION}.payload.directives[0].end"),
        (directives("kv.release", {"start": 2**40}), f"{ACTION}.payload.directives[0].start"),
        (directives("kv.demote", *[{}] * (MAX_DIRECTIVES + 1)), "kv_hints"),
        (action("kv.demote", {"directives": {}}), f"{ACTION}.payload.directives"),
        (action("kv.demote", {"session_id": "s" * 257}), f"{ACTION}.payload.session_id"),
        (action("kv.demote", {"session_id": ["s"]}), f"{ACTION}.payload.session_id"),
        (set_priority(1), f"{ACTION}.payload.ttl_seconds"),
        (set_priority(1, ttl_seconds=0), f"{ACTION}.payload.ttl_seconds"),
        (set_priority(1, ttl_seconds=float("inf")), f"{ACTION}.payload.ttl_seconds"),
        (set_priority(2**40, ttl_seconds=5), f"{ACTION}.payload.value"),
        (of_policy("kv.retain", ttl_seconds="5"), f"{ACTION}.payload.ttl_seconds"),
        (of_policy("kv.retain", priority=1.5), f"{ACTION}.payload.priority"),
        (action("kv.demote", version="9.9"), f"{ACTION}.action_version"),
    ],
)
def test_wrong_payloads_are_refused_with_their_path(sent: Json, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(envelope(sent))
    assert caught.value.param == param
    assert len(caught.value.message) < 400


def test_directives_of_all_actions_are_bounded_together() -> None:
    full = directives("kv.demote", *[{}] * (MAX_DIRECTIVES // 2))
    assert len(cache(envelope(full, full)).acts) == MAX_DIRECTIVES
    with pytest.raises(InvalidParameter):
        read(envelope(full, full, directives("kv.release", {})))


# ---- over HTTP


def alone(served: Served, api: str = "completions", headers: Any = None, **fields: Any) -> Json:
    _, needed = APIS[api]
    sent = {"api": api, "body": {**needed, **fields}}
    response = served.client.post("/v1/cache/hints", json=sent, headers=headers)
    assert response.status_code == 200, response.text
    return verdicts(response.json())


@each_api
def test_each_api_does_every_action_with_a_request(serve: Any, api: str) -> None:
    with serve(server=ServerConfig(tenant_keys={"key-a": "ann"})) as served:
        who = as_tenant("key-a")
        for sent in (
            action("kv.pin"), set_priority(3, ttl_seconds=60), action("kv.release"), action("kv.demote"),
            of_sglang("kv.deref"), directives("kv.retain", {"priority": 5, "duration": 60}),
        ):  # fmt: skip
            [(field, verdict)] = verdicts(post(served, api, who, **envelope(sent)).json()).items()
            assert field.startswith(ACTION)
            assert verdict == "accepted"
            pins = served.client.get("/v1/cache/pins", headers=who).json()["pins"]
            assert len(pins) == (sent["action_type"] in ("kv.pin", "vllm.set_priority"))
        served.settled()


@each_api
def test_each_api_does_every_action_without_a_request(api: str) -> None:
    with served_by_oracle(EngineConfig(idle_work=True)) as served:
        for type in ("kv.retain", "kv.demote", "kv.release", "kv.pin"):
            sent = directives(type, {"priority": 5} if type == "kv.retain" else {})
            assert set(alone(served, api, **envelope(sent)).values()) == {"refused"}  # nothing is cached
        assert alone(served, api, **envelope(of_sglang("kv.prefetch"))) == {ACTION: "accepted"}
        stats = served.assembly.engine.stats
        wait_until(lambda: stats().cache.cached_tokens > 300)
        for sent in (
            directives("kv.retain", {"priority": 5, "duration": 60}),
            of_sglang("kv.prefetch"),
            action("kv.pin"),
            action("kv.release"),
            action("kv.demote"),
        ):
            [verdict] = alone(served, api, **envelope(sent)).values()
            assert verdict in ("accepted", "clipped")
            assert bool(stats().cache.pins) == (sent["action_type"] == "kv.pin")
            kept = sent["action_type"] in ("kv.retain", "kv.prefetch", "kv.pin")
            assert bool(stats().cache.retained_bytes) == kept
        served.settled()


def test_the_envelope_may_stand_beside_the_body(served: Served) -> None:
    served.complete(LONG, max_tokens=1)
    sent = {"api": "completions", "body": {"prompt": LONG}, **envelope(action("kv.demote"))}
    assert verdicts(served.client.post("/v1/cache/hints", json=sent).json()) == {ACTION: "accepted"}
    bare = {"prompt": LONG, **envelope(action("kv.release"))}
    assert verdicts(served.client.post("/v1/cache/hints", json=bare).json()) == {ACTION: "accepted"}
    without = served.client.post("/v1/cache/hints", json={"prompt": LONG}).json()
    assert without == {"rootstock": {"hints": []}}


def test_hints_of_every_dialect_are_followed_without_a_request(serve: Any) -> None:
    with serve() as served:
        part = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        messages = [{"role": "user", "content": [part]}]
        post(served, "messages", messages=messages)
        fields = {"messages": messages, "nvext": {"agent_hints": {"priority": 5}}}
        assert alone(served, "messages", {"X-Session-ID": "s"}, **fields) == {
            "messages[0].content[0].cache_control": "accepted",
            "nvext.agent_hints.priority": "accepted",
            "X-Session-ID": "refused",  # no request has named it
        }


def test_a_session_ends_without_a_request(serve: Any) -> None:
    with serve() as served:
        session = {"nvext": {"session_control": {"session_id": "s"}}}
        post(served, "chat", **session)
        assert served.assembly.engine.stats().cache.sessions == 1
        session["nvext"]["session_control"]["action"] = "close"
        assert set(alone(served, "chat", **session).values()) == {"accepted"}
        assert served.assembly.engine.stats().cache.sessions == 0


def test_a_prefetch_is_refused_without_idle_work(serve: Any) -> None:
    with serve(EngineConfig(idle_work=False)) as served:
        assert alone(served, **envelope(of_sglang("kv.prefetch"))) == {ACTION: "refused"}


def test_a_demotion_stores_a_prefix_and_a_prefetch_brings_it_back(serve: Any, tmp_path: Any) -> None:
    with serve(EngineConfig(idle_work=True), tier=TierConfig(tmp_path / "tier"), blocks=200) as served:
        served.complete(LONG, max_tokens=1)

        def stored() -> int:
            return int(served.client.get("/v1/cache/stats").json()["tier"]["records"])

        assert stored() == 0
        assert alone(served, **envelope(action("kv.demote"))) == {ACTION: "accepted"}
        wait_until(lambda: stored() > 20)
        assert served.client.post("/v1/cache/clear", json={"tiers": ["memory"]}).status_code == 200
        assert alone(served, **envelope(of_sglang("kv.prefetch"))) == {ACTION: "accepted"}
        stats = served.assembly.engine.stats
        wait_until(lambda: stats().cache.cached_tokens > 300)


@pytest.fixture
def tenants() -> Iterator[Served]:
    server = ServerConfig(api_key="anyone", admin_key="admin", tenant_keys={"key-a": "ann", "key-b": "bob"})
    with served_by_oracle(server=server) as found:
        yield found


def test_actions_of_one_tenant_do_not_meet_anothers_prefixes(tenants: Served) -> None:
    ann, bob = as_tenant("key-a"), as_tenant("key-b")
    kept = directives("kv.retain", {"priority": 5, "duration": 60})
    pin = action("kv.pin")
    found = verdicts(post(tenants, "completions", ann, **envelope(kept, pin)).json())
    assert list(found.values()) == ["accepted", "accepted"]
    before = tenants.assembly.engine.stats().cache
    for type in ("kv.demote", "kv.release", "kv.pin", "kv.evict"):
        assert set(alone(tenants, headers=bob, **envelope(action(type))).values()) == {"refused"}
    after = tenants.assembly.engine.stats().cache
    assert (after.pins, after.retained_bytes) == (before.pins, before.retained_bytes) != (0, 0)


def test_only_a_known_tenant_or_the_operator_pins(tenants: Served) -> None:
    anyone, pin = as_tenant("anyone"), action("kv.pin")
    assert verdicts(post(tenants, "completions", anyone, **envelope(pin)).json()) == {ACTION: "refused"}
    assert alone(tenants, headers=anyone, **envelope(pin)) == {ACTION: "refused"}
    assert alone(tenants, headers=as_tenant("admin"), **envelope(pin)) == {ACTION: "accepted"}
    assert alone(tenants, headers=anyone, **envelope(action("kv.release"))) == {ACTION: "accepted"}
    assert len(tenants.assembly.engine.pins()) == 1  # the operator's pin


def test_actions_change_no_answer(served: Served) -> None:
    sent = [action(type) for type in ("kv.demote", "kv.release", "kv.pin", "kv.prefetch", "kv.deref")]
    plain = served.complete(LONG, max_tokens=8, **GREEDY).json()["choices"]
    for one in sent:
        assert served.complete(LONG, max_tokens=8, **GREEDY, **envelope(one)).json()["choices"] == plain
        alone(served, **envelope(one))
        assert served.complete(LONG, max_tokens=8, **GREEDY).json()["choices"] == plain
    alone(served, **envelope(action("kv.release")))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": LONG, "kv_hints": []}, "kv_hints"),
        ({"prompt": LONG, **envelope(*[action("kv.demote")] * (MAX_ACTIONS + 1))}, "kv_hints.actions"),
        ({"prompt": LONG, **envelope(directives("kv.demote", {"end": -1}))}, None),
        ({"prompt": ["a", "b"], **envelope(action("kv.demote"))}, "prompt"),
        ({"api": "completions", "body": {"prompt": LONG}, "kv_hints": 5}, "kv_hints"),
        ({"api": "none", "body": {"prompt": LONG}}, "api"),
    ],
)
def test_a_wrong_body_is_an_error_with_its_path(served: Served, body: Json, param: str | None) -> None:
    response = served.client.post("/v1/cache/hints", json=body)
    assert response.status_code == 400
    if param is not None:
        assert_error(response, 400, response.json()["error"]["code"], param=param)
