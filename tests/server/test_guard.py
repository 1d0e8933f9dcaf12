"""The guard: requests from web pages, without JSON, without a key, to unknown hosts, or with too large bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from cli.running import serve_oracle
from rootstock.config import ServerConfig
from rootstock.errors import InvalidOption
from rootstock.options import parse_names
from rootstock.server.access.guard import Guard
from rootstock.server.http.connection import HttpLimits
from rootstock.server.http.drain import Drain
from rootstock.server.http.errors import ErrorForms, install_error_handlers
from rootstock.server.routes.dashboard.feed import MAX_VIEWERS, MAX_VIEWERS_OF_TENANT
from server.conftest import assert_error
from server.raw_http import RawClient
from waiting import HANG_S

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CLEAR = "/v1/cache/clear"
STATS = "/v1/cache/stats"
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
JSON = {"Content-Type": "application/json"}
PAGE = "https://chat.example.com"
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


# ---- content types


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json ; profile=x; charset=utf8",
        "application/vnd.api+json",
    ],
)
def test_json_content_types_are_accepted(served: Any, content_type: str) -> None:
    response = served.client.post(TEXT, content=BODY, headers={"Content-Type": content_type})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": ""},
        {"Content-Type": "text/plain"},
        {"Content-Type": "text/plain; application/json"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json; charset=utf-16"},
        {**JSON, "Content-Encoding": "gzip"},
    ],
)
@pytest.mark.parametrize("route", [TEXT, CHAT, "/v1/cache/explain", CLEAR])
def test_a_body_of_another_content_type_is_refused(served: Any, route: str, headers: dict[str, str]) -> None:
    """Pages may send the three types of forms, and no type, without a preflight."""
    for content in (BODY, iter([BODY])):  # with a length, and in chunks
        response = served.client.post(route, content=content, headers=headers)
        assert_error(response, 415, "unsupported_media_type", "application/json")


def test_clear_needs_no_body_and_refuses_a_form(serve: Any) -> None:
    with serve() as served:
        served.complete("something to clear", max_tokens=1)
        form = served.client.post(CLEAR, headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert_error(form, 415, "unsupported_media_type")
        assert served.client.get(STATS).json()["cache"]["cached_blocks"] > 0
        assert served.client.post(CLEAR).json()["blocks"] > 0
        assert served.client.post(CLEAR, content=b"{}", headers=JSON).status_code == 200


# ---- web pages


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": PAGE},
        {"Origin": "http://localhost:1"},  # another program on this machine
        {"Origin": "null"},
        {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_origin_can_neither_read_nor_change_anything(
    serve: Any, headers: dict[str, str]
) -> None:
    with serve() as served:
        served.complete("something to clear", max_tokens=1)
        before = served.client.get(STATS).json()["cache"]["cached_blocks"]
        assert before > 0
        assert_error(
            served.client.post(CLEAR, headers=headers), 403, "origin_not_allowed", "--allowed-origins"
        )
        asked = served.client.post(TEXT, content=BODY, headers={**JSON, **headers})
        assert_error(asked, 403, "origin_not_allowed")
        assert served.client.get(STATS).json()["cache"]["cached_blocks"] == before
        if "Origin" in headers:
            read = served.client.get(STATS, headers=headers)
            assert_error(read, 403, "origin_not_allowed")
            assert not [name for name in read.headers if name.startswith("access-control")]
            assert served.client.options(CLEAR, headers=headers).status_code == 403


def test_requests_of_the_servers_own_page_and_of_a_users_navigation_are_answered(served: Any) -> None:
    own = str(served.client.base_url).rstrip("/")
    assert served.client.post(CLEAR, headers={"Origin": own}).status_code == 200
    # Behind a proxy that ends TLS and renames the host, the browser still declares the same origin.
    proxied = {"Origin": PAGE, "Sec-Fetch-Site": "same-origin"}
    assert served.client.post(CLEAR, headers=proxied).status_code == 200
    for path in ("/", "/docs", "/v1/models"):
        for method in ("GET", "HEAD"):
            assert served.client.request(method, path, headers=LINK).status_code == 200


def status_of(served: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """Returns the status of an answer that may be a stream without an end."""
    with served.client.stream(method, path, headers=headers) as response:
        return int(response.status_code)


# The ways in which a page makes its visitor's browser send a GET: headers of the browser, which the page cannot set.
EMBEDDED = [
    {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    for site in ("cross-site", "same-site")
    for mode, dest in (
        ("no-cors", "empty"), ("no-cors", "image"), ("no-cors", "script"), ("no-cors", "style"),
        ("no-cors", "video"), ("cors", "empty"), ("cors", "script"), ("navigate", "iframe"), ("navigate", "embed"),
        ("navigate", "object"), ("navigate", "frame"), ("navigate", ""), ("websocket", "websocket"),
    )
]  # fmt: skip


@pytest.mark.parametrize("headers", EMBEDDED, ids=lambda headers: "-".join(headers.values()))
def test_a_page_of_another_site_loads_nothing_but_by_a_link(served: Any, headers: dict[str, str]) -> None:
    for path in ("/", "/docs", "/v1/models", STATS, "/metrics", "/health", "/dashboard/events"):
        for method in ("GET", "HEAD", "OPTIONS"):
            assert status_of(served, method, path, headers) == 403, (method, path)
    assert_error(served.client.get("/metrics", headers=headers), 403, "origin_not_allowed")


def test_a_link_on_another_site_opens_no_data_of_the_dashboard(served: Any) -> None:
    for path in ("/dashboard/events", "/dashboard/tree", "/dashboard/session", "/dashboard/page/app.js"):
        assert status_of(served, "GET", path, LINK) == 403
        own_action = {**LINK, "Sec-Fetch-Site": "none"}
        assert status_of(served, "GET", path, own_action) in (200, 204)


def test_event_streams_of_a_foreign_page_take_no_place_of_a_viewer(serve: Any) -> None:
    with serve() as served, contextlib.ExitStack() as open_streams:
        for headers in (*EMBEDDED, {"Origin": PAGE}, {"Origin": "null"}, LINK):
            for _ in range(MAX_VIEWERS):
                assert status_of(served, "GET", "/dashboard/events", headers) == 403
        for _ in range(MAX_VIEWERS_OF_TENANT):  # of the operator, who counts as one
            own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
            response = open_streams.enter_context(
                served.client.stream("GET", "/dashboard/events", headers=own)
            )
            assert "error" not in next(response.iter_lines())


def test_answers_have_no_cors_headers_without_the_option(served: Any) -> None:
    for path in (STATS, "/v1/models", "/metrics", "/health", "/"):
        headers = served.client.get(path).headers
        assert not [name for name in headers if name.startswith("access-control")]


def test_a_page_of_an_allowed_origin_gets_cors_headers(serve: Any) -> None:
    asked_headers = ("authorization", "content-type", "x-stainless-os", "x-api-key")
    asked_headers += ("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")
    with serve(server=ServerConfig(api_key="s3cret", allowed_origins=(PAGE,))) as served:
        preflight = served.client.options(
            CHAT,
            headers={
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": ",".join(asked_headers),
            },
        )
        assert preflight.status_code == 200, "a preflight has no key"
        assert preflight.headers["access-control-allow-origin"] == PAGE
        allowed_headers = preflight.headers["access-control-allow-headers"].lower()
        assert all(name in allowed_headers for name in asked_headers)
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        asked = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site", **JSON}
        answer = served.client.post(TEXT, content=BODY, headers={**asked, "Authorization": "Bearer s3cret"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        answer = served.client.post(TEXT, content=BODY, headers={**asked, "x-api-key": "s3cret"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = served.client.post(TEXT, content=BODY, headers=asked)
        assert_error(refused, 401, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] == PAGE, "the page can read the refusal"
        other = {**asked, "Origin": "https://evil.example", "Authorization": "Bearer s3cret"}
        assert_error(served.client.post(TEXT, content=BODY, headers=other), 403, "origin_not_allowed")


def test_all_origins_may_be_allowed(serve: Any) -> None:
    with serve(server=ServerConfig(allowed_origins=("*",))) as served:
        answer = served.client.post(TEXT, content=BODY, headers={**JSON, "Origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


# ---- hosts


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:8000", True),
        ("app.localhost", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("192.168.0.7", True),  # an address cannot have been rebound
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("notlocalhost", False),
        ("2130706433", False),
    ],
)
def test_a_server_on_loopback_accepts_only_its_local_names(served: Any, host: str, allowed: bool) -> None:
    for path in ("/health", STATS):
        response = served.client.get(path, headers={"Host": host})
        if allowed:
            assert response.status_code == 200
        else:
            assert_error(response, 403, "host_not_allowed", "--allowed-hosts")


def test_an_option_allows_further_host_names(serve: Any) -> None:
    config = ServerConfig(allowed_hosts=("llm.example.com", "*.internal"))
    with serve(server=config) as served:
        for host, status in (
            ("llm.example.com:443", 200), ("a.b.internal", 200), ("internal", 403), ("example.com", 403),
            ("localhost", 200),
        ):  # fmt: skip
            assert served.client.get("/health", headers={"Host": host}).status_code == status, host


PUBLIC = ServerConfig(host="0.0.0.0")
OF_THIS_MACHINE = ("localhost", "app.localhost:1", "192.168.0.7:8000", "[::1]", socket.gethostname())


@pytest.mark.parametrize(
    ("config", "any_name"),
    [
        (PUBLIC, False),
        (replace(PUBLIC, host="::"), False),
        (replace(PUBLIC, admin_key="adm1n"), False),  # clients need none
        (replace(PUBLIC, api_key="s3cret"), True),
        (replace(PUBLIC, tenant_keys={"t3nant": "a"}), True),
        (replace(PUBLIC, allowed_hosts=("*",)), True),
        (replace(PUBLIC, api_key="s3cret", allowed_hosts=("llm.example.com",)), False),
        (ServerConfig(api_key="s3cret"), False),  # on a loopback address
        (ServerConfig(allowed_hosts=("*",)), True),
    ],
)
def test_any_host_name_is_accepted_only_where_a_key_is_needed_beyond_loopback(
    serve: Any, config: ServerConfig, any_name: bool
) -> None:
    with serve(server=config) as served:
        for path in ("/health", "/livez", "/dashboard/session"):
            response = served.client.get(path, headers={"Host": "any.example"})
            if any_name:
                assert response.status_code == 200
            else:
                assert_error(response, 403, "host_not_allowed", "--allowed-hosts")
        for host in OF_THIS_MACHINE if config.host in ("0.0.0.0", "::") else OF_THIS_MACHINE[:-1]:
            assert served.client.get("/health", headers={"Host": host}).status_code == 200, host


def test_a_server_with_a_file_of_keys_accepts_any_host_name(serve: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("t3nant a\n")
    with serve(server=replace(PUBLIC, api_keys=keys)) as served:
        assert served.client.get("/health", headers={"Host": "any.example"}).status_code == 200


# ---- headers of all answers


def test_every_answer_keeps_browsers_from_guessing_its_type_and_other_origins_from_loading_it(
    serve: Any,
) -> None:
    """Whole answers, streams, refusals of every layer, and those that the connection itself writes."""
    config = ServerConfig(max_body_bytes=2000, aliases=(), allowed_origins=(PAGE,))

    def assert_safe(headers: Iterable[tuple[str, str]], what: object) -> None:
        found = [(name.lower(), value) for name, value in headers]
        for name, value in (
            ("x-content-type-options", "nosniff"),
            ("cross-origin-resource-policy", "same-origin"),
        ):
            assert [each for each in found if each[0] == name] == [(name, value)], what

    with serve(server=config) as served:

        @served.app.get("/breaks")
        def breaks() -> None:
            raise ValueError

        etag = served.client.get("/dashboard/page/app.js").headers["etag"]
        text = {"content": BODY, "headers": JSON}
        stream = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
        preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        statuses = set()
        for method, path, options in (
            ("GET", "/", {}), ("GET", "/", {"headers": {"Accept": "text/html"}}), ("HEAD", "/", {}),
            ("GET", "/docs", {}), ("GET", "/openapi.json", {}), ("GET", "/health", {}), ("GET", "/livez", {}),
            ("GET", "/metrics", {}), ("GET", "/v1/models", {}), ("HEAD", "/v1/models", {}), ("GET", STATS, {}),
            ("GET", "/dashboard/session", {}), ("GET", "/dashboard/tree", {}), ("GET", "/dashboard/page/app.js", {}),
            ("GET", "/dashboard/page/app.js", {"headers": {"If-None-Match": etag}}),
            ("POST", TEXT, text), ("POST", TEXT, {"content": stream, "headers": JSON}), ("POST", CLEAR, {}),
            ("POST", TEXT, {"content": b"{", "headers": JSON}), ("POST", TEXT, {"content": BODY}),
            ("POST", TEXT, {"content": b"x" * 3000, "headers": JSON}), ("GET", "/none", {}), ("GET", TEXT, {}),
            ("GET", "/v1/models/none", {}), ("GET", "/health", {"headers": {"Host": "evil.example"}}),
            ("POST", "/v1/messages", {"content": b"{}", "headers": JSON}), ("OPTIONS", CHAT, {}),
            ("OPTIONS", CHAT, {"headers": preflight}), ("OPTIONS", CHAT, {"headers": {**preflight, "Origin": "x"}}),
        ):  # fmt: skip
            answer = served.client.request(method, path, **options)
            statuses.add(answer.status_code)
            assert_safe(answer.headers.multi_items(), (method, path, answer.status_code))
        with served.client.stream("GET", "/dashboard/events") as events:
            assert_safe(events.headers.multi_items(), "events")
        assert statuses >= {200, 304, 400, 403, 404, 405, 413, 415}
        broken = httpx.get(f"{served.url}/breaks")
        assert broken.status_code == 500
        assert_safe(broken.headers.multi_items(), "an error of the server's code")
        for request, status in (
            (b"nonsense\r\n\r\n", 400), (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n", 414),
            (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        ):  # fmt: skip
            with RawClient(served) as client:
                client.send(request)
                found, headers, _ = client.answer()
                assert found == status
                assert_safe(headers.items(), status)
    with serve(limits=HttpLimits(connections=1)) as served, RawClient(served), RawClient(served) as second:
        found, headers, _ = second.answer()
        assert found == 503
        assert_safe(headers.items(), "too many connections")


# ---- keys, HEAD, the root


def test_the_scheme_of_a_key_has_no_case_and_a_key_beyond_ascii_is_wrong(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="s3cret")) as served:

        def asked(authorization: str) -> httpx.Response:
            return served.client.get("/v1/models", headers={"Authorization": authorization.encode()})

        for scheme in ("Bearer", "bearer", "BEARER"):
            assert asked(f"{scheme} s3cret").status_code == 200
            assert_error(asked(f"{scheme} S3CRET"), 401, "invalid_api_key")
        assert_error(asked("Bearer é"), 401, "invalid_api_key")


def test_a_key_is_accepted_in_the_header_of_anthropics_clients(serve: Any) -> None:
    config = ServerConfig(api_key="s3cret", admin_key="adm1n", tenant_keys={"t3nant": "a"})
    with serve(server=config) as served:

        def asked(path: str = "/v1/models", **headers: str) -> httpx.Response:
            return served.client.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})

        for name in ("x_api_key", "X_API_KEY"):
            assert asked(**{name: "s3cret"}).status_code == 200
            assert_error(asked(**{name: "S3CRET"}), 401, "invalid_api_key", "x-api-key")
            assert_error(asked(**{name: ""}), 401, "invalid_api_key")
            assert_error(asked(**{name: "Bearer s3cret"}), 401, "invalid_api_key")
        assert asked(STATS, x_api_key="adm1n").status_code == 200
        assert_error(asked(STATS, x_api_key="s3cret"), 403, "admin_only")
        assert_error(asked("/metrics", x_api_key="t3nant"), 403, "admin_only")


def test_two_headers_with_different_keys_are_refused(serve: Any) -> None:
    config = ServerConfig(api_key="s3cret", tenant_keys={"t3nant": "a"})
    with serve(server=config) as served:

        def asked(authorization: str, api_key: str, path: str = "/v1/models") -> httpx.Response:
            return served.client.get(path, headers={"Authorization": authorization, "x-api-key": api_key})

        assert asked("Bearer s3cret", "s3cret").status_code == 200
        assert asked("Bearer s3cret", "").status_code == 200
        assert asked("Bearer", "s3cret").status_code == 200
        assert asked("Basic dXNlcjpwYXNz", "s3cret").status_code == 200, "a proxy's own"
        for bearer, api_key in (("s3cret", "wrong"), ("wrong", "s3cret"), ("s3cret", "t3nant"), ("a", "b")):
            refused = asked(f"Bearer {bearer}", api_key)
            assert_error(refused, 401, "api_keys_differ", "Authorization", "x-api-key")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert asked("Bearer s3cret", "wrong", "/health").status_code == 200
    with serve() as served:  # it has no keys, and reads none
        headers = {"Authorization": "Bearer a", "x-api-key": "b"}
        assert served.client.get("/v1/models", headers=headers).status_code == 200


def test_head_is_get_without_a_body(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="s3cret")) as served:
        for path in ("/", "/health"):
            got, head = served.client.get(path), served.client.head(path)
            assert (got.status_code, head.status_code) == (200, 200)
            assert head.content == b""
            assert head.headers["content-length"] == got.headers["content-length"]
        assert served.client.get("/").json()["health"] == "/health"
        assert served.client.head("/v1/models").status_code == 401
        assert served.client.head("/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert served.client.head(CHAT, headers={"Authorization": "Bearer s3cret"}).status_code == 405


# ---- sizes


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Any) -> None:
    with serve(server=ServerConfig(max_body_bytes=2000)) as served:
        assert_error(served.complete("x" * 2000), 413, "body_too_large", "2,000 bytes", "--max-body")
        chunked = served.client.post(TEXT, content=(b"x" * 100 for _ in range(50)), headers=JSON)
        assert_error(chunked, 413, "body_too_large", "2,000 bytes")
        assert served.complete("x", max_tokens=1).status_code == 200


class Asked:
    """A request straight to the guard, whose body a test sends in parts."""

    def __init__(self, guard: Guard) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status = 0
        self.body = b""
        self.headers: dict[bytes, bytes] = {}
        scope = {
            "type": "http", "method": "POST", "path": TEXT, "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")],
        }  # fmt: skip
        self.task = asyncio.ensure_future(guard(scope, self._parts.get, self._send))  # type: ignore[arg-type]

    async def part(self, count: int, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * count, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", []))
        self.body += message.get("body", b"")


def test_the_bodies_of_all_requests_together_are_bounded_and_given_back() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()
        inner = FastAPI()
        install_error_handlers(inner, ErrorForms())

        @inner.post(TEXT)
        async def route(request: Request) -> int:
            count = len(await request.body())
            await may_answer.wait()
            return count

        config = ServerConfig(max_body_bytes=6000)
        inner.add_middleware(
            Guard, config=config, forms=ErrorForms(), drain=Drain(), max_held_body_bytes=10_000
        )
        guard = inner.build_middleware_stack()
        first, second, third = (Asked(guard) for _ in range(3))  # type: ignore[arg-type]
        await first.part(4000)
        await second.part(5000)
        await third.part(1000)
        await third.part(1)
        await third.task
        assert (third.status, json.loads(third.body)["error"]["code"]) == (503, "too_many_body_bytes")
        assert int(third.headers[b"retry-after"]) >= 1
        await first.part(1000, more=False)  # the third one's bytes are free again
        await second.part(0, more=False)
        fourth = Asked(guard)  # type: ignore[arg-type]
        await fourth.part(1)
        assert fourth.status == 503, "a body is held until its request is answered"
        may_answer.set()
        await asyncio.gather(first.task, second.task)
        assert (first.status, first.body, second.status, second.body) == (200, b"5000", 200, b"5000")
        fifth = Asked(guard)  # type: ignore[arg-type]
        await fifth.part(6000, more=False)
        await fifth.task
        assert fifth.status == 200
        sixth = Asked(guard)  # type: ignore[arg-type]
        await sixth.part(5000)
        sixth.task.cancel()
        await asyncio.gather(sixth.task, return_exceptions=True)
        last = [Asked(guard) for _ in range(2)]  # type: ignore[arg-type]
        for each in last:
            await each.part(5000, more=False)
            await each.task
        assert [each.status for each in last] == [200, 200]

    asyncio.run(run())


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1_000", "\u0663".encode(), b"1e3", b"", b"9" * 5000])
def test_a_content_length_that_is_not_a_number_is_refused_on_any_server(length: bytes) -> None:
    answered: list[Any] = []

    async def unreachable(*_: Any) -> None:
        raise AssertionError

    async def send(message: Any) -> None:
        answered.append(message)

    receive: Callable[[], Awaitable[Any]] = unreachable
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [(b"content-length", length)]}
    asyncio.run(Guard(unreachable, ServerConfig(), ErrorForms(), Drain())(scope, receive, send))
    assert answered[0]["status"] == 400
    assert json.loads(answered[1]["body"])["error"]["code"] == "malformed_http"


# ---- options


def test_lists_of_names_have_commas_or_are_json() -> None:
    assert parse_names("", "--x") == ()
    assert parse_names(" a, b ,", "--x") == ("a", "b")
    assert parse_names('["a", "b"]', "--x") == ("a", "b")
    for text in ('["a"', "[1]"):
        with pytest.raises(InvalidOption, match="--x"):
            parse_names(text, "--x")


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"allowed_origins": ("chat.example.com",)}, "--allowed-origins"),
        ({"allowed_origins": ("https://chat.example.com/",)}, "--allowed-origins"),
        ({"allowed_origins": ("https://Chat.example.com",)}, "--allowed-origins"),
        ({"allowed_hosts": ("example.com:80",)}, "--allowed-hosts"),
        ({"allowed_hosts": ("http://example.com",)}, "--allowed-hosts"),
        ({"max_body_bytes": 0}, "--max-body"),
        ({"max_connections": 0}, "--max-connections"),
        ({"responses_budget_bytes": 0}, "--responses-budget"),
    ],
)
def test_an_invalid_option_is_refused(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOption, match=option):
        ServerConfig(**fields)


def test_the_options_of_the_command_line_reach_the_server() -> None:
    options = ("--max-body", "2KiB", "--allowed-origins", PAGE, "--allowed-hosts", "llm.example.com")
    process = serve_oracle(*options, "--max-connections", "1")
    try:
        with httpx.Client(base_url=process.url, timeout=HANG_S) as client:
            assert client.get("/health", headers={"Host": "llm.example.com"}).status_code == 200
            assert client.get("/health", headers={"Host": "example.com"}).status_code == 403
            from_page = client.get("/health", headers={"Origin": PAGE})
            assert from_page.headers["access-control-allow-origin"] == PAGE
            large = client.post(TEXT, json={"prompt": "x" * 3000})
            assert_error(large, 413, "body_too_large", "2,048 bytes")
            second = httpx.get(f"{process.url}/health", timeout=HANG_S)
            assert_error(second, 503, "too_many_connections", "1 (--max-connections)")
    finally:
        code, _, _ = process.stop(signal.SIGTERM)
    assert code == 0


FILES = """
import logging, resource, sys
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])))
from rootstock.server.http.listen import _allow_files
print(_allow_files(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_the_limit_of_open_files_is_raised_for_connections_or_limits_them() -> None:
    def allowed(hard: int) -> tuple[str, str]:
        command = [sys.executable, "-c", FILES, str(hard)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip(), done.stderr

    assert allowed(2000) == ("1000 1256", "")
    found, warned = allowed(300)
    assert found == "44 300"
    assert "--max-connections is 1000" in warned
    assert "only 44" in warned
