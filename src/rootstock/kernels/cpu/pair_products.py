"""Products of pairs of bfloat16 by the processor's vector instruction for them (AVX512-BF16), for attention.

The instruction adds to each of 16 lanes of float32 the products of two neighbouring bfloat16 numbers: twice the work
of an instruction for float32. `AT_ONCE` rows are multiplied with four vectors of columns, in 24 of the 32 registers,
or `FEW` rows where there are no more. All addresses and strides are int64, in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from rootstock.kernels.cpu.compiler import cgutils, has_features, intrinsic, types
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
AT_ONCE, FEW = 6, 2  # rows

_VECTORS = TILE // LANES
_FEATURES = ("avx512bf16", "avx512bw")


@cache
def has_pair_products() -> bool:
    """Returns whether the processor multiplies pairs of bfloat16, and Numba may use it."""
    return has_features(*_FEATURES)


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


def add_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Adds a[2i] · b[2i] + a[2i + 1] · b[2i + 1] to each lane i. a, b: 16 pairs of bfloat16, as int32"""
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def rounded(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds two vectors of float32 to one of 32 bfloat16, to nearest."""
    kind = ir.FunctionType(_PAIRS, [FLOATS, FLOATS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(function, [high, low]), _HALVES)


def splat_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads 32 bits, for example a pair of bfloat16, into all lanes."""
    return splat(builder, builder.load(builder.inttoptr(address, I32.as_pointer()), align=2))


def _lane(builder: ir.IRBuilder, vector: ir.Value, lane: int) -> ir.Value:
    return shuffle(builder, vector, vector, [lane] * LANES)


class _Products:
    """Sums of products of rows of pairs with `vectors` vectors of columns, in registers."""

    def __init__(self, builder: ir.IRBuilder, rows: int, vectors: int) -> None:
        self._builder, self._vectors = builder, vectors
        self._totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows * vectors)]

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
                pair = splat_at(builder, builder.add(row, along))
                for v, column in enumerate(loaded):
                    total = self._totals[r * self._vectors + v]
                    builder.store(add_pairs(builder, builder.load(total), pair, column), total)


def _weights_of_tile(count: int) -> Any:
    def weights_of_tile(
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
        """Computes the weights of `count` rows with a tile, and what they change in the rows' sums before.

        query       address of [count, 2 · steps] bfloat16
        keys        address of [steps, 64] pairs
        limits      address of [count, 2] int32: first position that a row sees, and the one after its last
        first       position of the tile
        tops        address of [2, 16] float32: largest score of each row; factors of the sums before
        sums        address of [count, 16] float32: sums of weights, in parts
        weights     address of [count, 64] bfloat16
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            query, keys, steps, scale, limits, first, tops, sums, weights = given
            products = _Products(builder, count, _VECTORS)
            for r in range(count):
                for v in range(_VECTORS):
                    products.set(r, v, floats(0.0))
            row_bytes = builder.shl(steps, I64(2))
            rows = [builder.add(query, builder.mul(row_bytes, I64(r))) for r in range(count)]
            products.add(rows, keys, I64(4 * TILE), steps)

            scales, nothing = splat(builder, scale), floats(float("-inf"))
            begins = splat(builder, builder.trunc(first, I32))
            before = load(builder, tops)
            found, scores, seen = before, [], []
            for r in range(count):
                bounds = [splat_at(builder, builder.add(limits, I64(8 * r + 4 * i))) for i in range(2)]
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
                    greater(builder, greatest_lane(builder, top), builder.extract_element(before, I32(r))),
                    I32(r),
                )
            factors = exp(builder, builder.fsub(before, found))
            store(builder, found, tops)
            store(builder, factors, builder.add(tops, I64(64)))
            for r in range(count):
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
                    store(builder, rounded(builder, *made[2 * half : 2 * half + 2]), at)
            return context.get_dummy_value()

        int64 = types.int64
        return types.void(int64, int64, int64, types.float32, *[int64] * 5), generate

    return intrinsic(weights_of_tile)


weights_of_tile, weights_of_few = _weights_of_tile(AT_ONCE), _weights_of_tile(FEW)


def _weigh_values(count: int, vectors: int) -> Any:
    def weigh(typing: Any, weights: Any, values: Any, stride: Any, factors: Any, out: Any) -> Any:
        """Replaces out by factors · out + weights · values, for `count` rows and 16 · `vectors` columns.

        weights     address of [count, 64] bfloat16
        values, out addresses of 32 rows of pairs, and of `count` rows of float32, `stride` bytes apart
        factors     address of [16] float32
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weights, values, stride, factors, out = given
            products = _Products(builder, count, vectors)
            rows = [builder.add(out, builder.mul(stride, I64(r))) for r in range(count)]
            of_rows = load(builder, factors)
            for r, row in enumerate(rows):
                factor = _lane(builder, of_rows, r)
                for v in range(vectors):
                    earlier = load(builder, builder.add(row, I64(64 * v)))
                    products.set(r, v, builder.fmul(earlier, factor))
            pairs = [builder.add(weights, I64(2 * TILE * r)) for r in range(count)]
            products.add(pairs, values, stride, I64(TILE // 2))
            for r, row in enumerate(rows):
                for v, total in enumerate(products.of(r)):
                    store(builder, total, builder.add(row, I64(64 * v)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(weigh)


weigh_64, weigh_32 = _weigh_values(AT_ONCE, 4), _weigh_values(AT_ONCE, 2)
few_weigh_64, few_weigh_32 = _weigh_values(FEW, 4), _weigh_values(FEW, 2)


@intrinsic  # type: ignore[untyped-decorator]
def interleave(typing: Any, even: Any, odd: Any, count: Any, to: Any) -> Any:
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
