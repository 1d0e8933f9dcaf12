"""The drain: the wait for running requests, and its ends."""

from __future__ import annotations

import asyncio

from rootstock.server.drain import Drain


def test_a_drain_ends_with_the_last_request() -> None:
    async def drained() -> int:
        drain = Drain()
        with drain.request(), drain.request():
            waiting = asyncio.create_task(drain.wait(60.0))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert drain.running == 2
        await waiting
        return drain.running

    assert asyncio.run(drained()) == 0


def test_a_drain_ends_after_its_time_or_at_once_when_it_is_told_to() -> None:
    async def drained(timeout_s: float, *, is_told: bool) -> bool:
        drain = Drain()
        with drain.request():
            if is_told:
                drain.end()
            await drain.wait(timeout_s)
            return drain.running == 1

    assert asyncio.run(drained(0.0, is_told=False))
    assert asyncio.run(drained(3600.0, is_told=True))


def test_a_server_without_requests_does_not_wait() -> None:
    asyncio.run(Drain().wait(3600.0))


def test_a_failed_request_no_longer_runs() -> None:
    drain = Drain()
    try:
        with drain.request():
            raise ValueError
    except ValueError:
        pass
    assert drain.running == 0
