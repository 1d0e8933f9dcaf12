"""Patterns of models' own masks: the family that matches them, and the mask of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from rootstock.cache.families import ChunkedAttention, SlidingWindow
from rootstock.kernels.spans import EVERYTHING
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern

CPU = torch.device("cpu")
NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 2, 7, 512, 4096, 100_000])
def test_transformers_own_windows_and_chunks_are_recognised(size: int) -> None:
    window = MaskPattern(sliding_window_causal_mask_function(size), size)
    assert window.rule(CPU) == SlidingWindow(1, 1, size)
    if size > 1:  # chunks of one are windows of one
        chunked = MaskPattern(chunked_causal_mask_function(size, NO_PADDING), size)
        assert chunked.rule(CPU) == ChunkedAttention(1, 1, size)


def test_a_causal_pattern_is_full_attention() -> None:
    assert MaskPattern(causal_mask_function, None).rule(CPU) == EVERYTHING


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (causal_mask_function, 7),  # says it is local, and is not
        (sliding_window_causal_mask_function(4096), None),  # is local, and does not say so
        (sliding_window_causal_mask_function(8), 7),
        (sliding_window_causal_mask_function(6), 7),
        (chunked_causal_mask_function(8, NO_PADDING + 1), 8),  # chunks begin elsewhere
        (or_masks(causal_mask_function, lambda b, h, q, k: k == q + 1), None),  # sees the next position
        (and_masks(causal_mask_function, lambda b, h, q, k: k != 3), None),  # never sees position 3
        (lambda b, h, q, k: q >= 0, None),  # both ways
        (lambda b, h, q, k: torch.ones(3, 3, dtype=torch.bool)[q, k], None),  # knows three positions
    ],
)
def test_other_patterns_match_no_family(function: Callable[..., Any], size: int | None) -> None:
    assert MaskPattern(function, size).rule(CPU) is None


def test_a_pattern_can_be_evaluated_at_a_sequences_positions() -> None:
    def odd(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key % 2 == query % 2)

    seen = MaskPattern(odd, None).between(3, 6, CPU)
    assert seen.shape == (1, 1, 3, 6)
    assert seen[0, 0].int().tolist() == [[0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]
