"""Drain: the end of a server's work, in which running requests finish and new ones are refused.

The guard counts the requests that change or compute something. Probes and other readers are served until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_POLL_S = 0.05


class Drain:
    """The state of a server's drain. Used on the event loop's thread; `end` also in a signal's handler."""

    def __init__(self) -> None:
        self.is_draining = False
        self.running = 0  # requests
        self._ended = False

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it is answered."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def begin(self) -> None:
        """Refuses new requests from now on."""
        self.is_draining = True

    def end(self) -> None:
        """Ends the wait for running requests at once."""
        self._ended = True

    async def wait(self, timeout_s: float) -> None:
        """Waits until no request runs, the time has passed or `end` is called."""
        now = asyncio.get_running_loop().time
        until = now() + timeout_s
        while self.running and not self._ended and now() < until:
            await asyncio.sleep(_POLL_S)
