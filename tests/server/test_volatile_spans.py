"""`GET /v1/cache/volatile`: the spans of the sender's tenant, and their texts for those who may see them."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock.config import ServerConfig

VOLATILE = "/v1/cache/volatile"
HEAD = "version=1.2.197."
BODY = " You are a helpful assistant of a small library. The reader asks, the tool answers."


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def ask(served: Any, value: str, headers: dict[str, str] | None = None) -> None:
    body = {"prompt": HEAD + value + BODY, "max_tokens": 0}
    assert served.client.post("/v1/completions", json=body, headers=headers).status_code == 200


def spans(served: Any, headers: dict[str, str] | None = None, **query: str) -> Any:
    answer = served.client.get(VOLATILE, headers=headers, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["spans"]


def test_a_span_is_listed_with_its_place_its_cost_and_advice(serve: Any) -> None:
    with serve(server=ServerConfig(explain="all")) as served:
        assert spans(served) == []
        for value in ("3a3", "7c", "912"):
            ask(served, value)
        [span] = spans(served)
        assert span["position"] == len(HEAD)
        assert span["count"] == 2
        assert span["recomputed_tokens"] == 2 * len(BODY)
        assert span["examples"] == ["3a3", "7c", "912"]
        assert span["before"] == HEAD
        assert span["after"] == BODY[:32]
        assert "leave it out" in span["hint"]
        assert served.metric("rootstock_volatile_prompt_tokens_total") == 2 * len(BODY)
        served.client.post("/v1/cache/clear")
        assert spans(served) == []


def test_texts_of_a_salt_without_an_owner_are_withheld(serve: Any) -> None:
    with serve() as served:
        for value in ("secret one", "secret two"):
            ask(served, value)
        answer = served.client.get(VOLATILE)
        assert "--explain all" in answer.json()["texts"]
        [span] = answer.json()["spans"]
        assert span["examples"] is span["before"] is span["after"] is None
        assert "secret" not in answer.text


@pytest.mark.behaviour(9)
def test_a_tenant_sees_its_own_spans_only(serve: Any) -> None:
    config = ServerConfig(tenant_keys={"key-of-a": "a", "key-of-b": "b"}, admin_key="admin")
    with serve(server=config) as served:
        for value in ("one", "two"):
            ask(served, value, key("key-of-a"))
        assert spans(served, key("key-of-b")) == []
        [span] = spans(served, key("key-of-a"))
        assert span["examples"] == ["one", "two"]
        assert spans(served, key("key-of-a"), cache_salt="inner") == []
        [of_all] = spans(served, key("admin"))
        assert of_all["recomputed_tokens"] == span["recomputed_tokens"]
        assert of_all["examples"] is None, "it is another tenant's text"
        served.client.post("/v1/cache/clear", headers=key("key-of-b"))
        assert len(spans(served, key("key-of-a"))) == 1
        served.client.post("/v1/cache/clear", headers=key("key-of-a"))
        assert spans(served, key("key-of-a")) == []


def test_spans_of_all_tenants_require_the_admin_key(serve: Any) -> None:
    with serve(server=ServerConfig(admin_key="admin")) as served:
        assert served.client.get(VOLATILE).status_code == 403
        assert served.client.get(VOLATILE, headers=key("admin")).status_code == 200
