"""uvicorn's HTTP/1.1 connection, to which the chunks of a body may also be written at once, from any callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WriteChunk = Callable[[bytes], bool]  # whether it was written

_EXTENSION = "rootstock.write_chunk"  # of ASGI's


class Connection(HttpToolsProtocol):
    """An ASGI server's `send` is a coroutine, so that it can wait for a client who reads slowly: somebody must await
    it. Of a stream's tokens there are many and each is small; nearly always nothing needs to be waited for."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {_EXTENSION: self._write_chunk}
        self.scope["extensions"] = extensions

    def _write_chunk(self, data: bytes) -> bool:
        """Of a body in chunked encoding that has begun. Nothing is written while what was written before waits for
        the client, nor after it is gone."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def write_chunk_of(scope: Scope) -> WriteChunk | None:
    """How to write to the body of a response without a length, if this server has that for this request."""
    if scope.get("http_version") != "1.1":  # 1.0 knows no chunks
        return None
    found: WriteChunk | None = scope.get("extensions", {}).get(_EXTENSION)
    return found
