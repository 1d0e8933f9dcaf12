"""Runtime for mlx-lm models on the paged pools.

A step's segments become few calls of the model. The rows of a prompt that need no logits have a call of their own,
whose logits are never computed. The rows of decodes and drafts, and the last one of each prompt, share a call: a
model without recurrent states takes sequences with unequally many rows, padded at the end.

While the device computes a step's last call, Python builds the graph of the decodes that follow, behind the most
likely tokens. The device begins it when the step ends, and the engine takes the step's results meanwhile. Only its
first layers are handed over then: MLX lets no caller go on who has handed over many operations. The writes of two
steps are never under way at once: the later ones would copy the pools that the earlier step still reads.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_cache

from rootstock.cache.families import RecurrentState, TokenFamily, token_families
from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.errors import PoolsLost
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, ModelDescription, Segment
from rootstock.runtime.mlx.adapters import MlxAdapters
from rootstock.runtime.mlx.attention import PoolAttention, attention_on_pools
from rootstock.runtime.mlx.kv_pool import EvaluationFailed, KVPool, begin_evaluation, evaluate
from rootstock.runtime.mlx.memory import free_bytes
from rootstock.runtime.mlx.rows import FamilyRows
from rootstock.runtime.mlx.stand_ins import GivenArrays, StandIn, UnusedCache
from rootstock.runtime.mlx.state_pool import MlxStatePool, States, arrays_of, joined
from rootstock.runtime.mlx.survey import CachePath, MlxLayout, replaced

T = TypeVar("T")

# Most rows, with padding, of a call that pads sequences to equally many. Up to about as many rows, a GPU's time goes
# into reading the weights, which a second call would read again.
_PADDED_ROWS = 32

# Layers of a following call that the device begins before it is asked for.
_FIRST_LAYERS = 2

# Forwards behind each of which nothing is begun, so that copies of pools can be counted.
_COUNTED_EVERY = 61

_UNKNOWN = np.zeros(1, np.int32)


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
    taken_ahead: int = 0  # rows that were computed ahead, and asked for


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
        self._forwards = 0
        self._taken_ahead = 0
        self._ahead: _FollowingCall | None = None
        self._is_lost = False  # the pools' contents are not known, and they could not be recreated

    images = None
    draft_heads = None
    computes_ahead = True

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
            self._taken_ahead,
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

    def _settle(self) -> None:
        """Ends what the device has begun ahead: it still reads the pools, so that writes would copy them."""
        if self._ahead is not None:
            evaluate([*self._kv_pool.arrays, *self._ahead.call.results])

    def _apply(self, plan: Plan) -> None:
        for returned in plan.returned:
            if returned.family == len(self._families):
                self._state_pool.drop(returned.rows.tolist())
        if plan.copies:
            self._settle()
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
            self._guarded(lambda: self._place(part, buffers))

    def _place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        self._settle()
        self._kv_pool.place(part.family, int(part.row), part.tokens, buffers)

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
        self._forwards += 1
        numbered = list(enumerate(batch.segments))
        begun: list[_MlxForward] = []
        if (ahead := self._ahead) is not None:
            if ahead.take(batch.segments, self._families, self._kv_pool.block_size):
                begun.append(ahead.call)
                self._taken_ahead += len(ahead.call.asked)
                numbered = [each for each in numbered if each[0] not in ahead.call.numbers]
                self._hand_over(ahead.call)
            else:
                self._settle()
            self._ahead = None
        for call in self._calls_of(numbered):
            if begun:
                self._finish(begun[-1])
            self._build(call)
            self._hand_over(call)
            begun.append(call)
        following = self._following(batch.following, begun) if self._forwards % _COUNTED_EVERY else None
        self._finish(begun[-1], [] if following is None else [following.most_likely])
        if following is None:
            self._kv_pool.count_copies()
        else:
            following.begin(self._kv_pool)
            self._ahead = following
        scored = {number: logits for call in begun for number, logits in call.scored()}
        rows = [scored[number] for number in sorted(scored)]
        return np.concatenate(rows) if rows else np.empty((0, self._layout.vocab_size), np.float32)

    def _calls_of(self, numbered: Sequence[tuple[int, Segment]]) -> list[_MlxForward]:
        """Divides segments into calls of the model, those without logits first.

        A segment of a prompt has logits of its last row only. Its other rows lead in a call of their own.
        """
        unscored: list[_MlxForward] = []
        scored: list[tuple[int, Segment]] = []
        for number, segment in numbered:
            rest = segment
            if lead := len(segment.tokens) - segment.logits_to_keep:
                first = replace(segment, tokens=segment.tokens[:lead], logits_to_keep=0)
                unscored.append(_MlxForward([number], [first]))
                rest = replace(segment, tokens=segment.tokens[lead:], past=segment.past + lead)
            if len(rest.tokens):
                scored.append((number, rest))
        return [*unscored, *self._shared_calls(scored)]

    def _following(
        self, segments: Mapping[int, Segment], begun: Sequence[_MlxForward]
    ) -> _FollowingCall | None:
        """Builds the call of the next step's decodes behind the most likely tokens. None: it would need several."""
        known = [
            (number, replace(segment, tokens=_UNKNOWN, tables=tuple(map(np.copy, segment.tables))))
            for number, segment in segments.items()
        ]
        calls = self._shared_calls(known)
        if len(calls) != 1:
            return None
        (call,) = calls
        rows = {number: (each, row) for each in begun for row, number in enumerate(each.numbers)}
        sources = [rows[number] for number in call.numbers]
        first = sources[0][0]
        if sources == [(first, row) for row in range(len(first.segments))]:
            states = joined([first.states])  # of the same sequences in the same order: nothing is split
        else:
            states = joined([each.states_of(row) for each, row in sources])
        most_likely = mx.concatenate([each.most_likely(row) for each, row in sources])
        self._build(call, most_likely[:, None], states)
        return _FollowingCall(call, most_likely)

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
        self._ahead = None
        try:
            if self._states is not None:
                self._states.clear()
            self._kv_pool.renew()
            self._is_lost = False
        except EvaluationFailed as failure:
            cause = _without_frames(failure.cause)
        if self._is_lost:  # outside of the handler, whose exception would hold the pools as the context
            raise PoolsLost(cause) from cause

    def _build(self, call: _MlxForward, tokens: mx.array | None = None, states: States | None = None) -> None:
        """Builds the graph of a call: its logits [segments, new, vocab], the states after it, and the writes.

        The call's own tokens and the pool's states are the input, unless others are given: `tokens` [segments, new].
        On return only the pools themselves hold their arrays.
        """
        self._calls += 1
        pool, layout, segments = self._kv_pool, self._layout, call.segments
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
        if states is None:
            states = {}
            if layout.has_states and segments[0].past > 0:
                states = self._state_pool.joined([int(segment.state) for segment in segments])
        if tokens is None:
            padded = np.zeros((len(segments), max(lengths)), np.int32)
            for row, segment in enumerate(segments):
                padded[row, : len(segment.tokens)] = segment.tokens
            tokens = mx.array(padded)
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
            with (
                contextlib.nullcontext()
                if self._adapters is None
                else self._adapters.rows.of(segments, tokens.shape[1]),
                attention_on_pools(self._attention, given),
            ):
                logits: mx.array = self._model(tokens, cache=replaced(self._caches, stand_in))
        finally:
            given.clear()
            for each in stand_ins:
                each.drop_arrays()
        if any(segment.logits_to_keep for segment in segments):
            call.logits = logits.astype(mx.float32)
        # A model may leave a view of the whole call's arrays as its state.
        call.states = {
            path: [None if state is None else mx.contiguous(state) for state in cache.cache]
            for path, cache in recurrent.items()
        }

    def _hand_over(self, call: _MlxForward) -> None:
        """Makes the device compute a call that is built."""
        begin_evaluation([*self._kv_pool.arrays, *call.results])

    def _finish(self, call: _MlxForward, further: Sequence[mx.array] = ()) -> None:
        """Waits for the results of a call, and stores its states."""
        evaluate([*call.results, *further])
        if not call.states:
            return
        rows, states = call.asked, call.states
        if len(rows) < len(call.numbers):
            states = joined([call.states_of(row) for row in rows])
            evaluate(arrays_of(states))
        self._state_pool.put([int(call.segments[row].state) for row in rows], states)

    @property
    def _kv_pool(self) -> KVPool:
        assert self._pool is not None, "allocate comes first"
        return self._pool

    @property
    def _state_pool(self) -> MlxStatePool:
        assert self._states is not None, "the model has no recurrent states"
        return self._states


_NOT_ASKED = -1  # the number of a sequence that the device has computed ahead, and that did not go on so


@dataclass(slots=True, eq=False)
class _MlxForward:
    """Segments that one call of the model computes, and their numbers in the batch. Once it is built, its results."""

    numbers: list[int]
    segments: list[Segment]
    logits: mx.array | None = None  # [segments, new, vocab] float32; None: not wanted
    states: States = field(default_factory=dict)  # after the call

    @property
    def asked(self) -> list[int]:
        """Returns the rows whose sequences the batch has."""
        return [row for row, number in enumerate(self.numbers) if number != _NOT_ASKED]

    @property
    def results(self) -> list[mx.array]:
        return [*([] if self.logits is None else [self.logits]), *arrays_of(self.states)]

    def states_of(self, row: int) -> States:
        """Returns the states of one sequence."""
        if len(self.segments) == 1:
            return self.states
        return {
            path: [None if array is None else mx.contiguous(array[row : row + 1]) for array in arrays]
            for path, arrays in self.states.items()
        }

    def most_likely(self, row: int) -> mx.array:
        """Returns the most likely token [1] behind a sequence, whose logits are wanted."""
        assert self.logits is not None
        last = len(self.segments[row].tokens) - 1
        return mx.argmax(self.logits[row, last], keepdims=True).astype(mx.int32)

    def scored(self) -> list[tuple[int, Logits]]:
        """Returns the logits [new, vocab] of each asked segment, by its number. They are evaluated."""
        if self.logits is None:
            return []
        logits = np.array(self.logits)
        return [
            (number, logits[row, : len(segment.tokens)])
            for row, (number, segment) in enumerate(zip(self.numbers, self.segments, strict=True))
            if number != _NOT_ASKED and segment.logits_to_keep
        ]


@dataclass(frozen=True, slots=True)
class _FollowingCall:
    """A call of the next step, with the most likely tokens [segments] as its input."""

    call: _MlxForward
    most_likely: mx.array

    def begin(self, pool: KVPool) -> None:
        """Makes the device begin the call. All earlier ones have ended."""
        first: dict[CachePath, list[mx.array]] = {
            path: list(layer.arrays) for path, layer in pool.layers.items()
        }
        first |= {path: [a for a in arrays if a is not None] for path, arrays in self.call.states.items()}
        begin_evaluation([array for path in sorted(first)[:_FIRST_LAYERS] for array in first[path]])

    def take(self, segments: Sequence[Segment], families: Sequence[TokenFamily], block_size: int) -> bool:
        """Numbers the sequences by those of a batch that go on as expected. Returns whether any does."""
        by_lease = {segment.lease: number for number, segment in enumerate(segments)}
        tokens = np.array(self.most_likely).tolist()
        for row, (expected, token) in enumerate(zip(self.call.segments, tokens, strict=True)):
            number = by_lease.get(expected.lease, _NOT_ASKED)
            if number != _NOT_ASKED and not _is_expected(
                segments[number], expected, token, families, block_size
            ):
                number = _NOT_ASKED
            self.call.numbers[row] = number
        return bool(self.call.asked)


def _is_expected(
    segment: Segment, expected: Segment, token: int, families: Sequence[TokenFamily], block_size: int
) -> bool:
    """Returns whether a segment is the expected one of the same lease, with the same token and the same rows."""
    past = segment.past
    if past != expected.past or segment.state != expected.state or segment.logits_to_keep != 1:
        return False
    if segment.tokens.tolist() != [token]:
        return False
    end = past // block_size + 1
    for family, table, known in zip(families, segment.tables, expected.tables, strict=True):
        first = family.first_visible(past) // block_size
        if not np.array_equal(table[first:end], known[first:end]):
            return False
    return True


def _without_frames(error: Exception) -> Exception:
    """Removes tracebacks: their frames hold arrays of the pools, and the next write would copy those."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns a dtype's name without its package, as torch names it, too."""
    return str(dtype).removeprefix("mlx.core.")
