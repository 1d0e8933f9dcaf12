"""Store of responses: an SQLite database, in a file or in memory, bounded in bytes and entries.

A response has a pointer to the one before it, so that a conversation of n responses takes n entries. All responses
that begin with one are a chain. Eviction removes whole chains: a chain without its beginning cannot be continued.
Nothing is compressed, and a read takes no text that it does not need: a limit counts the bytes that are read.

The database is a list of rows, and the index of ids is in this process alone. The checksums of a row bind its texts
to its id and tenant: a damaged file never gives the content of another response. A file in which damage is found is
renamed, and an empty one takes its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes
from typing import TypeVar

from rootstock.errors import (
    HistoryTooLong,
    InvalidOption,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStoreFailed,
    RootstockError,
)
from rootstock.server.observe.metrics import ResponseStoreStats
from rootstock.units import MIB

log = logging.getLogger(__name__)

MAX_RESPONSES = 65_536
MAX_DEPTH = 4_096  # responses before one
MAX_WAITING_BYTES = 64 * MIB  # of responses that are not written yet

T = TypeVar("T")

_ENTRY_BYTES = 512  # of a row besides its texts
_KEY = "sealing key"
_KEY_BYTES = 32
_CHECKSUM_BYTES = 16
_DIGITS = 8  # of the length of a row's fields
_SCHEMA = (
    "CREATE TABLE keys (name TEXT PRIMARY KEY, value BLOB NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE responses (number INTEGER PRIMARY KEY, content BLOB NOT NULL)",
)
_PAGE_BYTES = 4_096
# The least bytes of a long row that SQLite keeps in a page of its tree; the rest is in pages of its own.
_LEAST_IN_TREE = (_PAGE_BYTES - 12) * 32 // 255 - 23
# SQLite's error codes for which the disk or another process is to blame, not the content of the file.
_CIRCUMSTANCES = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_MISUSE,
    }
)


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response to be stored, as JSON."""

    id: str
    parent: str | None
    head: str  # the response's object without its output
    input: str  # a list of the request's own items
    output: str  # a list of items


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The JSON of a stored response."""

    head: bytes
    input: bytes
    output: bytes


_TEXTS = (
    "output",
    "input",
    "head",
)  # in their order in a row: no read has to pass a text that it does not need


@dataclass(frozen=True, slots=True)
class _Record:
    """A row without its texts."""

    id: str
    tenant: str
    parent: str | None
    bytes_of: Mapping[str, int]  # of each text


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row without its texts."""

    number: int
    tenant: str
    parent: str | None
    chain: str
    depth: int | None  # None: the response before it was not there when this one was added
    history_bytes: int  # of the items of this response and of those before it
    stored_bytes: int
    output_bytes: int


@dataclass(slots=True)
class _Chain:
    ids: dict[str, None] = field(default_factory=dict)  # in their order


@dataclass(slots=True)
class _Tenant:
    """The chains of a tenant, the least recently used first."""

    chains: OrderedDict[str, _Chain] = field(default_factory=OrderedDict)
    stored_bytes: int = 0
    entries: int = 0


class _Damage(sqlite3.DatabaseError):
    """Content of the database that this store did not write."""


class ResponseStore:
    """A store of responses. One thread of its own uses the database: a read sees every earlier write."""

    def __init__(self, path: Path | None, db: sqlite3.Connection, limit_bytes: int) -> None:
        """Raises sqlite3.Error."""
        self._path = path
        self._db = db
        self._limit_bytes = limit_bytes
        self._entries: dict[str, _Entry] = {}  # by id
        self._tenants: dict[str, _Tenant] = {}
        self._stored_bytes = 0
        self._last_number = 0
        self._has_old_frames = False  # the write-ahead log may hold the text of removed rows
        self._worker = ThreadPoolExecutor(1, "rootstock-responses")
        self._lock = threading.Lock()  # of the counts that several threads change
        self._waiting = 0  # calls of the store's thread that have not ended
        self._waiting_bytes = 0
        self._events = {"stored": 0, "not_stored": 0, "deleted": 0, "evicted": 0}
        self._read_rows()
        self.sealing_key = self._read_key() or self._write_key(token_bytes(_KEY_BYTES))
        evicted = self._chosen_for_eviction()
        self._delete_rows(evicted)
        self._events["evicted"] += len(evicted)
        db.executescript("PRAGMA incremental_vacuum")  # `execute` would give back one page
        self._wipe_log()

    @classmethod
    def open(cls, path: Path | None, limit_bytes: int) -> ResponseStore:
        """Opens the store of a file, or one in memory. A damaged file is renamed. Raises InvalidOption."""
        if path is None:
            return cls(None, _connect(":memory:"), limit_bytes)
        try:
            for _ in range(2):
                try:
                    _make_private(path)
                    db = _connect(str(path))
                    try:
                        return cls(path, db, limit_bytes)
                    except BaseException:
                        db.close()
                        raise
                except Exception as error:
                    if not _is_damage(error):
                        raise
                    _set_aside(path, error)
        except (OSError, sqlite3.Error) as error:
            allowed = f"a file that can be written, and that no other server uses ({error})"
            raise InvalidOption("--responses-file", str(path), allowed) from error
        raise InvalidOption("--responses-file", str(path), "a file on a disk without damage")

    def close(self) -> None:
        """Writes the responses that wait, and closes the database: its file then holds all of them. Idempotent."""
        self._worker.shutdown()
        self._db.close()

    @property
    def stats(self) -> ResponseStoreStats:
        """The state at this moment. For any thread, without waiting for the store's."""
        return ResponseStoreStats(
            len(self._entries), self._stored_bytes, self._limit_bytes, self._waiting_bytes, dict(self._events)
        )

    def of(self, tenant: str) -> TenantResponses:
        """Returns the responses of a tenant. For any thread, without waiting for the store's."""
        return TenantResponses(self, tenant)

    def put_later(self, write: Callable[[], int], count: int) -> None:
        """Calls `write`, which stores `count` bytes and returns the responses that it removed, on the store's thread.

        A response that finds too many bytes waiting is not stored.
        """
        with self._lock:
            taken = self._waiting_bytes + count <= MAX_WAITING_BYTES
            self._waiting_bytes += count if taken else 0
            self._events["not_stored"] += not taken
        if not taken:
            log.warning("a response is not stored: %d bytes already wait to be written", self._waiting_bytes)
            return
        self._begin(lambda: self._put(write, count))

    def wait_for(self, work: Callable[[], T]) -> T:
        """Does work on the store's thread. Raises the errors of `work` and ResponseStoreFailed."""
        return self._begin(lambda: self._again_if_damaged(work)).result()

    # ---- on the store's thread

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            self._waiting += 1
        return self._worker.submit(self._done, work)

    def _done(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._lock:
                self._waiting -= 1
            if self._has_old_frames and not self._waiting:
                self._wipe_log()

    def _again_if_damaged(self, work: Callable[[], T]) -> T:
        """Does work. If the database turns out to be damaged, does it again with an empty one.

        Raises the errors of `work` and ResponseStoreFailed.
        """
        try:
            try:
                return work()
            except Exception as error:
                if isinstance(error, RootstockError) or not _is_damage(error):
                    raise
                self._begin_anew(error)
                return work()
        except RootstockError:
            raise
        except Exception as error:
            log.exception("the store of responses cannot be read or written")
            raise ResponseStoreFailed(error) from error

    def _begin_anew(self, error: Exception) -> None:
        """Sets a damaged file aside, and goes on with an empty one. Raises OSError and sqlite3.Error."""
        with suppress(sqlite3.Error):
            self._db.close()
        self._entries, self._tenants, self._stored_bytes = {}, {}, 0
        if self._path is not None:
            _set_aside(self._path, error)
            _make_private(self._path)
        self._db = _connect(":memory:" if self._path is None else str(self._path))
        self._write_key(self.sealing_key)

    def _put(self, write: Callable[[], int], count: int) -> None:
        try:
            evicted = self._again_if_damaged(write)
        except ResponseStoreFailed:
            log.warning("a response is not stored")
            with self._lock:
                self._events["not_stored"] += 1
        else:
            self._events["stored"] += 1
            self._events["evicted"] += evicted
        finally:
            with self._lock:
                self._waiting_bytes -= count

    # ---- on the store's thread, for TenantResponses

    def write(self, tenant: str, response: NewResponse) -> int:
        """Writes a response, and removes others that have to make room. Returns their number."""
        if response.id in self._entries:
            raise ValueError("another response has this id")
        texts = [getattr(response, name).encode(errors="surrogatepass") for name in _TEXTS]
        record = _Record(
            response.id, tenant, response.parent, dict(zip(_TEXTS, map(len, texts), strict=True))
        )
        number = self._last_number + 1
        row = _packed(number, record, texts)
        self._add(response.id, self._new_entry(number, record, len(row)))
        evicted = self._chosen_for_eviction()
        try:
            with self._db:
                self._db.execute("INSERT INTO responses VALUES (?, ?)", (number, row))
                self._delete_rows(evicted)
        except BaseException:
            for id, entry in evicted.items():  # their chains count as used now: it makes no difference
                self._add(id, entry)
            if response.id in self._entries:
                self._remove(response.id)
            raise
        return len(evicted)

    def _new_entry(self, number: int, record: _Record, row_bytes: int) -> _Entry:
        own = record.bytes_of["input"] + record.bytes_of["output"]
        before = None if record.parent is None else self._entries.get(record.parent)
        if before is not None and before.tenant != record.tenant:
            before = None
        chain, depth, history_bytes = record.id, 0 if record.parent is None else None, own
        if before is not None:
            chain, depth = before.chain, None if before.depth is None else before.depth + 1
            history_bytes += before.history_bytes
        return _Entry(
            number,
            record.tenant,
            record.parent,
            chain,
            depth,
            history_bytes,
            row_bytes + _ENTRY_BYTES,
            record.bytes_of["output"],
        )

    def entry(self, id: str) -> _Entry | None:
        return self._entries.get(id)

    def read(self, id: str, entry: _Entry, *names: str) -> list[bytes]:
        """Returns texts of a response, in the order of `_TEXTS`, without reading the others."""
        with self._db.blobopen("responses", "content", entry.number, readonly=True) as row:
            record, texts = _unpacked(entry.number, row, names)
        if (record.id, record.tenant, record.parent) != (id, entry.tenant, entry.parent):
            raise _Damage(f"response {entry.number} is another one")
        return texts

    def used(self, entry: _Entry) -> None:
        """Notes that a chain was continued: it is evicted later."""
        self._tenants[entry.tenant].chains.move_to_end(entry.chain)

    def remove(self, id: str, entry: _Entry) -> None:
        with self._db:
            self._delete_rows({id: entry})
        self._remove(id)
        self._events["deleted"] += 1
        self._wipe_log()

    def _delete_rows(self, entries: Mapping[str, _Entry]) -> None:
        if entries:
            self._has_old_frames = True
            numbers = [(entry.number,) for entry in entries.values()]
            self._db.executemany("DELETE FROM responses WHERE number = ?", numbers)

    def _wipe_log(self) -> None:
        """Empties the write-ahead log: the text of removed rows stays in it otherwise."""
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            log.warning("text of removed responses stays in %s-wal for now: %s", self._path, error)
        else:
            self._has_old_frames = False

    # ---- entries

    def _add(self, id: str, entry: _Entry) -> None:
        """Adds an entry. Its chain becomes the one that was used last."""
        of_tenant = self._tenants.setdefault(entry.tenant, _Tenant())
        of_chain = of_tenant.chains.setdefault(entry.chain, _Chain())
        of_chain.ids[id] = None
        of_tenant.chains.move_to_end(entry.chain)
        of_tenant.stored_bytes += entry.stored_bytes
        of_tenant.entries += 1
        self._entries[id] = entry
        self._stored_bytes += entry.stored_bytes
        self._last_number = max(self._last_number, entry.number)

    def _remove(self, id: str) -> _Entry:
        entry = self._entries.pop(id)
        self._stored_bytes -= entry.stored_bytes
        of_tenant = self._tenants[entry.tenant]
        of_tenant.stored_bytes -= entry.stored_bytes
        of_tenant.entries -= 1
        of_chain = of_tenant.chains[entry.chain]
        del of_chain.ids[id]
        if not of_chain.ids:
            del of_tenant.chains[entry.chain]
        if not of_tenant.chains:
            del self._tenants[entry.tenant]
        return entry

    def _chosen_for_eviction(self) -> dict[str, _Entry]:
        """Removes the entries of chains until the rest fits, and returns them. Their rows are still there.

        The tenant that has the most loses the chain that it has not used for longest.
        """
        removed: dict[str, _Entry] = {}
        while self._stored_bytes > self._limit_bytes or len(self._entries) > MAX_RESPONSES:
            by_bytes = self._stored_bytes > self._limit_bytes
            most = max(
                self._tenants.values(), key=lambda each: each.stored_bytes if by_bytes else each.entries
            )
            for id in list(next(iter(most.chains.values())).ids):
                removed[id] = self._remove(id)
        return removed

    # ---- the database

    def _read_rows(self) -> None:
        for number, row in self._db.execute("SELECT number, content FROM responses ORDER BY number"):
            if not isinstance(row, bytes):
                raise _Damage(f"the content of response {number} has changed")
            record, _ = _unpacked(number, row, _TEXTS)
            if record.id in self._entries:
                raise _Damage(f"response {number} is there twice")
            self._add(record.id, self._new_entry(number, record, len(row)))

    def _read_key(self) -> bytes | None:
        row = self._db.execute("SELECT value, checksum FROM keys WHERE name = ?", (_KEY,)).fetchone()
        if row is None:
            return None
        key, checksum = row
        if not isinstance(key, bytes) or _checksum(0, key) != checksum:
            raise _Damage("the sealing key has changed")
        return key

    def _write_key(self, key: bytes) -> bytes:
        with self._db:
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?)", (_KEY, key, _checksum(0, key)))
        return key


class TenantResponses:
    """The stored responses of one tenant. No method reads or removes the responses of another one.

    All methods but `put` wait for the store's thread: they are not for an event loop. All raise ResponseStoreFailed.
    """

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    def put(self, response: NewResponse) -> None:
        """Stores a response later, on the store's thread. A response that finds too many waiting is not stored."""
        count = len(response.head) + len(response.input) + len(response.output)
        self._store.put_later(lambda: self._store.write(self._tenant, response), count)

    def bytes_of(self, id: str) -> int:
        """Returns the bytes of a response. Raises ResponseNotFound."""
        return self._store.wait_for(lambda: self._entry(id).stored_bytes)

    def output_bytes(self, ids: Collection[str]) -> int:
        """Returns the bytes of the output of those responses that are there."""
        return self._store.wait_for(
            lambda: sum(entry.output_bytes for entry in map(self._own, ids) if entry is not None)
        )

    def history_bytes(self, id: str, most: int) -> int:
        """Returns the bytes of the items of a response and of all before it.

        Raises PreviousResponseNotFound, and HistoryTooLong for more than `most`.
        """
        return self._store.wait_for(lambda: self._end_of_history(id, most).history_bytes)

    def get(self, id: str) -> StoredResponse:
        """Returns a response. Raises ResponseNotFound."""

        def read() -> StoredResponse:
            output, input, head = self._store.read(id, self._entry(id), "output", "input", "head")
            return StoredResponse(head, input, output)

        return self._store.wait_for(read)

    def output(self, id: str) -> bytes:
        """Returns the output of a response. Raises ResponseNotFound."""
        return self._store.wait_for(lambda: self._store.read(id, self._entry(id), "output")[0])

    def delete(self, id: str) -> None:
        """Deletes a response, and all traces of it in the file. Raises ResponseNotFound."""
        self._store.wait_for(lambda: self._store.remove(id, self._entry(id)))

    def history(self, id: str, most: int) -> bytes:
        """Returns the items of a response and of all before it in their order, as a JSON list of lists.

        Raises PreviousResponseNotFound, and HistoryTooLong for more bytes than `most`.
        """
        return self._store.wait_for(lambda: self._history(id, most))

    # ---- on the store's thread

    def _own(self, id: str) -> _Entry | None:
        entry = self._store.entry(id)
        return entry if entry is not None and entry.tenant == self._tenant else None

    def _entry(self, id: str) -> _Entry:
        """Raises ResponseNotFound."""
        entry = self._own(id)
        if entry is None:
            raise ResponseNotFound(id)
        return entry

    def _end_of_history(self, id: str, most: int) -> _Entry:
        """Raises PreviousResponseNotFound and HistoryTooLong."""
        entry = self._own(id)
        # Without a depth, a response before it had been deleted when it was stored.
        if entry is None or entry.depth is None:
            raise PreviousResponseNotFound(id)
        if entry.depth >= MAX_DEPTH:
            raise HistoryTooLong(id, f"more than {MAX_DEPTH:,} responses")
        if entry.history_bytes > most:
            raise HistoryTooLong(id, f"more than {most:,} bytes (--max-body)")
        return entry

    def _history(self, id: str, most: int) -> bytes:
        newest = self._end_of_history(id, most)
        path: list[tuple[str, _Entry]] = []
        at: str | None = id
        while at is not None:
            entry = self._own(at)
            if entry is None:  # it was deleted
                raise PreviousResponseNotFound(id)
            path.append((at, entry))
            at = entry.parent
        lists: list[bytes] = []
        for each in reversed(path):
            output, input = self._store.read(*each, "output", "input")
            lists += (input, output)
        self._store.used(newest)
        return b"[%s]" % b",".join(lists)


def _connect(path: str) -> sqlite3.Connection:
    """Opens a database, and locks a file for this process. Raises sqlite3.Error."""
    db = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        for setting in (
            "locking_mode=EXCLUSIVE",
            f"page_size={_PAGE_BYTES}",
            "auto_vacuum=INCREMENTAL",
            "journal_mode=WAL",
            "synchronous=NORMAL",  # the last responses may be lost with the machine, the rest never
            f"journal_size_limit={MIB}",
            "secure_delete=ON",  # overwrites deleted rows; _packed tells where it does not
            "temp_store=MEMORY",
            "cell_size_check=ON",
        ):
            db.execute(f"PRAGMA {setting}").fetchall()
        db.execute("BEGIN IMMEDIATE")
        with db:
            _refuse_changed(db)
    except BaseException as error:
        db.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY:
            # The file itself can be written (_make_private): its header says something else.
            raise _Damage(str(error)) from error
        raise
    return db


def _refuse_changed(db: sqlite3.Connection) -> None:
    """Creates the tables of an empty database. Raises sqlite3.Error for one that is damaged or not of this store."""
    (health,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if health != "ok":
        raise _Damage(health)
    tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master ORDER BY name")]
    if not tables:
        for statement in _SCHEMA:
            db.execute(statement)
    elif tables != list(_SCHEMA):
        raise _Damage("its tables are not those of this version")


def _checksum(number: int, content: bytes) -> bytes:
    return hashlib.blake2b(
        content, digest_size=_CHECKSUM_BYTES, salt=number.to_bytes(8, "big", signed=True)
    ).digest()


def _packed(number: int, record: _Record, texts: Sequence[bytes]) -> bytes:
    """Returns the row of a record. It is longer than the record, so that no text is in a page of SQLite's tree.

    SQLite moves rows between the pages of its tree and leaves copies behind, which `secure_delete` does not find. The
    other pages of a row are never copied, and overwritten when the row is deleted. The part of a
    row that lies in the tree is zeros, and the length of the row makes this part as short as possible.
    """
    checksums = [_checksum(number, text).hex() for text in texts]
    lengths = [record.bytes_of[name] for name in _TEXTS]
    fields = json.dumps([record.id, record.tenant, record.parent, lengths, checksums]).encode()
    top = b"%d" % len(fields)
    packed = b"".join([bytes(_LEAST_IN_TREE), top.rjust(_DIGITS), _checksum(number, fields), fields, *texts])
    elsewhere = _PAGE_BYTES - 4  # of a row in each page outside of the tree
    pages = max(1, math.ceil((len(packed) - _LEAST_IN_TREE) / elsewhere))
    length = _LEAST_IN_TREE + pages * elsewhere - _row_header_bytes(_LEAST_IN_TREE + pages * elsewhere)
    if length < len(packed):
        length += elsewhere
    return packed + bytes(length - len(packed))


def _row_header_bytes(row_bytes: int) -> int:
    """Returns the bytes that SQLite puts before the one value of a row: sizes, of which each byte has seven bits."""
    return 2 + math.ceil((2 * row_bytes + 12).bit_length() / 7)


def _unpacked(number: int, row: bytes | sqlite3.Blob, names: Collection[str]) -> tuple[_Record, list[bytes]]:
    """Returns the record of a row and its texts of these names, in their order in it.

    Raises sqlite3.Error for a row that has changed.
    """

    def taken(at: int, length: int) -> bytes:
        found = row[at : at + length]
        assert isinstance(found, bytes)
        return found

    try:
        assert not any(taken(0, _LEAST_IN_TREE))
        at = _LEAST_IN_TREE + _DIGITS + _CHECKSUM_BYTES
        fields = taken(at, int(taken(_LEAST_IN_TREE, _DIGITS)))
        assert _checksum(number, fields) == taken(_LEAST_IN_TREE + _DIGITS, _CHECKSUM_BYTES)
        # The checksum is right, so these are the fields as they were written.
        id, tenant, parent, lengths, checksums = json.loads(fields)
        at, texts = at + len(fields), []
        for name, length, checksum in zip(_TEXTS, lengths, checksums, strict=True):
            if name in names:
                texts.append(taken(at, length))
                assert _checksum(number, texts[-1]).hex() == checksum
            at += length
    except (AssertionError, ValueError) as error:
        raise _Damage(f"the content of response {number} has changed") from error
    return _Record(id, tenant, parent, dict(zip(_TEXTS, lengths, strict=True))), texts


def _is_damage(error: Exception) -> bool:
    """Returns whether the content of the database is to blame for an error, and not the disk or another process."""
    if isinstance(error, UnicodeDecodeError):  # of the names in the message of another error
        return True
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and (code is None or code & 0xFF not in _CIRCUMSTANCES)


def _make_private(path: Path) -> None:
    """Makes a file that only this user can read, or makes an existing one so. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for file in (path, *map(path.with_name, _names_beside(path))):
        with suppress(FileNotFoundError):
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)


def _set_aside(path: Path, error: Exception) -> None:
    """Renames a damaged database. Raises OSError."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for name, new_name in zip(_names_beside(path), _names_beside(aside), strict=True):
        with suppress(FileNotFoundError):
            path.with_name(name).rename(path.with_name(new_name))
    reason = " ".join(str(error).split())
    log.warning(
        "%s is damaged (%s). It is now %s, and the store of responses is empty.", path, reason, aside.name
    )


def _names_beside(path: Path) -> list[str]:
    """Returns the names of the files that SQLite has beside a database."""
    return [f"{path.name}{suffix}" for suffix in ("-wal", "-shm", "-journal")]
