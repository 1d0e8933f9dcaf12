"""Keys: cache namespaces, content hashes of prefixes, and the identities of records in the tiers below.

A *record* is one family's memory for a run of positions: blocks of consecutive tokens, the last of which may be
partly filled, or the recurrent state after exactly so many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NewType

import numpy as np
import xxhash

from rootstock.cache.types import Tokens
from rootstock.errors import InvalidOption, shown


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for K/V to be interchangeable. Different namespaces never share a byte."""

    weights: str  # fingerprint of the loaded weights
    kv_dtype: str
    rope_regime: str = ""  # the part of the RoPE frequencies that does not follow from the weights
    adapter: str = ""
    salt: str = ""  # of the tenant: an isolation boundary chosen by the caller
    is_private: bool = False  # kept in memory only; no other request can name it
    is_public: bool = False  # of the heads of prompts that all tenants share; no salt leads into it

    @classmethod
    def of_model(
        cls, weights_fingerprint: str, layout: str, dtype: str, kv_dtype: str, rope_regime: str
    ) -> Namespace:
        """Returns the namespace of a loaded model, without a salt.

        The dtype of the computation is a part: float32 rows computed in bfloat16 differ from those computed in
        float32.
        """
        return cls(
            weights=weights_fingerprint + (f"/{layout}" if layout else ""),
            kv_dtype=f"{dtype}:{kv_dtype}",
            rope_regime=rope_regime,
        )

    def __post_init__(self) -> None:
        for name in ("weights", "kv_dtype", "rope_regime", "adapter", "salt"):
            if not isinstance(getattr(self, name), str):
                raise InvalidOption(name, shown(getattr(self, name)), "text")

    def digest(self) -> bytes:
        """Returns a hash of 16 bytes. Fields are length-prefixed, so that no two namespaces hash the same input."""
        parts = [self.weights, self.kv_dtype, self.rope_regime, self.adapter, self.salt]
        if self.is_private:
            parts.append("private")
        if self.is_public:
            parts.append("public")
        h = xxhash.xxh3_128()
        for part in parts:
            raw = part.encode()
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
        return h.digest()


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespaces of a sequence: of its first `public_tokens` positions, a public head, and of all others."""

    namespace: Namespace
    public_tokens: int = 0

    @property
    def public(self) -> Namespace:
        """The namespace of public heads."""
        return replace(self.namespace, salt="", is_public=True)

    @property
    def first(self) -> Namespace:
        """The namespace of the sequence's first position."""
        return self.public if self.public_tokens else self.namespace

    def has(self, namespace: Namespace) -> bool:
        """Returns whether positions of the sequence are in a namespace."""
        return namespace == self.namespace or (self.public_tokens > 0 and namespace == self.public)

    def of(self, end: int) -> Namespace:
        """Returns the namespace of memory that depends on the positions before `end`, and on no others."""
        return self.public if 0 < end <= self.public_tokens else self.namespace


def prefix_digest(namespace: Namespace, prefix: Tokens) -> bytes:
    """Returns 16 bytes that name exactly these tokens from position 0 on, in exactly this namespace.

    Equal digests mean equal prefixes in equal namespaces, up to 2^-64 by the birthday bound. Tiers use them; the
    tree compares tokens and hashes nothing.
    """
    h = xxhash.xxh3_128(namespace.digest())
    h.update(np.ascontiguousarray(prefix, "<i4").data)
    return h.digest()


RecordKey = NewType("RecordKey", bytes)  # 16 bytes: names a record within a tier


class RecordKind(IntEnum):
    BLOCKS = 1  # the K/V of positions start … end - 1
    STATE = 2  # a recurrent state after exactly `end` tokens


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """The model, tenant, family and prefix that a record belongs to. `tokens` [end - start] int32 are at the
    positions start … end - 1; `parent` is the digest of the tokens before them and `own` of all tokens up to the end
    (`prefix_digest`, 16 bytes each).

    A state depends on its end only. It carries the tokens since some block boundary so that it can be looked up.
    """

    namespace: bytes  # `Namespace.digest`: weights, dtype, RoPE regime, adapter, tenant
    family: str
    layers: int
    dtype: str
    kind: RecordKind
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
        assert self.kind is RecordKind.STATE or len(self.tokens) > 0

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
        start = self.end if self.kind is RecordKind.STATE else self.start
        for number in (self.layers, int(self.kind), start, self.end):
            h.update(number.to_bytes(8, "little"))
        h.update(self.own)
        return RecordKey(h.digest())


def identify(
    namespace: Namespace, family: str, layers: int, dtype: str, kind: RecordKind, prefix: Tokens, start: int
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
