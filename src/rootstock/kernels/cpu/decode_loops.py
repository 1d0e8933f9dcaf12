"""Compiled loops for attention of few rows over long contexts, reading K/V in place through the block table.

The cost is reading memory. K and V are therefore read once, in order, prefetched, and widened to float32 in
registers. A context is cut into items, which threads claim one after the other. For every row that reads an item, the
item yields the largest score, the sum of weights and the weighted sum of values (flash-decoding). The thread that
ends a row's last item merges the row's partial results in the order of their positions. A row's result therefore
depends neither on the threads nor on the other rows of the step.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from rootstock.kernels.cpu.compiler import c_function, compiled, exp, fetch_add, narrow, nb, pointer_to, widen
from rootstock.kernels.cpu.vector_lanes import LANES
from rootstock.kernels.cpu.vector_products import (
    ROWS,
    holds_bfloat16,
    join_row,
    largest_score,
    part_row,
    prefetch_rows,
    score_last,
    score_last_parted,
    score_one,
    score_one_parted,
    score_two,
    score_two_parted,
    weigh_last,
    weigh_last_parted,
    weigh_one,
    weigh_one_parted,
    weigh_two,
    weigh_two_parted,
    weights_of_scores,
)

TILE = 64  # positions whose scores are weighed together
AHEAD = 8  # rows of a pool that are prefetched into the second cache before they are needed
LOWEST = np.float32(-1e30)  # stands for -infinity: the largest score of a row that sees no position

JOB = np.dtype(
    [
        # Fields of a call, filled in by `OF_CALL` in this order.
        ("query", "i8"),  # address of [rows, q_heads, key_dim]; strides of rows and heads follow, in elements
        ("query_row", "i8"),
        ("query_head", "i8"),
        ("query_is_bfloat16", "i8"),  # 0: float32
        ("out", "i8"),  # address of [rows, q_heads, value_dim], contiguous, of the same dtype
        ("keys", "i8"),  # address of [slots, kv_heads, key_dim]; with latents [slots, 1, value_dim]
        # address of [slots, kv_heads, value_dim]; with latents rotary keys, [slots, 1, rope]
        ("values", "i8"),
        ("key_scales", "i8"),  # address of [slots, kv_heads] float32 if keys are int8, or 0
        ("value_scales", "i8"),
        ("q_heads", "i8"),
        ("kv_heads", "i8"),
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        ("sinks", "i8"),  # address of [q_heads] float32, or 0
        ("largest", "i8"),  # address of [partials, q_heads] float32
        ("total", "i8"),  # likewise
        ("weighted", "i8"),  # address of [partials, q_heads, value_dim] float32
        ("threads", "i8"),
        ("scale", "f4"),
        ("softcap", "f4"),  # or 0
        # Fields of a step.
        ("tables", "i8"),  # address of int32: block tables, one after the other
        ("items", "i8"),  # address of [items, 5] int64: see below
        ("item_count", "i8"),
        ("rows", "i8"),  # address of [rows, 5] int64: see below
        ("row_count", "i8"),
        ("partial_count", "i8"),
        ("partial_rows", "i8"),  # address of [partials] int64: the index in `rows` of each partial result
        ("order", "i8"),  # address of [partials] int64: partial results, row by row
        ("most_readers", "i8"),  # largest number of rows of an item
        # Fields that are the same for all steps.
        # Address of [1 + rows + threads] int64: number of threads that have started; for each row the number of items
        # left; for each thread's part the number of items claimed.
        ("counters", "i8"),
        ("scratch", "i8"),  # address of `scratch_bytes` bytes for each thread, for the matrix units
        ("scratch_bytes", "i8"),
        ("are_latents", "i8"),
        ("block_size", "i8"),
    ]
)
OF_CALL = struct.Struct(
    "=18q2f"
)  # packing all fields at once takes a tenth of the time of single assignments
# Columns of `items`: table, first, end, first_partial, end_partial.
# Columns of `rows`: row, first, end, first_order, end_order.


@compiled
def _score_block(
    query: Any,
    start: Any,
    pool: Any,
    block: Any,
    next_pool: Any,
    next_block: Any,
    offset: Any,
    n: Any,
    scores: Any,
    at: Any,
    readers: Any,
) -> None:
    """Adds query[h, start: start + dim] · pool[block, offset + i, kv head of h] to scores[h, at + i], for i < n.

    query [readers · q_heads, key_dim], pool [blocks, block_size, kv_heads, dim], scores [readers · q_heads, TILE].
    `next_block` of `next_pool` is the block that is read next; its rows are prefetched.
    """
    q_heads = query.shape[0] // readers
    _, size, kv_heads, dim = pool.shape
    group = q_heads // kv_heads
    parted = _are_parted(pool)
    i = np.int64(0)
    if dim % LANES == 0:
        while i + ROWS <= n:
            ahead = offset + i + AHEAD
            row = offset + i
            for kv_head in range(kv_heads):
                if ahead + ROWS <= size:
                    prefetch_rows(pool, block, ahead, kv_head)
                elif ahead >= size:
                    prefetch_rows(next_pool, next_block, ahead - size, kv_head)
                for reader in range(readers):  # all readers, while these rows are in the first-level cache
                    h = reader * q_heads + kv_head * group
                    end = h + group
                    while h + 2 <= end:
                        if parted:
                            score_two_parted(query, h, start, pool, block, row, kv_head, scores, at + i)
                        else:
                            score_two(query, h, start, pool, block, row, kv_head, scores, at + i)
                        h += 2
                    if h < end and parted:
                        score_one_parted(query, h, start, pool, block, row, kv_head, scores, at + i)
                    elif h < end:
                        score_one(query, h, start, pool, block, row, kv_head, scores, at + i)
            i += ROWS
    while i < n:
        for h in range(query.shape[0]):
            kv_head = h % q_heads // group
            if parted:
                score_last_parted(query, h, start, pool, block, offset + i, kv_head, scores, at + i)
            elif dim % LANES == 0:
                score_last(query, h, start, pool, block, offset + i, kv_head, scores, at + i)
            else:
                total = np.float32(0)
                for d in range(dim):
                    total += query[h, start + d] * widen(pool[block, offset + i, kv_head, d])
                scores[h, at + i] += total
        i += 1


@compiled
def _are_parted(pool: Any) -> Any:
    """Returns whether the loops separate even and odd dimensions. pool [blocks, block_size, kv_heads, dim]"""
    return holds_bfloat16(pool) and pool.shape[3] % (2 * LANES) == 0


@compiled
def _weigh_block(
    scores: Any, at: Any, pool: Any, block: Any, next_block: Any, offset: Any, n: Any, weighted: Any
) -> None:
    """Adds Σ scores[h, at + i] · pool[block, offset + i, kv head of h] over i < n to weighted[h].

    scores [q_heads, TILE] hold weights here, pool [blocks, block_size, kv_heads, dim], weighted [q_heads, dim]
    """
    q_heads, dim = weighted.shape
    _, size, kv_heads, _ = pool.shape
    group = q_heads // kv_heads
    parted = _are_parted(pool)
    i = np.int64(0)
    if dim % LANES == 0:
        while i + ROWS <= n:
            ahead = offset + i + AHEAD
            row = offset + i
            for kv_head in range(kv_heads):
                # Values are prefetched like keys. The code is repeated: a shared function cost a tenth of the total
                # time.
                if ahead + ROWS <= size:
                    prefetch_rows(pool, block, ahead, kv_head)
                elif ahead >= size:
                    prefetch_rows(pool, next_block, ahead - size, kv_head)
                h = kv_head * group
                end = h + group
                while h + 2 <= end:
                    if parted:
                        weigh_two_parted(scores, at + i, h, pool, block, row, kv_head, weighted)
                    else:
                        weigh_two(scores, at + i, h, pool, block, row, kv_head, weighted)
                    h += 2
                if h < end and parted:
                    weigh_one_parted(scores, at + i, h, pool, block, row, kv_head, weighted)
                elif h < end:
                    weigh_one(scores, at + i, h, pool, block, row, kv_head, weighted)
            i += ROWS
    while i < n:
        for h in range(q_heads):
            kv_head = h // group
            if parted:
                weigh_last_parted(scores, at + i, h, pool, block, offset + i, kv_head, weighted)
            elif dim % LANES == 0:
                weigh_last(scores, at + i, h, pool, block, offset + i, kv_head, weighted)
            else:
                weight = scores[h, at + i]
                for d in range(dim):
                    weighted[h, d] += weight * widen(pool[block, offset + i, kv_head, d])
        i += 1


@compiled
def _scale_tile(scores: Any, scales: Any, table: Any, first: Any, n: Any, readers: Any, by_head: Any) -> None:
    """Multiplies scores[h, i] by the scale of position first + i and the KV head of h, for i < n.

    scores [readers · q_heads, TILE], scales [blocks, block_size, kv_heads], by_head [kv_heads, TILE] scratch
    """
    size = scales.shape[1]
    q_heads = scores.shape[0] // readers
    group = q_heads // by_head.shape[0]
    for i in range(n):
        of_position = scales[table[(first + i) // size], (first + i) % size]
        for kv_head in range(by_head.shape[0]):
            by_head[kv_head, i] = of_position[kv_head]
    for h in range(scores.shape[0]):
        row, factors = scores[h], by_head[h % q_heads // group]
        for i in range(n):
            row[i] *= factors[i]


@compiled
def _weights_of(scores: Any, n: Any, softcap: Any, largest: Any, total: Any, weighted: Any) -> None:
    """Replaces scores by weights relative to the largest score so far, and rescales the previous sums to it.

    scores [q_heads, TILE], of which n are used; largest and total [q_heads], weighted [q_heads, value_dim]
    """
    for h in range(scores.shape[0]):
        row = scores[h]
        if softcap > 0:
            for i in range(n):
                e = exp(np.float32(-2) * abs(row[i]) / softcap)
                tanh = (np.float32(1) - e) / (np.float32(1) + e)
                row[i] = softcap * (tanh if row[i] > 0 else -tanh)
        vectors = (n + LANES - 1) // LANES
        for i in range(n, vectors * LANES):
            row[i] = LOWEST
        top = largest_score(scores, h, vectors, largest[h])
        s = weights_of_scores(scores, h, vectors, top)
        if top != largest[h]:
            shrink = exp(largest[h] - top)
            out = weighted[h]
            for d in range(out.shape[0]):
                out[d] *= shrink
            total[h] *= shrink
            largest[h] = top
        total[h] += s


@compiled
def _attend_tile(
    query: Any,
    keys: Any,
    values: Any,
    key_scales: Any,
    value_scales: Any,
    are_latents: Any,
    are_rounded: Any,
    by_head: Any,
    table: Any,
    first: Any,
    n: Any,
    softcap: Any,
    readers: Any,
    scores: Any,
    largest: Any,
    total: Any,
    weighted: Any,
) -> None:
    """Attends rows to the positions first … first + n - 1 of one sequence, n ≤ TILE. Adds to largest, total,
    weighted.

    query [readers · q_heads, key_dim], keys and values [blocks, block_size, kv_heads, …], scores [readers · q_heads,
    TILE] scratch, largest and total [readers · q_heads], weighted [readers · q_heads, value_dim], key_scales and
    value_scales [blocks, block_size, kv_heads] of quantized keys and values, by_head [kv_heads, TILE] scratch. A
    key's scale multiplies its score and a value's scale its weight, so rows are never dequantized.
    """
    size = keys.shape[1]
    begin, last = first // size, (first + n - 1) // size
    for h in range(scores.shape[0]):
        for i in range(n):
            scores[h, i] = np.float32(0)
    rank = np.int64(weighted.shape[1])
    beginning = np.int64(0)  # typed, because a literal 0 would compile the loops a second time
    at = beginning
    for index in range(begin, last + 1):
        offset = (first + at) % size
        count = min(n - at, size - offset)
        block = np.int64(table[index])
        following = np.int64(table[index + 1] if index < last else table[begin])
        if are_latents:
            # After the last keys the values are read. With latents these are the keys again, which are in the cache.
            _score_block(query, beginning, keys, block, keys, following, offset, count, scores, at, readers)
            _score_block(query, rank, values, block, values, following, offset, count, scores, at, readers)
        elif index < last:
            _score_block(query, beginning, keys, block, keys, following, offset, count, scores, at, readers)
        else:
            _score_block(query, beginning, keys, block, values, following, offset, count, scores, at, readers)
        at += count
    if are_rounded:
        _scale_tile(scores, key_scales, table, first, n, readers, by_head)
    _weights_of(scores, n, softcap, largest, total, weighted)
    if are_rounded:
        _scale_tile(scores, value_scales, table, first, n, readers, by_head)
    weighed = keys if are_latents else values
    q_heads = weighted.shape[0] // readers
    for reader in range(readers):  # one reader at a time, while its sums are in the first-level cache
        own = slice(reader * q_heads, (reader + 1) * q_heads)
        at = beginning
        for index in range(begin, last + 1):
            offset = (first + at) % size
            count = min(n - at, size - offset)
            block = np.int64(table[index])
            following = np.int64(table[index + 1] if index < last else table[index])
            _weigh_block(scores[own], at, weighed, block, following, offset, count, weighted[own])
            at += count


@compiled
def _read_query(job: Any, row: Any, query: Any) -> None:
    """Reads a row of the step into query [q_heads, key_dim] float32, multiplied by the scale."""
    for h in range(job.q_heads):
        start = row * job.query_row + h * job.query_head
        to = query[h]
        if job.query_is_bfloat16:
            half = nb.carray(pointer_to(job.query + 2 * start), (job.key_dim,), np.uint16)
            for d in range(job.key_dim):
                to[d] = widen(half[d]) * job.scale
        else:
            full = nb.carray(pointer_to(job.query + 4 * start), (job.key_dim,), np.float32)
            for d in range(job.key_dim):
                to[d] = full[d] * job.scale


@compiled
def _merge(job: Any, row: Any, partials: Any, largest: Any, total: Any, weighted: Any) -> None:
    """Merges a row's partial results in their order, and writes the row's output."""
    scratch = np.empty(job.value_dim, np.float32)
    for h in range(job.q_heads):
        top = LOWEST
        for p in partials:
            top = max(top, largest[p, h])
        s = np.float32(0)
        if job.sinks != 0:
            sink = nb.carray(pointer_to(job.sinks), (job.q_heads,), np.float32)[h]
            top = max(top, sink)
            s = exp(sink - top)
        for d in range(job.value_dim):
            scratch[d] = np.float32(0)
        for p in partials:
            weight = exp(largest[p, h] - top)
            s += weight * total[p, h]
            part = weighted[p, h]
            for d in range(job.value_dim):
                scratch[d] += weight * part[d]
        share = np.float32(1) / s
        start = (row * job.q_heads + h) * job.value_dim
        if job.query_is_bfloat16:
            half = nb.carray(pointer_to(job.out + 2 * start), (job.value_dim,), np.uint16)
            for d in range(job.value_dim):
                half[d] = narrow(scratch[d] * share, half)
        else:
            full = nb.carray(pointer_to(job.out + 4 * start), (job.value_dim,), np.float32)
            for d in range(job.value_dim):
                full[d] = scratch[d] * share


@compiled
def end_item(job: Any, item: Any, rows: Any, partial_rows: Any, counters: Any) -> None:
    """Marks an item as done, and merges the rows for which it was the last."""
    largest = nb.carray(pointer_to(job.largest), (job.partial_count, job.q_heads), np.float32)
    total = nb.carray(pointer_to(job.total), (job.partial_count, job.q_heads), np.float32)
    weighted = nb.carray(
        pointer_to(job.weighted), (job.partial_count, job.q_heads, job.value_dim), np.float32
    )
    for p in range(item[3], item[4]):
        row_number = partial_rows[p]
        if fetch_add(counters, 1 + row_number, -1) == 1:
            row = rows[row_number]
            order = nb.carray(pointer_to(job.order + 8 * row[3]), (row[4] - row[3],), np.int64)
            _merge(job, row[0], order, largest, total, weighted)


@compiled
def arrays_of(job: Any) -> Any:
    """Returns items, rows, partial_rows and counters as arrays."""
    return (
        nb.carray(pointer_to(job.items), (job.item_count, 5), np.int64),
        nb.carray(pointer_to(job.rows), (job.row_count, 5), np.int64),
        nb.carray(pointer_to(job.partial_rows), (job.partial_count,), np.int64),
        nb.carray(pointer_to(job.counters), (1 + job.row_count + job.threads,), np.int64),
    )


@compiled
def claim(job: Any, counters: Any, thread: Any) -> Any:
    """Claims the next item for a thread, or returns -1 if none is left. A thread first takes items of its own part,
    which its core may have cached, then items of other threads' parts."""
    for other in range(job.threads):
        part = (thread + other) % job.threads
        first, end = part * job.item_count // job.threads, (part + 1) * job.item_count // job.threads
        number = first + fetch_add(counters, 1 + job.row_count + part, 1)
        if number < end:
            return number
    return np.int64(-1)


@compiled
def scratch_of(job: Any) -> Any:
    """Allocates a thread's by_head, scores and queries: see `_attend_tile`."""
    return (
        np.empty((job.kv_heads, TILE), np.float32),
        np.empty((job.most_readers * job.q_heads, TILE), np.float32),
        np.empty((job.most_readers * job.q_heads, job.key_dim), np.float32),
    )


@compiled
def attend(job: Any, item: Any, keys: Any, values: Any, rows: Any, partial_rows: Any, scratch: Any) -> None:
    """Computes an item's partial results and writes them."""
    by_head, scores, queries = scratch
    largest = nb.carray(pointer_to(job.largest), (job.partial_count, job.q_heads), np.float32)
    total = nb.carray(pointer_to(job.total), (job.partial_count, job.q_heads), np.float32)
    weighted = nb.carray(
        pointer_to(job.weighted), (job.partial_count, job.q_heads, job.value_dim), np.float32
    )
    by_position = (1, keys.shape[1], job.kv_heads)
    key_scales = nb.carray(pointer_to(job.key_scales), by_position, np.float32)
    value_scales = nb.carray(pointer_to(job.value_scales), by_position, np.float32)
    table = nb.carray(pointer_to(job.tables + 4 * item[0]), (1,), np.int32)
    begin = item[3]
    readers = item[4] - begin
    all_see_all = True
    for reader in range(readers):
        p = begin + reader
        row = rows[partial_rows[p]]
        _read_query(job, row[0], queries[reader * job.q_heads : (reader + 1) * job.q_heads])
        all_see_all = all_see_all and row[1] <= item[1] and item[2] <= row[2]
        largest[p, :] = LOWEST
        total[p, :] = np.float32(0)
        weighted[p, :, :] = np.float32(0)
    if _are_parted(keys):
        for row_of_query in range(readers * job.q_heads):
            part_row(queries, row_of_query)
    at_once = readers if all_see_all else 1
    heads = at_once * job.q_heads
    # Tiles begin at multiples of TILE, wherever the item begins. Under a sliding window, too, the rows of a draft are
    # then summed in the same order as each row alone.
    for tile in range(item[1] // TILE * TILE, item[2], TILE):
        tile_end = min(tile + TILE, item[2])
        for reader in range(0, readers, at_once):
            p = begin + reader
            row = rows[partial_rows[p]]
            first, end = max(tile, item[1], row[1]), min(tile_end, row[2])
            if first < end:
                _attend_tile(
                    queries[reader * job.q_heads : reader * job.q_heads + heads],
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    job.are_latents,
                    job.key_scales != 0,
                    by_head,
                    table,
                    first,
                    end - first,
                    job.softcap,
                    at_once,
                    scores[:heads],
                    nb.carray(pointer_to(job.largest + 4 * p * job.q_heads), (heads,), np.float32),
                    nb.carray(pointer_to(job.total + 4 * p * job.q_heads), (heads,), np.float32),
                    nb.carray(
                        pointer_to(job.weighted + 4 * p * job.q_heads * job.value_dim),
                        (heads, job.value_dim),
                        np.float32,
                    ),
                )
    if _are_parted(values):
        sums = nb.carray(
            pointer_to(job.weighted + 4 * begin * job.q_heads * job.value_dim),
            (readers * job.q_heads, job.value_dim),
            np.float32,
        )
        for row_of_sums in range(readers * job.q_heads):
            join_row(sums, row_of_sums)


@compiled
def _work(job: Any, keys: Any, values: Any) -> None:
    """Runs one thread's share of a call: claims items until none is left."""
    items, rows, partial_rows, counters = arrays_of(job)
    scratch = scratch_of(job)
    thread = fetch_add(counters, 0, 1)
    while True:
        number = claim(job, counters, thread)
        if number < 0:
            return
        item = items[number]
        attend(job, item, keys, values, rows, partial_rows, scratch)
        end_item(job, item, rows, partial_rows, counters)


@compiled
def _work_on(job: Any, dtype: Any) -> None:
    key_dim = job.value_dim if job.are_latents else job.key_dim
    value_dim = job.key_dim - job.value_dim if job.are_latents else job.value_dim
    keys = nb.carray(pointer_to(job.keys), (1, job.block_size, job.kv_heads, key_dim), dtype)
    values = nb.carray(pointer_to(job.values), (1, job.block_size, job.kv_heads, value_dim), dtype)
    _work(job, keys, values)


def _work_bfloat16(jobs: Any) -> None:
    _work_on(nb.carray(jobs, (1,))[0], np.uint16)


def _work_float32(jobs: Any) -> None:
    _work_on(nb.carray(jobs, (1,))[0], np.float32)


def _work_int8(jobs: Any) -> None:
    _work_on(nb.carray(jobs, (1,))[0], np.int8)


_FUNCTIONS = {
    np.dtype(np.uint16): _work_bfloat16,
    np.dtype(np.float32): _work_float32,
    np.dtype(np.int8): _work_int8,
}


@cache
def loops_for(element: np.dtype[Any]) -> int:
    """Returns the address of a C function void (JOB *) for pools of this dtype: uint16 (bfloat16), float32 or int8.

    It is compiled, or loaded from disk, at the first call in a process.
    """
    return c_function(_FUNCTIONS[element], JOB)
