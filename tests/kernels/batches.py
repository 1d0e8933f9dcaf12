"""Random ragged batches over a random pool, for every kernel's test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.cache.plan import NO_BLOCK
from rootstock.kernels.api import Scores
from rootstock.kernels.reference import first_seen
from rootstock.kernels.spans import EVERYTHING, Span, slots_of
from rootstock.kernels.torch.sliced_attention import Tuning


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
    """What no row of the family may see is NaN in the pool, and NO_BLOCK in the tables where it is whole blocks."""
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


families = st.one_of(
    st.just(EVERYTHING),
    st.one_of(st.integers(1, 12), st.integers(1, 150)).map(lambda window: SlidingWindow(1, 1, window)),
    st.one_of(st.integers(1, 12), st.integers(1, 150)).map(lambda chunk: ChunkedAttention(1, 1, chunk)),
)


tunings = st.builds(  # for positions of one byte
    Tuning,
    slice_bytes=st.sampled_from([1, 8, 32, 1000]),
    chunk_slice_bytes=st.sampled_from([1, 16, 1000]),
    many_rows=st.sampled_from([1, 8, 1000]),
    share_from=st.sampled_from([1, 8, 1000]),
    band_rows=st.sampled_from([(1, 1), (1, 5), (3, 1000), (64, 256)]),
)


@st.composite
def ragged_batches(
    draw: st.DrawFn,
    *,
    plain: bool = False,
    head_dims: Sequence[int] = (1, 3, 8, 16, 20, 48),
    block_sizes: Sequence[int] = (1, 2, 3, 4, 7, 8, 16, 32, 64),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> RaggedBatch:
    """`plain`: K and V of equal dimensions, no softcap."""
    past_and_new = st.tuples(
        st.one_of(st.just(0), st.integers(0, 90)), st.one_of(st.just(1), st.just(1), st.integers(1, 20))
    )
    head_dim = draw(st.sampled_from(head_dims))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return make_batch(
        draw(st.lists(past_and_new, min_size=1, max_size=5)),
        block_size=draw(st.sampled_from(block_sizes)),
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=None
        if plain
        else draw(st.sampled_from([head_dim, head_dim + (32 if head_dim % 32 == 0 else 4)])),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(["scattered", "runs", "contiguous"])),
        shared=draw(st.sampled_from([0, 16, 90])),
        seed=draw(st.integers(0, 2**16)),
        softcap=None if plain else draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.booleans()),
        family=draw(families),
    )
