"""Store of responses: an SQLite database, in a file or in memory, bounded in bytes and entries.

A response has a pointer to the one before it, so that a conversation of n responses takes n entries. All responses
that begin with one are a chain. Eviction removes whole chains: a chain without its beginning cannot be continued.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes
from typing import Any, TypeVar

from rootstock.errors import (
    HistoryTooLong,
    InvalidOption,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStoreFailed,
)
from rootstock.tiers.disk.index import is_damage
from rootstock.units import MIB

log = logging.getLogger(__name__)

MAX_RESPONSES = 65_536
MAX_DEPTH = 4_096  # responses before one
MAX_HISTORY_BYTES = 64 * MIB  # of JSON, of one response and those before it
MAX_WAITING_BYTES = 64 * MIB  # of responses that are not written yet

T = TypeVar("T")

_ENTRY_BYTES = 512  # of a row besides its texts
_KEY = "sealing key"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  tenant TEXT NOT NULL,
  chain TEXT NOT NULL,
  parent TEXT,
  depth INTEGER NOT NULL,
  stored_bytes INTEGER NOT NULL,
  history_bytes INTEGER NOT NULL,
  head BLOB NOT NULL,
  input BLOB NOT NULL,
  output BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_chain ON responses (tenant, chain);
CREATE TABLE IF NOT EXISTS keys (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
_HISTORY = """
WITH RECURSIVE up (id, parent, depth, history_bytes) AS (
  SELECT id, parent, depth, history_bytes FROM responses WHERE id = :id AND tenant = :tenant
  UNION ALL
  SELECT r.id, r.parent, r.depth, r.history_bytes FROM responses r JOIN up ON r.id = up.parent
  WHERE r.tenant = :tenant AND r.depth = up.depth - 1
)
SELECT id, depth, history_bytes FROM up ORDER BY depth
"""


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
    head: dict[str, Any]
    input: list[Any]
    output: list[Any]


@dataclass(slots=True)
class _Chain:
    stored_bytes: int = 0
    entries: int = 0


@dataclass(slots=True)
class _Tenant:
    """The chains of a tenant, the least recently used first."""

    chains: OrderedDict[str, _Chain]
    stored_bytes: int = 0
    entries: int = 0


class ResponseStore:
    """A store of responses. One thread of its own uses the database: a read sees every earlier write."""

    def __init__(self, db: sqlite3.Connection, limit_bytes: int) -> None:
        self._db = db
        self._limit_bytes = limit_bytes
        self._tenants: dict[str, _Tenant] = {}
        self._stored_bytes = 0
        self._entries = 0
        self._worker = ThreadPoolExecutor(1, "rootstock-responses")
        self._lock = threading.Lock()  # of the count below
        self._waiting_bytes = 0
        self._recount()
        with db:
            self._evict()
        db.executescript("PRAGMA incremental_vacuum")  # `execute` would give back one page
        self.sealing_key = self._sealing_key()

    @classmethod
    def open(cls, path: Path | None, limit_bytes: int) -> ResponseStore:
        """Opens the store of a file, or one in memory. A damaged file is renamed. Raises InvalidOption."""
        if path is None:
            return cls(_connect(":memory:"), limit_bytes)
        for _ in range(2):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                db = _connect(str(path))
                try:
                    return cls(db, limit_bytes)
                except BaseException:
                    db.close()
                    raise
            except (OSError, sqlite3.Error) as error:
                if not isinstance(error, sqlite3.Error) or not is_damage(error):
                    allowed = f"a file that can be written, and that no other server uses ({error})"
                    raise InvalidOption("--responses-file", str(path), allowed) from error
                _set_aside(path, error)
        raise InvalidOption("--responses-file", str(path), "a file on a disk without damage")

    def close(self) -> None:
        """Writes the responses that wait, and closes the database."""
        self._worker.shutdown()
        self._db.close()

    def put(self, tenant: str, response: NewResponse) -> None:
        """Stores a response later, on the store's thread. A response that finds too many waiting is not stored."""
        count = len(response.head) + len(response.input) + len(response.output)
        with self._lock:
            taken = self._waiting_bytes + count <= MAX_WAITING_BYTES
            self._waiting_bytes += count if taken else 0
        if not taken:
            log.warning("a response is not stored: %d bytes already wait to be written", self._waiting_bytes)
            return
        self._worker.submit(self._put, tenant, response, count)

    def get(self, tenant: str, id: str) -> StoredResponse:
        """Returns a response. Waits: not for an event loop. Raises ResponseNotFound and ResponseStoreFailed."""
        return self._on_worker(lambda: self._get(tenant, id))

    def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Waits: not for an event loop. Raises ResponseNotFound and ResponseStoreFailed."""
        self._on_worker(lambda: self._delete(tenant, id))

    def history(self, tenant: str, id: str) -> list[Any]:
        """Returns the items of a response and of all before it, inputs and outputs, in their order.

        Waits: not for an event loop. Raises PreviousResponseNotFound, HistoryTooLong and ResponseStoreFailed.
        """
        return self._on_worker(lambda: self._history(tenant, id))

    # ---- on the store's thread

    def _on_worker(self, work: Callable[[], T]) -> T:
        try:
            return self._worker.submit(work).result()
        except (sqlite3.Error, zlib.error, ValueError) as error:
            log.exception("the store of responses cannot be read or written")
            raise ResponseStoreFailed(error) from error

    def _put(self, tenant: str, response: NewResponse, count: int) -> None:
        try:
            try:
                with self._db:
                    self._insert(tenant, response)
                    self._evict()
            except BaseException:
                self._recount()  # the transaction was rolled back
                raise
        except Exception:
            log.exception("a response is not stored")
        finally:
            with self._lock:
                self._waiting_bytes -= count

    def _insert(self, tenant: str, response: NewResponse) -> None:
        texts = [
            text.encode(errors="surrogatepass") for text in (response.head, response.input, response.output)
        ]
        packed = [zlib.compress(text, 1) for text in texts]
        stored_bytes = sum(map(len, packed)) + _ENTRY_BYTES
        # Gets a chain of its own if the response before it was deleted meanwhile: `_history` refuses it then.
        chain, depth = self._db.execute(
            "SELECT chain, depth + 1 FROM responses WHERE id = ? AND tenant = ?", (response.parent, tenant)
        ).fetchone() or (response.id, 0 if response.parent is None else 1)
        self._db.execute(
            "INSERT INTO responses"
            " (id, tenant, chain, parent, depth, stored_bytes, history_bytes, head, input, output)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id,
                tenant,
                chain,
                response.parent,
                depth,
                stored_bytes,
                len(texts[1]) + len(texts[2]),
                *packed,
            ),
        )
        self._count(tenant, chain, stored_bytes, 1)

    def _get(self, tenant: str, id: str) -> StoredResponse:
        row = self._db.execute(
            "SELECT head, input, output FROM responses WHERE id = ? AND tenant = ?", (id, tenant)
        ).fetchone()
        if row is None:
            raise ResponseNotFound(id)
        return StoredResponse(*map(_unpacked, row))

    def _delete(self, tenant: str, id: str) -> None:
        with self._db:
            row = self._db.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING chain, stored_bytes",
                (id, tenant),
            ).fetchone()
        if row is None:
            raise ResponseNotFound(id)
        chain, stored_bytes = row
        self._count(tenant, chain, -stored_bytes, -1)

    def _history(self, tenant: str, id: str) -> list[Any]:
        rows = self._db.execute(_HISTORY, {"id": id, "tenant": tenant}).fetchall()
        # The first one has none before it: otherwise a response in between was deleted.
        if not rows or rows[0][1] != 0:
            raise PreviousResponseNotFound(id)
        if len(rows) > MAX_DEPTH:
            raise HistoryTooLong(id, f"more than {MAX_DEPTH:,} responses")
        if sum(size for _, _, size in rows) > MAX_HISTORY_BYTES:
            raise HistoryTooLong(id, f"more than {MAX_HISTORY_BYTES:,} bytes")
        items: list[Any] = []
        for each, _, _ in rows:
            stored = self._get(tenant, each)
            items += stored.input
            items += stored.output
        (chain,) = self._db.execute("SELECT chain FROM responses WHERE id = ?", (id,)).fetchone()
        self._tenants[tenant].chains.move_to_end(chain)
        return items

    def _recount(self) -> None:
        rows = self._db.execute(
            "SELECT tenant, chain, SUM(stored_bytes), COUNT(*) FROM responses"
            " GROUP BY tenant, chain ORDER BY MAX(number)"
        ).fetchall()  # before any change: a file that cannot be read leaves the counts as they are
        self._tenants, self._stored_bytes, self._entries = {}, 0, 0
        for tenant, chain, stored_bytes, entries in rows:
            self._count(tenant, chain, stored_bytes, entries)

    def _count(self, tenant: str, chain: str, stored_bytes: int, entries: int) -> None:
        """Counts entries that were added or removed. Adding makes the chain the one that was used last."""
        of_tenant = self._tenants.setdefault(tenant, _Tenant(OrderedDict()))
        of_chain = of_tenant.chains.setdefault(chain, _Chain())
        for counted in (of_chain, of_tenant):
            counted.stored_bytes += stored_bytes
            counted.entries += entries
        self._stored_bytes += stored_bytes
        self._entries += entries
        if entries > 0:
            of_tenant.chains.move_to_end(chain)
        if of_chain.entries == 0:
            del of_tenant.chains[chain]
        if of_tenant.entries == 0:
            del self._tenants[tenant]

    def _evict(self) -> None:
        """Removes chains until the rest fits, in an open transaction.

        The tenant that has the most loses the chain that it has not used for longest.
        """
        while self._stored_bytes > self._limit_bytes or self._entries > MAX_RESPONSES:
            by_bytes = self._stored_bytes > self._limit_bytes
            tenant, of_tenant = max(
                self._tenants.items(), key=lambda each: each[1].stored_bytes if by_bytes else each[1].entries
            )
            chain, of_chain = next(iter(of_tenant.chains.items()))
            self._db.execute("DELETE FROM responses WHERE tenant = ? AND chain = ?", (tenant, chain))
            self._count(tenant, chain, -of_chain.stored_bytes, -of_chain.entries)

    def _sealing_key(self) -> bytes:
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (_KEY, token_bytes(32)))
        (key,) = self._db.execute("SELECT value FROM keys WHERE name = ?", (_KEY,)).fetchone()
        return bytes(key)


def _connect(path: str) -> sqlite3.Connection:
    """Opens a database, and locks a file for this process. Raises sqlite3.Error."""
    db = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        for setting in (
            "locking_mode=EXCLUSIVE",
            "auto_vacuum=INCREMENTAL",
            "journal_mode=WAL",
            "synchronous=NORMAL",  # the last responses may be lost with the machine, the rest never
            f"journal_size_limit={MIB}",
            "secure_delete=ON",  # the text of a deleted response does not stay in the file
        ):
            db.execute(f"PRAGMA {setting}").fetchall()
        (health,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if health != "ok":
            raise sqlite3.DatabaseError(health)
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _set_aside(path: Path, error: sqlite3.Error) -> None:
    """Renames a damaged database. Raises OSError."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    log.warning(
        "%s is damaged (%s). It is now %s, and the store of responses is empty.", path, error, aside.name
    )


def _unpacked(packed: bytes) -> Any:
    return json.loads(zlib.decompress(packed).decode(errors="surrogatepass"))
