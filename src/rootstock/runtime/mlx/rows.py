"""Rows of one family in one call of the model: positions, pool slots, masks, and RoPE's offsets.

A call computes `count` sequences of up to `new` tokens each. Shorter ones are padded at the end. K and V of padding
go to a slot of the pool that is never read. Beyond its end a sequence reads another slot, which stays zero: a masked
position whose V is not a number would spoil the result.

Index and mask arrays are expressions that MLX evaluates only if something needs them. Where attention reads the pool
itself, they never are, and a call's cost in Python does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.cache.types import BlockIds
from rootstock.kernels.metal.launch import StepRows

SPARE_SLOTS = 2  # of a pool, after its blocks: the one of zeros, and the one for padding


class FamilyRows:
    """One family's part of a call.

    tables   of each sequence [≥ blocks] block ids
    pasts    positions that are computed before the call
    lengths  new tokens of each sequence; `new` is the largest
    """

    def __init__(
        self,
        family: TokenFamily,
        tables: Sequence[BlockIds],
        pasts: Sequence[int],
        lengths: Sequence[int],
        block_size: int,
        blocks: int,
    ) -> None:
        """`blocks`: rows of the family's pool."""
        self.family = family
        self.pasts = list(pasts)
        self.lengths = list(lengths)
        self.new = max(lengths)
        self.count = len(self.pasts)
        self.starts = [family.first_visible(past) for past in self.pasts]
        self.ends = [past + length for past, length in zip(self.pasts, self.lengths, strict=True)]
        self.width = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        self._block_size = block_size
        self._tables = [
            self._checked(table, start, end, blocks)
            for table, start, end in zip(tables, self.starts, self.ends, strict=True)
        ]
        self._zero_slot = blocks * block_size
        self._padding_slot = self._zero_slot + 1
        self._runs: dict[int, tuple[int, int] | None] = {}
        self._masks: dict[int | None, mx.array] = {}
        self._paged: dict[int | None, StepRows] = {}

    def _checked(self, table: BlockIds, start: int, end: int, blocks: int) -> BlockIds:
        """Returns the table up to `end`. MLX checks no bounds, so wrong ids would silently read other rows."""
        size = self._block_size
        needed = table[: -(-end // size)]
        used = needed[start // size :]
        assert len(needed) * size >= end, "the block table is too short"
        assert len(used) == 0 or (used.min() >= 0 and used.max() < blocks), (
            "a released or foreign block is read"
        )
        return needed

    @property
    def offset(self) -> int | mx.array:
        """Returns RoPE's offset: a number for one sequence, [sequences] int32 for several."""
        return self.pasts[0] if self.count == 1 else mx.array(self.pasts, mx.int32)

    @cached_property
    def write_slots(self) -> mx.array:
        """Returns the slots [sequences · new] to which K and V are written, row by row."""
        size = self._block_size
        slots = np.full((self.count, self.new), self._padding_slot, np.int32)
        for row, (table, past, end) in enumerate(zip(self._tables, self.pasts, self.ends, strict=True)):
            positions = np.arange(past, end)
            slots[row, : end - past] = table[positions // size] * size + positions % size
        return mx.array(slots.reshape(-1))

    @cached_property
    def write_run(self) -> tuple[int, int] | None:
        """Returns the slots [first, end) of a lone sequence's new positions, if they follow each other, else None."""
        return self._run_of(0, self.pasts[0], self.ends[0]) if self.count == 1 else None

    @cached_property
    def _padded_tables(self) -> NDArray[np.int32]:
        """Returns the block tables [sequences, blocks], padded at the end and where blocks were released."""
        width = max(len(table) for table in self._tables)
        padded = np.zeros((self.count, width), np.int32)
        for row, table in enumerate(self._tables):
            padded[row, : len(table)] = np.maximum(table, 0)
        return padded

    @cached_property
    def _table(self) -> mx.array:
        return mx.array(self._padded_tables)

    @cached_property
    def _positions(self) -> mx.array:
        """Returns the positions [sequences, width] that each sequence reads, from its first visible one on."""
        return mx.array(self.starts, mx.int32)[:, None] + mx.arange(self.width, dtype=mx.int32)

    @cached_property
    def read_slots(self) -> mx.array:
        """Returns the slots [sequences, width] of the positions; the slot of zeros after a sequence's end."""
        blocks = mx.minimum(self._positions // self._block_size, self._table.shape[1] - 1)
        slots = mx.take_along_axis(self._table, blocks, axis=1) * self._block_size
        slots = slots + self._positions % self._block_size
        return mx.where(self._positions < mx.array(self.ends, mx.int32)[:, None], slots, self._zero_slot)

    def run(self, row: int) -> tuple[int, int] | None:
        """Returns the slots [first, end) that a sequence reads, if they follow each other in the pool, else None."""
        if row not in self._runs:
            self._runs[row] = self._run_of(row, self.starts[row], self.ends[row])
        return self._runs[row]

    def _run_of(self, row: int, start: int, end: int) -> tuple[int, int] | None:
        """Returns the slots [first, end) of a sequence's positions start … end-1, if they follow each other."""
        size = self._block_size
        used = self._tables[row][start // size : -(-end // size)]
        if len(used) > 1 and not (np.diff(used) == 1).all():
            return None
        first = int(used[0]) * size + start % size
        return first, first + end - start

    def window(self, asked: int | None) -> int | None:
        """Returns the narrower of the family's window and the one that a model asks for."""
        own = self.family.window if isinstance(self.family, SlidingWindow) else None
        return min((window for window in (own, asked) if window is not None), default=None)

    def hides_nothing(self, window: int | None) -> bool:
        """Returns whether each row sees all read positions up to its own, so that causal attention is right."""
        if isinstance(self.family, ChunkedAttention):
            return False
        longest = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        equal = len({end - start for start, end in zip(self.starts, self.ends, strict=True)}) == 1
        return equal and len(set(self.lengths)) == 1 and (window is None or longest <= window)

    def mask(self, window: int | None) -> mx.array:
        """Returns the mask [sequences, 1, new, width]: true where a row sees a position."""
        if window not in self._masks:
            keys = self._positions[:, None, None, :]
            queries = mx.array(self.pasts, mx.int32)[:, None, None, None]
            queries = queries + mx.arange(self.new, dtype=mx.int32)[:, None]
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            if isinstance(self.family, ChunkedAttention):
                seen = seen & (keys >= queries - queries % self.family.chunk)
            self._masks[window] = seen
        return self._masks[window]

    def paged(self, window: int | None) -> StepRows:
        """Returns a paged kernel's rows for all sequences. Padding sees nothing."""
        if window not in self._paged:
            at = np.array(self.pasts, np.int32)[:, None] + np.arange(self.new, dtype=np.int32)
            first = np.zeros_like(at)
            if window is not None:
                first = np.maximum(first, at - window + 1)
            if isinstance(self.family, ChunkedAttention):
                first = np.maximum(first, at - at % self.family.chunk)
            ends = np.where(at < np.array(self.ends, np.int32)[:, None], at + 1, 0)
            self._paged[window] = StepRows(
                self._padded_tables,
                np.repeat(np.arange(self.count, dtype=np.int32), self.new),
                first.reshape(-1).astype(np.int32),
                ends.reshape(-1).astype(np.int32),
                self._block_size,
            )
        return self._paged[window]
