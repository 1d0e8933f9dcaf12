"""The drain: the wait for running requests, and its ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rootstock.server.http.drain import Drain


@contextmanager
def counted(drain: Drain) -> Iterator[None]:
    """Counts a request, as the guard does."""
    drain.running += 1
    yield
    drain.running -= 1


def test_a_drain_ends_with_the_last_request() -> None:
    async def drained() -> int:
        told: list[int] = []
        drain = Drain(60.0, told.append)
        with counted(drain), counted(drain):
            waiting = asyncio.create_task(drain.run())
            await asyncio.sleep(0)
            assert not waiting.done()
            assert drain.is_draining
            assert told == [2]
        await waiting
        return drain.running

    assert asyncio.run(drained()) == 0


def test_a_drain_ends_after_its_time_or_at_once_when_it_is_told_to() -> None:
    async def drained(timeout_s: float, *, is_told: bool) -> bool:
        drain = Drain(timeout_s)
        with counted(drain):
            if is_told:
                drain.end()
            await drain.run()
            return drain.running == 1

    assert asyncio.run(drained(0.0, is_told=False))
    assert asyncio.run(drained(3600.0, is_told=True))


def test_a_server_without_requests_does_not_wait() -> None:
    asyncio.run(Drain(3600.0).run())
