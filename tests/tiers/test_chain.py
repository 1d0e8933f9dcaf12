"""Chain of host RAM and a disk: one tier for its callers, in which every record can be loaded at every instant."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rootstock.cache.keys import Identity, Namespace, RecordKey
from rootstock.tiers.base import (
    AlreadyStored,
    Buffer,
    Loaded,
    LoadResult,
    LoadsOnly,
    Miss,
    MissKind,
    NotStored,
    Off,
    Ready,
    Record,
    Refusal,
    Stored,
    Tier,
)
from rootstock.tiers.chain import TierChain
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.host import HostTier
from rootstock.tiers.writer import Done, PutResult, Queued, TierWriter
from tiers.helpers import (
    CAP_BYTES,
    EACH,
    damage,
    identity_of,
    is_right,
    joined,
    keys_of,
    kind_of_miss,
    open_tier,
    record_of,
    records,
)
from waiting import join, wait_until


class HeldWriter:
    """Writer that stores its records in the lower tier when a test lets it."""

    def __init__(self, lower: Tier) -> None:
        self.lower = lower
        self.waiting: list[tuple[Record, Done | None]] = []
        self.full = self.stays_full = False

    def put(self, record: Record, done: Done | None = None) -> PutResult:
        if self.full:
            return NotStored(Refusal.QUEUE_FULL)
        self.waiting.append((record, done))
        return Queued()

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        for record, _ in self.waiting:
            if record.identity.key == identity.key:
                return Loaded(tuple(memoryview(bytearray(view)) for view in record.views()))
        return self.lower.load(identity, into)

    def let(self) -> None:
        waiting, self.waiting = self.waiting, []
        for record, done in waiting:
            (outcome,) = self.lower.store([record])
            if done is not None:
                done(record.identity.key, outcome)

    def drain(self) -> None:
        self.let()
        self.full = self.full and self.stays_full

    def close(self) -> None:
        self.let()


class Chain:
    """Chain above a disk, whose upper tier has room for `above` records."""

    def __init__(self, folder: Path, above: int, lower_bytes: int = 16 * CAP_BYTES) -> None:
        self.gone: list[RecordKey] = []
        self.disk: DiskTier = open_tier(folder, lower_bytes)
        self.host = HostTier(above * EACH)
        self.writer = HeldWriter(self.disk)
        self.tier = TierChain(self.host, self.disk, self.writer, gone=self.gone.extend)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    chain = Chain(tmp_path / "tier", above=2)
    yield chain
    chain.tier.close()


@contextmanager
def real_chain(folder: Path, above: int) -> Iterator[tuple[TierChain, DiskTier]]:
    disk = open_tier(folder, 16 * CAP_BYTES)
    tier = TierChain(HostTier(above * EACH), disk, TierWriter(disk, 4 * CAP_BYTES, group_bytes=20_000))
    try:
        yield tier, disk
    finally:
        tier.close()


def keys_in(tier: Tier) -> list[RecordKey]:
    return [entry.identity.key for entry in tier.entries()]


def test_a_record_is_stored_above_and_moves_to_the_disk_when_it_is_evicted(chain: Chain) -> None:
    group = records(3)
    assert chain.tier.store(group) == [Stored(EACH)] * 3
    assert set(keys_in(chain.host)) == set(keys_of(group[1:]))
    assert keys_in(chain.disk) == []
    chain.writer.let()
    assert keys_in(chain.disk) == keys_of(group[:1])
    for record in group:
        assert is_right(chain.tier.load(record.identity), record)
    assert chain.tier.store(group[1:]) == [AlreadyStored()] * 2
    assert chain.gone == []


def test_a_moving_record_is_found_and_listed_once(chain: Chain) -> None:
    group = records(5)
    chain.tier.store(group)
    assert len(chain.writer.waiting) == 3
    for record in group:
        assert is_right(chain.tier.load(record.identity), record)
    assert sorted(keys_in(chain.tier)) == sorted(keys_of(group))
    chain.tier.store(group[:1])  # above again, while it is on its way
    assert sorted(keys_in(chain.tier)) == sorted(keys_of(group))
    chain.writer.let()
    assert sorted(keys_in(chain.tier)) == sorted(keys_of(group))


def test_a_load_fills_the_callers_buffers_from_both_tiers(tmp_path: Path) -> None:
    with real_chain(tmp_path / "tier", above=1) as (tier, _):
        group = records(4)
        tier.store(group)
        for record in group:
            buffers = [np.zeros(n, np.uint8) for n in (1000, 1, 1999)]
            assert is_right(tier.load(record.identity, buffers), record)
            assert joined(buffers) == joined(record.payload)
        assert tier.load(identity_of(99)) == Miss(MissKind.ABSENT)


def test_entries_of_both_tiers_come_with_parents_first(chain: Chain) -> None:
    conversation = [record_of(identity_of(1, start, start + 16)) for start in range(0, 96, 16)]
    for record in reversed(conversation):
        chain.tier.store([record])
    chain.writer.let()
    chain.tier.store([conversation[3]])  # one is evicted for it, and on its way
    assert len(chain.writer.waiting) == 1
    assert keys_in(chain.tier) == keys_of(conversation)


def test_a_use_counts_in_both_tiers(chain: Chain) -> None:
    group = records(4)
    chain.tier.store(group)
    chain.writer.let()
    chain.tier.touch([group[0].identity.key, group[2].identity.key])
    uses = {entry.identity.key: entry.uses for entry in chain.tier.entries()}
    assert [uses[key] for key in keys_of(group)] == [1, 0, 1, 0]
    chain.tier.store(records(1, first=9))
    assert keys_of(group[3:]) == [record.identity.key for record, _ in chain.writer.waiting]


def test_a_record_too_large_for_the_upper_tier_is_stored_below(chain: Chain) -> None:
    small, large = records(1)[0], record_of(identity_of(7), 3 * EACH)
    outcomes = chain.tier.store([small, large])
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    assert keys_in(chain.disk) == keys_of([large])
    assert is_right(chain.tier.load(large.identity), large)


@pytest.mark.parametrize("stays_full", [False, True])
def test_a_store_waits_for_a_full_writer_and_no_record_is_lost(chain: Chain, stays_full: bool) -> None:
    group = records(5)
    chain.tier.store(group[:3])
    chain.writer.full, chain.writer.stays_full = True, stays_full
    assert chain.tier.store(group[3:]) == [Stored(EACH)] * 2
    assert group[0].identity.key in keys_in(chain.disk)
    assert all(is_right(chain.tier.load(record.identity), record) for record in group)
    assert sorted(keys_in(chain.tier)) == sorted(keys_of(group))
    assert chain.gone == []


@pytest.mark.behaviour(45)
def test_a_record_is_readable_while_a_store_waits_for_the_disk(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = records(3)
    chain.tier.store(group[:2])
    chain.writer.full, found = True, []
    monkeypatch.setattr(
        chain.writer, "drain", lambda: found.append(is_right(chain.tier.load(group[0].identity), group[0]))
    )
    chain.tier.store(group[2:])
    assert found == [True]


def test_many_records_pass_a_small_queue_without_a_loss(tmp_path: Path) -> None:
    group = records(120)
    disk = open_tier(tmp_path / "tier", 16 * CAP_BYTES)
    tier = TierChain(HostTier(4 * EACH), disk, TierWriter(disk, 10_000))
    writer = TierWriter(tier, 10 * CAP_BYTES)
    assert [writer.put(record) for record in group] == [Queued()] * len(group)
    writer.close()
    assert all(is_right(tier.load(record.identity), record) for record in group)
    tier.close()


def test_refused_records_are_gone_unless_the_upper_tier_has_them_again(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = records(4)
    chain.tier.store(group)
    chain.tier.store(group[:1])
    monkeypatch.setattr(chain.disk, "store", lambda records: [NotStored(Refusal.FAILED, "no")] * len(records))
    chain.writer.let()
    assert chain.gone == keys_of(group[1:3])
    assert is_right(chain.tier.load(group[0].identity), group[0])


def test_a_record_damaged_above_is_loaded_from_below(chain: Chain) -> None:
    group = records(3)
    chain.tier.store(group)
    chain.writer.let()
    chain.tier.store(group[:1])  # now both have it
    damage(chain.host, group[0].identity.key)
    assert is_right(chain.tier.load(group[0].identity), group[0])
    assert chain.gone == []
    assert group[0].identity.key not in chain.host


def test_damage_of_the_only_copy_is_a_miss_and_is_reported(chain: Chain) -> None:
    (record,) = records(1)
    chain.tier.store([record])
    damage(chain.host, record.identity.key)
    assert kind_of_miss(chain.tier.load(record.identity)) is MissKind.CHECKSUM
    assert chain.gone == keys_of([record])
    assert chain.tier.load(record.identity) == Miss(MissKind.ABSENT)


def test_quarantine_removes_records_above_below_and_moving(chain: Chain) -> None:
    group = records(6)
    chain.tier.store(group[:3])
    chain.writer.let()
    chain.tier.store(group[3:])  # below, three on their way, two above
    bad = [group[0], group[2], group[5]]
    chain.tier.quarantine(keys_of(bad))
    for _ in range(2):
        for record in group:
            result = chain.tier.load(record.identity)
            assert result == Miss(MissKind.ABSENT) if record in bad else is_right(result, record)
        assert sorted(keys_in(chain.tier)) == sorted(set(keys_of(group)) - set(keys_of(bad)))
        chain.writer.let()
    assert chain.tier.store(bad[:1]) == [Stored(EACH)]
    assert is_right(chain.tier.load(bad[0].identity), bad[0])


def test_clear_removes_records_above_below_and_moving(chain: Chain) -> None:
    group = records(6)
    chain.tier.store(group[:3])
    chain.writer.let()
    chain.tier.store(group[3:])
    chain.tier.clear()
    for _ in range(2):
        assert keys_in(chain.tier) == []
        assert all(chain.tier.load(record.identity) == Miss(MissKind.ABSENT) for record in group)
        chain.writer.let()
    assert keys_in(chain.disk) == []
    chain.tier.store(group[:1])
    assert keys_in(chain.tier) == keys_of(group[:1])


def test_clearing_a_namespace_leaves_all_others(chain: Chain) -> None:
    another = Namespace("weights", "float32", salt="another")
    ours = records(3)
    theirs = [record_of(identity_of(seed, namespace=another)) for seed in range(3)]
    for pair in zip(ours, theirs, strict=True):  # below, on their way, above
        chain.tier.store(pair)
        chain.writer.let()
    chain.tier.clear(another.digest())
    for _ in range(2):
        assert sorted(keys_in(chain.tier)) == sorted(keys_of(ours))
        assert all(is_right(chain.tier.load(record.identity), record) for record in ours)
        assert all(chain.tier.load(record.identity) == Miss(MissKind.ABSENT) for record in theirs)
        chain.writer.let()


def test_closing_stores_all_records_below(tmp_path: Path) -> None:
    group = records(40)
    with real_chain(tmp_path / "tier", above=30) as (tier, disk):
        tier.store(group)
    assert isinstance(tier.state, Off)
    assert isinstance(disk.state, Off)
    with real_chain(tmp_path / "tier", above=30) as (tier, disk):
        assert sorted(keys_in(tier)) == sorted(keys_of(group))
        assert all(is_right(tier.load(record.identity), record) for record in group)


def test_a_smaller_disk_keeps_the_records_used_last(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "tier", above=300, lower_bytes=CAP_BYTES)
    group = records(60, 20_000)
    chain.tier.store(group)
    chain.tier.touch(keys_of(group[:10]))
    chain.tier.close()
    disk = open_tier(tmp_path / "tier")
    kept = set(keys_in(disk))
    assert set(keys_of(group[:10])) <= kept
    assert len(kept) < len(group)
    disk.close()


def test_the_chain_serves_while_the_lower_tier_does_not(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain.disk, "_state", LoadsOnly("no room", 1e18))
    (record,) = records(1)
    assert chain.tier.state == Ready()
    assert chain.tier.store([record]) == [Stored(EACH)]
    assert is_right(chain.tier.load(record.identity), record)


@pytest.mark.behaviour(45)
def test_every_record_is_readable_while_it_moves(tmp_path: Path) -> None:
    group = [record_of(identity_of(seed), 4000) for seed in range(150)]
    wrong: list[object] = []
    published = 0
    done = threading.Event()
    with real_chain(tmp_path / "tier", above=4) as (tier, disk):

        def read(seed: int) -> None:
            random = np.random.default_rng(seed)
            while not done.is_set():
                if published:
                    # In most cases one that is moving to the disk.
                    back = int(random.integers(1, 20))
                    record = group[max(0, published - back)]
                    result = tier.load(record.identity)
                    if not is_right(result, record):
                        wrong.append((published - back, result))
                time.sleep(0.0005)  # lets the other threads run

        def some_in_every_place() -> bool:  # no more than so many are on their way
            return published - 4 - disk.counts.stored_records <= 15

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for record in group:
            assert isinstance(tier.store([record])[0], Stored)
            published += 1
            wait_until(some_in_every_place)
            if published % 8 == 0:
                listed = keys_in(tier)
                assert len(listed) == len(set(listed)) == published
        done.set()
        join(*threads)
        assert wrong == []
    assert disk.counts.stored_records == len(group)
