"""The HTTP/1.1 connection: uvicorn's, with bounds on a client's bytes, time and connections."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rootstock.config import ServerConfig
from rootstock.errors import (
    HeadTooLarge,
    MalformedHttp,
    RequestTimeout,
    RootstockError,
    TooManyConnections,
    UrlTooLong,
)
from rootstock.logs import log_refusal
from rootstock.server.http.errors import REQUEST_ID_HEADER, error_response
from rootstock.units import KIB

WriteChunk = Callable[[bytes], bool]  # returns whether it was written

_EXTENSION = "rootstock.write_chunk"  # of ASGI's
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")

# The parser gets a read in pieces of this size, and the bounds hold after each of them.
_PIECE_BYTES = 16 * KIB
# A chunk costs a callback. Below this mean size of many chunks, their number is an attack.
_FREE_CHUNKS, _MEAN_CHUNK_BYTES = 4096, 16
# Connections over the limit that get an error response. Further ones are reset.
_REFUSED_CONNECTIONS = 64
# Unsent bytes that the kernel buffers for a client that does not read; the rest shows in the transport's buffer.
_NOTSENT_LOWAT_BYTES = 128 * KIB


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on one connection, and on the number of connections. docs/security.md lists them."""

    connections: int = ServerConfig().max_connections
    url_bytes: int = 8 * KIB
    head_bytes: int = 64 * KIB  # of all header fields, and of chunk extensions and trailers
    header_fields: int = 100
    pipelined_requests: int = 8  # that wait for the answer to an earlier one
    head_s: float = 20.0  # from the first byte of a request to the end of its head
    # Longer than the 60 s for which proxies commonly keep an idle connection: the client should close it.
    keep_alive_s: int = 75
    # A body that brings less than this in a window is refused; a steady upload over a slow line passes.
    body_window_s: float = 30.0
    body_window_bytes: int = 30 * KIB
    body_s: float = 3600.0
    discard_s: float = 10.0  # for the rest of a body that was answered before its end
    linger_s: float = 5.0  # for a client to read a refusal
    drain_s: float = 120.0  # in which the client takes no byte of the answer


class ConnectionPhase(Enum):
    """The part of a request that the client's next byte belongs to."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    REFUSED = auto()  # bytes are discarded from now on


class Connection(HttpToolsProtocol):
    """One client's connection. Applications can also write chunks of a body to it from any callback.

    ASGI's `send` is a coroutine, because it can wait for a client that reads slowly. A stream's tokens are many and
    small, and waiting is rarely needed.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits or HttpLimits()
        self.timeout_keep_alive = self._limits.keep_alive_s
        self._phase = ConnectionPhase.IDLE
        self._answering: RequestResponseCycle | None = None  # the requests in `pipeline` wait for it
        self._refusal: RootstockError | None = None  # of a callback; the parser replaces its exception
        self._head_bytes = 0
        self._unframed_bytes = 0  # fed to the parser since its last head or part of a body
        self._body_bytes = self._body_pieces = self._window_start_bytes = 0
        self._body_start_s = 0.0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._undrained_bytes = 0

    # ---- the connection's begin and end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _limit_unsent_bytes(transport)
        excess = len(self.connections) - self._limits.connections
        if excess > _REFUSED_CONNECTIONS:
            transport.abort()
        elif excess > 0:
            self._refuse(TooManyConnections(self._limits.connections))
        else:
            # The same time as after a request: clients' pools may connect ahead.
            self._receive_timer = self.loop.call_later(self._limits.keep_alive_s, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_receive_timer()
        self._stop_drain_timer()
        # uvicorn notifies the latest request; an earlier one that is being answered must also end.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()

    def _close(self) -> None:
        """Closes once the client has read the answer, or has stopped reading it."""
        self.transport.close()
        self._start_drain_timer()

    # ---- receiving

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if self._phase is ConnectionPhase.REFUSED or self.transport.is_closing():
                return
            self._feed(data[start : start + _PIECE_BYTES])
        if self._receive_timer is None and not self.transport.is_closing():
            self._start_receive_timer()

    def _feed(self, piece: bytes) -> None:
        body_bytes = self._body_bytes
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._end_after_answers()  # bytes that follow may be of the other protocol
            return
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or MalformedHttp(str(error)))
            return
        if self._phase is ConnectionPhase.HEAD or (
            self._phase is ConnectionPhase.BODY and self._body_bytes == body_bytes
        ):
            self._unframed_bytes += len(piece)
        else:
            self._unframed_bytes = 0
        # Up to one piece of them may belong to the part before.
        if self._unframed_bytes > self._limits.head_bytes + _PIECE_BYTES:
            self._refuse(HeadTooLarge(self._limits.head_bytes, self._limits.header_fields))
        elif self._body_pieces > _FREE_CHUNKS + self._body_bytes // _MEAN_CHUNK_BYTES:
            self._refuse(MalformedHttp("the body comes in too many tiny chunks"))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined_requests:
            self._raise(MalformedHttp("too many requests wait for the answer to an earlier one"))
        self._unset_keepalive_if_required()
        self._stop_receive_timer()
        super().on_message_begin()
        extensions: dict[str, Any] = {_EXTENSION: self._write_chunk}
        self.scope["extensions"] = extensions
        self._phase = ConnectionPhase.HEAD
        self._head_bytes = self._unframed_bytes = 0

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self._limits.url_bytes:
            self._raise(UrlTooLong(self._limits.url_bytes))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is ConnectionPhase.BODY:
            return  # a trailer, which a proxy may not have checked like a header
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > self._limits.head_bytes or len(self.headers) >= self._limits.header_fields:
            self._raise(HeadTooLarge(self._limits.head_bytes, self._limits.header_fields))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        fault = self._fault_of_head()
        if fault is not None:
            self._raise(MalformedHttp(fault))
        self._stop_receive_timer()
        super().on_headers_complete()
        # uvicorn stops reading while requests wait, and would miss the client's end.
        self.flow.resume_reading()
        self._phase = ConnectionPhase.BODY
        self._body_bytes = self._body_pieces = self._window_start_bytes = self._unframed_bytes = 0
        self._body_start_s = self.loop.time()

    def _fault_of_head(self) -> str | None:
        """Returns the reason to refuse a head that parses."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return f"HTTP/{version} is not supported, HTTP/1.1 is"
        if not self.url.isascii():
            return "the URL has bytes that are not ASCII; percent-encode them"
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return f"it has {len(hosts)} Host headers, and must have one"
        if hosts and not _HOST.fullmatch(hosts[0]):
            return "its Host header is not a host with an optional port"
        encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if encodings and (encodings != [b"chunked"] or version == "1.0"):
            return "its Transfer-Encoding is not supported, only 'chunked' with HTTP/1.1 is"
        if self.parser.get_method() == b"CONNECT":
            return "CONNECT is not supported"
        if self.parser.should_upgrade() and (encodings or self._declares_body()):
            # The parser reads such a body as the other protocol's bytes.
            return "a request with a body cannot ask for an upgrade; send it without an Upgrade header"
        return None

    def _declares_body(self) -> bool:
        return any(name == b"content-length" and value.strip(b"0 \t") for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._body_pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_receive_timer()
        self._phase = ConnectionPhase.IDLE
        self._body_pieces = self._body_bytes = 0
        if self.cycle.response_complete:  # it was answered before its end
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ---- time to receive

    def _start_receive_timer(self) -> None:
        limits = self._limits
        if self._phase is ConnectionPhase.HEAD:
            self._receive_timer = self.loop.call_later(limits.head_s, self._head_is_late)
        elif self._phase is ConnectionPhase.BODY and not self.cycle.response_complete:
            self._receive_timer = self.loop.call_later(limits.body_window_s, self._body_window_ends)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _head_is_late(self) -> None:
        self._refuse(RequestTimeout(f"its head took more than {self._limits.head_s:g} s"))

    def _body_window_ends(self) -> None:
        self._receive_timer = None
        limits = self._limits
        received_bytes = self._body_bytes - self._window_start_bytes
        if self.loop.time() - self._body_start_s >= limits.body_s:
            self._refuse(RequestTimeout(f"its body took more than {limits.body_s:g} s"))
        elif received_bytes < limits.body_window_bytes and not self.flow.read_paused:
            self._refuse(
                RequestTimeout(
                    f"{received_bytes:,} bytes of its body came in {limits.body_window_s:g} s, and at least "
                    f"{limits.body_window_bytes:,} must"
                )
            )
        else:
            self._window_start_bytes = self._body_bytes
            self._start_receive_timer()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    # ---- refusals

    def _raise(self, error: RootstockError) -> None:
        """Ends the parsing from one of the parser's callbacks."""
        self._refusal = error
        raise ValueError(error.message)

    def _refuse(self, error: RootstockError) -> None:
        """Answers `error` to the request that is being received, and closes.

        If earlier requests wait for answers, these are sent first, and the connection closes without the error.
        """
        if self._phase is ConnectionPhase.REFUSED or self.transport.is_closing():
            return
        receiving = self.cycle if self._phase is ConnectionPhase.BODY else None
        if receiving is not None and receiving is not self._answering:
            self.pipeline.popleft()  # the newest
            receiving = None
        if receiving is None:
            if not self._end_after_answers():
                self._answer_and_close(error)
        elif receiving.response_started:
            self._end_receiving()
            if receiving.response_complete:
                self._close()
            else:
                self.transport.abort()  # its answer can no longer be completed
        else:
            receiving.disconnected = True
            receiving.waiting_for_100_continue = False  # nothing is written after the error
            receiving.message_event.set()
            self._answer_and_close(error)

    def _end_after_answers(self) -> bool:
        """Accepts no more requests, and closes after the open answers. Returns whether there are any."""
        self._end_receiving()
        last = self.pipeline[0][0] if self.pipeline else self._answering
        if last is None or last.response_complete:
            return False
        last.keep_alive = False
        return True

    def _end_receiving(self) -> None:
        self._phase = ConnectionPhase.REFUSED
        self._stop_receive_timer()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()  # to discard further bytes and notice the client's end

    def _answer_and_close(self, error: RootstockError) -> None:
        self._end_receiving()
        response, request_id = error_response(error), new_request_id()
        response.headers[REQUEST_ID_HEADER] = request_id
        log_refusal(request_id, error.http_status, error.code)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        self.transport.write(
            b"HTTP/1.1 %d %b\r\n" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())
            + b"".join(b"%b: %b\r\n" % header for header in headers)
            + b"\r\n"
            + bytes(response.body)
        )
        # A close with unread bytes would reset the connection, and the client might not see the answer.
        self.transport.write_eof()
        self._receive_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)

    # ---- answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_drain_timer()
        elif self._phase is not ConnectionPhase.IDLE:
            self._unset_keepalive_if_required()
            if self._phase is ConnectionPhase.BODY and self.cycle.response_complete:
                self._stop_receive_timer()
                self._receive_timer = self.loop.call_later(self._limits.discard_s, self._close)

    def _write_chunk(self, data: bytes) -> bool:
        """Writes a chunk of a body that has begun, unless earlier bytes wait for the client or it is gone."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # ---- time to answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_drain_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_drain_timer()

    def _start_drain_timer(self) -> None:
        if self._drain_timer is None:
            self._undrained_bytes = _undrained_bytes(self.transport)
            self._drain_timer = self.loop.call_later(self._limits.drain_s, self._drain_time_ends)

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _drain_time_ends(self) -> None:
        # No bytes were written meanwhile: if the client took some, fewer are left.
        self._drain_timer = None
        if _undrained_bytes(self.transport) >= self._undrained_bytes:
            self.transport.abort()
        else:
            self._start_drain_timer()


def new_request_id() -> str:
    return os.urandom(16).hex()


def write_chunk_of(scope: Scope) -> WriteChunk | None:
    """Returns the function that writes to a chunked body, if the server has it for this request."""
    if scope.get("http_version") != "1.1":  # 1.0 has no chunks
        return None
    found: WriteChunk | None = scope.get("extensions", {}).get(_EXTENSION)
    return found


def _limit_unsent_bytes(transport: asyncio.Transport) -> None:
    """Keeps the kernel from buffering megabytes for a client that does not read."""
    connected = transport.get_extra_info("socket")
    if connected is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_BYTES)


def _undrained_bytes(transport: asyncio.Transport) -> int:
    """Returns the number of written bytes that the client has not acknowledged, as far as the system tells."""
    waiting_bytes = transport.get_write_buffer_size()
    if sys.platform == "linux":
        import fcntl
        import termios

        connected = transport.get_extra_info("socket")
        if connected is not None and connected.fileno() >= 0:
            # A slow client's progress shows here; the transport's buffer shrinks only in large steps.
            told = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
            waiting_bytes += int(struct.unpack("i", told)[0])
    return waiting_bytes
