"""Index of the records in the tier below, by content: finds how far a prompt could be resumed after loading them.

Every record begins at a block boundary, so the digest of the tokens before it gives its place. Looking up the records
at a boundary costs one hash step and one dictionary lookup, however many are stored. Tokens are compared as well: a
digest alone is never trusted.

The index is in memory. It may name records that the tier has lost since; loading them is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    token_families,
)
from rootstock.cache.keys import Identity, Namespace, RecordKey, RecordKind, Scope
from rootstock.cache.longest_match import common_prefix
from rootstock.cache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A record that fills one row: block index `index` of `family`, an index into the model's families."""

    family: int
    index: int
    identity: Identity


@dataclass(frozen=True, slots=True, eq=False)
class TierHit:
    """A deeper position at which a prompt can resume, and the records to load for it."""

    position: int  # the resume point after loading, deeper than without
    base: int  # positions that are in memory already, of full attention
    found: int  # positions that agree with cached or stored tokens, resumable or not
    blocks: tuple[StoredBlock, ...]
    state: Identity | None
    payload_bytes: int

    @property
    def identities(self) -> list[Identity]:
        found = [block.identity for block in self.blocks]
        return found if self.state is None else [*found, self.state]

    @property
    def records(self) -> int:
        return len(self.blocks) + (self.state is not None)


class StoredIndex:
    """Index of the records of one model. Owned by one thread."""

    def __init__(self, families: Sequence[Family], block_size: int) -> None:
        self.block_size = block_size
        self.families = tuple(families)
        self.foreign_records = 0  # that no request of this model can match
        self.version = 0
        self._of = {(f.name, f.layers): i for i, f in enumerate(families)}
        # Indices of families: of full attention and of states, -1 if there is none, and of the window families.
        self.full = next((i for i, f in enumerate(families) if isinstance(f, FullAttention)), -1)
        self.state = next((i for i, f in enumerate(families) if isinstance(f, RecurrentState)), -1)
        self.token_families = token_families(families)  # states come after them
        self.windows = [i for i, f in enumerate(self.token_families) if not isinstance(f, FullAttention)]
        # (family, key, identity) by the digest of the tokens before the record.
        self._at: dict[bytes, list[tuple[int, RecordKey, Identity]]] = {}
        self._places: dict[RecordKey, bytes] = {}
        self._of_namespace: dict[bytes, set[RecordKey]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._places

    def at(self, digest: bytes) -> Sequence[tuple[int, RecordKey, Identity]]:
        """Returns (family, key, identity) of each record that begins after the tokens with this digest."""
        return self._at.get(digest, ())

    def add(self, identity: Identity) -> None:
        family = self._of.get((identity.family, identity.layers))
        too_long = identity.kind is RecordKind.BLOCKS and len(identity.tokens) > self.block_size
        misplaced = identity.start % self.block_size  # stored with blocks of another size: never looked up
        if family is None or too_long or misplaced or identity.dtype.endswith(_WITHDRAWN_DTYPE):
            self.foreign_records += 1
            return
        key = identity.key
        if key not in self._places:
            self._places[key] = identity.parent
            self._at.setdefault(identity.parent, []).append((family, key, identity))
            self._of_namespace.setdefault(identity.namespace, set()).add(key)
            self.version += 1

    def remove(self, key: RecordKey) -> None:
        parent = self._places.pop(key, None)
        if parent is not None:
            here = self._at[parent]
            (namespace,) = (identity.namespace for _, other, identity in here if other == key)
            self._of_namespace[namespace].remove(key)
            if not self._of_namespace[namespace]:
                del self._of_namespace[namespace]
            left = [entry for entry in here if entry[1] != key]
            if left:
                self._at[parent] = left
            else:
                del self._at[parent]
            self.version += 1

    def clear(self) -> None:
        self._at.clear()
        self._places.clear()
        self._of_namespace.clear()
        self.version += 1

    def clear_namespace(self, namespace: Namespace) -> None:
        """Removes the namespace's records. O(its records)."""
        for key in list(self._of_namespace.get(namespace.digest(), ())):
            self.remove(key)

    def some(self, count: int) -> list[Identity]:
        """Returns the records that were added last, at most `count`."""
        keys = list(self._places)[-count:]
        return [identity for k in keys for _, key, identity in self._at[self._places[k]] if key == k]

    def payload_bytes(self, identity: Identity) -> int:
        """Returns the size of the record's memory, in a pool and in a tier."""
        family = self.families[self._of[identity.family, identity.layers]]
        if isinstance(family, RecurrentState):
            return family.bytes_per_state
        return len(identity.tokens) * family.bytes_per_token

    def covers(self, family: int, parent: bytes, tokens: Tokens) -> bool:
        """Returns True if a block is stored that begins with these tokens."""
        return any(
            f == family
            and identity.kind is RecordKind.BLOCKS
            and common_prefix(identity.tokens, tokens) == len(tokens)
            for f, _, identity in self._at.get(parent, ())
        )

    def keys_along(self, tokens: Tokens, scope: Scope, first: int) -> list[RecordKey]:
        """Returns the keys of records that agree with `tokens` and end beyond `first`."""
        found = []
        for position, places in _boundaries(tokens, scope, first // self.block_size, self.block_size):
            for place in places:
                for _, key, identity in self._at.get(place.digest, ()):
                    agreed = common_prefix(identity.tokens, tokens[position:])
                    if position + agreed > first and agreed:
                        found.append(key)
        return found

    def keys_beyond(self, namespace: Namespace | None, first: int) -> list[RecordKey]:
        """Returns the keys of a namespace's records, or of all, that end beyond `first`. O(records)."""
        of = None if namespace is None else namespace.digest()
        return [
            key
            for here in self._at.values()
            for _, key, identity in here
            if of in (None, identity.namespace) and identity.end > first
        ]

    def tier_hit(
        self, tokens: Tokens, scope: Scope, resumable: int, found: int, limit: int
    ) -> TierHit | None:
        """Finds the deepest position in (`resumable`, `limit`] at which every family can resume after loading; None
        if there is none. `resumable` is the resume point without loading. Full attention of the first `found`
        positions is in memory."""
        if limit <= resumable or not self._places:
            return None
        search = _Search(self, tokens, scope, min(found, limit), limit, scope.namespace.kv_dtype)
        return search.run(resumable)


# Dtype suffix of records that a version with `--tier-compress int8` stored. Nothing can decode them any more.
_WITHDRAWN_DTYPE = "/int8"


class _RecordPrefix(NamedTuple):
    """A place of records: the digest of the tokens before them, and their namespace."""

    digest: bytes
    namespace: bytes
    end: int  # positions from here on are not of this namespace


def _namespaces(scope: Scope, tokens: Tokens) -> list[tuple[bytes, int]]:
    """Returns the digests of the namespaces of `tokens`, and the positions at which they end."""
    found = [(scope.namespace.digest(), len(tokens))]
    if scope.public_tokens:
        found.append((scope.public.digest(), scope.public_tokens))
    return found


def _boundaries(
    tokens: Tokens, scope: Scope, first: int, block_size: int
) -> Iterator[tuple[int, list[_RecordPrefix]]]:
    """Yields (position, its places) of each block boundary from block `first` on, before the end."""
    raw = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    position = first * block_size
    hashes = [(namespace, end, xxhash.xxh3_128(namespace)) for namespace, end in _namespaces(scope, tokens)]
    for *_, h in hashes:
        h.update(raw[: position * 4])
    while position < len(tokens):
        yield (
            position,
            [_RecordPrefix(h.digest(), namespace, end) for namespace, end, h in hashes if position < end],
        )
        for *_, h in hashes:
            h.update(raw[position * 4 : (position + block_size) * 4])
        position += block_size


@dataclass(slots=True)
class _Search:
    """One search for a tier hit."""

    index: StoredIndex
    tokens: Tokens
    scope: Scope
    in_memory: int  # positions
    limit: int
    dtype: str
    # For each block index that was looked up: (family, identity, how many of its tokens agree).
    _here: dict[int, list[tuple[int, Identity, int]]] = field(default_factory=dict)

    def run(self, resumable: int) -> TierHit | None:
        """Walks the boundaries from `resumable` on, collects candidates, and takes the deepest that is complete."""
        index, size = self.index, self.index.block_size
        anywhere = index.state < 0 and not index.windows
        covered = self.in_memory if index.full >= 0 else self.limit
        # Positions that windows or a state may allow, shallow first.
        candidates: list[tuple[int, Identity | None]] = []
        tokens = self.tokens[: self.limit]
        for position, places in _boundaries(tokens, self.scope, resumable // size, size):
            if position > covered:
                break
            here = self._look(position // size, places)
            if index.full >= 0 and covered < position + size:
                most = max((agreed for family, _, agreed in here if family == index.full), default=0)
                covered = max(covered, min(position + most, self.limit))
            if not anywhere:
                candidates += self._candidates(position, here)
        if anywhere:
            return self._hit_at(covered, covered, None) if covered > resumable else None
        for position, state in reversed(candidates):
            if state is None:
                position = min(position, covered)
            if resumable < position <= covered:
                hit = self._hit_at(position, covered, state)
                if hit is not None:
                    return hit
        return None

    def _look(self, block: int, places: Sequence[_RecordPrefix]) -> list[tuple[int, Identity, int]]:
        """Looks up the records of the scope at a block. A record is loaded by its own identity, so the identity is
        compared in full."""
        start = block * self.index.block_size
        here = [
            (family, identity, common_prefix(identity.tokens, self.tokens[start : place.end]))
            for place in places
            for family, _, identity in self.index.at(place.digest)
            if identity.start == start
            and identity.dtype == self.dtype
            and identity.namespace == place.namespace
        ]
        self._here[block] = here
        return here

    def _candidates(
        self, position: int, here: Iterable[tuple[int, Identity, int]]
    ) -> Iterator[tuple[int, Identity | None]]:
        """Yields the positions in a block at which the records there may allow a resumption, shallow first."""
        index = self.index
        if index.state >= 0:
            states = [
                (identity.end, identity)
                for family, identity, agreed in here
                if family == index.state and agreed == len(identity.tokens)
            ]
            yield from sorted(states, key=lambda state: state[0])
        else:
            ends = {position + agreed for family, _, agreed in here if family in index.windows and agreed}
            for window in index.windows:  # at the start of a chunk, nothing is needed of the one before it
                family = index.token_families[window]
                if isinstance(family, ChunkedAttention):
                    last = position + index.block_size
                    ends.update(range(last - last % family.chunk, position, -family.chunk))
            yield from ((end, None) for end in sorted(ends))

    def _hit_at(self, position: int, found: int, state: Identity | None) -> TierHit | None:
        """Returns the records to load to resume at `position`; None if some of them are not stored."""
        index, size = self.index, self.index.block_size
        # The first position to load of each family. Windows come first, since they are most likely to be missing.
        needed = {family: index.token_families[family].first_visible(position) for family in index.windows}
        base = position
        if self.in_memory < position:
            base = self.in_memory // size * size
            if index.full >= 0:
                needed[index.full] = base
        blocks: list[StoredBlock] = []
        for family, start in needed.items():
            if start < position:
                for block in range(start // size, -(-position // size)):
                    stored = self._block(family, block, position)
                    if stored is None:
                        return None
                    blocks.append(stored)
        identities = [block.identity for block in blocks] + ([] if state is None else [state])
        payload_bytes = sum(index.payload_bytes(identity) for identity in identities)
        return TierHit(position, base, max(found, self.in_memory), tuple(blocks), state, payload_bytes)

    def _block(self, family: int, block: int, position: int) -> StoredBlock | None:
        """Returns the record of a family's block that agrees up to `position`; None if it is not stored."""
        size = self.index.block_size
        start = block * size
        here = self._here.get(block)
        if here is None:
            _, places = next(_boundaries(self.tokens, self.scope, block, size))
            here = self._look(block, places)
        needed = min(size, position - start)
        for of_family, identity, agreed in here:
            if of_family == family and agreed >= needed:
                return StoredBlock(family, block, identity)
        return None
