"""Mask patterns: the positions that a layer sees, as the model declares them.

A model's own create_*_mask passes its pattern to `_mask_pattern` instead of building a tensor. No mask of a packed
step is ever built. The pattern is compared with the rules that the cache and the kernels know, at positions where
these rules differ. A pattern that matches none of them can still be evaluated for one sequence at its real positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.spans import EVERYTHING

IMPLEMENTATION = "rootstock"  # name in transformers' registries

_FARTHEST = 1 << 17  # the last position at which an unlimited pattern is tested


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """Mask pattern: a function of (batch, head, query position, key position), true where the query sees the key."""

    function: Callable[..., Any]
    local_size: int | None  # of a window or chunk

    def rule(self, device: torch.device) -> TokenFamily | None:
        """Returns the family whose layers see exactly these positions, or None. Its counts of layers and bytes are
        unused."""
        if self.local_size is None:
            candidates: tuple[TokenFamily, ...] = (EVERYTHING,)
        else:
            candidates = (SlidingWindow(1, 1, self.local_size), ChunkedAttention(1, 1, self.local_size))
        positions = torch.tensor(_telling_positions(self.local_size), device=device)
        try:
            seen = self._at(positions, positions)
        except Exception:  # a function that needs more than positions matches no rule
            return None
        for family in candidates:
            starts = positions.new_tensor([family.first_visible(position) for position in positions.tolist()])
            expected = (positions >= starts[:, None]) & (positions <= positions[:, None])
            if torch.equal(seen, expected):
                return family
        return None

    def between(self, past: int, end: int, device: torch.device) -> Tensor:
        """Returns the mask [1, 1, end - past, end] bool of the rows at positions past … end - 1 of one sequence."""
        positions = torch.arange(end, device=device)
        return self._at(positions[past:], positions)[None, None]

    def _at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Evaluates the pattern: [queries, keys] bool."""
        seen = self.function(0, 0, queries[:, None], keys[None, :])
        return torch.as_tensor(seen, dtype=torch.bool, device=keys.device).expand(len(queries), len(keys))


def _telling_positions(local_size: int | None) -> list[int]:
    """Returns positions around the ends of the first windows or chunks; without a size, around every power of two."""
    if local_size is None:
        centres = [0] + [1 << n for n in range(_FARTHEST.bit_length())]
    else:
        centres = [n * local_size for n in range(4)]
    return sorted({centre + step for centre in centres for step in range(-3, 4) if centre + step >= 0})


def _mask_pattern(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> MaskPattern:
    """Implements transformers' mask interface: the pattern passes through the model in place of the mask."""
    return MaskPattern(mask_function, local_size)


AttentionMaskInterface.register(IMPLEMENTATION, _mask_pattern)
