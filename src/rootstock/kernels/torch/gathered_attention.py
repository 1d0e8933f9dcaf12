"""Attention backend that gathers each sequence's visible K/V for torch's attention: any device, shape and score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows, select_rows
from rootstock.kernels.spans import EVERYTHING, Span, slots_of

_MOST_SCORES = 1 << 24  # 64 MiB of scores in float32

Gather = Callable[[PoolRows, PoolRows, Tensor], tuple[Tensor, Tensor]]


def gather(keys: PoolRows, values: PoolRows, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copies the `slots` [tokens] int64 of keys and values [slots, kv_heads, …] to [tokens, kv_heads, …]."""
    return select_rows(keys, slots), select_rows(values, slots)


class GatherAttention:
    """Attention backend that gathers. `most_scores`: the most scores, over all heads, that are in memory at once."""

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        most_scores: int = _MOST_SCORES,
        gather: Gather = gather,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._most_scores = most_scores
        self._gather = gather

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        return _GatherStep([self._gathered(span, family) for span in spans], self._most_scores, self._gather)

    def _gathered(self, span: Span, family: TokenFamily) -> _Gathered:
        starts = [family.first_visible(position) for position in range(span.past, span.end)]
        slots = torch.from_numpy(slots_of(span.blocks, starts[0], span.end, self._block_size))
        return _Gathered(span, starts, torch.tensor(starts, device=self._device), slots.to(self._device))


@dataclass(frozen=True, slots=True)
class _Gathered:
    span: Span
    starts: list[int]  # [new] the first position that each row sees; never decreases
    starts_there: Tensor  # [new] int64, the same on the device
    slots: Tensor  # [end - starts[0]] int64, the positions that any row sees

    def mask(self, rows: slice) -> Tensor:
        """Returns a mask [rows, starts[rows.start] … past + rows.stop - 1] bool: true where a row sees a position."""
        past, device = self.span.past, self.slots.device
        positions = torch.arange(self.starts[rows.start], past + rows.stop, device=device)
        own = torch.arange(past + rows.start, past + rows.stop, device=device)
        return (positions >= self.starts_there[rows, None]) & (positions <= own[:, None])


class _GatherStep:
    def __init__(self, parts: list[_Gathered], most_scores: int, gather: Gather) -> None:
        self._parts = parts
        self._most_scores = most_scores
        self._gather = gather

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        out = [rows for part in self._parts for rows in self._attend(part, query, keys, values, scores)]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend(
        self, part: _Gathered, query: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Iterator[Tensor]:
        """Yields the outputs [rows, q_heads, value_dim] of the new rows in order, some rows at a time."""
        span, first = part.span, part.starts[0]
        q = query[span.row : span.row + span.new].transpose(0, 1)  # [q_heads, new, head_dim]
        # [kv_heads, end - first, …]
        k, v = (gathered.transpose(0, 1) for gathered in self._gather(keys, values, part.slots))
        plain = scores.softcap is None and scores.sinks is None
        if plain and first == span.past == part.starts[-1] and k.shape[-1] == v.shape[-1]:
            # The rows see only each other, causally: torch needs neither a mask nor memory for the scores.
            yield _attend_plainly(q, k, v, None, span.new > 1, scores.scale).transpose(0, 1)
            return
        at_once = max(1, self._most_scores // (q.shape[0] * k.shape[1]))
        for begin in range(0, span.new, at_once):
            rows = slice(begin, min(begin + at_once, span.new))
            seen = slice(part.starts[begin] - first, span.past + rows.stop - first)
            mask = None if rows.stop - begin == 1 else part.mask(rows)
            if plain:
                out = _attend_plainly(q[:, rows], k[:, seen], v[:, seen], mask, False, scores.scale)
            else:
                out = attend_dense(
                    q[:, rows], k[:, seen], v[:, seen], seen.stop - seen.start - 1, scores, mask
                )
            yield out.transpose(0, 1)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    out = F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out[0]


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: int,
    scores: Scores,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attends one sequence's dense K and V with every kind of score. Weights are computed in float32 or better.

    It computes some rows at a time, so that a long chunk over a long context needs no more memory for scores.

    query [q_heads, new, head_dim], key [kv_heads, end, head_dim], value [kv_heads, end, value_dim]
    mask  [new, end] or [q_heads, new, end] bool, true where a row sees a position; None: row i sees 0 … past + i.
          A row that sees no position gets zeros.
    bias  [q_heads or 1, new, end], added to the scores after the softcap
    returns [q_heads, new, value_dim] in the query's dtype
    """
    q_heads, new, _ = query.shape
    end = key.shape[1]
    at_once = max(1, _MOST_SCORES // (q_heads * end))
    key, value = (t.to(torch.promote_types(query.dtype, torch.float32)) for t in (key, value))
    out = []
    for begin in range(0, new, at_once):
        rows = slice(begin, min(begin + at_once, new))
        if mask is None:
            causal = torch.ones(rows.stop - begin, end, dtype=torch.bool, device=query.device)
            seen = causal.tril(diagonal=past + begin)
        else:
            seen = mask[..., rows, :]
        more = None if bias is None else bias[..., rows, :]
        out.append(_attend_rows(query[:, rows], key, value, scores, seen, more))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor, bias: Tensor | None
) -> Tensor:
    """Attends all rows given, like `attend_dense`. Key and value have the dtype of the weights."""
    q_heads, new, head_dim = query.shape
    kv_heads, end, _ = key.shape
    q = query.to(key.dtype).reshape(kv_heads, q_heads // kv_heads * new, head_dim)
    score = (q @ key.transpose(1, 2)).view(q_heads, new, end) * scores.scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~mask, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.to(key.dtype).view(q_heads, 1, 1).expand(q_heads, new, 1)
        weights = torch.softmax(torch.cat([score, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(score, -1)
        weights = weights.masked_fill(~mask, 0.0)  # softmax over no position is NaN
    out = weights.reshape(kv_heads, -1, end) @ value
    return out.view(q_heads, new, -1).to(query.dtype)
