"""Attention over cached latents (MLA). The latent is not expanded to the K and V of all heads.

A position keeps a latent c [rank] and a rotary key r [rope]. Head h's key is (N_h c, r) and its value is V_h c, with
N_h and V_h from the weight by which a model expands latents. Since q·(N_h c) = (N_hᵀ q)·c, the query absorbs N_h, and
V_h is applied to the weighted sum of latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The result is attention
with a single KV head whose keys are (c, r) and whose values are c. Values are read as (c, r) too, and the last `rope`
numbers of the result are dropped. Keys and values are then the same memory, staged and read once.

For chunks of more than about 256 rows, expanding the latents slice by slice would be up to 1.5 times as fast
(measured with ranks of 256 and 512, 16 and 40 heads, one thread). At 16 rows this way is 5 to 8 times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.api import Attention, Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.sliced_attention import Slice, SlicedAttention, Tuning, stage_into


class LatentAttention:
    """Latent attention backend for any device. It keeps scratch memory between steps, so only one thread may use it.

    `position_bytes`: bytes per position of the widest layer. On a CPU it determines the positions of a slice.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        position_bytes: int = (512 + 64) * 2,  # rank and rope of most models, in bfloat16
        tuning: Tuning | None = None,
        attention: Attention | None = None,
    ) -> None:
        """Uses `attention`, if given: a backend for one KV head with keys (latent, rotary key) and latents as
        values."""
        self._attention: Attention = attention or (
            sliced_latents(block_size, position_bytes, tuning)
            if device.type == "cpu"
            else GatherAttention(block_size, device, gather=gather_latents)
        )

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> LatentStepAttention:
        """Prepares everything about a step that does not depend on the layer: see `Attention.prepare`."""
        return LatentStepAttention(self._attention.prepare(spans, family))


def sliced_latents(block_size: int, position_bytes: int, tuning: Tuning | None) -> SlicedAttention:
    """Builds the CPU backend: slices in which latents and rotary keys lie side by side."""
    return SlicedAttention(block_size, position_bytes, tuning, _LatentScratch().stage)


class LatentStepAttention:
    """Latent attention of one packed step. It is prepared once and called by every layer of the same family."""

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
        """Computes attention of each row over the positions of its own sequence that its family sees.

        query    [tokens, q_heads, nope + rope], its rotary part last and rotated
        key      [tokens, 1, rank] latents of the new positions, equal to the pool's rows in their slots
        value    [tokens, 1, rope] rotary keys of the new positions
        keys     [blocks · block_size, 1, rank] the layer's pool, by slot
        values   [blocks · block_size, 1, rope]
        scores   on a CPU without softcap
        up       [q_heads, nope + value_dim, rank] the weight that expands latents, by head
        returns  [tokens, q_heads, value_dim] in the query's dtype
        """
        rank, nope = keys.shape[-1], query.shape[-1] - values.shape[-1]
        assert up.shape[0] == query.shape[1]
        assert up.shape[2] == rank
        # [q_heads, tokens, nope] @ [q_heads, nope, rank], and likewise below
        absorbed = (query[..., :nope].transpose(0, 1) @ up[:, :nope]).transpose(0, 1)
        new = torch.cat([key, value], -1)  # [tokens, 1, rank + rope]
        out = self._step(torch.cat([absorbed, query[..., nope:]], -1), new, new, keys, values, scores)
        return (out[..., :rank].transpose(0, 1) @ up[:, nope:].transpose(1, 2)).transpose(0, 1)


class _LatentScratch:
    """Scratch memory in which slices of latents and rotary keys lie side by side, for each shape of layers."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def stage(self, keys: PoolRows, values: PoolRows, part: Slice) -> tuple[Tensor, Tensor]:
        """Stages a slice of keys [slots, 1, rank] and values [slots, 1, rope]. Returns [1, 1, tokens, rank + rope]
        twice.

        The result is valid until the next call.
        """
        assert isinstance(keys, Tensor), "latents are not quantized"
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
    """Gathers the `slots` [tokens] int64 of keys [slots, 1, rank] and values [slots, 1, rope]. Returns [tokens, 1,
    rank + rope] twice."""
    assert isinstance(keys, Tensor), "latents are not quantized"
    assert isinstance(values, Tensor)
    staged = torch.cat([keys.index_select(0, slots), values.index_select(0, slots)], -1)
    return staged, staged
