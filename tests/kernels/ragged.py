"""Hypothesis strategies of ragged batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from kernels.batches import RaggedBatch, make_batch
from rootstock.cache.families import ChunkedAttention, SlidingWindow
from rootstock.kernels.spans import EVERYTHING
from rootstock.kernels.torch.sliced_attention import Tuning

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
    """Draws a batch. `plain`: K and V of equal dimensions, no softcap."""
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
