"""Two tiers as one: the host's memory above, and below it the one that it spills to, as a rule a disk.

A record is stored above and goes down when the upper tier evicts it, through a mover of the chain's own. Whoever
stores waits for the disk only when that mover's queue is full: it should be a thread that serves nobody, as another
mover's.

A record is in the upper tier, on its way, or in the lower one, with no gap between, and a load looks there in this
order. What is loaded from below stays there; the accelerator, which asked for it, stores it above again in its time.

Until it has gone down a record does not outlive the process. `close` brings down all that is left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from rootstock.cache.record_identity import Identity, RecordKey
from rootstock.tiers.base import (
    Buffer,
    Entry,
    Gone,
    Loaded,
    LoadResult,
    Miss,
    MissKind,
    NotStored,
    Record,
    Refusal,
    StoreOutcome,
    Tier,
    TierState,
)
from rootstock.tiers.host import HostTier
from rootstock.tiers.writer import TierWriter
from rootstock.units import MIB

_GROUP_BYTES = 16 * MIB  # brought down together when the chain closes


class TierChain:
    """Owns both tiers and the mover from here on: the upper one spills to it. Thread-safe.

    `gone` is told of records that neither tier has any more because the lower one refused them or because they were
    damaged. The lower tier tells its own: it may name records that the upper one still holds.
    """

    def __init__(self, upper: HostTier, lower: Tier, mover: TierWriter, *, gone: Gone | None = None) -> None:
        self.upper = upper
        self.lower = lower
        self._mover = mover
        self._gone = gone
        self._lock = threading.Lock()
        self._moving: dict[RecordKey, Record] = {}  # handed to the mover, and not yet below
        self._condemned: set[RecordKey] = set()  # of those: not to stay below
        upper.spilled = self._spill

    @property
    def state(self) -> TierState:
        """The upper one's, which serves whatever becomes of the lower one. That one's own state tells of it."""
        return self.upper.state

    # -- storing -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """One outcome for each record, in order. What the upper tier has no place for is stored below at once."""
        outcomes = self.upper.store(records)
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, NotStored) and outcome.why is not Refusal.UNAVAILABLE:
                (outcomes[number],) = self.lower.store([records[number]])
        return outcomes

    def _spill(self, record: Record) -> None:
        """Called by the upper tier, which gives the record out until this returns."""
        key = record.identity.key
        with self._lock:
            self._moving[key] = record
        put = self._mover.put(record, self._arrived)
        if put == NotStored(Refusal.QUEUE_FULL):
            self._mover.drain()
            put = self._mover.put(record, self._arrived)
        if isinstance(put, NotStored):  # it is more than a queue, or others were quicker
            (outcome,) = self.lower.store([record])
            self._arrived(key, outcome)

    def _arrived(self, key: RecordKey, outcome: StoreOutcome) -> None:
        """Called by the mover's thread, or by whoever stores."""
        with self._lock:
            condemned = key in self._condemned
        if condemned:
            self.lower.quarantine([key])
        with self._lock:  # until now it was not given out
            self._moving.pop(key, None)
            self._condemned.discard(key)
        if isinstance(outcome, NotStored) and not condemned and key not in self.upper:
            self._tell_gone([key])

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, identity: Identity, into: Sequence[Buffer] | None = None) -> LoadResult:
        """From the highest place that has it whole. A miss says what was wrong, if anything was."""
        key = identity.key
        above = self.upper.load(identity, into)
        if isinstance(above, Loaded):
            return above
        with self._lock:
            condemned = key in self._condemned
        below = Miss(MissKind.ABSENT) if condemned else self._mover.load(identity, into)
        if isinstance(below, Loaded):
            return below
        if below.kind is not MissKind.ABSENT or above.kind in (MissKind.ABSENT, MissKind.UNAVAILABLE):
            return below
        self._tell_gone([key])
        return above

    # -- use and contents ----------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[RecordKey]) -> None:
        used = list(keys)
        self.upper.touch(used)
        self.lower.touch(used)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """Strikes these in both, and those on their way as soon as they have arrived."""
        struck = list(keys)
        self.upper.quarantine(struck)  # first: from here on none of them sets out
        with self._lock:
            self._condemned.update(key for key in struck if key in self._moving)
        self.lower.quarantine(struck)

    def clear(self, namespace: bytes | None = None) -> None:
        self.upper.clear(namespace)
        with self._lock:
            self._condemned.update(
                key for key, record in self._moving.items() if namespace in (None, record.identity.namespace)
            )
        self.lower.clear(namespace)

    def entries(self) -> Iterator[Entry]:
        """Every record once, what it continues before it. Of a record that both have, the upper one's use."""
        above = {entry.identity.key: entry for entry in self.upper.entries()}
        with self._lock:
            moving = [record for key, record in self._moving.items() if key not in self._condemned]
        for record in moving:
            on_its_way = Entry(record.identity, record.payload_bytes, record.payload_bytes, 0.0, 0)
            above.setdefault(record.identity.key, on_its_way)
        below = (entry for entry in self.lower.entries() if entry.identity.key not in above)
        yield from merge(sorted(above.values(), key=_position), below, key=_position)

    def close(self) -> None:
        """Brings down what only the upper tier has, least recently used first, so that the last used outlive the
        others below. Takes as long as the lower tier takes."""
        self._mover.close()
        group: list[Record] = []
        group_bytes = 0
        for record in self.upper.records():
            group.append(record)
            group_bytes += record.payload_bytes
            if group_bytes >= _GROUP_BYTES:
                self.lower.store(group)
                group, group_bytes = [], 0
        self.lower.store(group)
        self.upper.close()
        self.lower.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _tell_gone(self, keys: Sequence[RecordKey]) -> None:
        if keys and self._gone is not None:
            self._gone(keys)


def _position(entry: Entry) -> tuple[int, int]:
    return entry.identity.start, entry.identity.end
