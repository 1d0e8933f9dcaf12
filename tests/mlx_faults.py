"""Failures in the middle of a forward of an mlx-lm model.

All layers of a small model call linear layers. One that fails leaves layers before it, whose K and V are written, and
layers behind it, whose K and V depend on it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

FaultKind = Literal["graph", "evaluation"]
"""Where a forward fails: while Python builds its graph, or when MLX evaluates it, which spoils what depends on it."""


@contextlib.contextmanager
def failing(kind: FaultKind, linear: int, error: Exception) -> Iterator[None]:
    """Makes call number `linear` of a linear layer fail, counted from 0: a graph with `error`."""

    def fail(number: int, result: mx.array) -> mx.array:
        if number != linear:
            return result
        if kind == "graph":
            raise error
        return result + unevaluable()

    with _linears_through(fail):
        yield


@contextlib.contextmanager
def counting_linears() -> Iterator[list[int]]:
    """Yields a list with an item for each call of a linear layer."""
    calls: list[int] = []

    def count(number: int, result: mx.array) -> mx.array:
        calls.append(number)
        return result

    with _linears_through(count):
        yield calls


@contextlib.contextmanager
def _linears_through(change: Callable[[int, mx.array], mx.array]) -> Iterator[None]:
    """Passes the results of linear layers through a function of the call's number and the result."""
    own, numbers = nn.Linear.__call__, itertools.count()
    nn.Linear.__call__ = lambda self, x: change(next(numbers), own(self, x))
    try:
        yield
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
