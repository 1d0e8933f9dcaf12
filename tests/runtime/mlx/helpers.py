"""Small models on the MLX runtime, segments for them, and evaluations that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_checkpoints import make_mlx_model
from rootstock.cache.families import (
    ChunkedAttention,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    TokenFamily,
)
from rootstock.cache.types import NO_BLOCK, BlockIds, SlotId, Tokens
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.base import ExecutionMode, ModelDescription, Segment
from rootstock.runtime.mlx.rows import FamilyRows
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime
from rootstock.runtime.mlx.survey import MlxLayout, survey

SIZE, BLOCKS = 4, 64  # of the pools of `Call`
FULL = FullAttention(1, 1)
FAMILIES = [
    FULL,
    SlidingWindow(1, 1, 5),
    SlidingWindow(1, 1, 1),
    SlidingWindow(1, 1, 40),
    ChunkedAttention(1, 1, 6),
]


@dataclass(frozen=True)
class Call:
    """A call's sequences, and where each position lies."""

    family: TokenFamily
    tables: Sequence[BlockIds]
    pasts: Sequence[int]
    lengths: Sequence[int]

    @property
    def rows(self) -> FamilyRows:
        return FamilyRows(self.family, self.tables, self.pasts, self.lengths, SIZE, BLOCKS)

    def slot(self, row: int, position: int) -> int:
        return int(self.tables[row][position // SIZE]) * SIZE + position % SIZE

    def seen(self, position: int, window: int | None = None) -> list[int]:
        """Returns the positions that a row sees, by the family's definition."""
        own = self.family.window if isinstance(self.family, SlidingWindow) else None
        chunk = self.family.chunk if isinstance(self.family, ChunkedAttention) else None
        return [
            other
            for other in range(position + 1)
            if all(w is None or position - other < w for w in (own, window))
            and (chunk is None or other // chunk == position // chunk)
        ]


def drawn(family: TokenFamily, seed: int, count: int | None = None, longest: int = 9) -> Call:
    """Draws sequences whose blocks lie anywhere, and are released where no row sees them."""
    random = np.random.default_rng(seed)
    count = count or int(random.integers(1, 5))
    pasts, lengths = random.integers(0, 30, count).tolist(), random.integers(1, longest + 1, count).tolist()
    free, tables = random.permutation(BLOCKS).tolist(), []
    for past, length in zip(pasts, lengths, strict=True):
        blocks = -(-(past + length) // SIZE) + int(random.integers(0, 3))
        table = np.array([free.pop() for _ in range(blocks)], np.int32)
        table[: family.first_visible(past) // SIZE] = NO_BLOCK
        tables.append(table)
    return Call(family, tables, pasts, lengths)


def described(layout: MlxLayout, **fields: Any) -> ModelDescription:
    """Returns the description of a model of this layout."""
    known: dict[str, Any] = {
        "name": "tiny",
        "architecture": "tiny",
        "vocab_size": layout.vocab_size,
        "context_limit": 512,
        "families": layout.families,
        "weights_fingerprint": "",
        "dtype": "float32",
        "kv_dtype": "float32",
        "device": "cpu",
        "parameters": 0,
        "runtime": "mlx",
        "memory": "unified",
    }
    return ModelDescription(**{**known, **fields})


def served(
    model: nn.Module,
    dtype: str = "float32",
    mode: ExecutionMode = "batched",
    kernel: PagedKernel | None = None,
) -> MlxExecution:
    layout = survey(model)
    description = described(layout, dtype=dtype, kv_dtype=dtype, execution_mode=mode)
    return MlxExecution(layout, description, kernel)


def runtime_of(
    kind: str, mode: ExecutionMode = "batched", rows: int = 64, block_size: int = 4
) -> tuple[nn.Module, MlxRuntime]:
    """Makes a model of `mlx_checkpoints.KINDS` and its runtime, with `rows` rows of each family."""
    model = make_mlx_model(kind)
    runtime = MlxRuntime(model, served(model, mode=mode))
    runtime.allocate([rows] * len(runtime.description.families), block_size)
    return model, runtime


def segment(
    runtime: MlxRuntime,
    tokens: Tokens,
    past: int = 0,
    keep: int | None = None,
    blocks: Sequence[int] = range(8),
    state: int = 0,
) -> Segment:
    """Makes a segment whose families all have the same block table. `keep`: rows with logits; None: all."""
    families = runtime.description.families
    table = np.array(list(blocks), np.int32)
    tables = tuple(table for family in families if not isinstance(family, RecurrentState))
    kept = len(tokens) if keep is None else keep
    return Segment(tokens, past, tables, kept, SlotId(state))


class Failing(nn.Module):
    """Module whose result fails in its evaluation, not before, while `fails` is set."""

    def __init__(self, inner: nn.Module, number: Callable[[], mx.array]) -> None:
        super().__init__()
        self.inner = inner
        self.number = number
        self.fails = False

    def __call__(self, x: mx.array, *rest: Any) -> mx.array:
        out: mx.array = self.inner(x, *rest)
        return out + self.number() if self.fails else out


def failing_number() -> mx.array:
    """Returns a number whose evaluation raises "[GatherMM::eval] Currently only supports float32"."""
    ones = mx.ones((2, 4, 4), mx.bfloat16)
    return mx.gather_mm(ones[:1], ones, rhs_indices=mx.array([0]), stream=mx.cpu)[0, 0, 0].astype(mx.float32)


def number_that_fails_later() -> mx.array:
    """Returns a number whose computation fails in a thread of MLX: of the inverse of zeros. The exception comes with
    the evaluation or after it, when everything that follows has been computed, too."""
    return mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
