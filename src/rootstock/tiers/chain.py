"""Chain of two tiers: host RAM above, and a lower tier, usually a disk, to which the upper one evicts.

A record is stored in the upper tier. When it is evicted there, the chain's own writer stores it in the lower tier. A
store waits for the disk only when that writer's queue is full. It should therefore run on a thread that serves no
requests, such as another writer's.

A record is in the upper tier, in the writer's queue or in the lower tier, with no gap between, and a load looks there
in this order. A record that is loaded from the lower tier stays there. The accelerator, which asked for it, stores it
in the upper tier again later.

A record outlives the process only in the lower tier. `close` moves all remaining records there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep
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

_GROUP_BYTES = 16 * MIB  # stored in the lower tier together when the chain closes


class TierChain:
    """Chain that owns both tiers and the writer: the upper tier evicts to the writer. Thread-safe.

    `gone` gets the records that neither tier has any more, because the lower tier refused them or because they were
    damaged. The lower tier reports its own evictions, which may include records that the upper tier still holds.
    """

    def __init__(self, upper: HostTier, lower: Tier, writer: TierWriter, *, gone: Gone | None = None) -> None:
        self.upper = upper
        self.lower = lower
        self._writer = writer
        self._gone = gone
        self._lock = threading.Lock()
        self._moving: dict[RecordKey, Record] = {}  # passed to the writer, but not yet in the lower tier
        self._condemned: set[RecordKey] = set()  # records in `_moving` that must not stay in the lower tier
        upper.on_evicted = self._move_down

    @property
    def state(self) -> TierState:
        """Returns the state of the upper tier, which works in every state of the lower tier."""
        return self.upper.state

    def __contains__(self, key: RecordKey) -> bool:
        return key in self.upper or key in self._moving or key in self.lower

    # -- storing -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """Stores records. Returns one outcome for each, in order. A record that does not fit in the upper tier is
        stored in the lower one at once."""
        outcomes = self.upper.store(records)
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, NotStored) and outcome.why is not Refusal.UNAVAILABLE:
                (outcomes[number],) = self.lower.store([records[number]])
        return outcomes

    def _move_down(self, record: Record) -> None:
        """Passes an evicted record to the writer. Called by the upper tier, which can load it until this returns."""
        key = record.identity.key
        with self._lock:
            self._moving[key] = record
        put = self._writer.put(record, self._arrived)
        if put == NotStored(Refusal.QUEUE_FULL):
            self._writer.drain()
            put = self._writer.put(record, self._arrived)
        if isinstance(put, NotStored):  # it is larger than the queue, or other threads filled the queue again
            (outcome,) = self.lower.store([record])
            self._arrived(key, outcome)

    def _arrived(self, key: RecordKey, outcome: StoreOutcome) -> None:
        """Ends the move of a record. Called by the writer's thread, or by the thread that stores."""
        with self._lock:
            condemned = key in self._condemned
        if condemned:
            self.lower.quarantine([key])
        with self._lock:  # until here a condemned record cannot be loaded
            self._moving.pop(key, None)
            self._condemned.discard(key)
        if isinstance(outcome, NotStored) and not condemned and key not in self.upper:
            self._tell_gone([key])

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record from the highest tier that has it intact. A miss reports damage, if there was any."""
        key = identity.key
        above = self.upper.load(identity, into)
        if isinstance(above, Loaded):
            return above
        if then is not None and then.key in self.upper:
            then = None
        with self._lock:
            condemned = key in self._condemned
        below = Miss(MissKind.ABSENT) if condemned else self._writer.load(identity, into, then)
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

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        self.upper.retain(keeps)
        self.lower.retain(keeps)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """Removes these records from both tiers, and those in between as soon as they have arrived."""
        struck = list(keys)
        self.upper.quarantine(struck)  # first: afterwards none of them is evicted to the writer
        with self._lock:
            self._condemned.update(key for key in struck if key in self._moving)
        self.lower.quarantine(struck)

    def clear(self, namespace: bytes | None = None) -> bool:
        above = self.upper.clear(namespace)
        with self._lock:
            self._condemned.update(
                key for key, record in self._moving.items() if namespace in (None, record.identity.namespace)
            )
        return self.lower.clear(namespace) and above

    def entries(self) -> Iterator[Entry]:
        """Yields every record's entry once, each after the entries of its prefix. A record in both tiers has the uses
        that the upper tier counts."""
        above = {entry.identity.key: entry for entry in self.upper.entries()}
        with self._lock:
            moving = [record for key, record in self._moving.items() if key not in self._condemned]
        for record in moving:
            on_its_way = Entry(record.identity, record.payload_bytes, record.payload_bytes, 0.0, 0)
            above.setdefault(record.identity.key, on_its_way)
        below = (entry for entry in self.lower.entries() if entry.identity.key not in above)
        yield from merge(sorted(above.values(), key=_position), below, key=_position)

    def close(self) -> None:
        """Stores the records that only the upper tier has in the lower tier, least recently used first, so that the
        lower tier evicts them in the right order. Takes as long as these stores."""
        self._writer.close()
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
