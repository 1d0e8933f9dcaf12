"""Sessions of browsers over HTTP, and the part of the data that each of them sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rootstock.config import EngineConfig, ServerConfig
from rootstock.server.sessions import FREE_FAILURES
from server.conftest import Served, assert_error, served_by_oracle, user
from server.dashboard.browser import Browser
from server.held import Held
from waiting import wait_until

ADMIN, RED, BLUE = "operators-key", "key-of-red", "key-of-blue"
SERVER = ServerConfig(
    admin_key=ADMIN, api_key="key-of-none", tenant_keys={RED: "red", BLUE: "blue"}, aliases=()
)
LONG = "A secret of the tenant, and a long one. " * 8


@pytest.fixture
def served() -> Iterator[Served]:
    with served_by_oracle(server=SERVER) as one:
        yield one


def ask(served: Served, key: str, text: str) -> None:
    body = {"messages": user(text), "max_tokens": 4}
    answer = served.client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text


def test_a_key_opens_a_session_that_only_a_cookie_names(served: Served) -> None:
    browser = Browser(served.url)
    assert browser.get("/dashboard/session").json()["login"] is True
    response = browser.log_in(ADMIN)
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie  # the page came over HTTP
    told = browser.get("/dashboard/session").json()
    assert (told["login"], told["sees"], told["csrf"]) == (False, "all", browser.csrf)
    assert ADMIN not in response.text + cookie
    assert browser.get("/v1/cache/stats").status_code == 200


def test_the_cookie_of_a_page_over_https_is_secure(served: Served) -> None:
    host = served.url.removeprefix("http://")
    headers = {"x-api-key": ADMIN, "origin": f"https://{host}", "sec-fetch-site": "same-origin"}
    response = served.client.post("/dashboard/login", headers=headers)
    assert "secure" in response.headers["set-cookie"].lower()


def test_a_change_needs_the_sessions_token(served: Served) -> None:
    browser = Browser(served.url)
    browser.log_in(ADMIN)
    for path in (
        "/v1/cache/clear",
        "/dashboard/logout",
        "/v1/chat/completions",
        "/dashboard/requests/x/stop",
    ):
        for token in ("", "wrong", browser.csrf + "x"):
            refused = browser.client.post(path, json={}, headers={"X-CSRF-Token": token})
            assert_error(refused, 403, "csrf_token_missing")
    assert browser.post("/v1/cache/clear", {}).status_code == 200


def test_a_page_of_another_site_cannot_use_the_session(served: Served) -> None:
    browser = Browser(served.url)
    browser.log_in(ADMIN)
    headers = {"origin": "https://evil.example", "X-CSRF-Token": browser.csrf}
    assert_error(browser.client.post("/v1/cache/clear", json={}, headers=headers), 403, "origin_not_allowed")


def test_logging_out_ends_the_session(served: Served) -> None:
    browser = Browser(served.url)
    browser.log_in(RED)
    cookies = dict(browser.client.cookies)
    assert browser.post("/dashboard/logout").status_code == 200
    browser.client.cookies.update(cookies)
    assert browser.get("/dashboard/tree").status_code == 401
    assert browser.get("/dashboard/session").json()["login"] is True


def test_wrong_keys_are_slowed_down(served: Served) -> None:
    browser = Browser(served.url)
    for _ in range(FREE_FAILURES):
        assert browser.log_in("wrong").status_code == 401
    assert_error(browser.log_in("wrong"), 429, "too_many_logins", "seconds")
    assert_error(browser.log_in(ADMIN), 429, "too_many_logins")
    assert served.client.get("/v1/models", headers={"x-api-key": RED}).status_code == 200


@pytest.mark.parametrize("path", ["/dashboard/events", "/dashboard/tree", "/dashboard/tree/1"])
def test_data_needs_a_key(served: Served, path: str) -> None:
    assert served.client.get(path).status_code == 401
    assert served.client.get(path, headers={"cookie": "rootstock_session=none"}).status_code == 401


def test_a_tenant_sees_its_own_prefixes_alone(served: Served) -> None:
    ask(served, RED, LONG + "red")
    ask(served, BLUE, LONG + "blue")
    operator, red, none = (Browser(served.url) for _ in range(3))
    operator.log_in(ADMIN)
    red.log_in(RED)
    none.log_in("key-of-none")
    all_head, every = operator.tree()
    head, own = red.tree()
    assert {root["tenant"] for root in all_head["roots"]} == {"red", "blue"}
    assert [root["tenant"] for root in head["roots"]] == ["red"], "the number of others is not told"
    assert {int(root) for root in own["root"]} == {0}
    assert 0 < len(own["number"]) < len(every["number"])
    others = set(every["number"]) - set(own["number"])
    for number in map(int, others):
        assert_error(red.get(f"/dashboard/tree/{number}"), 404, "node_not_found")
        assert_error(red.get(f"/dashboard/tree/{number}/prefix"), 404, "node_not_found")
    for number in map(int, own["number"]):
        assert red.get(f"/dashboard/tree/{number}").json()["tenant"] == "red"
    assert none.get("/dashboard/session").json()["sees"] == "nothing"
    assert none.tree()[1]["number"] == []


def test_a_tenants_feed_tells_nothing_of_others(served: Served) -> None:
    ask(served, BLUE, LONG)
    blue, red, operator = (Browser(served.url) for _ in range(3))
    blue.log_in(BLUE)
    red.log_in(RED)
    operator.log_in(ADMIN)
    seen = blue.sections("requests", "rates", "misses")
    assert len(seen["requests"]) == len(seen["misses"]) == 1
    assert seen["rates"]["windows"]["60"]["requests"] == 1
    assert "pool" not in seen
    hidden = red.sections("requests", "rates", "misses")
    assert not hidden["requests"]
    assert not hidden["misses"]
    assert hidden["rates"]["windows"]["900"]["computed"] == 0
    whole = operator.sections("requests", "rates", "pool")
    assert [request["tenant"] for request in whole["requests"].values()] == ["blue"]
    assert whole["pool"]["budget"] >= whole["pool"]["used"] > 0


def test_a_feed_ends_when_its_key_is_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("leaves red\nstays blue\n")
    with served_by_oracle(server=ServerConfig(api_keys=file)) as served:
        browser = Browser(served.url)
        browser.log_in("leaves")
        with browser.events() as events:
            next(events)
            file.write_text("stays blue\n")
            assert served.client.get("/v1/models", headers={"x-api-key": "stays"}).status_code == 200
            for _ in events:
                pass
        assert browser.get("/dashboard/session").json()["login"] is True


def test_tenants_of_the_file_of_keys_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{key: ops, role: operator}, {key: r, tenant: red}]")
    with served_by_oracle(server=ServerConfig(api_keys=file)) as served:
        ask(served, "r", LONG + "red")
        file.write_text("keys: [{key: ops, role: operator}, {key: r, tenant: red}, {key: n, tenant: new}]")
        ask(served, "n", LONG + "new")
        browser = Browser(served.url)
        browser.log_in("ops")
        assert {root["tenant"] for root in browser.tree()[0]["roots"]} == {"red", "new"}


def test_a_tenant_stops_its_own_requests_alone() -> None:
    held = Held(free_forwards=1)
    with served_by_oracle(EngineConfig(), SERVER, fault=held) as served:
        from threading import Thread

        answers: list[int] = []

        def run() -> None:
            body = {"messages": user(LONG), "max_tokens": 50}
            response = served.client.post("/v1/chat/completions", json=body, headers={"x-api-key": BLUE})
            answers.append(response.status_code)

        thread = Thread(target=run)
        thread.start()
        engine = served.assembly.engine
        wait_until(lambda: bool(engine.requests()))
        (running,) = engine.requests()
        red, blue = Browser(served.url), Browser(served.url)
        red.log_in(RED)
        blue.log_in(BLUE)
        refused = red.post(f"/dashboard/requests/{running.id}/stop")
        assert_error(refused, 404, "request_not_found")
        assert red.post(f"/dashboard/requests/{'x' * 3000}/stop").status_code == 404
        assert blue.post(f"/dashboard/requests/{running.id}/stop").json() == {"stopped": running.id}
        held.let_go()
        thread.join()
        assert answers == [503]
        assert blue.sections("requests")["requests"][running.id]["outcome"] == "aborted"
        served.settled()
