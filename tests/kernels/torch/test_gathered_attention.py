"""Attention on dense K and V, with any mask and any bias, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock.kernels.api import Scores
from rootstock.kernels.torch import gathered_attention
from rootstock.kernels.torch.gathered_attention import attend_dense

NEW, PAST, END = 5, 7, 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def defined(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor, bias: Tensor | float
) -> Tensor:
    """mask [q_heads, new, end] bool, bias likewise"""
    group = query.shape[0] // key.shape[0]
    q, k, v = (
        t.double() for t in (query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0))
    )
    score = q @ k.transpose(1, 2) * scores.scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    weights = torch.where(mask, torch.exp(score + bias), 0.0)
    total = weights.sum(-1, keepdim=True)
    if scores.sinks is not None:
        total = total + torch.exp(scores.sinks.double()).view(-1, 1, 1)
    return torch.where(total > 0, weights @ v / total, 0.0)


@pytest.mark.parametrize("most_scores", [1, 100, 1 << 24])  # a row at a time, two, all
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("mask_heads", [None, 0, 4])  # causal, of all heads alike, of each head
@pytest.mark.parametrize("bias_heads", [None, 1, 4])
def test_dense_attention_equals_its_definition(
    softcap: float | None,
    with_sinks: bool,
    mask_heads: int | None,
    bias_heads: int | None,
    most_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered_attention, "_MOST_SCORES", most_scores)
    query, key, value = drawn(4, NEW, 8), drawn(2, END, 8, seed=1), drawn(2, END, 6, seed=2)
    scores = Scores(0.7, softcap, drawn(4, seed=3) if with_sinks else None)
    mask = None
    if mask_heads is not None:
        mask = drawn(*[mask_heads] * bool(mask_heads), NEW, END, seed=4) > 0
        mask[..., 2, :] = False  # a row that sees nothing
    bias = None if bias_heads is None else drawn(bias_heads, NEW, END, seed=5)
    out = attend_dense(query, key, value, PAST, scores, mask, bias)
    causal = torch.arange(END) <= PAST + torch.arange(NEW)[:, None]
    expected = defined(
        query,
        key,
        value,
        scores,
        (causal if mask is None else mask).expand(4, NEW, END),
        0.0 if bias is None else bias.double(),
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
