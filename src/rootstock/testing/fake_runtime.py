"""Oracle runtime: its logits are a function of everything that its block tables and states lead to.

For each position a pool keeps the token, the position, and a hash chained over all tokens before it. The next token
is derived from *all* positions that each family sees, read back through its block table: every position for full
attention, the last window, or the positions since the start of a chunk. A recurrent state is the position and the
chained hash. A block or state that is wrong, stale, misplaced, released too early or not yet copied therefore changes
the output. `expected_logits`, which knows only the tokens, computes the correct output. Pools start full of garbage,
so a read of memory that was never written shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    TokenFamily,
    token_families,
)
from rootstock.cache.plan import BlockCopy, HostBytes, Plan, RowPart, RowsReturned
from rootstock.cache.types import NO_BLOCK, BlockIds, Tokens
from rootstock.errors import PoolsLost
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import Batch, DraftHeads, LoadedAdapter, Logits, ModelDescription, Segment
from rootstock.runtime.host_memory import free_host_bytes

Hashes = NDArray[np.uint64]

_SEED = np.uint64(0x9E3779B97F4A7C15)
_BYTES_PER_TOKEN = 4 + 4 + 8  # token, position, hash
_BYTES_PER_STATE = 8 + 8  # position, hash

FULL = FullAttention(layers=1, bytes_per_token=_BYTES_PER_TOKEN)
STATE = RecurrentState(layers=1, bytes_per_state=_BYTES_PER_STATE)


def window(positions: int) -> SlidingWindow:
    return SlidingWindow(layers=1, bytes_per_token=_BYTES_PER_TOKEN, window=positions)


def chunked(positions: int) -> ChunkedAttention:
    return ChunkedAttention(layers=1, bytes_per_token=_BYTES_PER_TOKEN, chunk=positions)


# Numbers of splitmix64's finalizer, and the factor of `_chain` with its inverse modulo 2^64.
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FACTOR = 0xD1342543DE82EF95
_INVERSE = pow(_FACTOR, -1, 2**64)


def _mix(x: Hashes) -> Hashes:
    """Computes splitmix64's finalizer (Steele, Lea and Flood 2014), element by element. Overflow wraps on purpose."""
    x = x ^ (x >> _30)
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


@lru_cache(maxsize=64)
def _powers(of: int, count: int) -> Hashes:
    """Returns [count] powers of a number modulo 2^64, from the first on."""
    powers = np.cumprod(np.full(count, of, np.uint64), dtype=np.uint64)
    powers.flags.writeable = False
    return powers


def _chain(parent: int, tokens: Tokens, past: int) -> Hashes:
    """Computes hash[i] = hash[i-1] · odd constant + mix(token[i], position[i]), modulo 2^64.

    hash[i] = constant^(i+1) · (parent + sum of mix[j] · constant^-(j+1) for j ≤ i): without a loop.
    """
    n = len(tokens)
    leaves = _mix(tokens.astype(np.uint64) << _32 | np.arange(past, past + n, dtype=np.uint64))
    rows = 1 << n.bit_length()  # few tables of powers
    out = np.cumsum(leaves * _powers(_INVERSE, rows)[:n], dtype=np.uint64)
    out += np.uint64(parent)
    out *= _powers(_FACTOR, rows)[:n]
    return out


def _sums(tokens: Tokens, positions: NDArray[np.int32], hashes: Hashes, first: int) -> Hashes:
    """Computes running sums [1 + n] of hashes of token, stored position, stored hash and true position."""
    place = np.arange(first, first + len(tokens), dtype=np.uint64)
    items = _mix(hashes + _mix(tokens.astype(np.uint64) * _SEED + positions.astype(np.uint64)) + _mix(place))
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum(items, dtype=np.uint64)))


class _Pool:
    """Pool of one token family: tokens, positions and hashes, [blocks, block_size] each."""

    def __init__(self, family: TokenFamily, blocks: int, block_size: int) -> None:
        garbage = np.random.default_rng(blocks)
        shape = (blocks, block_size)
        self.family = family
        self.block_size = block_size
        self.tokens = garbage.integers(0, 1 << 30, shape, np.int32)
        self.positions = garbage.integers(0, 1 << 30, shape, np.int32)
        self.hashes = garbage.integers(0, 1 << 62, shape, np.uint64)

    def copy(self, copy: BlockCopy) -> None:
        for rows in (self.tokens, self.positions, self.hashes):
            rows[copy.target, : copy.tokens] = rows[copy.source, : copy.tokens]

    def bytes_of(self, block: int, tokens: int) -> list[HostBytes]:
        """Returns views of the bytes of the block's first positions."""
        rows = (self.tokens, self.positions, self.hashes)
        return [of_kind[block, :tokens].view(np.uint8) for of_kind in rows]

    def write(self, blocks: BlockIds, tokens: Tokens, past: int, hashes: Hashes) -> None:
        positions = np.arange(past, past + len(tokens))
        rows = self._at(blocks, positions)
        self.tokens[rows] = tokens
        self.positions[rows] = positions
        self.hashes[rows] = hashes

    def digests(self, blocks: BlockIds, end: int, rows: int) -> Hashes:
        """Computes digests [rows] of the last positions before `end`. Each depends on all positions that it sees."""
        queries = np.arange(end - rows, end)
        first = self.family.first_visible(end - rows)
        at = self._at(blocks, np.arange(first, end))
        return _seen(self.family, self.tokens[at], self.positions[at], self.hashes[at], first, queries)

    def _at(self, blocks: BlockIds, positions: NDArray[np.int64]) -> tuple[BlockIds, NDArray[np.int64]]:
        ids = blocks[positions // self.block_size]
        assert (ids != NO_BLOCK).all(), f"{self.family.name} reads a block that was released"
        return ids, positions % self.block_size


def _seen(
    family: TokenFamily,
    tokens: Tokens,
    positions: NDArray[np.int32],
    hashes: Hashes,
    first: int,
    queries: NDArray[np.int64],
) -> Hashes:
    """Computes digests [queries]. The other arrays begin at position `first`."""
    sums = _sums(tokens, positions, hashes, first)
    # A query at position q sees the positions that a resumption at q needs, and its own.
    starts = np.array([family.first_visible(q) for q in queries.tolist()])
    return _mix(sums[queries + 1 - first] - sums[starts - first])


class FakeRuntime:
    """Oracle runtime. Calls `fault` with every batch before it runs; an exception from it fails the step, and
    PoolsLost overwrites all rows. One that computes ahead spoils the rows of following tokens: all of them may be
    wrong."""

    images = None
    draft_heads: DraftHeads | None = None

    def __init__(
        self,
        vocab_size: int = 97,
        context_limit: int = 1 << 20,
        *,
        families: Sequence[Family] = (FULL,),
        weights: str = "fake",
        eos_token_ids: tuple[int, ...] = (),
        fault: Callable[[Batch], None] | None = None,
        computes_ahead: bool = False,
    ) -> None:
        self.computes_ahead = computes_ahead
        self.description = ModelDescription(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=vocab_size,
            context_limit=context_limit,
            families=tuple(families),
            weights_fingerprint=weights,
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            parameters=0,
            eos_token_ids=eos_token_ids,
        )
        self.fault = fault
        self.forwards = 0
        self.computed_tokens = 0
        self.returned_rows = 0
        self.releases = 0
        self.adapters: set[str] = set()
        self._has_states = any(isinstance(family, RecurrentState) for family in families)

    @property
    def pool_copies(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        return free_host_bytes()

    def release_unused(self) -> None:
        self.releases += 1

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        families = self.description.families
        blocks = [
            n for n, family in zip(rows, families, strict=True) if not isinstance(family, RecurrentState)
        ]
        slots = sum(n for n, family in zip(rows, families, strict=True) if isinstance(family, RecurrentState))
        self._pools = [
            _Pool(family, n, block_size) for family, n in zip(token_families(families), blocks, strict=True)
        ]
        garbage = np.random.default_rng(slots)
        self._states = garbage.integers(0, 1 << 62, (slots, 2), np.uint64)  # position and hash

    def apply(self, plan: Plan) -> None:
        for returned in plan.returned:
            self.returned_rows += len(returned.rows)
            self._spoil(returned)
        for copy in plan.copies:
            self._pools[copy.family].copy(copy)
        for state in plan.states:
            self._states[state.target] = self._states[state.source]

    def read(self, part: RowPart) -> list[HostBytes]:
        return [buffer.copy() for buffer in self.buffers(part)]

    def buffers(self, part: RowPart) -> list[HostBytes]:
        family = self.description.families[part.family]
        if isinstance(family, RecurrentState):
            return [self._states[part.row].view(np.uint8)]
        return self._pool_of(family).bytes_of(part.row, part.tokens)

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        pass  # the buffers are the row's own memory

    def buffer_dtypes(self, family: int) -> list[str]:
        return []  # hashes

    def _pool_of(self, family: TokenFamily) -> _Pool:
        return self._pools[token_families(self.description.families).index(family)]

    def _spoil(self, returned: RowsReturned) -> None:
        """Overwrites returned rows with garbage, so that a later read of them shows."""
        family = self.description.families[returned.family]
        if isinstance(family, RecurrentState):
            self._states[returned.rows] = 12345
        else:
            pool = self._pool_of(family)
            pool.hashes[returned.rows] = 12345
            pool.tokens[returned.rows] = 12345

    def _spoil_all(self) -> None:
        self._states[:] = 12345
        for pool in self._pools:
            pool.hashes[:] = 12345
            pool.tokens[:] = 12345

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        self.adapters.add(source.fingerprint)
        return LoadedAdapter(source.fingerprint, len(source.tensors), source.scalings.rank, source.nbytes)

    def unload_adapter(self, fingerprint: str) -> None:
        self.adapters.remove(fingerprint)

    def forward(self, batch: Batch) -> Logits:
        if self.fault is not None:
            try:
                self.fault(batch)
            except PoolsLost:
                self._spoil_all()
                raise
        self.forwards += 1
        self.computed_tokens += batch.new_tokens
        states = [self._write(segment) for segment in batch.segments]
        rows = [
            self._read(segment, hashes)
            for segment, hashes in zip(batch.segments, states, strict=True)
            if segment.logits_to_keep
        ]
        for segment in batch.following.values():
            for pool, blocks in zip(self._pools, segment.tables, strict=True):
                pool.write(blocks, np.array([12345], np.int32), segment.past, np.array([12345], np.uint64))
        return np.concatenate(rows) if rows else np.empty((0, self.description.vocab_size), np.float32)

    def expected_logits(self, tokens: Tokens, adapter: str = "") -> Logits:
        """Computes the logits [vocab] that follow these tokens, from the tokens and the adapter alone."""
        row: NDArray[np.float32] = self.expected_rows(tokens, len(tokens), adapter)[0]
        return row

    def expected_rows(self, tokens: Tokens, first: int, adapter: str = "") -> Logits:
        """Computes [1 + tokens - first, vocab]: the logits that follow the first `first` of these tokens, and each
        longer prefix up to all of them."""
        hashes = _chain(_seed_of(adapter), tokens, 0)
        positions = np.arange(len(tokens), dtype=np.int32)
        last = positions[first - 1 :].astype(np.int64)
        seen = [
            _seen(family, tokens, positions, hashes, 0, last)
            for family in token_families(self.description.families)
        ]
        if self._has_states:
            seen.append(self._of_state(len(tokens), hashes[first - 1 :]))
        return self._logits(_together(seen))

    def _write(self, segment: Segment) -> Hashes:
        """Writes a segment's rows in each family. Returns the states after each of its tokens."""
        past = segment.past
        assert not segment.adapter or segment.adapter in self.adapters, "an adapter that is not loaded"
        for pool, blocks in zip(self._pools, segment.tables, strict=True):
            # The chain continues from the family's own last position, if the family still keeps it.
            size = pool.block_size
            parent = _seed_of(segment.adapter)
            if past and pool.family.first_visible(past) < past:
                parent = int(pool.hashes[blocks[(past - 1) // size], (past - 1) % size])
            elif past:
                parent = self._hash_before(segment)
            pool.write(blocks, segment.tokens, past, _chain(parent, segment.tokens, past))
        if not self._has_states:
            return np.empty(0, np.uint64)
        parent = _seed_of(segment.adapter)
        if past:
            stored_past, stored = (int(x) for x in self._states[segment.state])
            parent = stored if stored_past == past else stored ^ 0x5BD1E995  # misplaced: output changes
        states = _chain(parent, segment.tokens, past)
        self._states[segment.state] = past + len(segment.tokens), states[-1]
        return states

    def _hash_before(self, segment: Segment) -> int:
        """Returns the chain's hash before the segment from a family that keeps it, for families that do not."""
        for pool, blocks in zip(self._pools, segment.tables, strict=True):
            if pool.family.first_visible(segment.past) < segment.past:
                at = segment.past - 1
                return int(pool.hashes[blocks[at // pool.block_size], at % pool.block_size])
        if self._has_states:
            return int(self._states[segment.state][1])
        raise AssertionError("no family of this fake keeps the position before: give it one that does")

    def _read(self, segment: Segment, states: Hashes) -> Logits:
        end, rows = segment.past + len(segment.tokens), segment.logits_to_keep
        seen = [
            pool.digests(blocks, end, rows) for pool, blocks in zip(self._pools, segment.tables, strict=True)
        ]
        if self._has_states:
            seen.append(self._of_state(end, states[-rows:]))
        return self._logits(_together(seen))

    @staticmethod
    def _of_state(end: int, hashes: Hashes) -> Hashes:
        """Computes digests [hashes] of the states at the last positions before `end`."""
        positions: Hashes = np.arange(end - len(hashes), end, dtype=np.uint64)
        return _mix(hashes + positions)

    def _logits(self, digests: Hashes) -> NDArray[np.float32]:
        """Returns pseudo-random logits [digests, vocab] in [0, 8), which differ for different digests."""
        vocab = np.arange(self.description.vocab_size, dtype=np.uint64)
        bits = _mix(digests[:, None] + vocab[None, :] * _SEED)
        return np.asarray((bits >> np.uint64(40)) / np.uint64(1 << 21), np.float32)


def _seed_of(adapter: str) -> int:
    """Returns the hash before the first token: adapters make other rows of the same tokens."""
    return int(_SEED) ^ xxhash.xxh3_64_intdigest(adapter.encode()) if adapter else int(_SEED)


def _together(seen: Sequence[Hashes]) -> Hashes:
    """Combines the families' digests into one that depends on their order."""
    digest = seen[0]
    for of_family in seen[1:]:
        digest = _mix(digest * _SEED + of_family)
    return digest
