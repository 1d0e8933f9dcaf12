"""The drain: the wait for running requests, and its ends."""

from __future__ import annotations

import asyncio

from rootstock.server.drain import Drain


def test_a_drain_ends_with_the_last_request() -> None:
    async def drained() -> int:
        told: list[int] = []
        drain = Drain(60.0, told.append)
        with drain.request(), drain.request():
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
        with drain.request():
            if is_told:
                drain.end()
            await drain.run()
            return drain.running == 1

    assert asyncio.run(drained(0.0, is_told=False))
    assert asyncio.run(drained(3600.0, is_told=True))


def test_a_server_without_requests_does_not_wait() -> None:
    asyncio.run(Drain(3600.0).run())


def test_a_failed_request_no_longer_runs() -> None:
    drain = Drain()
    try:
        with drain.request():
            raise ValueError
    except ValueError:
        pass
    assert drain.running == 0
