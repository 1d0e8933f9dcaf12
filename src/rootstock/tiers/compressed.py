"""A tier that keeps blocks rounded to 8 bits a number. Half to a quarter of the bytes, and no longer the same bytes.

Records carry it in their dtype, so that what was rounded is never taken for what was not. States stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rootstock.cache.record_identity import Identity, Kind, RecordKey
from rootstock.cache.tier_index import LOSSY_MARK
from rootstock.tiers.base import (
    Buffer,
    Entry,
    Loaded,
    LoadResult,
    Miss,
    MissKind,
    NotStored,
    Record,
    Refusal,
    StoreOutcome,
    Tier,
    TierState,
    as_bytes,
)
from rootstock.tiers.int8 import Format, NotFinite, compressed_bytes, decode, encode


class CompressedTier:
    """In front of `tier`, which it owns. `formats` tells, for each family by name, what its buffers hold. Encoding
    and decoding happen in the threads that store and load."""

    def __init__(self, tier: Tier, formats: Mapping[str, Sequence[Format]]) -> None:
        self.inner = tier
        self._formats = formats

    @property
    def state(self) -> TierState:
        return self.inner.state

    def store(self, records: Sequence[Record]) -> list[StoreOutcome]:
        outcomes: list[StoreOutcome | None] = [None] * len(records)
        encoded: list[Record] = []
        places: list[int] = []
        for i, record in enumerate(records):
            try:
                encoded.append(self._encoded(record))
                places.append(i)
            except NotFinite as error:
                outcomes[i] = NotStored(Refusal.FAILED, str(error))
        for i, outcome in zip(places, self.inner.store(encoded), strict=True):
            outcomes[i] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _encoded(self, record: Record) -> Record:
        formats = self._formats_of(record.identity)
        if formats is None:
            return record
        buffers = [np.frombuffer(as_bytes(buffer), np.uint8) for buffer in record.payload]
        return Record(record.identity, encode(buffers, formats))

    def load(self, identity: Identity, into: Sequence[Buffer] | None = None) -> LoadResult:
        """Blocks need `into`: how many bytes they were is not kept."""
        formats = self._formats_of(identity)
        if formats is None:
            return self.inner.load(identity, into)
        if into is None:
            return Miss(MissKind.OTHER_SIZE, "where a compressed record is to go must be known")
        target = [np.frombuffer(as_bytes(buffer), np.uint8) for buffer in into]
        scratch = [np.empty(size, np.uint8) for size in compressed_bytes(target, formats)]
        result = self.inner.load(identity, scratch)
        if isinstance(result, Miss):
            return result
        decode(scratch, formats, target)
        return Loaded(tuple(as_bytes(buffer) for buffer in into))

    def _formats_of(self, identity: Identity) -> Sequence[Format] | None:
        if identity.kind is not Kind.BLOCKS or not identity.dtype.endswith(LOSSY_MARK):
            return None
        return self._formats[identity.family]

    def touch(self, keys: Iterable[RecordKey]) -> None:
        self.inner.touch(keys)

    def quarantine(self, keys: Iterable[RecordKey]) -> None:
        self.inner.quarantine(keys)

    def clear(self, namespace: bytes | None = None) -> None:
        self.inner.clear(namespace)

    def entries(self) -> Iterator[Entry]:
        return self.inner.entries()

    def close(self) -> None:
        self.inner.close()
