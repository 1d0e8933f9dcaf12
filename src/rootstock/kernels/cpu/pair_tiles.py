"""Tiles of keys and values, laid out for products of pairs of bfloat16 (`pair_products.py`).

A tile is 64 positions of one key head, read from a pool in bfloat16 or int8 through a block table:

    keys      [key_dim / 2, 64] pairs of neighbouring dimensions
    values    [32, value_dim] pairs of neighbouring positions

Numbers at positions that nobody sees are zeros, because memory that was never written may hold anything, even NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rootstock.kernels.cpu.amx_tiles import transpose
from rootstock.kernels.cpu.compiler import compiled, narrow, nb, pointer_to, widen
from rootstock.kernels.cpu.pair_products import (
    TILE,
    few_weigh_32,
    few_weigh_64,
    interleave,
    weigh_32,
    weigh_64,
    weights_of_few,
    weights_of_tile,
)
from rootstock.kernels.cpu.vector_lanes import LANES
from rootstock.kernels.cpu.vector_products import holds_bfloat16


@compiled
def slot_of(table: Any, position: Any, size: Any) -> Any:
    """Returns the slot of a position in the pool. table: block numbers; size: positions of a block"""
    block = position // size
    return np.int64(table[block]) * size + position - block * size


@compiled
def _copy_rows(pool: Any, scales: Any, is_scaled: Any, head: Any, slots: Any, rows: Any) -> None:
    """Copies the pool's rows of a head to rows [64, dim] bfloat16. A slot below 0: zeros. `is_scaled`: the pool is
    int8, and has scales."""
    dim = rows.shape[1]
    for t in range(TILE):
        into = rows[t]
        slot = slots[t]
        if slot < 0:
            for d in range(dim):
                into[d] = np.uint16(0)
        elif is_scaled:
            given = pool[slot, head]
            scale = scales[slot, head]
            for d in range(dim):
                into[d] = narrow(widen(given[d]) * scale, into)
        else:
            given = pool[slot, head]
            for d in range(dim):
                into[d] = given[d]


@compiled
def tiles_at(at: Any, key_dim: Any, value_dim: Any) -> Any:
    """Returns scratch memory of `tile_bytes` as slots, copied keys and values, and the laid out keys and values."""
    slots = nb.carray(pointer_to(at), (TILE,), np.int64)
    at += 8 * TILE
    of_keys = nb.carray(pointer_to(at), (TILE, key_dim), np.uint16)
    at += 2 * TILE * key_dim
    of_values = nb.carray(pointer_to(at), (TILE, value_dim), np.uint16)
    at += 2 * TILE * value_dim
    key_tile = nb.carray(pointer_to(at), (key_dim // 2, TILE), np.int32)
    at += 2 * TILE * key_dim
    value_tile = nb.carray(pointer_to(at), (TILE // 2, value_dim), np.int32)
    return slots, of_keys, of_values, key_tile, value_tile


def tile_bytes(key_dim: int, value_dim: int) -> int:
    return 8 * TILE + 4 * TILE * (key_dim + value_dim)


@compiled
def lay_out_tile(
    job: Any, table: Any, first: Any, lowest: Any, end: Any, head: Any, tiles: Any, element: Any
) -> None:
    """Lays out a head's keys and values at the positions first … first + 63, of which lowest … end - 1 are read.

    job     keys, values, key_scales, value_scales, kv_heads, key_dim, value_dim, block_size of the pool
    table   block numbers of the sequence
    tiles   result of `tiles_at`
    """
    slots, of_keys, of_values, key_tile, value_tile = tiles
    heads, key_dim, value_dim, size, many = job.kv_heads, job.key_dim, job.value_dim, job.block_size, 1 << 40
    keys = nb.carray(pointer_to(job.keys), (many, heads, key_dim), element)
    values = nb.carray(pointer_to(job.values), (many, heads, value_dim), element)
    # Rows of a block follow each other, so that they can be read where they are.
    in_place = holds_bfloat16(keys) and size % LANES == 0 and lowest <= first and first + TILE <= end
    key_stride, value_stride = 2 * key_dim, 2 * value_dim
    if in_place:
        key_stride, value_stride = key_stride * heads, value_stride * heads
    else:
        for t in range(TILE):
            p = first + t
            slots[t] = slot_of(table, p, size) if lowest <= p < end else -1
        is_scaled = job.key_scales != 0
        key_scales = nb.carray(pointer_to(job.key_scales), (many, heads), np.float32)
        value_scales = nb.carray(pointer_to(job.value_scales), (many, heads), np.float32)
        _copy_rows(keys, key_scales, is_scaled, head, slots, of_keys)
        _copy_rows(values, value_scales, is_scaled, head, slots, of_values)
    for t in range(0, TILE, LANES):
        key_at, value_at = of_keys[t].ctypes.data, of_values[t].ctypes.data
        if in_place:
            slot = slot_of(table, first + t, size)
            key_at, value_at = keys[slot, head].ctypes.data, values[slot, head].ctypes.data
        for pair in range(0, key_dim // 2, LANES):
            transpose(key_at + 4 * pair, key_stride, key_tile[pair, t:].ctypes.data, 4 * TILE)
        for pair in range(LANES // 2):
            even = value_at + 2 * pair * value_stride
            interleave(even, even + value_stride, value_dim, value_tile[t // 2 + pair].ctypes.data)


@compiled
def attend_tile(
    query: Any,
    limits: Any,
    scale: Any,
    first: Any,
    tops: Any,
    sums: Any,
    weights: Any,
    out: Any,
    tiles: Any,
    is_few: Any,
) -> None:
    """Adds a tile that is laid out to the results of `AT_ONCE` rows, or of `FEW`.

    query, limits, tops, sums, weights   addresses as in `weights_of_tile`
    first   position of the tile
    out     address of [rows, value_dim] float32
    tiles   result of `tiles_at`
    """
    key_tile, value_tile = tiles[3], tiles[4]
    keys, values, pairs, value_dim = (
        key_tile.ctypes.data,
        value_tile.ctypes.data,
        key_tile.shape[0],
        value_tile.shape[1],
    )
    factors, stride, wide = tops + 4 * LANES, 4 * value_dim, value_dim // 64 * 64
    if is_few:
        weights_of_few(query, keys, pairs, scale, limits, first, tops, sums, weights)
        for d in range(0, wide, 64):
            few_weigh_64(weights, values + 4 * d, stride, factors, out + 4 * d)
        if wide < value_dim:
            few_weigh_32(weights, values + 4 * wide, stride, factors, out + 4 * wide)
    else:
        weights_of_tile(query, keys, pairs, scale, limits, first, tops, sums, weights)
        for d in range(0, wide, 64):
            weigh_64(weights, values + 4 * d, stride, factors, out + 4 * d)
        if wide < value_dim:
            weigh_32(weights, values + 4 * wide, stride, factors, out + 4 * wide)
