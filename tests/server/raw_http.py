"""A client that writes bytes of its own choice, and a server whose clock a test moves."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from rootstock.server.http.connection import Connection
from waiting import HANG_S, wait_until


class RawClient:
    """One connection to a server."""

    def __init__(self, served: Any, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(HANG_S)
        self.socket.connect((served.client.base_url.host, served.client.base_url.port))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def makefile(self, _mode: str) -> _KeptOpen:
        """Serves HTTPResponse, whose surplus bytes belong to the next response."""
        return _KeptOpen(self._file)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        """Reads the next response: status, headers, body."""
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read()

    def error(self) -> tuple[int, str, dict[str, str]]:
        """Reads the next response, an error in the API's shape: status, code, headers."""
        status, headers, body = self.answer()
        assert headers["content-type"] == "application/json", body
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"], headers

    def is_closed(self) -> bool:
        """Waits for the end of the connection, and returns whether no byte came before."""
        try:
            return self._file.read1() == b""
        except ConnectionResetError:
            return True

    def read_until(self, part: bytes) -> bytes:
        """Reads lines up to one with `part`, and returns it."""
        while part not in (line := self._file.readline()):
            assert line, f"the connection ends before {part!r}"
        return line

    def everything(self) -> bytes:
        return self._file.read()


class _KeptOpen:
    """A file that its reader cannot close."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None: ...

    def flush(self) -> None: ...


def post(path: str, body: Any, *headers: str, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/{version}",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *headers,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def dechunked(body: bytes) -> bytes:
    """Decodes a body in chunked encoding."""
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
        if length == 0:
            assert not body
    return bytes(whole)


class MovedClock(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can advance."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Clock:
    """The clock of servers that begin after it was made. It also has their connections."""

    def __init__(self, monkeypatch: Any) -> None:
        self.connections: list[Connection] = []
        self.send_buffer_bytes: int | None = None  # of further connections, in the kernel
        self._loops: list[MovedClock] = []
        made = Connection.connection_made

        def loop_factory(_config: uvicorn.Config) -> Callable[[], MovedClock]:
            def make() -> MovedClock:
                self._loops.append(MovedClock())
                return self._loops[-1]

            return make

        def noted(connection: Connection, transport: asyncio.Transport) -> None:
            self.connections.append(connection)
            if self.send_buffer_bytes is not None:
                connected = transport.get_extra_info("socket")
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer_bytes)
            made(connection, transport)

        monkeypatch.setattr(uvicorn.Config, "get_loop_factory", loop_factory)
        monkeypatch.setattr(Connection, "connection_made", noted)

    def pass_time(self, seconds: float) -> None:
        """Advances the clock, and returns when all due callbacks have been called."""
        loop = self._loops[-1]

        async def move() -> None:
            loop.ahead_s += seconds
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(move(), loop).result(HANG_S)

    def received(self, condition: Callable[[Connection], bool]) -> None:
        """Waits until a condition holds for the latest connection."""
        wait_until(lambda: bool(self.connections) and condition(self.connections[-1]))
