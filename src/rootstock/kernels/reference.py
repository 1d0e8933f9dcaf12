"""Paged attention as the textbook says it, one sequence, one head and one query at a time, in float64.

The oracle of every kernel's test, and slow on purpose: nothing here is clever enough to be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rootstock.kernels.scores import Scores
from rootstock.kernels.spans import Span


def attend(query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], scores: Scores) -> Tensor:
    """Each query attends the positions of its own sequence up to and including its own.

    query          [tokens, q_heads, head_dim]
    keys, values   [blocks, block_size, kv_heads, head_dim or value_dim]; hold the new positions already
    returns        [tokens, q_heads, value_dim] float64
    """
    tokens, q_heads, _ = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    out = torch.zeros(tokens, q_heads, value_dim, dtype=torch.float64)
    for span in spans:
        context = range(span.end)
        places = [(int(span.blocks[p // block_size]), p % block_size) for p in context]
        k = torch.stack(
            [keys[block, offset] for block, offset in places]
        ).double()  # [end, kv_heads, head_dim]
        v = torch.stack([values[block, offset] for block, offset in places]).double()
        for i in range(span.new):
            visible = span.past + i + 1
            for head in range(q_heads):
                kv_head = head * kv_heads // q_heads
                score = k[:visible, kv_head] @ query[span.row + i, head].double() * scores.scale  # [visible]
                if scores.softcap is not None:
                    score = scores.softcap * torch.tanh(score / scores.softcap)
                if scores.sinks is not None:  # one more thing to look at, which says nothing
                    score = torch.cat([score, scores.sinks[head : head + 1].double()])
                weights = torch.softmax(score, 0)[:visible]
                out[span.row + i, head] = weights @ v[:visible, kv_head]
    return out
