"""Places of records: the knowledge of a shared server about the records that begin after a prefix.

A place names a kind of record and its number of tokens, and no token. A server that looks a prompt up makes the
identity of each record from the prompt itself, so that it asks for memory of exactly these tokens. The places after
one prefix are few, however many tenants continue it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock.cache.families import Family, RecurrentState
from rootstock.cache.keys import Identity, RecordKind, Scope
from rootstock.cache.types import Tokens


@dataclass(frozen=True, slots=True)
class Place:
    family: str
    layers: int
    kind: RecordKind
    tokens: int

    def encode(self) -> bytes:
        return f"{self.family} {self.layers} {self.kind:d} {self.tokens}".encode()


def place_of(identity: Identity) -> bytes:
    return Place(identity.family, identity.layers, identity.kind, len(identity.tokens)).encode()


@dataclass(frozen=True, slots=True, eq=False)
class RecordStart:
    """A block boundary of a prompt in one namespace, after whose prefix records may begin."""

    start: int
    parent: bytes  # digest of the tokens before it
    namespace: bytes
    dtype: str
    hashed: xxhash.xxh3_128  # of the namespace and the tokens before it
    tokens: Tokens  # from here on, of this namespace: of the block at most

    @property
    def end(self) -> bytes:
        """The digest of all tokens up to the end of these."""
        return self._digest(self.tokens)

    def _digest(self, tokens: Tokens) -> bytes:
        """Returns the digest of the tokens before it and of these."""
        h = self.hashed.copy()
        h.update(np.ascontiguousarray(tokens, "<i4").data.cast("B"))
        return h.digest()

    def identity(self, place: Place) -> Identity:
        """Returns the identity of the prompt's own record at a place."""
        own = np.array(self.tokens[: place.tokens], np.int32)
        return Identity(
            self.namespace,
            place.family,
            place.layers,
            self.dtype,
            place.kind,
            self.start,
            own,
            self.parent,
            self._digest(own),
        )


def record_starts(tokens: Tokens, scope: Scope, block_size: int) -> Iterator[RecordStart]:
    """Yields the block boundaries of a prompt, in the namespaces in which its records are stored: blocks that lie
    within a public head in the public one."""
    raw = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    dtype = scope.namespace.kv_dtype
    spaces = [(scope.namespace.digest(), len(tokens), False)]
    if scope.public_tokens:
        spaces.append((scope.public.digest(), scope.public_tokens, True))
    hashes = [xxhash.xxh3_128(namespace) for namespace, *_ in spaces]
    for start in range(0, len(tokens), block_size):
        stop = start + block_size
        for (namespace, end, is_public), h in zip(spaces, hashes, strict=True):
            is_ours = stop <= end if is_public else stop > scope.public_tokens
            if is_ours or (is_public and start < end):
                yield RecordStart(
                    start, h.digest(), namespace, dtype, h.copy(), tokens[start : min(stop, end)]
                )
            h.update(raw[start * 4 : stop * 4])


class Places:
    """The places at which a model can have records."""

    def __init__(self, families: Sequence[Family], block_size: int) -> None:
        self._block_size = block_size
        self._known = {
            (family.name, family.layers): RecordKind.STATE
            if isinstance(family, RecurrentState)
            else RecordKind.BLOCKS
            for family in families
        }

    def decode(self, raw: bytes, most_tokens: int) -> Place | None:
        """Decodes a place. None: this model has no such records, or this prompt is too short for them."""
        parts = raw.split(b" ")
        if len(parts) != 4 or not all(part.isdigit() and len(part) < 10 for part in parts[1:]):
            return None
        family, layers, kind, tokens = parts[0].decode(errors="replace"), *map(int, parts[1:])
        if self._known.get((family, layers)) != kind or not 0 < tokens <= min(most_tokens, self._block_size):
            return None
        return Place(family, layers, RecordKind(kind), tokens)
