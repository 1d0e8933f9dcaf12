"""Request ids on answers and in log lines, and the line of a request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rootstock.config import ServerConfig
from rootstock.logs import ACCESS_LOGGER, JsonFormatter
from server.conftest import user
from server.raw_http import RawClient
from waiting import wait_until

MADE = re.compile("[0-9a-f]{32}")
HEADER = "X-Request-Id"


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The fields of access lines."""
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        yield Lines(caplog)


class Lines:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self) -> list[dict[str, Any]]:
        records = [each for each in self._caplog.records if each.name == ACCESS_LOGGER]
        return [vars(each)["fields"] for each in records]

    def of(self, route: str, count: int = 1) -> dict[str, Any]:
        """Returns the newest line of a route, after it has `count`."""
        found: list[dict[str, Any]] = []

        def look() -> bool:  # the line is written after the client has its answer
            found[:] = [fields for fields in self() if fields.get("route") == route]
            return len(found) >= count

        wait_until(look)
        return found[-1]


def test_every_answer_has_an_id_that_the_server_makes(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="key")) as served:
        key = {"Authorization": "Bearer key"}
        answers = [
            served.client.get("/health"),
            served.client.get("/v1/models"),  # 401
            served.client.get("/none", headers=key),
            served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=key),
            served.client.post("/v1/completions", content=b"{", headers=key),
            served.client.head("/health"),
            served.client.post("/v1/chat/completions", json={"messages": user("x"), "max_tokens": 1, "stream": True},
                               headers=key),
        ]  # fmt: skip
        ids = [answer.headers.get_list(HEADER) for answer in answers]
        assert all(len(each) == 1 and MADE.fullmatch(each[0]) for each in ids), ids
        assert len({each[0] for each in ids}) == len(ids)


def test_a_sane_id_of_the_client_is_kept_and_any_other_is_replaced(serve: Any) -> None:
    with serve() as served:

        def answered(*ids: str | bytes) -> str:
            headers = [(HEADER.encode(), id if isinstance(id, bytes) else id.encode()) for id in ids]
            found: str = served.client.get("/health", headers=headers).headers[HEADER]
            return found

        for sane in ("a", "req-1:2/3.4_5", "0f5c", "x" * 128):
            assert answered(sane) == sane
        for other in ("", "x" * 129, "a b", "a\tb", b"\xff", "a'b", "<b>", "-x", 'a"b'):
            assert MADE.fullmatch(answered(other)), other
        assert MADE.fullmatch(answered("a", "b"))


def test_a_request_that_the_connection_refuses_has_an_id_and_a_line(serve: Any, access: Lines) -> None:
    with serve() as served:
        with RawClient(served) as client:
            client.send(b"BAD\r\n\r\n")
            answer = client.everything()
        found = re.search(b"x-request-id: ([0-9a-f]{32})\r\n", answer.lower())
        assert found is not None, answer
        wait_until(lambda: bool(access()))
        assert access()[-1] == {"request_id": found[1].decode(), "status": 400, "error": "malformed_http"}


def test_the_line_of_a_request_has_route_status_tokens_and_times_and_no_text(
    serve: Any, access: Lines
) -> None:
    with serve() as served:
        for stream in (False, True):
            served.complete("the secret prompt", max_tokens=4, ignore_eos=True, stream=stream)
            line = access.of("/v1/completions", 1 + stream)
            assert line | {
                "method": "POST", "status": 200, "model": "fake", "completion_tokens": 4, "finish": "length",
                "prompt_tokens": 17, "cached_tokens": 16 if stream else 0,
            } == line  # fmt: skip
            assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"] <= line["seconds"]
            assert "secret" not in str(access())
        served.complete("x" * 5_000)
        wait_until(lambda: access.of("/v1/completions")["status"] == 400)
        assert access.of("/v1/completions")["error"] == "context_length_exceeded"
        served.client.get("/a%0Ab" + "c" * 400)
        path = access.of("none")["path"]
        assert len(path) == 256


def test_a_line_of_anthropics_api_has_the_id_that_its_clients_show(serve: Any, access: Lines) -> None:
    with serve() as served:
        body = {"messages": user("x"), "max_tokens": 1, "model": "fake"}
        answer = served.client.post("/v1/messages", json=body)
        assert answer.headers["request-id"] == f"req_{answer.headers[HEADER]}"
        assert access.of("/v1/messages")["api_request_id"] == answer.headers["request-id"]
        named = served.client.post("/v1/messages", json={**body, "messages": 1}, headers={HEADER: "mine"})
        assert named.headers[HEADER] == "mine"
        assert re.fullmatch("req_[0-9a-f]{32}", named.headers["request-id"])
        assert named.json()["request_id"] == named.headers["request-id"]


def test_lines_of_the_engine_name_the_request(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_batch: Any) -> None:
        raise ValueError("broken")

    with serve(fault=fail) as served:
        answer = httpx.post(
            f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={HEADER: "mine"}
        )
        assert answer.status_code == 500
        assert answer.headers[HEADER] == "mine"
        [line] = [each for each in caplog.records if each.name == "rootstock.engine.step"]
        assert line.getMessage().endswith("others go on: mine")
        assert "broken" in JsonFormatter().format(line)


def test_an_error_of_our_own_has_the_id_as_well(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as served:
        monkeypatch.setattr(type(served.assembly.engine), "health", lambda self: 1 / 0)
        answer = served.client.get("/health", headers={HEADER: "mine"})
        assert answer.status_code == 500
        assert answer.headers.get_list(HEADER) == ["mine"]
