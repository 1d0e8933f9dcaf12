"""The oracle runtime: its answers are a function of everything its block table leads to.

For each position the pool keeps the token, the position, and a hash chained over all tokens before it. The next
token is derived from *all* of these, read back through the block table. A block that is wrong, stale, misplaced
or not yet copied therefore changes the output, and `expected_logits`, which knows only the tokens, tells what the
output must be. The pool starts full of garbage, so reading what was never written shows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import FullAttention
from rootstock.cache.plan import Plan, Tokens
from rootstock.runtime.base import Batch, Logits, ModelDescription, Segment

Hashes = NDArray[np.uint64]

_SEED = np.uint64(0x9E3779B97F4A7C15)
_BYTES_PER_TOKEN = 4 + 4 + 8  # token, position, hash


def _mix(x: Hashes) -> Hashes:
    """splitmix64's finalizer (Steele, Lea and Flood 2014), element by element; wraps on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _chain(parent: int, tokens: Tokens, past: int) -> Hashes:
    """hash[i] = hash[i-1] · odd constant + mix(token[i], position[i]), modulo 2^64."""
    leaves = _mix(
        tokens.astype(np.uint64) << np.uint64(32) | np.arange(past, past + len(tokens), dtype=np.uint64)
    )
    out = np.empty(len(tokens), np.uint64)
    value, factor, mask = parent, 0xD1342543DE82EF95, 2**64 - 1
    for i, leaf in enumerate(leaves.tolist()):
        value = (value * factor + leaf) & mask
        out[i] = value
    return out


def _digests(tokens: Tokens, positions: NDArray[np.int32], hashes: Hashes) -> Hashes:
    """digest[p] depends on every token, stored position and stored hash at 0 … p, and on their order."""
    place = np.arange(len(tokens), dtype=np.uint64)
    items = _mix(hashes + _mix(tokens.astype(np.uint64) * _SEED + positions.astype(np.uint64)) + _mix(place))
    return _mix(np.cumsum(items, dtype=np.uint64))


class FakeRuntime:
    """`fault` is called with every batch before it runs, and may raise: an injected failure of a step."""

    def __init__(
        self,
        vocab_size: int = 97,
        context_limit: int = 1 << 20,
        *,
        weights: str = "fake",
        eos_token_ids: tuple[int, ...] = (),
        fault: Callable[[Batch], None] | None = None,
    ) -> None:
        self.description = ModelDescription(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=vocab_size,
            context_limit=context_limit,
            families=(FullAttention(layers=1, bytes_per_token=_BYTES_PER_TOKEN),),
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

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        blocks = rows[0]
        garbage = np.random.default_rng(blocks)
        shape = (blocks, block_size)
        self._block_size = block_size
        self._tokens = garbage.integers(0, 1 << 30, shape, np.int32)
        self._positions = garbage.integers(0, 1 << 30, shape, np.int32)
        self._hashes = garbage.integers(0, 1 << 62, shape, np.uint64)

    def apply(self, plan: Plan) -> None:
        for copy in plan.copies:
            for pool in (self._tokens, self._positions, self._hashes):
                pool[copy.target, : copy.tokens] = pool[copy.source, : copy.tokens]

    def forward(self, batch: Batch) -> Logits:
        if self.fault is not None:
            self.fault(batch)
        self.forwards += 1
        self.computed_tokens += batch.new_tokens
        for segment in batch.segments:
            self._write(segment)
        rows = [self._read(segment) for segment in batch.segments if segment.score_last]
        return np.concatenate(rows) if rows else np.empty((0, self.description.vocab_size), np.float32)

    def expected_logits(self, tokens: Tokens) -> Logits:
        """[vocab] what follows these tokens, by the tokens alone."""
        hashes = _chain(int(_SEED), tokens, 0)
        digests = _digests(tokens, np.arange(len(tokens), dtype=np.int32), hashes)
        row: NDArray[np.float32] = self._logits(digests[-1:])[0]
        return row

    def _write(self, segment: Segment) -> None:
        size, past = self._block_size, segment.past
        if past:
            parent = int(self._hashes[segment.tables[0][(past - 1) // size], (past - 1) % size])
        else:
            parent = int(_SEED)
        positions = np.arange(past, past + len(segment.tokens))
        rows = segment.tables[0][positions // size], positions % size
        self._tokens[rows] = segment.tokens
        self._positions[rows] = positions
        self._hashes[rows] = _chain(parent, segment.tokens, past)

    def _read(self, segment: Segment) -> Logits:
        size, end = self._block_size, segment.past + len(segment.tokens)
        positions = np.arange(end)
        rows = segment.tables[0][positions // size], positions % size
        digests = _digests(self._tokens[rows], self._positions[rows], self._hashes[rows])
        return self._logits(digests[end - segment.score_last :])

    def _logits(self, digests: Hashes) -> NDArray[np.float32]:
        """[digests, vocab] pseudo-random in [0, 8), so that both greedy and sampled outputs tell digests apart."""
        vocab = np.arange(self.description.vocab_size, dtype=np.uint64)
        bits = _mix(digests[:, None] + vocab[None, :] * _SEED)
        return np.asarray((bits >> np.uint64(40)) / np.uint64(1 << 21), np.float32)
