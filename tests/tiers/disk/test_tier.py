"""Disk tier without failures of the disk: contents, order of eviction, cap, copies, clocks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import Namespace
from rootstock.tiers.base import (
    AlreadyStored,
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
from rootstock.tiers.disk.files import LOCK_NAME
from rootstock.tiers.disk.index import INDEX_NAME, WAL_NAME
from rootstock.tiers.disk.space import Budget
from rootstock.tiers.disk.tier import RETRY_S, SEGMENT_BYTES, DiskTier
from tiers.helpers import (
    CAP_BYTES,
    Clock,
    directory_bytes,
    identity_of,
    is_right,
    keys_of,
    kind_of_miss,
    open_tier,
    record_of,
    records,
    segment_files,
)
from waiting import HANG_S, join, wait_until


def test_a_record_with_a_long_header_is_loaded(tmp_path: Path) -> None:
    """A short header is read in one call with the prefix before it, a long one is not."""
    tier = open_tier(tmp_path)
    identity = identity_of(0)
    payload = [np.full(1, i % 251, np.uint8) for i in range(9000)]  # 8 bytes of header for each
    assert isinstance(tier.store([Record(identity, payload)])[0], Stored)
    loaded = tier.load(identity)
    assert isinstance(loaded, Loaded)
    assert [bytes(view) for view in loaded.payload] == [buffer.tobytes() for buffer in payload]


def test_a_load_into_buffers_of_another_size_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    record = record_of(identity_of(1), 3000)
    tier.store([record])
    assert kind_of_miss(tier.load(record.identity, [np.zeros(2999, np.uint8)])) is MissKind.OTHER_SIZE
    assert tier.counts.misses == {MissKind.OTHER_SIZE: 1}


def test_a_group_is_committed_together_and_duplicates_are_stored_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier", 16 * CAP_BYTES)
    group = records(5)
    outcomes = tier.store([*group, group[0]])
    assert [type(outcome) for outcome in outcomes] == [Stored] * 5 + [AlreadyStored]
    assert [type(outcome) for outcome in tier.store(group)] == [AlreadyStored] * 5
    assert tier.counts.stored_records == 5
    assert tier.written_bytes > tier.counts.stored_bytes
    assert all(is_right(tier.load(record.identity), record) for record in group)


def test_a_restart_keeps_records_and_their_uses(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path / "tier", clock=clock)
    stored = records(6)
    tier.store(stored)
    clock.now_s = 2000.0
    tier.touch([stored[2].identity.key] * 2)
    tier.close()
    again = open_tier(tmp_path / "tier", clock=clock)
    entries = {entry.identity.key: entry for entry in again.entries()}
    assert set(entries) == {record.identity.key for record in stored}
    for index, record in enumerate(stored):
        entry = entries[record.identity.key]
        assert np.array_equal(entry.identity.tokens, record.identity.tokens)
        assert (entry.identity.start, entry.identity.parent) == (
            record.identity.start,
            record.identity.parent,
        )
        assert entry.payload_bytes == record.payload_bytes
        assert (entry.last_use_s, entry.uses) == ((2000.0, 2) if index == 2 else (1000.0, 0))
        assert is_right(again.load(record.identity), record)


def test_the_least_recently_used_segment_is_evicted_first_and_a_chain_from_its_end(tmp_path: Path) -> None:
    clock = Clock()
    gone: list[bytes] = []
    tier = open_tier(tmp_path / "tier", clock=clock, gone=gone.extend)
    chain = [record_of(identity_of(1, start, start + 16), 20_000) for start in range(0, 144, 16)]
    tier.store(chain)  # three to a segment
    clock.now_s += 1
    others = records(9, 20_000, first=50)
    tier.store(others)
    clock.now_s += 1
    tier.touch(keys_of(others))
    seeds = iter(range(1000, 1200))
    while len(gone) < 6:
        clock.now_s += 1
        tier.store(records(1, 20_000, first=next(seeds)))
    assert gone == [record.identity.key for record in reversed(chain[3:])]
    assert tier.load(chain[-1].identity) == Miss(MissKind.ABSENT)
    assert is_right(tier.load(chain[0].identity), chain[0])


def test_a_record_stored_again_counts_as_used_and_keeps_its_segment(tmp_path: Path) -> None:
    clock = Clock()
    gone: list[bytes] = []
    tier = open_tier(tmp_path / "tier", clock=clock, gone=gone.extend)
    first, second = records(3, 20_000), records(3, 20_000, first=3)
    tier.store(first)
    clock.now_s += 1
    tier.store(second)
    seeds = iter(range(100, 300))
    while not gone:
        clock.now_s += 1
        assert tier.store(first[:1]) == [AlreadyStored()]
        tier.store(records(1, 20_000, first=next(seeds)))
    assert gone == keys_of(second)


def test_a_record_used_since_it_was_written_outlives_its_segment_once(tmp_path: Path) -> None:
    clock = Clock()
    gone: list[bytes] = []
    tier = open_tier(tmp_path / "tier", clock=clock, gone=gone.extend)
    segment = records(10, 6000)
    tier.store(segment)
    clock.now_s += 1
    tier.touch([segment[4].identity.key])
    seeds = iter(range(100, 1000))

    def churn_until(evicted: int) -> None:
        while len(gone) < evicted:
            clock.now_s += 1
            tier.store(records(1, 6000, first=next(seeds)))

    churn_until(9)
    assert gone == [record.identity.key for record in segment if record is not segment[4]]
    assert is_right(tier.load(segment[4].identity), segment[4])
    churn_until(400)
    assert segment[4].identity.key in gone


@pytest.mark.behaviour(42)
@pytest.mark.parametrize(
    ("cap_bytes", "group", "largest_bytes"), [(CAP_BYTES, 1, 30_000), (8 * CAP_BYTES, 6, 120_000)]
)
def test_the_cap_is_never_exceeded_under_churn_and_amplification_is_counted(
    tmp_path: Path, cap_bytes: int, group: int, largest_bytes: int
) -> None:
    folder = tmp_path / "tier"
    clock, files = Clock(), FaultyFiles()
    rng = np.random.default_rng(0)
    worst = [0]
    wal_bytes = Budget.of(cap_bytes, 64 * 1024).wal_bytes

    def look(name: str) -> None:  # before each call that changes something, and after each commit
        worst[0] = max(worst[0], directory_bytes(folder))
        assert worst[0] <= cap_bytes
        wal = folder / WAL_NAME
        assert not wal.exists() or wal.stat().st_size <= wal_bytes

    tier = open_tier(folder, cap_bytes, clock=clock, files=files)
    files.boundary = look
    live: list[Record] = []
    for seed in range(0, 400, group):
        clock.now_s += 1
        made = [
            record_of(
                identity_of(seed + i, 0, int(rng.integers(1, 400))), int(rng.integers(1, largest_bytes))
            )
            for i in range(group)
        ]
        assert all(isinstance(outcome, Stored) for outcome in tier.store(made))
        live += made
        tier.touch([live[int(i)].identity.key for i in rng.integers(max(0, len(live) - 30), len(live), 3)])
    assert worst[0] > 0.6 * cap_bytes
    counts = tier.room_counts
    assert counts.evicted_records > 150
    assert counts.compacted_segments > 0
    assert counts.removed_segments > 0
    assert tier.counts.stored_bytes > sum(record.payload_bytes for record in live)
    # Small records cost mostly index pages; larger ones mostly copies by compaction.
    assert 1.0 < tier.write_amplification < (12 if group == 1 else 3)
    kept = [record for record in live if not isinstance(tier.load(record.identity), Miss)]
    assert len(kept) > 15
    assert all(is_right(tier.load(record.identity), record) for record in kept)
    assert set(tier.counts.misses) == {MissKind.ABSENT}


def test_loads_beside_stores_evictions_and_compactions_are_right_or_absent(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path / "tier", clock=clock)
    group = records(150, 15_000)
    wrong: list[object] = []
    hits: list[int] = []
    turns = 0
    published = 1
    done = threading.Event()
    tier.store(group[:1])

    def read(seed: int) -> None:
        nonlocal turns
        rng = np.random.default_rng(seed)
        while not done.is_set():
            record = group[int(rng.integers(max(0, published - 60), published))]
            result = tier.load(record.identity)
            if is_right(result, record):
                hits.append(1)
                tier.touch([record.identity.key])
            elif result != Miss(MissKind.ABSENT):
                wrong.append(result)
            turns += 1
            time.sleep(0.0005)  # lets the other threads run

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for record in group[1:]:
        clock.now_s += 1
        assert isinstance(tier.store([record])[0], Stored)
        published += 1
        if published % 10 == 0:
            wait_until(lambda before=turns: turns > before)  # the readers keep up
    wait_until(lambda: hits or wrong)
    done.set()
    join(*threads)
    assert wrong == []
    assert hits
    assert tier.room_counts.evicted_records > 0


def test_uses_survive_a_process_that_never_closes(tmp_path: Path) -> None:
    clock, files = Clock(), FaultyFiles()
    tier = open_tier(tmp_path / "tier", clock=clock, files=files)
    first, second, third = records(3)
    tier.store([first, second])
    tier.touch([first.identity.key])
    clock.now_s += 60
    tier.store([third])
    files.power_cut(tmp_path / "tier", tmp_path / "image", None)
    uses = {entry.identity.key: entry.uses for entry in open_tier(tmp_path / "image").entries()}
    assert uses == {first.identity.key: 1, second.identity.key: 0, third.identity.key: 0}


def test_a_record_larger_than_a_segment_is_stored_and_one_larger_than_the_cap_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    small, large = record_of(identity_of(1)), record_of(identity_of(2), 200_000)
    tier.store([small, large])
    assert len(list(segment_files(tmp_path / "tier"))) == 2
    assert is_right(tier.load(large.identity), large)
    outcome = tier.store([record_of(identity_of(3), CAP_BYTES)])[0]
    assert isinstance(outcome, NotStored)
    assert outcome.why is Refusal.TOO_LARGE
    assert is_right(tier.load(small.identity), small)
    assert tier.counts.refused == {Refusal.TOO_LARGE: 1}


@pytest.mark.behaviour(42)
def test_foreign_files_are_counted_ignored_and_collected_first(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    open_tier(folder).close()
    (folder / "v0").mkdir()
    (folder / "v0" / "blocks.bin").write_bytes(bytes(300_000))
    (folder / "v0-00000001.segment").write_bytes(bytes(200_000))
    tier = open_tier(folder)
    assert tier.usage().foreign_bytes == 500_000
    assert list(tier.entries()) == []
    stored = records(30, 20_000)
    tier.store(stored[:4])
    assert tier.usage().foreign_bytes > 0
    tier.store(stored[4:])
    assert tier.usage().foreign_bytes == 0
    assert tier.room_counts.removed_foreign_bytes == 500_000
    assert all(is_right(tier.load(record.identity), record) for record in stored)
    assert directory_bytes(folder) <= CAP_BYTES


@pytest.mark.behaviour(42)
def test_a_smaller_cap_is_kept_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder, 3 * CAP_BYTES)
    stored = records(80, 20_000)
    tier.store(stored)
    tier.close()
    assert directory_bytes(folder) > CAP_BYTES
    again = open_tier(folder, 3 * CAP_BYTES)
    again.close()
    assert not caplog.records, "nothing was removed"
    again = open_tier(folder)
    [told] = caplog.messages
    assert re.match(
        rf"The start has removed [\d.]+ \w+ of [\d.]+ \w+ in {folder}, because --disk-budget is 1.0 MiB", told
    )
    assert again.state == Ready()
    assert directory_bytes(folder) <= CAP_BYTES
    results = [again.load(record.identity) for record in stored]
    assert all(isinstance(r, Miss) or is_right(r, record) for r, record in zip(results, stored, strict=True))
    assert sum(isinstance(r, Loaded) for r in results) > 10


def test_a_directory_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused = DiskTier.open(tmp_path, CAP_BYTES)
    assert isinstance(refused, Off)
    assert "thesis.tex" in refused.reason
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_budget_that_is_too_small_is_refused(tmp_path: Path) -> None:
    refused = DiskTier.open(tmp_path / "tier", CAP_BYTES - 1)
    assert isinstance(refused, Off)
    assert "--disk-budget" in refused.reason


def test_a_second_process_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder)
    program = (
        "import sys; from pathlib import Path; from rootstock.tiers.disk.tier import DiskTier;"
        f"print(DiskTier.open(Path(sys.argv[1]), {CAP_BYTES}))"
    )
    run = [sys.executable, "-c", program, str(folder)]
    refused = subprocess.run(run, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert "in use by another process" in refused
    assert str(os.getpid()) in refused
    tier.close()
    assert (
        "DiskTier object"
        in subprocess.run(run, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    )


def test_the_lock_holds_within_a_process_too(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    assert isinstance(DiskTier.open(tmp_path / "tier", CAP_BYTES), Off)
    tier.close()
    tier.close()
    open_tier(tmp_path / "tier").close()
    assert (tmp_path / "tier" / LOCK_NAME).exists()


@pytest.mark.behaviour(46)
def test_a_cleared_tier_is_empty_and_takes_records(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    gone: list[bytes] = []
    tier = open_tier(folder, gone=gone.extend)
    stored = records(10)
    tier.store(stored)
    tier.clear()
    assert len(gone) == 10
    assert list(tier.entries()) == []
    assert list(segment_files(folder)) == []
    tier.store(stored[:1])
    assert is_right(tier.load(stored[0].identity), stored[0])


@pytest.mark.behaviour(9)
def test_clearing_a_namespace_leaves_all_others(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    gone: list[bytes] = []
    tier = open_tier(folder, gone=gone.extend)
    another = Namespace("weights", "float32", salt="another")
    ours, theirs = records(5), [record_of(identity_of(seed, namespace=another)) for seed in range(5)]
    tier.store([*ours, *theirs])
    tier.clear(another.digest())
    assert gone == keys_of(theirs)
    tier.clear(Namespace("weights", "float32", salt="of nobody").digest())
    for _ in range(2):
        assert all(is_right(tier.load(record.identity), record) for record in ours)
        assert all(tier.load(record.identity) == Miss(MissKind.ABSENT) for record in theirs)
        tier.close()
        tier = open_tier(folder)
    assert tier.counts.quarantined_records == 0


def test_verify_reports_each_damaged_record_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder)
    stored = records(8)
    tier.store(stored)
    tier.close()
    path = next(segment_files(folder))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = open_tier(folder)
    found = again.verify()
    assert found.records == 8
    assert [failure.miss.kind for failure in found.failures] == [MissKind.CHECKSUM]
    assert again.verify() == found
    again.quarantine([failure.key for failure in found.failures])
    assert again.verify().failures == ()
    assert again.counts.quarantined_records == 1
    assert again.usage().dead_bytes > 3000


def test_a_directory_opened_as_found_shows_its_damage_and_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder, 3 * CAP_BYTES)
    tier.store(records(80, 20_000))
    tier.close()
    stranger = folder / "v0-00000001.segment"
    stranger.write_bytes(bytes(100_000))
    last = list(segment_files(folder))[-1]
    os.truncate(last, last.stat().st_size - 1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = DiskTier.open_as_found(folder)
    assert isinstance(found, DiskTier)
    usage = found.usage()
    assert usage.foreign == {stranger: 100_000}
    checked: list[int] = []
    verified = found.verify(checked.append)
    assert (verified.records, sum(checked)) == (80, verified.stored_bytes)
    (failure,) = verified.failures
    assert failure.miss.kind is MissKind.MISSING_BYTES
    assert failure.identity is not None
    assert failure.identity.key == failure.key
    found.close()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_other_directories_are_not_opened_as_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        assert isinstance(DiskTier.open_as_found(folder), Off)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_an_unreadable_index_is_reported_and_kept_when_opened_as_found(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder)
    tier.store(records(3))
    tier.close()
    (folder / INDEX_NAME).write_bytes(b"nothing of SQLite's" * 1000)
    found = DiskTier.open_as_found(folder)
    assert isinstance(found, Off)
    assert "is unreadable" in found.reason
    assert (folder / INDEX_NAME).read_bytes() == b"nothing of SQLite's" * 1000
    open_tier(folder).close()  # the lock was given back


def test_a_copied_directory_has_every_record(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    stored = records(6)
    tier.store(stored)
    tier.close()
    shutil.copytree(tmp_path / "tier", tmp_path / "copy")
    copy = open_tier(tmp_path / "copy")
    assert all(is_right(copy.load(record.identity), record) for record in stored)
    assert {entry.identity.key for entry in copy.entries()} == set(keys_of(stored))
    again = open_tier(tmp_path / "tier")  # beside its copy
    assert all(is_right(again.load(record.identity), record) for record in stored)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o555)
    assert isinstance(DiskTier.open(tmp_path / "tier", CAP_BYTES), Off)


def test_a_commit_of_the_index_waits_for_the_disk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    full = 2
    assert tier._index._db.execute("PRAGMA synchronous").fetchone() == (full,)


def test_after_a_store_the_tier_is_ready_without_dead_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    tier.store(records(3))
    assert tier.state == Ready()
    assert not isinstance(tier.state, LoadsOnly)
    usage = tier.usage()
    assert usage.dead_bytes == 0
    assert usage.total_bytes == directory_bytes(tmp_path / "tier")


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = open_tier(folder)
    tier.store(records(2))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert folder.stat().st_mode & 0o777 == 0o700
    tier.close()


# -- clocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_store_is_tried_again_after_a_minute_if_the_wall_clock_is_set(
    tmp_path: Path, jump_s: float
) -> None:
    files, clock, wall_clock = FaultyFiles(), Clock(), Clock()
    tier = open_tier(tmp_path / "tier", files=files, clock=clock, wall_clock=wall_clock)
    first, second = records(2)
    files.fail = lambda name: errno.EIO if name == "write" else 0
    assert isinstance(tier.store([first])[0], NotStored)
    files.fail = lambda name: 0
    wall_clock.now_s += jump_s
    clock.now_s += RETRY_S - 1
    assert isinstance(early := tier.store([first])[0], NotStored)
    assert early.why is Refusal.UNAVAILABLE
    clock.now_s += 1
    assert isinstance(tier.store([second])[0], Stored)


@pytest.mark.parametrize("jumps_s", [(3600.0, 0.0), (0.0, -3600.0), (10.0**9, -(10.0**9)), (-900.0, 50.0)])
def test_the_order_of_use_survives_a_wall_clock_that_is_set(
    tmp_path: Path, jumps_s: tuple[float, float]
) -> None:
    """The clock is set while the tier is open, and between two processes."""
    clock, wall_clock = Clock(), Clock()
    wall_clock.now_s = 2.0e9
    within_s, between_s = jumps_s
    segments = [records(3, 20_000, first=3 * i) for i in range(9)]
    gone: list[bytes] = []

    def open_it() -> DiskTier:
        return open_tier(tmp_path / "tier", clock=clock, wall_clock=wall_clock, gone=gone.extend)

    tier = open_it()
    for i, segment in enumerate(segments):
        clock.now_s += 1
        wall_clock.now_s += 1 + (within_s if i == 3 else 0)
        tier.store(segment)
    clock.now_s += 1
    tier.touch([record.identity.key for record in segments[0]])
    tier.close()
    wall_clock.now_s += between_s
    clock.now_s = 5.0  # of another process
    tier = open_it()
    assert all(entry.last_use_s < wall_clock.now_s + 0.001 for entry in tier.entries())
    seeds = iter(range(100, 300))
    while len(gone) < 27:
        clock.now_s += 1
        tier.store(records(1, 20_000, first=next(seeds)))
    expected = [record.identity.key for segment in [*segments[1:], segments[0]] for record in segment]
    assert gone[:27] == expected
    tier.close()


# -- room --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap_bytes", "payload_bytes", "group"),
    [
        (CAP_BYTES, 2800, 4),
        (3 * CAP_BYTES, 2800, 1),
        (3 * CAP_BYTES, 2800, 16),
        (CAP_BYTES, 60_000, 1),  # the largest that a server accepts for this budget
        (16 * CAP_BYTES, 40_000, 8),
    ],
)
def test_at_most_two_bytes_are_written_per_stored_byte(
    tmp_path: Path, cap_bytes: int, payload_bytes: int, group: int
) -> None:
    """Under steady churn, with loads of recent records, for several budgets."""
    tier = open_tier(
        tmp_path / "tier", cap_bytes, segment_bytes=SEGMENT_BYTES, files=FaultyFiles(), clock=Clock()
    )
    tier._index._db.execute("PRAGMA synchronous=OFF")  # this test counts bytes and needs no durability
    rng = np.random.default_rng(0)
    live: list[Record] = []
    hits = loads = 0
    while tier.counts.stored_bytes < 3 * cap_bytes:
        made = records(group, payload_bytes, first=len(live))
        assert all(isinstance(outcome, Stored) for outcome in tier.store(made))
        live += made
        for age in rng.exponential(cap_bytes / payload_bytes / 4, group):
            record = live[max(0, len(live) - 1 - int(age))]
            hits += isinstance(tier.load(record.identity), Loaded)
            loads += 1
            tier.touch([record.identity.key])
    stored_bytes = tier.counts.stored_bytes
    assert stored_bytes < tier.written_bytes <= 2 * stored_bytes
    assert directory_bytes(tmp_path / "tier") <= cap_bytes
    assert hits > 0.8 * loads
    live_bytes = sum(entry.stored_bytes for entry in tier.entries())
    assert live_bytes > 0.55 * cap_bytes


def test_written_bytes_are_counted_correctly(tmp_path: Path) -> None:
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("the system counts no writes")

    def written() -> int:
        return int(next(line.split()[1] for line in io.read_text().splitlines() if line.startswith("wchar")))

    tier = open_tier(tmp_path / "tier", clock=Clock())
    tier._index._db.execute("PRAGMA synchronous=OFF")
    made = [records(4, 2800, first=first) for first in range(0, 1200, 4)]
    before, told_before = written(), tier.written_bytes
    for group in made:
        tier.store(group)
    told_bytes = tier.written_bytes - told_before
    assert told_bytes == pytest.approx(written() - before, rel=0.02)


def test_evictions_are_reported_before_their_bytes_are_removed(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), Clock()
    gone: set[bytes] = set()
    tier = open_tier(tmp_path / "tier", files=files, clock=clock, gone=gone.update)
    checked = []

    def look(name: str) -> None:
        if name == "remove":
            checked.append(len(gone))
            assert not gone & {entry.identity.key for entry in tier.entries()}
            assert len(gone) == tier.room_counts.evicted_records > 0

    files.boundary = look
    tier.store(records(30, 20_000))
    tier.store(records(30, 20_000, first=30))  # one call evicts segment after segment
    assert len(checked) > 5


def test_a_call_that_stores_more_than_fits_keeps_its_last_records(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier", clock=Clock())
    made = records(200, 9000)
    outcomes = tier.store(made)
    stored = [record for record, outcome in zip(made, outcomes, strict=True) if isinstance(outcome, Stored)]
    assert stored == made[-len(stored) :]  # the last records of a call are kept
    assert len(stored) > 50
    assert all(is_right(tier.load(record.identity), record) for record in stored)
    assert {outcome.why for outcome in outcomes if isinstance(outcome, NotStored)} == {Refusal.NO_ROOM}
    assert tier.counts.refused == {Refusal.NO_ROOM: 200 - len(stored)}
    assert tier.written_bytes < 1.5 * CAP_BYTES


def test_an_index_of_the_earlier_layout_is_converted(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = open_tier(folder)
    stored = records(20)
    tier.store(stored)
    tier.close()
    with sqlite3.connect(folder / INDEX_NAME) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("PRAGMA page_size=4096")
        db.execute("VACUUM")
        db.execute("CREATE UNIQUE INDEX by_key ON records (key)")
        db.execute("CREATE INDEX by_use ON records (last_use, last DESC)")
        db.execute("CREATE INDEX by_segment ON records (segment, bytes)")
    db.close()
    tier = open_tier(folder)
    assert tier._index._db.execute("PRAGMA page_size").fetchone() == (4096,)
    assert tier._index._db.execute("SELECT name FROM sqlite_master WHERE type = 'index'").fetchall() == []
    assert all(is_right(tier.load(record.identity), record) for record in stored)
    for first in range(100, 400, 5):
        assert all(isinstance(outcome, Stored) for outcome in tier.store(records(5, 9000, first=first)))
        assert directory_bytes(folder) <= CAP_BYTES
    assert tier.verify().failures == ()
