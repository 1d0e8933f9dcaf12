"""Reports of the disk tier: counts since it was opened, and results of checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rootstock.cache.keys import Identity, RecordKey
from rootstock.tiers.base import Miss, MissKind, Refusal


@dataclass(slots=True)
class DiskCounts:
    """Counters of the disk tier since it was opened."""

    stored_records: int = 0
    stored_bytes: int = 0  # of records, with their headers
    refused: Counter[Refusal] = field(default_factory=Counter)
    loaded_records: int = 0
    loaded_bytes: int = 0
    misses: Counter[MissKind] = field(default_factory=Counter)
    quarantined_records: int = 0
    indexes_lost: int = 0  # the index was unreadable at start, and the tier started empty


@dataclass(frozen=True, slots=True)
class Failure:
    key: RecordKey
    miss: Miss
    identity: Identity | None = field(compare=False)  # None: the row is damaged


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of checking every record. Nothing is changed."""

    records: int
    stored_bytes: int
    failures: tuple[Failure, ...]
