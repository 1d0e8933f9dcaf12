"""Stand-ins for mlx-lm's caches during one call: a layer's writes go to the pool, and its reads come from it.

An mlx-lm model gives its K and V to a cache, gets all visible K and V back, and calls attention with them. A stand-in
writes to the pool and returns a gather of the pool through the block tables. MLX is lazy, so the gather is only an
expression. Where attention is called with exactly the K, V and mask of a stand-in (`GivenArrays`), the hook in
`attention.py` reads the pool itself, and the gather is never computed. If a model does anything else with them, it
uses the gather, and the result is right as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from rootstock.runtime.mlx.kv_pool import LayerPool
from rootstock.runtime.mlx.rows import FamilyRows

Kind = Literal["keys", "values", "mask"]


@dataclass(frozen=True, slots=True)
class _Given:
    array: mx.array
    stand_in: StandIn
    kind: Kind
    window: int | None  # of a mask


class Visible(NamedTuple):
    """Positions that a call of attention sees: a stand-in's, under a window."""

    stand_in: StandIn
    window: int | None


class GivenArrays:
    """K, V and masks that the stand-ins of one call gave to the model, found by identity.

    A subclass of MLX's array would tell them, too. But MLX makes an array of another by an operation, and that copies
    all of K and V if it is computed. An array that a model changes in place keeps its identity: attention on
    the pools would not see the change, and the self-check finds another mode.
    """

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}  # by the array's id, which is its own while it is kept here

    def add(self, array: mx.array, stand_in: StandIn, kind: Kind, window: int | None = None) -> mx.array:
        """Notes an array and returns it. `window`: of a mask."""
        self._given[id(array)] = _Given(array, stand_in, kind, window)
        return array

    def clear(self) -> None:
        self._given.clear()

    def visible(self, keys: Any, values: Any, mask: Any) -> Visible | None:
        """Returns the rows that attention sees by K, V and the mask of a stand-in. None: one of them is another
        array."""
        k, v = self._given.get(id(keys)), self._given.get(id(values))
        if k is None or v is None or k.kind != "keys" or v.stand_in is not k.stand_in:
            return None
        if v.kind != "values" and not (v is k and k.stand_in.pool.shape.shares_values):
            return None
        rows = k.stand_in.rows
        if mask is None or isinstance(mask, str):
            return Visible(k.stand_in, rows.window(None))
        m = self._given.get(id(mask))
        if m is None or m.kind != "mask" or m.stand_in.rows is not rows:
            return None
        return Visible(k.stand_in, m.window)


class StandIn:
    """Cache of one attention layer for one call of the model, in the interface of mlx-lm's caches."""

    def __init__(
        self, rows: FamilyRows, pool: LayerPool, given: GivenArrays, grouped_masks: bool = False
    ) -> None:
        """`given`: of the call. `grouped_masks`: see `runner.MlxExecution`."""
        self.rows = rows
        self.pool = pool
        self._given = given
        self._grouped_masks = grouped_masks and rows.count > 1
        # mlx-lm's names. RoPE reads `offset`, a chunked model `start_position` (of one sequence).
        self.offset = rows.offset
        self.start_position = rows.starts[0]
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def drop_arrays(self) -> None:
        """Drops references to the pool: an expression that is never evaluated would make the next write a copy."""
        self.keys = self.values = None

    # ------------------------------------------------------------------------- mlx-lm's interface

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes K and V [sequences, heads, new, dim] to the pool. Returns K and V of all visible positions."""
        rows = self.rows
        self.pool.write(rows.write_run or rows.write_slots, keys, values)
        self.offset = self.offset + rows.new
        slots = rows.read_slots if rows.count > 1 else rows.run(0) or rows.read_slots
        self.keys = self._given.add(self._dense(self.pool.keys_at(slots)), self, "keys")
        if self.pool.shape.shares_values:
            self.values = self.keys
        else:
            self.values = self._given.add(self._dense(self.pool.values_at(slots)), self, "values")
        return self.keys, self.values

    def _dense(self, rows: mx.array) -> mx.array:
        """Returns [sequences, heads, width, dim] of rows [sequences, width, heads, dim], or of a lone sequence's."""
        return (rows if rows.ndim == 4 else rows[None]).transpose(0, 2, 1, 3)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | Literal["causal"] | None:
        """Returns the mask of `N` new positions. Raises ValueError if the model computes another number."""
        if self.rows.new != N:
            raise ValueError(f"the model asks for a mask of {N} positions in a call of {self.rows.new}")
        window = self.rows.window(window_size)
        if self.rows.hides_nothing(window):
            if N == 1:
                return None
            if self.rows.count == 1 and not return_array:
                return "causal"
        mask = self.rows.mask(window)
        return self._given.add(mask[:, None] if self._grouped_masks else mask, self, "mask", window)

    def maybe_trim_front(self) -> None:
        """Keeps everything: the pool's visible positions begin where a chunked model needs them."""

    def size(self) -> int:
        return max(self.rows.pasts)

    def empty(self) -> bool:
        return max(self.rows.pasts) == 0

    def is_trimmable(self) -> bool:
        return False

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values


class UnusedCache:
    """Cache of a layer that wrote nothing in the survey. It answers queries and refuses to store anything, because
    all requests would share its content."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        if name == "update_and_fetch":
            raise RuntimeError(_REFUSED)
        return getattr(self._inner, name)

    def __getitem__(self, number: int) -> Any:
        return self._inner[number]

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError(_REFUSED)

    def __setitem__(self, number: int, value: Any) -> None:
        raise RuntimeError(_REFUSED)


_REFUSED = "the model fills a cache that it left empty when it was loaded"
