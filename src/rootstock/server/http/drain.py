"""Drain: the end of a server's work, in which running requests finish and new ones are refused.

The guard counts the requests that change or compute something. Probes and other readers are served until the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_POLL_S = 0.05


class Drain:
    """The state of a server's drain. Used on the event loop's thread; `end` also in a signal's handler.

    With a `timeout_s` of 0 running requests are not waited for. `announce` gets their number.
    """

    def __init__(
        self, timeout_s: float = 0.0, announce: Callable[[int], None] = lambda running: None
    ) -> None:
        self.timeout_s = timeout_s
        self._announce = announce
        self.is_draining = False
        self.running = 0  # requests, which the guard counts
        self._ended = False

    def end(self) -> None:
        """Ends the wait for running requests at once."""
        self._ended = True

    async def run(self) -> None:
        """Refuses new requests, and waits until none runs, the time has passed or `end` is called."""
        self.is_draining = True
        if self.running:
            self._announce(self.running)
        now = asyncio.get_running_loop().time
        until = now() + self.timeout_s
        while self.running and not self._ended and now() < until:
            await asyncio.sleep(_POLL_S)
