"""Bounds on a connection: malformed HTTP, sizes, idle and slow clients. The tests move the server's clock."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.server.http.connection import ConnectionPhase, HttpLimits, _undrained_bytes
from server.raw_http import Clock, RawClient, dechunked, post
from waiting import wait_until

LIMITS = HttpLimits()
COMPLETIONS = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
SHORT = {"prompt": "x", "max_tokens": 1}
ENDLESS: dict[str, Any] = {"max_tokens": 40_000, "ignore_eos": True}
KIB = 1024


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def head_of(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )


# ---- malformed HTTP


@pytest.mark.parametrize(
    "lines",
    [
        [b"content-length: -1"],
        [b"content-length: abc"],
        [b"content-length: +5"],
        [b"content-length: 5, 5"],
        [b"content-length: "],
        [b"content-length: 18446744073709551616"],
        [b"content-length: 5", b"content-length: 5"],
        [b"content-length: 5", b"transfer-encoding: chunked"],
        [b"transfer-encoding: gzip, chunked"],
        [b"transfer-encoding: identity"],
        [b"no colon"],
        [b"space : before the colon"],
        [b"host: another"],
        [b"connection: upgrade", b"upgrade: h2c", b"content-length: 5"],
    ],
)
def test_a_head_that_is_not_http_is_refused_and_the_connection_closed(
    served: Any, lines: list[bytes]
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with RawClient(served) as client:
        client.send(head + b"\r\n".join(lines) + b"\r\n\r\nhello")
        status, code, headers = client.error()
        assert (status, code, headers["connection"]) == (400, "malformed_http", "close")
        assert client.is_closed()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: [\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a:port\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"GET /health?\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST / HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_a_malformed_request_line_or_host_is_refused(served: Any, request_bytes: bytes) -> None:
    with RawClient(served) as client:
        client.send(request_bytes)
        assert client.error()[:2] == (400, "malformed_http")
        assert client.is_closed()


def test_a_body_in_broken_chunks_is_refused(served: Any) -> None:
    with RawClient(served) as client:
        client.send(CHUNKED + b'5\r\n{"pro\r\nzz\r\n')
        assert client.error()[:2] == (400, "malformed_http")
        assert client.is_closed()


def test_a_content_length_beyond_the_limit_is_refused_before_the_body(served: Any) -> None:
    with RawClient(served) as client:
        client.send(head_of(2**64 - 1))
        assert client.error()[:2] == (413, "body_too_large")


def test_http_1_0_is_answered_and_closed(served: Any) -> None:
    with RawClient(served) as client:
        client.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.answer()[0] == 200
        assert client.is_closed()


def test_an_upgrade_is_answered_without_one_and_the_bytes_after_it_are_dropped(served: Any) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    with RawClient(served) as client:
        client.send(upgrade + HEALTH)
        status, headers, _ = client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert client.is_closed()


def test_a_websocket_is_refused_so_that_a_client_goes_on_by_http(served: Any) -> None:
    """Codex opens one for /v1/responses, and takes 426 for the answer of a server that has none."""
    opening = b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    opening += b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with RawClient(served) as client:
        client.send(opening + b"connection: keep-alive, Upgrade\r\n\r\n")
        status, headers, body = client.answer()
        assert (status, headers["upgrade"]) == (426, "HTTP/1.1")
        assert json.loads(body)["error"]["code"] == "websocket_not_supported"
        assert client.is_closed()
    with RawClient(served) as client:  # without "connection: upgrade" the header means nothing
        client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n\r\n")
        assert client.answer()[0] == 200


# ---- sizes


def test_urls_and_heads_beyond_the_bounds_are_refused(served: Any) -> None:
    cases: list[tuple[bytes, int, str]] = [
        (b"GET /%b HTTP/1.1\r\n" % (b"a" * LIMITS.url_bytes), 414, "url_too_long"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (LIMITS.header_fields + 1), 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"a: %b\r\n" % (b"b" * LIMITS.head_bytes), 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"%b: b\r\n" % (b"a" * LIMITS.head_bytes), 431, "head_too_large"),
    ]
    for data, status, code in cases:
        with RawClient(served) as client:
            client.send(data + b"host: localhost\r\n\r\n")
            assert client.error()[:2] == (status, code)
            assert client.is_closed()


def test_the_largest_head_within_the_bounds_is_answered(served: Any) -> None:
    line = b"GET /health?%b HTTP/1.1\r\nhost: localhost\r\n" % (b"q" * (LIMITS.url_bytes - len("/health?")))
    fields = b"".join(b"x-%03d: %b\r\n" % (i, b"v" * 600) for i in range(LIMITS.header_fields - 1))
    with RawClient(served) as client:
        for _ in range(3):  # the count starts anew with each head of a connection
            client.send(line + fields + b"\r\n")
            assert client.answer()[0] == 200


def test_a_header_without_an_end_is_refused_while_it_arrives(serve: Any, clock: Clock) -> None:
    """The parser collects a header until its end. The bound holds before."""
    with serve() as served, RawClient(served) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
        sent = 0
        for _ in range(40):
            if clock.connections and clock.connections[-1]._phase is ConnectionPhase.REFUSED:
                break
            client.send(b"a" * 4 * KIB)
            sent += 4 * KIB
            clock.received(
                lambda c: c._phase is ConnectionPhase.REFUSED or c._unframed_bytes >= sent  # noqa: B023
            )
        assert sent <= LIMITS.head_bytes + 32 * KIB
        assert client.error()[:2] == (431, "head_too_large")


@pytest.mark.parametrize(
    "rest",
    [
        b"5;" + b"a" * 200 * KIB,  # a chunk extension
        b"0\r\n" + b"x-trailer: " + b"a" * 200 * KIB,
        b"0\r\n" + b"x: y\r\n" * 40_000,
    ],
)
def test_chunk_extensions_and_trailers_are_bounded(served: Any, rest: bytes) -> None:
    with RawClient(served) as client:
        client.send(CHUNKED + rest)
        assert client.error()[:2] == (431, "head_too_large")
        assert client.is_closed()


def test_a_body_of_very_many_tiny_chunks_is_refused(served: Any) -> None:
    with RawClient(served) as client:
        client.send(CHUNKED + b"1\r\n \r\n" * 20_000)
        assert client.error()[:2] == (400, "malformed_http")


def test_small_chunks_with_extensions_and_a_trailer_are_read(served: Any) -> None:
    body = json.dumps(SHORT | {"prompt": "y" * 3000}).encode()
    chunks = b"".join(
        b"%x;note=1\r\n%b\r\n" % (len(body[i : i + 3]), body[i : i + 3]) for i in range(0, len(body), 3)
    )
    with RawClient(served) as client:
        client.send(CHUNKED + chunks + b"0\r\nx-trailer: z\r\n\r\n")
        assert client.answer()[0] == 200
        client.send(HEALTH)
        assert client.answer()[0] == 200


def test_a_trailer_does_not_count_as_a_header(serve: Any) -> None:
    """A proxy replaces X-Cache-Salt in the head only: a trailer could name another tenant."""
    with serve() as served:
        body = {"prompt": "a secret of some length", "max_tokens": 1}
        served.client.post(COMPLETIONS, json=body, headers={"X-Cache-Salt": "tenant"})
        data = json.dumps(body).encode()
        with RawClient(served) as client:
            client.send(CHUNKED + b"%x\r\n%b\r\n0\r\nx-cache-salt: tenant\r\n\r\n" % (len(data), data))
            status, _, answer = client.answer()
        assert status == 200
        assert json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_client_that_expects_100_gets_it_only_if_its_body_is_accepted(served: Any) -> None:
    data = json.dumps(SHORT).encode()
    with RawClient(served) as client:
        client.send(head_of(len(data))[:-2] + b"expect: 100-continue\r\n\r\n")
        assert client.socket.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(data)
        assert client.answer()[0] == 200
        client.send(head_of(2**40)[:-2] + b"expect: 100-continue\r\n\r\n")
        assert client.error()[:2] == (413, "body_too_large")


# ---- many connections, many requests on one


def test_connections_over_the_limit_get_503_until_one_is_closed(serve: Any) -> None:
    with serve(limits=HttpLimits(connections=2)) as served, RawClient(served) as first:
        with RawClient(served) as second:
            for one in (first, second):
                one.send(HEALTH)
                assert one.answer()[0] == 200
            with RawClient(served) as third:
                status, code, headers = third.error()
                assert (status, code) == (503, "too_many_connections")
                assert int(headers["retry-after"]) >= 1
                assert third.is_closed()
            first.send(HEALTH)
            assert first.answer()[0] == 200

        def answered() -> bool:
            with RawClient(served) as another:
                another.send(HEALTH)
                return another.answer()[0] == 200

        wait_until(answered)


def test_connections_far_over_the_limit_are_reset(serve: Any, clock: Clock) -> None:
    with serve(limits=HttpLimits(connections=1)) as served:
        clients = [RawClient(served) for _ in range(80)]
        wait_until(lambda: len(clock.connections) == 80)
        clock.pass_time(0)
        open_ones = [one for one in clock.connections if not one.transport.is_closing()]
        assert len(open_ones) <= 1 + 64
        for client in clients:
            client.close()


def test_pipelined_requests_are_answered_in_order(served: Any) -> None:
    with RawClient(served) as client:
        client.send(
            post(COMPLETIONS, SHORT | {"max_tokens": 50})
            + HEALTH
            + b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        answers = [client.answer() for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 404]
    assert json.loads(answers[0][2])["object"] == "text_completion"
    assert json.loads(answers[1][2])["status"] == "ok"


def test_pipelined_requests_beyond_the_limit_are_dropped(served: Any) -> None:
    with RawClient(served) as client:
        client.send(HEALTH * 10_000)
        answers = 0
        with contextlib.suppress(http.client.RemoteDisconnected, ConnectionResetError):
            while True:
                status, _, answer = client.answer()
                assert status == 200, answer
                answers += 1
        assert 1 <= answers < 5_000


def test_malformed_bytes_after_a_request_do_not_break_its_answer(serve: Any, clock: Clock) -> None:
    """uvicorn writes a 400 in the middle of the answer."""
    with serve() as served, RawClient(served) as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
        client.send(post(COMPLETIONS, body) + b"garbage\r\n\r\n")
        text = dechunked(client.everything().partition(b"\r\n\r\n")[2])
        assert text.endswith(b"data: [DONE]\n\n")


def test_a_client_that_pipelines_and_disconnects_aborts_its_first_request(serve: Any) -> None:
    with serve(context_limit=50_000, blocks=7000) as served:
        engine = served.assembly.engine
        with RawClient(served) as client:
            client.send(post(COMPLETIONS, {"prompt": "x", **ENDLESS}) + HEALTH)
            wait_until(lambda: engine.health().running == 1 and engine.health().steps > 5)
        wait_until(lambda: engine.health().running == 0)
        outcome = {"outcome": "disconnected", "route": COMPLETIONS}
        wait_until(lambda: served.metric("rootstock_requests_total", **outcome) == 1)
        served.settled()


# ---- time


def test_an_idle_connection_is_kept_longer_than_clients_and_proxies_keep_it(serve: Any, clock: Clock) -> None:
    assert LIMITS.keep_alive_s >= 65
    with serve() as served, RawClient(served) as client:
        for _ in range(3):
            client.send(HEALTH)
            assert client.answer()[0] == 200
            clock.pass_time(LIMITS.keep_alive_s - 1)
        client.send(b"\r\n")  # an empty line before a request is ignored, and does not extend the time
        clock.pass_time(0)
        clock.pass_time(2)
        assert client.is_closed()


def test_a_connection_without_a_request_is_closed_without_an_answer(serve: Any, clock: Clock) -> None:
    with serve() as served, RawClient(served) as client:
        clock.received(lambda c: c._receive_timer is not None)
        clock.pass_time(LIMITS.keep_alive_s - 1)
        assert not clock.connections[-1].transport.is_closing()
        clock.pass_time(2)
        assert client.is_closed()


def test_a_head_that_arrives_byte_by_byte_times_out(serve: Any, clock: Clock) -> None:
    with serve() as served, RawClient(served) as client:
        client.send(HEALTH)  # the limit also holds for later requests of a connection
        assert client.answer()[0] == 200
        for second, byte in enumerate(HEALTH[: int(LIMITS.head_s) - 1]):
            client.send(bytes([byte]))
            clock.received(lambda c: c._unframed_bytes > second)  # noqa: B023
            clock.pass_time(1)
            assert clock.connections[-1]._phase is ConnectionPhase.HEAD
        clock.pass_time(2)
        assert client.error()[:2] == (408, "request_timeout")
        assert client.is_closed()


@pytest.mark.parametrize("drip", [0, 100])
def test_a_body_that_stops_or_drips_times_out(serve: Any, clock: Clock, drip: int) -> None:
    with serve() as served:
        with RawClient(served) as client:
            client.send(head_of(1_000_000) + b" " * 500_000)
            clock.received(lambda c: c._body_bytes == 500_000)
            clock.pass_time(LIMITS.body_window_s + 1)  # enough bytes came in the first window
            assert clock.connections[-1]._phase is ConnectionPhase.BODY
            client.send(b" " * drip)
            clock.received(lambda c: c._body_bytes == 500_000 + drip)
            clock.pass_time(LIMITS.body_window_s + 1)
            assert client.error()[:2] == (408, "request_timeout")
            assert client.is_closed()
        served.settled()


@pytest.mark.parametrize(("windows", "in_time"), [(105, True), (121, False)])
def test_a_large_body_over_a_slow_line_is_answered_within_the_bound_on_its_time(
    serve: Any, clock: Clock, windows: int, in_time: bool
) -> None:
    """Sends 14.5 MB in 54 minutes, then 16.7 MB in more than an hour."""
    step = int(LIMITS.body_window_bytes * 4.5)
    with serve(server=ServerConfig(max_body_bytes=32 * KIB**2)) as served, RawClient(served) as client:
        body = b" " * (step * windows) + json.dumps(SHORT).encode()
        client.send(head_of(len(body)))
        sent = 0
        while sent < step * windows and not (
            sent and clock.connections[-1]._phase is ConnectionPhase.REFUSED
        ):
            client.send(body[sent : sent + step])
            sent += step
            clock.received(lambda c: c._body_bytes >= sent)  # noqa: B023
            clock.pass_time(LIMITS.body_window_s + 1)
        if in_time:
            client.send(body[sent:])
            assert client.answer()[0] == 200
        else:
            assert client.error()[:2] == (408, "request_timeout")


def test_the_rest_of_a_refused_body_is_discarded_for_a_limited_time(serve: Any, clock: Clock) -> None:
    with serve() as served, RawClient(served) as client:
        client.send(head_of(2**40) + b"x" * 100)
        assert client.error()[:2] == (413, "body_too_large")
        client.send(b"x" * 100_000)
        clock.received(lambda c: c._body_bytes == 100_100)
        clock.pass_time(LIMITS.discard_s + 1)
        assert client.is_closed()


def test_a_connection_is_usable_after_a_refused_body_and_closes_when_idle(serve: Any, clock: Clock) -> None:
    with serve(server=ServerConfig(max_body_bytes=1024)) as served, RawClient(served) as client:
        client.send(head_of(100_000))
        assert client.error()[:2] == (413, "body_too_large")
        client.send(b"x" * 100_000)
        clock.received(lambda c: c._phase is ConnectionPhase.IDLE)
        clock.pass_time(LIMITS.discard_s + 1)
        client.send(HEALTH)
        assert client.answer()[0] == 200
        client.send(head_of(100_000))
        assert client.error()[:2] == (413, "body_too_large")
        client.send(b"x" * 100_000)
        clock.received(lambda c: c._phase is ConnectionPhase.IDLE)
        clock.pass_time(LIMITS.keep_alive_s + 1)
        assert client.is_closed()


def test_a_refused_client_that_does_not_close_is_cut_off(serve: Any, clock: Clock) -> None:
    with serve() as served, RawClient(served) as client:
        client.send(b"nonsense\r\n\r\n")
        assert client.error()[:2] == (400, "malformed_http")
        clock.received(lambda c: c._phase is ConnectionPhase.REFUSED)
        assert not clock.connections[-1].transport.is_closing()
        clock.pass_time(LIMITS.linger_s + 1)
        assert clock.connections[-1].transport.is_closing()


# ---- clients that do not read


@pytest.fixture
def unread(clock: Clock) -> Clock:
    """The clock of a server whose kernel buffers little for a client that does not read."""
    clock.send_buffer_bytes = 4096
    return clock


def test_a_stream_that_is_not_read_times_out_and_its_requests_are_aborted(serve: Any, unread: Clock) -> None:
    with serve(context_limit=50_000, blocks=26_000) as served:
        with RawClient(served, receive_buffer_bytes=4096) as client:
            client.send(post(COMPLETIONS, {"prompt": "x", "n": 4, "stream": True, **ENDLESS}))
            unread.received(lambda c: c.flow is not None and c.flow.write_paused)
            connection = unread.connections[-1]
            windows = 0
            while connection.parser is not None:  # as long as the connection lasts
                unread.pass_time(LIMITS.drain_s + 1)
                windows += 1
                assert windows < 20
            wait_until(lambda: served.assembly.engine.health().running == 0)
        outcome = {"outcome": "disconnected", "route": COMPLETIONS}
        wait_until(lambda: served.metric("rootstock_requests_total", **outcome) == 1)
        served.settled()


def test_a_stream_that_is_read_slowly_but_steadily_is_sent_to_its_end(serve: Any, unread: Clock) -> None:
    body = {"prompt": "x", "n": 4, "stream": True, "max_tokens": 300, "ignore_eos": True}
    with serve() as served, RawClient(served, receive_buffer_bytes=4096) as client:
        client.send(post(COMPLETIONS, body, "connection: close"))
        unread.received(lambda c: c.flow is not None and c.flow.write_paused)
        wait_until(lambda: served.assembly.engine.health().running == 0)
        connection = unread.connections[-1]
        received = bytearray()
        for _ in range(8):
            before = _undrained_bytes(connection.transport)
            while _undrained_bytes(connection.transport) >= before:  # until the client's window has opened
                received += client.socket.recv(KIB)
            unread.pass_time(LIMITS.drain_s + 1)
            assert connection.parser is not None, "the connection is lost"
        received += client.everything()
    assert dechunked(bytes(received).partition(b"\r\n\r\n")[2]).endswith(b"data: [DONE]\n\n")


def test_a_whole_answer_that_is_not_read_times_out(serve: Any, unread: Clock) -> None:
    body = {"prompt": "x", "n": 8, "max_tokens": 300, "logprobs": 5, "ignore_eos": True}
    with serve() as served, RawClient(served, receive_buffer_bytes=4096) as client:
        client.send(post(COMPLETIONS, body))
        unread.received(lambda c: c.flow is not None and c.flow.write_paused)
        for _ in range(3):
            unread.pass_time(LIMITS.drain_s + 1)
        assert unread.connections[-1].parser is None, "the connection is not lost"
        served.settled()


def test_a_small_answer_that_is_not_read_does_not_keep_a_closed_connection(serve: Any, unread: Clock) -> None:
    """The bytes in the transport's buffer are too few for it to pause writing."""
    body = {"prompt": "x", "n": 8, "max_tokens": 40, "logprobs": 5, "ignore_eos": True}
    with serve() as served, RawClient(served, receive_buffer_bytes=4096) as client:
        client.send(post(COMPLETIONS, body, "connection: close"))
        unread.received(lambda c: c.transport is not None and c.transport.is_closing())
        connection = unread.connections[-1]
        assert connection.transport.get_write_buffer_size() > 0
        assert not connection.flow.write_paused
        for _ in range(3):
            unread.pass_time(LIMITS.drain_s + 1)
        assert connection.parser is None, "the connection is not lost"
