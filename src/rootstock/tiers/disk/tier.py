"""Disk tier: append-only segment files and an index of their records.

A store is visible once its bytes are synced and then its row is committed. A crash at any instant therefore loses
only stores that were not acknowledged. A load trusts nothing: header, identity, length and checksum are compared. Any
difference is a miss, which is counted by its kind, and the record is deleted from the index.

Methods do not raise disk errors. A failed store turns the tier to `LoadsOnly` for a minute, a failed index to `Off`.
Each is logged once as a warning, and is in `state`.

Intervals are measured by a monotonic clock. The wall clock is read once, at `open`. A time of use is that time plus
the monotonic time since, so that setting the wall clock does not change the order of use.

There are two locks, always taken in this order: `_storing` for threads that append, evict or compact, and the index's
own, which is never held while bytes are written. A load holds the second only to find its row and open its file. From
then on the bytes stay readable, even if the record is evicted or moved meanwhile.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep
from rootstock.config import LEAST_DISK_BUDGET_BYTES
from rootstock.tiers.base import (
    AlreadyStored,
    Buffer,
    Entry,
    Gone,
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
    views_of,
)
from rootstock.tiers.disk.files import LOCK_NAME, DirectoryLock, Files, lock_directory
from rootstock.tiers.disk.index import NO_RETENTION, Index, IndexRow, StoredGrant, is_damage
from rootstock.tiers.disk.record_reads import RecordLocation, read_head, read_payload, verify
from rootstock.tiers.disk.recovery import drop_unmatched, next_segment, opened_or_new
from rootstock.tiers.disk.reports import DiskCounts, Failure, Verified
from rootstock.tiers.disk.segments import Segments
from rootstock.tiers.disk.space import Budget, DiskSpace, DiskSpaceCounts, DiskUsage, measure, remove_foreign
from rootstock.tiers.record import Encoded, Head, decode_identity, difference, encode
from rootstock.units import MIB, in_units

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * MIB
RETRY_S = 60.0
# Uses are written after the first interval if that adds at most an eighth to the bytes stored meanwhile; otherwise
# after the second.
_FLUSH_S, _FLUSH_AT_LATEST_S = 5.0, 60.0
_FLUSH_PART = 8
_SWEEP_S = 1.0  # least time between two searches for records whose retention has ended
_FAULTS = (OSError, sqlite3.Error)
_NO_CAP_BYTES = 2**62
Progress = Callable[[int], None]
"""Called repeatedly with the bytes of the records that were processed since the last call."""
# Errors of a read that do not concern the record.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}


def _ignore(_done_bytes: int) -> None:
    pass


class DiskTier:
    """Disk tier in one directory, which this process owns from `open` to `close`. Thread-safe."""

    def __init__(
        self,
        files: Files,
        folder: Path,
        lock: DirectoryLock,
        index: Index,
        segments: Segments,
        budget: Budget,
        clock: Callable[[], float],
        epoch_s: float,
        gone: Gone | None,
    ) -> None:
        """Takes `epoch_s` such that `epoch_s` plus `clock` is the time since the Unix epoch."""
        self._files = files
        self._folder = folder
        self._lock = lock
        self._index = index
        self._segments = segments
        self._clock = clock
        self._epoch_s = epoch_s
        self._gone = gone
        index.kept.resize(budget.usable_bytes)
        self._storing = threading.RLock()
        self._counting = threading.Lock()
        self._uses: dict[RecordKey, tuple[float, int]] = {}  # by `touch`, not yet noted by the index
        self._keeps: dict[RecordKey, tuple[float, Keep]] = {}  # by `retain`, until when; not yet noted either
        self._swept_at_s = clock() - _SWEEP_S
        self._flushed_at_s = clock()
        self._flushed_at_bytes = 0  # `counts.stored_bytes` then
        self._state: TierState = Ready()
        self._evicted: set[RecordKey] = set()  # by the current store
        self._room = DiskSpace(
            files,
            folder,
            index,
            segments,
            budget,
            self._rewrite,
            self._note_uses,
            self._forget_evicted,
            self._use_time_s,
        )
        self.counts = DiskCounts()

    @staticmethod
    def open(
        folder: Path,
        cap_bytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        gone: Gone | None = None,
        files: Files | None = None,
    ) -> DiskTier | Off:
        """Opens a directory, which is created if it does not exist. `cap_bytes` holds for everything in it. Returns
        `Off` with the reason and the remedy if that fails."""
        if cap_bytes < LEAST_DISK_BUDGET_BYTES:
            return Off(
                f"--disk-budget is {cap_bytes:,} bytes, but must be at least {LEAST_DISK_BUDGET_BYTES:,}."
            )
        files = files or Files()
        budget = Budget.of(cap_bytes, segment_bytes)
        try:
            lock = lock_directory(files, folder)
        except OSError as error:
            return Off(f"{folder} cannot be used: {error}. Give --disk-dir a writable directory.")
        if isinstance(lock, Off):
            return lock
        counts = DiskSpaceCounts()
        try:
            # Before the index is created, which must not take the directory over its cap.
            usage = measure(files, folder, 0)
            remove_foreign(files, usage, usage.charged_bytes - budget.usable_bytes, counts)
            index, is_lost = opened_or_new(files, folder, budget.wal_bytes, usage.total_bytes)
            epoch_s = index.bound_uses(wall_clock()) - clock()
            files.sync_folder(folder)
            next_number = next_segment(files, folder, index)
        except _FAULTS as error:
            lock.release()
            return Off(f"{folder} cannot be used: {error}.")
        segments = Segments(files, folder, budget.segment_bytes, next_number)
        tier = DiskTier(files, folder, lock, index, segments, budget, clock, epoch_s, gone)
        tier.counts.indexes_lost = int(is_lost)
        tier._room.counts = counts
        tier._tidy()
        tier._tell_what_the_start_removed(usage)
        return tier

    @staticmethod
    def open_as_found(folder: Path, *, files: Files | None = None) -> DiskTier | Off:
        """Opens a directory that a server has left, to inspect it, including damage. There is no cap, and nothing is
        removed or repaired. Nothing is created, except an index if there is none. Returns `Off` with the reason and
        the remedy if that fails."""
        files = files or Files()
        budget = Budget.of(_NO_CAP_BYTES, SEGMENT_BYTES)
        index: Index | None = None
        try:
            if not folder.is_dir():
                return Off(f"{folder} is not a directory. Give the server's --disk-dir.")
            if not (folder / LOCK_NAME).is_file():
                return Off(
                    f"{folder} is not a directory of the disk tier: it has no file {LOCK_NAME}. Give the server's "
                    "--disk-dir."
                )
            lock = lock_directory(files, folder)
            if isinstance(lock, Off):
                holder = (folder / LOCK_NAME).read_text(errors="replace").strip() or "unknown"
                return Off(
                    f"{folder} is in use by a server or another command (pid {holder}). Only one process at a time "
                    "can use it. Stop that process first."
                )
        except OSError as error:
            return Off(f"{folder} cannot be used: {error}. It must be writable, even for reading.")
        try:
            index = Index.open(files, folder, budget.wal_bytes)
            next_number = next_segment(files, folder, index)
        except _FAULTS as error:
            if index is not None:
                index.close()
            lock.release()
            if isinstance(error, sqlite3.Error) and is_damage(error):
                return Off(
                    f"The index of {folder} is unreadable ({error}), and without it no record can be found. A server "
                    "that is started there starts empty."
                )
            return Off(f"{folder} cannot be used: {error}. It must be writable, even for reading.")
        segments = Segments(files, folder, budget.segment_bytes, next_number)
        epoch_s = time.time() - time.monotonic()
        return DiskTier(files, folder, lock, index, segments, budget, time.monotonic, epoch_s, None)

    def __contains__(self, key: RecordKey) -> bool:
        """Returns whether the index has a record."""
        return key in self._index

    # -- storing -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """Stores records. Returns one outcome for each. `Stored` is durable; records are synced and committed in
        groups."""
        encoded = [encode(record) for record in records]
        outcomes: list[StoreOutcome] = []
        with self._storing:
            self._evicted.clear()
            first = self._first_to_stay(encoded)
            group: list[Encoded] = []
            for number, record in enumerate(encoded):
                if group and not self._fits([*group, record]):
                    outcomes += self._store_group(group)
                    group = []
                if number < first and record.identity.key not in self._index:
                    outcomes += [*self._store_group(group), _EVICTED_AT_ONCE]
                    group = []
                else:
                    group.append(record)
            outcomes += self._store_group(group)
            outcomes = [
                self._as_it_ended(record.identity.key, outcome)
                for record, outcome in zip(encoded, outcomes, strict=True)
            ]
            self._flush_uses_if_due()
        with self._counting:
            self.counts.refused.update(outcome.why for outcome in outcomes if isinstance(outcome, NotStored))
        return outcomes

    def _first_to_stay(self, records: Sequence[Encoded]) -> int:
        """Returns the index from which on the records fit in the budget together. Earlier ones would be evicted for
        them."""
        usable_bytes = self._room.budget.usable_bytes
        room_bytes = usable_bytes - usable_bytes // 8  # the rest is for the index
        first = len(records)
        for record in reversed(records):
            if record.stored_bytes <= usable_bytes:  # a larger record is refused, and takes no space
                room_bytes -= record.stored_bytes
            if room_bytes < 0 and first < len(records):
                break
            first -= 1
        return first

    def _as_it_ended(self, key: RecordKey, outcome: StoreOutcome) -> StoreOutcome:
        """Returns a record's final outcome: a later group of the same store may have evicted it."""
        if isinstance(outcome, NotStored) or key not in self._evicted or key in self._index:
            return outcome
        return _EVICTED_AT_ONCE

    def _fits(self, group: Sequence[Encoded]) -> bool:
        """Returns whether these fit in one transaction and in the space of one segment."""
        stored_bytes = sum(record.stored_bytes for record in group)
        return stored_bytes <= self._room.budget.segment_bytes and self._index.fits(
            [len(record.identity_raw) for record in group]
        )

    def _store_group(self, group: Sequence[Encoded]) -> list[StoreOutcome]:
        if not group:
            return []
        if (refusal := self._refusal()) is not None:
            return [refusal] * len(group)
        try:
            return self._append_and_commit(group)
        except _FAULTS as error:
            self._segments.abandon()
            self._fault(error)
            return [NotStored(Refusal.FAILED, str(error))] * len(group)

    def _append_and_commit(self, group: Sequence[Encoded]) -> list[StoreOutcome]:
        keys = [record.identity.key for record in group]
        new: dict[RecordKey, Encoded] = {}
        for key, record in zip(keys, group, strict=True):
            if key not in self._index:
                new.setdefault(key, record)
        self.touch(set(keys) - set(new))  # first, so that they are not evicted to make room
        keeps = {
            record.identity.key: record.keep
            for record in group
            if record.keep is not None and record.identity.key not in new
        }
        self.retain(keeps)
        refusal = self._make_room(list(new.values()))
        if new and refusal is None:
            self._write(new)
        outcomes: list[StoreOutcome] = []
        for key in keys:
            if refusal is None and (written := new.pop(key, None)) is not None:
                outcomes.append(Stored(written.stored_bytes))
            elif key in self._index:
                outcomes.append(AlreadyStored())
            else:
                outcomes.append(refusal or _EVICTED_AT_ONCE)
        return outcomes

    def _make_room(self, records: Sequence[Encoded]) -> NotStored | None:
        needed_bytes = sum(record.stored_bytes for record in records)
        if not self._index.fits([len(record.identity_raw) for record in records]):
            return NotStored(Refusal.TOO_LARGE, "its tokens alone are too many for one transaction")
        if needed_bytes > self._room.budget.usable_bytes:
            return NotStored(Refusal.TOO_LARGE, f"{needed_bytes:,} bytes do not fit under the cap")
        if records and not self._room.make(needed_bytes):
            return NotStored(Refusal.NO_ROOM, "nothing more can be freed under the cap")
        return None

    def _write(self, records: dict[RecordKey, Encoded]) -> None:
        now_s = self._use_time_s()
        rows = []
        kept_bytes = 0  # of rows that the index does not have yet
        for key, record in records.items():
            place = self._segments.append(record)
            identity, retention = record.identity, NO_RETENTION
            if record.keep is not None:
                until_s = now_s + record.keep.lasts_s
                retention = self._retention(record.keep, until_s, record.stored_bytes + kept_bytes)
            kept_bytes += record.stored_bytes if retention is not NO_RETENTION else 0
            rows.append(
                IndexRow(key, identity.start, identity.end, record.identity_raw, place, now_s, 0, retention)
            )
        self._segments.sync()
        self._index.insert(rows)
        self._segments.keep()
        with self._counting:
            self.counts.stored_records += len(rows)
            self.counts.stored_bytes += sum(row.place.stored_bytes for row in rows)
        if isinstance(self._state, LoadsOnly):
            self._state = Ready()

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record into the caller's writable buffers, whose total size is the payload's, or into new ones. Any
        error is a miss."""
        result = self._load(identity, into)
        with self._counting:
            if isinstance(result, Miss):
                self.counts.misses[result.kind] += 1
            else:
                self.counts.loaded_records += 1
                self.counts.loaded_bytes += sum(view.nbytes for view in result.payload)
        return result

    def _load(self, identity: Identity, into: Sequence[Buffer] | None) -> LoadResult:
        if isinstance(self._state, Off):
            return Miss(MissKind.UNAVAILABLE, self._state.reason)
        key = identity.key
        try:
            found = self._find_and_open(key)
        except sqlite3.Error as error:
            self._index_fault(error)
            return Miss(MissKind.IO_ERROR, str(error))
        if found is None:
            return Miss(MissKind.ABSENT)
        place, fd = found
        try:
            if isinstance(fd, OSError):
                raise fd
            result = self._read(fd, place, identity, into)
        except FileNotFoundError:
            result = Miss(MissKind.MISSING_BYTES, "the segment does not exist")
        except OSError as error:
            result = Miss(MissKind.IO_ERROR, str(error))
            if error.errno in _PASSING:
                return result
        finally:
            if isinstance(fd, int):
                self._close(fd)
        if isinstance(result, Miss):
            self._strike(key, place)
        return result

    def _find_and_open(self, key: RecordKey) -> tuple[RecordLocation, int | OSError] | None:
        """Finds a record and opens its file. Both under the lock, so that no compaction comes in between."""
        with self._index.lock:
            row = self._index.find(key)
            if row is None:
                return None
            try:
                return row.place, self._files.open_read(self._segments.path(row.place.segment))
            except OSError as error:
                return row.place, error

    def _close(self, fd: int) -> None:
        with suppress(OSError):
            self._files.close(fd)

    def _read(
        self, fd: int, place: RecordLocation, asked: Identity, into: Sequence[Buffer] | None
    ) -> LoadResult:
        head = read_head(self._files, fd, place)
        if isinstance(head, Miss):
            return head
        kind = difference(asked, head.identity)
        views = _views(head, into)
        if kind is None and sum(view.nbytes for view in views) != place.payload_bytes:
            kind = MissKind.OTHER_SIZE
        if kind is not None:
            # An intact record of another identity, or a damaged one: only the checksum can tell.
            whole = verify(self._files, fd, place)
            return whole if isinstance(whole, Miss) else Miss(kind, "the row refers to another record")
        damage = read_payload(self._files, fd, place, head, views)
        return damage or Loaded(tuple(views), "disk")

    def _strike(self, key: RecordKey, place: RecordLocation) -> None:
        """Quarantines a record: deletes its row. Its bytes are dead until their segment is removed."""
        try:
            struck = self._index.delete_at(key, place)
        except sqlite3.Error as error:
            self._index_fault(error)
            return
        if struck:
            with self._counting:
                self.counts.quarantined_records += 1
            self._tell_gone([key])

    def _tell_gone(self, keys: Sequence[RecordKey]) -> None:
        if keys and self._gone is not None:
            self._gone(keys)

    def _forget_evicted(self, keys: Sequence[RecordKey]) -> None:
        """Reports evictions at once, not at the end of the store: loads that are planned now must not count on
        them."""
        self._evicted.update(keys)
        self._tell_gone(keys)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """Deletes records that are wrong, found by loading them or by computing them again."""
        for key in keys:
            try:
                row = self._index.find(key)
            except sqlite3.Error as error:
                self._index_fault(error)
                return
            if row is not None:
                self._strike(key, row.place)

    # -- use and contents ----------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[RecordKey]) -> None:
        """Notes a use now. It is kept in memory and written with a later store, so that the caller does not wait. A
        crash loses uses that are not written yet, usually the uses of the last minute."""
        now_s = self._use_time_s()
        with self._counting:
            for key in keys:
                _, count = self._uses.get(key, (now_s, 0))
                self._uses[key] = (now_s, count + 1)

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        """Keeps records from eviction. Noted in memory and written with a later store, like a use."""
        now_s = self._use_time_s()
        with self._counting:
            self._keeps |= {key: (now_s + keep.lasts_s, keep) for key, keep in keeps.items()}

    def _retention(self, keep: Keep, until_s: float, stored_bytes: int) -> StoredGrant:
        """Returns the retention that the tenant's share has room for: all of it or none."""
        tenant = xxhash.xxh3_64_intdigest(keep.tenant.encode("utf-8", "surrogatepass")) >> 1
        kept = self._index.kept
        if not kept.has_room(tenant, stored_bytes) and self._clock() - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = self._clock()
            self._index.forget_ended_retention(self._use_time_s())
        if until_s <= 0 or not kept.has_room(tenant, stored_bytes):
            return NO_RETENTION
        return StoredGrant(until_s, keep.priority, tenant)

    def entries(self) -> Iterator[Entry]:
        """Yields every record's entry, each after the entries of its prefix, without reading payloads.
        Damaged rows are deleted. Ends early if the index fails."""
        try:
            self._flush_uses()
            for row in self._index.rows(self._index.keys()):
                identity = _identity_of(row)
                if identity is None:
                    with self._counting:
                        self.counts.misses[MissKind.CHECKSUM] += 1
                    self._strike(row.key, row.place)
                    continue
                place = row.place
                yield Entry(identity, place.payload_bytes, place.stored_bytes, row.last_use_s, row.uses)
        except sqlite3.Error as error:
            self._index_fault(error)

    def clear(self, namespace: bytes | None = None) -> bool:
        """Removes all records, or the records of a namespace. Loads in progress are not affected. Returns False if
        the disk fails, and records may remain."""
        try:
            # Read before the lock is taken, so that stores continue while all rows are read.
            of_namespace = None if namespace is None else self._keys_of(namespace)
            with self._storing:
                keys = self._index.keys() if of_namespace is None else of_namespace
                self._index.delete(keys)
                self._room.remove_dead(self._room.usage())
        except _FAULTS as error:
            with self._storing:
                self._fault(error)
            return False
        self._tell_gone(keys)
        return True

    def _keys_of(self, namespace: bytes) -> list[RecordKey]:
        return [
            row.key
            for row in self._index.rows(self._index.known_keys())
            if (identity := _identity_of(row)) is not None and identity.namespace == namespace
        ]

    def verify(self, progress: Progress = _ignore) -> Verified:
        """Reads every record. Changes nothing: pass the failures' keys to `quarantine`."""
        failures: list[Failure] = []
        records = stored_bytes = 0
        try:
            for row in self._index.rows(self._index.keys()):
                records += 1
                stored_bytes += row.place.stored_bytes
                if (miss := self._check(row)) is not None:
                    failures.append(Failure(row.key, miss, _identity_of(row)))
                progress(row.place.stored_bytes)
        except sqlite3.Error as error:
            self._index_fault(error)
        return Verified(records, stored_bytes, tuple(failures))

    def _check(self, row: IndexRow) -> Miss | None:
        identity = _identity_of(row)
        if identity is None:
            return Miss(MissKind.CHECKSUM, "the row is damaged")
        try:
            fd = self._files.open_read(self._segments.path(row.place.segment))
        except FileNotFoundError:
            return Miss(MissKind.MISSING_BYTES, "the segment does not exist")
        except OSError as error:
            return Miss(MissKind.IO_ERROR, str(error))
        try:
            head = verify(self._files, fd, row.place)
        except OSError as error:
            return Miss(MissKind.IO_ERROR, str(error))
        finally:
            self._close(fd)
        if isinstance(head, Miss):
            return head
        kind = difference(identity, head.identity)
        return None if kind is None else Miss(kind, "the row refers to another record")

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        return self._state

    @property
    def room_counts(self) -> DiskSpaceCounts:
        return self._room.counts

    @property
    def written_bytes(self) -> int:
        """Returns the bytes written to disk by stores, compactions and the index."""
        return self._segments.written_bytes + self._index.written_bytes

    @property
    def write_amplification(self) -> float:
        """Returns bytes written per byte stored; 1 if nothing was stored."""
        stored_bytes = self.counts.stored_bytes
        return self.written_bytes / stored_bytes if stored_bytes else 1.0

    def usage(self) -> DiskUsage:
        """Measures the directory. Raises OSError and sqlite3.Error."""
        return self._room.usage()

    def close(self) -> None:
        with self._storing, self._index.lock:
            if isinstance(self._state, Off) and self._state.reason == _CLOSED:
                return
            with suppress(*_FAULTS):
                self._flush_uses()
                self._index.write_back()
            self._state = Off(_CLOSED)
            self._segments.close()
            self._index.close()
            with suppress(OSError):
                self._lock.release()

    # -- inside --------------------------------------------------------------------------------------------------

    def _refusal(self) -> NotStored | None:
        match self._state:
            case Off(reason):
                return NotStored(Refusal.UNAVAILABLE, reason)
            case LoadsOnly(reason, retry_at_s) if self._clock() < retry_at_s:
                return NotStored(Refusal.UNAVAILABLE, reason)
            case _:
                return None

    def _fault(self, error: Exception) -> None:
        """Handles a failed store. Logs one warning until a store succeeds again."""
        if isinstance(error, sqlite3.Error) and is_damage(error):
            self._index_fault(error)
            return
        if isinstance(self._state, Ready):
            _log.warning(
                "The disk tier in %s takes no stores for now: %s. Requests continue.", self._folder, error
            )
        if not isinstance(self._state, Off):
            self._state = LoadsOnly(str(error), self._clock() + RETRY_S)

    def _index_fault(self, error: Exception) -> None:
        if not isinstance(self._state, Off):
            _log.warning(
                "The disk tier in %s is off, because its index failed: %s. Requests continue.",
                self._folder,
                error,
            )
            self._state = Off(f"the index failed: {error}")

    def _use_time_s(self) -> float:
        """Returns the time since the Unix epoch, by the wall clock as it was when the tier was opened."""
        return self._epoch_s + self._clock()

    def _note_uses(self) -> None:
        with self._counting:
            uses, self._uses = self._uses, {}
            keeps, self._keeps = self._keeps, {}
        self._index.note_uses((key, last_use_s, count) for key, (last_use_s, count) in uses.items())
        for key, (until_s, keep) in keeps.items():
            self._index.note_retention(key, partial(self._retention, keep, until_s))

    def _flush_uses(self) -> None:
        self._note_uses()
        self._index.write_uses()

    def _flush_uses_if_due(self) -> None:
        passed_s = self._clock() - self._flushed_at_s
        if passed_s < _FLUSH_S:
            return
        self._note_uses()
        stored_bytes = self.counts.stored_bytes - self._flushed_at_bytes
        if self._index.use_bytes > stored_bytes // _FLUSH_PART and passed_s < _FLUSH_AT_LATEST_S:
            return
        self._flushed_at_s += passed_s
        self._flushed_at_bytes += stored_bytes
        if isinstance(self._state, Ready):
            try:
                self._flush_uses()
            except sqlite3.Error as error:
                self._fault(error)

    def _rewrite(self, number: int, lost: Sequence[RecordKey]) -> None:
        """Evicts these records of a segment and copies the others to the open one. Their rows refer to the copies
        once these are synced. Damaged records are quarantined instead. Afterwards the segment is dead."""
        moves: list[tuple[IndexRow, RecordLocation]] = []
        damaged: list[IndexRow] = []
        going = set(lost)
        fd = self._files.open_read(self._segments.path(number))
        try:
            for row in self._index.of_segment(number):
                if row.key in going:
                    continue
                copied = self._copy(fd, row)
                if isinstance(copied, Miss):
                    with self._counting:
                        self.counts.misses[copied.kind] += 1
                    damaged.append(row)
                else:
                    moves.append((row, self._segments.append(copied)))
            self._segments.sync()
        except OSError:
            self._segments.abandon()
            raise
        finally:
            self._close(fd)
        # From here on rows may refer to the copies, so `abandon` must not remove them.
        self._segments.keep()
        self._index.replace(lost, moves)
        for row in damaged:
            self._strike(row.key, row.place)

    def _copy(self, fd: int, row: IndexRow) -> Encoded | Miss:
        identity = decode_identity(row.identity)
        if identity is None:
            return Miss(MissKind.CHECKSUM, "the row is damaged")
        loaded = self._read(fd, row.place, identity, None)
        return loaded if isinstance(loaded, Miss) else encode(Record(identity, loaded.payload))

    def _tell_what_the_start_removed(self, found: DiskUsage) -> None:
        """Warns of records that had to go for --disk-budget before the first request. They may be another model's:
        records of all models in a directory share its budget."""
        if found.charged_bytes <= self._room.budget.usable_bytes:
            return  # all removed records were dead
        with suppress(OSError):
            left = measure(self._files, self._folder, 0)
            removed = found.segment_bytes + found.foreign_bytes - left.segment_bytes - left.foreign_bytes
            if removed > 0:
                _log.warning(
                    "The start has removed %s of %s in %s, because --disk-budget is %s. They may be of another model "
                    "that has used the directory.",
                    in_units(removed),
                    in_units(found.total_bytes),
                    self._folder,
                    in_units(self._room.budget.cap_bytes),
                )

    def _tidy(self) -> None:
        """Repairs the directory after a crash, a smaller cap or outside changes."""
        with self._storing:
            try:
                usage = measure(self._files, self._folder, 0)
                short = drop_unmatched(self._files, self._index, self._segments, usage)
                if short:
                    self.counts.misses[MissKind.MISSING_BYTES] += short
                    self.counts.quarantined_records += short
                self._room.remove_dead(usage)
                # The index was just written back: the space reserved for its growth may be in use.
                if not self._room.make(-self._room.budget.wal_bytes):
                    raise OSError(errno.EDQUOT, "the files there exceed --disk-budget and cannot be removed")
            except _FAULTS as error:
                self._fault(error)


_CLOSED = "closed"
_EVICTED_AT_ONCE = NotStored(Refusal.NO_ROOM, "it was evicted for other records of the same store")


def _identity_of(row: IndexRow) -> Identity | None:
    """Decodes a row's identity. Returns None if the row is damaged."""
    identity = decode_identity(row.identity)
    return None if identity is None or identity.key != row.key else identity


def _views(head: Head, into: Sequence[Buffer] | None) -> list[memoryview]:
    if into is not None:
        return views_of(into)
    return [memoryview(bytearray(length)) for length in head.buffer_bytes]


def clear_directory(folder: Path, namespaces: Sequence[bytes]) -> str | None:
    """Removes the records of namespaces from a directory that no tier has open; without any, all.

    Returns the reason if some may remain."""
    if not (folder / LOCK_NAME).is_file():
        return None  # no tier has written here
    tier = DiskTier.open_as_found(folder)
    if isinstance(tier, Off):
        return tier.reason
    try:
        is_cleared = [tier.clear(namespace) for namespace in namespaces or (None,)]
        return None if all(is_cleared) else getattr(tier.state, "reason", "the disk failed")
    finally:
        tier.close()
