"""The file of `--api-keys`: its two forms, its errors, and its reload while the server runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import MAX_SALT_LENGTH, EngineConfig, ServerConfig
from rootstock.errors import InvalidOption
from rootstock.server.access.rules import KeyRule, Role, TenantLimits, digest_of, read_rules
from server.test_access import CLEAR, COMPLETIONS, EXPLAIN, STATS, cached, code, key, salted

HASHED = hashlib.sha256(b"hashed-key").hexdigest()
RULES = f"""
keys:
  - {{key: key-a, tenant: a}}
  - {{sha256: "{HASHED}", tenant: a}}
  - {{key: key-b, tenant: b}}
  - {{key: ops, role: operator}}
  - {{key: scraper, role: metrics}}
tenants:
  a: {{requests_per_minute: 2, models: [fake, other]}}
default: {{max_concurrency: 3, retained_bytes: 1MiB}}
"""


def test_a_file_of_lines_names_the_line_of_an_error(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the first tenant\nkey-1 a\n\nkey-2\tb\nkey-3 a\n")
    assert read_rules(file).keys == {
        digest_of(f"key-{i}"): KeyRule(t) for i, t in ((1, "a"), (2, "b"), (3, "a"))
    }
    for wrong, told in (
        ("key-1 a\nkey-1 b\n", "line 2"),
        ("key-1\n", "line 1"),
        ("key-1 a b\n", "line 1"),
        (f"key-1 {'a' * (MAX_SALT_LENGTH + 1)}\n", "line 1"),
        ("kéy a\n", "line 1"),
        ("# none\n", "100,000 keys"),
    ):
        file.write_text(wrong)
        with pytest.raises(InvalidOption, match=told) as refused:
            read_rules(file)
        assert "key-1" not in refused.value.message
    with pytest.raises(InvalidOption, match="can be read"):
        read_rules(tmp_path / "absent")


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_file_has_keys_roles_and_limits(tmp_path: Path, form: str) -> None:
    file = tmp_path / "keys"
    text = RULES
    if form == "json":
        import yaml

        text = json.dumps(yaml.safe_load(RULES))
    file.write_text(text)
    rules = read_rules(file)
    assert rules.keys == {
        digest_of("key-a"): KeyRule("a"),
        digest_of("hashed-key"): KeyRule("a"),
        digest_of("key-b"): KeyRule("b"),
        digest_of("ops"): KeyRule("", Role.OPERATOR),
        digest_of("scraper"): KeyRule("", Role.METRICS),
    }
    assert rules.tenants["a"] == TenantLimits(2, models=frozenset({"fake", "other"}))
    assert rules.tenants.get("b", rules.default) == TenantLimits(max_concurrency=3, retained_bytes=2**20)
    assert "key-a" not in repr(rules)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("keys: []", "keys', but must be a list"),
        ("keys: [{key: secret}]", r"keys\[0\].tenant"),
        ("keys: [{key: secret, sha256: x, tenant: a}]", r"keys\[0\]"),
        ("keys: [{sha256: secret, tenant: a}]", "64 hexadecimal digits"),
        ("keys: [{key: secret, tenant: 7}]", "a string"),
        ("keys: [{key: 7, tenant: a}]", r"keys\[0\].key"),
        ("keys: [{key: secret, tenant: a, role: root}]", r"user \| operator \| metrics"),
        ("keys: [{key: secret, tenant: a, role: [root]}]", r"user \| operator \| metrics"),
        ("keys: [{key: secret, tenant: a}, {key: secret, tenant: b}]", "nowhere else"),
        ("keys: [{key: x, tenant: a, secret: 1}]", "no other fields"),
        ("keys: [{key: x, tenant: a}]\ntenants: [a]", "mapping of tenants"),
        ("keys: [{key: x, tenant: a}]\ntenants: {a: {requests_per_minute: 0}}", "from 1"),
        ("keys: [{key: x, tenant: a}]\ntenants: {a: {requests_per_minute: true}}", "from 1"),
        ("keys: [{key: x, tenant: a}]\ntenants: {a: {tokens_per_minute: 1.5}}", "whole number"),
        ("keys: [{key: x, tenant: a}]\ntenants: {a: {retained_bytes: many}}", "512MiB"),
        ("keys: [{key: x, tenant: a}]\ntenants: {a: {models: gpt}}", "a list"),
        ("keys: [{key: secret, tenant: a]", "line 1', but must be valid YAML"),
        ('{"keys": [{"key": "secret",}]}', "line 1', but must be valid JSON"),
    ],
)
def test_a_wrong_value_is_named_by_its_place_and_not_shown(tmp_path: Path, wrong: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(wrong)
    with pytest.raises(InvalidOption, match=told) as refused:
        read_rules(file)
    assert "secret" not in refused.value.message


def test_roles_decide_what_a_key_may_do(keyed: Any) -> None:
    with keyed(RULES) as served:

        def asked(path: str, value: str) -> str | None:
            return code(served.client.get(path, headers=key(value)))

        assert [asked(STATS, each) for each in ("ops", "key-b", "scraper")] == [
            None,
            "admin_only",
            "key_not_allowed",
        ]
        assert [asked("/metrics", each) for each in ("ops", "key-b", "scraper")] == [None, "admin_only", None]
        assert asked("/v1/models", "scraper") == "key_not_allowed"
        assert code(served.client.get("/v1/models")) == "invalid_api_key"
        assert served.client.get("/health").status_code == 200
        explain = {"json": {"prompt": "x"}}
        assert code(served.client.post(EXPLAIN, headers=key("ops"), **explain)) is None
        assert code(served.client.post(EXPLAIN, headers=key("key-b"), **explain)) == "admin_only"
        hit = len("once upon a time") - 1
        assert [cached(served, key(each)) for each in ("key-a", "hashed-key", "key-b")] == [0, hit, 0]
        assert cached(served, key("ops") | salted("b")) == hit


def test_a_changed_file_is_used_at_once_and_a_broken_one_is_not(
    keyed: Any, tmp_path: Path, caplog: Any
) -> None:
    file = tmp_path / "keys"
    with keyed("old a\nstays b\n") as served:

        def asked(value: str) -> str | None:
            return code(served.client.get("/v1/models", headers=key(value)))

        assert [asked("old"), asked("new")] == [None, "invalid_api_key"]
        file.write_text("new a\nstays b\n# longer\n")
        assert [asked("old"), asked("new"), asked("stays")] == ["invalid_api_key", None, None]
        for broken in ("new a\nnew b\n", "keys: {", ""):
            file.write_text(broken)
            assert [asked("old"), asked("new"), asked("stays")] == ["invalid_api_key", None, None]
        file.unlink()
        assert [asked("new"), asked("stays")] == [None, None]
        file.write_text("keys: [{key: last, tenant: a}]")
        assert [asked("new"), asked("last")] == ["invalid_api_key", None]
    told = [record.message for record in caplog.records if "file of keys" in record.message]
    assert sum("The earlier keys stay" in message for message in told) == 4
    assert not any(secret in message for message in told for secret in ("old", "new ", "stays b", "last"))


def test_a_key_is_in_one_place_only(tmp_path: Path, serve: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("same a\n")
    for option in ("api_key", "admin_key"):
        with (
            pytest.raises(InvalidOption) as refused,
            serve(server=ServerConfig(api_keys=file, **{option: "same"})),
        ):
            pass
        assert "same" not in refused.value.message
    assert COMPLETIONS.startswith("/v1/")


def test_a_tenant_uses_the_models_of_its_list_only(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{key: k, tenant: a}]\ntenants: {a: {models: [small]}}")
    with serve(server=ServerConfig(api_keys=file, aliases=("small", "large"))) as served:

        def asked(path: str, **body: Any) -> Any:
            return served.client.post(path, json=body, headers=key("k"))

        text: Any = {"prompt": "x", "max_tokens": 1}
        assert code(asked(COMPLETIONS, model="small", **text)) is None
        assert code(asked(COMPLETIONS, model="large", **text)) == "model_not_allowed"
        refused = asked(COMPLETIONS, **text)  # the default model
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        refused = asked("/v1/messages", model="large", **messages)
        assert refused.json()["error"]["type"] == "permission_error"
        assert asked("/v1/messages", model="small", **messages).status_code == 200
        assert code(asked(EXPLAIN, model="large", prompt="x")) == "model_not_allowed"
        assert code(asked(CLEAR, model="large")) == "model_not_allowed"
        assert code(asked(COMPLETIONS, model=["small"], **text)) == "invalid_parameter"
        prompts = [{"model": "large", "prompt": "x"}]
        assert code(asked("/v1/cache/warm", model="small", prompts=prompts)) == "model_not_allowed"
        assert code(asked("/v1/cache/pin", model="large", prompt="x")) == "model_not_allowed"
        assert asked("/v1/messages/count_tokens", model="large", **messages).status_code == 403
        listed = served.client.get("/v1/models", headers=key("k")).json()
        assert [model["id"] for model in listed["data"]] == ["small"]
        assert (listed["first_id"], listed["last_id"]) == ("small", "small")
        for name in ("large", "absent"):
            found = served.client.get(f"/v1/models/{name}", headers=key("k"))
            assert code(found) == "model_not_allowed", "a refusal does not tell which models exist"


def test_a_tenant_without_any_model_has_an_empty_list(keyed: Any) -> None:
    with keyed("keys: [{key: k, tenant: a}]\ntenants: {a: {models: []}}") as served:
        listed = served.client.get("/v1/models", headers=key("k")).json()
        assert (listed["data"], listed["first_id"]) == ([], None)


def test_warming_takes_the_tokens_that_it_computes(keyed: Any) -> None:
    with keyed(
        "keys: [{key: k, tenant: a}]\ntenants: {a: {tokens_per_minute: 100}}", EngineConfig(idle_work=True)
    ) as served:

        def warmed(**body: Any) -> Any:
            return served.client.post("/v1/cache/warm", json=body, headers=key("k"))

        assert code(warmed(prompt="x" * 90)) is None
        assert code(warmed(prompt="y" * 90)) == "rate_limit_exceeded"
        states = [one["state"] for one in warmed(prompts=[{"prompt": "z" * 90}]).json()["prompts"]]
        assert states == ["refused"]


def test_refusals_by_the_guard_are_counted(keyed: Any) -> None:
    with keyed(
        "keys: [{key: k, tenant: a}, {key: scraper, role: metrics}]\ndefault: {requests_per_minute: 1}"
    ) as served:
        for _ in range(3):
            served.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=key("k"))
        assert code(served.client.get("/v1/models")) == "invalid_api_key"
        served.client.headers.update(key("scraper"))
        assert served.metric("rootstock_errors_total", route="none", code="rate_limit_exceeded") == 2
        assert served.metric("rootstock_errors_total", route="none", code="invalid_api_key") == 1


def test_a_key_for_metrics_sees_tenants_there_and_is_unknown_elsewhere(keyed: Any) -> None:
    with keyed("keys: [{key: k, tenant: a}, {key: scraper, role: metrics}]") as served:
        served.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=key("k"))
        assert 'tenant="a"' in served.client.get("/metrics", headers=key("scraper")).text
        assert served.client.get("/dashboard/session", headers=key("scraper")).json()["login"] is True
        assert "running" not in served.client.get("/health", headers=key("scraper")).json()


def test_retained_bytes_reach_the_cache_and_change_with_the_file(keyed: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with keyed(RULES) as served:
        engine = served.assembly.engine

        def limits() -> list[int]:
            found = engine.call(lambda: engine._cache._retainer.limits)
            return [found.of(tenant, 2**70) for tenant in ("a", "b")]

        assert limits() == [2**63, 2**20], "a tenant that is named has no default"
        file.write_text("keys: [{key: k, tenant: a}]\ntenants: {a: {retained_bytes: 5}}")
        assert served.client.get("/v1/models", headers=key("k")).status_code == 200
        assert limits() == [5, 2**70]
