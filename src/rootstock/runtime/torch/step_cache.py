"""Cache objects that a model gets during a forward: for a packed step, and for a single sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock.cache.families import FullAttention
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.quantized_rows import select_rows
from rootstock.kernels.spans import Span, slots_of
from rootstock.kernels.torch.latent_attention import LatentStepAttention
from rootstock.runtime.base import Segment
from rootstock.runtime.torch.adapters.rows import TorchAdapterRows
from rootstock.runtime.torch.attention_backends import Kernel
from rootstock.runtime.torch.fusion.base import FusedStep
from rootstock.runtime.torch.hooks import AttentionCall, RowsWritten, expansion, mark
from rootstock.runtime.torch.images.both_directions import BothDirections, runs_of
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern
from rootstock.runtime.torch.kv_pool import LayerMemory, TorchPool
from rootstock.runtime.torch.module_parts import StepPart
from rootstock.runtime.torch.state_pool import LayerStates, StateCache


class PackedCache(FusedStep):
    """Cache of one packed step over the pool: writes new K and V to their slots, and marks them for attention."""

    _last: int | None = None  # layer behind whose K and V nothing is needed

    def __init__(
        self,
        pool: TorchPool,
        segments: Sequence[Segment],
        *,
        token_wise: bool = False,
        adapter_rows: TorchAdapterRows | None = None,
    ) -> None:
        """Plans the step. `token_wise`: mixers that continue a state get one new token at a time. `adapter_rows`: of
        a step with adapters."""
        super().__init__()
        self._adapter_rows = adapter_rows
        self._pool = pool
        self._segments = segments
        self._token_wise = token_wise
        self._spans = [_spans(segments, family) for family in range(max(1, len(pool.families)))]
        self._slots = [
            self._tensor(
                np.concatenate(
                    [slots_of(s.blocks, s.past, s.end, pool.block_size) for s in self._spans[family]]
                )
            )
            for family in range(len(pool.families))
        ]
        self._attention: dict[tuple[Kernel, int], Any] = {}  # StepAttention or LatentStepAttention
        self._runs = runs_of(segments) if any(segment.images for segment in segments) else []
        self._offsets: Tensor | None = None
        self._sequences: Tensor | None = None
        self._groups: list[tuple[Tensor, Tensor, bool]] | None = None
        self._alone: list[tuple[Tensor, Segment, Tensor]] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes key_states and value_states [1, kv_heads, tokens, …] to the pool. Returns both, marked."""
        memory = self._pool.layers[layer_idx]
        key, value = (states[0].transpose(0, 1) for states in (key_states, value_states))
        key, value = memory.write(self._slots[memory.family], key, value)
        self._end_at(layer_idx)
        layer = _PooledLayer(memory, self._prepared(memory), key, value)
        mark(key_states, value_states, layer)
        return key_states, value_states

    def memory_of(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        memory = self._pool.layers[index]
        keys, values = memory.keys, memory.values
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
            return None
        if keys.dtype != dtype or values.dtype != dtype:
            return None
        return keys, values, self._slots[memory.family]

    def states_of(self, index: int, dtype: torch.dtype) -> LayerStates | None:
        states = self._pool.states
        if states is None:
            return None
        if self._sequences is None:
            spans = zip(self._spans[0], self._segments, strict=True)
            self._sequences = torch.tensor(
                [(span.row, span.new, segment.state, int(span.past > 0)) for span, segment in spans]
            )
        return states.of_mixer(index, dtype, self._sequences)

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores, *, is_kept: bool
    ) -> Tensor:
        memory = self._pool.layers[index]
        if not is_kept:
            key, value = memory.write(self._slots[memory.family], key, value)
        self._end_at(index)
        attention: Any = self._prepared(memory)  # not for latents, which are never fused
        attended: Tensor = attention(query, key, value, memory.keys, memory.values, scores)
        return attended

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Returns 0 for the whole model, because positions are passed explicitly. A layer that asks for its own
        length adds the result to the row numbers 0, 1, 2, … to get positions. For such a layer, returns the
        difference [tokens] between each row's position and its number."""
        if layer_idx is None:
            return 0
        if self._offsets is None:
            spans = self._spans[0]
            self._offsets = self._tensor(
                np.concatenate([np.full(s.new, s.past - s.row, np.int64) for s in spans])
            )
        return self._offsets

    def previous_hidden(self, layer_idx: int, hidden: Tensor) -> Tensor | None:
        memory = self._pool.layers[layer_idx]
        assert memory.hidden is not None, "a layer of a draft head keeps hidden states"
        self._last = layer_idx
        before = self.kept_hidden(layer_idx)
        memory.hidden.index_copy_(0, self._slots[memory.family], hidden[0])
        previous = hidden.roll(1, 1)
        previous[0, self._tensor(np.array([span.row for span in self._spans[memory.family]]))] = before[0]
        return previous

    def _end_at(self, index: int) -> None:
        """Raises RowsWritten behind the K and V of the last layer that is needed."""
        if index == self._last:
            raise RowsWritten

    def kept_hidden(self, layer_idx: int) -> Tensor:
        """Returns the hidden states that are kept of the positions before each sequence's first row, [1, sequences,
        hidden]."""
        memory = self._pool.layers[layer_idx]
        assert memory.hidden is not None, "a layer of a draft head keeps hidden states"
        size, spans = self._pool.block_size, self._spans[memory.family]
        pasts = np.array([span.past for span in spans])
        last = [slots_of(s.blocks, s.past - 1, s.past, size)[0] if s.past else 0 for s in spans]
        kept = memory.hidden.index_select(0, self._tensor(np.array(last)))
        kept[self._tensor(np.flatnonzero(pasts == 0))] = 0
        return kept[None]

    def groups(self) -> Iterator[StepPart]:
        states = self._pool.states
        assert states is not None, "a mixer in a model without states"
        if self._groups is None:
            self._groups = self._grouped()
        for rows, slots, continues in self._groups:
            yield StepPart(rows, StateCache(states, slots, continues=continues), -1)

    def _grouped(self) -> list[tuple[Tensor, Tensor, bool]]:
        """Returns for each call of a mixer its rows [sequences, new], slots [sequences], and whether they have a
        state."""
        alike: dict[tuple[int, bool], list[int]] = {}
        for number, span in enumerate(self._spans[0]):
            alike.setdefault((span.new, span.past > 0), []).append(number)
        calls = []
        for (new, continues), numbers in alike.items():
            first = np.array([self._spans[0][number].row for number in numbers])
            rows = self._tensor(first[:, None] + np.arange(new))
            slots = self._tensor(np.array([self._segments[number].state for number in numbers]))
            one_by_one = continues and self._token_wise
            calls += [
                (some, slots, continues) for some in (torch.split(rows, 1, 1) if one_by_one else (rows,))
            ]
        return calls

    def sequences(self) -> Iterator[StepPart]:
        if self._alone is None:
            self._alone = [
                (
                    self._tensor(np.arange(span.row, span.row + span.new))[None],
                    segment,
                    context_slots(self._pool, segment),
                )
                for span, segment in zip(self._spans[0], self._segments, strict=True)
            ]
        for rows, segment, slots in self._alone:
            yield StepPart(rows, SequenceCache(self._pool, segment, slots), segment.past)
        if self._last is not None:  # this was the attention of the draft head's layer
            raise RowsWritten

    def within(self, part: StepPart) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._adapter_rows is None else self._adapter_rows.within(part)

    def _prepared(self, memory: LayerMemory) -> StepAttention | LatentStepAttention | BothDirections:
        """Prepares attention for a kernel and family when a layer first needs it."""
        alike = memory.kernel, memory.family
        prepared = self._attention.get(alike)
        if prepared is None:
            kernel = getattr(self._pool.kernels, memory.kernel)
            spans, family = self._spans[memory.family], self._pool.families[memory.family]
            prepared = kernel.prepare(spans, family)
            if self._runs:
                size, device = self._pool.block_size, self._pool.device
                prepared = BothDirections(prepared, self._runs, spans, family, size, device)
            self._attention[alike] = prepared
        found: StepAttention | LatentStepAttention | BothDirections = prepared
        return found

    def _tensor(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64, copy=False)).to(self._pool.device)


def _spans(segments: Sequence[Segment], family: int) -> list[Span]:
    spans, row = [], 0
    for segment in segments:
        new = len(segment.tokens)
        assert new > 0, "a segment without tokens"
        blocks = segment.tables[family] if segment.tables else np.empty(0, np.int32)
        spans.append(Span(row, new, segment.past, blocks))
        row += new
    return spans


@dataclass(slots=True, eq=False)
class _PooledLayer:
    memory: LayerMemory
    attention: StepAttention | LatentStepAttention | BothDirections
    key: Tensor  # [tokens, kv_heads, key_dim], equal to the pool's rows
    value: Tensor

    def attend(self, call: AttentionCall) -> Tensor:
        name = type(call.module).__name__
        assert isinstance(call.mask, MaskPattern), f"{name} has a mask that the probe did not see"
        memory = self.memory
        rows = call.query[0].transpose(0, 1)  # [tokens, q_heads, head_dim]
        # Latents are attended with the weight that expands them.
        up = {"up": expansion(call.module)} if memory.kernel == "latent" else {}
        attention: Any = self.attention  # latents are never quantized
        out: Tensor = attention(rows, self.key, self.value, memory.keys, memory.values, call.scores, **up)
        return out.unsqueeze(0)


def context_slots(pool: TorchPool, segment: Segment) -> Tensor:
    """Returns the slots [past + new] int64 of a sequence's positions in full-attention layers; empty if there are
    none."""
    slots = np.empty(0, np.int64)
    if pool.families and isinstance(pool.families[0], FullAttention):
        slots = slots_of(segment.tables[0], 0, segment.past + len(segment.tokens), pool.block_size)
    return torch.from_numpy(slots).to(pool.device)


class SequenceCache(StateCache):
    """Cache of a single sequence, for one module or for the whole model: returns all of its K and V, and its states.

    Its tensors carry no marks, so that they are not taken for tensors of a packed step.
    """

    def __init__(self, pool: TorchPool, segment: Segment, slots: Tensor) -> None:
        """Takes the slots [end] int64 of all positions, from `context_slots`."""
        state = torch.tensor([segment.state], device=pool.device)
        super().__init__(pool.states, state, continues=segment.past > 0)
        self._past = segment.past
        self._pages = pool
        self._slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes key_states and value_states [1, kv_heads, new, …]. Returns all K and V [1, kv_heads, end, …]."""
        memory = self._pages.layers[layer_idx]
        memory.write(self._slots[self._past :], *(t[0].transpose(0, 1) for t in (key_states, value_states)))
        keys, values = (
            select_rows(rows, self._slots).transpose(0, 1)[None] for rows in (memory.keys, memory.values)
        )
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Writes indexer keys [1, new, indexer_dim]. Returns all of them [1, end, indexer_dim]."""
        memory = self._pages.layers[layer_idx].indexer
        assert memory is not None, f"layer {layer_idx} has an indexer that the probe did not see"
        memory.index_copy_(0, self._slots[self._past :], indexer_key_states[0])
        return memory.index_select(0, self._slots)[None]

    def previous_hidden(self, layer_idx: int, hidden: Tensor) -> None:
        return None

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._past + query_length, 0
