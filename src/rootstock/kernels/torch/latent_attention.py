"""Attention over cached latents (MLA): K and V of all heads stay the one small vector that they are made of.

A position keeps a latent c [rank] and a rotary key r [rope]; head h's key is (N_h c, r) and its value V_h c, with
N_h and V_h from the weight that a model would expand latents with. Since q·(N_h c) = (N_hᵀ q)·c, the query takes N_h
in, and V_h is applied to the weighted sum of latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). What remains is
attention with a single KV head whose keys are (c, r) and whose values are c. Values are read as (c, r) as well, and
the end of the result is dropped: so keys and values are the same memory, staged and read once.

For chunks of more than about 256 rows it would be up to 1.5 times as fast to expand the latents, slice by slice
(measured with ranks of 256 and 512, 16 and 40 heads, one thread). At 16 rows it is 5 to 8 times as fast this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.api import Attention, Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.sliced_attention import Slice, SlicedAttention, Tuning, stage_into


class LatentStepAttention(Protocol):
    """Latent attention of one packed step: made once, called by every layer whose positions lie in the same slots."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Scores,
        up: Tensor,
    ) -> Tensor:
        """Attention of each row over what its family sees of its own sequence.

        query    [tokens, q_heads, nope + rope], its rotary part last and rotated
        key      [tokens, 1, rank] the latents of the new positions: what the pool holds in their slots
        value    [tokens, 1, rope] their rotary keys
        keys     [blocks · block_size, 1, rank] the layer's pool, by slot
        values   [blocks · block_size, 1, rope]
        scores   on a CPU without softcap
        up       [q_heads, nope + value_dim, rank] the weight that expands latents, by head
        returns  [tokens, q_heads, value_dim] in the query's dtype
        """
        ...


class LatentAttention:
    """For any device. It keeps scratch memory from step to step, so one thread uses it.

    `position_bytes` is what the widest layer keeps per position: it tells how many positions make a slice, on a CPU.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        position_bytes: int = (512 + 64) * 2,  # most models' rank and rope, in bfloat16
        tuning: Tuning | None = None,
        attention: Attention | None = None,
    ) -> None:
        """`attention`: with a single KV head whose keys are latents and rotary keys, and whose values are latents."""
        self._attention: Attention = attention or (
            paged_latents(block_size, position_bytes, tuning)
            if device.type == "cpu"
            else GatherAttention(block_size, device, gather=gather_latents)
        )

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> LatentStepAttention:
        """Everything about a step that does not depend on the layer: see `Attention.prepare`."""
        return _LatentStep(self._attention.prepare(spans, family))


def paged_latents(block_size: int, position_bytes: int, tuning: Tuning | None) -> SlicedAttention:
    """For CPUs: slices in which latents and rotary keys lie side by side."""
    return SlicedAttention(block_size, position_bytes, tuning, _LatentScratch().stage)


class _LatentStep:
    def __init__(self, step: StepAttention) -> None:
        self._step = step

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Scores,
        up: Tensor,
    ) -> Tensor:
        rank, nope = keys.shape[-1], query.shape[-1] - values.shape[-1]
        assert up.shape[0] == query.shape[1]
        assert up.shape[2] == rank
        # [q_heads, tokens, nope] @ [q_heads, nope, rank], and likewise below
        absorbed = (query[..., :nope].transpose(0, 1) @ up[:, :nope]).transpose(0, 1)
        new = torch.cat([key, value], -1)  # [tokens, 1, rank + rope]
        out = self._step(torch.cat([absorbed, query[..., nope:]], -1), new, new, keys, values, scores)
        return (out[..., :rank].transpose(0, 1) @ up[:, nope:].transpose(1, 2)).transpose(0, 1)


class _LatentScratch:
    """Memory that slices of latents and rotary keys are staged in side by side, for each shape of layers."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def stage(self, keys: PoolRows, values: PoolRows, part: Slice) -> tuple[Tensor, Tensor]:
        """keys [slots, 1, rank], values [slots, 1, rope] → twice [1, 1, tokens, rank + rope]

        Valid until the next call.
        """
        assert isinstance(keys, Tensor), "latents are not rounded"
        rank, rope = keys.shape[-1], values.shape[-1]
        of_this_shape = (rank, rope, keys.dtype)
        scratch = self._scratch.get(of_this_shape)
        if scratch is None or len(scratch) < part.tokens:
            scratch = self._scratch[of_this_shape] = keys.new_empty(part.tokens, 1, rank + rope)
        staged = scratch[: part.tokens]
        stage_into(keys, part, staged[..., :rank])
        stage_into(values, part, staged[..., rank:])
        staged = staged.transpose(0, 1)[None]
        return staged, staged


def gather_latents(keys: PoolRows, values: PoolRows, slots: Tensor) -> tuple[Tensor, Tensor]:
    """keys [slots, 1, rank], values [slots, 1, rope], slots [tokens] int64 → twice [tokens, 1, rank + rope]"""
    assert isinstance(keys, Tensor), "latents are not rounded"
    assert isinstance(values, Tensor)
    staged = torch.cat([keys.index_select(0, slots), values.index_select(0, slots)], -1)
    return staged, staged
