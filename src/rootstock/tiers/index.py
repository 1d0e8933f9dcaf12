"""Which records there are: an SQLite database in WAL mode. A record exists once its row is committed.

The one connection locks the database for its process, which keeps SQLite from making a shared-memory file beside it.
The WAL never grows beyond `wal_bytes`: before a transaction that could take it there it is written back and cut, and
larger transactions are for the caller to divide (`rows_at_once`).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rootstock.cache.identity import RecordKey
from rootstock.tiers.files import Files
from rootstock.tiers.record import FORMAT, Place

INDEX_NAME = f"v{FORMAT}-index.sqlite"
WAL_NAME = INDEX_NAME + "-wal"
# SQLite makes these itself: the last one while the database is created.
INDEX_NAMES = {INDEX_NAME, WAL_NAME, INDEX_NAME + "-journal"}

T = TypeVar("T")

_PAGE_BYTES = 4096
_FRAME_BYTES = _PAGE_BYTES + 24
_PAGES_PER_ROW = 8  # leaves of the table and of three indices, and a split now and then
_PAGES_PER_TRANSACTION = 16  # inner nodes and the free list
# What SQLite says when the disk or the process is to blame, and not what the database holds.
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
_TYPES = [bytes, int, int, bytes, int, int, int, int, float, int]
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
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON records (key);
CREATE INDEX IF NOT EXISTS by_use ON records (last_use, last DESC);
CREATE INDEX IF NOT EXISTS by_segment ON records (segment, bytes);
"""


@dataclass(frozen=True, slots=True)
class Row:
    key: RecordKey
    first: int
    last: int
    identity: bytes  # encoded
    place: Place
    last_use_s: float
    uses: int


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the database itself is unreadable, and will be at the next start."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in _CIRCUMSTANCES


class Index:
    """Thread-safe through `lock`, which a caller may hold over several calls. Every method raises sqlite3.Error."""

    def __init__(self, files: Files, folder: Path, connection: sqlite3.Connection, wal_bytes: int) -> None:
        self.lock = threading.RLock()
        self._wal = folder / WAL_NAME
        self._db = connection
        self.wal_limit_bytes = wal_bytes
        self.written_bytes = 0

    @staticmethod
    def open(files: Files, folder: Path, wal_bytes: int) -> Index:
        """Raises sqlite3.Error if the database can't be read; nothing is open then."""
        db = files.connect(folder / INDEX_NAME)
        try:
            db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")  # a commit is durable when it returns
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute("PRAGMA cache_spill=OFF")  # a transaction writes a page once
            db.execute("PRAGMA temp_store=MEMORY")
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            # The types too, which the schema checks: what is wrong must show now, when one can begin anew.
            (health,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if health != "ok":
                raise sqlite3.DatabaseError(health)
            index = Index(files, folder, db, wal_bytes)
            index.write_back()
        except ValueError as error:  # a message of SQLite's that quotes what is damaged, and is no text
            db.close()
            raise sqlite3.DatabaseError("the schema is not as it was written") from error
        except sqlite3.Error:
            db.close()
            raise
        return index

    # -- reading -------------------------------------------------------------------------------------------------

    def find(self, key: RecordKey) -> Row | None:
        with self.lock:
            row = self._db.execute("SELECT * FROM records WHERE key = ?", (key,)).fetchone()
        return None if row is None else _row(row)

    def keys(self) -> list[RecordKey]:
        """By first position: whatever a record continues comes before it."""
        with self.lock:
            return [key for (key,) in self._db.execute("SELECT key FROM records ORDER BY first, last")]

    def rows(self, keys: Iterable[RecordKey]) -> Iterator[Row]:
        for key in keys:
            if (row := self.find(key)) is not None:
                yield row

    def of_segment(self, segment: int) -> list[Row]:
        with self.lock:
            found = self._db.execute("SELECT * FROM records WHERE segment = ? ORDER BY offset", (segment,))
            return [_row(row) for row in found]

    def least_recently_used(self, count: int) -> list[tuple[RecordKey, int]]:
        """Keys and bytes. Of records used at the same time those that end last go first: they continue others."""
        with self.lock:
            query = "SELECT key, bytes FROM records ORDER BY last_use, last DESC LIMIT ?"
            return [(key, stored_bytes) for key, stored_bytes in self._db.execute(query, (count,))]

    def live_bytes(self) -> dict[int, int]:
        """Of each segment that has records."""
        with self.lock:
            return dict(self._db.execute("SELECT segment, SUM(bytes) FROM records GROUP BY segment"))

    def ends(self) -> dict[int, int]:
        """Where the last record of each segment ends."""
        with self.lock:
            return dict(self._db.execute("SELECT segment, MAX(offset + bytes) FROM records GROUP BY segment"))

    def beyond(self, segment: int, length: int) -> list[RecordKey]:
        """Records of the segment that end after `length`."""
        with self.lock:
            query = "SELECT key FROM records WHERE segment = ? AND offset + bytes > ?"
            return [key for (key,) in self._db.execute(query, (segment, length))]

    # -- writing: each call is a transaction ---------------------------------------------------------------------

    @property
    def rows_at_once(self) -> int:
        """How many rows without identities a transaction may touch."""
        return max(1, (self.wal_limit_bytes // _FRAME_BYTES - _PAGES_PER_TRANSACTION) // _PAGES_PER_ROW)

    def fits(self, identities_bytes: Sequence[int]) -> bool:
        """Whether rows with identities of these lengths may be inserted at once."""
        return _growth_bytes(len(identities_bytes), sum(identities_bytes)) <= self.wal_limit_bytes

    def insert(self, rows: Sequence[Row]) -> None:
        with self._transaction(len(rows), sum(len(row.identity) for row in rows)):
            self._db.executemany(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
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
                    )
                    for row in rows
                ],
            )

    def delete(self, keys: Sequence[RecordKey]) -> None:
        for part in self._divided(keys):
            with self._transaction(len(part)):
                self._db.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in part])

    def delete_at(self, key: RecordKey, place: Place) -> bool:
        """Only if it still lies there: it may have been moved, or stored again."""
        with self._transaction(1):
            query = "DELETE FROM records WHERE key = ? AND segment = ? AND offset = ?"
            deleted = self._db.execute(query, (key, place.segment, place.offset))
        return deleted.rowcount > 0

    def move(self, moves: Sequence[tuple[RecordKey, Place, Place]]) -> None:
        """Records, from where, to where; one that lies elsewhere by now stays there."""
        for part in self._divided(moves):
            with self._transaction(len(part)):
                self._db.executemany(
                    "UPDATE records SET segment = ?, offset = ? WHERE key = ? AND segment = ? AND offset = ?",
                    [(new.segment, new.offset, key, old.segment, old.offset) for key, old, new in part],
                )

    def touch(self, uses: Sequence[tuple[RecordKey, float, int]]) -> None:
        """Records, when they were last used, and how often since the last time."""
        for part in self._divided(uses):
            with self._transaction(len(part)):
                self._db.executemany(
                    "UPDATE records SET last_use = MAX(last_use, ?), uses = uses + ? WHERE key = ?",
                    [(last_use_s, count, key) for key, last_use_s, count in part],
                )

    def write_back(self) -> None:
        """From the WAL into the database; the WAL is empty then."""
        with self.lock:
            self.written_bytes += self._wal_bytes()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        with self.lock, suppress(sqlite3.Error):
            self._db.close()

    @contextmanager
    def _transaction(self, rows: int, identities_bytes: int = 0) -> Iterator[None]:
        with self.lock:
            before_bytes = self._wal_bytes()
            if before_bytes + _growth_bytes(rows, identities_bytes) > self.wal_limit_bytes:
                self.write_back()
                before_bytes = 0
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite has rolled back itself after some errors
                    self._db.execute("ROLLBACK")
                raise
            self.written_bytes += max(0, self._wal_bytes() - before_bytes)

    def _divided(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        step = self.rows_at_once
        for start in range(0, len(items), step):
            yield items[start : start + step]

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:
            return 0


def _growth_bytes(rows: int, identities_bytes: int) -> int:
    """The most that a transaction adds to the WAL."""
    pages = _PAGES_PER_TRANSACTION + rows * _PAGES_PER_ROW + 2 * identities_bytes // _PAGE_BYTES
    return pages * _FRAME_BYTES


def _row(row: tuple[bytes, int, int, bytes, int, int, int, int, float, int]) -> Row:
    if [type(column) for column in row] != _TYPES:
        raise sqlite3.DatabaseError("a row is not as it was written")
    key, first, last, identity, segment, offset, stored_bytes, header_bytes, last_use_s, uses = row
    return Row(
        RecordKey(key),
        first,
        last,
        identity,
        Place(segment, offset, stored_bytes, header_bytes),
        last_use_s,
        uses,
    )
