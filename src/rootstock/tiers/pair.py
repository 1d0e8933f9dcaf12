"""Pair of a server's own tiers and a tier that several servers share. Records are stored in both, and loaded from the
own ones first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.retention.hint_types import Keep
from rootstock.tiers.base import (
    Buffer,
    Entry,
    Loaded,
    LoadResult,
    MissKind,
    NotStored,
    Off,
    Record,
    StoreOutcome,
    Tier,
    TierState,
)
from rootstock.tiers.remote.tier import RemoteTier


class TierPair:
    """Pair that owns both tiers."""

    def __init__(self, own: Tier, shared: RemoteTier) -> None:
        self._own = own
        self._shared = shared

    @property
    def state(self) -> TierState:
        """Returns the state of the tier that works."""
        return self._shared.state if isinstance(self._own.state, Off) else self._own.state

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._own or key in self._shared

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        own, shared = self._own.store(records), self._shared.store(records)
        return [
            there if isinstance(here, NotStored) else here for here, there in zip(own, shared, strict=True)
        ]

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        """Loads from the own tiers, or else from the shared one. A miss reports damage, if there was any."""
        here = self._own.load(identity, into)
        if isinstance(here, Loaded):
            return here
        if then is not None and then.key in self._own:
            then = None
        there = self._shared.load(identity, into, then)
        is_plain = here.kind in (MissKind.ABSENT, MissKind.UNAVAILABLE)
        return there if isinstance(there, Loaded) or is_plain else here

    def touch(self, keys: Iterable[RecordKey]) -> None:
        self._own.touch(keys)

    def retain(self, keeps: Mapping[RecordKey, Keep]) -> None:
        self._own.retain(keeps)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        struck = list(keys)
        self._own.quarantine(struck)
        self._shared.quarantine(struck)

    def clear(self, namespace: bytes | None = None) -> bool:
        return self._own.clear(namespace)

    def entries(self) -> Iterator[Entry]:
        return self._own.entries()

    def close(self) -> None:
        self._own.close()
        self._shared.close()
