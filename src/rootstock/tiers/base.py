"""What a tier stores, and what it answers. Nothing here knows where the bytes lie.

A record's `Identity` says whose memory of what it is, down to the tokens, and is checked on every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.record_identity import Identity, RecordKey

Buffer = memoryview | NDArray[np.uint8]  # contiguous


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """`payload` is written as it lies, one buffer after the other; it must not change until the store has ended."""

    identity: Identity
    payload: Sequence[Buffer]

    def views(self) -> list[memoryview]:
        return views_of(self.payload)

    @property
    def payload_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.payload)


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer itself, byte by byte."""
    view = buffer if isinstance(buffer, memoryview) else buffer.data
    assert view.c_contiguous, "a payload is written as it lies"
    if view.format == "B" and view.ndim == 1:  # as nearly all are: there are many to a record
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def views_of(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Returns the buffers byte by byte, without empty ones."""
    return [view for buffer in buffers if (view := as_bytes(buffer)).nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What a tier knows of a record without reading its payload."""

    identity: Identity
    payload_bytes: int
    stored_bytes: int  # with its header
    last_use_s: float  # since the epoch
    uses: int  # how often it was touched


# -- storing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Durable: it is there after a crash."""

    stored_bytes: int


@dataclass(frozen=True, slots=True)
class AlreadyStored:
    """Was there before; counts as used now."""


class Refusal(StrEnum):
    UNAVAILABLE = "unavailable"  # the tier takes no stores; its state says why
    NO_ROOM = "no_room"  # nothing more can be freed under the cap
    TOO_LARGE = "too_large"  # would never fit
    QUEUE_FULL = "queue_full"  # the writer is behind
    FAILED = "failed"  # the disk said no


@dataclass(frozen=True, slots=True)
class NotStored:
    """Nothing of the record is visible, and nothing is counted for it."""

    why: Refusal
    detail: str = ""


StoreOutcome = Stored | AlreadyStored | NotStored

# -- loading -----------------------------------------------------------------------------------------------------


class MissKind(StrEnum):
    ABSENT = "absent"  # no such record: an ordinary miss
    MISSING_BYTES = "missing_bytes"  # the record ends too early, or its file is gone
    CHECKSUM = "checksum"
    # A whole record, of something else:
    OTHER_NAMESPACE = "other_namespace"  # weights, RoPE regime, adapter or tenant
    OTHER_LAYERS = "other_layers"  # another family, number of layers or kind
    OTHER_DTYPE = "other_dtype"
    OTHER_POSITION = "other_position"
    OTHER_TOKENS = "other_tokens"
    OTHER_SIZE = "other_size"  # the caller expects another number of bytes
    IO_ERROR = "io_error"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Verified. `payload` are the caller's buffers if it gave some, and otherwise new ones, split as stored."""

    payload: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """What the caller's buffers hold is void."""

    kind: MissKind
    detail: str = ""


LoadResult = Loaded | Miss

# -- the state of a tier -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class LoadsOnly:
    """A store failed. Loads go on; stores are refused until `retry_at_s`, when one is tried again."""

    reason: str
    retry_at_s: float


@dataclass(frozen=True, slots=True)
class Off:
    """No tier: every load is a miss and every store is refused."""

    reason: str


TierState = Ready | LoadsOnly | Off

Gone = Callable[[Sequence[RecordKey]], None]
"""Told which records have been evicted or quarantined, by whichever thread did it, before it does anything else. That
thread may be within a store: must not call the tier."""


class Tier(Protocol):
    """No method raises for what a disk does: results and `state` say it."""

    @property
    def state(self) -> TierState: ...

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        """One outcome for each record, in order."""
        ...

    def load(self, identity: Identity, into: Sequence[Buffer] | None = None) -> LoadResult: ...

    def touch(self, keys: Iterable[RecordKey]) -> None: ...

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        """These are wrong: they are not given out again."""
        ...

    def clear(self, namespace: bytes | None = None) -> None:
        """Removes every record, or those whose identity has this namespace."""
        ...

    def entries(self) -> Iterator[Entry]: ...

    def close(self) -> None: ...
