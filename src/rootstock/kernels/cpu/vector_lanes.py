"""Vectors of 16 float32 and switches in LLVM's intermediate representation, for the intrinsics of compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from rootstock.kernels.cpu.compiler import cgutils

LANES = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


def load(builder: ir.IRBuilder, address: ir.Value, vector: Any = FLOATS) -> ir.Value:
    """Loads a vector from an int64 address, which need only be even."""
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=2)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def fetch(builder: ir.IRBuilder, address: ir.Value, level: int, writes: bool = False) -> None:
    """Asks for the line of memory at an int64 address to be read into the first or second cache, without waiting.
    writes: the line will be written"""
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    # Arguments of llvm.prefetch: a read or a write, locality (3 is the first cache), data.
    builder.call(function, [builder.inttoptr(address, byte), I32(int(writes)), I32(4 - level), I32(1)])


def switch(builder: ir.IRBuilder, number: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
    """Generates a switch over numbers, each with code of its own."""
    ends = builder.append_basic_block("end")
    choice = builder.switch(number, ends)
    for case, generate in cases.items():
        begin = builder.append_basic_block(f"case_{case}")
        choice.add_case(I64(case), begin)
        builder.position_at_end(begin)
        generate()
        builder.branch(ends)
    builder.position_at_end(ends)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    """Selects lanes of a and b. The lanes of b are numbered after the lanes of a."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, I32(0))
    return shuffle(builder, first, first, [0] * LANES)


def floats(number: float) -> ir.Value:
    return ir.Constant(FLOATS, [float(np.float32(number))] * LANES)


def ints(number: int) -> ir.Value:
    return ir.Constant(INTS, [number] * LANES)


def add_product(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma.v16f32", FLOATS, a, b, total)


def greater(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def greatest_lane(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    while a.type.count > 1:
        half = a.type.count // 2
        parts = (shuffle(builder, a, a, list(range(begin, begin + half))) for begin in (0, half))
        a = greater(builder, *parts)
    return builder.extract_element(a, I32(0))


def sum_of_lanes(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    while a.type.count > 1:
        half = a.type.count // 2
        parts = (shuffle(builder, a, a, list(range(begin, begin + half))) for begin in (0, half))
        a = builder.fadd(*parts)
    return builder.extract_element(a, I32(0))


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Computes e^x like `compiler.exp`."""
    x = builder.fmul(greater(builder, x, floats(-87.0)), floats(1.44269504))
    whole = _call(builder, "llvm.floor.v16f32", FLOATS, builder.fadd(x, floats(0.5)))
    r = builder.fmul(builder.fsub(x, whole), floats(0.693147182))
    p = floats(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        p = add_product(builder, floats(factor), p, r)
    p = builder.fadd(add_product(builder, r, builder.fmul(p, r), r), floats(1.0))
    power = builder.shl(builder.add(builder.fptosi(whole, INTS), ints(127)), ints(23))
    return builder.fmul(p, builder.bitcast(power, FLOATS))


def _call(builder: ir.IRBuilder, name: str, kind: Any, *arguments: ir.Value) -> ir.Value:
    function = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), list(arguments))
