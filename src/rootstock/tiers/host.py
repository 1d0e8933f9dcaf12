"""Host RAM tier: between an accelerator and the disk, or on its own.

Records are copied in. The least recently used are evicted first, those that hints keep after all others, and passed
to `on_evicted`. The cap covers everything: payloads, and an allowance for the memory of a record beside its payload.
Space is freed before a copy, so the cap holds at every instant. A record that is being evicted counts, and can be
loaded, until `on_evicted` has returned.

Nothing here outlives the process: `Stored` means that a load finds the record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.plan import HostBytes
from rootstock.cache.retention.hint_types import Keep
from rootstock.tiers.base import (
    AlreadyStored,
    Buffer,
    Entry,
    Gone,
    Loaded,
    LoadResult,
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
    views_of,
)
from rootstock.tiers.kept import KeptBytes
from rootstock.tiers.record import difference

_log = logging.getLogger(__name__)

# Memory of a record beside its payload and tokens: its objects (measured: 1.1 KB), and the rest of its last memory
# page.
_RECORD_BYTES = 6 * 1024
_BUFFER_BYTES = 48  # for the length of each buffer
_SWEEP_S = 1.0  # least time between two searches for records whose retention has ended

OnEvicted = Callable[[Record], None]
"""Called with an evicted record, whose payload never changes, by the thread that stores, which holds no lock of the
tier then. The record can be loaded here until this returns. It must not store, quarantine or clear here."""


@dataclass(slots=True, eq=False)
class _HostRecord:
    identity: Identity
    content: HostBytes  # all buffers in sequence; never written again
    buffer_bytes: tuple[int, ...]
    checksum: bytes  # xxh3-128 of the content
    charged_bytes: int
    last_use_s: float
    uses: int = 0
    kept_until_s: float = 0.0  # by the tier's clock; 0: it is not kept
    tenant: str = ""  # that keeps it
    priority: int = 0  # for the tier below: here, kept records are equal
    is_accounted: bool = False  # its bytes are in its tenant's account

    @property
    def record(self) -> Record:
        return Record(self.identity, self.divided(self.content))

    def record_with_keep(self, now_s: float) -> Record:
        """Returns the record with the rest of its retention."""
        left_s = self.kept_until_s - now_s
        keep = Keep(self.tenant, left_s, self.priority) if left_s > 0 else None
        return replace(self.record, keep=keep)

    def is_of(self, namespace: bytes | None) -> bool:
        """Returns whether the record has this namespace; None matches any."""
        return namespace in (None, self.identity.namespace)

    @property
    def is_intact(self) -> bool:
        return _checksum([self.content]) == self.checksum

    def divided(self, content: HostBytes) -> list[HostBytes]:
        """Returns views of the content, or of a copy of it, split into the original buffers."""
        ends = list(accumulate(self.buffer_bytes, initial=0))
        return [content[first:end] for first, end in pairwise(ends)]


class HostTier:
    """Tier in host RAM. Thread-safe. `gone` gets the records that were quarantined or cleared, and those evicted
    while `on_evicted` is None. `on_evicted` is set before the first store."""

    def __init__(
        self,
        cap_bytes: int,
        on_evicted: OnEvicted | None = None,
        *,
        gone: Gone | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cap_bytes = cap_bytes
        self.on_evicted = on_evicted
        self._gone = gone
        self._clock = clock
        self._changed = threading.Condition()
        self._held: OrderedDict[RecordKey, _HostRecord] = OrderedDict()  # least recently used first
        self._leaving: dict[RecordKey, _HostRecord] = {}  # evicted, but `on_evicted` has not returned yet
        self._kept = KeptBytes(cap_bytes)
        self._swept_at_s = -_SWEEP_S
        self._used_bytes = 0  # charged: held, leaving, and reserved for copies in progress
        self._closed = False

    @property
    def state(self) -> TierState:
        return Off(_CLOSED) if self._closed else Ready()

    @property
    def used_bytes(self) -> int:
        """Returns the bytes that are charged now; never more than the cap."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: RecordKey) -> bool:
        """Returns whether a record is held and not being evicted."""
        return key in self._held

    # -- storing -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """Stores records. Returns one outcome for each, in order. Later records may evict earlier ones."""
        return [self._store(record) for record in records]

    def _store(self, record: Record) -> StoreOutcome:
        views, charged_bytes = record.views(), charge(record)
        if charged_bytes > self.cap_bytes:
            return NotStored(Refusal.TOO_LARGE, f"{charged_bytes:,} bytes do not fit under the cap")
        if (needless := self._reserve(record.identity.key, charged_bytes)) is not None:
            return needless
        try:
            held = _copied(record.identity, views, charged_bytes, self._clock())
        except MemoryError as error:
            self._unreserve(charged_bytes)
            return NotStored(Refusal.FAILED, str(error) or "the system has no memory left")
        return self._insert(held, record.keep)

    def _insert(self, held: _HostRecord, keep: Keep | None) -> StoreOutcome:
        """Inserts a record for which space is reserved."""
        key = held.identity.key
        with self._changed:
            if not self._closed and key not in self._held:
                self._held[key] = held
                if keep is not None:
                    self._keep(held, keep)
                self._changed.notify_all()
                return Stored(held.charged_bytes)
            self._unreserve(held.charged_bytes)
            if self._closed:
                return NotStored(Refusal.UNAVAILABLE, _CLOSED)
            if keep is not None:
                self._keep(self._held[key], keep)
            self._use(self._held[key])  # another thread stored it first
            return AlreadyStored()

    def _unreserve(self, charged_bytes: int) -> None:
        with self._changed:
            self._used_bytes -= charged_bytes
            self._changed.notify_all()

    def _reserve(self, key: RecordKey, charged_bytes: int) -> AlreadyStored | NotStored | None:
        """Reserves space for a copy when there is room. Returns an outcome if no copy is needed or possible."""
        while True:
            with self._changed:
                if self._closed:
                    return NotStored(Refusal.UNAVAILABLE, _CLOSED)
                if (held := self._held.get(key)) is not None:
                    self._use(held)
                    return AlreadyStored()
                short_bytes = self._used_bytes + charged_bytes - self.cap_bytes
                if short_bytes <= 0:
                    self._used_bytes += charged_bytes
                    return None
                victims = self._evict(short_bytes)
                if not victims:
                    # Everything is being evicted or copied by other threads, which notify when they are done.
                    self._changed.wait()
            for victim in victims:
                self._pass_on(victim)

    def _evict(self, short_bytes: int) -> list[_HostRecord]:
        """Moves enough records to `_leaving` to free `short_bytes`. Records that already leave are not counted,
        because they free space for other stores. The caller holds the lock."""
        victims: list[_HostRecord] = []
        now_s = self._clock()
        for are_kept in (False, True):  # kept records go last
            for key, held in self._held.items():
                if short_bytes <= 0:
                    break
                if key not in self._leaving and (held.kept_until_s > now_s) == are_kept:
                    victims.append(held)
                    short_bytes -= held.charged_bytes
        for held in victims:
            key = held.identity.key
            self._leaving[key] = self._held.pop(key)
            self._unaccount(held)
        return victims

    def _pass_on(self, victim: _HostRecord) -> None:
        key = victim.identity.key
        # The receiver computes its own checksum, so damage that is not detected now would never be found.
        try:
            if self.on_evicted is not None and victim.is_intact:
                self.on_evicted(victim.record_with_keep(self._clock()))
            else:
                self._tell_gone([key])
        except Exception:  # a bug in `on_evicted`: the record is lost, but the store continues
            _log.exception("Passing on a record evicted from host RAM failed. The record is lost.")
        finally:
            with self._changed:
                del self._leaving[key]
                self._used_bytes -= victim.charged_bytes
                self._changed.notify_all()

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record into the caller's writable buffers, whose total size is the payload's, or into new ones. A
        record that is damaged or of another identity is a miss and is removed."""
        key = identity.key
        with self._changed:
            closed = self._closed
            held = self._held.get(key) or self._leaving.get(key)
            if held is not None:
                held.last_use_s = self._clock()
                if key in self._held:
                    self._held.move_to_end(key)
        if held is None:
            result: LoadResult = Miss(MissKind.UNAVAILABLE, _CLOSED) if closed else Miss(MissKind.ABSENT)
        else:
            result = _read(held, identity, into)
        if held is not None and isinstance(result, Miss):
            self._strike(key, held)
        return result

    def _strike(self, key: RecordKey, held: _HostRecord) -> None:
        with self._changed:
            struck = self._held.get(key) is held
            if struck:
                self._drop(key)
        if struck:
            self._tell_gone([key])

    # -- use and contents ----------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[RecordKey]) -> None:
        with self._changed:
            for key in keys:
                if (held := self._held.get(key)) is not None:
                    self._use(held)

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        with self._changed:
            for key, keep in keeps.items():
                if (held := self._held.get(key)) is not None:
                    self._keep(held, keep)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """Removes these records. If one is being evicted, this returns after `on_evicted` has returned."""
        struck = []
        for key in keys:
            with self._changed:
                if key in self._held:
                    self._drop(key)
                    struck.append(key)
                self._wait_until_it_has_left(key)
        self._tell_gone(struck)

    def clear(self, namespace: bytes | None = None) -> bool:
        """Drops all records, or the records of a namespace, for good. If some are being evicted, this returns after
        `on_evicted` has returned."""
        with self._changed:
            cleared = [key for key, held in self._held.items() if held.is_of(namespace)]
            for key in cleared:
                self._drop(key)
            for key in [key for key, held in self._leaving.items() if held.is_of(namespace)]:
                self._wait_until_it_has_left(key)
        self._tell_gone(cleared)
        return True

    def entries(self) -> Iterator[Entry]:
        """Yields every record's entry, each after the entries of the prefix that it continues."""
        with self._changed:
            there = list((self._leaving | self._held).values())
        for held in sorted(there, key=lambda held: (held.identity.start, held.identity.end)):
            payload_bytes = held.content.nbytes
            yield Entry(held.identity, payload_bytes, held.charged_bytes, held.last_use_s, held.uses)

    def records(self) -> list[Record]:
        """Returns the records that are held and intact, least recently used first. Their payloads belong to the tier,
        and never change."""
        with self._changed:
            there = list(self._held.values())
        now_s = self._clock()
        return [held.record_with_keep(now_s) for held in there if held.is_intact]

    def close(self) -> None:
        """Drops every record, without calling `gone`."""
        with self._changed:
            self._closed = True
            for key in list(self._held):
                self._drop(key)

    # -- inside --------------------------------------------------------------------------------------------------

    def _use(self, held: _HostRecord) -> None:
        """Counts a use. The caller holds the lock."""
        held.last_use_s = self._clock()
        held.uses += 1
        self._held.move_to_end(held.identity.key)

    def _keep(self, held: _HostRecord, keep: Keep) -> None:
        """Keeps a record, if its tenant's share has room. The caller holds the lock."""
        self._unaccount(held)
        now_s = self._clock()
        if not self._kept.has_room(keep.tenant, held.charged_bytes) and now_s - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = now_s
            for other in self._held.values():
                if other.kept_until_s <= now_s:
                    self._unaccount(other)
        if not self._kept.has_room(keep.tenant, held.charged_bytes):
            held.kept_until_s = 0.0
            return
        self._kept.add(keep.tenant, held.charged_bytes)
        held.kept_until_s, held.tenant, held.priority = now_s + keep.lasts_s, keep.tenant, keep.priority
        held.is_accounted = True

    def _unaccount(self, held: _HostRecord) -> None:
        """Gives a record's bytes back to its tenant's share. The caller holds the lock."""
        if held.is_accounted:
            self._kept.add(held.tenant, -held.charged_bytes)
            held.is_accounted = False

    def _drop(self, key: RecordKey) -> None:
        """Drops a record. The caller holds the lock. A load that is copying from it keeps its memory until it has
        ended."""
        held = self._held.pop(key)
        self._unaccount(held)
        self._used_bytes -= held.charged_bytes
        self._changed.notify_all()

    def _wait_until_it_has_left(self, key: RecordKey) -> None:
        """Waits until a record is no longer being evicted. The caller holds the lock, which is released meanwhile."""
        held = self._leaving.get(key)
        self._changed.wait_for(lambda: held is None or self._leaving.get(key) is not held)

    def _tell_gone(self, keys: Sequence[RecordKey]) -> None:
        if keys and self._gone is not None:
            self._gone(keys)


_CLOSED = "closed"


def charge(record: Record) -> int:
    """Returns the bytes of the cap that a record uses."""
    return (
        record.payload_bytes
        + record.identity.tokens.nbytes
        + _RECORD_BYTES
        + _BUFFER_BYTES * len(record.payload)
    )


def _copied(
    identity: Identity, payload: Sequence[memoryview], charged_bytes: int, now_s: float
) -> _HostRecord:
    """Copies a record. Raises MemoryError."""
    buffers = [np.frombuffer(view, np.uint8) for view in payload]
    content: HostBytes = np.concatenate(buffers) if buffers else np.empty(0, np.uint8)
    content.flags.writeable = False
    # Copied, because the tokens may be a view of a whole prompt.
    own = replace(identity, tokens=identity.tokens.copy())
    lengths = tuple(view.nbytes for view in payload)
    return _HostRecord(own, content, lengths, _checksum([content]), charged_bytes, now_s)


def _read(held: _HostRecord, asked: Identity, into: Sequence[Buffer] | None) -> LoadResult:
    """Copies a record to the caller, and verifies the copy."""
    kind = difference(asked, held.identity)
    if kind is not None:
        return Miss(kind, "the key belongs to another record")
    if into is None:
        target = held.divided(np.empty_like(held.content))
    else:
        target = [np.frombuffer(view, np.uint8) for view in views_of(into)]
    target_bytes = sum(buffer.nbytes for buffer in target)
    if target_bytes != held.content.nbytes:
        return Miss(
            MissKind.OTHER_SIZE, f"it has {held.content.nbytes:,} bytes, {target_bytes:,} are asked for"
        )
    offset = 0
    for buffer in target:
        buffer[:] = held.content[offset : offset + buffer.nbytes]
        offset += buffer.nbytes
    if _checksum(target) != held.checksum:
        return Miss(MissKind.CHECKSUM, "the payload has changed since it was stored")
    return Loaded(tuple(as_bytes(buffer) for buffer in target))


def _checksum(buffers: Iterable[HostBytes]) -> bytes:
    h = xxhash.xxh3_128()
    for buffer in buffers:
        h.update(buffer.data)
    return h.digest()
