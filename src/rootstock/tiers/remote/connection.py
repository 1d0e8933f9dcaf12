"""A connection to a Valkey or Redis server that moves records without copying them.

The protocol is RESP2 (valkey.io/topics/protocol). Commands are pipelined: all are sent before the first reply is
read. Payloads are sent from the caller's buffers by `sendmsg` and received into them by `recv_into`; client
libraries join and copy them, at a third of the speed.

Every exchange has a deadline. A server that sends slowly is as late as one that sends nothing.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence

from rootstock.fleet_config import RemoteConfig

Reply = bytes | int | None | list["Reply"]

_LINE_BYTES = 64 * 1024  # longest line of a reply, such as an error
_READ_BYTES = 64 * 1024
_SHORT_BYTES = 4096
_CALL_BYTES = 256 * 1024  # of a last piece that is sent without waiting for the end of the value
_VIEWS_AT_ONCE = 512  # buffers of one system call; the system takes 1,024
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
        self._limit_s = 0.0  # of the socket's calls
        self.asked: bytes | None = None  # the key of a value that is asked for, but not open
        self.used_at = 0.0  # by the system's clock: the beginning of the last exchange
        self._incoming = memoryview(bytearray(_READ_BYTES))
        self._buffer = bytearray()
        self._at = 0  # position in the buffer
        self._unsent = bytearray()  # short parts of commands, which go with the next piece
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
        if not commands:
            return []
        self.begin(seconds)
        self.send(commands)
        results: list[Reply] = []
        for reply in self.read_replies(len(commands)):
            if isinstance(reply, StoreRefused):
                raise reply
            results.append(reply)
        return results

    def open_value(self, key: bytes) -> int | None:
        """Asks for a value, unless it was asked for before; returns its size, or None if there is none. `fill` reads
        it, and `end_value` ends it.

        Raises StoreRefused or StoreUnreachable, as the other two.
        """
        self.begin()
        if self.asked is None:
            self.send([[b"GET", key]])
        elif self.asked != key:
            raise self._broken("another value was asked for")
        self.asked = None
        kind, text = self._line()
        if kind == b"-":
            raise StoreRefused(text.decode(errors="replace"))
        size = self._number(text)
        if kind != b"$" or size < -1:
            raise self._broken("it answers GET with no value")
        return None if size == -1 else size

    def ask_value(self, key: bytes) -> None:
        """Asks for the value that is opened next, while another one is open: the server prepares it meanwhile."""
        self.send([[b"GET", key]])
        self.asked = key

    def fill(self, views: Sequence[memoryview]) -> None:
        """Fills buffers with the next bytes of a value."""
        left = [view for view in views if view.nbytes]
        first = 0
        while first < len(left):
            got = len(self._buffer) - self._at
            if got:
                got = min(got, left[first].nbytes)
                left[first][:got] = self._buffer[self._at : self._at + got]
                self._at += got
            else:
                got = self._receive_into(left[first : first + _VIEWS_AT_ONCE], socket.MSG_WAITALL)
            first = _advance(left, first, got)

    def end_value(self) -> None:
        end = memoryview(bytearray(2))
        self.fill([end])
        if bytes(end) != b"\r\n":
            raise self._broken("it sends a value without an end")

    def begin(self, seconds: float | None = None) -> None:
        """Begins an exchange: commands are sent, and their replies are read. `seconds` replaces the time limit."""
        self.used_at = time.monotonic()
        self._deadline = self.used_at + (self._timeout_s if seconds is None else seconds)

    def send_value(
        self,
        command: Sequence[bytes],
        value_bytes: int,
        pieces: Iterable[Sequence[memoryview]],
        after: Sequence[bytes] = (),
    ) -> None:
        """Sends a command with an argument in pieces, and arguments after it.

        Long pieces are sent as soon as they are made, short ones with the next one. `read_replies` sends the last
        ones, and reads the reply.
        """
        self._unsent += (
            b"*%d\r\n" % (len(command) + 1 + len(after)) + _encoded(command) + b"$%d\r\n" % value_bytes
        )
        last: Sequence[memoryview] = ()
        left = value_bytes
        for piece in pieces:
            piece_bytes = sum(view.nbytes for view in piece)
            left -= piece_bytes
            if last:
                last = [*last, *piece]
            elif piece_bytes < _SHORT_BYTES:
                self._unsent += b"".join(piece)
            elif left < _SHORT_BYTES and piece_bytes < _CALL_BYTES:
                last = piece  # goes with the end of the value in one call
            else:
                self._flush(piece)
        end = b"\r\n" + _encoded(after)
        if last:
            self._flush([*last, memoryview(end)])
        else:
            self._unsent += end

    def send(self, commands: Sequence[Sequence[bytes]], *, at_once: bool = True) -> None:
        """Sends commands, at once or with what is sent next. `read_replies` reads their replies."""
        for command in commands:
            self._unsent += b"*%d\r\n" % len(command) + _encoded(command)
        if at_once:
            self._flush()

    def read_replies(self, count: int) -> list[Reply | StoreRefused]:
        """Reads the replies of so many commands; errors of the server are among them."""
        self._flush()
        replies: list[Reply | StoreRefused] = []
        for _ in range(count):
            try:
                replies.append(self._reply())
            except StoreRefused as error:
                replies.append(error)
        return replies

    # ---------------------------------------------------------------------------------------- inside

    def _open(self) -> socket.socket:
        """Returns the socket, with the time that is left as its limit."""
        if self._socket is None:
            raise StoreUnreachable("the connection is closed")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._broken("it does not answer in time")
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(left)
            return self._socket
        # The system's own time limit: with Python's one, a call ends whenever the system's buffer is full or empty,
        # and a large payload takes many calls, each after a wait. It may be a tenth later than the deadline.
        if not 0.9 * self._limit_s <= left <= self._limit_s:
            self._limit_s = left
            limit = struct.pack("ll", int(left), max(1, int(left % 1 * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        return self._socket

    def _broken(self, why: str) -> StoreUnreachable:
        self.close()
        return StoreUnreachable(why)

    def _flush(self, more: Sequence[memoryview] = ()) -> None:
        """Sends what is to be sent, and more after it."""
        views = [view for view in (memoryview(self._unsent), *more) if view.nbytes]
        self._unsent = bytearray()
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                for view in views:
                    self._open().sendall(view)
                return
            first = 0
            while first < len(views):
                first = _advance(views, first, self._open().sendmsg(views[first : first + _VIEWS_AT_ONCE]))
        except (TimeoutError, BlockingIOError):
            raise self._broken("it does not take the data in time") from None
        except OSError as error:
            raise self._broken(str(error)) from error

    def _receive(self) -> None:
        """Reads more bytes into the buffer."""
        got = self._receive_into([self._incoming])
        self._buffer = self._buffer[self._at :] + self._incoming[:got]
        self._at = 0

    def _receive_into(self, views: Sequence[memoryview], flags: int = 0) -> int:
        """Reads bytes that have arrived, at least one, and returns how many. With MSG_WAITALL it may wait for all."""
        opened = self._open()
        try:
            if isinstance(opened, ssl.SSLSocket):
                got = opened.recv_into(views[0])
            else:
                got = opened.recvmsg_into(views, 0, flags)[0]
        except (TimeoutError, BlockingIOError):
            raise self._broken("it does not answer in time") from None
        except OSError as error:
            raise self._broken(str(error)) from error
        if not got:
            raise self._broken("it has closed the connection")
        return got

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
        if kind == b"-" and not depth:  # within an array it would leave the others unread
            raise StoreRefused(text.decode(errors="replace"))
        size = self._number(text)
        if kind == b":":
            return size
        if size == -1:
            return None
        if kind == b"$" and 0 <= size <= _MOST_VALUE_BYTES:
            value = bytearray(size)
            self.fill([memoryview(value)])
            self.end_value()
            return bytes(value)
        if kind == b"*" and 0 <= size <= _MOST_ELEMENTS and depth < _MOST_DEPTH:
            return [self._reply(depth + 1) for _ in range(size)]
        raise self._broken("it does not keep to the protocol")


def _encoded(arguments: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


def _advance(views: list[memoryview], first: int, done: int) -> int:
    """Takes `done` bytes off the views from `first` on. Returns the first one of which something is left."""
    while first < len(views) and done >= views[first].nbytes:
        done -= views[first].nbytes
        first += 1
    if done:
        views[first] = views[first][done:]
    return first


def _connected(config: RemoteConfig) -> socket.socket:
    """Raises OSError."""
    if config.path:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(config.timeout_s)
        opened.connect(config.path)
        opened.settimeout(None)  # see `_open`
        return opened
    opened = socket.create_connection((config.host, config.port), config.timeout_s)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not config.tls:
        opened.settimeout(None)  # see `_open`
        return opened
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        return context.wrap_socket(opened, server_hostname=config.host)
    except BaseException:
        opened.close()
        raise
