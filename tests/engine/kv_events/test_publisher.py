"""An engine's events over ZeroMQ, as a listener of another process gets them: live, replayed, and as a whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.helpers import Bench, numbers
from rootstock.cache.families import Family
from rootstock.engine.kv_events import publisher
from rootstock.errors import InvalidOption
from rootstock.fleet_config import KVEventsConfig
from rootstock.testing.fake_runtime import FULL, STATE, window
from waiting import join, wait_until

WITHIN_MS = 30_000


class Router:
    """A listener with sockets, which reads maps."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.live: Any = self.context.socket(zmq.SUB)
        self.live.subscribe(b"kv")
        self.asking: Any = self.context.socket(zmq.DEALER)
        self.live.connect(f"ipc://{folder}/events")
        self.asking.connect(f"ipc://{folder}/replay")
        for socket in (self.live, self.asking):
            socket.rcvtimeo = WITHIN_MS
        self.groups: dict[int, set[int]] = {}
        self.next = 0
        self.batches = self.dumps = 0
        self.subscribed = False

    def hear(self) -> None:
        """Waits for one batch."""
        topic, number, batch = self.live.recv_multipart()
        assert topic == b"kv"
        self.take(int.from_bytes(number, "big"), batch)

    def catch_up(self, first: int) -> None:
        """Asks for all batches from a number on, when no live one can be missed any more."""
        if not self.subscribed:
            self.live.recv_multipart()  # a sign of life at the latest
            self.subscribed = True
        self.asking.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            _, number, batch = self.asking.recv_multipart()
            if number == (2**64 - 1).to_bytes(8, "big"):
                return
            self.take(int.from_bytes(number, "big"), batch)

    def take(self, number: int, batch: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        is_dump = number >= self.next and len(events) > 1 and events[0]["type"] == "AllBlocksCleared"
        if number < self.next:
            return  # heard before
        assert number == self.next or is_dump, "a batch was lost"
        self.batches += 1
        self.next = number + 1
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.groups.clear()
            elif event["type"] == "BlockStored":
                self.groups.setdefault(event["group_idx"], set()).update(event["block_hashes"])
            else:
                self.groups[event["group_idx"]].difference_update(event["block_hashes"])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(tmp_path)
    yield router
    router.close()


def bench(folder: Path, families: tuple[Family, ...] = (FULL,), blocks: int = 60) -> Bench:
    config = KVEventsConfig.parse(f"ipc://{folder}/events?replay=ipc://{folder}/replay&topic=kv")
    return Bench(blocks, families=families, kv_events=config, idle_work=False)


def heard_all(router: Router, of: Bench) -> bool:
    resumable = of.cache.tree.resumable
    assert resumable is not None
    return all(
        router.groups.get(group, set()) == resumable.keys(group) for group in range(len(of.cache.families))
    )


FAMILIES = [(FULL,), (FULL, window(24)), (FULL, STATE)]


@pytest.mark.parametrize("families", FAMILIES, ids=lambda fs: "+".join(f.name for f in fs))
def test_a_listener_knows_the_blocks_of_the_engine(
    families: tuple[Family, ...], tmp_path: Path, router: Router
) -> None:
    of = bench(tmp_path, families)
    router.catch_up(0)
    for seed in range(12):  # more than the pool holds
        of.ask([*numbers(seed % 3, 20), *numbers(seed, 20)], 4)
        of.run()
    router.catch_up(router.next)
    while not heard_all(router, of):
        router.hear()
    assert router.groups[0]
    of.engine.clear_cache()
    while any(router.groups.values()):
        of.engine.step()
        router.hear()
    of.engine.stop()


@pytest.mark.parametrize("families", FAMILIES, ids=lambda fs: "+".join(f.name for f in fs))
def test_a_listener_that_comes_late_gets_the_whole_set(
    families: tuple[Family, ...], tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "KEPT_BATCHES", 2)
    of = bench(tmp_path, families)
    for seed in range(12):
        of.ask([*numbers(seed % 3, 20), *numbers(seed, 20)], 4)
        of.run()
    with of.engine:  # its thread makes the dump
        router.catch_up(0)
        assert heard_all(router, of)
        assert router.groups[0]


def test_one_dump_is_for_all_that_ask_while_it_is_made(
    tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listeners that ask again and again do not hold up the engine's thread."""
    monkeypatch.setattr(publisher, "KEPT_BATCHES", 2)
    of = bench(tmp_path)
    events, dumps = of.engine.parts.kv_events, list[object]()
    assert events is not None
    opened = events._publisher
    assert isinstance(opened, publisher.EventPublisher)
    dump = opened._dump

    def noted(put: Any) -> None:
        dumps.append(put)
        dump(put)

    monkeypatch.setattr(opened, "_dump", noted)
    for seed in range(12):
        of.ask([*numbers(seed % 3, 20), *numbers(seed, 20)], 4)
        of.run()
    for _ in range(20):
        router.asking.send_multipart([b"", bytes(8)])
    wait_until(lambda: len(opened._awaiting) == 20)
    assert len(dumps) == 1
    with of.engine:  # its thread makes the dump
        for _ in range(20):
            _, number, batch = router.asking.recv_multipart()
            router.take(int.from_bytes(number, "big"), batch)
            assert router.asking.recv_multipart()[2] == b""
        assert heard_all(router, of)


def test_an_engine_that_forgets_everything_says_so(tmp_path: Path, router: Router) -> None:
    of = bench(tmp_path)
    of.ask(numbers(1, 30), 2)
    of.run()
    of.cache.reset()
    of.ask(numbers(2, 30), 2)
    of.run()
    router.catch_up(0)
    while not heard_all(router, of):
        router.hear()
    of.engine.stop()


def test_the_end_of_an_engine_is_announced(tmp_path: Path, router: Router) -> None:
    of = bench(tmp_path)
    router.catch_up(0)
    of.ask(numbers(1, 30), 2)
    of.run()
    router.catch_up(router.next)
    while not heard_all(router, of):
        router.hear()
    assert router.groups[0]
    of.engine.stop()
    while router.groups:
        router.hear()


def test_a_quiet_engine_gives_signs_of_life(
    tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.01)
    of = bench(tmp_path)
    for _ in range(3):
        topic, _, batch = router.live.recv_multipart()
        assert (topic, msgspec.msgpack.decode(batch)[1:]) == (b"kv", [[], 0])
    of.engine.stop()


def test_listeners_that_ask_all_the_time_do_not_hold_up_what_a_quiet_engine_says(
    tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.2)
    of = bench(tmp_path)
    events = of.engine.parts.kv_events
    assert events is not None
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        router.asking.send_multipart([b"", (10**6).to_bytes(8, "big")])
        router.asking.recv_multipart()
        time.sleep(0.01)
    assert events.stats()["kv_events"].batches >= 2
    of.engine.stop()


@pytest.mark.parametrize(
    ("text", "endpoint", "replay", "binds"),
    [
        ("tcp://*:5557", "tcp://*:5557", None, True),
        ("tcp://127.0.0.1:5557?replay=5558", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", True),
        ("tcp://[::]:5557?replay=5558", "tcp://[::]:5557", "tcp://[::]:5558", True),
        ("tcp://router.example:5557?replay=5558", "tcp://router.example:5557", "tcp://*:5558", False),
        ("ipc:///run/kv?replay=ipc:///run/again", "ipc:///run/kv", "ipc:///run/again", True),
    ],
)
def test_addresses(text: str, endpoint: str, replay: str | None, binds: bool) -> None:
    config = KVEventsConfig.parse(text)
    assert (config.endpoint, config.replay_endpoint, config.binds) == (endpoint, replay, binds)
    assert KVEventsConfig.parse(str(config)) == config


@pytest.mark.parametrize(
    "text",
    [
        *("", "5557", "http://a:1", "tcp://*", "tcp://*:5557?replay=x", "tcp://*:5557?form=map"),
        *("tcp://*:65536", "tcp://*:5557?replay=65536", "tcp://*:5557?replay=tcp://*:99999"),
        *("ipc://a?replay=5", "tcp://*:5557?format=xml", "tcp://*:123456", "tcp://*:5557?" + "a=1&" * 20),
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidOption):
        KVEventsConfig.parse(text)


def test_nothing_waits_for_a_publisher_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes that are never sent would fill the memory."""
    of = bench(tmp_path)
    assert of.engine.parts.kv_events is not None
    failing = of.engine.parts.kv_events._publisher
    assert isinstance(failing, publisher.EventPublisher)

    def fail(*_: object) -> bytes:
        raise ValueError

    monkeypatch.setattr(failing._encoder, "batch", fail)
    of.ask(numbers(1, 30), 2)
    of.run()
    join(failing._thread)
    left = failing._changes.qsize()
    for seed in range(5):
        of.ask(numbers(seed, 30), 2)
        of.run()
    assert failing._changes.qsize() == left
    of.engine.stop()
    assert "published no more" in caplog.text


def test_an_address_in_use_stops_the_start(tmp_path: Path) -> None:
    first = bench(tmp_path)
    with pytest.raises(InvalidOption, match="--kv-events"):
        Bench(kv_events=KVEventsConfig.parse("tcp://203.0.113.1:5557?replay=tcp://203.0.113.1:5558"))
    first.engine.stop()
