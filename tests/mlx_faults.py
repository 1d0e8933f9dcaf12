"""Failures in the middle of a forward of an mlx-lm model.

The second linear layer of a Llama's block and all later ones follow the write of its K and V, and precede those of
the next block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

FaultKind = Literal["graph", "evaluation"]
"""Where a forward fails: while Python builds its graph, or when MLX evaluates it, which spoils what depends on it."""


class Injected(Exception):
    """Failure of a forward, on purpose."""


@contextlib.contextmanager
def failing(kind: FaultKind, linear: int, error: Exception | None = None) -> Iterator[None]:
    """Makes the call number `linear` of a linear layer fail, counted from 0. A graph fails with `error`."""
    own, calls = nn.Linear.__call__, 0

    def call(self: nn.Linear, x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls - 1 != linear:
            return own(self, x)
        if kind == "graph":
            raise error or Injected
        return own(self, x) + unevaluable()

    nn.Linear.__call__ = call
    try:
        yield
    finally:
        nn.Linear.__call__ = own


@contextlib.contextmanager
def counting_linears() -> Iterator[list[None]]:
    """Yields a list with an item for each call of a linear layer."""
    own, calls = nn.Linear.__call__, list[None]()

    def call(self: nn.Linear, x: mx.array) -> mx.array:
        calls.append(None)
        return own(self, x)

    nn.Linear.__call__ = call
    try:
        yield calls
    finally:
        nn.Linear.__call__ = own


def is_injected(error: BaseException) -> bool:
    """Returns whether an evaluation failed on purpose."""
    return "GatherMM" in str(error)


def unevaluable() -> mx.array:
    """Returns a number whose evaluation raises: MLX has no such product of bfloat16 on a CPU."""
    with mx.stream(mx.cpu):
        factor: Any = mx.ones((1, 4, 4), mx.bfloat16)
        product = mx.gather_mm(factor, mx.ones((2, 4, 4), mx.bfloat16), rhs_indices=mx.array([0]))
        return product.sum().astype(mx.float32)
