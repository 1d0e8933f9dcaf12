"""Decode loops of `decode_loops.py` for bfloat16 on a processor's matrix units (AMX).

For each KV head, the queries of all rows that read an item are the columns of one matrix product; the heads of a
group lie side by side. Scores are K · Qᵀ for 16 positions at a time, with K read in place from the pool. Each
position is one row of scores of all heads, so maxima, weights and sums are computed down the columns. Weights are
rounded to bfloat16. The softmax divides by the sum of the rounded weights. Products of weights and V take two
positions side by side and accumulate in float32.

A column's sums depend on nothing but that column. A row's result therefore does not depend on the other rows that
read an item with it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock.kernels.cpu.amx_tiles import (
    AT_ONCE,
    CONFIGURATION_BYTES,
    PAIRED,
    TILE_BYTES,
    TILE_ROWS,
    add_four_products,
    add_two_products,
    are_there,
    configure,
    in_order,
    largest_of_columns,
    multiply_four,
    pair_rows,
    release,
    scores_configuration,
    sums_configuration,
    transpose,
    weights_of_columns,
)
from rootstock.kernels.cpu.compiler import c_function, compiled, exp, fetch_add, nb, pointer_to
from rootstock.kernels.cpu.decode_loops import JOB, LOWEST, arrays_of, attend, claim, end_item, scratch_of

_SIZES = ("q_heads", "kv_heads", "key_dim", "value_dim")

# For each number of columns: the tile configurations for scores and for sums.
_CONFIGURATIONS = np.array(
    [
        [scores_configuration(max(columns, 1)), sums_configuration(max(columns, 1))]
        for columns in range(TILE_ROWS + 1)
    ]
)
assert _CONFIGURATIONS.shape == (TILE_ROWS + 1, 2, CONFIGURATION_BYTES)


def fit_matrix_units(block_size: int, key_dim: int, value_dim: int) -> bool:
    """Returns whether AMX is available and the loops support pools with these dimensions."""
    fit = block_size % TILE_ROWS == 0 and key_dim % PAIRED == 0 and value_dim % PAIRED == 0
    return fit and are_there()


def scratch_bytes(readers: int, positions: int, job: NDArray[np.void]) -> int:
    """Computes the bytes of scratch memory that `_attend` needs for an item of `readers` rows and up to
    `positions`."""
    q_heads, kv_heads, key_dim, value_dim = (int(job[name]) for name in _SIZES)
    of_head = readers * (q_heads // kv_heads)
    tiles = -(-of_head // TILE_ROWS)
    columns = kv_heads * tiles * -(-of_head // tiles)
    wide = -(-columns // 16) * 16
    queries = kv_heads * tiles * (key_dim // PAIRED) * TILE_BYTES
    values = (1 + PAIRED) * value_dim * 2
    return queries + values + columns * value_dim * 4 + 2 * wide * 4 + 2 * (positions + PAIRED) * wide * 4


@compiled
def _lay_out_queries(job: Any, rows: Any, of_readers: Any, width: Any, tiles: Any, to: Any) -> None:
    """Copies the queries [q_heads, key_dim] bfloat16 of some rows to tiles of B, for each KV head `width` columns at
    a time."""
    group = job.q_heads // job.kv_heads
    steps = job.key_dim // PAIRED
    pairs = nb.carray(pointer_to(to), (job.kv_heads * tiles, steps, 16, 16), np.uint32)
    for reader in range(len(of_readers)):
        row = rows[of_readers[reader], 0]
        for h in range(job.q_heads):
            column = reader * group + h % group
            tile = h // group * tiles + column // width
            x = column % width
            start = job.query + 2 * (row * job.query_row + h * job.query_head)
            query = nb.carray(pointer_to(start), (steps, 16), np.uint32)
            for step in range(steps):
                for pair in range(16):
                    pairs[tile, step, pair, x] = query[step, pair]


@compiled
def _score(
    job: Any, table: Any, begin: Any, end: Any, b: Any, tiles: Any, width: Any, to: Any, stride: Any
) -> None:
    """Computes the scores of the positions begin … end - 1, rounded up to whole tiles; `begin` is a multiple of 16.

    b: queries as tiles; to: [positions, columns] float32, with rows `stride` bytes apart
    """
    steps = job.key_dim // PAIRED
    row_bytes = 2 * job.key_dim
    pool_stride = job.kv_heads * row_bytes
    of_queries = steps * TILE_BYTES
    last = job.kv_heads * tiles - 1
    for position in range(begin, end, TILE_ROWS):
        at = _place(job.keys, table, position, job.block_size, pool_stride)
        c = to + (position - begin) * stride
        for p0 in range(0, last + 1, AT_ONCE):
            # If fewer than four are left, the last product is computed again: it takes no extra time.
            p1, p2, p3 = min(p0 + 1, last), min(p0 + 2, last), min(p0 + 3, last)
            multiply_four(
                at + p0 // tiles * row_bytes,
                at + p1 // tiles * row_bytes,
                at + p2 // tiles * row_bytes,
                at + p3 // tiles * row_bytes,
                pool_stride,
                b + p0 * of_queries,
                b + p1 * of_queries,
                b + p2 * of_queries,
                b + p3 * of_queries,
                steps,
                c + p0 * width * 4,
                c + p1 * width * 4,
                c + p2 * width * 4,
                c + p3 * width * 4,
                stride,
            )


@compiled
def _place(pool: Any, table: Any, position: Any, block_size: Any, stride: Any) -> Any:
    """Returns the address of a position's row."""
    return pool + (np.int64(table[position // block_size]) * block_size + position % block_size) * stride


@compiled
def _hide(scores: Any, first: Any, end: Any, begin: Any, until: Any) -> None:
    """Sets scores [positions, columns] to LOWEST outside the positions first … end - 1, in columns begin … until -
    1."""
    for position in range(scores.shape[0]):
        if position < first or position >= end:
            for column in range(begin, until):
                scores[position, column] = LOWEST


@compiled
def _cap(scores: Any, scale: Any, softcap: Any) -> None:
    """Replaces scores by softcap · tanh(scale · scores / softcap)."""
    every = scores.reshape(-1)
    for i in range(len(every)):
        score = every[i] * scale
        e = exp(np.float32(-2) * abs(score) / softcap)
        tanh = (np.float32(1) - e) / (np.float32(1) + e)
        every[i] = softcap * (tanh if score > 0 else -tanh)


@compiled
def _weigh(
    job: Any,
    table: Any,
    begin: Any,
    first: Any,
    end: Any,
    weights: Any,
    weights_stride: Any,
    tiles: Any,
    width: Any,
    zeros: Any,
    values: Any,
    sums: Any,
) -> None:
    """Adds weights · V over the positions first … end - 1 to sums. The weights' first position is `begin`.

    weights: [columns, positions] bfloat16, with rows `weights_stride` bytes apart; zeros [value_dim] bfloat16;
    values: scratch for 32 positions of a head; sums [columns, value_dim] float32, with dimensions in the order of
    `pair_rows`
    """
    of_head = 2 * job.value_dim
    stride = job.kv_heads * of_head
    sums_stride = 4 * job.value_dim
    fours = job.value_dim // 64
    for group in range(begin, end, PAIRED):
        for head in range(job.kv_heads):
            for position in range(group, group + PAIRED, TILE_ROWS):
                to = values + (position - group) * (TILE_BYTES // PAIRED)
                if position >= first and position + TILE_ROWS <= end:
                    at = _place(job.values, table, position, job.block_size, stride) + head * of_head
                    for pair in range(TILE_ROWS // 2):
                        even = at + 2 * pair * stride
                        pair_rows(even, even + stride, job.value_dim, to + 64 * pair)
                else:
                    _lay_out_edge(job, table, position, first, end, head * of_head, zeros, to)
            for tile in range(tiles):
                column = (head * tiles + tile) * width
                a = weights + column * weights_stride + 2 * (group - begin)
                c = sums + column * sums_stride
                for four in range(fours):
                    b = values + 4 * four * TILE_BYTES
                    add_four_products(a, weights_stride, b, c + 256 * four, sums_stride)
                if job.value_dim % 64:
                    b = values + 4 * fours * TILE_BYTES
                    add_two_products(a, weights_stride, b, c + 256 * fours, sums_stride)


@compiled
def _lay_out_edge(
    job: Any, table: Any, position: Any, first: Any, end: Any, along: Any, zeros: Any, to: Any
) -> None:
    """Copies sixteen positions of V of which not all are visible: the others become zeros, because rows that were
    never written may hold anything, even NaN."""
    stride = 2 * job.kv_heads * job.value_dim
    for pair in range(TILE_ROWS // 2):
        even, odd = position + 2 * pair, position + 2 * pair + 1
        even_at, odd_at = zeros, zeros
        if first <= even < end:
            even_at = _place(job.values, table, even, job.block_size, stride) + along
        if first <= odd < end:
            odd_at = _place(job.values, table, odd, job.block_size, stride) + along
        pair_rows(even_at, odd_at, job.value_dim, to + 64 * pair)


@compiled
def _attend(job: Any, item: Any, rows: Any, of_readers: Any, scratch: Any) -> None:
    """Computes an item's partial results and writes them."""
    table = nb.carray(pointer_to(job.tables + 4 * item[0]), (1,), np.int32)
    first, end = item[1], item[2]
    readers = len(of_readers)
    group = job.q_heads // job.kv_heads
    tiles = (readers * group + TILE_ROWS - 1) // TILE_ROWS
    width = (readers * group + tiles - 1) // tiles
    columns = job.kv_heads * tiles * width
    wide = (columns + 15) // 16 * 16
    begin = first // TILE_ROWS * TILE_ROWS
    positions = (end - begin + PAIRED - 1) // PAIRED * PAIRED
    # Layout of a thread's scratch memory; `scratch_bytes` computes its size.
    zeros = scratch
    queries = zeros + 2 * job.value_dim
    values = queries + job.kv_heads * tiles * (job.key_dim // PAIRED) * TILE_BYTES
    sums = values + PAIRED * job.value_dim * 2
    tops = sums + columns * job.value_dim * 4
    totals = tops + wide * 4
    scores_at = totals + wide * 4
    pairs = scores_at + positions * wide * 4
    weights = pairs + positions * wide * 2
    scores = nb.carray(pointer_to(scores_at), (positions, wide), np.float32)
    stride = wide * 4

    nb.carray(pointer_to(zeros), (job.value_dim,), np.uint16)[:] = np.uint16(0)
    nb.carray(pointer_to(sums), (columns * job.value_dim,), np.float32)[:] = np.float32(0)
    _lay_out_queries(job, rows, of_readers, width, tiles, queries)
    configure(_CONFIGURATIONS.ctypes.data + 2 * width * CONFIGURATION_BYTES)
    _score(job, table, begin, end, queries, tiles, width, scores_at, stride)
    scale = job.scale
    if job.softcap > 0:
        _cap(scores, scale, job.softcap)
        scale = np.float32(1)
    if first > begin or end < begin + positions:
        _hide(scores, first - begin, end - begin, 0, wide)
    for reader in range(readers):
        row = rows[of_readers[reader]]
        if row[1] > first or row[2] < end:
            for head in range(job.kv_heads):
                column = head * tiles * width + reader * group
                _hide(scores, row[1] - begin, row[2] - begin, column, column + group)
    for column in range(0, wide, 16):
        along = 4 * column
        largest_of_columns(scores_at + along, stride, positions, tops + along)
        top = nb.carray(pointer_to(tops + along), (16,), np.float32)
        for i in range(16):
            top[i] *= scale
        weights_of_columns(
            scores_at + along, stride, positions // 2, scale, tops + along, totals + along, pairs + along
        )
        for pair in range(0, positions // 2, 16):
            transpose(
                pairs + pair * stride + along,
                stride,
                weights + (column * positions + 2 * pair) * 2,
                positions * 2,
            )
    configure(_CONFIGURATIONS.ctypes.data + (2 * width + 1) * CONFIGURATION_BYTES)
    _weigh(job, table, begin, first, end, weights, positions * 2, tiles, width, zeros, values, sums)

    largest = nb.carray(pointer_to(job.largest), (1, job.q_heads), np.float32)
    total = nb.carray(pointer_to(job.total), (1, job.q_heads), np.float32)
    weighted = nb.carray(pointer_to(job.weighted), (1, job.q_heads, job.value_dim), np.float32)
    all_tops = nb.carray(pointer_to(tops), (wide,), np.float32)
    all_totals = nb.carray(pointer_to(totals), (wide,), np.float32)
    for reader in range(readers):
        partial = item[3] + reader
        row = rows[of_readers[reader]]
        if max(first, row[1]) >= min(end, row[2]):  # the row sees no position of this item
            largest[partial, :] = LOWEST
            total[partial, :] = np.float32(0)
            weighted[partial, :, :] = np.float32(0)
            continue
        for h in range(job.q_heads):
            column = h // group * tiles * width + reader * group + h % group
            largest[partial, h] = all_tops[column]
            total[partial, h] = all_totals[column]
            to = job.weighted + 4 * (partial * job.q_heads + h) * job.value_dim
            in_order(sums + 4 * column * job.value_dim, job.value_dim, to)


@compiled
def _work(job: Any) -> None:
    """Runs one thread's share of a call: claims items until none is left.

    An item that only one row reads is computed with vectors: it is limited by memory, and vectors read memory in the
    better order.
    """
    items, rows, partial_rows, counters = arrays_of(job)
    keys = nb.carray(pointer_to(job.keys), (1, job.block_size, job.kv_heads, job.key_dim), np.uint16)
    values = nb.carray(pointer_to(job.values), (1, job.block_size, job.kv_heads, job.value_dim), np.uint16)
    for_vectors = scratch_of(job)
    thread = fetch_add(counters, 0, 1)
    scratch = job.scratch + thread * job.scratch_bytes
    while True:
        number = claim(job, counters, thread)
        if number < 0:
            break
        item = items[number]
        if item[4] - item[3] == 1:
            attend(job, item, keys, values, rows, partial_rows, for_vectors)
        else:
            _attend(job, item, rows, partial_rows[item[3] : item[4]], scratch)
        end_item(job, item, rows, partial_rows, counters)
    release()


def _work_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0])


@cache
def matrix_loops() -> int:
    """Returns the address of the loops, like `decode_loops.loops_for`, for pools in bfloat16. Requires
    `fit_matrix_units`."""
    return c_function(_work_bfloat16, JOB)
