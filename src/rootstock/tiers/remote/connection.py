"""A connection to a Valkey or Redis server that moves records without copying them.

The protocol is RESP2 (valkey.io/topics/protocol). Commands are pipelined: all are sent before the first reply is
read. Payloads are sent from the caller's buffers by `sendmsg` and received into them by `recv_into`; client
libraries join and copy them, at a third of the speed.

Every exchange has a deadline. A server that sends slowly is as late as one that sends nothing.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence

from rootstock.fleet_config import RemoteConfig

Reply = bytes | int | None | list["Reply"]

_LINE_BYTES = 64 * 1024  # longest line of a reply, such as an error
_READ_BYTES = 64 * 1024
_SENT_AT_ONCE = 512  # buffers of one system call; the system takes 1,024
_MOST_VALUE_BYTES = 1 << 20  # of a value that `run` returns, such as a report of the server
_MOST_ELEMENTS = 1 << 16  # of an array
_MOST_DEPTH = 4


class StoreUnreachable(Exception):
    """The server cannot be reached, is late, or does not keep to the protocol."""


class StoreRefused(Exception):
    """An error that the server returned for one command. The connection can be used further."""


class StoreConnection:
    """Open connection. Belongs to one thread. After a StoreUnreachable it is closed."""

    def __init__(self, config: RemoteConfig) -> None:
        """Connects and authenticates. Raises StoreUnreachable."""
        self._timeout_s = config.timeout_s
        self._deadline = 0.0
        self.used_at = 0.0  # by the system's clock: the beginning of the last exchange
        self._buffer = bytearray()
        self._at = 0  # position in the buffer
        self._socket: socket.socket | None = None
        try:
            self._socket = _connected(config)
            greeting: list[Sequence[bytes]] = []
            if config.password:
                user = [config.user.encode()] if config.user else []
                greeting.append([b"AUTH", *user, config.password.encode()])
            if config.database:
                greeting.append([b"SELECT", str(config.database).encode()])
            self.run([*greeting, [b"PING"]])
        except (OSError, UnicodeError, StoreUnreachable, StoreRefused) as error:
            self.close()
            told = str(error) or type(error).__name__
            if config.password:  # a server that does not know AUTH tells its arguments
                told = told.replace(config.password, "***")
            raise StoreUnreachable(told) from (None if config.password else error)

    def close(self) -> None:
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def run(self, commands: Sequence[Sequence[bytes]], *, seconds: float | None = None) -> list[Reply]:
        """Runs commands in one exchange and returns their replies. `seconds` replaces the time limit.

        Raises StoreRefused for the first command that the server refuses, or StoreUnreachable.
        """
        self._begin(seconds)
        self._send(commands)
        refused: StoreRefused | None = None
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(self._reply())
            except StoreRefused as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return replies

    def open_value(self, key: bytes) -> int | None:
        """Asks for a value; returns its size, or None if there is none. `fill` reads it, and `end_value` ends it.

        Raises StoreRefused or StoreUnreachable, as the other two.
        """
        self._begin()
        self._send([[b"GET", key]])
        kind, text = self._line()
        if kind == b"-":
            raise StoreRefused(text.decode(errors="replace"))
        size = self._number(text)
        if kind != b"$" or size < -1:
            raise self._broken("it answers GET with no value")
        return None if size == -1 else size

    def fill(self, view: memoryview) -> None:
        """Fills a buffer with the next bytes of a value."""
        there = min(view.nbytes, len(self._buffer) - self._at)
        view[:there] = self._buffer[self._at : self._at + there]
        self._at += there
        while there < view.nbytes:
            try:
                got = self._open().recv_into(view[there:])
            except TimeoutError:
                raise self._broken("it does not answer in time") from None
            except OSError as error:
                raise self._broken(str(error)) from error
            if not got:
                raise self._broken("it has closed the connection")
            there += got

    def end_value(self) -> None:
        end = memoryview(bytearray(2))
        self.fill(end)
        if bytes(end) != b"\r\n":
            raise self._broken("it sends a value without an end")

    def begin(self, seconds: float) -> None:
        """Begins an exchange of `send_value` and `read_replies`, with a time limit of its own."""
        self._begin(seconds)

    def send_value(self, command: Sequence[bytes], value: Sequence[memoryview]) -> None:
        """Sends a command whose last argument is divided among buffers. `read_replies` reads its reply."""
        size = sum(view.nbytes for view in value)
        head = b"*%d\r\n" % (len(command) + 1)
        head += b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in command)
        self._send_views([memoryview(head + b"$%d\r\n" % size), *value, memoryview(b"\r\n")])

    def read_replies(self, count: int) -> list[Reply | StoreRefused]:
        """Reads the replies of so many commands; errors of the server are among them."""
        replies: list[Reply | StoreRefused] = []
        for _ in range(count):
            try:
                replies.append(self._reply())
            except StoreRefused as error:
                replies.append(error)
        return replies

    # ---------------------------------------------------------------------------------------- inside

    def _begin(self, seconds: float | None = None) -> None:
        self.used_at = time.monotonic()
        self._deadline = self.used_at + (self._timeout_s if seconds is None else seconds)

    def _open(self) -> socket.socket:
        """Returns the socket, with the time that is left as its limit."""
        if self._socket is None:
            raise StoreUnreachable("the connection is closed")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._broken("it does not answer in time")
        self._socket.settimeout(left)
        return self._socket

    def _broken(self, why: str) -> StoreUnreachable:
        self.close()
        return StoreUnreachable(why)

    def _send(self, commands: Sequence[Sequence[bytes]]) -> None:
        parts: list[bytes] = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for argument in command:
                parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
        self._send_views([memoryview(b"".join(parts))])

    def _send_views(self, views: list[memoryview]) -> None:
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                for view in views:
                    self._open().sendall(view)
                return
            first = 0
            while first < len(views):
                sent = self._open().sendmsg(views[first : first + _SENT_AT_ONCE])
                while first < len(views) and sent >= views[first].nbytes:
                    sent -= views[first].nbytes
                    first += 1
                if sent:
                    views[first] = views[first][sent:]
        except TimeoutError:
            raise self._broken("it does not take the data in time") from None
        except OSError as error:
            raise self._broken(str(error)) from error

    def _receive(self) -> None:
        """Reads more bytes into the buffer."""
        try:
            more = self._open().recv(_READ_BYTES)
        except TimeoutError:
            raise self._broken("it does not answer in time") from None
        except OSError as error:
            raise self._broken(str(error)) from error
        if not more:
            raise self._broken("it has closed the connection")
        self._buffer = self._buffer[self._at :] + more
        self._at = 0

    def _line(self) -> tuple[bytes, bytes]:
        """Reads a line; returns its first character and the rest."""
        while (end := self._buffer.find(b"\r\n", self._at)) < 0:
            if len(self._buffer) - self._at > _LINE_BYTES:
                raise self._broken("it sends a line without an end")
            self._receive()
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line[:1], line[1:]

    def _number(self, text: bytes) -> int:
        if not (text.removeprefix(b"-").isdigit() and len(text) <= 20):
            raise self._broken("it sends no number where one belongs")
        return int(text)

    def _reply(self, depth: int = 0) -> Reply:
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            raise StoreRefused(text.decode(errors="replace"))
        size = self._number(text)
        if kind == b":":
            return size
        if size == -1:
            return None
        if kind == b"$" and 0 <= size <= _MOST_VALUE_BYTES:
            value = bytearray(size)
            self.fill(memoryview(value))
            self.end_value()
            return bytes(value)
        if kind == b"*" and 0 <= size <= _MOST_ELEMENTS and depth < _MOST_DEPTH:
            return [self._reply(depth + 1) for _ in range(size)]
        raise self._broken("it does not keep to the protocol")


def _connected(config: RemoteConfig) -> socket.socket:
    """Raises OSError."""
    if config.path:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(config.timeout_s)
        opened.connect(config.path)
        return opened
    opened = socket.create_connection((config.host, config.port), config.timeout_s)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not config.tls:
        return opened
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        return context.wrap_socket(opened, server_hostname=config.host)
    except BaseException:
        opened.close()
        raise
