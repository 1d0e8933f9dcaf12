"""The pool as torch tensors: K and V of every attention layer, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.plan import BlockCopy
from rootstock.errors import InvalidOption
from rootstock.kernels.scores import Attention
from rootstock.kernels.torch_gather import GatherAttention
from rootstock.kernels.torch_paged import PagedAttention, Tuning


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's K and V of one position, as a probe of the model saw them."""

    index: int  # the layer's number in the model
    module: str  # class of the attention module
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    softcap: bool  # scores pass a tanh

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class LayerMemory:
    """One layer's rows of the pool, [blocks · block_size, kv_heads, key_dim | value_dim], by slot."""

    __slots__ = ("kernel", "keys", "values")

    def __init__(self, keys: Tensor, values: Tensor, kernel: int) -> None:
        self.keys = keys
        self.values = values
        self.kernel = kernel  # which of the pool's kernels attends it

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """slots [tokens] int64, key and value [tokens, kv_heads, …]"""
        self.keys.index_copy_(0, slots, key)
        self.values.index_copy_(0, slots, value)


class TorchPool:
    """`blocks` rows of `block_size` positions, in every layer. Owned by one thread.

    The memory is zeroed lazily by the system, so a pool costs what was written to it. Raises InvalidOption if the
    device has not that much.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        blocks: int,
        block_size: int,
        device: torch.device,
        tuning: Tuning | None = None,
    ) -> None:
        assert blocks > 0
        assert block_size > 0
        self.blocks = blocks
        self.block_size = block_size
        self._device = device
        self.kernels: list[Attention] = []
        paged = [device.type == "cpu" and _fits_flash(shape) for shape in shapes]
        if any(paged):
            position_bytes = max(shape.kv_heads * shape.key_dim * shape.dtype.itemsize for shape in shapes)
            self.kernels.append(PagedAttention(block_size, position_bytes, tuning))
        if not all(paged):
            self.kernels.append(GatherAttention(block_size, device))
        slots = blocks * block_size
        try:
            self.layers = {
                shape.index: LayerMemory(
                    torch.zeros(slots, shape.kv_heads, shape.key_dim, dtype=shape.dtype, device=device),
                    torch.zeros(slots, shape.kv_heads, shape.value_dim, dtype=shape.dtype, device=device),
                    kernel=0 if fits else len(self.kernels) - 1,
                )
                for shape, fits in zip(shapes, paged, strict=True)
            }
        except (RuntimeError, MemoryError) as error:  # torch's own OutOfMemoryError is a RuntimeError
            wanted = slots * sum(shape.bytes_per_token for shape in shapes)
            raise InvalidOption("--kv-budget", wanted, f"what {device} has free") from error

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """As if one after the other: a block that was just written may be the source of the next copy."""
        together: list[BlockCopy] = []
        for copy in copies:
            if any(copy.source == earlier.target for earlier in together):
                self._copy_at_once(together)
                together = []
            together.append(copy)
        if together:
            self._copy_at_once(together)

    def _copy_at_once(self, copies: Sequence[BlockCopy]) -> None:
        sources, targets = (
            torch.from_numpy(
                np.concatenate(
                    [np.arange(block * self.block_size, block * self.block_size + n) for block, n in rows]
                )
            ).to(self._device)
            for rows in ([(c.source, c.tokens) for c in copies], [(c.target, c.tokens) for c in copies])
        )
        for layer in self.layers.values():
            for memory in (layer.keys, layer.values):
                memory.index_copy_(0, targets, memory.index_select(0, sources))


def _fits_flash(shape: LayerShape) -> bool:
    """Whether torch's flash attention for CPUs can do this layer."""
    return shape.key_dim == shape.value_dim and not shape.softcap
