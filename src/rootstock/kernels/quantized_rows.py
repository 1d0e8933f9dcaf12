"""Pool rows quantized to int8, with one float32 scale for each position and head.

The scale is the largest absolute number of the row / 127. Each number is stored as its nearest multiple of the scale,
a signed byte.

A position of a head of 64 numbers takes 68 bytes instead of 128 in bfloat16; a head of 128 numbers takes 132 instead
of 256. The error of a number is at most half a scale. The relative root mean square error of Gaussian numbers is 0.6
%. Rows in which all numbers are smaller than 1.5e-36 become zeros, because their scale would not be a normal float32.
Rows that hold an infinity or a NaN become NaN.

Numbers computed in float32 are the same up to their last bits, however a prompt is cut into steps. The stored codes
are therefore the same too, except that such a bit may change a code by 1. That is rare, and smaller than the error of
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = 127
LEAST_SCALE = torch.finfo(torch.float32).tiny


class RowQuantizer(Protocol):
    """Compiled loops for reading and writing `RoundedRows`, with the same results as the code here."""

    def write(self, pool: RoundedRows, slots: Tensor, rows: Tensor) -> Tensor: ...
    def read(self, pool: RoundedRows, slots: Tensor | slice, out: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """K or V of one layer's pool, quantized: codes · scales, read as numbers of the dtype `read_as`."""

    codes: Tensor  # [slots, heads, dim] int8, contiguous
    scales: Tensor  # [slots, heads] float32, contiguous
    read_as: torch.dtype
    loops: RowQuantizer | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the stored codes."""
        return self.codes.dtype

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Quantizes `rows` [tokens, heads, dim] into `slots` [tokens] int64. Returns the numbers that `read` would
        return for them, of the same shape."""
        if self.loops is not None:
            return self.loops.write(self, slots, rows)
        codes, scales = rounded(rows)
        self.codes.index_copy_(0, slots, codes)
        self.scales.index_copy_(0, slots, scales)
        return widened(codes, scales, torch.empty(rows.shape, dtype=self.read_as, device=rows.device))

    def read(self, slots: Tensor | slice, out: Tensor) -> Tensor:
        """Reads `slots`, [tokens] int64 or a slice of adjoining slots, into `out` [tokens, heads, dim] of the dtype
        `read_as`. Returns `out`."""
        if self.loops is not None and out.is_contiguous():
            return self.loops.read(self, slots, out)
        if isinstance(slots, slice):
            return widened(self.codes[slots], self.scales[slots], out)
        return widened(self.codes.index_select(0, slots), self.scales.index_select(0, slots), out)


PoolRows = Tensor | RoundedRows
"""K or V of a layer's pool by slot, [slots, heads, dim]"""


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes rows […, dim] to codes […, dim] int8 and scales […] float32."""
    rows = rows.float()
    scales = rows.abs().amax(-1) / LARGEST
    scales = torch.where(scales < LEAST_SCALE, 0.0, scales).where(scales.isfinite(), torch.nan)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = torch.floor(rows * inverse.unsqueeze(-1) + 0.5).clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


def widened(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Dequantizes codes […, dim] int8 and scales […] float32: writes their product into `out` […, dim], rounded to
    its dtype."""
    return out.copy_(codes).mul_(scales.unsqueeze(-1))


def select_rows(rows: PoolRows, slots: Tensor) -> Tensor:
    """Copies `slots` [tokens] int64 of a pool to new memory, [tokens, heads, dim]."""
    if isinstance(rows, Tensor):
        return rows.index_select(0, slots)
    return rows.read(slots, rows.codes.new_empty(len(slots), *rows.shape[1:], dtype=rows.read_as))
