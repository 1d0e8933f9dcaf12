"""Wrong keys: answers to those who guess are held back, and a right key passes at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.server.access import wrong_keys as of
from rootstock.server.access.guard import Guard
from rootstock.server.access.wrong_keys import WrongKeys
from rootstock.server.http.drain import Drain
from rootstock.server.http.errors import ErrorForms

KEY = "a-right-key"
ADDRESS = "203.0.113.7"  # a proxy's


class Time:
    """A clock, and sleepers that wait until the test lets them go."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.sleepers.append((seconds, woken))
        await woken.wait()

    def wake(self) -> None:
        for _, woken in self.sleepers:
            woken.set()
        self.sleepers.clear()


class Asked:
    """A server behind its guard, without connections."""

    def __init__(self, **options: Any) -> None:
        self.time = Time()
        self.wrong_keys = WrongKeys(lambda: self.time.now, self.time.sleep)
        config = ServerConfig(api_key=KEY, **options)
        self._guard = Guard(self._answer, config, ErrorForms(), Drain(), wrong_keys=self.wrong_keys)

    async def _answer(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def send(
        self, key: str | None, path: str = "/v1/models", address: str = ADDRESS, method: str = "GET"
    ) -> asyncio.Task[int]:
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers,
            "client": (address, 1),
        }  # fmt: skip
        status = 0

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        async def run() -> int:
            await self._guard(scope, self._nothing, send)  # type: ignore[arg-type]
            return status

        return asyncio.ensure_future(run())

    async def _nothing(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def is_held(self, task: asyncio.Task[int]) -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        return not task.done()

    async def guess(self, count: int, **sent: Any) -> None:
        for at in range(count):
            assert await self.send(f"guess-{at}", **sent) == 401


def test_a_right_key_passes_at_once_beside_one_who_guesses() -> None:
    async def run() -> None:
        asked = Asked()
        await asked.guess(of.FREE_KEYS)
        for _ in range(100):
            guess = asked.send("wrong")
            assert await asked.is_held(guess)
            for path, method in (("/v1/models", "GET"), ("/dashboard/login", "POST"), ("/health", "GET")):
                assert await asked.send(KEY, path, method=method) == 200
        assert {seconds for seconds, _ in asked.time.sleepers} == {of.HOLD_S}
        asked.time.wake()
        assert await guess == 401

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "is_held"),
    [
        ("/v1/models", True), ("/v1/chat/completions", True), ("/metrics", True), ("/dashboard/login", True),
        ("/dashboard/session", True), ("/dashboard/events", True), ("/health", True), ("/", True), ("/docs", True),
        ("/livez", False), ("/readyz", False),  # probes with a key that was changed must not fail
    ],
)  # fmt: skip
def test_no_route_that_shows_whether_a_key_is_right_answers_guesses_at_once(path: str, is_held: bool) -> None:
    async def run() -> None:
        asked = Asked()
        await asked.guess(of.FREE_KEYS)
        for method in ("GET", "HEAD", "POST", "OPTIONS"):
            assert await asked.is_held(asked.send("wrong", path, method=method)) is is_held
        assert not await asked.is_held(asked.send(None, path)), "it has no key, and guesses none"
        asked.time.wake()

    asyncio.run(run())


def test_an_address_may_guess_again_after_a_while() -> None:
    async def run() -> None:
        asked = Asked()
        await asked.guess(of.FREE_KEYS)
        assert not await asked.is_held(asked.send("wrong", address="198.51.100.1"))
        assert await asked.is_held(asked.send("wrong"))
        asked.time.now += 2 * of.FORGET_S
        assert not await asked.is_held(asked.send("wrong"))
        assert await asked.is_held(asked.send("wrong"))
        asked.time.now += of.MAX_COUNTED * of.FORGET_S
        await asked.guess(of.FREE_KEYS)
        asked.time.wake()

    asyncio.run(run())


def test_the_addresses_of_one_ipv6_network_are_one() -> None:
    async def run() -> None:
        asked = Asked()
        for at in range(of.FREE_KEYS):
            assert await asked.send("wrong", address=f"2001:db8::{at:x}") == 401
        assert await asked.is_held(asked.send("wrong", address="2001:db8::ffff:1"))
        assert not await asked.is_held(asked.send("wrong", address="2001:db8:0:1::1"))
        assert not await asked.is_held(asked.send("wrong", address="::ffff:192.0.2.1"))
        assert not await asked.is_held(asked.send("wrong", address="not an address"))
        asked.time.wake()

    asyncio.run(run())


def test_memory_and_held_answers_are_bounded() -> None:
    async def run() -> None:
        asked = Asked()
        for at in range(of.MAX_ADDRESSES + 10):
            await asked.send("wrong", address=f"10.0.{at // 256}.{at % 256}")
        assert len(asked.wrong_keys) == of.MAX_ADDRESSES
        await asked.guess(of.FREE_KEYS)
        held = [asked.send("wrong") for _ in range(of.MAX_HELD)]
        assert await asked.is_held(held[-1])
        assert not await asked.is_held(asked.send("wrong")), "further ones are answered"
        assert await asked.send(KEY) == 200
        asked.time.wake()
        assert await asyncio.gather(*held) == [401] * of.MAX_HELD
        again = asked.send("wrong")
        assert await asked.is_held(again)
        asked.time.wake()
        assert await again == 401

    asyncio.run(run())


def test_a_key_that_is_removed_from_the_file_is_a_wrong_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"key": "old", "tenant": "t"}]}))

    async def run() -> None:
        asked = Asked(api_keys=keys)
        assert await asked.send("old") == 200
        keys.write_text(json.dumps({"keys": [{"key": "another", "tenant": "t"}]}))
        assert await asked.send("old") == 401

    asyncio.run(run())
