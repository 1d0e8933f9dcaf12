"""Disk space of the directory: measures it, and evicts records to make room.

Every byte under the directory counts: segments with their dead bytes, the index and its WAL, files of older formats,
and any other files. The usage is measured (file lengths, as `ls -l` shows them), not tracked. A part of the cap
always stays free, so that making room never needs room that is not there: an eighth of a segment for copies of
records that are kept, and twice the limit of the WAL, for the WAL itself and for the growth of the database when the
WAL is written back.

Records that hints keep go last: their order is by priority, then by use. When their retention ends, they are as any
other.

Records are evicted by segment, like in a log-structured file system or a flash cache, because evicting a single
record frees no room until its neighbours are copied. Among the most recently used records that each segment would
lose, the one used longest ago decides: its segment is evicted. Records in it that were used since they were written,
or are kept by hints, are copied to the open segment, the most recently used first, up to an eighth of the segment
(second chance). Each eviction frees at least seven times the bytes that it writes, so all copies together are at most
a seventh of the stored bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootstock.cache.keys import RecordKey
from rootstock.config import LEAST_DISK_BUDGET_BYTES
from rootstock.tiers.disk.files import LOCK_NAME, Files
from rootstock.tiers.disk.index import INDEX_NAMES, WAL_NAME, Index
from rootstock.tiers.disk.segments import Segments, segment_number
from rootstock.units import MIB

SEGMENTS = 16  # least number of segments in a budget: one eviction gives up at most this part
_LEAST_WAL_BYTES = 128 * 1024
_KEPT_PART = 8  # of an evicted segment, at most an eighth is copied


@dataclass(frozen=True, slots=True)
class Budget:
    """Division of a cap."""

    cap_bytes: int
    segment_bytes: int
    wal_bytes: int

    @staticmethod
    def of(cap_bytes: int, segment_bytes: int) -> Budget:
        wal_bytes = min(8 * MIB, max(_LEAST_WAL_BYTES, cap_bytes // 32))
        return Budget(cap_bytes, min(segment_bytes, cap_bytes // SEGMENTS), wal_bytes)

    @property
    def usable_bytes(self) -> int:
        """Returns the bytes for everything but the WAL."""
        return self.cap_bytes - self.segment_bytes // _KEPT_PART - 2 * self.wal_bytes


def least_cap_bytes(largest_record_bytes: int) -> int:
    """Returns the least cap for records up to this size: each must fit in a segment, beside the index and its WAL."""
    return max(LEAST_DISK_BUDGET_BYTES, SEGMENTS * largest_record_bytes)


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Usage of the directory in bytes, as measured."""

    segments: dict[int, int]  # by number
    live_bytes: int  # bytes of the segments that belong to records
    index_bytes: int
    wal_bytes: int
    foreign: dict[Path, int]  # other formats, temporary files, unknown files
    lock_bytes: int

    @property
    def segment_bytes(self) -> int:
        return sum(self.segments.values())

    @property
    def dead_bytes(self) -> int:
        return max(0, self.segment_bytes - self.live_bytes)

    @property
    def foreign_bytes(self) -> int:
        return sum(self.foreign.values())

    @property
    def total_bytes(self) -> int:
        return self.charged_bytes + self.wal_bytes

    @property
    def charged_bytes(self) -> int:
        """Returns the bytes without the WAL, for which space is reserved."""
        return self.segment_bytes + self.index_bytes + self.foreign_bytes + self.lock_bytes


def measure(files: Files, folder: Path, live_bytes: int) -> DiskUsage:
    """Measures the directory. Raises OSError."""
    segments: dict[int, int] = {}
    foreign: dict[Path, int] = {}
    index_bytes = wal_bytes = lock_bytes = 0
    for path, file_bytes in files.sizes(folder):
        inside = path.parent == folder
        number = segment_number(path) if inside else None
        if number is not None:
            segments[number] = file_bytes
        elif inside and path.name == LOCK_NAME:
            lock_bytes = file_bytes
        elif inside and path.name == WAL_NAME:
            wal_bytes = file_bytes
        elif inside and path.name in INDEX_NAMES:
            index_bytes += file_bytes
        else:
            foreign[path] = file_bytes
    return DiskUsage(segments, live_bytes, index_bytes, wal_bytes, foreign, lock_bytes)


@dataclass(slots=True)
class DiskSpaceCounts:
    evicted_records: int = 0
    evicted_bytes: int = 0
    removed_segments: int = 0
    compacted_segments: int = 0
    removed_foreign_files: int = 0
    removed_foreign_bytes: int = 0


def remove_foreign(files: Files, usage: DiskUsage, short_bytes: int, counts: DiskSpaceCounts) -> bool:
    """Removes foreign files of at least `short_bytes`, or all. A file that cannot be removed stays, and counts."""
    removed = False
    for path, file_bytes in usage.foreign.items():
        if short_bytes <= 0:
            break
        with suppress(OSError):
            files.remove(path)
            short_bytes -= file_bytes
            counts.removed_foreign_files += 1
            counts.removed_foreign_bytes += file_bytes
            removed = True
    return removed


@dataclass(frozen=True, slots=True)
class _Eviction:
    """Cost and gain of evicting a segment."""

    version: int  # of the segment's content
    length: int
    kept_bytes: int
    lost: tuple[RecordKey, ...]  # least recently used first
    lost_bytes: int
    order: tuple[bool, int, float, int]  # of the last record that would be lost
    until_s: float  # it is right until then, when the retention of some record ends


class DiskSpace:
    """Space manager. It removes foreign files first, then dead segments, then the segment that is needed least.

    Only the thread that stores may call it. Every method raises OSError and sqlite3.Error.
    """

    def __init__(
        self,
        files: Files,
        folder: Path,
        index: Index,
        segments: Segments,
        budget: Budget,
        rewrite: Callable[[int, Sequence[RecordKey]], None],
        note_uses: Callable[[], None],  # tells the index which records were used last
        evicted: Callable[[Sequence[RecordKey]], None],
        now_s: Callable[[], float],  # since the Unix epoch
    ) -> None:
        self._now_s = now_s
        self._files = files
        self._folder = folder
        self._index = index
        self._segments = segments
        self.budget = budget
        self._rewrite = rewrite  # evicts these records of a segment, and copies the others, durably
        self._note_uses = note_uses
        self._evicted = evicted  # called as soon as the rows are deleted
        self._evictions: dict[int, _Eviction] = {}  # by segment; reused while they are valid
        self.counts = DiskSpaceCounts()

    def usage(self) -> DiskUsage:
        return measure(self._files, self._folder, sum(self._index.live_bytes().values()))

    def make(self, needed_bytes: int) -> bool:
        """Makes room for `needed_bytes`. Returns whether they can be appended now without exceeding the cap."""
        if needed_bytes > self.budget.usable_bytes:
            return False
        while True:
            usage = measure(self._files, self._folder, live_bytes=0)
            short_bytes = usage.charged_bytes + needed_bytes - self.budget.usable_bytes
            if short_bytes <= 0:
                return True
            freed = (
                remove_foreign(self._files, usage, short_bytes, self.counts)
                or self.remove_dead(usage)
                or self._evict(usage)
            )
            if not freed:
                return False

    def remove_dead(self, usage: DiskUsage) -> bool:
        """Removes every segment without records."""
        live = self._index.live_bytes()
        dead = [number for number in usage.segments if number not in live]
        if self._segments.open_number in dead:
            self._segments.close()
        for number in dead:
            self._files.remove(self._segments.path(number))
            self.counts.removed_segments += 1
        return bool(dead)

    def _evict(self, usage: DiskUsage) -> bool:
        """Evicts a segment, except for the records that are kept."""
        self._note_uses()
        now_s = self._now_s()
        self._evictions = {
            number: self._eviction(number, usage.segments.get(number, 0), now_s)
            for number in self._index.live_bytes()
        }
        if not self._evictions:
            return False
        number = min(self._evictions, key=lambda number: self._evictions[number].order)
        eviction = self._evictions[number]
        lost, lost_bytes = eviction.lost, eviction.lost_bytes
        has_room = (
            usage.charged_bytes + eviction.kept_bytes + 2 * self.budget.wal_bytes <= self.budget.cap_bytes
        )
        if not has_room:
            known = sorted(self._index.known_in(number), key=lambda known: known.order(now_s))
            lost, lost_bytes = tuple(known.key for known in known), sum(known.stored_bytes for known in known)
        if self._segments.open_number == number:
            self._segments.seal()
        if eviction.kept_bytes and has_room:
            self._rewrite(number, lost)
            self.counts.compacted_segments += 1
        else:
            self._index.delete(lost)
            self.counts.removed_segments += 1
        self.counts.evicted_records += len(lost)
        self.counts.evicted_bytes += lost_bytes
        self._evicted(lost)
        if number in usage.segments:
            self._files.remove(self._segments.path(number))
        return True

    def _eviction(self, number: int, length: int, now_s: float) -> _Eviction:
        version = self._index.version_of(number)
        before = self._evictions.get(number)
        is_same = before is not None and (before.version, before.length) == (version, length)
        if before is not None and is_same and now_s < before.until_s:
            return before
        known = sorted(self._index.known_in(number), key=lambda known: known.order(now_s))
        limit_bytes = min(length, self.budget.segment_bytes) // _KEPT_PART
        is_mostly_dead = sum(each.stored_bytes for each in known) <= limit_bytes
        kept_bytes = 0
        lost = []
        for each in reversed(known):
            is_wanted = each.is_used or each.is_kept(now_s) or is_mostly_dead
            if is_wanted and kept_bytes + each.stored_bytes <= limit_bytes:
                kept_bytes += each.stored_bytes
            else:
                lost.append(each)
        lost.reverse()
        return _Eviction(
            version,
            length,
            kept_bytes,
            tuple(each.key for each in lost),
            sum(each.stored_bytes for each in lost),
            lost[-1].order(now_s) if lost else (False, 0, float("-inf"), 0),
            min((each.retention.until_s for each in known if each.is_kept(now_s)), default=math.inf),
        )
