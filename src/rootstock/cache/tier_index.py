"""What the tier below holds, by content: how far a prompt could be resumed if it were loaded.

Every record begins at a block boundary, so the digest of the tokens before it says where it belongs. Looking up what
lies at a boundary costs one hash step and one dictionary lookup, however much is stored. Tokens are compared as
well: a digest alone is never believed.

This is an index in memory of what was stored. It may name what is gone by now, which is a miss when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    token_families,
)
from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.radix_node import common_prefix
from rootstock.cache.record_identity import Identity, Kind, RecordKey
from rootstock.cache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A record that would fill a row: of `family`, an index into the model's, at block index `index`."""

    family: int
    index: int
    identity: Identity


@dataclass(frozen=True, slots=True, eq=False)
class TierHit:
    """How far a prompt could be resumed, and what must be loaded for it."""

    position: int  # where it would resume, deeper than memory alone allows
    base: int  # positions that memory has: the tree's, and their full attention
    found: int  # positions that agree with what is in memory or stored, resumable or not
    blocks: tuple[StoredBlock, ...]
    state: Identity | None
    payload_bytes: int

    @property
    def records(self) -> int:
        return len(self.blocks) + (self.state is not None)


class StoredIndex:
    """Owned by one thread. `lossy` ends the dtype of what is stored where blocks are compressed: then only such is
    found, else only what is exact."""

    def __init__(self, families: Sequence[Family], block_size: int, *, lossy: str = "") -> None:
        self.block_size = block_size
        self.families = tuple(families)
        self.lossy = lossy
        self.foreign_records = 0  # that no request of this model can ask for
        self.version = 0
        self._of = {(f.name, f.layers): i for i, f in enumerate(families)}
        self._full = next((i for i, f in enumerate(families) if isinstance(f, FullAttention)), -1)
        self._state = next((i for i, f in enumerate(families) if isinstance(f, RecurrentState)), -1)
        self._with_blocks = token_families(families)  # states come after them
        self._tails = [i for i, f in enumerate(self._with_blocks) if not isinstance(f, FullAttention)]
        # By the digest of the tokens before it.
        self._at: dict[bytes, list[tuple[int, RecordKey, Identity]]] = {}
        self._places: dict[RecordKey, bytes] = {}
        self._of_namespace: dict[bytes, set[RecordKey]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._places

    def dtype_of(self, namespace: Namespace) -> str:
        """As records name it."""
        return namespace.kv_dtype + self.lossy  # states too: they were computed from rounded blocks

    def add(self, identity: Identity) -> None:
        family = self._of.get((identity.family, identity.layers))
        is_lossy = identity.dtype.endswith(LOSSY_MARK)
        too_long = identity.kind is Kind.BLOCKS and len(identity.tokens) > self.block_size
        misplaced = identity.start % self.block_size  # stored with blocks of another size: never looked up
        if family is None or too_long or misplaced or is_lossy != bool(self.lossy):
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
        """O(its records)."""
        for key in list(self._of_namespace.get(namespace.digest(), ())):
            self.remove(key)

    def some(self, count: int) -> list[Identity]:
        """The records that were added last."""
        keys = list(self._places)[-count:]
        return [identity for k in keys for _, key, identity in self._at[self._places[k]] if key == k]

    def payload_bytes(self, identity: Identity) -> int:
        """In a pool; less if it is stored compressed."""
        family = self.families[self._of[identity.family, identity.layers]]
        if isinstance(family, RecurrentState):
            return family.bytes_per_state
        return len(identity.tokens) * family.bytes_per_token

    def covers(self, family: int, parent: bytes, tokens: Tokens) -> bool:
        """Whether a block is stored that begins with these tokens."""
        return any(
            f == family
            and identity.kind is Kind.BLOCKS
            and common_prefix(identity.tokens, tokens) == len(tokens)
            for f, _, identity in self._at.get(parent, ())
        )

    def keys_along(self, tokens: Tokens, namespace: Namespace, first: int) -> list[RecordKey]:
        """Of everything stored that agrees with `tokens` and ends beyond `first`."""
        found = []
        for position, digest in _boundaries(tokens, namespace, first // self.block_size, self.block_size):
            for _, key, identity in self._at.get(digest, ()):
                agreed = common_prefix(identity.tokens, tokens[position:])
                if position + agreed > first and agreed:
                    found.append(key)
        return found

    def keys_beyond(self, namespace: Namespace, first: int) -> list[RecordKey]:
        """Of everything stored of this namespace that ends beyond `first`. O(records)."""
        of = namespace.digest()
        return [
            key
            for here in self._at.values()
            for _, key, identity in here
            if identity.namespace == of and identity.end > first
        ]

    def reach(
        self, tokens: Tokens, namespace: Namespace, resumable: int, found: int, limit: int
    ) -> TierHit | None:
        """The deepest position up to `limit` at which every family could resume, beyond `resumable`, where memory
        allows it. Memory has the full attention of the first `found` positions. None: there is none."""
        if limit <= resumable or not self._places:
            return None
        search = _Search(
            self, tokens, namespace, min(found, limit), limit, self.dtype_of(namespace), namespace.digest()
        )
        return search.run(resumable)


LOSSY_MARK = "/int8"  # ends the dtype of compressed blocks


def _boundaries(
    tokens: Tokens, namespace: Namespace, first: int, block_size: int
) -> Iterator[tuple[int, bytes]]:
    """(position, digest of all tokens before it) of each block boundary from block `first` on, before the end."""
    raw = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    h = xxhash.xxh3_128(namespace.digest())
    position = first * block_size
    h.update(raw[: position * 4])
    while position < len(tokens):
        yield position, h.digest()
        h.update(raw[position * 4 : (position + block_size) * 4])
        position += block_size


@dataclass(slots=True)
class _Search:
    index: StoredIndex
    tokens: Tokens
    namespace: Namespace
    in_memory: int  # positions
    limit: int
    dtype: str
    of_namespace: bytes
    # For each block index that was looked up: (family, identity, how many of its tokens agree).
    _here: dict[int, list[tuple[int, Identity, int]]] = field(default_factory=dict)

    def run(self, resumable: int) -> TierHit | None:
        index, size = self.index, self.index.block_size
        anywhere = index._state < 0 and not index._tails
        covered = self.in_memory if index._full >= 0 else self.limit
        candidates: list[
            tuple[int, Identity | None]
        ] = []  # where tails or a state may allow it, shallow first
        tokens = self.tokens[: self.limit]
        for position, digest in _boundaries(tokens, self.namespace, resumable // size, size):
            if position > covered:
                break
            here = self._look(position // size, digest)
            if index._full >= 0 and covered < position + size:
                most = max((agreed for family, _, agreed in here if family == index._full), default=0)
                covered = max(covered, min(position + most, self.limit))
            if not anywhere:
                candidates += self._candidates(position, here)
        if anywhere:
            return self._reach(covered, covered, None) if covered > resumable else None
        for position, state in reversed(candidates):
            if state is None:
                position = min(position, covered)
            if resumable < position <= covered:
                reach = self._reach(position, covered, state)
                if reach is not None:
                    return reach
        return None

    def _look(self, block: int, digest: bytes) -> list[tuple[int, Identity, int]]:
        """What is stored there of this very namespace: a record is loaded by the identity that it gives itself, so
        that is what must be right."""
        start = block * self.index.block_size
        rest = self.tokens[start:]
        here = [
            (family, identity, common_prefix(identity.tokens, rest))
            for family, _, identity in self.index._at.get(digest, ())
            if identity.start == start
            and identity.dtype == self.dtype
            and identity.namespace == self.of_namespace
        ]
        self._here[block] = here
        return here

    def _candidates(
        self, position: int, here: Iterable[tuple[int, Identity, int]]
    ) -> Iterator[tuple[int, Identity | None]]:
        index = self.index
        if index._state >= 0:
            states = [
                (identity.end, identity)
                for family, identity, agreed in here
                if family == index._state and agreed == len(identity.tokens)
            ]
            yield from sorted(states, key=lambda state: state[0])
        else:
            ends = {position + agreed for family, _, agreed in here if family in index._tails and agreed}
            for family in index._tails:  # where a chunk begins, nothing is needed of the one before it
                of = index._with_blocks[family]
                if isinstance(of, ChunkedAttention):
                    last = position + index.block_size
                    ends.update(range(last - last % of.chunk, position, -of.chunk))
            yield from ((end, None) for end in sorted(ends))

    def _reach(self, position: int, found: int, state: Identity | None) -> TierHit | None:
        """What must be loaded to resume at `position`; None if some of it is not stored."""
        index, size = self.index, self.index.block_size
        # Of each family, the first position that is to be loaded; tails first, since it is they that may be missing.
        needed = {family: index._with_blocks[family].tail_start(position) for family in index._tails}
        base = position
        if self.in_memory < position:
            base = self.in_memory // size * size
            if index._full >= 0:
                needed[index._full] = base
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
        size = self.index.block_size
        start = block * size
        here = self._here.get(block)
        if here is None:
            here = self._look(block, prefix_digest(self.namespace, self.tokens[:start]))
        needed = min(size, position - start)
        for of_family, identity, agreed in here:
            if of_family == family and agreed >= needed:
                return StoredBlock(family, block, identity)
        return None
