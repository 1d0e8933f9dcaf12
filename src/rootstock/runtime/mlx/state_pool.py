"""Recurrent states by slot.

A state is an MLX array, which is a value: a copy is a reference, a checkpoint costs nothing until its working state
moves on, and a slot takes memory when it is first filled.

mlx-lm's models take and leave the states of a batch in one array per layer. Splitting it after each forward and
joining it before the next would take two operations for each layer and sequence. The pool therefore keeps the arrays
of the last batch as they are, and splits them when another set of slots, a copy or a tier asks for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from rootstock.cache.plan import HostBytes, StateCopy
from rootstock.runtime.mlx.kv_pool import evaluate, from_host, to_host
from rootstock.runtime.mlx.survey import CachePath, MlxStateShape

LayerStates = list[mx.array | None]  # the arrays of one layer, [sequences, …]
States = dict[CachePath, LayerStates]


@dataclass(frozen=True, slots=True)
class _BatchStates:
    """States of the last batch. Its slots are not among the pool's single ones until it is split."""

    slots: tuple[int, ...]
    states: States  # in the order of `slots`


class MlxStatePool:
    """States of all recurrent layers, in `slots` slots. Owned by one thread."""

    def __init__(self, shapes: Mapping[CachePath, tuple[MlxStateShape | None, ...]], slots: int) -> None:
        self._shapes = shapes
        self._slots = slots
        self._rows: dict[int, States] = {}  # arrays [1, …] of single slots
        self._last: _BatchStates | None = None

    def joined(self, slots: Sequence[int]) -> States:
        """Returns the states of several slots, each array [slots, …]. They keep their content until `put`."""
        assert all(0 <= slot < self._slots for slot in slots), "the pool has no such slot"
        if self._last is not None and self._last.slots == tuple(slots):
            return {path: list(arrays) for path, arrays in self._last.states.items()}
        self._split()
        return joined([self._rows[slot] for slot in slots])

    def put(self, slots: Sequence[int], states: States) -> None:
        """Stores evaluated states [slots, …]. The pool owns the arrays from here on."""
        if self._last is not None and self._last.slots != tuple(slots):
            self._split()
        for slot in slots:
            self._rows.pop(slot, None)
        self._last = _BatchStates(tuple(slots), states)

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Copies states in sequence."""
        for copy in copies:
            if self._last is not None and {copy.source, copy.target} & set(self._last.slots):
                self._split()
            source = self._rows.get(copy.source)
            if source is None:  # a working slot that no forward has filled: its content is undefined
                self._rows.pop(copy.target, None)
            else:
                self._rows[copy.target] = source

    def drop(self, slots: Iterable[int]) -> None:
        """Gives the memory of free slots back."""
        dropped = set(slots)
        if self._last is not None and dropped & set(self._last.slots):
            self._split()
        for slot in dropped:
            self._rows.pop(slot, None)

    def clear(self) -> None:
        """Drops all states."""
        self._rows.clear()
        self._last = None

    def read(self, slot: int) -> list[HostBytes]:
        """Copies a state to the host, layer by layer."""
        if self._last is not None and slot in self._last.slots:
            self._split()
        state = self._rows[slot]
        return to_host([_there(state[path][number]) for path, number, _ in self._kept()])

    def place(self, slot: int, buffers: Sequence[HostBytes]) -> None:
        """Makes filled buffers the state of a slot."""
        if self._last is not None and slot in self._last.slots:
            self._split()
        state: States = {path: [None] * len(shapes) for path, shapes in self._shapes.items()}
        for (path, number, shape), buffer in zip(self._kept(), buffers, strict=True):
            state[path][number] = from_host(buffer, shape.dtype, (1, *shape.shape))
        evaluate(arrays_of(state))
        self._rows[slot] = state

    def buffer_bytes(self) -> list[int]:
        """Returns the sizes of the buffers of `read`."""
        return [shape.nbytes for _, _, shape in self._kept()]

    def dtypes(self) -> list[mx.Dtype]:
        return [shape.dtype for _, _, shape in self._kept()]

    def _kept(self) -> list[tuple[CachePath, int, MlxStateShape]]:
        """Returns the arrays of a state in the byte order of a row: by layer and index."""
        return [
            (path, number, shape)
            for path, shapes in self._shapes.items()
            for number, shape in enumerate(shapes)
            if shape is not None
        ]

    def _split(self) -> None:
        """Gives each slot of the last batch its own arrays: a view would keep the states of the whole batch."""
        last, self._last = self._last, None
        if last is None:
            return
        alone = len(last.slots) == 1
        for row, slot in enumerate(last.slots):
            self._rows[slot] = {
                path: [
                    array if array is None or alone else mx.contiguous(array[row : row + 1])
                    for array in arrays
                ]
                for path, arrays in last.states.items()
            }
        if not alone:
            evaluate(array for slot in last.slots for array in arrays_of(self._rows[slot]))


def joined(rows: Sequence[States]) -> States:
    """Returns the states [sequences, …] of several sequences, each [1, …]."""
    if len(rows) == 1:
        return {path: list(arrays) for path, arrays in rows[0].items()}
    return {
        path: [_joined([row[path][number] for row in rows]) for number in range(len(rows[0][path]))]
        for path in rows[0]
    }


def arrays_of(states: States) -> list[mx.array]:
    return [array for arrays in states.values() for array in arrays if array is not None]


def _joined(arrays: Sequence[mx.array | None]) -> mx.array | None:
    """Returns [slots, …] of arrays [1, …]; None for an array that the model never sets."""
    if all(array is None for array in arrays):
        return None
    return mx.concatenate([_there(array) for array in arrays])


def _there(array: mx.array | None) -> mx.array:
    assert array is not None, "slots with states of different layers cannot be joined"
    return array
