"""Codes of 8 or 4 bits in blocks of 64 outputs, and the instructions that look their values up (AVX512-VBMI).

In a block lie, for each pair of inputs, the codes of all outputs: 64 bytes of 4-bit codes, or 128 of 8 bits, in the
order in which looking them up gives pairs of bfloat16, output by output. A word of 4-bit codes has a code of each of
the four vectors of outputs. Bytes of 8-bit codes are looked up twice, for either byte of a value, and interleaved.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from rootstock.kernels.cpu.compiler import cgutils
from rootstock.kernels.cpu.packed_products import BLOCK
from rootstock.kernels.cpu.vector_lanes import I8, I16, I64, INTS, LANES, load, shuffle

SHIFTS = {4: 6, 8: 7, 16: 8}  # of the bytes of a pair of inputs, by bits; 16: values
_VECTORS = BLOCK // LANES
_WORDS, _BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)


def _place(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: Any) -> ir.Value:
    return load(builder, builder.add(address, I64(offset)), kind)


def _look_up_words(builder: ir.IRBuilder, table: ir.Value, places: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.call(function, [table, places])


def _look_up_bytes(builder: ir.IRBuilder, low: ir.Value, places: ir.Value, high: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES, _BYTES])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.qi.512")
    return builder.call(function, [low, places, high])


def tables_at(builder: ir.IRBuilder, bits: int, table: ir.Value) -> list[ir.Value]:
    if bits == 16:
        return []
    if bits == 4:
        return [_place(builder, table, 0, _WORDS)]
    return [_place(builder, table, 64 * i, _BYTES) for i in range(4)]


def values_at(
    builder: ir.IRBuilder, bits: int, tables: list[ir.Value], at: ir.Value, vectors: range
) -> list[ir.Value]:
    """Returns the values of a pair of inputs: some of the four vectors of pairs, for 8 bits the vectors of a half or
    all."""
    if bits == 16:
        return [_place(builder, at, 64 * v, INTS) for v in vectors]
    if bits == 4:
        words = _place(builder, at, 0, _WORDS)
        shifts = [ir.Constant(_WORDS, [4 * v] * (2 * LANES)) for v in vectors]
        # A place has five bits, and the table is twice the same: the fifth bit is the next code's.
        places = [builder.lshr(words, shift) for shift in shifts]
        return [builder.bitcast(_look_up_words(builder, tables[0], place), INTS) for place in places]
    values = []
    for half in range(vectors.start // 2, vectors.stop // 2):
        values += _values_of_8(builder, tables, _place(builder, at, 64 * half, _BYTES))
    return values


def _values_of_8(builder: ir.IRBuilder, tables: list[ir.Value], codes: ir.Value) -> list[ir.Value]:
    """Returns two vectors of pairs."""
    sign = ir.Constant(_BYTES, [-128] * (4 * LANES))
    low = _look_up_bytes(builder, tables[0], codes, tables[1])
    high = builder.or_(_look_up_bytes(builder, tables[2], codes, tables[3]), builder.and_(codes, sign))
    values = []
    for half in range(2):
        lanes = [
            x
            for quarter in range(4)
            for i in range(8)
            for x in (16 * quarter + 8 * half + i, 64 + 16 * quarter + 8 * half + i)
        ]
        values.append(builder.bitcast(shuffle(builder, low, high, lanes), INTS))
    return values


# ---- packing


def table_of(values: Tensor) -> Tensor:
    """Returns the table [64 or 256] uint8 that loops read, of 16 or 128 values, which are rounded to bfloat16."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    if len(bits) == 16:
        return bits.repeat(2).view(torch.uint8)
    assert len(bits) == 128
    return bits.view(torch.uint8).view(128, 2).t().reshape(-1).contiguous()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [experts, out, in] uint8 → [experts, blocks, in / 2, 64 or 128] uint8, with zeros for the outputs
    that fill up the last block."""
    experts, outputs, inputs = codes.shape
    blocks, pairs = -(-outputs // BLOCK), inputs // 2
    packed = torch.empty(experts, blocks, pairs, 16 * bits, dtype=torch.uint8)
    for code, into in zip(codes, packed, strict=True):
        whole = torch.nn.functional.pad(code, (0, 0, 0, BLOCK * blocks - outputs)).contiguous()
        if bits == 8:
            into.copy_(whole.view(blocks, 2, 2, 4, 4, pairs, 2).permute(0, 5, 1, 3, 2, 4, 6).flatten(2))
        else:
            # A word has one code of each of the four vectors, and its bytes two.
            nibbles = whole.view(blocks, 2, 2, LANES, pairs, 2).permute(2, 0, 4, 3, 5, 1).flatten(3)
            into.copy_(nibbles[0] | nibbles[1] << 4)
    return packed


def unpack_codes(packed: Tensor, bits: int, outputs: int) -> Tensor:
    """Returns the codes [experts, out, in] that `pack_codes` packed."""
    experts, blocks, pairs, _ = packed.shape
    if bits == 8:
        codes = packed.view(experts, blocks, pairs, 2, 4, 2, 4, 2).permute(0, 1, 3, 5, 4, 6, 2, 7)
    else:
        nibbles = torch.stack([packed & 15, packed >> 4]).view(2, experts, blocks, pairs, LANES, 2, 2)
        codes = nibbles.permute(1, 2, 6, 0, 4, 3, 5)
    return codes.reshape(experts, BLOCK * blocks, 2 * pairs)[:, :outputs].contiguous()
