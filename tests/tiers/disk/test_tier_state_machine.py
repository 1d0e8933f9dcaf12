"""State machine that compares the disk tier with a dictionary, with restarts, evictions, damage and failures."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import RecordKey
from rootstock.tiers.base import AlreadyStored, Loaded, Miss, MissKind, NotStored, Record, Stored
from tiers.helpers import (
    CAP_BYTES,
    Clock,
    directory_bytes,
    identity_of,
    is_right,
    open_tier,
    record_of,
    segment_files,
)

SEEDS = st.integers(0, 30)


class DiskAgainstDictionary(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.files = FaultyFiles()
        self.model: dict[RecordKey, Record] = {}  # stored, and not said to be gone
        self.damaged = False
        self.reopen()

    def reopen(self) -> None:
        self.tier = open_tier(self.folder, clock=self.clock, files=self.files, gone=self.went)

    def went(self, keys: list[RecordKey]) -> None:
        for key in keys:
            self.model.pop(key, None)

    def record(self, seed: int) -> Record:
        return record_of(identity_of(seed, 0, 5 + seed), 1 + 2300 * seed)

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=4))
    def store(self, seeds: list[int]) -> None:
        self.clock.now_s += 100
        group = [self.record(seed) for seed in seeds]
        outcomes = self.tier.store(group)
        for record, outcome in zip(group, outcomes, strict=True):
            assert isinstance(outcome, Stored | AlreadyStored)
            # A later part of the same call may have pushed an earlier one out again.
            if not isinstance(self.tier.load(record.identity), Miss):
                self.model[record.identity.key] = record

    @rule(seed=SEEDS, call=st.sampled_from(["write", "sync", "commit", "remove"]), number=st.integers(1, 3))
    def fail_to_store(self, seed: int, call: str, number: int) -> None:
        self.clock.now_s += 100
        left = [number]

        def fail(name: str) -> int:
            left[0] -= name == call
            return errno.EIO if name == call and left[0] == 0 else 0

        self.files.fail = fail
        record = self.record(seed)
        outcome = self.tier.store([record])[0]
        self.files.fail = lambda name: 0
        if isinstance(outcome, Stored):
            self.model[record.identity.key] = record
        elif isinstance(outcome, NotStored):
            assert record.identity.key not in self.model

    @rule(seed=SEEDS)
    def load(self, seed: int) -> None:
        record = self.record(seed)
        was_there = record.identity.key in self.model
        result = self.tier.load(record.identity)
        if was_there and not self.damaged:
            assert is_right(result, record)
        elif was_there:
            assert is_right(result, record) or record.identity.key not in self.model
        else:
            assert result == Miss(MissKind.ABSENT)

    @rule(seeds=st.lists(SEEDS, max_size=4))
    def touch(self, seeds: list[int]) -> None:
        self.clock.now_s += 1
        self.tier.touch([self.record(seed).identity.key for seed in seeds])

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.reopen()

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        assert not self.model

    @rule(size=st.integers(1, 300_000))
    def drop_a_foreign_file(self, size: int) -> None:
        room = CAP_BYTES - directory_bytes(self.folder)
        if size < room - CAP_BYTES // 4:  # foreign bytes are not bounded before the next measurement
            (self.folder / f"foreign-{size}").write_bytes(bytes(size))

    @precondition(lambda self: any(segment_files(self.folder)))
    @rule(choice=st.randoms(use_true_random=False))
    def flip_a_bit(self, choice: object) -> None:
        path = choice.choice(list(segment_files(self.folder)))  # type: ignore[attr-defined]
        if not path.stat().st_size:
            return
        with path.open("r+b") as file:
            at = choice.randrange(path.stat().st_size)  # type: ignore[attr-defined]
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        self.damaged = True

    @invariant()
    def the_cap_holds(self) -> None:
        assert directory_bytes(self.folder) <= CAP_BYTES

    @invariant()
    def what_is_listed_is_what_is_there(self) -> None:
        assert {entry.identity.key for entry in self.tier.entries()} == set(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for key, record in list(self.model.items()):
            result = self.tier.load(record.identity)
            assert is_right(result, record) or (self.damaged and not isinstance(result, Loaded)), key
        self.tier.close()
        shutil.rmtree(self.folder)


TestDiskAgainstDictionary = DiskAgainstDictionary.TestCase
TestDiskAgainstDictionary.settings = settings(max_examples=40, stateful_step_count=40)
