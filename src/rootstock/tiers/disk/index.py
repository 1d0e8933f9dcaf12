"""Index of stored records: an SQLite database in WAL mode. A record exists once its row is committed.

The only connection locks the database for its process. SQLite then makes no shared-memory file. The WAL never grows
beyond `wal_bytes`: before a transaction that could exceed it, the WAL is written back and truncated. Callers divide
transactions that are larger (`rows_at_once`).

A store must not write more pages of the index than its records have bytes. The database is therefore one table in
order of insertion, without secondary indices: new rows share the last page, and the rows of a segment lie together.
The lookup by key, the order of use and the content of each segment are kept in memory (`Known`, about 300 bytes a
record). They are read from the table once, when it is opened.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from rootstock.cache.keys import RecordKey
from rootstock.cache.retention.hint_types import MAX_TTL_S
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.record_reads import RecordLocation
from rootstock.tiers.kept import KeptBytes
from rootstock.tiers.record import FORMAT

INDEX_NAME = f"v{FORMAT}-index.sqlite"
WAL_NAME = INDEX_NAME + "-wal"
# SQLite creates these files itself. The last exists while the database is created.
INDEX_NAMES = {INDEX_NAME, WAL_NAME, INDEX_NAME + "-journal"}

T = TypeVar("T")

_PAGE_BYTES = 1024  # of a new database: small, so that a commit of one row writes few bytes
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_ROW_BYTES = 128  # upper bound of a row without its identity
_PAGES_PER_ROW = 4  # the leaf that changes, and leaves that it is merged with or split into
_PAGES_PER_TRANSACTION = 16  # inner nodes and the free list
_USE_STEP_S = 1e-6  # between assigned times of use, to keep their order
# SQLite's error codes for which the disk or the process is to blame, not the database's content.
_CIRCUMSTANCES = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}
_TYPES = [bytes, int, int, bytes, int, int, int, int, float, int, float, int, int]
# Columns of retention, which versions before 0.3 do not have: end of the retention, its priority, and the tenant.
_RETENTION = {
    "kept_until": "REAL NOT NULL DEFAULT 0.0 CHECK (typeof(kept_until) = 'real')",
    "priority": "INTEGER NOT NULL DEFAULT 0 CHECK (typeof(priority) = 'integer')",
    "tenant": "INTEGER NOT NULL DEFAULT 0 CHECK (typeof(tenant) = 'integer')",
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  key BLOB NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  identity BLOB NOT NULL,
  segment INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  header_bytes INTEGER NOT NULL,
  last_use REAL NOT NULL,
  uses INTEGER NOT NULL,
  CHECK (typeof(key) = 'blob' AND typeof(identity) = 'blob' AND typeof(last_use) = 'real'
         AND typeof(first) = 'integer' AND typeof(last) = 'integer' AND typeof(segment) = 'integer'
         AND typeof(offset) = 'integer' AND typeof(bytes) = 'integer' AND typeof(header_bytes) = 'integer'
         AND typeof(uses) = 'integer')
);
DROP INDEX IF EXISTS by_key;
DROP INDEX IF EXISTS by_use;
DROP INDEX IF EXISTS by_segment;
"""  # versions before 0.2 have these three indices


@dataclass(frozen=True, slots=True)
class StoredGrant:
    """Retention of a record, by hints of a tenant."""

    until_s: float  # since the Unix epoch; 0: the record is not kept
    priority: int
    tenant: int  # a hash of its name


NO_RETENTION = StoredGrant(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class IndexRow:
    key: RecordKey
    first: int
    last: int
    identity: bytes  # encoded
    place: RecordLocation
    last_use_s: float
    uses: int
    retention: StoredGrant = NO_RETENTION


@dataclass(slots=True, eq=False)
class Known:
    """Part of a row that is kept in memory."""

    key: RecordKey
    rowid: int
    segment: int
    stored_bytes: int
    last: int
    last_use_s: float
    is_used: bool = False  # used since its bytes were written
    unwritten_uses: int = 0
    retention: StoredGrant = NO_RETENTION

    def is_kept(self, now_s: float) -> bool:
        return self.retention.until_s > now_s

    def order(self, now_s: float) -> tuple[bool, int, float, int]:
        """Returns the eviction order at this time, least first: kept records go last."""
        is_kept = self.is_kept(now_s)
        return is_kept, self.retention.priority if is_kept else 0, *self.recency

    @property
    def recency(self) -> tuple[float, int]:
        """Returns the order of use, least recent first. Among records used at the same time, the records that end
        last are evicted first, because they continue others."""
        return self.last_use_s, -self.last


@dataclass(slots=True, eq=False)
class _Segment:
    known: dict[RecordKey, Known]
    live_bytes: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Change of a row: it is deleted, or refers to another place from now on."""

    known: Known
    place: RecordLocation | None = None
    identity_bytes: int = 0


def is_damage(error: sqlite3.Error) -> bool:
    """Returns whether the database itself is unreadable, and will also be at the next start."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in _CIRCUMSTANCES


class Index:
    """Index of a directory. Thread-safe through `lock`, which a caller may hold over several calls. Every method
    raises sqlite3.Error."""

    def __init__(self, files: Files, folder: Path, connection: sqlite3.Connection, wal_bytes: int) -> None:
        self.lock = threading.RLock()
        self._wal = folder / WAL_NAME
        self._db = connection
        self.wal_limit_bytes = wal_bytes
        self.written_bytes = 0
        page_bytes: int = connection.execute("PRAGMA page_size").fetchone()[0]
        self._page_bytes = page_bytes
        self._frame_bytes = self._page_bytes + _FRAME_HEADER_BYTES
        self._known: dict[RecordKey, Known] = {}
        self._segments: dict[int, _Segment] = {}
        self._with_unwritten_uses: set[RecordKey] = set()
        self._next_rowid = 1
        self.kept = KeptBytes(2**62)  # the tier sets its size
        self._versions = 0  # number of versions given to segments; a version is never used again

    @staticmethod
    def open(files: Files, folder: Path, wal_bytes: int) -> Index:
        """Opens or creates the index. Raises sqlite3.Error if it is unreadable, and leaves nothing open."""
        db = files.connect(folder / INDEX_NAME)
        try:
            db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")  # a commit is durable when it returns
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute("PRAGMA cache_spill=OFF")  # a transaction writes a page once
            db.execute("PRAGMA temp_store=MEMORY")
            db.execute("PRAGMA secure_delete=OFF")  # deleted rows are not overwritten
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            there = {column for _, column, *_ in db.execute("PRAGMA table_info(records)")}
            for column, declared in _RETENTION.items():
                if column not in there:
                    db.execute(f"ALTER TABLE records ADD COLUMN {column} {declared}")
            # This also checks the types of the schema. Damage must show now, when the tier can still start empty.
            (health,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if health != "ok":
                raise sqlite3.DatabaseError(health)
            index = Index(files, folder, db, wal_bytes)
            index._read_known()
            index.write_back()
        except ValueError as error:  # SQLite's message quotes damaged bytes that are not text
            db.close()
            raise sqlite3.DatabaseError("the schema is damaged") from error
        except sqlite3.Error:
            db.close()
            raise
        return index

    def _read_known(self) -> None:
        query = (
            "SELECT key, rowid, segment, bytes, last, last_use, kept_until, priority, tenant FROM records "
            "ORDER BY rowid"
        )
        for key, rowid, segment, stored_bytes, last, last_use_s, *kept in self._db.execute(query):
            if key in self._known:
                raise sqlite3.DatabaseError("two rows have the same key")
            retention = StoredGrant(*kept) if kept[0] else NO_RETENTION
            self._add(Known(key, rowid, segment, stored_bytes, last, last_use_s, retention=retention))
            self._next_rowid = rowid + 1

    # -- reading -------------------------------------------------------------------------------------------------

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._known

    def find(self, key: RecordKey) -> IndexRow | None:
        with self.lock:
            known = self._known.get(key)
            return None if known is None else self._read(known)

    def _read(self, known: Known) -> IndexRow:
        found = self._db.execute("SELECT * FROM records WHERE rowid = ?", (known.rowid,)).fetchone()
        if found is None or found[0] != known.key:
            raise sqlite3.DatabaseError("a row is missing or has another key")
        return _row(found)

    def keys(self) -> list[RecordKey]:
        """Returns the keys by first position: a record comes after those that it continues."""
        with self.lock:
            return [key for (key,) in self._db.execute("SELECT key FROM records ORDER BY first, last")]

    def known_keys(self) -> list[RecordKey]:
        """Returns all keys in any order, without a query that loads would wait for."""
        with self.lock:
            return list(self._known)

    def rows(self, keys: Iterable[RecordKey]) -> Iterator[IndexRow]:
        for key in keys:
            if (row := self.find(key)) is not None:
                yield row

    def of_segment(self, segment: int) -> list[IndexRow]:
        """Returns a segment's rows in order of offset."""
        with self.lock:
            rows = [self._read(known) for known in self.known_in(segment)]
        return sorted(rows, key=lambda row: row.place.offset)

    def known_in(self, segment: int) -> list[Known]:
        with self.lock:
            of_segment = self._segments.get(segment)
            return [] if of_segment is None else list(of_segment.known.values())

    def version_of(self, segment: int) -> int:
        """Returns a number that changes with a segment's records and with their uses known by `note_uses`."""
        of_segment = self._segments.get(segment)
        return -1 if of_segment is None else of_segment.version

    def live_bytes(self) -> dict[int, int]:
        """Returns the live bytes of each segment that has records."""
        with self.lock:
            return {number: of_segment.live_bytes for number, of_segment in self._segments.items()}

    def ends(self) -> dict[int, int]:
        """Returns the end offset of the last record of each segment."""
        with self.lock:
            return dict(self._db.execute("SELECT segment, MAX(offset + bytes) FROM records GROUP BY segment"))

    def beyond(self, segment: int, length: int) -> list[RecordKey]:
        """Returns the keys of the segment's records that end after `length`."""
        with self.lock:
            query = "SELECT key FROM records WHERE segment = ? AND offset + bytes > ?"
            return [key for (key,) in self._db.execute(query, (segment, length))]

    # -- writing: each call is a transaction ---------------------------------------------------------------------

    @property
    def rows_at_once(self) -> int:
        """Returns the number of rows without identities that a transaction may change."""
        return max(1, (self.wal_limit_bytes // self._frame_bytes - _PAGES_PER_TRANSACTION) // _PAGES_PER_ROW)

    def fits(self, identities_bytes: Sequence[int]) -> bool:
        """Returns whether rows with identities of these lengths fit in one transaction."""
        return self._insertion_bytes(len(identities_bytes), sum(identities_bytes)) <= self.wal_limit_bytes

    def insert(self, rows: Sequence[IndexRow]) -> None:
        first = self._next_rowid
        growth_bytes = self._insertion_bytes(len(rows), sum(len(row.identity) for row in rows))
        with self._transaction(growth_bytes):
            self._db.executemany(
                "INSERT INTO records (rowid, key, first, last, identity, segment, offset, bytes, header_bytes, "
                "last_use, uses, kept_until, priority, tenant) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        rowid,
                        row.key,
                        row.first,
                        row.last,
                        row.identity,
                        row.place.segment,
                        row.place.offset,
                        row.place.stored_bytes,
                        row.place.header_bytes,
                        row.last_use_s,
                        row.uses,
                        *_columns(row.retention),
                    )
                    for rowid, row in enumerate(rows, first)
                ],
            )
        with self.lock:
            self._next_rowid = first + len(rows)
            for rowid, row in enumerate(rows, first):
                place = row.place
                size, used_s = place.stored_bytes, row.last_use_s
                self._add(
                    Known(row.key, rowid, place.segment, size, row.last, used_s, retention=row.retention)
                )

    def delete(self, keys: Sequence[RecordKey]) -> None:
        self.replace(keys, ())

    def delete_at(self, key: RecordKey, place: RecordLocation) -> bool:
        """Deletes a row if it still has this place. Otherwise the record was moved or stored again."""
        with self.lock:
            row = self.find(key)
            if row is None or (row.place.segment, row.place.offset) != (place.segment, place.offset):
                return False
            self.delete([key])
            return True

    def replace(self, lost: Sequence[RecordKey], moves: Sequence[tuple[IndexRow, RecordLocation]]) -> None:
        """Deletes rows, and moves others to new places. A row that changed since it was read stays unchanged. Moved
        rows are inserted again, beside the rows of their new segment.

        All changes are made together in the order of the table, in which the rows of a segment share pages. Each page
        is then written once. Only changes that do not fit in the WAL are divided into several transactions.
        """
        with self.lock:
            changes = [_Change(known) for key in lost if (known := self._known.get(key)) is not None]
            for row, place in moves:
                known = self._known.get(row.key)
                if known is not None and self._read(known).place == row.place:
                    changes.append(_Change(known, place, len(row.identity)))
            changes.sort(key=lambda change: change.known.rowid)
            part: list[_Change] = []
            growth_bytes, rowid = self._change_bytes(0), -1
            for change in changes:
                is_beside = change.known.rowid == rowid + 1
                rowid = change.known.rowid
                pages = 1 if is_beside else _PAGES_PER_ROW
                if change.place is not None:
                    pages += self._pages_of_new_rows(1, change.identity_bytes)
                if part and growth_bytes + pages * self._frame_bytes > self.wal_limit_bytes:
                    self._apply(part, growth_bytes)
                    part, growth_bytes = [], self._change_bytes(0)
                part.append(change)
                growth_bytes += pages * self._frame_bytes
            if part:
                self._apply(part, growth_bytes)

    def _apply(self, changes: Sequence[_Change], growth_bytes: int) -> None:
        moved: dict[RecordKey, Known] = {}
        with self._transaction(growth_bytes):
            for change in changes:
                known, place = change.known, change.place
                if place is None:
                    self._db.execute("DELETE FROM records WHERE rowid = ?", (known.rowid,))
                    continue
                rowid = self._next_rowid + len(moved)
                moved[known.key] = replace(known, rowid=rowid, segment=place.segment, is_used=False)
                self._db.execute(
                    "UPDATE records SET rowid = ?, segment = ?, offset = ? WHERE rowid = ?",
                    (rowid, place.segment, place.offset, known.rowid),
                )
        self._next_rowid += len(moved)
        for change in changes:
            self._forget(change.known)
            if change.place is not None:
                self._add(moved[change.known.key])

    # -- uses ----------------------------------------------------------------------------------------------------

    @property
    def use_bytes(self) -> int:
        """Returns an upper bound of the bytes that `write_uses` writes now: a page per row, in the WAL and written
        back."""
        return len(self._with_unwritten_uses) * (self._frame_bytes + self._page_bytes)

    def note_uses(self, uses: Iterable[tuple[RecordKey, float, int]]) -> None:
        """Notes uses in memory: key, time of the last use, and number of uses since the last call."""
        with self.lock:
            for key, last_use_s, count in uses:
                known = self._known.get(key)
                if known is not None:
                    known.last_use_s = max(known.last_use_s, last_use_s)
                    known.unwritten_uses += count
                    known.is_used = True
                    self._with_unwritten_uses.add(key)
                    self._changed(self._segments[known.segment])

    def note_retention(self, key: RecordKey, choose: Callable[[int], StoredGrant]) -> None:
        """Notes a record's retention in memory; it is written with the uses. `choose` returns it for the record's
        bytes, which are in no tenant's account meanwhile."""
        with self.lock:
            known = self._known.get(key)
            if known is not None:
                self._charge(known, -1)
                known.retention = NO_RETENTION
                known.retention = choose(known.stored_bytes)
                self._charge(known, 1)
                self._with_unwritten_uses.add(key)
                self._changed(self._segments[known.segment])

    def forget_ended_retention(self, now_s: float) -> None:
        """Gives the bytes of records whose retention has ended back to their tenants' shares. O(records)."""
        with self.lock:
            for known in self._known.values():
                if known.retention is not NO_RETENTION and not known.is_kept(now_s):
                    self._charge(known, -1)
                    known.retention = NO_RETENTION

    def write_uses(self) -> None:
        """Writes the noted uses and retention."""
        with self.lock:
            noted = sorted(self._with_unwritten_uses, key=lambda key: self._known[key].rowid)
            for part in self._divided(noted):
                changed = [self._known[key] for key in part]
                with self._transaction(self._change_bytes(len(changed))):
                    self._db.executemany(
                        "UPDATE records SET last_use = ?, uses = uses + ?, kept_until = ?, priority = ?, tenant = ? "
                        "WHERE rowid = ?",
                        [
                            (
                                float(known.last_use_s),
                                known.unwritten_uses,
                                *_columns(known.retention),
                                known.rowid,
                            )
                            for known in changed
                        ],
                    )
                for known in changed:
                    known.unwritten_uses = 0
                self._with_unwritten_uses.difference_update(part)

    def bound_uses(self, now_s: float) -> float:
        """Corrects times of use that are later than now, because the clock was set back since. The records get times
        just after now, in the same order. Otherwise they would outlive all later uses. Returns the time to continue
        from."""
        with self.lock:
            late = [known for known in self._known.values() if not known.last_use_s <= now_s]
            late.sort(key=lambda known: known.recency)
            for steps, known in enumerate(late, 1):
                known.last_use_s = now_s + steps * _USE_STEP_S
                self._with_unwritten_uses.add(known.key)
                self._changed(self._segments[known.segment])
            longest_s = now_s + MAX_TTL_S
            for known in self._known.values():
                if not known.retention.until_s <= longest_s:
                    self._charge(known, -1)
                    known.retention = replace(known.retention, until_s=longest_s)
                    self._charge(known, 1)
                    self._with_unwritten_uses.add(known.key)
        return now_s + len(late) * _USE_STEP_S

    # -- inside --------------------------------------------------------------------------------------------------

    def _charge(self, known: Known, sign: int) -> None:
        """Adds a record's bytes to its tenant's account, or takes them away."""
        if known.retention is not NO_RETENTION:
            self.kept.add(known.retention.tenant, sign * known.stored_bytes)

    def _add(self, known: Known) -> None:
        self._charge(known, 1)
        of_segment = self._segments.setdefault(known.segment, _Segment({}))
        of_segment.known[known.key] = known
        of_segment.live_bytes += known.stored_bytes
        self._changed(of_segment)
        self._known[known.key] = known
        if known.unwritten_uses:
            self._with_unwritten_uses.add(known.key)

    def _changed(self, of_segment: _Segment) -> None:
        self._versions += 1
        of_segment.version = self._versions

    def _forget(self, known: Known) -> None:
        self._charge(known, -1)
        of_segment = self._segments[known.segment]
        del of_segment.known[known.key]
        of_segment.live_bytes -= known.stored_bytes
        self._changed(of_segment)
        if not of_segment.known:
            del self._segments[known.segment]
        del self._known[known.key]
        self._with_unwritten_uses.discard(known.key)

    def write_back(self) -> None:
        """Writes the WAL back into the database and truncates it."""
        with self.lock:
            self.written_bytes += self._pages_in_wal() * self._page_bytes
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        with self.lock, suppress(sqlite3.Error):
            self._db.close()

    @contextmanager
    def _transaction(self, growth_bytes: int) -> Iterator[None]:
        """Runs a transaction that adds at most `growth_bytes` to the WAL."""
        with self.lock:
            before_bytes = self._wal_bytes()
            if before_bytes + growth_bytes > self.wal_limit_bytes:
                self.write_back()
                before_bytes = 0
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # after some errors SQLite has already rolled back
                    self._db.execute("ROLLBACK")
                raise
            self.written_bytes += max(0, self._wal_bytes() - before_bytes)

    def _divided(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        step = self.rows_at_once
        for start in range(0, len(items), step):
            yield items[start : start + step]

    def _insertion_bytes(self, rows: int, identities_bytes: int) -> int:
        """Returns an upper bound of the bytes that an insertion at the end of the table adds to the WAL."""
        return (_PAGES_PER_TRANSACTION + self._pages_of_new_rows(rows, identities_bytes)) * self._frame_bytes

    def _pages_of_new_rows(self, rows: int, identities_bytes: int) -> int:
        return rows + 2 * (rows * _ROW_BYTES + identities_bytes) // self._page_bytes

    def _change_bytes(self, rows: int) -> int:
        """Returns an upper bound of the bytes that changes or deletions of rows add to the WAL."""
        return (_PAGES_PER_TRANSACTION + rows * _PAGES_PER_ROW) * self._frame_bytes

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:
            return 0

    def _pages_in_wal(self) -> int:
        """Counts the distinct database pages in the WAL: each is written back once."""
        try:
            content = np.frombuffer(self._wal.read_bytes(), np.uint8)[_WAL_HEADER_BYTES:]
        except OSError:
            return 0
        frames = len(content) // self._frame_bytes
        headers = content[: frames * self._frame_bytes].reshape(frames, self._frame_bytes)[:, :4]
        return len(np.unique(np.ascontiguousarray(headers).view(">u4")))


def _columns(retention: StoredGrant) -> tuple[float, int, int]:
    return float(retention.until_s), retention.priority, retention.tenant


def _row(row: tuple[bytes, int, int, bytes, int, int, int, int, float, int, float, int, int]) -> IndexRow:
    if [type(column) for column in row] != _TYPES:
        raise sqlite3.DatabaseError("a row has columns of wrong types")
    key, first, last, identity, segment, offset, stored_bytes, header_bytes, last_use_s, uses, *_ = row
    until_s, priority, tenant = row[10:]
    return IndexRow(
        RecordKey(key),
        first,
        last,
        identity,
        RecordLocation(segment, offset, stored_bytes, header_bytes),
        last_use_s,
        uses,
        StoredGrant(until_s, priority, tenant) if until_s else NO_RETENTION,
    )
