"""Attention on the pools: a hook on MLX's attention, for calls with the K, V and mask of a stand-in.

Each sequence attends by itself: over a view of the pool if its blocks follow each other there, over a gather of its
own positions otherwise. With a kernel for paged attention one call serves all sequences with few new rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from rootstock.cache.families import ChunkedAttention
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.mlx.stand_ins import GivenArrays, StandIn, Visible


@dataclass(slots=True)
class AttentionCounters:
    on_pools: int = 0  # calls of attention that read the pools
    by_kernel: int = 0  # among them, calls of a paged kernel


class PoolAttention:
    """Attention of one runtime's calls on its pools."""

    def __init__(self, kernel: PagedKernel | None) -> None:
        self.counters = AttentionCounters()
        self._kernel = kernel
        # On a CPU, MLX copies the heads of a view one by one in each product. One copy of all is faster.
        self._copies_views = mx.default_device().type == mx.DeviceType.cpu

    def attend(
        self,
        visible: Visible,
        query: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Computes [sequences, q_heads, new, value_dim] of queries [sequences, q_heads, new, key_dim].

        `keys`, `values`: as the stand-in gave them, [sequences, heads, width, dim].
        """
        self.counters.on_pools += 1
        stand_in, window = visible
        rows, pool = stand_in.rows, stand_in.pool
        kernel, shape = self._kernel, pool.shape
        if kernel is not None and kernel.serves(
            query.shape[1], shape.heads, shape.key_dim, shape.value_dim, rows.new
        ):
            self.counters.by_kernel += 1
            flat = query.transpose(0, 2, 1, 3).reshape(-1, query.shape[1], query.shape[3])
            attended = kernel.attend(
                flat,
                pool.keys,
                None if shape.shares_values else pool.values,
                rows.paged(window),
                scale=scale,
                scales=pool.scales,
                sinks=sinks,
                shared_value_dim=shape.value_dim,
            )
            return attended.reshape(rows.count, rows.new, *attended.shape[1:]).transpose(0, 2, 1, 3)
        parts = [
            self._row(stand_in, row, query, keys, values, scale, window, sinks) for row in range(rows.count)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _row(
        self,
        stand_in: StandIn,
        row: int,
        query: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Computes [1, q_heads, new, value_dim] of one sequence."""
        rows = stand_in.rows
        start, end, new = rows.starts[row], rows.ends[row], rows.lengths[row]
        past = end - new
        first = start if window is None else max(start, past - window + 1)
        skipped = first - start  # positions that no row sees under the mask's window
        seen: Any = None
        if isinstance(rows.family, ChunkedAttention) or (
            new > 1 and window is not None and end - first > window
        ):
            seen = rows.mask(window)[row : row + 1, :, :new, skipped : end - start]
        elif new > 1:
            seen = "causal"
        if rows.count > 1 or skipped:
            run = rows.run(row)
            slots = rows.read_slots[row, skipped : end - start] if run is None else (run[0] + skipped, run[1])
            keys, values = (
                visible[None].transpose(0, 2, 1, 3)  # [1, heads, positions, dim]
                for visible in (stand_in.pool.keys_at(slots), stand_in.pool.values_at(slots))
            )
        if self._copies_views:
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        attended = _own_attention()(
            query[row : row + 1, :, :new], keys, values, scale=scale, mask=seen, sinks=sinks
        )
        missing = rows.new - new
        return mx.pad(attended, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else attended


# The attention of the call that a thread builds. mlx-lm looks the function up in mx.fast at every call, so that one
# hook serves all models; without a stand-in's arrays it is MLX's own function.
_call = threading.local()
_installed: list[Callable[..., mx.array]] = []  # MLX's own function, once the hook is in its place
_installing = threading.Lock()


class attention_on_pools:  # noqa: N801 (a context manager)
    """Context in which attention with a stand-in's arrays reads the pools by `attention`; None: it reads gathers."""

    def __init__(self, attention: PoolAttention | None, given: GivenArrays) -> None:
        self._attention = attention
        self._given = given

    def __enter__(self) -> None:
        with _installing:
            if not _installed:
                _installed.append(mx.fast.scaled_dot_product_attention)
                mx.fast.scaled_dot_product_attention = _hook
        _call.attention, _call.given = self._attention, self._given

    def __exit__(self, *error: object) -> None:
        _call.attention = _call.given = None


def _own_attention() -> Callable[..., mx.array]:
    return _installed[0] if _installed else mx.fast.scaled_dot_product_attention


def _hook(q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any = None, **options: Any) -> mx.array:
    attention: PoolAttention | None = getattr(_call, "attention", None)
    if attention is not None and options.keys() == {"scale"}:
        visible = _call.given.visible(k, v, mask)
        if visible is not None:
            return attention.attend(visible, q, k, v, options["scale"], sinks)
    return _own_attention()(q, k, v, mask=mask, sinks=sinks, **options)
