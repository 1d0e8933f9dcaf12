"""Decode loops of `decode_loops.py` by products of pairs of bfloat16 (AVX512-BF16), for pools in bfloat16 or int8.

For each key head, the queries of all rows that read an item are the rows of one product with a tile of 64 positions,
as in `prefill_loops.py`: six rows in registers, or two where there are no more.

A row's sums in an item depend neither on the other rows that read it nor on threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock.kernels.cpu import amx_tiles
from rootstock.kernels.cpu.compiler import c_function, compiled, fetch_add, nb, pointer_to
from rootstock.kernels.cpu.decode_loops import JOB, LOWEST, arrays_of, attend, claim, end_item, scratch_of
from rootstock.kernels.cpu.pair_products import AT_ONCE, FEW, TILE, has_pair_products
from rootstock.kernels.cpu.pair_tiles import attend_tile, lay_out_tile, tile_bytes, tiles_at
from rootstock.kernels.cpu.prefill_loops import MULTIPLE
from rootstock.kernels.cpu.vector_lanes import LANES


def fit_pair_products(key_dim: int, value_dim: int) -> bool:
    """Returns whether the loops support these dimensions, and are faster than the other ones here."""
    fit = key_dim % MULTIPLE == value_dim % MULTIPLE == 0
    return fit and has_pair_products() and not amx_tiles.are_there()


def pair_scratch_bytes(readers: int, job: NDArray[np.void]) -> int:
    """Computes the bytes of scratch memory that `_attend` needs for an item of `readers` rows."""
    q_heads, kv_heads, key_dim, value_dim = (
        int(job[name]) for name in ("q_heads", "kv_heads", "key_dim", "value_dim")
    )
    units = -(-readers * (q_heads // kv_heads) // AT_ONCE)
    of_rows = AT_ONCE * (2 * key_dim + 4 * value_dim + 4 * LANES) + 8 * LANES
    limits = 8 * units * AT_ONCE
    return kv_heads * units * of_rows + limits + 2 * AT_ONCE * TILE + tile_bytes(key_dim, value_dim)


@compiled
def _attend(job: Any, item: Any, rows: Any, of_readers: Any, scratch: Any, element: Any) -> None:
    """Computes an item's partial results and writes them."""
    begin, end, readers = item[1], item[2], len(of_readers)
    kv_heads, key_dim, value_dim = job.kv_heads, job.key_dim, job.value_dim
    group = job.q_heads // kv_heads
    count = readers * group
    units = (count + AT_ONCE - 1) // AT_ONCE
    padded = units * AT_ONCE

    at = scratch
    query = nb.carray(pointer_to(at), (kv_heads, padded, key_dim), np.uint16)
    at += 2 * kv_heads * padded * key_dim
    out = nb.carray(pointer_to(at), (kv_heads, padded, value_dim), np.float32)
    at += 4 * kv_heads * padded * value_dim
    tops = nb.carray(pointer_to(at), (kv_heads, units, 2, LANES), np.float32)
    at += 8 * kv_heads * units * LANES
    sums = nb.carray(pointer_to(at), (kv_heads, padded, LANES), np.float32)
    at += 4 * kv_heads * padded * LANES
    limits = nb.carray(pointer_to(at), (padded, 2), np.int32)
    at += 8 * padded
    weights = nb.carray(pointer_to(at), (AT_ONCE, TILE), np.uint16)
    at += 2 * AT_ONCE * TILE
    tiles = tiles_at(at, key_dim, value_dim)

    table = nb.carray(pointer_to(job.tables + 4 * item[0]), (1,), np.int32)
    given = nb.carray(pointer_to(job.query), (1,), np.uint16)
    for r in range(padded):
        limits[r, 0], limits[r, 1] = 0, 0
        if r < count:
            row = rows[of_readers[r // group]]
            limits[r, 0], limits[r, 1] = max(row[1], begin), min(row[2], end)
        for head in range(kv_heads):
            into = query[head, r]
            if r < count:
                source = row[0] * job.query_row + (head * group + r % group) * job.query_head
                for d in range(key_dim):
                    into[d] = given[source + d]
            else:
                for d in range(key_dim):
                    into[d] = np.uint16(0)
            for d in range(value_dim):
                out[head, r, d] = np.float32(0)
            for i in range(LANES):
                sums[head, r, i] = np.float32(0)
    for head in range(kv_heads):
        for u in range(units):
            for i in range(LANES):
                tops[head, u, 0, i] = LOWEST

    for first in range(begin // TILE * TILE, end, TILE):
        for head in range(kv_heads):
            lay_out_tile(job, table, first, begin, end, head, tiles, element)
            for u in range(units):
                r = u * AT_ONCE
                attend_tile(
                    query[head, r].ctypes.data,
                    limits[r].ctypes.data,
                    job.scale,
                    first,
                    tops[head, u].ctypes.data,
                    sums[head, r].ctypes.data,
                    weights.ctypes.data,
                    out[head, r].ctypes.data,
                    tiles,
                    count - r <= FEW,
                )

    shape = (job.partial_count, job.q_heads)
    largest = nb.carray(pointer_to(job.largest), shape, np.float32)
    total = nb.carray(pointer_to(job.total), shape, np.float32)
    weighted = nb.carray(pointer_to(job.weighted), (shape[0], shape[1], value_dim), np.float32)
    for r in range(count):
        partial = item[3] + r // group
        for head in range(kv_heads):
            number = head * group + r % group
            of_row = np.float32(0)
            for i in range(LANES):
                of_row += sums[head, r, i]
            largest[partial, number] = tops[head, r // AT_ONCE, 0, r % AT_ONCE]
            total[partial, number] = of_row
            into, own = weighted[partial, number], out[head, r]
            for d in range(value_dim):
                into[d] = own[d]


@compiled
def _work(job: Any, element: Any) -> None:
    """Runs one thread's share of a call: claims items until none is left.

    An item that only one row reads is computed with vectors: laying out a tile would take as long as its products.
    """
    items, rows, partial_rows, counters = arrays_of(job)
    keys = nb.carray(pointer_to(job.keys), (1, job.block_size, job.kv_heads, job.key_dim), element)
    values = nb.carray(pointer_to(job.values), (1, job.block_size, job.kv_heads, job.value_dim), element)
    for_vectors = scratch_of(job)
    thread = fetch_add(counters, 0, 1)
    scratch = job.scratch + thread * job.scratch_bytes
    while True:
        number = claim(job, counters, thread)
        if number < 0:
            return
        item = items[number]
        if item[4] - item[3] == 1:
            attend(job, item, keys, values, rows, partial_rows, for_vectors)
        else:
            _attend(job, item, rows, partial_rows[item[3] : item[4]], scratch, element)
        end_item(job, item, rows, partial_rows, counters)


def _work_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16)


def _work_int8(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.int8)


_FUNCTIONS = {np.dtype(np.uint16): _work_bfloat16, np.dtype(np.int8): _work_int8}


@cache
def pair_loops_for(element: np.dtype[Any]) -> int:
    """Returns the address of the loops, like `decode_loops.loops_for`, for pools in bfloat16 (uint16) or int8.
    Requires `fit_pair_products`."""
    return c_function(_FUNCTIONS[element], JOB)
