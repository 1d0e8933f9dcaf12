"""Where one sequence's positions lie in a pool. NumPy only.

A *slot* is a row of the pool seen as `[blocks · block_size, kv_heads, head_dim]`: block · block_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import FullAttention
from rootstock.cache.plan import BlockIds

Slots = NDArray[np.int64]  # [positions]

EVERYTHING = FullAttention(layers=1, bytes_per_token=1)  # for who attends to all and counts neither


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


def slots_of(blocks: BlockIds, first: int, end: int, block_size: int) -> Slots:
    """[end - first] slots of the positions first … end - 1."""
    positions = np.arange(first, end, dtype=np.int64)
    slots: Slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return slots


def common_blocks(tables: list[BlockIds], first: int) -> int:
    """How many block ids, from block index `first` on, are the same in all tables."""
    shortest = min(len(table) for table in tables)
    leads = np.stack([table[first:shortest] for table in tables])
    alike = (leads == leads[0]).all(0)
    return len(alike) if alike.all() else int(alike.argmin())
