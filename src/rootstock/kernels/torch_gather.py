"""Attention that gathers each sequence's context and lets torch attend to it: any device, any shape, any score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.scores import Scores, StepAttention
from rootstock.kernels.spans import Span, slots_of


class GatherAttention:
    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def prepare(self, spans: Sequence[Span]) -> StepAttention:
        return _GatherStep([self._gathered(span) for span in spans])

    def _gathered(self, span: Span) -> _Gathered:
        slots = torch.from_numpy(slots_of(span.blocks, 0, span.end, self._block_size)).to(self._device)
        mask = None
        if span.past and span.new > 1:
            square = torch.ones(span.new, span.end, dtype=torch.bool, device=self._device)
            mask = square.tril(diagonal=span.past)
        return _Gathered(span, slots, mask)


@dataclass(frozen=True, slots=True)
class _Gathered:
    span: Span
    slots: Tensor  # [end] int64
    mask: Tensor | None  # [new, end]; None: all positions, or plainly causal


class _GatherStep:
    def __init__(self, parts: list[_Gathered]) -> None:
        self._parts = parts

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> Tensor:
        out = [self._attend(part, query, keys, values, scores) for part in self._parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    @staticmethod
    def _attend(part: _Gathered, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """[new, q_heads, value_dim]"""
        span = part.span
        q = query[span.row : span.row + span.new].transpose(0, 1)  # [q_heads, new, head_dim]
        k = keys.index_select(0, part.slots).transpose(0, 1)  # [kv_heads, end, head_dim]
        v = values.index_select(0, part.slots).transpose(0, 1)
        if scores.softcap is not None or scores.sinks is not None:
            return attend_dense(q, k, v, span.past, scores).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=part.mask,
            is_causal=part.mask is None and span.new > 1,
            scale=scores.scale,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        return out[0].transpose(0, 1)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, past: int, scores: Scores) -> Tensor:
    """Every kind of score, on one sequence's dense K and V; weights are computed in float32 or better.

    query [q_heads, new, head_dim], key [kv_heads, end, head_dim], value [kv_heads, end, value_dim]
    → [q_heads, new, value_dim] in the query's dtype
    """
    q_heads, new, head_dim = query.shape
    kv_heads, end, _ = key.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    q = query.to(precise).reshape(kv_heads, q_heads // kv_heads * new, head_dim)
    score = (q @ key.to(precise).transpose(1, 2)).view(q_heads, new, end) * scores.scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    hidden = torch.ones(new, end, dtype=torch.bool, device=query.device).triu(diagonal=past + 1)
    score = score.masked_fill(hidden, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.to(precise).view(q_heads, 1, 1).expand(q_heads, new, 1)
        weights = torch.softmax(torch.cat([score, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(score, -1)
    out = weights.reshape(kv_heads, -1, end) @ value.to(precise)
    return out.view(q_heads, new, -1).to(query.dtype)
