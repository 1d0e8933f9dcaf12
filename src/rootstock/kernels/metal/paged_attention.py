"""Paged attention on Metal, for decodes and a few rows of a sequence.

K and V stay in the pool: no gather, and no copy of a sequence. A simdgroup reads K and V of a position once for up to
eight lines, which are query heads of a KV head times rows of a tile. Further simdgroups of the threadgroup have the
other lines and read the same positions at about the same time, from the processor's cache. Sums are in float32. A
long context is split over threadgroups, as in flash-decoding (Dao et al. 2023), and a second kernel merges them.

The kernels have not run on Metal here. Tests run their source as C++, thread by thread; at load `trial.why_not`
compares them with plain sums on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from rootstock.kernels.metal import source
from rootstock.kernels.metal.launch import DEFAULT_OCCUPANCY, AttentionHeads, Occupancy, StepRows

MOST_ROWS = 16  # of a sequence; with more of them a gather costs less than its rows' own attention
LEAST_DIM = 8
MOST_KEY_DIM = 576  # MLA's latents and their rotary part
MOST_VALUE_DIM = 512
DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.int8)  # of the pools; int8 with scales


MakeKernel = Callable[[str, Sequence[str], Sequence[str], str], Any]
"""`mx.fast.metal_kernel`: makes a kernel from a name, the names of its inputs and outputs, and its source"""


@dataclass(frozen=True, slots=True)
class LayerUse:
    """Kind of layer, for which kernels are compiled."""

    heads: AttentionHeads
    dtype: mx.Dtype  # of the pools; of the queries if the pools are quantized
    block_size: int
    shares_values: bool  # V is the beginning of K
    has_sinks: bool
    has_softcap: bool
    is_quantized: bool = False  # the pools are int8, with scales

    def __str__(self) -> str:
        heads = self.heads
        return (
            f"{heads.q_heads}/{heads.kv_heads} heads of {heads.key_dim} and {heads.value_dim} numbers"
            f" in {str(self.dtype).removeprefix('mlx.core.')}, blocks of {self.block_size}"
            f"{', int8 pools' * self.is_quantized}{', shared values' * self.shares_values}"
            f"{', sinks' * self.has_sinks}{', softcap' * self.has_softcap}"
        )


class PagedKernel:
    """Paged attention by two Metal kernels, compiled by MLX when they are first used with a layer's shapes.

    `metal_kernel`: makes a kernel from its source, as mx.fast.metal_kernel does.
    """

    def __init__(
        self, metal_kernel: MakeKernel = mx.fast.metal_kernel, occupancy: Occupancy = DEFAULT_OCCUPANCY
    ) -> None:
        self._attend = metal_kernel(
            "rootstock_paged_attention", source.ATTEND_INPUTS, source.ATTEND_OUTPUTS, source.ATTEND
        )
        self._merge = metal_kernel(
            "rootstock_merge_splits", source.MERGE_INPUTS, source.MERGE_OUTPUTS, source.MERGE
        )
        self._occupancy = occupancy
        # Evaluated, because another thread may use the kernel.
        self._no_sinks = mx.array([0.0])
        self._no_scales = mx.array([0.0] * 8)
        self._uses: set[LayerUse] = set()

    @property
    def uses(self) -> frozenset[LayerUse]:
        """The kinds of layers that were attended so far."""
        return frozenset(self._uses)

    @staticmethod
    def serves(q_heads: int, kv_heads: int, key_dim: int, value_dim: int, rows: int) -> bool:
        """Tells whether the kernel attends layers of these heads for up to `rows` rows of a sequence."""
        return (
            q_heads % kv_heads == 0
            and LEAST_DIM <= key_dim <= MOST_KEY_DIM
            and LEAST_DIM <= value_dim <= MOST_VALUE_DIM
            and 0 < rows <= MOST_ROWS
        )

    def attend(
        self,
        query: mx.array,
        keys: mx.array,
        values: mx.array | None,
        rows: StepRows,
        *,
        scale: float,
        scales: tuple[mx.array, mx.array] | None = None,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
        shared_value_dim: int = 0,
    ) -> mx.array:
        """Attends each row to the positions that it sees. Returns [rows, q_heads, V] in the query's dtype, zeros for
        rows that see none. The result is lazy, and holds the pools until it is evaluated.

        query   [rows, q_heads, D]
        keys    [slots, kv_heads, D]; the pool itself, contiguous: MLX would copy a view of it
        values  [slots, kv_heads, V] of the same dtype; None: the first `shared_value_dim` numbers of the keys
        scales  of keys and of values, each [slots, kv_heads] float32, by which int8 is multiplied
        sinks   [q_heads]: an extra score in the softmax's sum; softcap 0: no soft capping
        """
        count, q_heads, key_dim = query.shape
        kv_heads = keys.shape[1]
        value_dim = shared_value_dim if values is None else values.shape[2]
        heads = AttentionHeads(q_heads, kv_heads, key_dim, value_dim)
        assert self.serves(q_heads, kv_heads, key_dim, value_dim, 1)
        assert keys.dtype in DTYPES
        assert values is None or values.dtype == keys.dtype
        assert (keys.dtype == mx.int8) == (scales is not None)
        assert count == len(rows.sequence_of)
        self._uses.add(
            LayerUse(
                heads,
                keys.dtype if scales is None else query.dtype,
                rows.block_size,
                values is None,
                sinks is not None,
                softcap != 0.0,
                scales is not None,
            )
        )
        key_scales, value_scales = scales or (self._no_scales, self._no_scales)
        launch = rows.launch(heads, self._occupancy)
        is_split = launch.splits > 1
        dtype = mx.float32 if is_split else query.dtype
        shape = (count, q_heads, launch.splits, value_dim + 2) if is_split else (count, q_heads, value_dim)
        threads = source.SIMDGROUPS * source.LANES
        out: mx.array
        merged: mx.array
        (out,) = self._attend(
            inputs=[
                query,
                keys,
                keys if values is None else values,
                key_scales,
                value_scales,
                rows.device_table,
                launch.tiles,
                launch.rows,
                self._no_sinks if sinks is None else sinks,
                mx.array(scale, mx.float32),
                mx.array(softcap, mx.float32),
            ],
            template=[
                ("T", keys.dtype),
                ("O", dtype),
                ("D", key_dim),
                ("V", value_dim),
                ("VALUE_ROW", key_dim if values is None else value_dim),
                ("HEADS", kv_heads),
                ("G", heads.group),
                ("L", launch.lines),
                ("BLOCK", rows.block_size),
                ("SEVERAL", launch.has_shared_tiles),
                ("QUANTIZED", scales is not None),
                ("SINKS", sinks is not None),
                ("SOFTCAP", softcap != 0.0),
                ("SPLIT", is_split),
            ],
            grid=(threads * kv_heads * launch.pieces, launch.number_of_tiles, launch.splits),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )
        if not is_split:
            return out
        (merged,) = self._merge(
            inputs=[out, launch.rows],
            template=[("O", query.dtype), ("V", value_dim), ("HEADS", q_heads)],
            grid=(value_dim, q_heads, count),
            threadgroup=(value_dim, 1, 1),
            output_shapes=[(count, q_heads, value_dim)],
            output_dtypes=[query.dtype],
        )
        return merged
