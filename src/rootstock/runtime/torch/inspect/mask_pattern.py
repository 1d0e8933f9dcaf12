"""What a layer may see, as the model itself says it: a pattern over positions, recognised or evaluated.

A model's own create_*_mask hands its pattern to `mask_pattern` in place of a tensor. No mask of a packed step is
ever built: the pattern is compared, at positions where rules differ, with the rules that the cache and the kernels
know. One that is none of them can still be evaluated for one sequence at its real positions.
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

IMPLEMENTATION = "rootstock"  # our name in transformers' registries

_FARTHEST = 1 << 17  # positions at which an unlimited pattern is looked at


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A function of (batch, head, query position, key position) that is true where the key is seen."""

    function: Callable[..., Any]
    local_size: int | None  # of a window or chunk

    def rule(self, device: torch.device) -> TokenFamily | None:
        """The family whose layers see exactly this; its counts of layers and bytes mean nothing. None: no family."""
        if self.local_size is None:
            candidates: tuple[TokenFamily, ...] = (EVERYTHING,)
        else:
            candidates = (SlidingWindow(1, 1, self.local_size), ChunkedAttention(1, 1, self.local_size))
        positions = torch.tensor(_telling_positions(self.local_size), device=device)
        try:
            seen = self._at(positions, positions)
        except Exception:  # a function that needs more than positions is no rule over positions
            return None
        for family in candidates:
            starts = positions.new_tensor([family.tail_start(position) for position in positions.tolist()])
            expected = (positions >= starts[:, None]) & (positions <= positions[:, None])
            if torch.equal(seen, expected):
                return family
        return None

    def between(self, past: int, end: int, device: torch.device) -> Tensor:
        """[1, 1, end - past, end] bool: what the rows at positions past … end - 1 of one sequence see."""
        positions = torch.arange(end, device=device)
        return self._at(positions[past:], positions)[None, None]

    def _at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries, keys] bool"""
        seen = self.function(0, 0, queries[:, None], keys[None, :])
        return torch.as_tensor(seen, dtype=torch.bool, device=keys.device).expand(len(queries), len(keys))


def _telling_positions(local_size: int | None) -> list[int]:
    """Around the ends of the first windows or chunks; without a size, around every power of two."""
    if local_size is None:
        centres = [0] + [1 << n for n in range(_FARTHEST.bit_length())]
    else:
        centres = [n * local_size for n in range(4)]
    return sorted({centre + step for centre in centres for step in range(-3, 4) if centre + step >= 0})


def _mask_pattern(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> MaskPattern:
    """transformers' mask interface: the pattern travels through the model in the mask's place."""
    return MaskPattern(mask_function, local_size)


AttentionMaskInterface.register(IMPLEMENTATION, _mask_pattern)
