"""Where one sequence's positions lie in a pool: slots, and the contiguous runs among them. NumPy only.

A *slot* is a row of the pool seen as `[blocks · block_size, kv_heads, head_dim]`: block · block_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.plan import BlockIds

Slots = NDArray[np.int64]  # [positions]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a packed step: rows `row` … `row + new - 1` are positions `past` … `end - 1`."""

    row: int
    new: int  # at least one
    past: int
    blocks: BlockIds  # [≥ ceil(end / block_size)]

    @property
    def end(self) -> int:
        return self.past + self.new


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions in consecutive slots."""

    first_slot: int
    tokens: int


def slots_of(blocks: BlockIds, first: int, end: int, block_size: int) -> Slots:
    """[end - first] slots of the positions first … end - 1."""
    positions = np.arange(first, end, dtype=np.int64)
    slots: Slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return slots


def runs_of(blocks: BlockIds, first: int, end: int, block_size: int) -> list[Run]:
    """The positions first … end - 1 as the fewest runs, in order."""
    if first >= end:
        return []
    ids = blocks[first // block_size : -(-end // block_size)].astype(np.int64)
    breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    heads = np.concatenate(([0], breaks))
    lengths = np.diff(np.append(heads, len(ids))) * block_size
    starts = ids[heads] * block_size
    lead = first % block_size  # the first block's positions before `first`
    starts[0] += lead
    lengths[0] -= lead
    lengths[-1] -= -end % block_size  # the last block's positions from `end` on
    return [Run(start, tokens) for start, tokens in zip(starts.tolist(), lengths.tolist(), strict=True)]


def common_blocks(tables: list[BlockIds], first: int) -> int:
    """How many block ids, from block index `first` on, are the same in all tables."""
    shortest = min(len(table) for table in tables)
    lead = tables[0][first:shortest]
    for table in tables[1:]:
        differs = np.flatnonzero(lead != table[first : first + len(lead)])
        if len(differs):
            lead = lead[: differs[0]]
    return len(lead)
