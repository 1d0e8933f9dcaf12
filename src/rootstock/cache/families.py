"""Families: groups of layers with one kind of memory. A model is a set of families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that remember every position: K and V per token. All its layers share one block table."""

    layers: int
    bytes_per_token: int  # K and V of all its layers, in the pool's dtype

    name = "full"

    def __post_init__(self) -> None:
        assert self.layers > 0
        assert self.bytes_per_token > 0


# Sliding windows, chunks, states and latents join this union when the cache learns to keep them.
Family = FullAttention
