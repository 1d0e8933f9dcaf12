"""Tier that could not be opened: every load is a miss, and its state has the reason."""

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
    """Tier that stores nothing. Its state is `off`."""

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
