"""Compiled loops of prefill attention in bfloat16, by the vector instruction for products of pairs (AVX512-BF16).

The instruction adds to each of 16 lanes of float32 the products of two neighbouring bfloat16 numbers: twice the work
of an instruction for float32. torch's flash attention reaches a fifth of its rate where there are no matrix units.

A task is one key head and a block of a prompt's new rows, with all query heads of the group. It passes over the
positions in tiles of 64 (Dao et al. 2022, arXiv 2205.14135). A tile's keys and values are read from the pool through
the block table, and laid out for all rows of the block:

    keys      [key_dim / 2, 64] pairs of neighbouring dimensions
    values    [32, value_dim] pairs of neighbouring positions

Six rows are computed at once. Their scores with a tile stay in registers until they are weights, in bfloat16. Sums
are float32. A tile in which a row sees nothing changes none of its numbers, and tiles begin at multiples of 64 of the
sequence. The bits of a row therefore depend neither on the chunks of its prompt nor on other sequences or threads.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir

from rootstock.kernels.cpu.amx_tiles import transpose
from rootstock.kernels.cpu.compiler import (
    c_function,
    cgutils,
    compiled,
    compiles_for,
    fetch_add,
    intrinsic,
    narrow,
    nb,
    pointer_to,
    types,
    widen,
)
from rootstock.kernels.cpu.vector_lanes import (
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    exp,
    floats,
    greater,
    greatest_lane,
    load,
    shuffle,
    splat,
    store,
)

TILE = 64  # positions
AT_ONCE = 6  # rows; with four vectors of positions or dimensions they take 24 of the 32 registers
BLOCK_ROWS = 96  # of a task, about; laying a tile out takes 2 % of its time
MULTIPLE = 32  # of which dimensions are multiples

_VECTORS = TILE // LANES
_FEATURES = ("avx512bf16", "avx512bw")
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


@cache
def has_pair_products() -> bool:
    """Returns whether the processor multiplies pairs of bfloat16, and Numba may use it."""
    if platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in _FEATURES) and compiles_for(*_FEATURES)


# ---- instructions


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's type of bfloat16, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
_HALVES = ir.VectorType(I16, 2 * LANES)


def _add_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Adds a[2i] · b[2i] + a[2i + 1] · b[2i + 1] to each lane i. a, b: 16 pairs of bfloat16, as int32"""
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def _rounded(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds two vectors of float32 to one of 32 bfloat16, to nearest."""
    kind = ir.FunctionType(_PAIRS, [FLOATS, FLOATS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(function, [high, low]), _HALVES)


def _splat_pair(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads a pair of bfloat16 into all lanes."""
    pair = builder.load(builder.inttoptr(address, I32.as_pointer()), align=2)
    undefined = ir.Constant(INTS, ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, pair, I32(0)), undefined, [0] * LANES)


def _splat_int(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    number = builder.load(builder.inttoptr(address, I32.as_pointer()), align=4)
    undefined = ir.Constant(INTS, ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, number, I32(0)), undefined, [0] * LANES)


def _lane(builder: ir.IRBuilder, vector: ir.Value, lane: int) -> ir.Value:
    return shuffle(builder, vector, vector, [lane] * LANES)


class _Products:
    """Sums of products of `AT_ONCE` rows of pairs with `vectors` vectors of columns, in registers."""

    def __init__(self, builder: ir.IRBuilder, vectors: int) -> None:
        self._builder, self._vectors = builder, vectors
        self._totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(AT_ONCE * vectors)]

    def set(self, row: int, vector: int, value: ir.Value) -> None:
        self._builder.store(value, self._totals[row * self._vectors + vector])

    def of(self, row: int) -> list[ir.Value]:
        first = row * self._vectors
        return [self._builder.load(total) for total in self._totals[first : first + self._vectors]]

    def add(self, rows: list[ir.Value], columns: ir.Value, stride: ir.Value, steps: ir.Value) -> None:
        """Adds the products of `steps` pairs of each row with rows of columns, which lie `stride` bytes apart."""
        builder = self._builder
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            at = builder.add(columns, builder.mul(stride, loop.index))
            along = builder.shl(loop.index, I64(2))
            loaded = [load(builder, builder.add(at, I64(64 * v)), INTS) for v in range(self._vectors)]
            for r, row in enumerate(rows):
                pair = _splat_pair(builder, builder.add(row, along))
                for v, column in enumerate(loaded):
                    total = self._totals[r * self._vectors + v]
                    builder.store(_add_pairs(builder, builder.load(total), pair, column), total)


@intrinsic  # type: ignore[untyped-decorator]
def _weights_of_tile(
    typing: Any,
    query: Any,
    keys: Any,
    steps: Any,
    scale: Any,
    limits: Any,
    first: Any,
    tops: Any,
    sums: Any,
    weights: Any,
) -> Any:
    """Computes the weights of `AT_ONCE` rows with a tile, and what they change in the rows' sums before.

    query       address of [AT_ONCE, 2 · steps] bfloat16
    keys        address of [steps, 64] pairs
    limits      address of [AT_ONCE, 2] int32: first position that a row sees, and the one after its last
    first       position of the tile
    tops        address of [2, 16] float32: largest score of each row; factors of the sums before
    sums        address of [AT_ONCE, 16] float32: sums of weights, in parts
    weights     address of [AT_ONCE, 64] bfloat16
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        query, keys, steps, scale, limits, first, tops, sums, weights = given
        products = _Products(builder, _VECTORS)
        for r in range(AT_ONCE):
            for v in range(_VECTORS):
                products.set(r, v, floats(0.0))
        row_bytes = builder.shl(steps, I64(2))
        rows = [builder.add(query, builder.mul(row_bytes, I64(r))) for r in range(AT_ONCE)]
        products.add(rows, keys, I64(4 * TILE), steps)

        scales, nothing = splat(builder, scale), floats(float("-inf"))
        begin = builder.trunc(first, I32)
        undefined = ir.Constant(INTS, ir.Undefined)
        begins = shuffle(builder, builder.insert_element(undefined, begin, I32(0)), undefined, [0] * LANES)
        before = load(builder, tops)
        found, scores, seen = before, [], []
        for r in range(AT_ONCE):
            bounds = [_splat_int(builder, builder.add(limits, I64(8 * r + 4 * i))) for i in range(2)]
            low, high = (builder.sub(bound, begins) for bound in bounds)
            of_row, of_masks = [], []
            for v, total in enumerate(products.of(r)):
                lanes = ir.Constant(INTS, [LANES * v + i for i in range(LANES)])
                sees = builder.and_(
                    builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
                )
                of_row.append(builder.select(sees, builder.fmul(total, scales), nothing))
                of_masks.append(sees)
            scores.append(of_row)
            seen.append(of_masks)
            top = greater(builder, greater(builder, of_row[0], of_row[1]), greater(builder, *of_row[2:]))
            found = builder.insert_element(
                found,
                _larger(builder, greatest_lane(builder, top), builder.extract_element(before, I32(r))),
                I32(r),
            )
        factors = exp(builder, builder.fsub(before, found))
        store(builder, found, tops)
        store(builder, factors, builder.add(tops, I64(64)))
        for r in range(AT_ONCE):
            top, made = _lane(builder, found, r), []
            for score, sees in zip(scores[r], seen[r], strict=True):
                weight = exp(builder, builder.fsub(score, top))
                made.append(builder.select(sees, weight, floats(0.0)))
            at = builder.add(sums, I64(64 * r))
            total = builder.fmul(load(builder, at), _lane(builder, factors, r))
            for weight in made:
                total = builder.fadd(total, weight)
            store(builder, total, at)
            for half in range(_VECTORS // 2):
                at = builder.add(weights, I64(2 * TILE * r + 64 * half))
                store(builder, _rounded(builder, *made[2 * half : 2 * half + 2]), at)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(int64, int64, int64, types.float32, *[int64] * 5), generate


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _weigh_values(vectors: int) -> Any:
    def weigh(typing: Any, weights: Any, values: Any, stride: Any, factors: Any, out: Any) -> Any:
        """Replaces out by factors · out + weights · values, for `AT_ONCE` rows and 16 · `vectors` columns.

        weights     address of [AT_ONCE, 64] bfloat16
        values, out addresses of 32 rows of pairs, and of `AT_ONCE` rows of float32, `stride` bytes apart
        factors     address of [16] float32
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weights, values, stride, factors, out = given
            products = _Products(builder, vectors)
            rows = [builder.add(out, builder.mul(stride, I64(r))) for r in range(AT_ONCE)]
            of_rows = load(builder, factors)
            for r, row in enumerate(rows):
                factor = _lane(builder, of_rows, r)
                for v in range(vectors):
                    earlier = load(builder, builder.add(row, I64(64 * v)))
                    products.set(r, v, builder.fmul(earlier, factor))
            pairs = [builder.add(weights, I64(2 * TILE * r)) for r in range(AT_ONCE)]
            products.add(pairs, values, stride, I64(TILE // 2))
            for r, row in enumerate(rows):
                for v, total in enumerate(products.of(r)):
                    store(builder, total, builder.add(row, I64(64 * v)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(weigh)


_weigh_64, _weigh_32 = _weigh_values(4), _weigh_values(2)


@intrinsic  # type: ignore[untyped-decorator]
def _interleave(typing: Any, even: Any, odd: Any, count: Any, to: Any) -> Any:
    """Interleaves two rows [count] of bfloat16 as pairs [count]."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        even, odd, count, to = given
        with cgutils.for_range_slice(builder, I64(0), count, I64(2 * LANES), I64) as (d, _):
            along = builder.shl(d, I64(1))
            a, b = (load(builder, builder.add(row, along), _HALVES) for row in (even, odd))
            for half in range(2):
                lanes = [x for i in range(LANES * half, LANES * (half + 1)) for x in (i, 2 * LANES + i)]
                place = builder.add(builder.add(to, builder.shl(d, I64(2))), I64(64 * half))
                store(builder, shuffle(builder, a, b, lanes), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


# ---- a task


@compiled
def _copy_rows(pool: Any, scales: Any, head: Any, slots: Any, rows: Any) -> None:
    """Copies the pool's rows of a head to rows [64, dim] bfloat16. A slot below 0: zeros."""
    dim = rows.shape[1]
    for t in range(TILE):
        into = rows[t]
        slot = slots[t]
        if slot < 0:
            for d in range(dim):
                into[d] = np.uint16(0)
        else:
            given = pool[slot, head]
            scale = scales[slot, head]
            for d in range(dim):
                into[d] = narrow(widen(given[d]) * scale, into)


@compiled
def _copy_plain_rows(pool: Any, head: Any, slots: Any, rows: Any) -> None:
    """Copies like `_copy_rows`, from a pool in bfloat16."""
    dim = rows.shape[1]
    for t in range(TILE):
        into = rows[t]
        slot = slots[t]
        if slot < 0:
            for d in range(dim):
                into[d] = np.uint16(0)
        else:
            given = pool[slot, head]
            for d in range(dim):
                into[d] = given[d]


@compiled
def _read_tile(job: Any, head: Any, slots: Any, of_keys: Any, of_values: Any, element: Any) -> None:
    heads, many = job.kv_heads, np.int64(1) << 40
    keys = nb.carray(pointer_to(job.keys), (many, heads, job.key_dim), element)
    values = nb.carray(pointer_to(job.values), (many, heads, job.value_dim), element)
    if job.key_scales == 0:
        _copy_plain_rows(keys, head, slots, of_keys)
        _copy_plain_rows(values, head, slots, of_values)
    else:
        key_scales = nb.carray(pointer_to(job.key_scales), (many, heads), np.float32)
        value_scales = nb.carray(pointer_to(job.value_scales), (many, heads), np.float32)
        _copy_rows(keys, key_scales, head, slots, of_keys)
        _copy_rows(values, value_scales, head, slots, of_values)


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
    slots = nb.carray(pointer_to(at), (TILE,), np.int64)
    at += 8 * TILE
    of_keys = nb.carray(pointer_to(at), (TILE, key_dim), np.uint16)
    at += 2 * TILE * key_dim
    of_values = nb.carray(pointer_to(at), (TILE, value_dim), np.uint16)
    at += 2 * TILE * value_dim
    key_tile = nb.carray(pointer_to(at), (key_dim // 2, TILE), np.int32)
    at += 2 * TILE * key_dim
    value_tile = nb.carray(pointer_to(at), (TILE // 2, value_dim), np.int32)

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
    wide = value_dim // 64 * 64
    for tile in range(lowest // TILE, (last + TILE - 1) // TILE):
        first = tile * TILE
        for t in range(TILE):
            p = first + t
            slots[t] = np.int64(table[p // size]) * size + p % size if lowest <= p < last else -1
        _read_tile(job, head, slots, of_keys, of_values, element)
        for pair in range(0, key_dim // 2, LANES):
            for t in range(0, TILE, LANES):
                source = of_keys.ctypes.data + 2 * (t * key_dim + 2 * pair)
                to = key_tile.ctypes.data + 4 * (pair * TILE + t)
                transpose(source, 2 * key_dim, to, 4 * TILE)
        for t in range(0, TILE, 2):
            source = of_values.ctypes.data + 2 * t * value_dim
            _interleave(source, source + 2 * value_dim, value_dim, value_tile.ctypes.data + 2 * t * value_dim)
        for u in range(units):
            r = u * AT_ONCE
            if first >= limits[min(r + AT_ONCE, rows) - 1, 1] or first + TILE <= limits[r, 0]:
                continue  # none of the rows sees any of it
            _weights_of_tile(
                query[r].ctypes.data,
                key_tile.ctypes.data,
                key_dim // 2,
                job.scale,
                limits[r].ctypes.data,
                first,
                tops[u].ctypes.data,
                sums[r].ctypes.data,
                weights.ctypes.data,
            )
            of_rows = out[r].ctypes.data
            of_tile = value_tile.ctypes.data
            factors = tops[u, 1].ctypes.data
            for d in range(0, wide, 64):
                _weigh_64(weights.ctypes.data, of_tile + 4 * d, 4 * value_dim, factors, of_rows + 4 * d)
            if wide < value_dim:
                _weigh_32(weights.ctypes.data, of_tile + 4 * wide, 4 * value_dim, factors, of_rows + 4 * wide)

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
    tiles = 2 * TILE * (AT_ONCE + 2 * key_dim + 2 * value_dim) + 8 * TILE
    return units * (AT_ONCE * of_rows + 8 * LANES) + tiles
