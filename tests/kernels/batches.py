"""Ragged batches over a random pool, for every kernel's test and for the checks on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.cache.types import NO_BLOCK
from rootstock.kernels.api import Scores
from rootstock.kernels.reference import first_seen
from rootstock.kernels.spans import EVERYTHING, Span, slots_of


@dataclass(frozen=True)
class RaggedBatch:
    spans: list[Span]
    query: Tensor  # [tokens, q_heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor
    keys: Tensor  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor
    scores: Scores
    family: TokenFamily = EVERYTHING

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


def make_batch(
    lengths: list[tuple[int, int]],  # (past, new) of each sequence
    *,
    block_size: int = 4,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "scattered",
    shared: int = 0,  # positions of the past that all sequences have in common, rounded down to blocks
    seed: int = 0,
    softcap: float | None = None,
    sinks: bool = False,
    family: TokenFamily = EVERYTHING,
) -> RaggedBatch:
    """Makes a batch. Positions that no row of the family may see are NaN in the pool, and NO_BLOCK in the tables if
    they fill blocks."""
    rng, random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    needed = [-(-(past + new) // block_size) for past, new in lengths]
    total = sum(needed) + 3
    ids = np.arange(total, dtype=np.int32)
    if layout == "scattered":
        rng.shuffle(ids)
    elif layout == "runs":  # pieces of one to five blocks, shuffled
        pieces = np.split(ids, np.cumsum(rng.integers(1, 6, total)))
        rng.shuffle(pieces := [p for p in pieces if len(p)])
        ids = np.concatenate(pieces)
    spans, row, at = [], 0, 0
    for (past, new), blocks in zip(lengths, needed, strict=True):
        table = ids[at : at + blocks].copy()
        if spans:
            common = min(shared, past, spans[0].past) // block_size
            table[:common] = spans[0].blocks[:common]
        spans.append(Span(row, new, past, table))
        row, at = row + new, at + blocks

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    for span in spans:
        span.blocks[: first_seen(family, span.past) // block_size] = NO_BLOCK
    value_dim = head_dim if value_dim is None else value_dim
    keys, values = draw(total, block_size, kv_heads, head_dim), draw(total, block_size, kv_heads, value_dim)
    seen = [slots_of(s.blocks, first_seen(family, s.past), s.end, block_size) for s in spans]
    unseen = np.setdiff1d(np.arange(total * block_size), np.concatenate(seen))
    for pool in (keys, values):
        pool.flatten(0, 1)[unseen] = torch.nan
    slots = np.concatenate([slots_of(s.blocks, s.past, s.end, block_size) for s in spans])
    return RaggedBatch(
        spans,
        draw(row, q_heads, head_dim),
        keys.flatten(0, 1)[slots],
        values.flatten(0, 1)[slots],
        keys,
        values,
        Scores(head_dim**-0.5 * 2, softcap, draw(q_heads) if sinks else None),
        family,
    )
