"""Damaged directories: each damaged record is a miss, counted and quarantined. Wrong bytes are never loaded."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import RecordKind
from rootstock.tiers.base import (
    Loaded,
    LoadsOnly,
    Miss,
    MissKind,
    NotStored,
    Off,
    Ready,
    Record,
    Refusal,
    Stored,
)
from rootstock.tiers.disk.index import INDEX_NAME
from rootstock.tiers.disk.tier import RETRY_S, DiskTier
from rootstock.tiers.record import difference
from tiers.helpers import (
    CAP_BYTES,
    NAMESPACE,
    Clock,
    directory_bytes,
    identity_of,
    is_right,
    open_tier,
    record_of,
    records,
)

CASES = 200

# Records that differ from `identity_of(0)` in one respect, and the kind of miss that a load must report.
OTHERS = {
    "weights": (MissKind.OTHER_NAMESPACE, identity_of(0, namespace=replace(NAMESPACE, weights="others"))),
    "dtype": (MissKind.OTHER_DTYPE, identity_of(0, dtype="float64")),
    "position": (MissKind.OTHER_POSITION, identity_of(0, start=20, end=33)),
    "layers": (MissKind.OTHER_LAYERS, identity_of(0, layers=3)),
    "kind": (MissKind.OTHER_LAYERS, identity_of(0, kind=RecordKind.STATE)),
    "tokens": (MissKind.OTHER_TOKENS, identity_of(1)),
}


@pytest.mark.behaviour(40)
@pytest.mark.parametrize("how", OTHERS)
def test_another_identity_is_a_miss_of_the_kind_of_the_difference(how: str) -> None:
    kind, other = OTHERS[how]
    assert difference(identity_of(0), other) == difference(other, identity_of(0)) == kind


@pytest.mark.behaviour(40)
def test_a_damaged_index_never_returns_wrong_bytes(tmp_path: Path) -> None:
    rng = random.Random(6)
    folder = tmp_path / "tier"
    lost = 0
    group = records(12, 300)
    tier = open_tier(folder)
    tier.store(group)
    tier.close()
    pristine = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(CASES):
        for path in folder.iterdir():
            path.unlink()
        for name, content in pristine.items():
            (folder / name).write_bytes(content)
        content = bytearray(pristine[INDEX_NAME])
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (folder / INDEX_NAME).write_bytes(content)
        tier = DiskTier.open(folder, CAP_BYTES)  # type: ignore[assignment]
        if isinstance(tier, Off):
            assert "readonly" in tier.reason  # a flipped bit may call it the index of a later SQLite
            continue
        lost += tier.counts.indexes_lost
        known = {record.identity.key: record for record in group}
        for entry in tier.entries():
            assert entry.identity.key in known
        for record in group:
            result = tier.load(record.identity)
            assert isinstance(result, Miss) or is_right(result, record)
        outcome = tier.store(records(1, 300, first=99))[0]
        assert isinstance(outcome, Stored)
        tier.close()
    assert lost > 10


def test_a_process_without_free_descriptors_misses_but_keeps_the_record(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path / "tier", files=files)
    record = records(1)[0]
    tier.store([record])
    files.fail = lambda name: errno.EMFILE if name == "open_read" else 0
    assert isinstance(tier.load(record.identity), Miss)
    files.fail = lambda name: 0
    assert is_right(tier.load(record.identity), record)


def test_short_reads_and_writes_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(8)
    files = FaultyFiles()
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES, files=files)
    group = records(CASES, 300)
    for record in group:
        files.chunk_bytes = rng.randint(1, 200)
        assert isinstance(tier.store([record])[0], Stored)
        files.chunk_bytes = rng.randint(1, 200)
        assert is_right(tier.load(record.identity), record)


@pytest.mark.behaviour(42)
def test_a_full_disk_stops_stores_with_one_warning_until_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(9)
    files, clock = FaultyFiles(), Clock()
    folder = tmp_path / "tier"
    tier = open_tier(folder, 16 * CAP_BYTES, segment_bytes=2**20, files=files, clock=clock)
    kept: list[Record] = []
    for seed in range(CASES):
        before_bytes = directory_bytes(folder)
        files.free_bytes = rng.randrange(600)
        caplog.clear()
        refused = record_of(identity_of(seed), 600)
        outcome = tier.store([refused])[0]
        assert isinstance(outcome, NotStored)
        assert outcome.why is Refusal.FAILED
        assert isinstance(tier.state, LoadsOnly)
        assert isinstance(again := tier.store([refused])[0], NotStored)
        assert again.why is Refusal.UNAVAILABLE
        clock.now_s += RETRY_S
        assert isinstance(tier.store([refused])[0], NotStored)
        assert len(caplog.records) == 1
        assert tier.load(refused.identity) == Miss(MissKind.ABSENT)
        assert all(is_right(tier.load(record.identity), record) for record in kept[-3:])
        assert directory_bytes(folder) == before_bytes
        files.free_bytes = 2**60
        clock.now_s += RETRY_S
        record = record_of(identity_of(seed + 1000), 600)
        assert isinstance(tier.store([record])[0], Stored)
        assert tier.state == Ready()
        kept.append(record)
    assert tier.counts.stored_records == CASES
    assert all(is_right(tier.load(record.identity), record) for record in kept)


def test_an_index_that_fails_turns_the_tier_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path / "tier")
    group = records(3)
    tier.store(group)
    tier._index.close()
    for record in group:
        assert isinstance(tier.load(record.identity), Miss)
    assert isinstance(tier.state, Off)
    assert isinstance(tier.store(group)[0], NotStored)
    assert list(tier.entries()) == []
    assert len(caplog.records) == 1
    assert isinstance(tier.load(group[0].identity), Miss)
    assert not isinstance(tier.load(group[0].identity), Loaded)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_directory_that_cannot_be_used_is_no_tier(tmp_path: Path, number: int) -> None:
    class Refusing(FaultyFiles):
        def open_lock(self, path: Path) -> int:
            raise OSError(number, os.strerror(number))

    refused = DiskTier.open(tmp_path / "tier", CAP_BYTES, files=Refusing())
    assert isinstance(refused, Off)
    assert os.strerror(number) in refused.reason
