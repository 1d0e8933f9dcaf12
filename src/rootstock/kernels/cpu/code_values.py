"""Codes of 8, 6 or 4 bits in blocks of 64 outputs, and the instructions that look their values up (AVX512-VBMI).

In a block lie, for each pair of inputs, the codes of all outputs: 64 bytes of 4-bit codes, 128 of 8 bits, or for each
two pairs 192 of 6 bits, in the order in which looking them up gives pairs of bfloat16, output by output. A word of
4-bit codes has a code of each of the four vectors of outputs. Bytes of 8-bit codes are looked up twice, for either
byte of a value, and interleaved. Three words of 6-bit codes have the codes of two pairs and four vectors: two whole
ones in each word, and the last two in parts, as `_PARTS` and `_SPLIT` tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from rootstock.kernels.cpu.compiler import cgutils
from rootstock.kernels.cpu.packed_products import BLOCK
from rootstock.kernels.cpu.vector_lanes import I8, I16, I64, INTS, LANES, load, shuffle

BYTES = {4: 64, 6: 96, 8: 128, 16: 256}  # of a pair of inputs, by bits; 16: values
AT_ONCE = {4: 1, 6: 2, 8: 1, 16: 1}  # pairs of inputs whose codes lie together
# Of 6-bit codes: the word and the bit of the codes that are whole, by vector and pair.
_PARTS = {(0, 0): (0, 0), (1, 0): (0, 6), (0, 1): (1, 0), (1, 1): (1, 6), (2, 0): (2, 0), (2, 1): (2, 6)}
# The word whose upper four bits are a code's upper four, and the bit of word 2 where its lower two are.
_SPLIT = {(3, 0): (0, 12), (3, 1): (1, 14)}
_VECTORS = BLOCK // LANES
_AT_ONCE = 64  # blocks that are packed together: the memory for it is small beside a large layer
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


def _look_up_many(builder: ir.IRBuilder, low: ir.Value, places: ir.Value, high: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.hi.512")
    return builder.call(function, [low, places, high])


def tables_at(builder: ir.IRBuilder, bits: int, table: ir.Value) -> list[ir.Value]:
    if bits == 16:
        return []
    if bits == 4:
        return [_place(builder, table, 0, _WORDS)]
    if bits == 6:
        return [_place(builder, table, 64 * i, _WORDS) for i in range(2)]
    return [_place(builder, table, 64 * i, _BYTES) for i in range(4)]


def values_at(
    builder: ir.IRBuilder, bits: int, tables: list[ir.Value], at: ir.Value, vectors: range
) -> Iterator[list[ir.Value]]:
    """Yields, for each pair of inputs whose codes lie at an address, the values of some of the four vectors of
    outputs, for 8 bits those of a half or all."""
    if bits == 6:
        yield from _values_of_6(builder, tables, at, vectors)
    elif bits == 8:
        values = []
        for half in range(vectors.start // 2, vectors.stop // 2):
            values += _values_of_8(builder, tables, _place(builder, at, 64 * half, _BYTES))
        yield values
    elif bits == 4:
        words = _place(builder, at, 0, _WORDS)
        # A place has five bits, and the table is twice the same: the fifth bit is the next code's.
        places = [_right(builder, words, 4 * v) for v in vectors]
        yield [builder.bitcast(_look_up_words(builder, tables[0], place), INTS) for place in places]
    else:
        yield [_place(builder, at, 64 * v, INTS) for v in vectors]


def _right(builder: ir.IRBuilder, words: ir.Value, bits: int) -> ir.Value:
    return builder.lshr(words, ir.Constant(_WORDS, [bits] * (2 * LANES))) if bits else words


def _values_of_6(
    builder: ir.IRBuilder, tables: list[ir.Value], at: ir.Value, vectors: range
) -> Iterator[list[ir.Value]]:
    words = [_place(builder, at, 64 * i, _WORDS) for i in range(3)]

    def value_of(vector: int, pair: int) -> ir.Value:
        if (vector, pair) in _PARTS:
            word, bit = _PARTS[vector, pair]
            place = _right(builder, words[word], bit)
        else:
            word, bit = _SPLIT[vector, pair]
            high, low = (
                builder.and_(_right(builder, words[i], by), ir.Constant(_WORDS, [mask] * (2 * LANES)))
                for i, by, mask in ((word, 10, -4), (2, bit, 3))
            )
            place = builder.or_(high, low)
        # Only the lower six bits of a place count.
        return builder.bitcast(_look_up_many(builder, tables[0], place, tables[1]), INTS)

    for pair in range(2):
        yield [value_of(vector, pair) for vector in vectors]


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
    """Returns the table [64, 128 or 256] uint8 that loops read, of 16, 64 or 128 values, which are rounded to
    bfloat16."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    if len(bits) == 16:
        return bits.repeat(2).view(torch.uint8)
    if len(bits) == 64:
        return bits.view(torch.uint8).clone()
    assert len(bits) == 128
    return bits.view(torch.uint8).view(128, 2).t().reshape(-1).contiguous()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [experts, out, in] uint8 → [experts, blocks, in / 2, 64, 96 or 128] uint8, with zeros for the
    outputs that fill up the last block. Codes of 6 bits need a multiple of four inputs."""
    experts, outputs, inputs = codes.shape
    blocks, pairs = -(-outputs // BLOCK), inputs // 2
    packed = torch.empty(experts, blocks, pairs, BYTES[bits], dtype=torch.uint8)
    for code, packed_code in zip(codes, packed, strict=True):
        for rows, into in zip(code.split(_AT_ONCE * BLOCK), packed_code.split(_AT_ONCE), strict=True):
            n = len(into)
            whole = torch.nn.functional.pad(rows, (0, 0, 0, BLOCK * n - len(rows))).contiguous()
            if bits == 8:
                into.copy_(whole.view(n, 2, 2, 4, 4, pairs, 2).permute(0, 5, 1, 3, 2, 4, 6).flatten(2))
            elif bits == 6:
                into.copy_(_pack_6(whole.view(n, _VECTORS, LANES, pairs // 2, 2, 2)).view(n, pairs, -1))
            else:
                # A word has one code of each of the four vectors, and its bytes two.
                nibbles = whole.view(n, 2, 2, LANES, pairs, 2).permute(2, 0, 4, 3, 5, 1).flatten(3)
                into.copy_(nibbles[0] | nibbles[1] << 4)
    return packed


def _pack_6(codes: Tensor) -> Tensor:
    """Packs codes [blocks, 4 vectors, lanes, pairs / 2, 2 pairs, 2 inputs] → [blocks, pairs / 2, 192] uint8."""
    blocks, _, _, twos, _, _ = codes.shape
    of_place = codes.permute(1, 4, 0, 3, 2, 5).contiguous()
    low = torch.zeros(3, blocks, twos, LANES, 2, dtype=torch.uint8)
    high = torch.zeros_like(low)
    for place, (word, bit) in _PARTS.items():
        low[word] |= of_place[place] if bit == 0 else (of_place[place] & 3) << 6
        if bit != 0:
            high[word] |= of_place[place] >> 2
    for place, (word, bit) in _SPLIT.items():
        high[word] |= (of_place[place] & 60) << 2
        high[2] |= (of_place[place] & 3) << bit - 8
    return torch.stack([low, high], -1).permute(1, 2, 0, 3, 4, 5).reshape(blocks, twos, -1)


def _unpack_6(packed: Tensor) -> Tensor:
    """Returns the codes [blocks, 4 vectors, lanes, pairs / 2, 2 pairs, 2 inputs] that `_pack_6` packed."""
    blocks, twos, _ = packed.shape
    words = packed.view(torch.int16).view(blocks, twos, 3, LANES, 2).permute(2, 0, 1, 3, 4)
    codes = torch.empty(_VECTORS, 2, blocks, twos, LANES, 2, dtype=torch.uint8)
    for place, (word, bit) in _PARTS.items():
        codes[place] = (words[word] >> bit & 63).byte()
    for place, (word, bit) in _SPLIT.items():
        codes[place] = (words[word] >> 10 & 60 | words[2] >> bit & 3).byte()
    return codes.permute(2, 0, 4, 3, 1, 5)


def unpack_codes(packed: Tensor, bits: int, outputs: int) -> Tensor:
    """Returns the codes [experts, out, in] that `pack_codes` packed."""
    experts, blocks, pairs, _ = packed.shape
    if bits == 8:
        codes = packed.view(experts, blocks, pairs, 2, 4, 2, 4, 2).permute(0, 1, 3, 5, 4, 6, 2, 7)
    elif bits == 6:
        codes = _unpack_6(packed.reshape(experts * blocks, pairs // 2, -1))
    else:
        nibbles = torch.stack([packed & 15, packed >> 4]).view(2, experts, blocks, pairs, LANES, 2, 2)
        codes = nibbles.permute(1, 2, 6, 0, 4, 3, 5)
    return codes.reshape(experts, BLOCK * blocks, 2 * pairs)[:, :outputs].contiguous()
