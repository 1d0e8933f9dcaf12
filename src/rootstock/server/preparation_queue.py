"""Rendering and tokenizing of requests, off the event loop and a few at a time, so that answers go on meanwhile."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from rootstock.errors import QueueFull
from rootstock.server.errors import ClientGone
from rootstock.units import MIB

T = TypeVar("T")

LONG_BODY_BYTES = 65_536  # a prompt of about 16,000 tokens, 30 ms of a core
_CORES_PER_LONG_BODY = 4
_SHORT_BODIES_AT_ONCE = 8
_LARGE_BODY_BYTES = MIB  # from here on the allocator is asked to return what it holds


class PreparationQueue:
    """Bounds how many requests are rendered and tokenized at once. Of event loops' threads.

    Tokenizing keeps a core busy: many long prompts at once would take the cores from the forward pass. Long ones
    therefore wait for each other, in the order of their arrival, and short ones pass them.
    """

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._long = anyio.CapacityLimiter(max(1, (os.cpu_count() or 1) // _CORES_PER_LONG_BODY))
        self._short = anyio.CapacityLimiter(_SHORT_BODIES_AT_ONCE)
        self._waiting = {self._long: 0, self._short: 0}

    async def run(self, request: Request, prepare: Callable[[], T]) -> T:
        """Returns what `prepare` returns, run on another thread once it is this request's turn.

        Raises ClientGone, if the client left while the request waited, QueueFull, and what `prepare` raises.
        """
        body_bytes = len(await request.body())
        limiter = self._long if body_bytes >= LONG_BODY_BYTES else self._short
        if self._waiting[limiter] >= self._max_batch + self._max_queue:
            raise QueueFull(self._max_batch, self._max_queue)
        self._waiting[limiter] += 1
        try:
            async with limiter:
                if await request.is_disconnected():
                    raise ClientGone
                try:
                    return await anyio.to_thread.run_sync(prepare)
                finally:
                    if body_bytes >= _LARGE_BODY_BYTES:
                        await anyio.to_thread.run_sync(return_free_memory)
        finally:
            self._waiting[limiter] -= 1


def return_free_memory() -> None:
    """Asks the C library to return unused memory to the system. Without effect where it is not glibc.

    Tokenizing a megabyte allocates a few hundred, in small pieces, and glibc keeps most of them once they are free.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # calls release the interpreter's lock
    except (OSError, AttributeError):
        return None
