"""Tier writer: queued records are readable, puts do not block, and every outcome is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import rootstock.tiers.writer
from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep
from rootstock.tiers.base import (
    Buffer,
    Entry,
    LoadResult,
    Miss,
    MissKind,
    NotStored,
    Ready,
    Record,
    Refusal,
    Stored,
    StoreOutcome,
    TierState,
)
from rootstock.tiers.writer import Queued, TierWriter
from tiers.helpers import CAP_BYTES, identity_of, is_right, joined, open_tier, record_of, records
from waiting import HANG_S, join, wait_for, wait_until


class SlowTier:
    """Tier in a dictionary, which stores only after `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.stored: dict[RecordKey, Record] = {}
        self.groups: list[int] = []
        self.fails = False

    @property
    def state(self) -> TierState:
        return Ready()

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        self.begun.set()
        wait_for(self.go)
        if self.fails:
            raise ZeroDivisionError("a bug")
        self.groups.append(len(records))
        self.stored |= {record.identity.key: record for record in records}
        return [Stored(record.payload_bytes) for record in records]

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        return Miss(MissKind.ABSENT)

    def touch(self, keys: Iterable[RecordKey]) -> None: ...
    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None: ...

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None: ...


@pytest.mark.behaviour(45)
def test_a_record_is_found_in_the_queue_and_while_it_is_being_stored() -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 10_000)
    first, second = records(2)
    assert writer.put(first) == Queued()
    wait_for(tier.begun)
    assert writer.put(second) == Queued()
    for record in (first, second):
        assert is_right(writer.load(record.identity), record)
        buffers = [np.zeros(n, np.uint8) for n in (1000, 1, 1999)]
        assert is_right(writer.load(record.identity, buffers), record)
        assert joined(buffers) == joined(record.payload)
    assert writer.load(identity_of(99)) == Miss(MissKind.ABSENT)
    assert writer.load(first.identity, [np.zeros(7, np.uint8)]) == Miss(MissKind.OTHER_SIZE)
    tier.go.set()
    writer.close()
    assert writer.waiting_bytes == 0


def test_a_put_that_does_not_fit_is_refused_at_once() -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 7000)
    first, second, third = records(3)
    assert [writer.put(first), writer.put(second), writer.put(second)] == [Queued()] * 3
    assert writer.put(third) == NotStored(Refusal.QUEUE_FULL)
    assert writer.waiting_bytes == 6000
    tier.go.set()
    writer.drain()
    assert writer.put(third) == Queued()
    writer.close()
    assert set(tier.stored) == {record.identity.key for record in (first, second, third)}


def test_every_callback_is_called_once_after_the_store() -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 100_000)
    told: list[tuple[RecordKey, StoreOutcome]] = []
    group = records(3)
    for record in group:
        writer.put(record, lambda key, outcome: told.append((key, outcome)))
    writer.put(group[2], lambda key, outcome: told.append((key, outcome)))
    assert told == []
    tier.go.set()
    writer.drain()
    writer.close()
    keys = [record.identity.key for record in group]
    assert [key for key, _ in told] == [*keys, keys[2]]
    assert all(isinstance(outcome, Stored) for _, outcome in told)


def test_a_drain_waits_for_callbacks() -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 100_000)
    telling, tell = threading.Event(), threading.Event()
    told: list[RecordKey] = []

    def listener(key: RecordKey, outcome: StoreOutcome) -> None:
        telling.set()
        wait_for(tell)
        told.append(key)

    record = records(1)[0]
    writer.put(record, listener)
    tier.go.set()
    wait_for(telling)
    draining = threading.Thread(target=writer.drain)
    draining.start()
    wait_until(lambda: writer._in_a_hurry)  # the drain has begun …
    assert draining.is_alive()
    tell.set()
    join(draining)  # … and ends once the listener has returned
    assert told == [record.identity.key]
    writer.close()


def test_a_drain_does_not_wait_for_records_queued_after_it_began() -> None:
    tier = SlowTier()
    tier.go.set()
    writer = TierWriter(tier, 10**6)
    drained = threading.Event()
    more, in_time = iter(records(200)), [True]

    def another(key: RecordKey, outcome: StoreOutcome) -> None:
        record = None if drained.is_set() else next(more, None)
        if record is not None:
            writer.put(record, another)
        else:
            in_time.append(drained.wait(HANG_S))  # the writer is never idle before the drain has returned

    writer.put(next(more), another)
    writer.drain()
    drained.set()
    writer.close()
    assert all(in_time)


def test_a_callback_waits_for_loads_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 100_000)
    record = records(1)[0]
    told: list[RecordKey] = []
    writer.put(record, lambda key, outcome: told.append(key))
    reading, read_on = threading.Event(), threading.Event()
    copied = rootstock.tiers.writer._copied

    def slowly(*arguments: object) -> LoadResult:
        reading.set()
        wait_for(read_on)
        assert told == []
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rootstock.tiers.writer, "_copied", slowly)
    results: list[LoadResult] = []
    reader = threading.Thread(target=lambda: results.append(writer.load(record.identity)))
    reader.start()
    wait_for(reading)
    tier.go.set()
    wait_until(lambda: not writer.waiting_bytes)  # stored, and no longer in the queue
    assert told == []
    read_on.set()
    join(reader)
    writer.close()
    assert is_right(results[0], record)
    assert told == [record.identity.key]


def test_closing_stores_queued_records_and_refuses_new_ones() -> None:
    tier = SlowTier()
    writer = TierWriter(tier, 100_000)
    group = records(8)
    for record in group:
        writer.put(record)
    closing = threading.Thread(target=writer.close)
    closing.start()
    wait_until(lambda: writer._closing)
    tier.go.set()
    join(closing)
    assert len(tier.stored) == 8
    assert len(tier.groups) <= 2  # stored together, not one by one
    assert writer.put(group[0]) == NotStored(Refusal.UNAVAILABLE, "closed")
    writer.close()


def test_a_bug_in_a_tier_or_a_callback_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    tier = SlowTier()
    tier.go.set()
    tier.fails = True
    writer = TierWriter(tier, 100_000)
    first, second = records(2)
    outcomes: list[StoreOutcome] = []

    def listener(key: RecordKey, outcome: StoreOutcome) -> None:
        outcomes.append(outcome)
        raise KeyError("a bug of the listener's")

    writer.put(first, listener)
    writer.drain()
    tier.fails = False
    writer.put(second)
    writer.close()
    assert outcomes == [NotStored(Refusal.FAILED, "a bug")]
    assert set(tier.stored) == {second.identity.key}
    assert len(caplog.records) == 2


@pytest.mark.behaviour(45)
def test_every_record_is_readable_at_every_instant_from_put_to_disk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES)
    writer = TierWriter(tier, 4 * CAP_BYTES, group_bytes=20_000)
    group = [record_of(identity_of(seed), 4000) for seed in range(120)]
    wrong: list[object] = []
    published = 0
    done = threading.Event()

    def read() -> None:
        rng = np.random.default_rng(1)
        while not done.is_set():
            if published:
                record = group[int(rng.integers(published))]
                result = writer.load(record.identity)
                if not is_right(result, record):
                    wrong.append(result)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for record in group:
        assert writer.put(record) == Queued()
        published += 1
    writer.close()
    done.set()
    join(*threads)
    assert wrong == []
    assert tier.counts.stored_records == 120
    tier.close()


def test_records_queued_together_are_one_group_and_a_drain_does_not_linger() -> None:
    tier = SlowTier()
    tier.go.set()
    writer = TierWriter(tier, 10**6, linger_s=3600.0)
    for record in records(5):
        writer.put(record)
    writer.drain()  # does not linger
    assert tier.groups == [5]
    writer.put(records(1, first=5)[0])
    writer.close()
    assert tier.groups == [5, 1]
