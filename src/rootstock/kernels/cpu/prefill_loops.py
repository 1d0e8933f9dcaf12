"""Compiled loops of prefill attention in bfloat16, by products of pairs (`pair_products.py`).

torch's flash attention reaches a fifth of the rate of these products where there are no matrix units.

A task is one key head and a block of a prompt's new rows, with all query heads of the group. It passes over the
positions in tiles of 64 (Dao et al. 2022, arXiv 2205.14135). A tile's keys and values are read from the pool through
the block table, and laid out for all rows of the block (`pair_tiles.py`).

Six rows are computed at once. Their scores with a tile stay in registers until they are weights, in bfloat16. Sums
are float32. A tile in which a row sees nothing changes none of its numbers, and tiles begin at multiples of 64 of the
sequence. The bits of a row therefore depend neither on the chunks of its prompt nor on other sequences or threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from rootstock.kernels.cpu.compiler import c_function, compiled, fetch_add, narrow, nb, pointer_to
from rootstock.kernels.cpu.pair_products import AT_ONCE, TILE
from rootstock.kernels.cpu.pair_tiles import attend_tile, lay_out_tile, tile_bytes, tiles_at
from rootstock.kernels.cpu.vector_lanes import LANES

BLOCK_ROWS = 96  # of a task, about; laying a tile out takes 2 % of its time
MULTIPLE = 32  # of which dimensions are multiples

_LEAST = -1e30  # a row's largest score before it has seen a position: finite, so that differences are numbers

JOB = np.dtype(
    [
        ("claimed", "i8"),  # address of two int64: tasks that threads have begun, and threads that have begun
        ("scratch", "i8"),  # address of `scratch_bytes` for each thread
        ("scratch_bytes", "i8"),
        (
            "tasks",
            "i8",
        ),  # address of [task_count, 5] int64: first row, rows, first position, block table, end
        ("task_count", "i8"),
        ("first_visible", "i8"),  # address of [rows of the step] int64
        ("tables", "i8"),  # address of int32: the block tables of all sequences
        ("block_size", "i8"),
        ("query", "i8"),  # address of bfloat16; strides of rows and heads in elements
        ("query_row", "i8"),
        ("query_head", "i8"),
        ("out", "i8"),  # address of [rows, kv_heads · group, value_dim] bfloat16
        ("keys", "i8"),  # address of [slots, kv_heads, key_dim]
        ("values", "i8"),  # address of [slots, kv_heads, value_dim]
        ("key_scales", "i8"),  # addresses of [slots, kv_heads] float32; 0: the pool is bfloat16
        ("value_scales", "i8"),
        ("kv_heads", "i8"),
        ("group", "i8"),
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        ("sinks", "i8"),  # address of [kv_heads · group] float32; 0: none
        ("scale", "f4"),
    ]
)


# ---- a task


@compiled
def _task(job: Any, task: Any, head: Any, thread: Any, element: Any) -> None:
    """Attends a block of rows of one sequence, for one key head and its query heads."""
    first_row, tokens, position, table_at, end = task[0], task[1], task[2], task[3], task[4]
    group, key_dim, value_dim, size = job.group, job.key_dim, job.value_dim, job.block_size
    rows, units = tokens * group, (tokens * group + AT_ONCE - 1) // AT_ONCE
    heads = job.kv_heads * group

    at = job.scratch + thread * job.scratch_bytes
    query = nb.carray(pointer_to(at), (units * AT_ONCE, key_dim), np.uint16)
    at += 2 * units * AT_ONCE * key_dim
    out = nb.carray(pointer_to(at), (units * AT_ONCE, value_dim), np.float32)
    at += 4 * units * AT_ONCE * value_dim
    tops = nb.carray(pointer_to(at), (units, 2, LANES), np.float32)
    at += 8 * units * LANES
    sums = nb.carray(pointer_to(at), (units * AT_ONCE, LANES), np.float32)
    at += 4 * units * AT_ONCE * LANES
    limits = nb.carray(pointer_to(at), (units * AT_ONCE, 2), np.int32)
    at += 8 * units * AT_ONCE
    weights = nb.carray(pointer_to(at), (AT_ONCE, TILE), np.uint16)
    at += 2 * AT_ONCE * TILE
    tiles = tiles_at(at, key_dim, value_dim)

    given = nb.carray(pointer_to(job.query), (1,), np.uint16)
    first_visible = nb.carray(pointer_to(job.first_visible), (first_row + tokens,), np.int64)
    blocks = (end + size - 1) // size
    table = nb.carray(pointer_to(job.tables + 4 * table_at), (blocks,), np.int32)
    lowest = position
    for r in range(units * AT_ONCE):
        token, member = r // group, r % group
        into = query[r]
        if r < rows:
            source = (first_row + token) * job.query_row + (head * group + member) * job.query_head
            for d in range(key_dim):
                into[d] = given[source + d]
            limits[r, 0] = first_visible[first_row + token]
            limits[r, 1] = position + token + 1
            lowest = min(lowest, first_visible[first_row + token])
        else:
            for d in range(key_dim):
                into[d] = np.uint16(0)
            limits[r, 0], limits[r, 1] = 0, 0
        for d in range(value_dim):
            out[r, d] = np.float32(0)
        for i in range(LANES):
            sums[r, i] = np.float32(0)
    for u in range(units):
        for i in range(LANES):
            tops[u, 0, i] = np.float32(_LEAST)

    last = position + tokens  # after the last position that a row sees
    for tile in range(lowest // TILE, (last + TILE - 1) // TILE):
        first = tile * TILE
        lay_out_tile(job, table, first, lowest, last, head, tiles, element)
        for u in range(units):
            r = u * AT_ONCE
            if first >= limits[min(r + AT_ONCE, rows) - 1, 1] or first + TILE <= limits[r, 0]:
                continue  # none of the rows sees any of it
            attend_tile(
                query[r].ctypes.data,
                limits[r].ctypes.data,
                job.scale,
                first,
                tops[u].ctypes.data,
                sums[r].ctypes.data,
                weights.ctypes.data,
                out[r].ctypes.data,
                tiles,
                False,
            )

    results = nb.carray(pointer_to(job.out), (first_row + tokens, heads, value_dim), np.uint16)
    for r in range(rows):
        number = head * group + r % group
        total = np.float32(0)
        for i in range(LANES):
            total += sums[r, i]
        factor = np.float32(1) / total
        if job.sinks != 0:
            sink = nb.carray(pointer_to(job.sinks), (heads,), np.float32)[number]
            top = tops[r // AT_ONCE, 0, r % AT_ONCE]
            most = max(np.float64(top), np.float64(sink))
            own = np.exp(np.float64(top) - most)
            factor = np.float32(own / (own * np.float64(total) + np.exp(np.float64(sink) - most)))
        into = results[first_row + r // group, number]
        for d in range(value_dim):
            into[d] = narrow(out[r, d] * factor, into)


@compiled
def _work(job: Any, element: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    tasks = nb.carray(pointer_to(job.tasks), (job.task_count, 5), np.int64)
    thread = fetch_add(claimed, 1, 1)
    while True:
        number = fetch_add(claimed, 0, 1)
        if number >= job.task_count * job.kv_heads:
            return
        _task(job, tasks[number // job.kv_heads], number % job.kv_heads, thread, element)


def _attend_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16)


def _attend_int8(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.int8)


_ENTRY_POINTS = {torch.bfloat16: _attend_bfloat16, torch.int8: _attend_int8}  # by the dtype of the pool


@cache
def prefill_loops_for(dtype: torch.dtype) -> int:
    """Returns the address of a C function void (JOB *): compiled, or loaded, at the first call in a process."""
    return c_function(_ENTRY_POINTS[dtype], JOB)


def prefill_scratch_bytes(group: int, key_dim: int, value_dim: int, tokens: int) -> int:
    """Returns the scratch memory of one thread for tasks of at most so many tokens, as `_task` divides it."""
    units = -(-tokens * group // AT_ONCE)
    of_rows = 2 * key_dim + 4 * value_dim + 4 * LANES + 8
    weights = 2 * AT_ONCE * TILE
    return units * (AT_ONCE * of_rows + 8 * LANES) + weights + tile_bytes(key_dim, value_dim)
