"""Stand-ins for mlx-lm's caches during one call: what a layer writes goes to the pool, what it reads comes from it.

An mlx-lm model gives its K and V to a cache, gets all visible K and V back, and calls attention with them. A stand-in
writes to the pool and returns a gather of the pool through the block tables. MLX is lazy, so the gather is only an
expression. Where attention is called with exactly the K, V and mask of a stand-in (`PoolView`), the hook in
`attention.py` reads the pool itself, and the gather is never computed. If a model does anything else with them, it
uses the gather, and the result is right as well.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx

from rootstock.runtime.mlx.kv_pool import LayerPool
from rootstock.runtime.mlx.rows import FamilyRows

Kind = Literal["keys", "values"]


class PoolView(mx.array):
    """K, V or mask that a stand-in gave to the model. Arrays that are computed from it are plain ones."""

    stand_in: StandIn
    kind: Kind | Literal["mask"]
    window: int | None  # of a mask

    def __init__(
        self, array: mx.array, stand_in: StandIn, kind: Kind | Literal["mask"], window: int | None = None
    ) -> None:
        super().__init__(array)
        self.stand_in = stand_in
        self.kind = kind
        self.window = window


class StandIn:
    """Cache of one attention layer for one call of the model, in the interface of mlx-lm's caches."""

    def __init__(self, rows: FamilyRows, pool: LayerPool, grouped_masks: bool = False) -> None:
        """`grouped_masks`: see `runner.Served`."""
        self.rows = rows
        self.pool = pool
        self._grouped_masks = grouped_masks and rows.count > 1
        # mlx-lm's names. RoPE reads `offset`, a chunked model `start_position` (of one sequence).
        self.offset = rows.offset
        self.start_position = rows.starts[0]
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def drop_arrays(self) -> None:
        """Drops what refers to the pool: an expression that is never evaluated would make the next write a copy."""
        self.keys = self.values = None

    # ------------------------------------------------------------------------- mlx-lm's interface

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes K and V [sequences, heads, new, dim] to the pool. Returns those of all visible positions."""
        self.pool.write(self.rows.write_slots, keys, values)
        self.offset = self.offset + self.rows.new
        slots = self.rows.read_slots if self.rows.count > 1 else self.rows.run(0) or self.rows.read_slots
        self.keys = PoolView(self._dense(self.pool.keys_at(slots)), self, "keys")
        if self.pool.shape.shares_values:
            self.values = self.keys
        else:
            self.values = PoolView(self._dense(self.pool.values_at(slots)), self, "values")
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
    ) -> PoolView | Literal["causal"] | None:
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
        return PoolView(mask[:, None] if self._grouped_masks else mask, self, "mask", window)

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
    """Cache of a layer that wrote nothing in the survey. It answers questions, and refuses to keep anything: what it
    kept would be of all requests."""

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
