"""Tier that several servers share: records in a Valkey or Redis server, found by content and verified on each load.

    PREFIX r2:KEY     a record (`record_stream.py`)
    PREFIX at:PARENT  a set of places: which kinds of records, of how many tokens, begin after the tokens of PARENT
    PREFIX ns:DIGEST  exists if records of a namespace were stored

The server evicts by its own policy. A record that it does not have is a miss. It may also evict a place or a mark of
a namespace, without which no look-up finds the records: they are written again with every store, also of records
that are there already. While it cannot be reached the tier is
`Off`: every request computes, and a thread tries to reach it again. A server may come back empty, so the records that
were known before are then forgotten, and found again when a prompt is looked up (`PromptLookups`).

No server's `clear` removes records, because other servers use them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import xxhash

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep
from rootstock.fleet_config import RemoteConfig
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
)
from rootstock.tiers.remote.connection import Reply, StoreConnection, StoreRefused, StoreUnreachable
from rootstock.tiers.remote.connection_pool import Connect, ConnectionPool
from rootstock.tiers.remote.place import place_of
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.record_stream import RECORD_KIND, OutgoingRecord, Proof, outgoing, read_record
from rootstock.units import MIB

_log = logging.getLogger(__name__)

RETRY_S = 1.0  # between two attempts to reach the server
MOST_KNOWN = 200_000  # records that are in the index because of this tier
# After so many stores of records that the server did not have, it is not asked for the next ones: the question takes
# as long as a small record.
_SURELY_NEW = 4
_GROUP_BYTES = 16 * MIB  # stored in one exchange
_LEAST_BYTES_PER_S = 10 * MIB  # for the time limit of a store, which no request waits for
_CHECKED_AT_ONCE = 1000  # records whose existence is asked in one exchange
CHECK_PAUSE_S = 30.0  # between two checks of all known records, which take a second of processor time


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """Memory of the shared server, of all its users, as it reports it."""

    used_bytes: int
    cap_bytes: int  # 0: no limit of its own
    policy: str  # of its evictions
    evicted_keys: int


@dataclass(slots=True)
class RemoteCounts:
    """Counters since the start."""

    stored_records: int = 0
    stored_bytes: int = 0
    already_stored: int = 0
    loaded_records: int = 0
    loaded_bytes: int = 0
    lookups: int = 0
    found_records: int = 0  # by lookups
    outages: int = 0
    misses: Counter[MissKind] = field(default_factory=Counter)
    refused: Counter[Refusal] = field(default_factory=Counter)


class RemoteTier:
    """Records in a shared server. Thread-safe. `gone` gets the records that the server has no more."""

    def __init__(
        self,
        config: RemoteConfig,
        codes: RecordCodes | None = None,
        *,
        gone: Gone | None = None,
        connect: Connect = StoreConnection,
    ) -> None:
        """Tries to reach the server once, and goes on without it if it cannot be reached."""
        self._config = config
        self._new_proof: Callable[[], Proof] = xxhash.xxh3_128 if codes is None else codes.begin
        self._gone = gone
        self._prefix = (config.prefix + (f"{codes.name}:" if codes is not None else "")).encode()
        self._new_in_a_row = 0  # stores of records that the server did not have
        self._lock = threading.Lock()
        self._connections = ConnectionPool(config, connect)
        self._known: OrderedDict[RecordKey, None] = OrderedDict()
        self._state: TierState = Ready()
        self._changed = threading.Event()  # the tier is off, in doubt or closed
        self._in_doubt = False  # the server has lost a record: it may have lost more
        self._check_at = 0.0  # by the system's clock: not before
        self._closing = False
        self.counts = RemoteCounts()
        try:
            self._connections.connect()
        except StoreUnreachable as error:
            self.turn_off(error)
        self._watcher = threading.Thread(target=self._watch, name="rootstock-remote", daemon=True)
        self._watcher.start()

    @property
    def state(self) -> TierState:
        return self._state

    def __contains__(self, key: RecordKey) -> bool:
        """Returns whether the server is believed to have a record."""
        return key in self._known

    @property
    def timeout_s(self) -> float:
        return self._config.timeout_s

    def name(self, kind: bytes, digest: bytes) -> bytes:
        """Returns a key of the server."""
        return self._prefix + kind + digest

    def run(self, commands: Sequence[Sequence[bytes]], seconds: float | None = None) -> list[Reply]:
        """Runs commands on a free connection, within the time limit of the tier unless another is given.

        Raises StoreUnreachable or StoreRefused.
        """
        if not commands:
            return []
        with self._connections.lend() as connection:
            return connection.run(commands, seconds=seconds)

    def found(self, keys: Iterable[RecordKey]) -> None:
        """Notes the records that a look-up has found."""
        found = list(keys)
        with self._lock:
            self.counts.lookups += 1
            self.counts.found_records += len(found)
        self._know(found)

    # -- storing -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """Stores records that the server does not have. Returns one outcome for each."""
        outcomes: list[StoreOutcome] = []
        group: list[Record] = []
        group_bytes = 0
        for record in records:
            group.append(record)
            group_bytes += record.payload_bytes
            if group_bytes >= _GROUP_BYTES:
                outcomes += self._store(group)
                group, group_bytes = [], 0
        outcomes += self._store(group)
        if refused := [each.why for each in outcomes if isinstance(each, NotStored)]:
            with self._lock:
                self.counts.refused.update(refused)
        return outcomes

    def _store(self, group: Sequence[Record]) -> list[StoreOutcome]:
        if isinstance(self._state, Off):
            return [NotStored(Refusal.UNAVAILABLE, self._state.reason)] * len(group)
        if not group:
            return []
        keys = [record.identity.key for record in group]
        records = dict(zip(keys, group, strict=True))
        try:
            with self._connections.lend() as connection:
                marks = self._marks_of(records.values())
                if self._new_in_a_row < _SURELY_NEW:
                    new = self._unknown(connection, records, marks)
                    marks = []
                else:
                    new = self._outgoing(records)
                refusals, stored_meanwhile = self._send(connection, marks, new)
                if refusals:
                    self._remove_places(connection, [records[key].identity for key in refusals])
        except (StoreUnreachable, StoreRefused) as error:
            if isinstance(error, StoreUnreachable):
                self.turn_off(error)
            return [NotStored(Refusal.FAILED, str(error))] * len(group)
        was_there = len(new) < len(records) or bool(stored_meanwhile)
        self._new_in_a_row = 0 if was_there else self._new_in_a_row + 1
        for key in stored_meanwhile:
            del new[key]
        self._know(key for key in keys if key not in refusals)
        outcomes: list[StoreOutcome] = []
        for key in keys:
            written = new.pop(key, None)  # a record that is twice in a group is stored once
            if key in refusals:
                outcomes.append(refusals[key])
            elif written is None:
                outcomes.append(AlreadyStored())
            else:
                outcomes.append(Stored(written.stored_bytes))
        with self._lock:
            stored = [each.stored_bytes for each in outcomes if isinstance(each, Stored)]
            self.counts.stored_records += len(stored)
            self.counts.stored_bytes += sum(stored)
            self.counts.already_stored += sum(isinstance(each, AlreadyStored) for each in outcomes)
        return outcomes

    def _marks_of(self, group: Iterable[Record]) -> list[list[bytes]]:
        """Returns the commands that write the places of records and the marks of their namespaces.

        They come before the records: a look-up asks for the records of the places that it finds.
        """
        identities = [record.identity for record in group]
        places = [[b"SADD", self.name(b"at:", each.parent), place_of(each)] for each in identities]
        spaces = {each.namespace for each in identities}
        return [*places, *([b"SET", self.name(b"ns:", space), b"1"] for space in spaces)]

    def _remove_places(self, connection: StoreConnection, absent: Iterable[Identity]) -> None:
        connection.run([[b"SREM", self.name(b"at:", each.parent), place_of(each)] for each in absent])

    def _unknown(
        self,
        connection: StoreConnection,
        records: Mapping[RecordKey, Record],
        marks: Sequence[Sequence[bytes]],
    ) -> dict[RecordKey, OutgoingRecord]:
        """Writes the marks of records, and returns the records that the server does not have."""
        connection.begin()
        connection.send([*([b"EXISTS", self.name(RECORD_KIND, key)] for key in records), *marks])
        new = self._outgoing(records)  # while the server works
        replies = connection.read_replies(len(records) + len(marks))
        for key, is_there in zip(records, replies, strict=False):
            if isinstance(is_there, StoreRefused):
                raise is_there
            if is_there:
                del new[key]
        return new

    def _outgoing(self, records: Mapping[RecordKey, Record]) -> dict[RecordKey, OutgoingRecord]:
        return {key: outgoing(record, self._new_proof()) for key, record in records.items()}

    def _send(
        self,
        connection: StoreConnection,
        marks: Sequence[Sequence[bytes]],
        new: Mapping[RecordKey, OutgoingRecord],
    ) -> tuple[dict[RecordKey, NotStored], list[RecordKey]]:
        """Sends marks and records. Returns the records that the server has refused, as a full one does, and the ones
        that it had."""
        total_bytes = sum(record.stored_bytes for record in new.values())
        connection.begin(self._config.timeout_s + total_bytes / _LEAST_BYTES_PER_S)
        connection.send(marks, at_once=False)
        for key, record in new.items():
            command = [b"SET", self.name(RECORD_KIND, key)]
            connection.send_value(command, record.stored_bytes, record.pieces(), [b"NX"])
        refusals, stored = dict[RecordKey, NotStored](), list[RecordKey]()
        replies = connection.read_replies(len(marks) + len(new))[len(marks) :]
        for key, reply in zip(new, replies, strict=True):
            if isinstance(reply, StoreRefused):
                why = Refusal.NO_ROOM if str(reply).startswith("OOM") else Refusal.FAILED
                refusals[key] = NotStored(why, str(reply))
            elif reply is None:
                stored.append(key)
        return refusals, stored

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record into the caller's buffers, or into new ones. A record that is not exactly the one that was
        stored is a miss, and is removed from the server."""
        result = self._load(identity, into, then)
        key = identity.key
        with self._lock:
            if isinstance(result, Loaded):
                self.counts.loaded_records += 1
                self.counts.loaded_bytes += sum(view.nbytes for view in result.payload)
                return result
            self.counts.misses[result.kind] += 1
        if result.kind is MissKind.ABSENT:
            self._forget([key])
            self._doubt()
        elif result.kind not in (MissKind.UNAVAILABLE, MissKind.IO_ERROR):
            self.quarantine([key])
        return result

    def _load(self, identity: Identity, into: Sequence[Buffer] | None, then: Identity | None) -> LoadResult:
        if isinstance(self._state, Off):
            return Miss(MissKind.UNAVAILABLE, self._state.reason)
        name = self.name(RECORD_KIND, identity.key)
        try:
            with self._connections.lend(name) as connection:
                size = connection.open_value(name)
                if size is None:
                    return Miss(MissKind.ABSENT)
                if then is not None and then.key in self._known:
                    connection.ask_value(self.name(RECORD_KIND, then.key))
                result = read_record(connection, size, self._new_proof(), identity, into)
                if isinstance(result, Miss):
                    connection.close()  # a part of the value may be unread
                return result
        except StoreUnreachable as error:
            self.turn_off(error)
            return Miss(MissKind.IO_ERROR, str(error))
        except StoreRefused as error:
            return Miss(MissKind.IO_ERROR, str(error))

    # -- use and contents ----------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[RecordKey]) -> None:
        """Does nothing: a read is a use, by which the server orders its own evictions."""

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        """Does nothing: the server evicts by its own policy."""

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        struck = list(keys)
        if struck and not isinstance(self._state, Off):
            try:
                self.run([[b"DEL", self.name(RECORD_KIND, key)] for key in struck])
            except StoreUnreachable as error:
                self.turn_off(error)
            except StoreRefused as error:
                _log.warning("The shared tier does not delete wrong records: %s", error)
        self._forget(struck)

    def clear(self, namespace: bytes | None = None) -> bool:
        """Does nothing, because other servers use the records."""
        return True

    def entries(self) -> Iterator[Entry]:
        """Yields nothing: a prompt's records are looked up when it is submitted."""
        return iter(())

    def counted(self) -> RemoteCounts:
        """Returns a copy of the counters."""
        with self._lock:
            return deepcopy(self.counts)

    def usage(self) -> RemoteUsage | None:
        """Asks the server for its memory; None: it does not say. Waits for the server."""
        if isinstance(self._state, Off):
            return None
        try:
            reports = self.run([[b"INFO", b"memory"], [b"INFO", b"stats"]])
        except StoreUnreachable as error:
            self.turn_off(error)
            return None
        except StoreRefused:
            return None
        text = b"\n".join(each for each in reports if isinstance(each, bytes)).decode(errors="replace")
        said = dict(line.strip().split(":", 1) for line in text.splitlines() if ":" in line)

        def number(name: str) -> int:
            text = said.get(name, "")
            return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

        return RemoteUsage(
            number("used_memory"),
            number("maxmemory"),
            said.get("maxmemory_policy", "")[:40],
            number("evicted_keys"),
        )

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._state = Off("closed")
        self._changed.set()
        self._watcher.join()
        self._connections.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _know(self, keys: Iterable[RecordKey]) -> None:
        dropped: list[RecordKey] = []
        with self._lock:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > MOST_KNOWN:
                dropped.append(self._known.popitem(last=False)[0])
        self._tell_gone(dropped)

    def _forget(self, keys: Iterable[RecordKey]) -> None:
        with self._lock:
            forgotten = [key for key in keys if self._known.pop(key, self) is None]
        self._tell_gone(forgotten)

    def _tell_gone(self, keys: Sequence[RecordKey]) -> None:
        if keys and self._gone is not None:
            self._gone(keys)

    def turn_off(self, error: StoreUnreachable) -> None:
        with self._lock:
            begins = not isinstance(self._state, Off)
            self._state = Off(f"the shared server at {self._config} cannot be reached: {error}")
            if begins:
                self.counts.outages += 1
        self._connections.clear()
        if begins:
            _log.warning(
                "There is no shared tier for now: %s. Requests go on without it.", self._state.reason
            )
        self._changed.set()

    def _doubt(self) -> None:
        self._in_doubt = True
        self._changed.set()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing:
            self._changed.wait(max(0.0, self._check_at - time.monotonic()) if self._in_doubt else None)
            self._changed.clear()
            while isinstance(self._state, Off) and not self._closing:
                if not self._reach_again():
                    self._changed.wait(RETRY_S)
                    self._changed.clear()
            if self._in_doubt and not self._closing and time.monotonic() >= self._check_at:
                self._in_doubt = False
                self._check_known()
                self._check_at = time.monotonic() + CHECK_PAUSE_S

    def _reach_again(self) -> bool:
        try:
            self._connections.connect()
        except StoreUnreachable:
            return False
        with self._lock:
            known, self._known = list(self._known), OrderedDict()
        self._tell_gone(known)
        with self._lock:
            if self._closing:
                return True
            self._state = Ready()
        _log.info("The shared tier is back.")
        return True

    def _check_known(self) -> None:
        """Asks for every known record whether the server still has it: one that was lost is seldom alone."""
        with self._lock:
            known = list(self._known)
        for first in range(0, len(known), _CHECKED_AT_ONCE):
            if isinstance(self._state, Off):  # also at the end, which waits for this thread
                return
            keys = known[first : first + _CHECKED_AT_ONCE]
            try:
                there = self.run([[b"EXISTS", self.name(RECORD_KIND, key)] for key in keys])
            except StoreUnreachable as error:
                self.turn_off(error)
                return
            except StoreRefused:
                return
            self._forget(key for key, is_there in zip(keys, there, strict=True) if not is_there)
