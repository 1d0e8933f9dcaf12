"""The tier connector: stores evicted rows in tiers, and loads prefixes from them.

The engine's thread calls every method. Events of the tier's threads come through a queue and take effect when the
engine's thread reads it.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootstock.cache.explain import LoadChoice
from rootstock.cache.keys import Identity, Namespace, RecordKey, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease, Match
from rootstock.cache.plan import HostBytes, Load, Store
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import Tokens
from rootstock.engine.sequence import Sequence as RequestSequence
from rootstock.engine.tiers.load_or_recompute import STALE_S, LoadOrRecompute
from rootstock.runtime.base import Runtime
from rootstock.tiers.base import (
    AlreadyStored,
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
    Tier,
    TierState,
)
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.reader import LoadEnded, LoadJob, LoadTask, TierReader
from rootstock.tiers.remote.lookups import LOOKUP_SHARE, PromptLookups
from rootstock.tiers.remote.tier import RemoteCounts, RemoteTier, RemoteUsage
from rootstock.tiers.writer import PutResult, TierWriter
from rootstock.units import MIB

log = logging.getLogger(__name__)

TIER_STATES = ("ready", "loads only", "off")
PROBE_BYTES = 8 * MIB  # read to learn how fast a tier is
PROBE_RECORDS = 16
# A load that takes this many times the predicted time is given up: its request computes instead.
OVERDUE_FACTOR, OVERDUE_LEAST_S = 4.0, 2.0
REMOTE_LEAST_BYTES_PER_S = 20 * MIB  # a load from a shared server that is slower than this is given up


class TierEvents:
    """Events of the tiers' threads, read by the engine's thread.

    A record may be gone before the event that it is there has been put. Only records that the tier has when an event
    is read are added: whatever goes later has an event of its own."""

    def __init__(self) -> None:
        self.is_there: Callable[[RecordKey], bool] = lambda key: True  # of the tier, once it is open
        self._queue: queue.SimpleQueue[Callable[[StoredIndex], None]] = queue.SimpleQueue()

    def gone(self, keys: Sequence[RecordKey]) -> None:
        def forget(stored: StoredIndex) -> None:
            for key in keys:
                stored.remove(key)

        self._queue.put(forget)

    def stored(self, identity: Identity, outcome: StoreOutcome) -> None:
        if isinstance(outcome, Stored | AlreadyStored):
            # An eviction and a second store may have come in between.
            self._queue.put(lambda stored: self._add(stored, identity.key, identity))
        else:
            self._queue.put(lambda stored: stored.remove(identity.key))

    def found(self, records: Mapping[RecordKey, Identity]) -> None:
        """Notes records that a look-up has found."""

        def add(stored: StoredIndex) -> None:
            for key, identity in records.items():
                self._add(stored, key, identity)

        self._queue.put(add)

    def _add(self, stored: StoredIndex, key: RecordKey, identity: Identity) -> None:
        if key not in stored and self.is_there(key):  # a prompt's records are found again and again
            stored.add(identity)

    def tell(self, event: Callable[[StoredIndex], None]) -> None:
        self._queue.put(event)

    def apply(self, stored: StoredIndex) -> None:
        for _ in range(self._queue.qsize()):
            self._queue.get_nowait()(stored)


@dataclass(slots=True)
class TierCounters:
    choices: Counter[str] = field(default_factory=Counter)  # for requests with a deeper prefix in a tier
    loads: Counter[str] = field(default_factory=Counter)  # by outcome
    stores_refused: Counter[str] = field(default_factory=Counter)  # before they were queued
    stored_rows: int = 0  # copied for the tier
    load_s: float = 0.0
    loaded_bytes: int = 0
    loaded_from_host_bytes: int = 0  # of loaded_bytes: from memory of the host


@dataclass(frozen=True, slots=True)
class Space:
    """Measured use of a tier's directory, and of the host's RAM above it."""

    used_bytes: int
    cap_bytes: int
    foreign_bytes: int = 0  # included in used_bytes: other formats and unknown files, evicted first
    host_used_bytes: int = 0
    host_cap_bytes: int = 0  # 0: there is no host tier
    remote: RemoteUsage | None = None  # None: there is no shared server, or it does not answer


UNMEASURED = Space(0, 0)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of the tiers; counters since the start."""

    state: str  # "ready", "loads only" or "off"
    reason: str
    records: int
    foreign_records: int
    waiting_store_bytes: int
    waiting_load_bytes: int
    loading: int  # loads under way
    load_bytes_per_s: float | None
    prefill_tokens_per_s: float | None
    counters: TierCounters
    misses: dict[str, int]  # by kind
    refused: dict[str, int]
    stored_records: int
    stored_bytes: int
    written_bytes: int  # by stores, copies and the index
    quarantined_records: int
    used_bytes: int
    foreign_bytes: int
    cap_bytes: int  # of the disk; 0: there is none
    host_used_bytes: int
    host_cap_bytes: int
    write_amplification: float
    remote: RemoteCounts | None = None  # None: there is no shared tier
    remote_is_ready: bool = False
    remote_usage: RemoteUsage | None = None


@dataclass(slots=True, eq=False)
class LoadInFlight:
    """A load in flight. It owns its lease until it ends, also if the request ends before."""

    lease: Lease
    position: int
    loads: tuple[Load, ...]
    buffers: list[list[HostBytes]]
    sequence: RequestSequence | None  # None: the request no longer waits
    overdue_at: float
    job: LoadJob | None = None


class TierConnector:
    """Connection of the cache to a tier. Owns the tier and its threads."""

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        tier: Tier,
        writer: TierWriter,
        reader: TierReader,
        events: TierEvents,
        chunk_tokens: int,
        queue_bytes: int,
        clock: Callable[[], float],
        disk: DiskTier | None = None,
        space: Callable[[], Space] = lambda: UNMEASURED,
        remote: RemoteTier | None = None,
        lookups: PromptLookups | None = None,
    ) -> None:
        """`disk` and `space` give the statistics of the disk, if there is one. `lookups` finds records of the shared
        tier `remote` when prompts are submitted."""
        assert cache.stored is not None, "a cache with tiers has an index of stored records"
        self._runtime = runtime
        self._cache = cache
        self._stored = cache.stored
        self._tier = tier
        self._writer = writer
        self._reader = reader
        self._events = events
        events.is_there = tier.__contains__
        self._queue_bytes = queue_bytes  # the writer's
        self._clock = clock
        self._disk = disk
        self._space = space
        self._remote = remote
        self._lookups = lookups
        self._remote_patience_s = 0.0 if remote is None else (1 - LOOKUP_SHARE) * remote.timeout_s
        self._in_flight: dict[Lease, LoadInFlight] = {}
        self._probing = False
        self._clear_asked = False
        self.clear_failed = False  # whether records may remain after the last `clear`
        self.counters = TierCounters()
        self.load_or_recompute = LoadOrRecompute(chunk_tokens, clock)
        for entry in tier.entries():
            self._stored.add(entry.identity)
        self._probe()

    @property
    def loading(self) -> int:
        return len(self._in_flight)

    # -- stores ----------------------------------------------------------------------------------------

    def store(self, stores: Sequence[Store]) -> None:
        """Copies rows and queues them to be written. Rows that do not fit into the queue are not stored."""
        for store in stores:
            if isinstance(self._tier.state, Off):
                return
            size = self._stored.payload_bytes(store.identity)
            if self._writer.waiting_bytes + size > self._queue_bytes:  # checked before the copy
                self.counters.stores_refused[Refusal.QUEUE_FULL] += 1
                continue
            self._put(store)

    def _put(self, store: Store) -> PutResult:
        identity = store.identity
        record = Record(identity, self._runtime.read(store.part), store.keep)
        put = self._writer.put(record, lambda _, outcome: self._events.stored(identity, outcome))
        if isinstance(put, NotStored):
            self.counters.stores_refused[put.why] += 1
        else:
            self.counters.stored_rows += 1
            self._stored.add(identity)  # loads can read it from the queue
        return put

    def follow(self) -> None:
        """Applies the events of the tier's threads, and passes the cache's uses and distrusted keys to the tier."""
        self._events.apply(self._stored)
        write_back = self._cache.write_back
        if write_back is not None:
            write_back.is_open = not isinstance(self._tier.state, Off)
            if used := write_back.take_used():
                self._tier.touch(used)
            if kept := write_back.take_kept():
                self._tier.retain(kept)
            if wrong := write_back.take_wrong():
                self.quarantine(wrong)

    def quarantine(self, keys: Sequence[RecordKey]) -> None:
        """Removes records permanently, also those still in the writer's queue."""
        self._writer.drain()
        self._tier.quarantine(keys)
        for key in keys:
            self._stored.remove(key)

    def flush(self) -> None:
        """Writes every row that only memory has, the last used ones at the end. Waits for the tier."""
        stores = self._cache.take_all_stores()
        for store in stores:
            if isinstance(self._tier.state, Off):
                return
            put = self._put(store)
            if isinstance(put, NotStored) and put.why is Refusal.QUEUE_FULL:
                self._writer.drain()
                self._put(store)
        self._writer.drain()

    # -- prompts -------------------------------------------------------------------------------------------

    def look_up(self, tokens: Tokens, scope: Scope, ended: Callable[[], None]) -> None:
        """Finds a prompt's records in the shared tier, and calls `ended` then, also if it cannot be asked. Calls
        it at once without a shared tier. For any thread."""
        if self._lookups is None:
            ended()
            return

        def found(records: Mapping[RecordKey, Identity]) -> None:
            if records:
                self._events.found(records)
            ended()

        self._lookups.look_up(tokens, scope, found)

    # -- loads -----------------------------------------------------------------------------------------

    def choose(self, match: Match) -> tuple[TierHit | None, LoadChoice | None]:
        """Compares loading the deeper prefix that the tier holds with computing it. (None, None): there is none.

        Applies the tier's events first. May start a probe of the tier's speed.
        """
        if self._clear_asked or isinstance(self._tier.state, Off):
            return None, None
        self._events.apply(self._stored)
        hit = self._cache.tier_hit(match)
        if hit is None:
            return None, None
        choice = self.load_or_recompute.choose(match, hit, self._reader.waiting_bytes)
        if not choice.load and self.load_or_recompute.is_stale:
            self._probe(hit)
        return hit, choice

    def begin(
        self,
        sequence: RequestSequence | None,
        lease: Lease,
        position: int,
        loads: tuple[Load, ...],
        ended: Callable[[LoadInFlight, LoadEnded], None],
    ) -> None:
        """Starts a load after the lease's first plan was executed. The reader's thread calls `ended`.

        Without a sequence, no request waits for the load.
        """
        choice = None if sequence is None else sequence.load_choice
        begun = LoadInFlight(
            lease,
            position,
            loads,
            [self._runtime.buffers(load.part) for load in loads],
            sequence,
            self._clock() + (OVERDUE_LEAST_S if choice is None else self._patience_s(choice)),
        )
        self._in_flight[lease] = begun
        keys = [load.identity.key for load in loads]
        self._tier.touch(keys)  # before the load, so that the tier does not evict them next
        self._events.apply(self._stored)
        if not all(key in self._stored for key in keys):
            evicted = Miss(MissKind.ABSENT, "it was evicted after the load was planned")
            ended(begun, LoadEnded(0, evicted, None, 0, 0.0, cancelled=False))
            return
        tasks = [LoadTask(load.identity, buffers) for load, buffers in zip(loads, begun.buffers, strict=True)]
        begun.job = self._reader.submit(tasks, lambda end: ended(begun, end))

    def _patience_s(self, choice: LoadChoice) -> float:
        """Returns after how many seconds a load is overdue.

        A disk that is slower than predicted may still be faster than computing. A shared server that is slower than
        predicted is in trouble, and all requests would wait for it.
        """
        load_s, compute_s = choice.load_s or 0.0, choice.compute_s or 0.0
        if self._remote is None:
            return max(OVERDUE_LEAST_S, OVERDUE_FACTOR * max(load_s, compute_s))
        unmeasured_s = choice.payload_bytes / REMOTE_LEAST_BYTES_PER_S
        return max(self._remote_patience_s + unmeasured_s, OVERDUE_FACTOR * load_s)

    def give_up(self, sequence: RequestSequence) -> None:
        """Detaches a load in flight from its request, and cancels it."""
        for load in self._in_flight.values():
            if load.sequence is sequence:
                load.sequence = None
                self._cache.detach(load.lease)  # other requests stop waiting for it too
                if load.job is not None:
                    load.job.cancel()

    def cancel(self, lease: Lease) -> None:
        """Cancels the load into a lease, which ends after the current record."""
        load = self._in_flight.get(lease)
        if load is not None and load.job is not None:
            load.job.cancel()

    def overdue(self) -> list[RequestSequence]:
        """Returns requests whose loads take much longer than predicted, and pauses loading for a while."""
        now = self._clock()
        found = [
            load.sequence
            for load in self._in_flight.values()
            if load.sequence is not None and now > load.overdue_at
        ]
        if found:
            self.counters.loads["overdue"] += len(found)
            if self.load_or_recompute.pause():
                log.warning("Loads take far longer than predicted: requests compute for %.0f s.", STALE_S)
        return found

    @property
    def next_overdue_s(self) -> float | None:
        """Seconds until the first load is overdue. None: no request waits for a load."""
        due = [u.overdue_at for u in self._in_flight.values() if u.sequence is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def end(self, load: LoadInFlight, ended: LoadEnded) -> bool:
        """Places the loaded rows. Returns whether all were loaded; if not, the caller must release the lease."""
        del self._in_flight[load.lease]
        self.load_or_recompute.observe_load(ended)
        for planned, buffers in zip(load.loads[: ended.loaded], load.buffers, strict=False):
            self._runtime.place(planned.part, buffers)
        complete = ended.loaded == len(load.loads)
        if complete:
            self.counters.loads["loaded"] += 1
            if load.sequence is not None and ended.payload_bytes:
                load.sequence.loaded_from_host_share = ended.host_bytes / ended.payload_bytes
        elif ended.miss is not None:
            self.counters.loads["evicted" if load.job is None else "missed"] += 1
            if ended.missed is not None:
                self._stored.remove(ended.missed)
        else:
            self.counters.loads["cancelled"] += 1
        self.counters.load_s += ended.seconds
        self.counters.loaded_bytes += ended.payload_bytes
        self.counters.loaded_from_host_bytes += ended.host_bytes
        if self._clear_asked and not self._in_flight:
            self._clear_now()
        return complete

    def count(self, choice: LoadChoice | None) -> None:
        """Counts the decision for a request that got its first token."""
        if choice is not None:
            self.counters.choices["load" if choice.load else "recompute"] += 1

    def settle(self) -> None:
        """Cancels loads in flight and waits until no reader thread can write to pool rows."""
        for load in self._in_flight.values():
            if load.job is not None:
                load.job.cancel()
        self._reader.drain()
        self._in_flight.clear()
        if self._clear_asked:
            self._clear_now()

    def is_in_flight(self, load: LoadInFlight) -> bool:
        return load.lease in self._in_flight

    def _probe(self, hit: TierHit | None = None) -> None:
        """Reads a few records to measure the tier's speed."""
        if self._probing:
            return
        identities = self._stored.some(PROBE_RECORDS) if hit is None else hit.identities[:PROBE_RECORDS]
        tasks: list[LoadTask] = []
        total = 0
        for identity in identities:
            size = self._stored.payload_bytes(identity)
            if total + size > PROBE_BYTES and tasks:
                break
            total += size
            tasks.append(LoadTask(identity, [np.empty(size, np.uint8)]))
        if not tasks:
            return
        self._probing = True

        def ended(end: LoadEnded) -> None:
            def learn(stored: StoredIndex) -> None:
                self._probing = False
                self.load_or_recompute.observe_load(end)
                if end.missed is not None:
                    stored.remove(end.missed)

            self._events.tell(learn)

        self._reader.submit(tasks, ended)

    # -- the whole ---------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Removes every record. With loads in flight returns False, and removes them when the loads have ended.

        No new load begins before that.
        """
        self._stored.clear()
        self.clear_failed = False
        if self._in_flight:
            self._clear_asked = True
            return False
        self._clear_now()
        return True

    def forget(self, namespace: Namespace) -> None:
        """Drops the namespace's records from the index, so that no load of them begins. O(its records)."""
        self._events.apply(self._stored)
        self._stored.clear_namespace(namespace)

    def clear_below(self, namespace: Namespace) -> bool:
        """Removes every record of the namespace, queued stores included. Loads in flight complete or miss.

        Returns False if some may remain. Waits for the tier: for any thread but the engine's.
        """
        self._writer.drain()
        return self._tier.clear(namespace.digest())

    def _clear_now(self) -> None:
        self._clear_asked = False
        self._writer.drain()
        self.clear_failed = not self._tier.clear()
        self._events.apply(self._stored)
        self._stored.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
        if self._lookups is not None:
            self._lookups.close()
        self._tier.close()

    def measure(self) -> Space:
        """Measures the tier's directory. May wait for a commit: not for the engine's thread."""
        return self._space()

    def stats(self, space: Space = UNMEASURED) -> TierStats:
        state, disk = self._tier.state, self._disk
        return TierStats(
            state=_state_name(state),
            reason=getattr(state, "reason", ""),
            records=len(self._stored),
            foreign_records=self._stored.foreign_records,
            waiting_store_bytes=self._writer.waiting_bytes,
            waiting_load_bytes=self._reader.waiting_bytes,
            loading=len(self._in_flight),
            load_bytes_per_s=self.load_or_recompute.load_speed.bytes_per_s,
            prefill_tokens_per_s=self.load_or_recompute.prefill_speed.tokens_per_s_at(0),
            counters=deepcopy(self.counters),
            misses={} if disk is None else _by_name(disk.counts.misses),
            refused={} if disk is None else _by_name(disk.counts.refused),
            stored_records=0 if disk is None else disk.counts.stored_records,
            stored_bytes=0 if disk is None else disk.counts.stored_bytes,
            written_bytes=0 if disk is None else disk.written_bytes,
            quarantined_records=0 if disk is None else disk.counts.quarantined_records,
            used_bytes=space.used_bytes,
            foreign_bytes=space.foreign_bytes,
            cap_bytes=space.cap_bytes,
            host_used_bytes=space.host_used_bytes,
            host_cap_bytes=space.host_cap_bytes,
            write_amplification=1.0 if disk is None else disk.write_amplification,
            remote=None if self._remote is None else self._remote.counted(),
            remote_is_ready=self._remote is not None and isinstance(self._remote.state, Ready),
            remote_usage=space.remote,
        )


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    """Copies counters that the tier's threads keep changing."""
    return {str(kind): count for kind, count in dict(counts).items()}


def _state_name(state: TierState) -> str:
    match state:
        case Ready():
            return "ready"
        case LoadsOnly():
            return "loads only"
        case Off():
            return "off"
