"""The resume point of a prompt: the largest position at which every family can resume.

Full attention can resume wherever its prefix is found. A window needs the positions just before, a chunk those since
its start, a recurrent state a checkpoint at exactly that position. Each family lowers a given position to the largest
that it accepts. Repeated until no family lowers it further, this gives the largest position that all accept; the
order of the families does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rootstock.cache.families import SlidingWindow, WindowFamily
from rootstock.cache.pools import Pools
from rootstock.cache.radix_node import Checkpoint, Node, WindowBlocks, window_blocks
from rootstock.cache.types import NO_BLOCK, BlockIds


class Resume(NamedTuple):
    position: int
    capped_by: str | None  # the family that allows no more; None: no family lowered the position
    checkpoint: Checkpoint | None = None
    windows: tuple[WindowBlocks, ...] = ()


def resume_point(node: Node, at_most: int, pools: Pools) -> Resume:
    """Finds the deepest resumable position up to `at_most` on the path to `node`, for a model that cannot resume
    anywhere. Changes nothing."""
    checkpoint = node.checkpoint_up_to(at_most)
    kept = 0 if checkpoint is None else checkpoint.position
    position, capped_by = at_most, None
    tables: list[BlockIds] = []
    if pools.states is None and kept < at_most:
        tables = [
            window_blocks(node, at_most, i, window.pool, pools.block_size)
            for i, window in enumerate(pools.windows)
        ]
        position, capped_by = _all_accept(tables, at_most, kept, pools)
    elif kept < at_most:
        position, capped_by = kept, "state"
    if position > kept:
        windows = (
            needed_blocks(window.family, blocks, position, pools.block_size)
            for window, blocks in zip(pools.windows, tables, strict=True)
        )
        return Resume(position, capped_by, windows=tuple(windows))
    return Resume(kept, capped_by, checkpoint, () if checkpoint is None else checkpoint.windows)


def _all_accept(tables: Sequence[BlockIds], at_most: int, kept: int, pools: Pools) -> tuple[int, str | None]:
    """Returns the largest position that all window families accept, or one not beyond `kept`, and the family that
    lowered it last."""
    position, before, capped_by = at_most, -1, None
    while position > kept and position != before:
        before = position
        for window, blocks in zip(pools.windows, tables, strict=True):
            allowed = deepest_resumable(window.family, blocks, position, pools.block_size)
            if allowed < position:
                position, capped_by = allowed, window.family.name
    return position, capped_by


def needed_blocks(family: WindowFamily, blocks: BlockIds, position: int, block_size: int) -> WindowBlocks:
    """Cuts out the part of a table that a resumption at `position` reads; its last block may be partly filled."""
    start = family.first_visible(position)
    end = -(-position // block_size)
    first = min(start // block_size, end) if start < position else end
    return WindowBlocks(first, blocks[first:end].copy())


def deepest_resumable(family: WindowFamily, blocks: BlockIds, at_most: int, block_size: int) -> int:
    """Finds the largest position up to `at_most` whose window lies in `blocks`, [≥ ceil(at_most / block_size)].
    Released blocks are NO_BLOCK."""
    length = -(-at_most // block_size)
    present = blocks[:length] != NO_BLOCK
    if not isinstance(family, SlidingWindow):
        # From the start of the chunk on, as far as there is no gap; the start itself needs nothing.
        start = family.first_visible(at_most)
        gone = np.flatnonzero(~present[start // block_size :])
        if len(gone) == 0:
            return at_most
        return max(start, min(at_most, (start // block_size + int(gone[0])) * block_size))
    if family.window == 1:
        return at_most
    index = np.arange(length, dtype=np.int64)
    # The first block of the run of present blocks that each block ends.
    run_start = np.maximum.accumulate(np.where(present, 0, index + 1))
    ends = np.minimum((index + 1) * block_size, at_most)
    # Of the positions inside one block the last is the easiest: its window starts latest.
    enough = present & (run_start <= np.maximum(ends - family.window + 1, 0) // block_size)
    found = np.flatnonzero(enough)
    return int(ends[found[-1]]) if len(found) else 0
