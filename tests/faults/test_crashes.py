"""The tier after a crash: acknowledged records are there, and no wrong bytes are ever returned."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import RecordKey
from rootstock.tiers.base import Loaded, Miss, MissKind, Ready, Record, Stored
from rootstock.tiers.disk.index import WAL_NAME
from tiers.helpers import (
    CAP_BYTES,
    Clock,
    directory_bytes,
    identity_of,
    is_right,
    open_tier,
    record_of,
    records,
)


class Crashes:
    """Leaves an image of the directory at every boundary, as a power cut there would, and checks each of them."""

    def __init__(self, folder: Path, images: Path, cap_bytes: int = CAP_BYTES) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self.images = images
        self.files = FaultyFiles()
        self.files.boundary = self.check
        self.acknowledged: dict[RecordKey, Record] = {}
        self.known: dict[RecordKey, Record] = {}  # all that was ever given to the tier
        self.absent: set[RecordKey] = set()
        self.checked: list[str] = []
        self.random = random.Random(0)
        self.wal_bytes = 0

    def went(self, keys: list[RecordKey]) -> None:
        for key in keys:
            self.acknowledged.pop(key, None)

    def check(self, name: str) -> None:
        if name in ("open_read", "read"):
            return  # nothing changes there
        self.checked.append(name)
        for keep in (None, self.random):
            self.files.power_cut(self.folder, self.images, keep)
            self._reopen()
        if name == "commit":
            self.wal_bytes = self._wal().stat().st_size if self._wal().exists() else 0
        elif name == "commit done":  # a commit that a crash has cut short
            self.files.power_cut(self.folder, self.images, self.random)
            wal = self.images / WAL_NAME
            with wal.open("r+b") as file:
                file.truncate(self.random.randint(self.wal_bytes, wal.stat().st_size))
            self._reopen()

    def _wal(self) -> Path:
        return self.folder / WAL_NAME

    def _reopen(self) -> None:
        tier = open_tier(self.images, self.cap_bytes)
        assert tier.state == Ready()
        assert tier.counts.indexes_lost == 0
        assert directory_bytes(self.images) <= self.cap_bytes
        for key, record in self.acknowledged.items():
            # A record may be gone as soon as its eviction is committed, which is reported when the store returns.
            result = tier.load(record.identity)
            if result == Miss(MissKind.ABSENT):
                self.absent.add(key)
            else:
                assert is_right(result, record), (self.checked[-1], result)
        for entry in tier.entries():
            assert is_right(tier.load(entry.identity), self.known[entry.identity.key])
        tier.close()
        shutil.rmtree(self.images)

    def check_absent(self) -> None:
        """Checks, once a store has returned, that each record that an image lacked was reported as gone."""
        assert not self.absent & set(self.acknowledged)
        self.absent.clear()


@pytest.mark.behaviour(39, 41)
@pytest.mark.parametrize(("cap_bytes", "payload_bytes"), [(CAP_BYTES, 6000), (16 * CAP_BYTES, 15_000)])
def test_a_crash_at_any_boundary_of_a_store_loses_no_acknowledged_record(
    tmp_path: Path, cap_bytes: int, payload_bytes: int
) -> None:
    # The larger cap allows groups of more than one record, and its groups span two segments.
    crashes = Crashes(tmp_path / "tier", tmp_path / "image", cap_bytes)
    tier = open_tier(crashes.folder, cap_bytes, files=crashes.files)
    for first in range(0, 12, 3):
        group = [record_of(identity_of(seed), payload_bytes) for seed in range(first, first + 3)]
        crashes.known |= {record.identity.key: record for record in group}
        outcomes = tier.store(group)
        crashes.check_absent()
        for record, outcome in zip(group, outcomes, strict=True):
            assert isinstance(outcome, Stored)
            crashes.acknowledged[record.identity.key] = record
    tier.close()
    assert {"open_new", "write", "sync", "sync_folder", "commit", "commit done"} <= set(crashes.checked)
    assert len(crashes.checked) > 25


@pytest.mark.behaviour(41)
def test_a_crash_at_any_boundary_of_an_eviction_or_a_compaction_loses_no_kept_record(tmp_path: Path) -> None:
    crashes = Crashes(tmp_path / "tier", tmp_path / "image")
    boundary, crashes.files.boundary = crashes.files.boundary, lambda name: None
    clock = Clock()
    tier = open_tier(crashes.folder, files=crashes.files, clock=clock, gone=crashes.went)
    rng = np.random.default_rng(0)

    def put(seed: int) -> None:
        clock.now_s += 1
        record = record_of(identity_of(seed), 6000)  # one of it is kept of a segment that goes
        crashes.known[record.identity.key] = record
        assert isinstance(tier.store([record])[0], Stored)
        crashes.check_absent()
        crashes.acknowledged[record.identity.key] = record
        live = sorted(crashes.acknowledged)
        tier.touch([live[int(i)] for i in rng.integers(0, len(live), 4)])

    seeds = iter(range(400))
    while not tier.room_counts.compacted_segments:  # full: from now on each store makes room first
        put(next(seeds))
    crashes.files.boundary = boundary
    while tier.room_counts.compacted_segments < 3 or "write_back" not in crashes.checked:
        put(next(seeds))
    crashes.files.boundary = lambda name: None
    assert {"remove", "commit", "commit done", "write", "write_back"} <= set(crashes.checked)
    for record in crashes.acknowledged.values():
        assert is_right(tier.load(record.identity), record)


@pytest.mark.behaviour(39)
@pytest.mark.parametrize(
    "call", ["open_new", "write", "sync", "sync_folder", "commit", "write_back", "remove"]
)
def test_a_store_that_fails_in_any_call_is_neither_visible_nor_counted(tmp_path: Path, call: str) -> None:
    clock = Clock()
    files = FaultyFiles()
    folder = tmp_path / "tier"
    tier = open_tier(folder, files=files, clock=clock)
    acknowledged: list[Record] = []
    failures = 0
    for seed in range(200):
        clock.now_s += 100  # past the retry
        failing = seed % 3 == 2
        files.fail = lambda name, failing=failing: errno.EIO if failing and name == call else 0  # type: ignore[misc]
        record = record_of(identity_of(seed), 15_000)
        stored_bytes = tier.counts.stored_bytes
        outcome = tier.store([record])[0]
        files.fail = lambda name: 0
        if isinstance(outcome, Stored):
            acknowledged.append(record)
            assert is_right(tier.load(record.identity), record)
        else:
            failures += 1
            assert tier.counts.stored_bytes == stored_bytes
            assert tier.load(record.identity) == Miss(MissKind.ABSENT)
        assert directory_bytes(folder) <= CAP_BYTES
    assert failures > 0
    results = [tier.load(record.identity) for record in acknowledged]
    assert all(
        isinstance(r, Miss) or is_right(r, record) for r, record in zip(results, acknowledged, strict=True)
    )
    assert sum(isinstance(result, Loaded) for result in results) > 10
    tier.close()
    again = open_tier(folder)
    assert again.verify().failures == ()
    visible = {entry.identity.key for entry in again.entries()}
    assert visible == {
        r.identity.key for r, was in zip(acknowledged, results, strict=True) if isinstance(was, Loaded)
    }


@pytest.mark.behaviour(41)
def test_a_killed_process_leaves_a_directory_with_all_acknowledged_records(tmp_path: Path) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tiers.helpers import open_tier, records
tier = open_tier(Path(sys.argv[1]))
for seed in range(int(sys.argv[3]), 10**6):
    print(seed, type(tier.store(records(1, 9000, first=seed))[0]).__name__, flush=True)
"""
    folder = tmp_path / "tier"
    acknowledged: list[int] = []
    waits = random.Random(3)
    for start in (0, 1000, 2000):
        command = [sys.executable, "-c", program, str(folder), str(Path(__file__).parents[1]), str(start)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(waits.randint(3, 12))]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        acknowledged += [int(line.split()[0]) for line in lines if line.strip().endswith("Stored")]
        tier = open_tier(folder)
        for seed in acknowledged[-40:]:  # the last ones can't have been evicted
            record = records(1, 9000, first=seed)[0]
            assert is_right(tier.load(record.identity), record)
        assert tier.verify().failures == ()
        tier.close()
    assert len(acknowledged) >= 9
