"""Identities and keys of records: the names under which a lower tier keeps rows of the pools.

A *record* is one family's memory for a run of positions: blocks of consecutive tokens, the last of which may be
partly filled, or the recurrent state after exactly so many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import numpy as np
import xxhash

from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.types import Tokens

RecordKey = NewType("RecordKey", bytes)  # 16 bytes: names a record within a tier


class Kind(IntEnum):
    BLOCKS = 1  # the K/V of positions start … end - 1
    STATE = 2  # a recurrent state after exactly `end` tokens


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """The model, tenant, family and prefix that a record belongs to. `tokens` [end - start] int32 are those of the
    positions start … end - 1; `parent` is the digest of the tokens before them and `own` of all tokens up to the end
    (`prefix_digest`, 16 bytes each).

    A state depends on its end only. It carries the tokens since some block boundary so that it can be looked up.
    """

    namespace: bytes  # `Namespace.digest`: weights, dtype, RoPE regime, adapter, tenant
    family: str
    layers: int
    dtype: str
    kind: Kind
    start: int
    tokens: Tokens
    parent: bytes
    own: bytes

    def __post_init__(self) -> None:
        assert len(self.namespace) == len(self.parent) == len(self.own) == 16
        assert self.start >= 0
        assert self.layers > 0
        assert self.tokens.ndim == 1
        assert self.tokens.dtype == np.int32
        assert self.kind is Kind.STATE or len(self.tokens) > 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def key(self) -> RecordKey:
        """Hash of the identity. Two records with one key hold the same bytes, in equal namespaces."""
        h = xxhash.xxh3_128(self.namespace)
        for name in (self.family.encode(), self.dtype.encode()):
            h.update(len(name).to_bytes(4, "little"))
            h.update(name)
        start = self.end if self.kind is Kind.STATE else self.start
        for number in (self.layers, int(self.kind), start, self.end):
            h.update(number.to_bytes(8, "little"))
        h.update(self.own)
        return RecordKey(h.digest())


def identify(
    namespace: Namespace, family: str, layers: int, dtype: str, kind: Kind, prefix: Tokens, start: int
) -> Identity:
    """Builds the identity of `family`'s memory of prefix[start:], or of its state after all of `prefix`."""
    return Identity(
        namespace.digest(),
        family,
        layers,
        dtype,
        kind,
        start,
        np.ascontiguousarray(prefix[start:], np.int32),
        prefix_digest(namespace, prefix[:start]),
        prefix_digest(namespace, prefix),
    )
