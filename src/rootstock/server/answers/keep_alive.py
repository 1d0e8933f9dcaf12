"""Text that tells a waiting client that the server still works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rootstock.server.http.connection import WriteChunk

SendText = Callable[[str], Awaitable[None]]


class KeepAlive:
    """Sender of a stream's text, and of a keep-alive whenever the client has got no text for some time.

    A long prompt takes minutes, and so does reasoning that is not shown. Clients and proxies give up before that.
    """

    def __init__(
        self, send: SendText, write: WriteChunk | None, every_s: float, text: Callable[[], str]
    ) -> None:
        self._send = send
        self._write = write
        self._every_s = every_s
        self._text = text
        self._now = asyncio.get_running_loop().time
        self._sent_s = self._now()

    async def send(self, text: str) -> None:
        await self._send(text)
        self._sent_s = self._now()

    @property
    def write(self) -> WriteChunk | None:
        return None if self._write is None else self._written

    def _written(self, chunk: bytes) -> bool:
        assert self._write is not None
        self._sent_s = self._now()
        return self._write(chunk)

    def due_in_s(self) -> float:
        return self._sent_s + self._every_s - self._now()

    async def send_if_due(self) -> None:
        if self.due_in_s() <= 0:
            await self.send(self._text())
