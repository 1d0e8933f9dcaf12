"""Interface of a tier: records, outcomes of stores and loads, states. Independent of where the bytes are.

A record's `Identity` names its owner and content down to the tokens. It is checked on every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep

Buffer = memoryview | NDArray[np.uint8]  # contiguous


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Record to store. The payload's buffers are written in order; they must not change until the store has ended."""

    identity: Identity
    payload: Sequence[Buffer]
    keep: Keep | None = None  # how long hints keep it from eviction

    def views(self) -> list[memoryview]:
        return views_of(self.payload)

    @property
    def payload_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.payload)


def as_bytes(buffer: Buffer) -> memoryview:
    """Returns a view of the buffer's bytes."""
    view = buffer if isinstance(buffer, memoryview) else buffer.data
    assert view.c_contiguous, "a payload is contiguous"
    if view.format == "B" and view.ndim == 1:  # the common case; a record has many buffers
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def views_of(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Returns the buffers byte by byte, without empty ones."""
    return [view for buffer in buffers if (view := as_bytes(buffer)).nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Entry of a tier's index: a record without its payload."""

    identity: Identity
    payload_bytes: int
    stored_bytes: int  # with its header
    last_use_s: float  # since the Unix epoch
    uses: int  # number of calls of `touch`


# -- storing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome: the record is stored. On a disk it survives a crash."""

    stored_bytes: int


@dataclass(frozen=True, slots=True)
class AlreadyStored:
    """Outcome: the record was there before. Counts as a use."""


class Refusal(StrEnum):
    UNAVAILABLE = "unavailable"  # the tier takes no stores; its state has the reason
    NO_ROOM = "no_room"  # nothing more can be freed under the cap
    TOO_LARGE = "too_large"  # larger than the cap
    QUEUE_FULL = "queue_full"  # the writer is behind
    FAILED = "failed"  # the disk or the system returned an error


@dataclass(frozen=True, slots=True)
class NotStored:
    """Outcome: no part of the record is visible, and it is not counted."""

    why: Refusal
    detail: str = ""


StoreOutcome = Stored | AlreadyStored | NotStored

# -- loading -----------------------------------------------------------------------------------------------------


class MissKind(StrEnum):
    ABSENT = "absent"  # no such record: an ordinary miss
    MISSING_BYTES = "missing_bytes"  # the record ends too early, or its file does not exist
    CHECKSUM = "checksum"
    # The record is complete, but of something else:
    OTHER_NAMESPACE = "other_namespace"  # weights, RoPE regime, adapter or tenant
    OTHER_LAYERS = "other_layers"  # another family, number of layers or kind
    OTHER_DTYPE = "other_dtype"
    OTHER_POSITION = "other_position"
    OTHER_TOKENS = "other_tokens"
    OTHER_SIZE = "other_size"  # the caller expects a different number of bytes
    IO_ERROR = "io_error"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Result: the payload is verified. It is in the caller's buffers, if given, or in new ones, split as stored."""

    payload: tuple[memoryview, ...]
    source: Literal["host", "disk", "remote"] = "host"  # "host": memory of the host, also a queue of stores


@dataclass(frozen=True, slots=True)
class Miss:
    """Result: not loaded. The content of the caller's buffers is undefined."""

    kind: MissKind
    detail: str = ""


LoadResult = Loaded | Miss

# -- the state of a tier -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class LoadsOnly:
    """State after a failed store. Loads continue; stores are refused until `retry_at_s`, when one is tried again."""

    reason: str
    retry_at_s: float


@dataclass(frozen=True, slots=True)
class Off:
    """State without a tier: every load is a miss and every store is refused."""

    reason: str


TierState = Ready | LoadsOnly | Off

Gone = Callable[[Sequence[RecordKey]], None]
"""Called with the records that were evicted or quarantined, by the thread that removed them, before it does anything
else. That thread may be within a store, so the function must not call the tier."""


class Tier(Protocol):
    """Store of records below the device's memory. Methods do not raise disk errors: results and `state` report
    them."""

    @property
    def state(self) -> TierState: ...

    def __contains__(self, key: RecordKey) -> bool:
        """Returns whether a record is there, without reading it. Does not wait."""
        ...

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """Stores records. Returns one outcome for each, in order."""
        ...

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads a record into the caller's buffers, or into new ones.

        then    the record that is loaded next, if that is known: a tier may ask for it already
        """
        ...

    def touch(self, keys: Iterable[RecordKey]) -> None: ...

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        """Keeps stored records from eviction, within bounds for each tenant."""
        ...

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """Removes records that are wrong, so that they are never loaded again."""
        ...

    def clear(self, namespace: bytes | None = None) -> bool:
        """Removes every record, or those whose identity has this namespace. Returns False if some may remain."""
        ...

    def entries(self) -> Iterator[Entry]: ...

    def close(self) -> None: ...


class UnavailableTier:
    """Tier that could not be opened: every load is a miss, and its state has the reason."""

    def __init__(self, off: Off, *, has_records: bool = False) -> None:
        """With `has_records`, its directory may hold records that only a later start finds."""
        self._off = off
        self._has_records = has_records

    @property
    def state(self) -> TierState:
        return self._off

    def __contains__(self, key: RecordKey) -> bool:
        return False

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        return [NotStored(Refusal.UNAVAILABLE, self._off.reason) for _ in records]

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        return Miss(MissKind.UNAVAILABLE, self._off.reason)

    def touch(self, keys: Iterable[RecordKey]) -> None:
        pass

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        pass

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        pass

    def clear(self, namespace: bytes | None = None) -> bool:
        return not self._has_records

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        pass
