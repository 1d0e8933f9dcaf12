"""Writer of a tier: a thread that stores records, so that requests do not wait for a disk.

A record is readable at every instant: from the queue until its store has ended, then from the tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rootstock.cache.keys import Identity, RecordKey
from rootstock.tiers.base import (
    Buffer,
    Loaded,
    LoadResult,
    Miss,
    MissKind,
    NotStored,
    Record,
    Refusal,
    StoreOutcome,
    Tier,
    views_of,
)
from rootstock.tiers.record import difference
from rootstock.units import MIB

_log = logging.getLogger(__name__)

Done = Callable[[RecordKey, StoreOutcome], None]
"""Called once for each queued record, by the writer's thread. From then on the payload may change."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Result: the record will be stored, or its `Done` will be called with the reason why not."""


PutResult = Queued | NotStored


@dataclass(slots=True, eq=False)
class _PendingStore:
    key: RecordKey
    record: Record
    done: list[Done]
    readers: int = 0  # loads that are copying from the record


@dataclass(slots=True)
class _Queue:
    waiting: list[_PendingStore] = field(default_factory=list)
    by_key: dict[RecordKey, _PendingStore] = field(default_factory=dict)  # waiting or being stored
    bytes: int = 0  # of the payloads in `by_key`


class TierWriter:
    """Writer of a tier, with its own thread. The caller owns the tier, which outlives the writer. Thread-safe."""

    def __init__(
        self, tier: Tier, queue_bytes: int, group_bytes: int = 16 * MIB, *, linger_s: float = 0.0
    ) -> None:
        self._tier = tier
        self._queue_bytes = queue_bytes
        self._group_bytes = group_bytes  # stored, synced and committed together, if that much is waiting
        # Time to let a group grow: a sync costs the same for one record and for many.
        self._linger_s = linger_s
        self._in_a_hurry = 0  # number of threads in `drain`
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._closing = False
        self._telling: list[
            _PendingStore
        ] = []  # a group that has left the queue, while its `Done` are called
        self._thread = threading.Thread(target=self._run, name="rootstock-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Returns the bytes of payloads that are queued or being stored; never more than the queue's size."""
        return self._queue.bytes

    def put(self, record: Record, done: Done | None = None) -> PutResult:
        """Queues a record without blocking. If it does not return `Queued`, `done` is not called and the payload not
        kept."""
        key, payload_bytes = record.identity.key, record.payload_bytes
        with self._changed:
            if self._closing:
                return NotStored(Refusal.UNAVAILABLE, "closed")
            pending = self._queue.by_key.get(key)
            if pending is not None:
                if done is not None:
                    pending.done.append(done)
                return Queued()
            if self._queue.bytes + payload_bytes > self._queue_bytes:
                return NotStored(Refusal.QUEUE_FULL)
            pending = _PendingStore(key, record, [] if done is None else [done])
            self._queue.waiting.append(pending)
            self._queue.by_key[key] = pending
            self._queue.bytes += payload_bytes
            self._changed.notify_all()
        return Queued()

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record from the queue, or from the tier if it is not there. The caller owns the result."""
        key = identity.key
        with self._changed:
            pending = self._queue.by_key.get(key)
            if pending is not None:
                pending.readers += 1
        if pending is None:
            return self._tier.load(identity, into, then)
        try:
            return _copied(pending.record, identity, into)
        finally:
            with self._changed:
                pending.readers -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Waits until every record that is queued now has been stored or refused, and its `Done` called. Does not
        wait for later records."""
        with self._changed:
            queued = {*self._queue.by_key.values(), *self._telling}
            self._in_a_hurry += 1
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    queued.isdisjoint((*self._queue.by_key.values(), *self._telling))
                    or not self._thread.is_alive()
                )
            )
            self._in_a_hurry -= 1

    def close(self) -> None:
        """Stores the queued records and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while group := self._next_group():
            outcomes = self._store(group)
            with self._changed:
                self._telling = group
                for pending in group:
                    del self._queue.by_key[pending.key]  # loads go to the tier from here on
                    self._queue.bytes -= pending.record.payload_bytes
                while any(pending.readers for pending in group):
                    self._changed.wait()
                self._changed.notify_all()
            for pending, outcome in zip(group, outcomes, strict=True):
                for done in pending.done:
                    try:
                        done(pending.key, outcome)
                    except Exception:
                        _log.exception("The callback of a store failed. The writer continues.")
            with self._changed:
                self._telling = []
                self._changed.notify_all()

    def _next_group(self) -> list[_PendingStore]:
        """Waits for work and returns it. Empty when the writer is closing and nothing is queued."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.waiting or self._closing)
            if self._linger_s:
                self._changed.wait_for(
                    lambda: self._closing or self._in_a_hurry or self._queue.bytes >= self._group_bytes,
                    self._linger_s,
                )
            waiting = self._queue.waiting
            count = group_bytes = 0
            while count < len(waiting) and (count == 0 or group_bytes < self._group_bytes):
                group_bytes += waiting[count].record.payload_bytes
                count += 1
            group, self._queue.waiting = waiting[:count], waiting[count:]
            return group

    def _store(self, group: Sequence[_PendingStore]) -> Sequence[StoreOutcome]:
        try:
            return self._tier.store([pending.record for pending in group])
        except Exception as error:  # a bug in the tier: these records are lost, later ones may be stored
            _log.exception("Storing failed. Requests continue without these records.")
            return [NotStored(Refusal.FAILED, str(error))] * len(group)


def _copied(record: Record, asked: Identity, into: Sequence[Buffer] | None) -> LoadResult:
    kind = difference(asked, record.identity)
    if kind is not None:
        return Miss(kind)
    source = record.views()
    if into is None:
        return Loaded(tuple(memoryview(bytearray(view)) for view in source))
    target = views_of(into)
    if sum(view.nbytes for view in target) != record.payload_bytes:
        return Miss(MissKind.OTHER_SIZE)
    left = list(target)
    for view in source:
        while view.nbytes:
            step = min(view.nbytes, left[0].nbytes)
            left[0][:step] = view[:step]
            view, left[0] = view[step:], left[0][step:]
            if not left[0].nbytes:
                left.pop(0)
    return Loaded(tuple(target))
