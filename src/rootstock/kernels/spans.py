"""Where one sequence's positions lie in a pool. NumPy only.

A *slot* is a row of the pool seen as `[blocks · block_size, kv_heads, head_dim]`: block · block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import FullAttention, TokenFamily
from rootstock.cache.plan import NO_BLOCK, BlockIds

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


def readings(
    decodes: Sequence[Span],
    family: TokenFamily,
    block_size: int,
    worth: Callable[[int, int], bool],
    unit: int = 1,
) -> Iterator[tuple[list[int], int, int]]:
    """Which decodes together read which positions, first … end - 1; in order for each of them, its own last.

    `worth` tells of (readers, positions) whether they read these together, which end at a multiple of `unit`.
    """
    # Only blocks before the one that a decode writes to can be shared, so each keeps something of its own.
    tables = [span.blocks[: (span.end - 1) // block_size] for span in decodes]
    # Groups that have read what they see before `begin` and have the blocks before `at` in common from there on, and
    # the one at `at`. Last in, first out: a walk of the tree that they make, which may be deep.
    pending: list[tuple[list[int], int, int]] = []

    def part(rows: list[int], begin: int, at: int) -> None:
        groups: dict[int, list[int]] = {}
        for row in rows:
            ended = NO_BLOCK - 1 - row  # no block's id, and nobody else's
            groups.setdefault(int(tables[row][at]) if at < len(tables[row]) else ended, []).append(row)
        pending.extend((group, begin, at) for group in reversed(groups.values()))

    # What is read together begins at one position, so only decodes that see from the same one on can share.
    alike: dict[int, list[int]] = {}
    for row, span in enumerate(decodes):
        alike.setdefault(family.tail_start(span.past), []).append(row)
    for first, rows in reversed(alike.items()):
        part(rows, first, first // block_size)
    while pending:
        group, begin, at = pending.pop()
        if len(group) == 1:
            yield group, begin, decodes[group[0]].end
            continue
        at += common_blocks([tables[row] for row in group], at)
        end = at * block_size // unit * unit
        if end > begin and worth(len(group), end - begin):
            yield group, begin, end
            begin = end
        part(group, begin, at)
