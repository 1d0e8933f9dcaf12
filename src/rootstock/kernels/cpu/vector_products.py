"""Vector products of a few rows in explicit vector instructions: the inner loops of attention, per cache line.

LLVM vectorises a loop over a head's dimensions by itself. It checks before each loop that the arrays do not overlap,
and adds up the lanes of each sum separately. At 128 dimensions that costs three times as much as the arithmetic. The
code here states the vectors, their order and the sums of eight products at once in LLVM's intermediate
representation, which LLVM compiles for any processor.

The number of dimensions is a multiple of `LANES`. In bfloat16, if it is a multiple of 2 · `LANES`, the even and the
odd dimensions of each 32 are separated ("parted") in registers. Queries and sums are then parted in the same way.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from rootstock.kernels.cpu.compiler import cgutils, intrinsic, types
from rootstock.kernels.cpu.vector_lanes import (
    F32,
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    add_product,
    exp,
    fetch,
    floats,
    greater,
    greatest_lane,
    ints,
    load,
    shuffle,
    splat,
    store,
    sum_of_lanes,
)

ROWS = 4

_LINE_BYTES = 64

# ---- vectors


def _load(builder: ir.IRBuilder, address: ir.Value, dtype: Any) -> ir.Value:
    """Loads `LANES` elements of float32, bfloat16 (as uint16) or int8, as float32."""
    element = {types.float32: F32, types.uint16: I16, types.int8: I8}[dtype]
    vector = ir.VectorType(element, LANES)
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()), align=_size_of(dtype))
    if dtype == types.float32:
        return loaded
    if dtype == types.int8:
        return builder.sitofp(loaded, FLOATS)
    return builder.bitcast(builder.shl(builder.zext(loaded, INTS), ints(16)), FLOATS)


def _load_pairs(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """Loads `2 · LANES` elements of bfloat16 as float32: a vector of the even elements and a vector of the odd ones.

    Separating the halves of 32 bits takes one instruction for each half; widening in order takes two.
    """
    both = builder.load(builder.inttoptr(address, INTS.as_pointer()), align=2)
    even = builder.shl(both, ints(16))
    odd = builder.and_(both, ints(-0x10000))
    return [builder.bitcast(half, FLOATS) for half in (even, odd)]


def _load_row(builder: ir.IRBuilder, address: ir.Value, dtype: Any, paired: bool) -> list[ir.Value]:
    return _load_pairs(builder, address) if paired else [_load(builder, address, dtype)]


def _size_of(dtype: Any) -> int:
    return int(dtype.bitwidth) // 8


def _neighbours(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: int) -> ir.Value:
    """Joins the first `lanes` lanes of a and b, and adds each pair of neighbours."""
    even, odd = (shuffle(builder, a, b, [lane + i for lane in range(0, lanes, 2)]) for i in range(2))
    return builder.fadd(even, odd)


def _sums(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Returns the sum over the lanes of each of 4 or 8 vectors, as one vector."""
    count = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_neighbours(builder, a, b, 2 * LANES) for a, b in pairs]
    (total,) = vectors  # some lanes of each sum, side by side
    while total.type.count > count:
        total = _neighbours(builder, total, total, total.type.count)
    return total


def _splat(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return splat(builder, builder.load(builder.inttoptr(address, F32.as_pointer()), align=4))


class _Array:
    """Array argument of compiled code: computes the addresses of its elements."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, given: Any) -> None:
        array = context.make_array(kind)(context, builder, given)
        self._builder = builder
        self._data = builder.ptrtoint(array.data, I64)
        self._strides = cgutils.unpack_tuple(builder, array.strides, kind.ndim)
        self.shape = cgutils.unpack_tuple(builder, array.shape, kind.ndim)
        self.size = _size_of(kind.dtype)

    def address(self, *indices: Any) -> ir.Value:
        builder, address = self._builder, self._data
        for index, stride in zip(indices, self._strides, strict=True):
            address = builder.add(address, builder.mul(index, stride))
        return address


# ---- intrinsics for compiled code


def _score_rows(heads: int, rows: int, paired: bool) -> Any:
    def score(
        typing: Any,
        query: Any,
        head: Any,
        start: Any,
        pool: Any,
        block: Any,
        row: Any,
        kv_head: Any,
        scores: Any,
        at: Any,
    ) -> Any:
        """Adds query[head + h, start …] · pool[block, row + r, kv_head] to scores[head + h, at + r], over `rows`
        rows.

        query [q_heads, ≥ start + dim] and scores [q_heads, …] float32, pool [blocks, block_size, kv_heads, dim]
        """

        def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if paired and pool.dtype != types.uint16:
                return context.get_dummy_value()  # never called
            queries, keys, out = (_Array(context, builder, signature.args[i], given[i]) for i in (0, 3, 7))
            head, start, block, row, kv_head, at = (given[i] for i in (1, 2, 4, 5, 6, 8))
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(heads * rows)]
            for total in totals:
                builder.store(floats(0.0), total)
            numbers = [builder.add(head, I64(h)) for h in range(heads)]
            places = [builder.add(row, I64(r)) for r in range(rows)]
            step = I64(2 * LANES if paired else LANES)
            with cgutils.for_range_slice(builder, I64(0), keys.shape[3], step, I64) as (d, _):
                of_rows = [
                    _load_row(builder, keys.address(block, r, kv_head, d), pool.dtype, paired) for r in places
                ]
                for h, number in enumerate(numbers):
                    for part in range(len(of_rows[0])):
                        along = builder.add(start, builder.add(d, I64(part * LANES)))
                        q = _load(builder, queries.address(number, along), types.float32)
                        for vectors, total in zip(of_rows, totals[h * rows : (h + 1) * rows], strict=True):
                            builder.store(add_product(builder, builder.load(total), q, vectors[part]), total)
            sums = _sums(builder, [builder.load(total) for total in totals])
            for h, number in enumerate(numbers):
                of_head = shuffle(builder, sums, sums, [h * rows + r for r in range(rows)])
                place = builder.inttoptr(out.address(number, at), of_head.type.as_pointer())
                builder.store(builder.fadd(builder.load(place, align=4), of_head), place, align=4)
            return context.get_dummy_value()

        int64 = types.int64
        return types.none(query, int64, int64, pool, int64, int64, int64, scores, int64), compile_call

    return intrinsic(score)


def _weigh_rows(heads: int, rows: int, paired: bool) -> Any:
    def weigh(
        typing: Any,
        weights: Any,
        at: Any,
        head: Any,
        pool: Any,
        block: Any,
        row: Any,
        kv_head: Any,
        sums: Any,
    ) -> Any:
        """Adds Σ weights[head + h, at + r] · pool[block, row + r, kv_head] over `rows` rows to sums[head + h].

        weights [q_heads, …] and sums [q_heads, dim] float32, pool [blocks, block_size, kv_heads, dim]
        """

        def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if paired and pool.dtype != types.uint16:
                return context.get_dummy_value()  # never called
            weighing, values, out = (_Array(context, builder, signature.args[i], given[i]) for i in (0, 3, 7))
            at, head, block, row, kv_head = (given[i] for i in (1, 2, 4, 5, 6))
            numbers = [builder.add(head, I64(h)) for h in range(heads)]
            places = [builder.add(row, I64(r)) for r in range(rows)]
            columns = [builder.add(at, I64(r)) for r in range(rows)]
            splats = [[_splat(builder, weighing.address(n, column)) for column in columns] for n in numbers]
            step = I64(2 * LANES if paired else LANES)
            with cgutils.for_range_slice(builder, I64(0), values.shape[3], step, I64) as (d, _):
                of_rows = [
                    _load_row(builder, values.address(block, r, kv_head, d), pool.dtype, paired)
                    for r in places
                ]
                for number, of_head in zip(numbers, splats, strict=True):
                    for part in range(len(of_rows[0])):
                        along = builder.add(d, I64(part * LANES))
                        place = builder.inttoptr(out.address(number, along), FLOATS.as_pointer())
                        total = builder.load(place, align=4)
                        for vectors, weight in zip(of_rows, of_head, strict=True):
                            total = add_product(builder, total, weight, vectors[part])
                        builder.store(total, place, align=4)
            return context.get_dummy_value()

        int64 = types.int64
        return types.none(weights, int64, int64, pool, int64, int64, int64, sums), compile_call

    return intrinsic(weigh)


@intrinsic  # type: ignore[untyped-decorator]
def holds_bfloat16(typing: Any, pool: Any) -> Any:
    """Returns whether an array holds bfloat16. Known when a loop is compiled."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return context.get_constant(types.boolean, pool.dtype == types.uint16)

    return types.boolean(pool), compile_call


def _rearranged(into_pairs: bool) -> Any:
    def rearrange(typing: Any, rows: Any, row: Any) -> Any:
        """Separates the even and the odd elements of each 32 of rows[row], or interleaves them; rows [n, dim]
        float32."""

        def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            array = _Array(context, builder, signature.args[0], given[0])
            if into_pairs:
                lanes = [[2 * i + half for i in range(LANES)] for half in range(2)]
            else:
                lanes = [
                    [LANES * (i % 2) + i // 2 for i in range(LANES * half, LANES * (half + 1))]
                    for half in range(2)
                ]
            with cgutils.for_range_slice(builder, I64(0), array.shape[1], I64(2 * LANES), I64) as (d, _):
                places = [array.address(given[1], builder.add(d, I64(half * LANES))) for half in range(2)]
                first, second = (_load(builder, place, types.float32) for place in places)
                for place, half in zip(places, lanes, strict=True):
                    moved = shuffle(builder, first, second, half)
                    builder.store(moved, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.none(rows, types.int64), compile_call

    return intrinsic(rearrange)


@intrinsic  # type: ignore[untyped-decorator]
def largest_score(typing: Any, scores: Any, row: Any, vectors: Any, before: Any) -> Any:
    """Returns the largest of `before` and scores[row, : 16 · vectors]. scores [n, …] float32"""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = _Array(context, builder, signature.args[0], given[0])
        top = cgutils.alloca_once_value(builder, splat(builder, given[3]))
        with cgutils.for_range(builder, given[2], intp=I64) as loop:
            place = array.address(given[1], builder.mul(loop.index, I64(LANES)))
            builder.store(greater(builder, load(builder, place), builder.load(top)), top)
        return greatest_lane(builder, builder.load(top))

    return types.float32(scores, types.int64, types.int64, types.float32), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def weights_of_scores(typing: Any, scores: Any, row: Any, vectors: Any, top: Any) -> Any:
    """Replaces scores[row, : 16 · vectors] by exp(… - top), and returns their sum. scores [n, …] float32"""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = _Array(context, builder, signature.args[0], given[0])
        tops = splat(builder, given[3])
        sums = cgutils.alloca_once_value(builder, floats(0.0))
        with cgutils.for_range(builder, given[2], intp=I64) as loop:
            place = array.address(given[1], builder.mul(loop.index, I64(LANES)))
            weights = exp(builder, builder.fsub(load(builder, place), tops))
            store(builder, weights, place)
            builder.store(builder.fadd(builder.load(sums), weights), sums)
        return sum_of_lanes(builder, builder.load(sums))

    return types.float32(scores, types.int64, types.int64, types.float32), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_rows(typing: Any, pool: Any, block: Any, row: Any, kv_head: Any) -> Any:
    """Prefetches pool[block, row … row + ROWS - 1, kv_head]. pool [blocks, block_size, kv_heads, dim]"""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        rows = _Array(context, builder, signature.args[0], given[0])
        line = I64(_LINE_BYTES // rows.size)
        with cgutils.for_range_slice(builder, I64(0), rows.shape[3], line, I64) as (d, _):
            for r in range(ROWS):
                address = rows.address(given[1], builder.add(given[2], I64(r)), given[3], d)
                fetch(builder, address, 2)
        return context.get_dummy_value()

    return types.none(pool, types.int64, types.int64, types.int64), compile_call


# `two` query heads or `one` head over `ROWS` rows; `last`: one head over one row.
score_two, score_one, score_last = (_score_rows(*size, False) for size in ((2, ROWS), (1, ROWS), (1, 1)))
weigh_two, weigh_one, weigh_last = (_weigh_rows(*size, False) for size in ((2, ROWS), (1, ROWS), (1, 1)))
# The same for bfloat16 with a multiple of 32 dimensions: queries and sums are parted.
score_two_parted, score_one_parted, score_last_parted = (
    _score_rows(*size, True) for size in ((2, ROWS), (1, ROWS), (1, 1))
)
weigh_two_parted, weigh_one_parted, weigh_last_parted = (
    _weigh_rows(*size, True) for size in ((2, ROWS), (1, ROWS), (1, 1))
)
part_row, join_row = _rearranged(True), _rearranged(False)
