"""Matrix units of Intel processors (AMX) for compiled loops, and the operations that lay numbers out for them.

A tile register holds up to 16 rows of 64 bytes. One instruction adds the product of A [m, 32] and B [32, n] of
bfloat16 to a tile C [m, n] of float32: 16 times as much work as a vector instruction. Rows of B lie side by side in
pairs: a row of B's tile holds, for each column, the elements of rows 2k and 2k + 1.

Rows may lie at any distance from each other in memory, so tiles are read from a pool in place. All addresses and
strides are int64, in bytes.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from rootstock.kernels.cpu.compiler import cgutils, compiles_for, intrinsic, types
from rootstock.kernels.cpu.vector_lanes import (
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    add_product,
    exp,
    floats,
    greater,
    ints,
    load,
    shuffle,
    splat,
    store,
)

TILE_ROWS = 16
TILE_BYTES = 1024  # 16 rows of 64 bytes
PAIRED = 32  # rows of B, columns of A
CONFIGURATION_BYTES = 64
AT_ONCE = 4  # products in flight: each takes 52 cycles, and a new product can begin every 16

_FEATURES = ("amx-tile", "amx-bf16", "avx512bw")
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # arguments of Linux's arch_prctl
_ARCH_PRCTL = 158

_BYTES = I8.as_pointer()
_HALVES = ir.VectorType(I16, 32)


@cache
def are_there() -> bool:
    """Returns whether the processor has AMX for bfloat16, and Numba and the system let this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not all(features.get(name) for name in _FEATURES) or not compiles_for(*_FEATURES):
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def configuration(shapes: list[tuple[int, int]]) -> NDArray[np.uint8]:
    """Builds a tile configuration [64] from the rows and the bytes of a row of registers 0, 1, …"""
    told = np.zeros(CONFIGURATION_BYTES, np.uint8)
    told[0] = 1
    for number, (rows, row_bytes) in enumerate(shapes):
        told[16 + 2 * number] = row_bytes
        told[48 + number] = rows
    return told


# ---- tiles


def _call(builder: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(arguments))


def _load_tile(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    _call(builder, "llvm.x86.tileloadd64", I8(tile), builder.inttoptr(address, _BYTES), stride)


def _store_tile(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    _call(builder, "llvm.x86.tilestored64", I8(tile), builder.inttoptr(address, _BYTES), stride)


def _multiply(builder: ir.IRBuilder, c: int, a: int, b: int) -> None:
    _call(builder, "llvm.x86.tdpbf16ps", I8(c), I8(a), I8(b))


@intrinsic  # type: ignore[untyped-decorator]
def configure(typing: Any, address: Any) -> Any:
    """Configures the tiles by the `configuration` at this address, and sets them to zero."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", builder.inttoptr(given[0], _BYTES))
        return context.get_dummy_value()

    return types.none(types.int64), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def release(typing: Any) -> Any:
    """Releases the tiles. Configured tiles make saving a thread's registers slower, and other code expects none."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.none(), compile_call


# Registers 0 to 3 hold sums (C), 4 and 5 hold A, 6 and 7 hold B.
def scores_configuration(columns: int) -> NDArray[np.uint8]:
    """Returns the configuration for `multiply_four` with C and B of so many columns."""
    return configuration([(16, 4 * columns)] * 4 + [(16, 64)] * 2 + [(16, 4 * columns)] * 2)


def sums_configuration(rows: int) -> NDArray[np.uint8]:
    """Returns the configuration for `add_four_products` and `add_two_products` with C and A of so many rows."""
    return configuration([(rows, 64)] * 4 + [(rows, 64)] * 2 + [(16, 64)] * 2)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_four(
    typing: Any,
    a0: Any,
    a1: Any,
    a2: Any,
    a3: Any,
    a_stride: Any,
    b0: Any,
    b1: Any,
    b2: Any,
    b3: Any,
    steps: Any,
    c0: Any,
    c1: Any,
    c2: Any,
    c3: Any,
    c_stride: Any,
) -> Any:
    """Computes C = A · B four times. A [16, 32 · steps] bfloat16, each row contiguous; B is `steps` tiles in
    sequence."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        a, a_stride, b, steps, c, c_stride = (
            given[:4],
            given[4],
            given[5:9],
            given[9],
            given[10:14],
            given[14],
        )
        for i in range(AT_ONCE):
            _call(builder, "llvm.x86.tilezero", I8(i))
        # One product after the other, because memory is faster when it is read in order. They still overlap.
        for i in range(AT_ONCE):
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                along_a, along_b = (
                    builder.mul(loop.index, I64(64)),
                    builder.mul(loop.index, I64(TILE_BYTES)),
                )
                _load_tile(builder, 4 + i % 2, builder.add(a[i], along_a), a_stride)
                _load_tile(builder, 6 + i % 2, builder.add(b[i], along_b), I64(64))
                _multiply(builder, i, 4 + i % 2, 6 + i % 2)
        for i in range(AT_ONCE):
            _store_tile(builder, i, c[i], c_stride)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 15), compile_call


def _add_products(count: int) -> Any:
    def add_products(typing: Any, a: Any, a_stride: Any, b: Any, c: Any, c_stride: Any) -> Any:
        """Adds A · B to C `count` times: tiles of C side by side, tiles of B in sequence; A [rows, 32]."""

        def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            a, a_stride, b, c, c_stride = given
            _load_tile(builder, 4, a, a_stride)
            for i in range(count):
                _load_tile(builder, i, builder.add(c, I64(64 * i)), c_stride)
                _load_tile(builder, 6 + i % 2, builder.add(b, I64(TILE_BYTES * i)), I64(64))
                _multiply(builder, i, 4, 6 + i % 2)
            for i in range(count):
                _store_tile(builder, i, builder.add(c, I64(64 * i)), c_stride)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), compile_call

    return intrinsic(add_products)


add_four_products, add_two_products = _add_products(4), _add_products(2)


# ---- vectors


# Numbers of the lanes in the first and in the second half of each 128 bits, of 32 neighbours: one shuffle each.
_LANES = [[8 * q + 4 * half + e for q in range(4) for e in range(4)] for half in range(2)]


@intrinsic  # type: ignore[untyped-decorator]
def pair_rows(typing: Any, even: Any, odd: Any, count: Any, to: Any) -> Any:
    """Interleaves two neighbouring rows of B [count] bfloat16, at `even` and `odd`, into a row of each tile from `to`
    on.

    Of the columns 32t … 32t + 31, tile 2t takes the columns in whose number bit 2 (value 4) is clear, and tile 2t + 1
    the other ones. `in_order` restores the order.
    """

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        even, odd, count, to = given
        with cgutils.for_range_slice(builder, I64(0), count, I64(32), I64) as (d, _):
            along = builder.mul(d, I64(2))
            a, b = (load(builder, builder.add(row, along), _HALVES) for row in (even, odd))
            place = builder.add(to, builder.mul(d, I64(TILE_BYTES // 16)))
            for half, lanes in enumerate(_LANES):
                mixed = shuffle(builder, a, b, [x for lane in lanes for x in (lane, lane + 32)])
                store(builder, mixed, builder.add(place, I64(half * TILE_BYTES)))
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def in_order(typing: Any, source: Any, count: Any, to: Any) -> Any:
    """Copies a row of C [count] float32 from the column order of `pair_rows` to the natural order."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, count, to = given
        where = [0] * 32
        for half, lanes in enumerate(_LANES):
            for i, lane in enumerate(lanes):
                where[lane] = 16 * half + i
        with cgutils.for_range_slice(builder, I64(0), count, I64(32), I64) as (d, _):
            along = builder.mul(d, I64(4))
            here = builder.add(source, along)
            a, b = load(builder, here), load(builder, builder.add(here, I64(64)))
            for half in range(2):
                place = builder.add(builder.add(to, along), I64(64 * half))
                store(builder, shuffle(builder, a, b, where[16 * half : 16 * half + 16]), place)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def transpose(typing: Any, source: Any, source_stride: Any, to: Any, to_stride: Any) -> Any:
    """Transposes a matrix [16, 16] of 4-byte elements."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, source_stride, to, to_stride = given
        rows = [
            load(builder, builder.add(source, builder.mul(source_stride, I64(i))), INTS) for i in range(16)
        ]
        # Squares of size `span` change places across the diagonal of each square of twice that size.
        for span in (1, 2, 4, 8):
            low = [lane if not lane & span else 16 + (lane ^ span) for lane in range(16)]
            high = [lane | span if not lane & span else 16 + lane for lane in range(16)]
            for i in range(16):
                if not i & span:
                    a, b = rows[i], rows[i | span]
                    rows[i], rows[i | span] = shuffle(builder, a, b, low), shuffle(builder, a, b, high)
        for i, row in enumerate(rows):
            store(builder, row, builder.add(to, builder.mul(to_stride, I64(i))))
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def largest_of_columns(typing: Any, source: Any, stride: Any, rows: Any, to: Any) -> Any:
    """Writes the maximum of each column of [rows, 16] float32 to `to` [16]."""

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, stride, rows, to = given
        top = cgutils.alloca_once_value(builder, load(builder, source))
        with cgutils.for_range(builder, rows, intp=I64) as loop:
            row = load(builder, builder.add(source, builder.mul(stride, loop.index)))
            builder.store(greater(builder, row, builder.load(top)), top)
        store(builder, builder.load(top), to)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), compile_call


@intrinsic  # type: ignore[untyped-decorator]
def weights_of_columns(
    typing: Any, source: Any, stride: Any, pairs: Any, scale: Any, top: Any, total: Any, to: Any
) -> Any:
    """Computes exp(scale · source - top), rounded to bfloat16, two rows side by side, and the sum of each column of
    the rounded weights.

    source [2 · pairs, 16] float32; top, total [16]; to [pairs, 16] of two bfloat16 each, with the stride of source
    """

    def compile_call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, stride, pairs, scale, top, total, to = given
        scales, tops = splat(builder, scale), load(builder, top)
        below = builder.fneg(tops)
        sums = cgutils.alloca_once_value(builder, floats(0.0))
        with cgutils.for_range(builder, pairs, intp=I64) as loop:
            even = builder.add(source, builder.mul(stride, builder.mul(loop.index, I64(2))))
            odd = builder.add(even, stride)
            rounded = []
            for row in (even, odd):
                weight = exp(builder, add_product(builder, below, load(builder, row), scales))
                bits = builder.add(builder.bitcast(weight, INTS), ints(0x8000))
                rounded.append(builder.and_(bits, ints(-0x10000)))
            both = builder.fadd(*(builder.bitcast(bits, FLOATS) for bits in rounded))
            builder.store(builder.fadd(builder.load(sums), both), sums)
            pair = builder.or_(builder.lshr(rounded[0], ints(16)), rounded[1])
            store(builder, pair, builder.add(to, builder.mul(stride, loop.index)))
        store(builder, builder.load(sums), total)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, types.float32, *[types.int64] * 3), compile_call
