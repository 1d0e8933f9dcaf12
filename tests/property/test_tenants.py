"""No token, text or count of one tenant is in an answer to the other, on any route, with and without keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from property.tenants import (
    FAMILIES,
    NOT_COMPARED,
    OTHER_BODIES,
    REFUSED_BY_OLLAMA,
    ROUTES,
    SETTINGS,
    STEPS,
    Ask,
    Name,
    Setting,
    Twins,
    routes_of,
    twins,
)

KINDS = [(setting, kind) for setting in SETTINGS for kind in ("full", "hybrid")]


@pytest.fixture(params=KINDS, ids=lambda of: f"{of[0].name}, {of[1]}", scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Twins]:
    setting, kind = request.param
    with twins(setting, FAMILIES[kind]) as both:
        yield both


@pytest.mark.behaviour(9)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_answers_to_a_tenant_do_not_depend_on_the_other(pair: Twins, steps: list[tuple[Name, Ask]]) -> None:
    pair.play(steps)


@pytest.mark.behaviour(9)
def test_no_route_depends_on_the_requests_of_the_other_tenant(pair: Twins) -> None:
    """Asks each route, which the examples may leave out, after the other tenant has used all of them."""
    prompt = "my password is correct horse"
    said = {"max_tokens": 3, "temperature": 0}
    messages = [{"role": "user", "content": prompt}]
    compared = {"prompt_cache_options": {"comparison_response_id": "unknown"}}
    demotion = {"action_id": "a", "action_type": "kv.demote", "action_version": "1.0", "payload": {}}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [demotion]}
    asks = [
        Ask("POST", "/v1/completions", body={"prompt": prompt, **said}),
        Ask("POST", "/v1/chat/completions", body={"messages": messages, **said, **compared}),
        Ask("POST", "/v1/messages", body={"messages": messages, **said, "diagnostics": {}}),
        Ask("POST", "/v1/messages/count_tokens", body={"messages": messages}),
        Ask(
            "POST",
            "/v1/responses",
            body={"input": prompt, "max_output_tokens": 3, "temperature": 0, **compared},
        ),
        Ask("POST", "/v1/responses/input_tokens", body={"input": prompt}),
        Ask("POST", "/v1/cache/explain", body={"prompt": prompt}),
        Ask("POST", "/v1/cache/explain/completions", body={"prompt": prompt}),
        Ask("POST", "/v1/cache/explain/chat/completions", body={"messages": messages}),
        Ask("POST", "/v1/cache/explain/messages", body={"messages": messages}),
        Ask("POST", "/v1/cache/explain/responses", body={"input": prompt}),
        Ask("POST", "/v1/cache/pin", body={"prompt": prompt}),
        Ask("POST", "/v1/cache/hints", body={"prompt": prompt, "kv_hints": envelope}),
        Ask("POST", "/v1/cache/pin/completions", body={"prompt": prompt}),
        Ask("POST", "/v1/cache/pin/chat/completions", body={"messages": messages}),
        Ask("POST", "/v1/cache/pin/messages", body={"messages": messages}),
        Ask("POST", "/v1/cache/pin/responses", body={"input": prompt}),
        Ask(
            "POST", "/api/chat", body={"messages": messages, "options": {"num_predict": 3, "temperature": 0}}
        ),
        Ask(
            "POST", "/api/generate", body={"prompt": prompt, "options": {"num_predict": 3, "temperature": 0}}
        ),
        Ask("POST", "/api/embed", body={"input": prompt}),
        Ask("POST", "/api/embeddings", body={"prompt": prompt}),
        *(Ask("POST", f"/api/{name}", body={"model": "fake"}) for name in ("show", *REFUSED_BY_OLLAMA)),
        Ask("POST", "/v1/cache/release", body={"id": "pin-unknown"}),
        *(
            Ask(method, route, route.replace("{name:path}", "fake").replace("{id}", "resp_0"), body)
            for method, route in sorted(ROUTES)
            if method != "POST" or "{" in route
            for body in [{} if method == "POST" else None]
        ),
        *(
            Ask("POST", f"/v1/cache/{name}{path}", body=body)
            for name in ("warm", "pin")
            for path, body in (
                ("", {"prompt": prompt}),
                ("/completions", {"prompt": prompt}),
                ("/chat/completions", {"messages": messages}),
                ("/messages", {"messages": messages}),
                ("/responses", {"input": prompt}),
            )
        ),
        *(Ask("POST", route, body=body) for route, body in OTHER_BODIES.items()),
        Ask("POST", "/v1/embeddings", body={"input": prompt}),
        *(Ask("POST", f"{prefix}/tokenize", body={"prompt": prompt}) for prefix in ("", "/v1")),
        *(Ask("POST", f"{prefix}/detokenize", body={"tokens": [1, 2]}) for prefix in ("", "/v1")),
        *(Ask("POST", f"/dashboard/models/{name}", body={"model": "fake"}) for name in ("load", "unload")),
        Ask("POST", "/ping"),
        Ask("POST", "/dashboard/login"),
        Ask("POST", "/dashboard/logout"),
        Ask("GET", "/v1/cache/pins"),
        Ask("GET", "/v1/cache/sessions"),
        Ask("POST", "/v1/cache/clear", body={}),
    ]
    assert {(ask.method, ask.route) for ask in asks} == set(ROUTES)
    pair.compared, pair.routes = 0, set()
    before = [("B", asks[0])] * 4  # a hybrid resumes there from the third on
    pair.play([*before, *(("A", ask) for ask in asks), *(("B", ask) for ask in asks)])
    told = {(method, route) for method, route in ROUTES if route not in pair.both.setting.totals}
    assert pair.routes == told
    assert pair.cached_tokens > 0


@pytest.mark.behaviour(9)
def test_the_stored_responses_of_the_other_tenant_are_out_of_reach(pair: Twins) -> None:
    body = {"input": "my password is correct horse", "max_output_tokens": 3, "temperature": 0}
    make = Ask("POST", "/v1/responses", body=body)
    of_stored = [
        Ask(method, route, body={} if method == "POST" else None, refers="other")
        for method, route in sorted(ROUTES)
        if route.startswith("/v1/responses/{id}")
    ]
    asks = [
        *of_stored,
        *(
            Ask("POST", route, body=body, refers="other")
            for _, route in sorted(ROUTES)
            if route in ("/v1/responses", "/v1/responses/input_tokens")
        ),
    ]
    assert len(asks) == 6
    pair.play([("A", make), *(("B", ask) for ask in asks)])
    if pair.both.setting.headers["A"] != pair.both.setting.headers["B"]:
        assert pair.both.ask("A", Ask("GET", "/v1/responses/{id}", refers="own"), 1).status == 200


def test_every_route_of_the_application_is_asked(pair: Twins) -> None:
    """Fails for a new route until `ROUTES` has requests to it, or `NOT_COMPARED` a reason."""
    assert routes_of(pair.both.app) == set(ROUTES) | set(NOT_COMPARED)
    documented = {
        (method.upper(), path)
        for path, methods in pair.both.app.openapi()["paths"].items()
        for method in methods
    }
    assert documented <= {(method, route.replace(":path", "")) for method, route in routes_of(pair.both.app)}
    assert all(NOT_COMPARED.values())


def test_the_comparison_notices_tenants_that_share_a_namespace() -> None:
    """Gives both clients one salt: answers that must be equal between tenants differ."""
    shared = Setting("one salt for both", SETTINGS[0].server, {"A": {}, "B": {}})
    ask = Ask("POST", "/v1/completions", body={"prompt": "my password is", "max_tokens": 1, "temperature": 0})
    with twins(shared, FAMILIES["full"]) as both:
        for seen in (
            ask,
            Ask("GET", "/v1/cache/stats"),
            Ask("POST", "/v1/cache/explain", body={"prompt": "my"}),
        ):
            with pytest.raises(AssertionError, match="tells B of A"):
                both.play([("A", ask), ("B", seen)])
