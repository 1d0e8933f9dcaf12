"""Rows of a step, cut into the launches of the Metal kernels. NumPy only, but for the arrays on the device.

A *line* is one query head of one row. A threadgroup attends the lines of a tile, which are the rows of one sequence
next to each other times the query heads of one KV head, over one split of the positions that they see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from rootstock.kernels.metal.source import LANES, ROW, SIMDGROUPS, TILE

MOST_LINES = 8  # of a simdgroup
MOST_NUMBERS = (
    64  # float32 registers of a lane for queries and results; as many again are left for everything else
)
MOST_SPLITS = 64
LEAST_INPUT = 8  # MLX passes smaller arrays otherwise: see `source`

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Heads of an attention layer and their dimensions."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def lines(self) -> int:
        """Most lines of a simdgroup, a power of two: their queries and results stay in registers."""
        numbers = -(-self.key_dim // LANES) + -(-self.value_dim // LANES)
        return (
            min(MOST_LINES, 1 << (MOST_NUMBERS // numbers).bit_length() - 1) if numbers <= MOST_NUMBERS else 0
        )

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return max(1, self.lines * SIMDGROUPS // self.group)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bounds of the splits: enough threadgroups to keep a device busy, but none with too little to do.

    No figure of either comes from a measurement on Metal yet.
    """

    threadgroups: int = 256
    least_split: int = 256  # positions

    def splits(self, threadgroups: int, longest: int) -> int:
        """Computes into how many splits each of `threadgroups` is cut, for contexts of at most `longest`."""
        return max(1, min(self.threadgroups // threadgroups, longest // self.least_split, MOST_SPLITS))


DEFAULT_OCCUPANCY = Occupancy()


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch for layers with the same heads."""

    # int32 [tiles, 8]: where the sequence's table begins, the tile's first row and number of rows, the first
    # position, the end and the length of a split, the simdgroups with lines of their own, and nothing
    tiles: mx.array
    rows: (
        mx.array
    )  # int32 [rows or more, 4]: first position, end, splits that have any of its tile's positions, 0
    number_of_tiles: int
    pieces: int  # threadgroups that share the query heads of a KV head
    splits: int
    lines: int  # of a simdgroup, at least
    has_shared_tiles: bool  # whether a tile has several rows


@dataclass(slots=True)
class StepRows:
    """Query rows of a step, with the block tables of their sequences, for the layers of one family.

    The row i belongs to sequence `sequence_of[i]` and sees its positions first[i] … ends[i] - 1, or none. Rows of the
    same sequence that are next to each other read K and V together. The position p is in the pool's slot
    table[sequence, p // block_size] · block_size + p % block_size.
    """

    table: Int32s  # [sequences, blocks]
    sequence_of: Int32s  # [rows]
    first: Int32s  # [rows]
    ends: Int32s  # [rows]
    block_size: int
    _table: mx.array = field(init=False)
    _launches: dict[tuple[AttentionHeads, Occupancy], Launch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.sequence_of)
        assert rows > 0
        assert len(self.first) == len(self.ends) == rows
        assert self.table.ndim == 2
        assert self.table.size < 2**31
        assert 0 <= self.sequence_of.min() <= self.sequence_of.max() < len(self.table)
        assert self.first.min() >= 0
        assert self.ends.max() <= self.table.shape[1] * self.block_size, "a position has no block"
        self._table = _on_device(self.table.reshape(-1))

    @property
    def device_table(self) -> mx.array:
        """The block tables on the device, one after another."""
        return self._table

    @property
    def most_rows(self) -> int:
        """Most rows of one sequence that are next to each other."""
        return int(np.diff(self._starts()).max())

    def launch(self, heads: AttentionHeads, occupancy: Occupancy) -> Launch:
        """Returns the launch for layers of these heads. It is built once."""
        key = (heads, occupancy)
        if key not in self._launches:
            self._launches[key] = self._build(heads, occupancy)
        return self._launches[key]

    def _build(self, heads: AttentionHeads, occupancy: Occupancy) -> Launch:
        starts = self._starts()
        at = np.concatenate([np.arange(*run, heads.tile_rows) for run in pairwise(starts)])
        counts = np.diff(at, append=len(self.sequence_of))
        most = int(counts.max()) * heads.group
        pieces = -(-most // (heads.lines * SIMDGROUPS))
        most = -(-most // pieces)
        groups = _power_of_two(-(-most // heads.lines))
        seen = self.ends > self.first
        begins = np.minimum.reduceat(np.where(seen, self.first, np.iinfo(np.int32).max), at)
        ends = np.maximum.reduceat(np.where(seen, self.ends, 0), at)
        lengths = np.maximum(ends - begins.astype(np.int64), 0)
        longest = int(lengths.max())
        splits = occupancy.splits(len(at) * heads.kv_heads * pieces, longest)
        span = max(1, -(-longest // splits))

        tiles = np.zeros((len(at), TILE), np.int32)
        tiles[:, 0] = self.sequence_of[at] * self.table.shape[1]
        tiles[:, 1], tiles[:, 2] = at, counts
        tiles[:, 3] = np.where(lengths > 0, begins, 0)
        tiles[:, 4] = np.where(lengths > 0, ends, 0)
        tiles[:, 5], tiles[:, 6] = span, groups
        rows = np.zeros((len(self.first), ROW), np.int32)
        rows[:, 0], rows[:, 1] = self.first, self.ends
        rows[:, 2] = np.repeat(-(-lengths // span), counts)
        several = bool(counts.max() > 1)
        return Launch(
            mx.array(tiles),
            _on_device(rows),
            len(at),
            pieces,
            splits,
            # With tiles of several rows their number changes from step to step. One kernel serves all numbers.
            heads.lines if several else _power_of_two(-(-most // groups)),
            several,
        )

    def _starts(self) -> NDArray[np.int64]:
        """Returns the first rows of the runs of one sequence, and the number of rows."""
        changes = np.flatnonzero(np.diff(self.sequence_of)) + 1
        return np.concatenate([[0], changes, [len(self.sequence_of)]]).astype(np.int64)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _on_device(numbers: Int32s) -> mx.array:
    """Copies an array to the device, in rows of the last axis, with at least LEAST_INPUT numbers."""
    flat = np.ascontiguousarray(numbers, np.int32).reshape(-1)
    missing = max(0, LEAST_INPUT - len(flat))
    return mx.array(np.pad(flat, (0, missing)))
