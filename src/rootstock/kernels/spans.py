"""Positions of a sequence as slots of a pool. NumPy only.

A *slot* is a row of the pool seen as `[blocks · block_size, kv_heads, head_dim]`: block · block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import FullAttention, TokenFamily
from rootstock.cache.types import NO_BLOCK, BlockIds

Slots = NDArray[np.int64]  # [positions]

EVERYTHING = FullAttention(
    layers=1, bytes_per_token=1
)  # full attention for callers that need no layer or byte count


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one sequence in a packed step: rows `row` … `row + new - 1` are positions `past` … `end - 1`."""

    row: int
    new: int  # at least one
    past: int
    blocks: BlockIds  # [≥ ceil(end / block_size)]

    @property
    def end(self) -> int:
        return self.past + self.new


def slots_of(blocks: BlockIds, first: int, end: int, block_size: int) -> Slots:
    """Returns the slots [end - first] of the positions first … end - 1."""
    positions = np.arange(first, end, dtype=np.int64)
    slots: Slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return slots


def common_blocks(tables: list[BlockIds], first: int) -> int:
    """Counts the block ids that all tables have in common, from block index `first` on."""
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
    """Groups decodes that share blocks: yields (decodes, first, end), positions first … end - 1 that they read
    together.

    For each decode the ranges come in order of position. The last range is read by that decode alone. `worth(readers,
    positions)` decides whether a group reads a range together. Shared ranges end at a multiple of `unit`.
    """
    # Only blocks before the block that a decode writes to can be shared, so each decode keeps a range of its own.
    tables = [span.blocks[: (span.end - 1) // block_size] for span in decodes]
    # Stack of groups (rows, begin, at): the rows have read all that they see before position `begin`, and have the
    # blocks from there up to and including index `at` in common. A stack, because the tree of groups may be deep.
    pending: list[tuple[list[int], int, int]] = []

    def part(rows: list[int], begin: int, at: int) -> None:
        groups: dict[int, list[int]] = {}
        for row in rows:
            ended = NO_BLOCK - 1 - row  # a key that is no block id and is unique to the row
            groups.setdefault(int(tables[row][at]) if at < len(tables[row]) else ended, []).append(row)
        pending.extend((group, begin, at) for group in reversed(groups.values()))

    # A shared range begins at one position, so only decodes with the same first visible position can share.
    alike: dict[int, list[int]] = {}
    for row, span in enumerate(decodes):
        alike.setdefault(family.first_visible(span.past), []).append(row)
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
