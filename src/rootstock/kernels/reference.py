"""Paged attention as the textbook says it, one sequence, one head and one query at a time, in float64.

The oracle of every kernel's test, and slow on purpose: nothing here is clever enough to be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from rootstock.cache.families import ChunkedAttention, FullAttention, SlidingWindow, TokenFamily
from rootstock.kernels.scores import Scores
from rootstock.kernels.spans import EVERYTHING, Span


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[Span],
    scores: Scores,
    family: TokenFamily = EVERYTHING,
) -> Tensor:
    """Each query attends to the positions of its own sequence that its family sees, up to and including its own.

    query          [tokens, q_heads, head_dim]
    keys, values   [blocks, block_size, kv_heads, head_dim or value_dim]; hold the new positions already
    returns        [tokens, q_heads, value_dim] float64
    """
    tokens, q_heads, _ = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    out = torch.zeros(tokens, q_heads, value_dim, dtype=torch.float64)
    for span in spans:
        for i in range(span.new):
            own = span.past + i
            seen = range(first_seen(family, own), own + 1)
            places = [(int(span.blocks[p // block_size]), p % block_size) for p in seen]
            assert all(block >= 0 for block, _ in places), "the block of a visible position was released"
            k = torch.stack([keys[block, offset] for block, offset in places]).double()
            v = torch.stack([values[block, offset] for block, offset in places]).double()
            for head in range(q_heads):
                kv_head = head * kv_heads // q_heads
                score = k[:, kv_head] @ query[span.row + i, head].double() * scores.scale  # [seen]
                if scores.softcap is not None:
                    score = scores.softcap * torch.tanh(score / scores.softcap)
                if scores.sinks is not None:  # one more thing to look at, which says nothing
                    score = torch.cat([score, scores.sinks[head : head + 1].double()])
                weights = torch.softmax(score, 0)[: len(seen)]
                out[span.row + i, head] = weights @ v[:, kv_head]
    return out


def first_seen(family: TokenFamily, position: int) -> int:
    """The first position that the row at `position` attends to, from the definition of its family."""
    match family:
        case FullAttention():
            return 0
        case SlidingWindow(window=window):
            return max(0, position - window + 1)
        case ChunkedAttention(chunk=chunk):
            return position // chunk * chunk
        case _:
            assert_never(family)
