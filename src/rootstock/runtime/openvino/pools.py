"""Pools of a paged graph in main memory: blocks of each family's layers, and slots of states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.runtime.lazy_memory import LazyMemory
from rootstock.runtime.openvino.graph import PAGE_TOKENS, GraphLayout, PoolPort


class PortMemory:
    """Memory of one input: rows, and one of zeros behind them, which stands for blocks that a window has left.

    rows    uint8 [rows, row_bytes], or [rows, kv_heads, tokens, bytes] of blocks
    tensor  the same memory with the input's element type
    """

    __slots__ = ("_lazy", "port", "rows", "tensor")

    def __init__(self, port: PoolPort, rows: int, *, is_of_blocks: bool) -> None:
        self.port = port
        self._lazy = LazyMemory((rows + 1) * port.row_bytes)
        shape = (*port.shape[:2], -1) if is_of_blocks else (port.row_bytes,)
        self.rows: NDArray[np.uint8] = self._lazy.bytes.reshape(rows + 1, *shape)
        self.tensor = ov.Tensor(self._lazy.bytes, ov.Shape([rows + 1, *port.shape]), port.element_type)

    def part(self, row: int, tokens: int) -> NDArray[np.uint8]:
        """Returns a view of the first positions of a block, or of a whole state (`tokens` is 0)."""
        return self.rows[row, :, :tokens] if tokens else self.rows[row]

    def give_back(self, rows: NDArray[np.int32]) -> None:
        self._lazy.give_back(rows, self.port.row_bytes)


class GraphPools:
    """Pools of all families. Owned by one thread."""

    def __init__(self, layout: GraphLayout, rows: Sequence[int]) -> None:
        self._rows = rows
        self._state_family = len(layout.ports) - 1 if layout.is_stateful else -1
        self.memories = [
            [PortMemory(port, count, is_of_blocks=family != self._state_family) for port in ports]
            for family, (ports, count) in enumerate(zip(layout.ports, rows, strict=True))
        ]

    def spare_row(self, family: int) -> int:
        """Returns the row of zeros, which nothing is written to."""
        return self._rows[family]

    def apply(self, plan: Plan) -> None:
        for returned in plan.returned:
            for memory in self.memories[returned.family]:
                memory.give_back(returned.rows)
        for copy in plan.copies:
            for memory in self.memories[copy.family]:
                memory.part(copy.target, copy.tokens)[...] = memory.part(copy.source, copy.tokens)
        assert self._state_family >= 0 or not plan.states, "the model has no recurrent states"
        for state in plan.states:
            for memory in self.memories[self._state_family]:
                memory.rows[state.target] = memory.rows[state.source]

    def read(self, part: RowPart) -> list[HostBytes]:
        return [memory.part(part.row, part.tokens).flatten() for memory in self.memories[part.family]]

    def buffers(self, part: RowPart) -> list[HostBytes]:
        """Returns the row's own memory for a state or a full block, and new memory for a part of a block, whose heads
        do not adjoin."""
        views = [memory.part(part.row, part.tokens) for memory in self.memories[part.family]]
        if part.tokens in (0, PAGE_TOKENS):
            return [view.reshape(-1) for view in views]
        return [np.empty(view.nbytes, np.uint8) for view in views]

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        if part.tokens in (0, PAGE_TOKENS):
            return
        for memory, buffer in zip(self.memories[part.family], buffers, strict=True):
            view = memory.part(part.row, part.tokens)
            view[...] = buffer.reshape(view.shape)
