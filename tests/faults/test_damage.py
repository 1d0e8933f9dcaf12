"""Damaged directories: whatever is wrong is a miss, counted and quarantined. Nothing wrong is ever loaded."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import Namespace
from rootstock.cache.record_identity import Identity, Kind
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
from tiers.helpers import (
    CAP_BYTES,
    NAMESPACE,
    Clock,
    directory_bytes,
    identity_of,
    is_right,
    open_tier,
    payload_of,
    record_of,
    records,
    segment_files,
)

CASES = 200


def newest(folder: Path) -> tuple[Path, int]:
    """The segment that is being written, and its length."""
    files = list(segment_files(folder))
    return (files[-1], files[-1].stat().st_size) if files else (folder, 0)


def loads(tier: DiskTier, group: list[Record]) -> Counter[MissKind]:
    """Loads all; whatever is loaded must be right. The misses by kind."""
    kinds: Counter[MissKind] = Counter()
    for record in group:
        result = tier.load(record.identity)
        if isinstance(result, Miss):
            kinds[result.kind] += 1
            # Quarantined: from now on there is no such record.
            assert tier.load(record.identity) == Miss(MissKind.ABSENT)
        else:
            assert is_right(result, record)
    return kinds


@pytest.mark.behaviour(40)
def test_a_flipped_bit_anywhere_in_a_record_is_a_miss_of_that_record_alone(tmp_path: Path) -> None:
    rng = random.Random(0)
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES, segment_bytes=2**20)
    for case in range(CASES):
        group = [record_of(identity_of(3 * case + i), rng.randint(1, 400)) for i in range(3)]
        before, begin = newest(tmp_path / "tier")
        tier.store(group)
        path, end = newest(tmp_path / "tier")
        begin = begin if path == before else 0
        with path.open("r+b") as file:
            at = rng.randrange(begin, end)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        assert loads(tier, group) == {MissKind.CHECKSUM: 1}
    assert tier.counts.misses[MissKind.CHECKSUM] == tier.counts.quarantined_records == CASES


@pytest.mark.behaviour(40)
def test_a_segment_that_was_cut_off_loses_the_records_behind_the_cut(tmp_path: Path) -> None:
    rng = random.Random(1)
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES, segment_bytes=2**20)
    lost = 0
    for case in range(CASES):
        group = [record_of(identity_of(3 * case + i), rng.randint(1, 400)) for i in range(3)]
        before, begin = newest(tmp_path / "tier")
        tier.store(group)
        path, end = newest(tmp_path / "tier")
        begin = begin if path == before else 0
        os.truncate(path, rng.randrange(begin, end))
        kinds = loads(tier, group)
        assert set(kinds) == {MissKind.MISSING_BYTES}
        lost += kinds.total()
    assert tier.counts.misses[MissKind.MISSING_BYTES] == tier.counts.quarantined_records == lost


@pytest.mark.behaviour(40)
def test_bytes_that_are_missing_at_start_are_counted_and_the_rest_is_served(tmp_path: Path) -> None:
    rng = random.Random(2)
    folder = tmp_path / "tier"
    lost = 0
    while lost < CASES:
        tier = open_tier(folder, 16 * CAP_BYTES)
        tier.clear()
        group = [record_of(identity_of(seed), 2000) for seed in range(60)]
        tier.store(group)
        tier.close()
        paths = list(segment_files(folder))
        os.truncate(paths[0], rng.randrange(paths[0].stat().st_size))
        if rng.random() < 0.5:
            paths[1].unlink()
        tier = open_tier(folder, 16 * CAP_BYTES)
        missing = tier.counts.misses[MissKind.MISSING_BYTES]
        assert missing > 0
        assert loads(tier, group) == {MissKind.ABSENT: missing}
        assert tier.verify().failures == ()
        lost += missing
        tier.close()


@pytest.mark.behaviour(40)
def test_a_segment_that_goes_while_the_tier_is_open_is_missing_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    group = records(5)
    tier.store(group)
    next(segment_files(tmp_path / "tier")).unlink()
    assert loads(tier, group) == {MissKind.MISSING_BYTES: 5}


# Records that differ from `identity_of(seed)` in one respect, and how a load must call it.
OTHERS = {
    "weights": (MissKind.OTHER_NAMESPACE, {"namespace": replace(NAMESPACE, weights="others")}),
    "rope": (MissKind.OTHER_NAMESPACE, {"namespace": replace(NAMESPACE, rope_regime="yarn")}),
    "tenant": (MissKind.OTHER_NAMESPACE, {"namespace": Namespace("weights", "float32", salt="tenant")}),
    "dtype": (MissKind.OTHER_DTYPE, {"dtype": "float64"}),
    "position": (MissKind.OTHER_POSITION, {"start": 20, "end": 33}),
    "layers": (MissKind.OTHER_LAYERS, {"layers": 3}),
    "kind": (MissKind.OTHER_LAYERS, {"kind": Kind.STATE}),
}


def other_identity(seed: int, how: str) -> Identity:
    return identity_of(seed, **OTHERS[how][1])  # type: ignore[arg-type]


@pytest.mark.behaviour(40)
@pytest.mark.parametrize("how", [*OTHERS, "tokens"])
def test_a_row_that_leads_to_a_record_of_something_else_is_a_miss_of_that_kind(
    tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder, 16 * CAP_BYTES)
    pairs = []
    for seed in range(CASES):
        other = identity_of(seed + 10_000) if how == "tokens" else other_identity(seed, how)
        pairs.append((record_of(identity_of(seed), 100 + seed), record_of(other, 100 + seed)))
    tier.store([record for pair in pairs for record in pair])
    tier.close()
    with sqlite3.connect(folder / INDEX_NAME) as db:
        for one, other_record in pairs:
            keys = (one.identity.key, other_record.identity.key)
            query = "SELECT segment, offset, bytes, header_bytes FROM records WHERE key = ?"
            places = [db.execute(query, (key,)).fetchone() for key in keys]
            for key, place in zip(keys, reversed(places), strict=True):
                query = (
                    "UPDATE records SET segment = ?, offset = ?, bytes = ?, header_bytes = ? WHERE key = ?"
                )
                db.execute(query, (*place, key))
    db.close()
    tier = open_tier(folder, 16 * CAP_BYTES)
    kind = MissKind.OTHER_TOKENS if how == "tokens" else OTHERS[how][0]
    assert loads(tier, [record for pair in pairs for record in pair]) == {kind: 2 * CASES}
    assert tier.counts.quarantined_records == 2 * CASES


@pytest.mark.behaviour(40)
def test_records_whose_bytes_have_changed_places_are_misses(tmp_path: Path) -> None:
    rng = random.Random(4)
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES, segment_bytes=2**20)
    for case in range(CASES):
        identities = [identity_of(2 * case + i) for i in range(2)]
        pair = [Record(identity, payload_of(identity, 200, 1)) for identity in identities]  # of equal length
        before, begin = newest(tmp_path / "tier")
        tier.store(pair)
        path, end = newest(tmp_path / "tier")
        begin = begin if path == before else 0
        half = (end - begin) // 2
        with path.open("r+b") as file:
            file.seek(begin)
            both = file.read()
            payload_only = rng.random() < 0.5
            cut = half - 200 if payload_only else 0
            one, two = both[:half], both[half:]
            file.seek(begin)
            file.write(one[:cut] + two[cut:] + two[:cut] + one[cut:])
        # A whole record of other tokens, or a payload under an identity that is not its own.
        kind = MissKind.CHECKSUM if payload_only else MissKind.OTHER_TOKENS
        assert loads(tier, pair) == {kind: 2}


def test_rows_that_are_missing_are_ordinary_misses(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder, 16 * CAP_BYTES)
    group = records(2 * CASES, 100)
    tier.store(group)
    tier.close()
    gone = random.Random(5).sample(group, CASES)
    with sqlite3.connect(folder / INDEX_NAME) as db:
        db.executemany("DELETE FROM records WHERE key = ?", [(record.identity.key,) for record in gone])
    db.close()
    tier = open_tier(folder, 16 * CAP_BYTES)
    assert loads(tier, gone) == {MissKind.ABSENT: CASES}
    assert loads(tier, [record for record in group if record not in gone]) == {}
    assert isinstance(tier.store(gone[:1])[0], Stored)


@pytest.mark.behaviour(40)
def test_a_damaged_index_never_gives_anything_wrong(tmp_path: Path) -> None:
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


@pytest.mark.behaviour(39)
def test_a_read_that_fails_is_a_miss_and_the_record_is_quarantined(tmp_path: Path) -> None:
    rng = random.Random(7)
    files = FaultyFiles()
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES, files=files)
    group = records(CASES, 100)
    tier.store(group)
    for record in group:
        call = rng.choice(["open_read", "read"])
        files.fail = lambda name, call=call: errno.EIO if name == call else 0  # type: ignore[misc]
        result = tier.load(record.identity)
        files.fail = lambda name: 0
        assert isinstance(result, Miss)
        assert result.kind is MissKind.IO_ERROR
        assert tier.load(record.identity) == Miss(MissKind.ABSENT)
    assert tier.counts.misses[MissKind.IO_ERROR] == tier.counts.quarantined_records == CASES
    assert tier.state == Ready()


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
def test_a_full_disk_stops_stores_with_one_warning_and_they_come_back_when_it_has_room(
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
