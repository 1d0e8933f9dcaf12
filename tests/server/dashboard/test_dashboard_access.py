"""Sessions of browsers over HTTP, and the part of the data that each of them sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from rootstock.config import EngineConfig, ServerConfig
from rootstock.engine.activity import LiveRequest
from rootstock.server.http.drain import Drain
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
        red.assert_gone(f"/dashboard/tree/{number}")
        assert red.post(f"/dashboard/tree/{number}/pin").json()["gone"] is True
        assert red.get(f"/dashboard/tree/{number}/prefix").status_code == 404, "there is no such route"
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


def ask_and_wait(served: Served) -> tuple[LiveRequest, Callable[[], int]]:
    """Sends a request of the blue tenant. Returns it when the engine has it, and a wait for its HTTP status."""
    statuses: list[int] = []

    def run() -> None:
        body = {"messages": user(LONG), "max_tokens": 50}
        answer = served.client.post("/v1/chat/completions", json=body, headers={"x-api-key": BLUE})
        statuses.append(answer.status_code)

    def answered() -> int:
        thread.join()
        (status,) = statuses
        return status

    thread = Thread(target=run)
    thread.start()
    engine = served.assembly.engine
    wait_until(lambda: bool(engine.requests()))
    (running,) = engine.requests()
    return running, answered


def test_a_tenant_stops_its_own_requests_alone() -> None:
    held = Held(free_forwards=1)
    with served_by_oracle(EngineConfig(), SERVER, fault=held) as served:
        running, answered = ask_and_wait(served)
        red, blue = Browser(served.url), Browser(served.url)
        red.log_in(RED)
        blue.log_in(BLUE)
        for id in (running.id, "x" * 3000):
            assert red.post(f"/dashboard/requests/{id}/stop").json()["gone"] is True
        assert served.assembly.engine.requests()
        assert blue.post(f"/dashboard/requests/{running.id}/stop").json() == {"stopped": running.id}
        held.let_go()
        assert answered() == 503
        assert blue.sections("requests")["requests"][running.id]["outcome"] == "aborted"
        served.settled()


UNBOUND = {"x-api-key": "key-of-none", "X-Cache-Salt": "red"}


@pytest.mark.parametrize("explain", ["own", "all"])
def test_a_header_that_names_a_tenant_shows_none_of_its_tokens(explain: str) -> None:
    with served_by_oracle(server=replace(SERVER, explain=explain, show_prompts=True)) as served:
        for date in ("10:15", "10:16", "10:17"):
            ask(served, RED, f"{date} {LONG}")
        named, red = Browser(served.url), Browser(served.url)
        named.client.headers.update(UNBOUND)
        red.log_in(RED)
        assert named.get("/dashboard/session").json()["sees"] == "tenant"
        seen, own = named.sections("misses", "volatile"), red.sections("misses", "volatile")
        assert len(seen["misses"]) == len(own["misses"]) > 0
        for miss in seen["misses"].values():
            assert miss["withheld"] is True
            assert miss["before"] == miss["asked"] == miss["others"] == []
            assert miss["volatile"] is None
            told = f"{miss['cached']:,} of {miss['prompt']:,} tokens were found."
            assert miss["message"] == told, "the full message has token ids"
        assert all(miss["asked"] and not miss["withheld"] for miss in own["misses"].values())
        for span in seen["volatile"]:
            assert span["before"] is None
            assert set(span["examples"]) == {None}
        numbers = list(map(int, named.tree()[1]["number"]))
        assert numbers == list(map(int, red.tree()[1]["number"]))
        for number in numbers:
            node = named.get(f"/dashboard/tree/{number}").json()
            assert (node["withheld"], node["head"], node["tail"], node["text"]) == (True, [], [], None)
            assert red.get(f"/dashboard/tree/{number}").json()["head"]


def test_tokens_of_a_named_tenant_are_shown_where_the_server_explains_all() -> None:
    config = ServerConfig(api_key="key-of-none", tenant_keys={RED: "red"}, aliases=(), explain="all")
    for explain in ("own", "all"):
        with served_by_oracle(server=replace(config, explain=explain)) as served:
            ask(served, RED, LONG)
            named = Browser(served.url)
            named.client.headers.update(UNBOUND)
            (miss,) = named.sections("misses")["misses"].values()
            assert bool(miss["asked"]) is (explain == "all")


def test_a_prefix_is_pinned_for_its_tenant_and_released(served: Served) -> None:
    ask(served, RED, LONG)
    operator, red, blue, none = (Browser(served.url) for _ in range(4))
    for browser, key in ((operator, ADMIN), (red, RED), (blue, BLUE), (none, "key-of-none")):
        browser.log_in(key)
    number = int(red.tree()[1]["number"][0])
    assert_error(none.post(f"/dashboard/tree/{number}/pin"), 403, "admin_only")
    assert blue.post(f"/dashboard/tree/{number}/pin").json()["gone"] is True
    pinned = operator.post(f"/dashboard/tree/{number}/pin").json()["pinned"]
    assert (pinned["tenant"], pinned["tokens"]) == ("red", red.get(f"/dashboard/tree/{number}").json()["end"])
    assert red.get("/v1/cache/pins").json()["pins"] == [pinned]
    assert red.post(f"/dashboard/tree/{number}/pin").json()["pinned"] == pinned
    assert_error(none.post(f"/dashboard/pins/{pinned['id']}/release"), 403, "admin_only")
    assert blue.post(f"/dashboard/pins/{pinned['id']}/release").json()["gone"] is True
    assert red.post(f"/dashboard/pins/{pinned['id']}/release").json() == {"released": pinned["id"]}
    again = red.post(f"/dashboard/pins/{pinned['id']}/release")
    assert (again.status_code, again.json()["gone"]) == (200, True)
    served.settled()


def test_a_pin_that_is_not_granted_tells_why() -> None:
    with served_by_oracle(server=ServerConfig(aliases=()), blocks=60) as served:
        served.complete(LONG, max_tokens=2)
        browser = Browser(served.url)
        number = int(browser.tree()[1]["number"][0])
        told = browser.post(f"/dashboard/tree/{number}/pin")
        assert told.status_code == 200
        assert told.json()["refused"] is True
        assert "bytes" in told.json()["message"]


def test_requests_are_stopped_and_sessions_end_while_the_server_drains() -> None:
    drain, held = Drain(), Held(free_forwards=1)
    with served_by_oracle(server=SERVER, fault=held, drain=drain) as served:
        running, answered = ask_and_wait(served)
        blue = Browser(served.url)
        blue.log_in(BLUE)
        asyncio.run(drain.run())
        assert drain.is_draining
        late = blue.post("/v1/chat/completions", {"messages": user(LONG)})
        assert_error(late, 503, "draining")
        assert blue.post(f"/dashboard/requests/{running.id}/stop").json() == {"stopped": running.id}
        held.let_go()
        assert answered() == 503
        assert blue.post("/dashboard/logout").status_code == 200
        assert blue.get("/dashboard/session").json()["login"] is True
        served.settled()


def test_pages_of_allowed_origins_use_the_api_and_not_the_dashboard() -> None:
    page = "https://chat.example.com"
    for allowed, origin in (((page,), page), (("null",), "null"), (("*",), page)):
        with served_by_oracle(server=replace(SERVER, allowed_origins=allowed)) as served:
            headers = {"origin": origin, "sec-fetch-site": "cross-site", "x-api-key": RED}
            listed = served.client.get("/v1/models", headers=headers)
            assert listed.status_code == 200
            assert listed.headers["access-control-allow-origin"] in (origin, "*")
            assert "access-control-allow-credentials" not in listed.headers
            for path in ("/dashboard/session", "/dashboard/tree", "/dashboard/login"):
                method = "POST" if path.endswith("login") else "GET"
                answer = served.client.request(method, path, headers=headers)
                assert_error(answer, 403, "origin_not_allowed")
                asked = {**headers, "access-control-request-method": method}
                preflight = served.client.options(path, headers=asked)
                for told in (answer, preflight):
                    assert not [name for name in told.headers if name.startswith("access-control-")]
                assert preflight.status_code == 403
