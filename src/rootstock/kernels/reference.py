"""Reference paged attention in float64, which follows the textbook: one sequence, head and query at a time.

It is the oracle of every kernel's test. It is slow on purpose: simple code is easy to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from rootstock.cache.families import ChunkedAttention, FullAttention, SlidingWindow, TokenFamily
from rootstock.kernels.api import Scores
from rootstock.kernels.spans import EVERYTHING, Span


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[Span],
    scores: Scores,
    family: TokenFamily = EVERYTHING,
) -> Tensor:
    """Attends from each query to the positions of its own sequence that its family sees, up to its own position.

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
            blocks, offsets = (
                [int(span.blocks[p // block_size]) for p in seen],
                [p % block_size for p in seen],
            )
            assert min(blocks) >= 0, "the block of a visible position was released"
            k, v = keys[blocks, offsets].double(), values[blocks, offsets].double()  # [seen, kv_heads, …]
            for head in range(q_heads):
                kv_head = head * kv_heads // q_heads
                score = k[:, kv_head] @ query[span.row + i, head].double() * scores.scale  # [seen]
                if scores.softcap is not None:
                    score = scores.softcap * torch.tanh(score / scores.softcap)
                if scores.sinks is not None:  # an extra score in the softmax's sum, with no value of its own
                    score = torch.cat([score, scores.sinks[head : head + 1].double()])
                weights = torch.softmax(score, 0)[: len(seen)]
                out[span.row + i, head] = weights @ v[:, kv_head]
    return out


def attend_latents(
    query: Tensor,
    latents: Tensor,
    rotary: Tensor,
    spans: Sequence[Span],
    scores: Scores,
    up: Tensor,
    family: TokenFamily = EVERYTHING,
) -> Tensor:
    """Attends like `attend`, but over latents, which are expanded to the K and V of every head.

    The expansion is the one that a model without a cache does.

    query    [tokens, q_heads, nope + rope]
    latents  [blocks, block_size, 1, rank], rotary [blocks, block_size, 1, rope]
    up       [q_heads, nope + value_dim, rank]
    returns  [tokens, q_heads, value_dim] float64
    """
    nope = query.shape[-1] - rotary.shape[-1]
    expanded = torch.einsum("hdr,bor->bohd", up.double(), latents[:, :, 0].double())
    keys = torch.cat([expanded[..., :nope], rotary.double().expand(-1, -1, len(up), -1)], -1)
    return attend(query, keys, expanded[..., nope:], spans, scores, family)


def first_seen(family: TokenFamily, position: int) -> int:
    """Returns the first position that the row at `position` attends to, by the definition of its family."""
    match family:
        case FullAttention():
            return 0
        case SlidingWindow(window=window):
            return max(0, position - window + 1)
        case ChunkedAttention(chunk=chunk):
            return position // chunk * chunk
        case _:
            assert_never(family)
