"""Pools as torch tensors: K and V of every layer by slot, and the slots of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.families import Family, RecurrentState, TokenFamily, token_families
from rootstock.cache.plan import BlockCopy, HostBytes, Plan, RowPart, RowsReturned
from rootstock.kernels.quantized_rows import PoolRows, RoundedRows
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.torch.attention_backends import Compiled, Kernel, Kernels, kernel_of
from rootstock.runtime.torch.lazy_rows import LazyRows
from rootstock.runtime.torch.state_pool import TorchStatePool, TorchStateShape

if TYPE_CHECKING:
    from rootstock.kernels.cpu.kv_quantization import RoundingLoops

Kind = Literal[
    "plain",  # K and V reach attention as they were given to the cache
    "latent",  # latents of all heads together (MLA), attended with absorbed weights
    "alone",  # the module runs one sequence at a time, on dense K and V
]


@dataclass(frozen=True, slots=True)
class TorchLayerShape:
    """Tensors that one attention layer keeps of a position, as a probe of the model observed them."""

    index: int  # the layer's number in the model
    module: str  # class of the attention module
    kind: Kind
    family: int  # index into the model's token families
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    softcap: bool = False  # scores pass a tanh
    indexer_dim: int = 0  # of an additional key, by which the layer chooses positions to attend to
    indexer_dtype: torch.dtype = torch.float32
    hidden_dim: int = 0  # of the model's last hidden state, which a draft head's layer keeps
    is_quantized: bool = False  # K and V are quantized to int8, with a scale for each head

    @property
    def kept_dtype(self) -> torch.dtype:
        """Returns the dtype of K and V in the pool."""
        return torch.int8 if self.is_quantized else self.dtype

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of the tensors of one position: K, V, the scales of both if they are quantized, and
        the indexer's key and the hidden state if there are any."""
        kept: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((self.kv_heads, self.key_dim), self.kept_dtype),
            ((self.kv_heads, self.value_dim), self.kept_dtype),
        ]
        if self.is_quantized:
            kept += [((self.kv_heads,), torch.float32)] * 2
        if self.indexer_dim:
            kept.append(((self.indexer_dim,), self.indexer_dtype))
        return [*kept, ((self.hidden_dim,), self.dtype)] if self.hidden_dim else kept

    @property
    def bytes_per_token(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors)


class LayerMemory:
    """Rows of one layer in its family's pool, by slot.

    keys     [blocks · block_size, kv_heads, key_dim]; with latents the latents, [… , 1, rank]
    values   [blocks · block_size, kv_heads, value_dim]; with latents the rotary keys, [… , 1, rotary_dim]
    indexer  [blocks · block_size, indexer_dim] or None
    hidden   [blocks · block_size, hidden_dim] or None
    """

    __slots__ = ("family", "hidden", "indexer", "kernel", "keys", "lazy", "values")

    def __init__(
        self,
        shape: TorchLayerShape,
        kernel: Kernel,
        slots: int,
        device: torch.device,
        loops: RoundingLoops | None = None,
    ) -> None:
        """Uses `loops` to quantize and dequantize rows if the layer is quantized; without them it uses torch."""
        self.family = shape.family
        self.kernel: Kernel = kernel
        self.lazy = [LazyRows((slots, *kept), dtype, device) for kept, dtype in shape.tensors]
        self.keys: PoolRows = self.lazy[0].tensor
        self.values: PoolRows = self.lazy[1].tensor
        if shape.is_quantized:
            self.keys = RoundedRows(self.keys, self.lazy[2].tensor, shape.dtype, loops)
            self.values = RoundedRows(self.values, self.lazy[3].tensor, shape.dtype, loops)
        beside = [memory.tensor for memory in self.lazy[4 if shape.is_quantized else 2 :]]
        self.indexer = beside[0] if shape.indexer_dim else None
        self.hidden = beside[-1] if shape.hidden_dim else None

    @property
    def tensors(self) -> list[Tensor]:
        return [memory.tensor for memory in self.lazy]

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [tokens, kv_heads, …] to slots [tokens] int64. Returns both as the pool holds them.

        The step attends to the returned rows. The result then does not depend on how a prompt is cut into steps.
        """
        return self._written(self.keys, slots, key), self._written(self.values, slots, value)

    @staticmethod
    def _written(kept: PoolRows, slots: Tensor, rows: Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            kept.index_copy_(0, slots, rows)
            return rows
        return kept.write(slots, rows)


class TorchPool:
    """Pools of all families: blocks of `block_size` positions in a family's layers, or slots of states.

    Owned by one thread. Raises InvalidOption if the device has too little memory.
    """

    def __init__(
        self,
        families: Sequence[Family],
        layers: Sequence[TorchLayerShape],
        states: Sequence[TorchStateShape],
        rows: Sequence[int],
        block_size: int,
        device: torch.device,
        tuning: Tuning | None = None,
        compiled: Compiled | None = None,
    ) -> None:
        assert len(rows) == len(families)
        assert block_size > 0
        self.block_size = block_size
        self.device = device
        self.families: tuple[TokenFamily, ...] = token_families(families)
        blocks = [
            n for n, family in zip(rows, families, strict=True) if not isinstance(family, RecurrentState)
        ]
        self.kernels = Kernels(layers, block_size, device, tuning, compiled)
        self.layers = {
            shape.index: LayerMemory(
                shape,
                kernel_of(shape, device, compiled),
                blocks[shape.family] * block_size,
                device,
                _loops_for(shape) if compiled == "numba" else None,
            )
            for shape in layers
        }
        slots = [n for n, family in zip(rows, families, strict=True) if isinstance(family, RecurrentState)]
        self.states = TorchStatePool(states, slots[0], device) if slots else None
        # For each family, memories in the byte order of a row: by the layer's number, then as in
        # `TorchLayerShape.tensors`.
        self._memories = [
            [
                memory
                for _, layer in sorted(self.layers.items())
                if layer.family == number
                for memory in layer.lazy
            ]
            for number in range(len(self.families))
        ]
        if self.states is not None:
            self._memories.append(self.states.memories)  # the state family comes after those with blocks
        self._in_host_memory = device.type == "cpu"

    def apply(self, plan: Plan) -> None:
        for returned in plan.returned:
            self._give_back(returned)
        for family in range(len(self.families)):
            self._copy([copy for copy in plan.copies if copy.family == family])
        if plan.states:
            assert self.states is not None, "the model has no recurrent states"
            self.states.copy(plan.states)

    def read(self, part: RowPart) -> list[HostBytes]:
        """Copies a row to the host, in one allocation, of which the buffers are views."""
        first, end = self._rows(part)
        memories = self._memories[part.family]
        if self._in_host_memory:
            joined = np.concatenate([memory.host_bytes(first, end) for memory in memories])
        else:
            # Joined on the device, because one transfer costs less than many small ones.
            joined = torch.cat([memory.device_bytes(first, end) for memory in memories]).cpu().numpy()
        return self._divided(joined, part)

    def buffers(self, part: RowPart) -> list[HostBytes]:
        """Returns the row's own memory on a CPU; otherwise new staging memory on the host, pinned for CUDA."""
        first, end = self._rows(part)
        if self._in_host_memory:
            return [memory.host_bytes(first, end) for memory in self._memories[part.family]]
        total = sum((end - first) * memory.row_bytes for memory in self._memories[part.family])
        staging = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self._divided(staging.numpy(), part)

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        """Copies filled buffers to the row. Afterwards they may be dropped or reused."""
        if self._in_host_memory:
            return
        first, end = self._rows(part)
        for memory, buffer in zip(self._memories[part.family], buffers, strict=True):
            memory.device_bytes(first, end).copy_(torch.from_numpy(buffer))

    def _rows(self, part: RowPart) -> tuple[int, int]:
        """Returns (first, end), the rows of the tensors: the slots of a block, or one state."""
        row = int(part.row)  # block tables hold int32, in which byte offsets would overflow
        if part.family == len(self.families):
            assert part.tokens == 0, "a state is whole"
            return row, row + 1
        assert 0 < part.tokens <= self.block_size
        first = row * self.block_size
        return first, first + part.tokens

    def _divided(self, joined: HostBytes, part: RowPart) -> list[HostBytes]:
        """Returns views of `joined`, one for each memory."""
        first, end = self._rows(part)
        buffers, offset = [], 0
        for memory in self._memories[part.family]:
            length = (end - first) * memory.row_bytes
            buffers.append(joined[offset : offset + length])
            offset += length
        return buffers

    def _give_back(self, returned: RowsReturned) -> None:
        if returned.family == len(self.families):  # the state family comes after those with blocks
            assert self.states is not None
            self.states.give_back(returned.rows)
            return
        for layer in self.layers.values():
            if layer.family == returned.family:
                for memory in layer.lazy:
                    memory.give_back(returned.rows, self.block_size)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks of one family, with the result of copying in sequence: a target may be a later copy's
        source."""
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
            ).to(self.device)
            for rows in ([(c.source, c.tokens) for c in copies], [(c.target, c.tokens) for c in copies])
        )
        for layer in self.layers.values():
            if layer.family == copies[0].family:
                for memory in layer.tensors:
                    memory.index_copy_(0, targets, memory.index_select(0, sources))


def _loops_for(shape: TorchLayerShape) -> RoundingLoops | None:
    if not shape.is_quantized:
        return None
    from rootstock.kernels.cpu.kv_quantization import DTYPES, RoundingLoops  # numba may not be installed

    return RoundingLoops(shape.dtype) if shape.dtype in DTYPES else None


def block_dtypes(layers: Sequence[TorchLayerShape], family: int) -> list[torch.dtype]:
    """Returns the dtypes of the buffers of a block, in the order in which a pool of these layers returns them."""
    return [
        dtype
        for layer in sorted(layers, key=lambda layer: layer.index)
        if layer.family == family
        for _, dtype in layer.tensors
    ]
