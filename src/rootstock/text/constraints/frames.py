"""Messages between the server and the processes of grammars: a head of JSON and a body of bytes, over a socket.

Nothing here executes received data: a process in which a library failed on a client's grammar may send anything.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTHS = struct.Struct("<II")
_MOST_HEAD_BYTES = 16 * 1024**2
_MOST_BODY_BYTES = 256 * 1024**2
_READ_BYTES = 65_536


class LinkBroken(Exception):
    """Error: the other process ended, or sent bytes that are no message."""


@dataclass(frozen=True, slots=True)
class Frame:
    head: dict[str, Any]
    body: bytes = b""


class Link:
    """One end of a socket. One thread sends and one receives at a time."""

    def __init__(self, end: socket.socket, *, exactly: bool = False) -> None:
        """`exactly` reads no byte beyond a message: one with a descriptor may follow."""
        self._end = end
        self._exactly = exactly
        self._read = bytearray()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Raises LinkBroken, and TimeoutError by the socket's timeout."""
        text = json.dumps(head, separators=(",", ":")).encode()
        try:
            self._end.sendall(b"".join((_LENGTHS.pack(len(text), len(body)), text, body)))
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkBroken from error

    def receive(self) -> Frame:
        """Waits for a message. Raises LinkBroken, and TimeoutError, after which it can be called again."""
        text_bytes, body_bytes = _LENGTHS.unpack(self._peek(0, _LENGTHS.size))
        if text_bytes > _MOST_HEAD_BYTES or body_bytes > _MOST_BODY_BYTES:
            raise LinkBroken
        text = self._peek(_LENGTHS.size, text_bytes)
        body = self._peek(_LENGTHS.size + text_bytes, body_bytes)
        del self._read[: _LENGTHS.size + text_bytes + body_bytes]
        try:
            head = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LinkBroken from error
        if not isinstance(head, dict):
            raise LinkBroken
        return Frame(head, body)

    def _peek(self, start: int, length: int) -> bytes:
        while (missing := start + length - len(self._read)) > 0:
            try:
                piece = self._end.recv(min(missing, _READ_BYTES) if self._exactly else _READ_BYTES)
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkBroken from error
            if not piece:
                raise LinkBroken
            self._read += piece
        return bytes(self._read[start : start + length])
