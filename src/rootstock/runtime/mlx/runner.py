"""Runtime for mlx-lm models on the paged pools.

A step's segments become few calls of the model. The rows of a prompt that need no logits have a call of their own,
whose logits are never computed. The rows of decodes and drafts, and the last one of each prompt, share a call: a
model without recurrent states takes sequences with unequally many rows, padded at the end.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_cache
from numpy.typing import NDArray

from rootstock.cache.families import RecurrentState, token_families
from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.errors import PoolsLost
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, ModelDescription, Segment
from rootstock.runtime.mlx.adapters import MlxAdapters
from rootstock.runtime.mlx.attention import PoolAttention, attention_on_pools
from rootstock.runtime.mlx.kv_pool import EvaluationFailed, KVPool, evaluate
from rootstock.runtime.mlx.memory import free_bytes
from rootstock.runtime.mlx.rows import FamilyRows
from rootstock.runtime.mlx.stand_ins import GivenArrays, StandIn, UnusedCache
from rootstock.runtime.mlx.state_pool import MlxStatePool, States
from rootstock.runtime.mlx.survey import CachePath, MlxLayout, replaced

T = TypeVar("T")

# Most rows, with padding, of a call that pads sequences to equally many. Up to about as many rows, a GPU's time goes
# into reading the weights, which a second call would read again.
_PADDED_ROWS = 32


@dataclass(frozen=True, slots=True)
class MlxExecution:
    """Model and its execution mode, which is the description's."""

    layout: MlxLayout
    description: ModelDescription
    kernel: PagedKernel | None = None  # None: attention on views and gathers of the pools
    # Whether a mask of several sequences has a dimension more, [sequences, 1, 1, new, width], for a model that keeps
    # the query heads of each KV head together in its scores.
    grouped_masks: bool = False


@dataclass(slots=True)
class RuntimeStats:
    calls: int = 0  # of the model
    attentions_on_pools: int = 0
    attentions_by_kernel: int = 0


class MlxRuntime:
    """Runtime of one model and its pools. Made by `load_model`, owned by one thread."""

    def __init__(self, model: nn.Module, served: MlxExecution, adapters: MlxAdapters | None = None) -> None:
        self._model = model
        self._adapters = adapters
        self._served = served
        self._layout = served.layout
        self._families = token_families(served.layout.families)
        self._caches = mlx_cache.make_prompt_cache(model)  # only their places matter
        self._device = mx.default_device()
        self._pool: KVPool | None = None
        self._states: MlxStatePool | None = None
        self._attention: PoolAttention | None = None
        self._calls = 0
        self._is_lost = False  # the pools' contents are not known, and they could not be recreated

    images = None
    draft_heads = None

    @property
    def description(self) -> ModelDescription:
        return self._served.description

    @property
    def stats(self) -> RuntimeStats:
        attention = self._attention
        return RuntimeStats(
            self._calls,
            0 if attention is None else attention.counters.on_pools,
            0 if attention is None else attention.counters.by_kernel,
        )

    def free_bytes(self) -> int:
        return free_bytes()

    @property
    def pool_copies(self) -> int | None:
        return 0 if self._pool is None else self._pool.copies_seen

    def release_unused(self) -> None:
        mx.clear_cache()

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        assert self._pool is None, "the pools are made once"
        layout, of_family = self._layout, list(zip(rows, self._layout.families, strict=True))
        blocks = [n for n, family in of_family if not isinstance(family, RecurrentState)]
        slots = [n for n, family in of_family if isinstance(family, RecurrentState)]
        with mx.stream(self._device):
            self._pool = KVPool(layout.layers, blocks, block_size)
        if slots:
            self._states = MlxStatePool(layout.states, slots[0])
        if self.description.execution_mode == "batched":
            self._attention = PoolAttention(self._served.kernel)

    def apply(self, plan: Plan) -> None:
        self._guarded(lambda: self._apply(plan))

    def _apply(self, plan: Plan) -> None:
        for returned in plan.returned:
            if returned.family == len(self._families):
                self._state_pool.drop(returned.rows.tolist())
        if plan.copies:
            self._kv_pool.copy(plan.copies)
        if plan.states:
            self._state_pool.copy(plan.states)

    def read(self, part: RowPart) -> list[HostBytes]:
        if part.family == len(self._families):
            return self._guarded(lambda: self._state_pool.read(int(part.row)))
        return self._guarded(lambda: self._kv_pool.read(part.family, int(part.row), part.tokens))

    def buffers(self, part: RowPart) -> list[HostBytes]:
        """Returns new memory: an MLX array cannot be filled from outside."""
        if part.family == len(self._families):
            sizes = self._state_pool.buffer_bytes()
        else:
            sizes = self._kv_pool.buffer_bytes(part.family, part.tokens)
        return [np.empty(size, np.uint8) for size in sizes]

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        if part.family == len(self._families):
            self._guarded(lambda: self._state_pool.place(int(part.row), buffers))
        else:
            self._guarded(lambda: self._kv_pool.place(part.family, int(part.row), part.tokens, buffers))

    def buffer_dtypes(self, family: int) -> list[str]:
        layout = self._layout
        if family == len(self._families):
            kept = [shape.dtype for shapes in layout.states.values() for shape in shapes if shape is not None]
        else:
            its = [shape for shape in layout.layers.values() if shape.family == family]
            kept = [dtype for shape in its for _, dtype in shape.tensors]
        return [dtype_name(dtype) for dtype in kept]

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        assert self._adapters is not None, "a runtime of load_model takes adapters"
        with mx.stream(self._device):
            return self._adapters.load(source)

    def unload_adapter(self, fingerprint: str) -> None:
        assert self._adapters is not None, "a runtime of load_model takes adapters"
        self._adapters.unload(fingerprint)

    def forward(self, batch: Batch) -> Logits:
        return self._guarded(lambda: self._forward(batch))

    def _forward(self, batch: Batch) -> Logits:
        scored: dict[int, Logits] = {}
        for call in self._calls_of(batch.segments):
            logits = self._call_model(call.segments, scores=any(s.logits_to_keep for s in call.segments))
            for row, (number, segment) in enumerate(zip(call.numbers, call.segments, strict=True)):
                if segment.logits_to_keep:
                    assert logits is not None
                    scored[number] = logits[row, : len(segment.tokens)]
        rows = [scored[number] for number in sorted(scored)]
        return np.concatenate(rows) if rows else np.empty((0, self._layout.vocab_size), np.float32)

    def _calls_of(self, segments: Sequence[Segment]) -> list[_MlxForward]:
        """Divides a step's segments into calls of the model, those without logits first.

        A segment of a prompt has logits of its last row only. Its other rows lead in a call of their own.
        """
        unscored: list[_MlxForward] = []
        scored: list[tuple[int, Segment]] = []
        for number, segment in enumerate(segments):
            rest = segment
            if lead := len(segment.tokens) - segment.logits_to_keep:
                first = replace(segment, tokens=segment.tokens[:lead], logits_to_keep=0)
                unscored.append(_MlxForward([number], [first]))
                rest = replace(segment, tokens=segment.tokens[lead:], past=segment.past + lead)
            if len(rest.tokens):
                scored.append((number, rest))
        return [*unscored, *self._shared_calls(scored)]

    def _shared_calls(self, scored: Sequence[tuple[int, Segment]]) -> list[_MlxForward]:
        """Groups segments that have logits of all their rows."""
        if self.description.execution_mode == "one sequence per forward":
            return [_MlxForward([number], [segment]) for number, segment in scored]
        longest = max((len(segment.tokens) for _, segment in scored), default=0)
        # Padding would go into recurrent states.
        pads = not self._layout.has_states and longest * len(scored) <= _PADDED_ROWS
        groups: dict[tuple[int, bool, str], _MlxForward] = {}
        # The rows of each adapter follow each other in a call.
        for number, segment in sorted(scored, key=lambda one: one[1].adapter):
            group = (
                0 if pads else len(segment.tokens),
                # States of a sequence that begins are made by the model itself.
                self._layout.has_states and segment.past == 0,
                "" if self._adapters is None else self._adapters.call_of(segment),
            )
            call = groups.setdefault(group, _MlxForward([], []))
            call.numbers.append(number)
            call.segments.append(segment)
        return list(groups.values())

    def _guarded(self, work: Callable[[], T]) -> T:
        """Does work on the pools. Raises PoolsLost if a failure has left them with unknown contents.

        Each failed evaluation does so: MLX raises the error of a device or of another thread with the evaluation that
        comes next, and a write that has copied a pool may have left the copy empty.
        """
        with mx.stream(self._device):
            if self._is_lost:
                self._renew()
            try:
                return work()
            except Exception as error:
                told = "".join(traceback.format_exception(error)).strip()
                failure = _without_frames(error)
            failure.add_note(told)  # for the log
            if not isinstance(failure, EvaluationFailed):
                # Writes of a graph that was not built to its end wait for an evaluation.
                try:
                    evaluate(self._kv_pool.arrays)
                except EvaluationFailed as lost:
                    failure = EvaluationFailed(lost.cause)
            if not isinstance(failure, EvaluationFailed):
                raise failure
            cause = _without_frames(failure.cause)
            cause.add_note(told)
            self._is_lost = True
            with contextlib.suppress(PoolsLost):  # the next call tries again
                self._renew()
            raise PoolsLost(cause) from cause

    def _renew(self) -> None:
        """Recreates lost pools. Raises PoolsLost if that fails, too."""
        try:
            if self._states is not None:
                self._states.clear()
            self._kv_pool.renew()
            self._is_lost = False
        except EvaluationFailed as failure:
            cause = _without_frames(failure.cause)
        if self._is_lost:  # outside of the handler, whose exception would hold the pools as the context
            raise PoolsLost(cause) from cause

    def _call_model(self, segments: Sequence[Segment], *, scores: bool) -> NDArray[np.float32] | None:
        """Computes segments in one call. Returns [segments, new, vocab], or None without `scores`."""
        self._calls += 1
        pool = self._kv_pool
        lengths = [len(segment.tokens) for segment in segments]
        rows = [
            FamilyRows(
                family,
                [segment.tables[number] for segment in segments],
                [segment.past for segment in segments],
                lengths,
                pool.block_size,
                pool.blocks[number],
            )
            for number, family in enumerate(self._families)
        ]
        slots = [int(segment.state) for segment in segments]
        states: States = {}
        if self._layout.has_states and segments[0].past > 0:
            states = self._state_pool.joined(slots)
        tokens = np.zeros((len(segments), max(lengths)), np.int32)
        for row, segment in enumerate(segments):
            tokens[row, : len(segment.tokens)] = segment.tokens
        with (
            contextlib.nullcontext()
            if self._adapters is None
            else self._adapters.rows.of(segments, tokens.shape[1])
        ):
            logits, states = self._build(tokens, rows, states)
        scored = [logits.astype(mx.float32)] if scores else []
        filled = [array for arrays in states.values() for array in arrays if array is not None]
        evaluate([*pool.arrays, *filled, *scored])
        if states:
            self._state_pool.put(slots, states)
        pool.count_copies()
        return np.array(scored[0]) if scored else None

    def _build(
        self, tokens: NDArray[np.int32], rows: Sequence[FamilyRows], states: States
    ) -> tuple[mx.array, States]:
        """Builds the graph of one call for tokens [sequences, new]: its logits, the states after it, and the writes.

        On return only the pools themselves hold their arrays.
        """
        pool, layout = self._kv_pool, self._layout
        given = GivenArrays()
        stand_ins: list[StandIn] = []
        recurrent: dict[CachePath, Any] = {}

        def stand_in(path: CachePath, cache: Any) -> Any:
            if path in layout.layers:
                its_rows, grouped = rows[layout.layers[path].family], self._served.grouped_masks
                stand_ins.append(StandIn(its_rows, pool.layers[path], given, grouped))
                return stand_ins[-1]
            if path not in layout.states:
                return UnusedCache(cache)
            recurrent[path] = made = mlx_cache.ArraysCache(len(layout.states[path]))
            made.cache = states.get(path, made.cache)
            return made

        try:
            with attention_on_pools(self._attention, given):
                logits: mx.array = self._model(mx.array(tokens), cache=replaced(self._caches, stand_in))
        finally:
            given.clear()
            for each in stand_ins:
                each.drop_arrays()
        # A model may leave a view of the whole call's arrays as its state.
        return logits, {
            path: [None if state is None else mx.contiguous(state) for state in cache.cache]
            for path, cache in recurrent.items()
        }

    @property
    def _kv_pool(self) -> KVPool:
        assert self._pool is not None, "allocate comes first"
        return self._pool

    @property
    def _state_pool(self) -> MlxStatePool:
        assert self._states is not None, "the model has no recurrent states"
        return self._states


@dataclass(slots=True)
class _MlxForward:
    """Segments that one call of the model computes, and their numbers in the batch."""

    numbers: list[int]
    segments: list[Segment]


def _without_frames(error: Exception) -> Exception:
    """Removes tracebacks: their frames hold arrays of the pools, and the next write would copy those."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns a dtype's name without its package, as torch names it, too."""
    return str(dtype).removeprefix("mlx.core.")
