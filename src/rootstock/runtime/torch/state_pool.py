"""Recurrent states: slots of fixed size in the pool, and the cache of states that a mixer gets during one call.

A state is identified by its layer, its kind and its index within the layer. It has a row in each slot. Mixers change
their states in place, sometimes without a call to the cache. They therefore get copies, which are stored after the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from rootstock.cache.plan import StateCopy
from rootstock.cache.types import BlockIds
from rootstock.runtime.torch.lazy_rows import LazyRows
from rootstock.runtime.torch.module_parts import PartCache

_MOST_STATES = 8  # states of one kind in one layer

_CONV, _RECURRENT = "conv_states", "recurrent_states"  # transformers' names


class StateKey(NamedTuple):
    layer: int
    kind: str  # _CONV or _RECURRENT
    place: int  # index within the layer


@dataclass(frozen=True, slots=True)
class TorchStateShape:
    """State of one layer, as a probe of the model observed it."""

    key: StateKey
    shape: tuple[int, ...]  # of one sequence
    dtype: torch.dtype  # the mixer's
    stored: torch.dtype  # the pool's
    conv_kernel: int | None = None  # positions that the convolution reads

    @property
    def bytes_per_state(self) -> int:
        return self.stored.itemsize * torch.Size(self.shape).numel()

    def stored_as(self, dtype: torch.dtype) -> TorchStateShape:
        """Returns the shape with a narrower dtype in the pool, if it is a recurrent state. Convolution states keep
        the model's dtype."""
        narrower = self.key.kind == _RECURRENT and dtype.itemsize < self.dtype.itemsize
        return replace(self, stored=dtype) if narrower else self


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Memory of a layer's recurrent states, and the sequences of a step. Mixers change states in place."""

    conv: Tensor  # [slots, channels, kept] inputs of a short convolution
    recurrent: Tensor  # [slots, …]; `conv` itself where a layer has no other states
    sequences: Tensor  # [sequences, 4] int64: first row, new rows, slot, whether the slot has a state


class TorchStatePool:
    """Pool of `slots` rows of every state, [slots, …]. On a CPU memory is taken when a slot is first written."""

    def __init__(self, shapes: Sequence[TorchStateShape], slots: int, device: torch.device) -> None:
        self.slots = slots
        self.of_layer: dict[int, list[TorchStateShape]] = {}
        self._memory: dict[StateKey, LazyRows] = {}
        for shape in shapes:
            self.of_layer.setdefault(shape.key.layer, []).append(shape)
            self._memory[shape.key] = LazyRows((slots, *shape.shape), shape.stored, device)

    @property
    def memories(self) -> list[LazyRows]:
        """Returns the memories in the byte order of a state: by layer, kind and place."""
        return [self._memory[key] for key in sorted(self._memory)]

    @property
    def nbytes(self) -> int:
        return sum(memory.tensor.nbytes for memory in self._memory.values())

    def of_mixer(self, index: int, dtype: torch.dtype, sequences: Tensor) -> LayerStates | None:
        """Returns a layer's states as `FusedStep.states_of` does."""
        keys = [shape.key for shape in self.of_layer.get(index, ())]
        conv = [self._memory[key].tensor for key in keys if key.kind == _CONV]
        recurrent = [self._memory[key].tensor for key in keys if key.kind == _RECURRENT]
        recurrent = recurrent or conv
        if len(conv) != 1 or len(recurrent) != 1 or conv[0].dtype != dtype:
            return None
        if recurrent[0].dtype not in (torch.float32, torch.bfloat16):
            return None
        return LayerStates(conv[0], recurrent[0], sequences)

    def read(self, shape: TorchStateShape, slots: Tensor) -> Tensor:
        """Copies states [sequences, …] in the mixer's dtype."""
        return self._memory[shape.key].tensor.index_select(0, slots).to(shape.dtype)

    def write(self, shape: TorchStateShape, slots: Tensor, states: Tensor) -> None:
        memory = self._memory[shape.key].tensor
        memory.index_copy_(0, slots, states.to(memory.dtype))

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copies states in sequence."""
        for copy in copies:
            for memory in self._memory.values():
                memory.tensor[copy.target].copy_(memory.tensor[copy.source])

    def give_back(self, slots: BlockIds) -> None:
        for memory in self._memory.values():
            memory.give_back(slots)


class StateCache(PartCache):
    """Cache of some sequences' states during one call. `continues`: they have computed tokens before.

    Scratch memory is transformers' own layer of states, for which mixers are written.
    """

    def __init__(self, pool: TorchStatePool | None, slots: Tensor, *, continues: bool) -> None:
        """Takes slots [sequences] int64. Without a pool, states of any layer and shape are accepted and can be
        read."""
        super().__init__()
        self._pool = pool
        self._state_slots = slots
        self._continues = continues
        self.layers_touched: dict[int, LinearAttentionLayer] = {}
        self.layers = _LayersByIndex(self._touch)

    def keep(self) -> None:
        if self._pool is None:
            return
        for index, scratch in self.layers_touched.items():
            for shape in self._pool.of_layer.get(index, ()):
                state = getattr(scratch, shape.key.kind)[shape.key.place]
                if state is not None:  # a layer's states may belong to several modules
                    self._pool.write(shape, self._state_slots, state)
        self.layers_touched.clear()

    def _touch(self, layer_idx: int) -> LinearAttentionLayer:
        scratch = self.layers_touched.get(layer_idx)
        if scratch is None:
            scratch = self.layers_touched[layer_idx] = LinearAttentionLayer(number_of_states=_MOST_STATES)
            if self._pool is not None:
                for shape in self._pool.of_layer.get(layer_idx, ()):
                    self._fill(scratch, shape)
        return scratch

    def _fill(self, scratch: LinearAttentionLayer, shape: TorchStateShape) -> None:
        assert self._pool is not None
        _, kind, index = shape.key
        if kind == _CONV:
            scratch.conv_kernel_size[index] = shape.conv_kernel
        if self._continues:
            getattr(scratch, kind)[index] = self._pool.read(shape, self._state_slots)
            getattr(scratch, f"is_{kind}_initialized")[index] = True
            scratch.has_previous_state[index] = True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._continues

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._touch(layer_idx).conv_states[state_idx] if self._continues else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._touch(layer_idx).recurrent_states[state_idx] if self._continues else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        updated: Tensor = self._touch(layer_idx).update_conv_state(conv_states, state_idx, **options)
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        updated: Tensor = self._touch(layer_idx).update_recurrent_state(
            recurrent_states, state_idx, **options
        )
        return updated

    # Interface of linear attention that stores its state beside the cache's layers, under other names.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)


class _LayersByIndex(list[LinearAttentionLayer]):
    """The layers of a cache, empty unless one is asked for by its index.

    Mixers of transformers 5.17 read `cache.layers[i].conv_states`; later ones call `get_conv_state`.
    """

    def __init__(self, layer_at: Callable[[int], LinearAttentionLayer]) -> None:
        super().__init__()
        self._layer_at = layer_at

    def __getitem__(self, index: Any) -> Any:
        return self._layer_at(index)


def state_dtypes(shapes: Sequence[TorchStateShape]) -> list[torch.dtype]:
    """Returns the dtypes of the buffers of a state, in the order in which a pool of these shapes returns them."""
    return [shape.stored for shape in sorted(shapes, key=lambda shape: shape.key)]


def shapes_of(layer_idx: int, scratch: LinearAttentionLayer) -> list[TorchStateShape]:
    """Returns the shapes of the states that a call left in a layer's scratch memory."""
    shapes = []
    for kind in (_CONV, _RECURRENT):
        for index, state in getattr(scratch, kind).items():
            if state is not None:
                kernel = scratch.conv_kernel_size[index] if kind == _CONV else None
                key = StateKey(layer_idx, kind, index)
                shapes.append(TorchStateShape(key, tuple(state.shape[1:]), state.dtype, state.dtype, kernel))
    return shapes
