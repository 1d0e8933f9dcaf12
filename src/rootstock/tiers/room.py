"""What the directory takes, and how room is made in it.

Every byte under the directory counts: segments with the dead bytes in them, the index and its WAL, files of older
formats and whatever else lies there. It is measured (file lengths, as `ls -l` has them), not booked. Of the cap a
part stays free at all times, so that making room never needs room that is not there: one segment for the copy that a
compaction makes, and twice the limit of the WAL, for itself and for what the database grows by when it is written
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rootstock.cache.identity import RecordKey
from rootstock.tiers.base import VictimOrder
from rootstock.tiers.files import Files
from rootstock.tiers.index import INDEX_NAMES, WAL_NAME, Index
from rootstock.tiers.lock import LOCK_NAME
from rootstock.tiers.segments import Segments, segment_number

LEAST_CAP_BYTES = 2**20
_LEAST_WAL_BYTES = 128 * 1024  # one row at once
# A segment is worth copying if this much of it is dead, or if this much of everything is: then one such is the best.
_MOSTLY_DEAD = 0.5
_DEAD_OF_ALL = 0.25


@dataclass(frozen=True, slots=True)
class Budget:
    """How a cap is divided."""

    cap_bytes: int
    segment_bytes: int
    wal_bytes: int

    @staticmethod
    def of(cap_bytes: int, segment_bytes: int) -> Budget:
        wal_bytes = min(8 * 2**20, max(_LEAST_WAL_BYTES, cap_bytes // 32))
        return Budget(cap_bytes, min(segment_bytes, cap_bytes // 8), wal_bytes)

    @property
    def usable_bytes(self) -> int:
        """For everything but the WAL."""
        return self.cap_bytes - self.segment_bytes - 2 * self.wal_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the directory, in bytes, as measured."""

    segments: dict[int, int]  # by number
    live_bytes: int  # of the segments: records that can be loaded
    index_bytes: int
    wal_bytes: int
    foreign: dict[Path, int]  # other formats, temporary files, strangers
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
        """Without the WAL, for which room is kept anyway."""
        return self.segment_bytes + self.index_bytes + self.foreign_bytes + self.lock_bytes


def measure(files: Files, folder: Path, live_bytes: int) -> Usage:
    """Raises OSError."""
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
    return Usage(segments, live_bytes, index_bytes, wal_bytes, foreign, lock_bytes)


@dataclass(slots=True)
class RoomCounts:
    evicted_records: int = 0
    evicted_bytes: int = 0
    removed_segments: int = 0
    compacted_segments: int = 0
    removed_foreign_files: int = 0
    removed_foreign_bytes: int = 0


def remove_foreign(files: Files, usage: Usage, short_bytes: int, counts: RoomCounts) -> bool:
    """Removes foreign files worth `short_bytes`, or all of them. One that can't be removed stays, and counts."""
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


class Room:
    """Makes room, worst first: foreign files, dead segments, the dead bytes of a segment, records.

    Every method is for the thread that stores, and raises OSError and sqlite3.Error.
    """

    def __init__(
        self,
        files: Files,
        folder: Path,
        index: Index,
        segments: Segments,
        budget: Budget,
        rewrite: Callable[[int], None],
        flush_uses: Callable[[], None],  # so that the index knows who was used last
        victims: VictimOrder | None,
        evicted: Callable[[Sequence[RecordKey]], None],
    ) -> None:
        self._files = files
        self._folder = folder
        self._index = index
        self._segments = segments
        self.budget = budget
        self._rewrite = rewrite  # copies the live records of a segment elsewhere, durably
        self._flush_uses = flush_uses
        self._victims = victims
        self._evicted = evicted
        self.counts = RoomCounts()

    def usage(self) -> Usage:
        return measure(self._files, self._folder, sum(self._index.live_bytes().values()))

    def make(self, needed_bytes: int) -> bool:
        """Whether `needed_bytes` can be appended now without going over the cap."""
        if needed_bytes > self.budget.usable_bytes:
            return False
        while True:
            usage = measure(self._files, self._folder, live_bytes=0)
            short_bytes = usage.charged_bytes + needed_bytes - self.budget.usable_bytes
            if short_bytes <= 0:
                return True
            # Only now, because it takes a look at every record: a full directory has a hundred thousand.
            usage = replace(usage, live_bytes=sum(self._index.live_bytes().values()))
            freed = (
                remove_foreign(self._files, usage, short_bytes, self.counts)
                or self.remove_dead(usage)
                or self._compact(usage)
                or self._evict(max(short_bytes, self.budget.segment_bytes // 4))
            )
            if not freed:
                return False

    def remove_dead(self, usage: Usage) -> bool:
        """Removes every segment that no record lies in."""
        live = self._index.live_bytes()
        dead = [number for number in usage.segments if number not in live]
        if self._segments.open_number in dead:
            self._segments.close()
        for number in dead:
            self._files.remove(self._segments.path(number))
            self.counts.removed_segments += 1
        return bool(dead)

    def _compact(self, usage: Usage) -> bool:
        """Copies what lives in the segment of which the largest part is dead, and removes it."""
        live = self._index.live_bytes()
        dead_parts = {
            number: 1 - live.get(number, 0) / length for number, length in usage.segments.items() if length
        }
        if not dead_parts:
            return False
        worst = max(dead_parts, key=lambda number: dead_parts[number])
        least = _DEAD_OF_ALL if usage.dead_bytes >= _DEAD_OF_ALL * usage.segment_bytes else _MOSTLY_DEAD
        copy_bytes = live.get(worst, 0)
        has_room = usage.charged_bytes + copy_bytes + 2 * self.budget.wal_bytes <= self.budget.cap_bytes
        if dead_parts[worst] < least or not has_room:
            return False
        if self._segments.open_number == worst:
            self._segments.seal()
        self._rewrite(worst)
        self._files.remove(self._segments.path(worst))
        self.counts.compacted_segments += 1
        return True

    def _evict(self, least_bytes: int) -> bool:
        """Gives up records worth `least_bytes` or all there are."""
        self._flush_uses()
        evicted: list[RecordKey] = []
        evicted_bytes = 0
        for key, stored_bytes in self._candidates(least_bytes):
            if evicted_bytes >= least_bytes:
                break
            evicted.append(key)
            evicted_bytes += stored_bytes
        self._index.delete(evicted)
        self.counts.evicted_records += len(evicted)
        self.counts.evicted_bytes += evicted_bytes
        self._evicted(evicted)
        return bool(evicted)

    def _candidates(self, least_bytes: int) -> Iterator[tuple[RecordKey, int]]:
        given: set[RecordKey] = set()
        if self._victims is not None:
            for row in self._index.rows(self._victims(least_bytes)):
                if row.key not in given:
                    given.add(row.key)
                    yield row.key, row.place.stored_bytes
        count = 64
        seen = 0
        while True:
            oldest = self._index.least_recently_used(count)
            for key, stored_bytes in oldest[seen:]:
                if key not in given:
                    yield key, stored_bytes
            if len(oldest) < count:
                return
            seen, count = count, 4 * count
