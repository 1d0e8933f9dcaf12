"""Products of a batch of rows with a block of coded weights, in registers, and the widened numbers of groups.

A group's products are added up in sums that begin at zero; then each sum, times the group's scale, is added to a
total. Sums and totals of all rows of a batch stay in registers: up to three rows with all 64 outputs of a block, four
to seven with one half of them after the other. Totals in memory would be stored once for each group, which takes as
long as an eighth of the products of 16 pairs. A lookup of 4 bits is hidden behind the products of such a batch, so
only values of 6 and 8 bits are kept for the next batches, by the first one.

All addresses and strides are int64, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from rootstock.kernels.cpu.code_values import AT_ONCE, BYTES, tables_at, values_at
from rootstock.kernels.cpu.compiler import cgutils, intrinsic, types
from rootstock.kernels.cpu.packed_products import BLOCK
from rootstock.kernels.cpu.pair_products import add_pairs, splat_at
from rootstock.kernels.cpu.vector_lanes import (
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    add_product,
    fetch,
    floats,
    load,
    store,
    switch,
)

llvm.initialize_native_asmparser()  # for `_inputs_at`

MOST, WHOLE = 7, 3  # rows of a batch; rows whose products with a whole block fit into the registers
# Sources of a batch's products: codes of so many bits, values, or codes whose values it keeps (KEPT + bits).
VALUES, KEPT = 16, 16
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)  # of scales and minima
_VECTORS = BLOCK // LANES


@dataclass(frozen=True, slots=True)
class _OfBatch:
    """Arguments of `add_batch` behind its way."""

    rows: Any
    along: Any
    weight: Any
    pairs: Any
    segment: Any
    scales: Any
    minima: Any
    sums: Any
    sums_stride: Any
    table: Any
    begins: Any
    begins_stride: Any
    totals: Any
    values: Any
    fetched: Any
    stride: Any


@intrinsic  # type: ignore[untyped-decorator]
def add_batch(
    typing: Any,
    way: Any,
    rows: Any,
    along: Any,
    weight: Any,
    pairs: Any,
    segment: Any,
    scales: Any,
    minima: Any,
    sums: Any,
    sums_stride: Any,
    table: Any,
    begins: Any,
    begins_stride: Any,
    totals: Any,
    values: Any,
    fetched: Any,
    stride: Any,
) -> Any:
    """Computes totals = begins + scale · products + minimum · sum of inputs of one to seven rows and a block, segment
    by segment.

    way         8 · bits + rows; instead of bits also VALUES or KEPT + bits
    rows        address of [count] int64: the addresses of rows
    along       bytes from the address of a row to its first pair
    weight      address of codes, or of values
    pairs       of inputs; the last segment may have fewer than `segment`. For 6 bits all are even
    scales      address of [segments, 64] float32
    minima      the same; 0: there are none
    sums        address of the sums of the first row's inputs, [segments] float32, of other rows `sums_stride` further
    begins      address of the numbers that the first row's totals begin with, [64] float32, of other rows
                `begins_stride` further
    totals      address of [count, 64] float32
    values      address of [pairs, 64] pairs, which KEPT writes
    fetched     address of memory that is fetched into the second cache meanwhile, `stride` bytes for each pair; each
                half of a block fetches its own part
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        way, *others = given
        cases: dict[int, Callable[[], None]] = {}
        for source in (4, 6, 8, VALUES, KEPT + 6, KEPT + 8):
            least = 1 if source <= 8 else WHOLE + 1  # there are further batches only where each has more rows
            for count in range(least, MOST + 1):
                cases[8 * source + count] = partial(_add, builder, source, count, _OfBatch(*others))
        switch(builder, way, cases)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 17), generate


def _add(builder: ir.IRBuilder, source: int, count: int, given: _OfBatch) -> None:
    vectors = range(_VECTORS)
    parts = [vectors] if count <= WHOLE else [vectors[:2], vectors[2:]]
    for number, part in enumerate(parts):
        skipped = builder.mul(given.stride, builder.mul(given.pairs, I64(number)))
        _add_part(builder, source, count, part, replace(given, fetched=builder.add(given.fetched, skipped)))


def _add_part(builder: ir.IRBuilder, source: int, count: int, vectors: range, given: _OfBatch) -> None:
    """Generates the products of `count` rows with some vectors of outputs."""
    totals = []
    for r in range(count):
        begin = builder.add(given.begins, builder.mul(given.begins_stride, I64(r)))
        begun = [load(builder, builder.add(begin, I64(64 * v))) for v in vectors]
        totals.append([cgutils.alloca_once_value(builder, total) for total in begun])
    segments = builder.udiv(builder.sub(builder.add(given.pairs, given.segment), I64(1)), given.segment)
    with cgutils.for_range(builder, segments, intp=I64) as loop:
        first = builder.mul(loop.index, given.segment)
        left = builder.sub(given.pairs, first)
        here = builder.select(builder.icmp_signed("<", left, given.segment), left, given.segment)
        products = _segment_products(builder, source, count, vectors, given, first, here)
        _add_scaled(builder, loop.index, vectors, given, products, totals)
    for r, of_row in enumerate(totals):
        for v, total in zip(vectors, of_row, strict=True):
            store(builder, builder.load(total), builder.add(given.totals, I64(256 * r + 64 * v)))


def _segment_products(
    builder: ir.IRBuilder,
    source: int,
    count: int,
    vectors: range,
    given: _OfBatch,
    first: ir.Value,
    pairs: ir.Value,
) -> list[list[ir.Value]]:
    """Returns the sums of the products of `pairs` pairs from `first` on, for each row and vector."""
    bits = source - KEPT if source > VALUES else source
    table = builder.inttoptr(given.rows, I64.as_pointer())
    rows = [builder.add(builder.load(builder.gep(table, [I64(r)])), given.along) for r in range(count)]
    tables = tables_at(builder, bits, given.table)
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in vectors] for _ in range(count)]
    for of_row in sums:
        for one in of_row:
            builder.store(floats(0.0), one)
    at_once = AT_ONCE[bits]
    with cgutils.for_range(builder, builder.udiv(pairs, I64(at_once)), intp=I64) as loop:
        pair = builder.add(first, builder.mul(loop.index, I64(at_once)))
        if source != VALUES:
            ahead = builder.add(given.fetched, builder.mul(given.stride, pair))
            for line in range(-(-at_once * BYTES[bits] * len(vectors) // _VECTORS // 64)):
                fetch(builder, builder.add(ahead, I64(64 * line)), 2)
        at = builder.add(given.weight, builder.mul(pair, I64(BYTES[bits])))
        for i, columns in enumerate(values_at(builder, bits, tables, at, vectors)):
            here = builder.add(pair, I64(i))
            if source > VALUES:
                to = builder.add(given.values, builder.mul(here, I64(BYTES[VALUES])))
                for v, column in zip(vectors, columns, strict=True):
                    store(builder, column, builder.add(to, I64(64 * v)))
            for row, of_row in zip(rows, sums, strict=True):
                inputs = _inputs_at(builder, row, here)
                for one, column in zip(of_row, columns, strict=True):
                    builder.store(add_pairs(builder, builder.load(one), inputs, column), one)
    return [[builder.load(one) for one in of_row] for of_row in sums]


def _inputs_at(builder: ir.IRBuilder, row: ir.Value, pair: ir.Value) -> ir.Value:
    """Loads a pair of inputs into all lanes.

    LLVM would choose the instruction for float32, which takes turns with lookups: six hundredths of the time.
    """
    kind = ir.FunctionType(INTS, [I64, I64])
    return builder.asm(kind, "vpbroadcastd ($1,$2,4), $0", "=v,r,r", [row, pair], side_effect=False)


def _add_scaled(
    builder: ir.IRBuilder,
    segment: ir.Value,
    vectors: range,
    given: _OfBatch,
    products: list[list[ir.Value]],
    totals: list[list[ir.Value]],
) -> None:
    """Adds a segment's sums, times its scales, and the sums of its inputs, times its minima, to totals."""

    def add(numbers: ir.Value, factors: list[list[ir.Value]]) -> None:
        at = builder.add(numbers, builder.shl(segment, I64(8)))
        for i, v in enumerate(vectors):
            number = load(builder, builder.add(at, I64(64 * v)))
            for of_row, of_totals in zip(factors, totals, strict=True):
                total = builder.load(of_totals[i])
                builder.store(add_product(builder, total, of_row[i], number), of_totals[i])

    add(given.scales, products)
    with builder.if_then(builder.icmp_signed("!=", given.minima, I64(0)), likely=False):
        place = builder.add(given.sums, builder.shl(segment, I64(2)))
        inputs = []
        for r in range(len(products)):
            at = builder.add(place, builder.mul(given.sums_stride, I64(r)))
            inputs.append([builder.bitcast(splat_at(builder, at), FLOATS)] * len(vectors))
        add(given.minima, inputs)


# ---- numbers of groups


@intrinsic  # type: ignore[untyped-decorator]
def widen_numbers(
    typing: Any,
    kind: Any,
    numbers: Any,
    shared: Any,
    of_shared: Any,
    first: Any,
    count: Any,
    of_group: Any,
    factors: Any,
    into: Any,
) -> Any:
    """Writes the scales, or minima, of `count` segments from `first` on to [count, 64] float32.

    kind        place in KINDS
    numbers     address of [groups, 64]
    shared      address of [groups / of_shared, 64] float16, factors of the numbers; 0: there are none
    of_group    segments
    factors     address of [count, 64] float32, further factors; 0: there are none
    into        address of [count, 64] float32
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind, *others = given
        switch(builder, kind, {k: partial(_widen, builder, KINDS[k], *others) for k in range(len(KINDS))})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _widen(builder: ir.IRBuilder, kind: torch.dtype, *given: Any) -> None:
    numbers, shared, of_shared, first, count, of_group, factors, into = given
    size = 64 * kind.itemsize
    with cgutils.for_range(builder, count, intp=I64) as loop:
        group = builder.udiv(builder.add(first, loop.index), of_group)
        at = builder.add(numbers, builder.mul(group, I64(size)))
        # The numbers of the next call lie behind those of this one.
        ahead = builder.add(at, builder.mul(count, I64(size)))
        for line in range(size // 64):
            fetch(builder, builder.add(ahead, I64(64 * line)), 2)
        along = builder.shl(loop.index, I64(8))
        wide = [
            _number_at(builder, kind, builder.add(at, I64(size // _VECTORS * v))) for v in range(_VECTORS)
        ]
        made = [cgutils.alloca_once(builder, FLOATS) for _ in wide]
        for one, number in zip(made, wide, strict=True):
            builder.store(number, one)
        with builder.if_then(builder.icmp_signed("!=", shared, I64(0))):
            place = builder.add(shared, builder.shl(builder.udiv(group, of_shared), I64(7)))
            for v, one in enumerate(made):
                factor = _number_at(builder, torch.float16, builder.add(place, I64(32 * v)))
                builder.store(builder.fmul(builder.load(one), factor), one)
        with builder.if_then(builder.icmp_signed("!=", factors, I64(0))):
            place = builder.add(factors, along)
            for v, one in enumerate(made):
                factor = load(builder, builder.add(place, I64(64 * v)))
                builder.store(builder.fmul(builder.load(one), factor), one)
        for v, one in enumerate(made):
            store(builder, builder.load(one), builder.add(builder.add(into, along), I64(64 * v)))


def _number_at(builder: ir.IRBuilder, kind: torch.dtype, address: ir.Value) -> ir.Value:
    """Loads 16 numbers as float32."""
    if kind == torch.float32:
        return load(builder, address)
    if kind == torch.float16:
        return builder.fpext(load(builder, address, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    if kind == torch.bfloat16:
        halves = builder.zext(load(builder, address, ir.VectorType(I16, LANES)), INTS)
        return builder.bitcast(builder.shl(halves, ir.Constant(INTS, [16] * LANES)), FLOATS)
    small = load(builder, address, ir.VectorType(I8, LANES))
    if kind == torch.uint8:
        return builder.uitofp(builder.zext(small, INTS), FLOATS)
    return builder.sitofp(builder.sext(small, INTS), FLOATS)
