"""The listener beside real engines and beside a publisher that misbehaves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.helpers import Bench, numbers
from rootstock.cache.families import Family
from rootstock.engine.kv_events import publisher
from rootstock.fleet import event_listener
from rootstock.fleet.event_listener import EventListener
from rootstock.fleet.prefix_index import PrefixIndex
from rootstock.fleet_config import KVEventsConfig
from rootstock.testing.fake_runtime import FULL, STATE, window
from waiting import HANG_S, join, wait_until

FAMILIES = [(FULL,), (FULL, window(24)), (FULL, STATE)]
END = (2**64 - 1).to_bytes(8, "big")
CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def listener(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventListener]:
    monkeypatch.setattr(event_listener, "RETRY_S", 0.05)
    # Only tests of silence let a busy machine's replicas be silent.
    monkeypatch.setattr(event_listener, "SILENCE_S", HANG_S)
    listener = EventListener(index)
    yield listener
    listener.close()


def has(index: PrefixIndex, slot: int, key: int) -> bool:
    return index.matched(np.array([key], np.uint64), [slot])[slot] == 1


# ------------------------------------------------------------------------------------------- real engines


def bench(folder: Path, families: tuple[Family, ...] = (FULL,)) -> Bench:
    config = KVEventsConfig.parse(f"ipc://{folder}/events?replay=ipc://{folder}/replay&topic=kv")
    return Bench(60, families=families, kv_events=config, idle_work=False)


def follow(listener: EventListener, index: PrefixIndex, folder: Path) -> int:
    slot = index.join()
    listener.follow(slot, f"ipc://{folder}/events", f"ipc://{folder}/replay")
    return slot


def knows(listener: EventListener, index: PrefixIndex, slot: int, of: Bench) -> bool:
    """Returns whether the index has exactly the engine's blocks. It is the only replica that has any of them."""
    resumable = of.cache.tree.resumable
    assert resumable is not None
    expected = resumable.keys(0)
    return (
        listener.is_known(slot)
        and all(has(index, slot, key) for key in expected)
        and blocks_of(index, slot) == len(expected)
    )


def blocks_of(index: PrefixIndex, slot: int) -> int:
    return int(np.count_nonzero(index._table.masks >> np.uint64(slot) & np.uint64(1)))


@pytest.mark.parametrize("families", FAMILIES, ids=lambda fs: "+".join(f.name for f in fs))
def test_the_index_has_the_blocks_of_each_engine(
    families: tuple[Family, ...], tmp_path: Path, listener: EventListener, index: PrefixIndex
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    engines = [bench(folder, families) for folder in folders]
    slots = [follow(listener, index, folder) for folder in folders]
    rng = random.Random(1)
    for seed in range(16):
        of = rng.choice(engines)
        of.ask([*numbers(seed % 3, 20), *numbers(seed, 20)], 4)
        of.run()
        if seed % 5 == 4:
            for slot, engine in zip(slots, engines, strict=True):
                wait_until(lambda slot=slot, engine=engine: knows(listener, index, slot, engine))
    assert blocks_of(index, slots[0])
    engines[0].engine.stop()  # its memory ends with it
    wait_until(lambda: blocks_of(index, slots[0]) == 0)
    wait_until(lambda: knows(listener, index, slots[1], engines[1]))
    engines[1].engine.stop()


@pytest.mark.parametrize("families", FAMILIES, ids=lambda fs: "+".join(f.name for f in fs))
def test_a_late_listener_gets_the_whole_set(
    families: tuple[Family, ...],
    tmp_path: Path,
    listener: EventListener,
    index: PrefixIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "KEPT_BATCHES", 2)
    of = bench(tmp_path, families)
    for seed in range(12):
        of.ask([*numbers(seed % 3, 20), *numbers(seed, 20)], 4)
        of.run()
    with of.engine:  # its thread makes the dump
        slot = follow(listener, index, tmp_path)
        wait_until(lambda: knows(listener, index, slot, of))
        assert blocks_of(index, slot)


def test_an_engine_that_starts_again_is_read_anew(
    tmp_path: Path, listener: EventListener, index: PrefixIndex
) -> None:
    slot = follow(listener, index, tmp_path)
    for life in range(3):
        of = bench(tmp_path)
        for seed in range(3 - life):  # a later life has fewer batches
            of.ask(numbers(10 * life + seed, 40), 2)
            of.run()
        wait_until(lambda of=of: knows(listener, index, slot, of))
        of.engine.stop()


# --------------------------------------------------------------------------------- a publisher by hand


class Publisher:
    """A replica whose messages a test chooses. It answers requests for replay from `history`, on a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = zmq.Context()
        self.live: Any = self.context.socket(zmq.XPUB)
        self.live.bind(f"ipc://{folder}/events")
        self.history: list[bytes] = []
        self.first = 0  # the number of the first batch that is kept
        self.answer: Callable[[int], list[list[bytes]]] = self.kept
        self.asked: list[int] = []
        self.now_s = 1000.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def start_again(self) -> None:
        """Begins with number 0 again, as another process at the same address."""
        self.history, self.first = [], 0

    def batch(self, *events: dict[str, Any]) -> bytes:
        self.now_s += 1
        return msgspec.msgpack.encode([self.now_s, events, 0])

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        batch = self.batch(*events)
        self.history.append(batch)
        if not lost:
            self.send(len(self.history) - 1, batch)

    def send(self, number: int, batch: bytes) -> None:
        self.live.send_multipart([b"", number.to_bytes(8, "big"), batch])

    def heard(self) -> None:
        """Waits until a listener has subscribed."""
        assert self.live.poll(HANG_S * 1000)
        self.live.recv()

    def kept(self, first: int) -> list[list[bytes]]:
        found = enumerate(self.history[self.first :], self.first)
        return [[n.to_bytes(8, "big"), batch] for n, batch in found if n >= first]

    def close(self) -> None:
        self._ended.set()
        join(self._thread)
        self.context.destroy(linger=0)

    def _answer(self) -> None:
        socket: Any = self.context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{self.folder}/replay")
        while not self._ended.is_set():
            if socket.poll(5):
                client, empty, first = socket.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                for part in [*self.answer(self.asked[-1]), [END, b""]]:
                    socket.send_multipart([client, empty, *part])
        socket.close()


def stored(*keys: int, group: int = 0) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": keys, "token_ids": [1] * 8, "group_idx": group}


def removed(*keys: int, group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": "GPU", "group_idx": group}


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Publisher]:
    replica = Publisher(tmp_path)
    yield replica
    replica.close()


@pytest.fixture
def slot(replica: Publisher, listener: EventListener, index: PrefixIndex) -> int:
    """A replica that is followed, and has block 1."""
    replica.publish(CLEARED, stored(1), lost=True)
    slot = follow(listener, index, replica.folder)
    wait_until(lambda: listener.is_known(slot) and has(index, slot, 1))
    replica.heard()
    return slot


def test_only_prefixes_from_which_a_request_can_resume_are_indexed(
    replica: Publisher, slot: int, index: PrefixIndex
) -> None:
    replica.publish(stored(2, 3, 4), stored(5, group=1), removed(2, group=1), removed(3))
    wait_until(lambda: has(index, slot, 4))
    assert [key for key in range(10) if has(index, slot, key)] == [1, 2, 4]


def test_lost_batches_are_asked_for(
    replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    for key in range(2, 20):
        replica.publish(stored(key), removed(key - 1), lost=key % 5 != 0)
    replica.publish()
    wait_until(lambda: has(index, slot, 19))
    assert blocks_of(index, slot) == 1
    assert listener.stats.losses == 0


def test_a_gap_that_is_too_old_ends_with_a_dump(
    replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    for key in range(2, 20):
        replica.publish(stored(key), removed(key - 1), lost=True)
    dump = replica.batch(CLEARED, stored(19))
    replica.answer = lambda first: [[(19).to_bytes(8, "big"), dump]]
    replica.publish()  # batch 19
    wait_until(lambda: has(index, slot, 19))
    replica.publish(stored(20))
    wait_until(lambda: has(index, slot, 20))
    assert blocks_of(index, slot) == 2
    assert listener.stats.losses == 0


@pytest.mark.parametrize("lives_to", [0, 1, 2, 3, 6])
def test_another_publisher_at_the_address_is_read_from_its_beginning(
    replica: Publisher, slot: int, index: PrefixIndex, lives_to: int
) -> None:
    """Whatever the first batch is that is heard of the new one: numbers before, at and behind the old one's."""
    for key in (2, 3):
        replica.publish(stored(key))
    wait_until(lambda: has(index, slot, 3))
    replica.start_again()
    for number in range(lives_to):
        replica.publish(stored(100 + number), lost=True)
    replica.publish(*([CLEARED] if lives_to in (0, 3) else []), stored(100 + lives_to))
    expected = range(103, 104) if lives_to == 3 else range(100, 101 + lives_to)
    wait_until(lambda: [key for key in range(200) if has(index, slot, key)] == list(expected))


def test_a_publisher_that_has_fewer_batches_than_were_heard_is_another_one(
    replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    replica.publish(stored(3))
    wait_until(lambda: has(index, slot, 3))
    replica.publish(stored(2), lost=True)
    replica.answer = lambda first: [] if first else replica.kept(0)
    replica.publish()
    wait_until(lambda: listener.stats.losses == 1)
    wait_until(lambda: listener.is_known(slot) and has(index, slot, 2))


def test_an_answer_with_a_hole_is_not_taken(
    replica: Publisher,
    slot: int,
    listener: EventListener,
    index: PrefixIndex,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for key in (2, 3, 4):
        replica.publish(stored(key), lost=True)
    replica.answer = lambda first: [part for part in replica.kept(first) if part[0][-1] != 2]
    replica.publish()
    wait_until(lambda: "batch 3 came in place of batch 2" in caplog.text)
    replica.answer = replica.kept
    replica.publish()  # a sign of life
    wait_until(lambda: listener.is_known(slot) and blocks_of(index, slot) == 4)


def test_a_replica_that_has_published_nothing_is_known(
    replica: Publisher, listener: EventListener, index: PrefixIndex
) -> None:
    slot = follow(listener, index, replica.folder)
    wait_until(lambda: listener.is_known(slot))
    replica.heard()
    replica.publish(CLEARED, stored(1))
    wait_until(lambda: has(index, slot, 1))


MALFORMED = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"events": []}),
    msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [-1]}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [b"abc"]}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [1.5]}], 0]),
    msgspec.msgpack.encode([1.0, [{"type": "Other"}], 0]),
    msgspec.msgpack.encode([1.0, ["BlockRemoved", [1]], 0]),
    b"\x93" * 100_000,
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_batch_drops_the_replica_s_blocks_until_it_is_read_anew(
    number: int, replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    replica.answer = lambda first: [[first.to_bytes(8, "big"), MALFORMED[number]]]
    replica.send(1, MALFORMED[number])
    wait_until(lambda: len(replica.asked) >= 3)  # tried again and again
    assert not listener.is_known(slot)
    assert blocks_of(index, slot) == 0
    replica.answer = replica.kept
    replica.publish(stored(2))
    wait_until(lambda: listener.is_known(slot) and has(index, slot, 1) and has(index, slot, 2))


@pytest.mark.parametrize("parts", [[b""], [b"", b"1"], [b"", b"1", b"2"], [b"", bytes(8), b"", b""]])
def test_messages_that_are_no_batches_are_survived(
    parts: list[bytes], replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    replica.live.send_multipart(parts)
    wait_until(lambda: listener.stats.losses == 1)
    wait_until(lambda: listener.is_known(slot) and has(index, slot, 1))


def test_random_bytes_are_survived(
    replica: Publisher,
    slot: int,
    listener: EventListener,
    index: PrefixIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_listener, "SILENCE_S", 0.5)
    rng = random.Random(0)
    for _ in range(300):
        whole = bytearray(replica.batch(CLEARED, stored(7, 8), removed(8)))
        for _ in range(rng.randrange(1, 4)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        replica.send(rng.choice([0, 1, 2, 2**64 - 1]), bytes(whole[: rng.randrange(len(whole) + 1)]))
    # A damaged time may be far ahead: later batches are then taken for earlier ones, until the silence is noticed.
    wait_until(lambda: has(index, slot, 99) or replica.publish(CLEARED, stored(99)))
    assert listener._thread.is_alive()


def test_a_silent_replica_is_unknown_until_it_is_heard_again(
    replica: Publisher,
    slot: int,
    listener: EventListener,
    index: PrefixIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_listener, "SILENCE_S", 0.2)
    # The listener forgets the replica first, and clears its blocks after that.
    wait_until(lambda: not listener.is_known(slot) and blocks_of(index, slot) == 0)
    asked = len(replica.asked)
    monkeypatch.setattr(event_listener, "SILENCE_S", HANG_S)
    replica.publish(stored(2))
    wait_until(lambda: listener.is_known(slot) and has(index, slot, 1) and has(index, slot, 2))
    assert len(replica.asked) > asked


def test_a_replica_that_does_not_answer_holds_up_no_other(
    tmp_path: Path, listener: EventListener, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_listener, "ANSWER_S", 0.05)
    (tmp_path / "gone").mkdir()
    gone = [follow(listener, index, tmp_path / "gone") for _ in range(5)]
    of = bench(tmp_path)
    slot = follow(listener, index, tmp_path)
    of.ask(numbers(1, 40), 2)
    of.run()
    wait_until(lambda: knows(listener, index, slot, of))
    wait_until(lambda: listener.stats.replays > 12)  # asked again and again
    assert not any(listener.is_known(each) for each in gone)
    of.ask(numbers(2, 40), 2)
    of.run()
    wait_until(lambda: knows(listener, index, slot, of))
    of.engine.stop()


def test_addresses_that_cannot_be_used_are_survived(
    listener: EventListener, index: PrefixIndex, replica: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("", "nonsense", "tcp://:::"):
        listener.follow(index.join(), text, text)
    replica.publish(CLEARED, stored(1), lost=True)
    slot = follow(listener, index, replica.folder)
    wait_until(lambda: has(index, slot, 1))
    assert "not known" in caplog.text


def test_a_replica_that_is_forgotten_leaves_no_blocks(
    replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    listener.forget(slot)
    wait_until(lambda: not listener.is_known(slot) and len(index) == 0)
    replica.publish(stored(5))
    again = follow(listener, index, replica.folder)
    wait_until(lambda: listener.is_known(again) and has(index, again, 5))
    assert again != slot


def test_a_listener_that_is_closed_knows_nothing(
    replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    listener.close()
    assert not listener.is_known(slot)
    assert len(index) == 0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_lost_in_the_end_the_index_is_right(
    seed: int, replica: Publisher, slot: int, listener: EventListener, index: PrefixIndex
) -> None:
    """A random life: batches are lost, come twice or malformed, publishers start again, histories are cut off."""
    rng, of = random.Random(seed), {1}
    for _ in range(150):
        act = rng.random()
        if act < 0.03:
            replica.start_again()
            of = set()
            replica.publish(CLEARED, lost=rng.random() < 0.5)
        elif act < 0.06:
            replica.send(rng.randrange(len(replica.history) + 2), rng.choice(MALFORMED))
        elif act < 0.09:
            number = rng.randrange(len(replica.history))
            replica.send(number, replica.history[number])
        elif act < 0.12:
            of = {rng.randrange(1, 1000)}
            replica.publish(CLEARED, stored(*of), lost=rng.random() < 0.5)
        else:
            new, gone = {rng.randrange(1, 1000) for _ in range(5)}, set(rng.sample(sorted(of), len(of) // 2))
            of = of - gone | new
            replica.publish(removed(*gone), stored(*new), lost=rng.random() < 0.3)

    def is_right() -> bool:
        replica.publish()  # a sign of life
        return (
            listener.is_known(slot)
            and blocks_of(index, slot) == len(of)
            and all(has(index, slot, key) for key in of)
        )

    wait_until(is_right)
