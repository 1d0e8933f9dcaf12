"""API keys, tenants and the admin: the routes that each may use."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rootstock.config import MAX_SALT_LENGTH, ServerConfig
from rootstock.errors import InvalidOption
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.prompts.tenant_salt import is_chosen_by_client, salt_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STATS, CLEAR, EXPLAIN = "/v1/cache/stats", "/v1/cache/clear", "/v1/cache/explain"
TENANTS = {"key-of-a": "a", "second-key-of-a": "a", "key-of-b": "b"}


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def salted(value: str) -> dict[str, str]:
    return {"X-Cache-Salt": value}


def cached(
    served: Any, headers: dict[str, str] | None = None, prompt: str = "once upon a time", **more: Any
) -> int:
    body = {"prompt": prompt, "max_tokens": 0, **more}
    answer = served.client.post(COMPLETIONS, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def code(answer: Any) -> str | None:
    return None if answer.status_code == 200 else answer.json()["error"]["code"]


# ---- explain


@pytest.mark.behaviour(30)
def test_explain_does_not_reveal_other_clients_texts(serve: Any) -> None:
    """Appending `divergence.cached` and asking again would recover this password, one token a call."""
    secret = "My password is correct-horse-battery-staple"
    with serve() as served:
        served.complete(secret, max_tokens=0)
        known = list(b"My password is ")
        for wrong in (0, ord("x"), ByteTokenizer.END):
            told = served.client.post(EXPLAIN, json={"prompt": [*known, wrong]})
            assert told.json()["divergence"]["cached"] is None
            assert told.json()["divergence"]["asked"]["token"] == wrong
            assert told.json()["matched_tokens"] == len(known)
            assert "'c'" not in told.text
        ended, goes_on = (served.client.post(EXPLAIN, json={"prompt": prompt}) for prompt in (secret, known))
        assert ended.json()["cap"] == goes_on.json()["cap"] == "last_token"


# ---- salts


def test_each_pair_of_tenant_and_salt_has_a_hash_of_its_own() -> None:
    parts = ["", "a", "b", "ab", "a\0b", "\0", "1:a", "a" * MAX_SALT_LENGTH, "ä"]
    salts = {(tenant, salt): salt_of(tenant, salt) for tenant, salt in itertools.product(parts, parts)}
    assert salts["", ""] == salt_of("", None) == ""
    assert len(set(salts.values())) == len(salts)
    assert {len(salt) for salt in salts.values()} == {0, 64, 71}
    for (_, of_client), salt in salts.items():
        assert is_chosen_by_client(salt) == bool(of_client)


def test_a_too_long_salt_is_refused_with_the_limit(serve: Any) -> None:
    with serve() as served:
        long = "s" * (MAX_SALT_LENGTH + 1)
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
            (EXPLAIN, {"prompt": "x"}),
            (CLEAR, {}),
        ):
            for refused, param in (
                (served.client.post(path, json=body | {"cache_salt": long}), "cache_salt"),
                (served.client.post(path, json=body, headers=salted(long)), "X-Cache-Salt"),
            ):
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == param
                assert f"at most {MAX_SALT_LENGTH:,} characters" in refused.json()["error"]["message"]
        cached(served, cache_salt=long[1:])
        cached(served, salted(long[1:]))
        roots = served.assembly.engine._cache.tree.roots
        assert {len(namespace.salt) for namespace in roots} == {64, 71}


def test_a_repeated_salt_header_is_refused(serve: Any) -> None:
    """A proxy that adds its header to the client's would leave the choice to the client."""
    with serve() as served:
        twice = [("X-Cache-Salt", "mine"), ("X-Cache-Salt", "theirs")]
        refused = served.client.post(COMPLETIONS, json={"prompt": "x"}, headers=twice)
        assert refused.status_code == 400
        assert "a proxy must replace" in refused.json()["error"]["message"]


# ---- keys of tenants


def test_the_tenant_of_a_key_overrides_the_header(serve: Any) -> None:
    with serve(server=ServerConfig(tenant_keys=TENANTS)) as served:
        hit = len("once upon a time") - 1
        assert cached(served, key("key-of-a")) == 0
        assert cached(served, key("second-key-of-a")) == hit
        assert cached(served, key("key-of-b")) == 0
        assert cached(served, key("key-of-b") | salted("a"), prompt="once upon a time, again") == hit + 1
        assert cached(served, key("key-of-a") | salted("b")) == hit
        assert cached(served, key("key-of-a"), cache_salt="b") == 0
        for wrong in ({}, key("key-of-c"), {"Authorization": "Bearer"}, {"Authorization": "Basic key-of-a"}):
            assert served.client.get("/v1/models", headers=wrong).status_code == 401


def test_a_key_without_a_tenant_may_name_any(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="proxy", tenant_keys=TENANTS)) as served:
        cached(served, key("key-of-a"))
        assert cached(served, key("proxy") | salted("a")) == len("once upon a time") - 1
        assert cached(served, key("proxy")) == 0


# ---- stats, clear, explain, metrics, health


@pytest.mark.parametrize("api_key", [None, "client"])
def test_stats_explain_and_clearing_everything_require_the_admin_key(serve: Any, api_key: str | None) -> None:
    config = ServerConfig(api_key=api_key, admin_key="admin")
    with serve(server=config) as served:
        client, admin = {} if api_key is None else key(api_key), key("admin")
        cached(served, client)
        for headers in (client, client | salted("a")):
            assert code(served.client.get(STATS, headers=headers)) == "admin_only"
            assert code(served.client.post(EXPLAIN, json={"prompt": "once"}, headers=headers)) == "admin_only"
        refused = served.client.post(CLEAR, headers=client)
        assert (refused.status_code, code(refused)) == (403, "admin_only")
        assert "admin key" in refused.json()["error"]["message"]
        assert served.client.get(STATS, headers=admin).json()["cache"]["cached_tokens"] == 16
        assert (
            served.client.post(EXPLAIN, json={"prompt": "once"}, headers=admin).json()["matched_tokens"] == 3
        )
        assert cached(served, admin) == 15, "the admin may also send requests"
        assert set(served.client.get("/health", headers=client).json()) == {"status", "alive", "detail"}
        assert served.client.get("/health", headers=admin).json()["running"] == 0
        assert served.client.get("/metrics", headers=client).status_code == 200
        assert served.client.post(CLEAR, headers=admin).json()["blocks"] == 2
        assert cached(served, client) == 0


@pytest.mark.behaviour(9)
def test_a_tenant_clears_its_own_salt_only(serve: Any) -> None:
    with serve(server=ServerConfig(tenant_keys=TENANTS, admin_key="admin")) as served:
        a, b, hit = key("key-of-a"), key("key-of-b"), len("once upon a time") - 1
        for headers in (a, b):
            cached(served, headers)
            cached(served, headers, cache_salt="inner")
        cleared = served.client.post(CLEAR, headers=a | salted("b")).json()
        [model] = cleared.pop("models")
        assert cleared == {"blocks": 2, "bytes": cleared["bytes"], "later": False}
        assert model == {"model": "fake", "state": "cleared", **cleared}
        assert cached(served, b) == cached(served, b, cache_salt="inner") == hit
        assert cached(served, a) == 0
        assert cached(served, a, cache_salt="inner") == hit, "it is a namespace of its own"
        served.client.post(CLEAR, json={"cache_salt": "inner"}, headers=a)
        assert cached(served, a, cache_salt="inner") == 0
        assert cached(served, b, cache_salt="inner") == hit
        served.client.post(CLEAR, headers=key("admin") | salted("b"))
        assert (cached(served, a), cached(served, b)) == (hit, 0)
        served.client.post(CLEAR, headers=key("admin"))
        assert cached(served, a) == 0


def test_a_sender_that_names_a_tenant_gets_no_information_about_all(serve: Any) -> None:
    for config, tenant, operator in (
        (ServerConfig(), salted("a"), {}),
        (ServerConfig(api_key="k"), key("k") | salted("a"), key("k")),
        (ServerConfig(tenant_keys=TENANTS, api_key="k"), key("key-of-a"), key("k")),
    ):
        with serve(server=config) as served:
            for path in (STATS, "/metrics"):
                refused = served.client.get(path, headers=tenant)
                assert code(refused) == "admin_only"
                assert "--admin-key" in refused.json()["error"]["message"]
                assert served.client.get(path, headers=operator).status_code == 200
            assert "running" not in served.client.get("/health", headers=tenant).json()
            assert "running" in served.client.get("/health", headers=operator).json()
            assert served.client.post(EXPLAIN, json={"prompt": "x"}, headers=tenant).status_code == 200
            cached(served, operator)
            assert served.client.post(CLEAR, headers=tenant).json()["blocks"] == 0
            assert served.client.post(CLEAR, headers=operator).json()["blocks"] == 2


# ---- options


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": ""},
        {"admin_key": "with space"},
        {"admin_key": "ü"},
        {"api_key": "same", "admin_key": "same"},
        {"tenant_keys": {"same": "a"}, "admin_key": "same"},
        {"tenant_keys": {"same": "a"}, "api_key": "same"},
        {"explain": "some"},
    ],
)
def test_invalid_keys_are_refused_at_the_start_and_not_shown(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption) as refused:
        ServerConfig(**options)
    assert "same" not in refused.value.message.replace("the same", "")
    assert "with space" not in refused.value.message
    assert "secret-key" not in repr(ServerConfig(api_key="secret-key", tenant_keys={"secret-key-2": "a"}))
