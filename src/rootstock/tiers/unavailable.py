"""The tier that could not be had: everything is a miss, and its state says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rootstock.cache.record_identity import Identity, RecordKey
from rootstock.tiers.base import (
    Buffer,
    Entry,
    LoadResult,
    Miss,
    MissKind,
    NotStored,
    Off,
    Record,
    Refusal,
    StoreOutcome,
    TierState,
)


class UnavailableTier:
    def __init__(self, off: Off) -> None:
        self._off = off

    @property
    def state(self) -> TierState:
        return self._off

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        return [NotStored(Refusal.UNAVAILABLE, self._off.reason) for _ in records]

    def load(self, identity: Identity, into: Sequence[Buffer] | None = None) -> LoadResult:
        return Miss(MissKind.UNAVAILABLE, self._off.reason)

    def touch(self, keys: Iterable[RecordKey]) -> None:
        pass

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        pass

    def clear(self, namespace: bytes | None = None) -> None:
        pass

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        pass
