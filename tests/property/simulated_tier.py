"""A tier that fails at random, and its writer and reader without threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.explain import LoadChoice
from rootstock.cache.keys import Identity, RecordKey, RecordKind
from rootstock.cache.lease import Match
from rootstock.cache.retention.hint_types import Keep
from rootstock.cache.tier_index import TierHit
from rootstock.engine.sequence import Sequence as RequestSequence
from rootstock.engine.tiers.connector import TierConnector, TierEvents
from rootstock.runtime.base import Runtime
from rootstock.tiers.base import (
    AlreadyStored,
    Buffer,
    Entry,
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
    StoreOutcome,
    TierState,
    as_bytes,
)
from rootstock.tiers.reader import LoadEnded, LoadTask
from rootstock.tiers.record import difference
from rootstock.tiers.writer import Done, PutResult, Queued

RecordCheck = Callable[[Record], None]
"""Asserts that a record has the content that its identity names."""


@dataclass
class Failing:
    """Rates of failures, and counts of outcomes."""

    stores: float = 0.0
    loads: float = 0.0
    disappearing: float = 0.0  # of some record, at each store
    declined: float = 0.2  # loads that are not worth it
    overdue: float = 0.0
    stored: int = 0
    refused: int = 0
    loaded: int = 0
    missed: int = 0
    gone: int = 0


class SimulatedTier:
    """Tier that keeps copies of its records through restarts, as a disk does."""

    def __init__(self, rng: np.random.Generator, failing: Failing, check: RecordCheck) -> None:
        self._rng = rng
        self._failing = failing
        self._check = check
        self._records: dict[RecordKey, tuple[Identity, bytes]] = {}
        self.gone: Callable[[Sequence[RecordKey]], None] = lambda keys: None
        self.state: TierState = Ready()

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._records

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        return [self._store(record) for record in records]

    def _store(self, record: Record) -> StoreOutcome:
        if isinstance(self.state, Off | LoadsOnly):
            return NotStored(Refusal.UNAVAILABLE)
        if self._records and self._rng.random() < self._failing.disappearing:
            key = list(self._records)[int(self._rng.integers(len(self._records)))]
            del self._records[key]
            self._failing.gone += 1
            self.gone([key])
        self._check(record)
        if self._rng.random() < self._failing.stores:
            self._failing.refused += 1
            return NotStored(Refusal.FAILED)
        key = record.identity.key
        if key in self._records:
            return AlreadyStored()
        self._failing.stored += 1
        self._records[key] = record.identity, b"".join(bytes(view) for view in record.views())
        return Stored(len(self._records[key][1]))

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        assert into is not None
        views = [as_bytes(buffer) for buffer in into]
        if self._rng.random() < self._failing.loads:
            for view in views:  # a failed load leaves garbage, which must not be used
                view[:] = bytes(self._rng.integers(0, 256, view.nbytes, np.uint8))
            self._records.pop(identity.key, None)
            self._failing.missed += 1
            return Miss(MissKind.CHECKSUM)
        found = self._records.get(identity.key)
        if found is None or isinstance(self.state, Off):
            return Miss(MissKind.ABSENT)
        stored, payload = found
        assert difference(identity, stored) is None, "a record was asked for under another's name"
        self._failing.loaded += 1
        return _loaded(views, payload)

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        assert all(keep.lasts_s > 0 for keep in keeps.values())

    def touch(self, keys: Iterable[RecordKey]) -> None:
        list(keys)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        for key in keys:
            self._records.pop(key, None)

    def clear(self, namespace: bytes | None = None) -> bool:
        for key, (identity, _) in list(self._records.items()):
            if namespace in (None, identity.namespace):
                del self._records[key]
        return True

    def entries(self) -> Iterator[Entry]:
        for identity, payload in list(self._records.values()):
            yield Entry(identity, len(payload), len(payload), 0.0, 0)

    def close(self) -> None:
        pass


def _loaded(views: Sequence[memoryview], payload: bytes) -> Loaded:
    assert sum(view.nbytes for view in views) == len(payload)
    at = 0
    for view in views:
        view[:] = payload[at : at + view.nbytes]
        at += view.nbytes
    return Loaded(tuple(views))


def check_oracle_record(record: Record) -> None:
    """Checks a record against its identity: the oracle's blocks and states hold their tokens and positions."""
    identity = record.identity
    if identity.kind is RecordKind.STATE:
        position, _ = np.frombuffer(bytes(record.views()[0]), np.uint64)
        assert position == identity.end, (
            f"the state of position {position} is stored as that of {identity.end}"
        )
        return
    tokens, positions = (np.frombuffer(bytes(view), np.int32) for view in record.views()[:2])
    assert (tokens == identity.tokens).all(), "a block is stored under other tokens"
    assert (positions == np.arange(identity.start, identity.end)).all(), (
        "a block is stored as another's place"
    )


@dataclass
class SimulatedWriter:
    """`TierWriter` without a thread: it stores when `run` is called."""

    tier: SimulatedTier
    queue_bytes: int
    _waiting: dict[RecordKey, tuple[Record, list[Done]]] = field(default_factory=dict)

    @property
    def waiting_bytes(self) -> int:
        return sum(record.payload_bytes for record, _ in self._waiting.values())

    def put(self, record: Record, done: Done | None = None) -> PutResult:
        key = record.identity.key
        if key in self._waiting:
            self._waiting[key][1].append(done or (lambda key, outcome: None))
            return Queued()
        if self.waiting_bytes + record.payload_bytes > self.queue_bytes:
            return NotStored(Refusal.QUEUE_FULL)
        self._waiting[key] = record, [] if done is None else [done]
        return Queued()

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        waiting = self._waiting.get(identity.key)
        if waiting is None:
            return self.tier.load(identity, into)
        assert into is not None
        assert difference(identity, waiting[0].identity) is None
        return _loaded(
            [as_bytes(buffer) for buffer in into], b"".join(bytes(view) for view in waiting[0].views())
        )

    def run(self, records: int = 1) -> None:
        for key in list(self._waiting)[:records]:
            record, done = self._waiting[key]
            (outcome,) = self.tier.store([record])
            del self._waiting[key]
            for tell in done:
                tell(key, outcome)

    def drain(self) -> None:
        self.run(len(self._waiting))

    def close(self) -> None:
        self.drain()


@dataclass
class SimulatedJob:
    tasks: Sequence[LoadTask]
    done: Callable[[LoadEnded], None]
    loaded: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class SimulatedReader:
    """`TierReader` without a thread: it loads a record when `run` is called."""

    def __init__(self, load: Callable[[Identity, Sequence[Buffer] | None], LoadResult]) -> None:
        self._load = load
        self._jobs: list[SimulatedJob] = []

    @property
    def waiting_bytes(self) -> int:
        return 0

    def submit(self, tasks: Sequence[LoadTask], done: Callable[[LoadEnded], None]) -> SimulatedJob:
        job = SimulatedJob(tasks, done)
        self._jobs.append(job)
        return job

    def run(self) -> None:
        if not self._jobs:
            return
        job = self._jobs[0]
        miss = None
        if not job.cancelled and job.loaded < len(job.tasks):
            task = job.tasks[job.loaded]
            result = self._load(task.identity, task.into)
            if isinstance(result, Miss):
                miss = result
            else:
                job.loaded += 1
        ended = job.loaded == len(job.tasks)
        if ended or miss is not None or job.cancelled:
            self._jobs.pop(0)
            missed = None if miss is None else job.tasks[job.loaded].identity.key
            size = sum(buffer.nbytes for task in job.tasks[: job.loaded] for buffer in task.into)
            job.done(LoadEnded(job.loaded, miss, missed, size, 1e-3, not ended and miss is None))

    def drain(self) -> None:
        while self._jobs:
            self.run()

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        self.drain()


class SimulatedTierConnector(TierConnector):
    """Connector in which chance decides, not this machine's speed, whether to load and which loads are overdue."""

    def __init__(
        self,
        rng: np.random.Generator,
        failing: Failing,
        runtime: Runtime,
        cache: KVCache,
        tier: SimulatedTier,
        queue_bytes: int,
    ) -> None:
        self._rng = rng
        self._failing = failing
        self.writer = SimulatedWriter(tier, queue_bytes)
        self.reader = SimulatedReader(self.writer.load)
        events = TierEvents()
        tier.gone = events.gone
        super().__init__(
            runtime, cache, tier, self.writer, self.reader, events, 16, queue_bytes, clock=lambda: 0.0
        )

    def choose(self, match: Match) -> tuple[TierHit | None, LoadChoice | None]:
        reach, choice = super().choose(match)
        if choice is None:
            return reach, choice
        load = bool(self._rng.random() >= self._failing.declined)
        return reach, LoadChoice(choice.position, choice.records, choice.payload_bytes, None, None, load)

    def overdue(self) -> list[RequestSequence]:
        waiting = [u.sequence for u in self._in_flight.values() if u.sequence is not None]
        return [sequence for sequence in waiting if self._rng.random() < self._failing.overdue]

    def run(self) -> None:
        """Does some of the work that the threads of a real tier would have done meanwhile."""
        if self._rng.random() < 0.5:
            self.writer.run(int(self._rng.integers(1, 5)))
        if self._rng.random() < 0.6:
            self.reader.run()
