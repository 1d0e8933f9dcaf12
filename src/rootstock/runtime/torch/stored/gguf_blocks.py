"""Blocks of GGUF's quantized tensors as codes. Source: the definitions of llama.cpp (ggml-common.h, ggml-quants.c).

Blocks have 32 or 256 weights. Blocks of 256 (Q4_K, Q5_K, Q6_K) have scales of 6 or 8 bits for groups of 32 or 16,
times a float16 of the block. Codes of 5 bits are kept in 6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rootstock.kernels.torch.coded_weight import (
    CENTRED,
    CENTRED_SIX,
    INTEGERS,
    OF_SIX,
    UNSIGNED,
    CodedWeight,
    Numbers,
    nibbles,
)

_BLOCK, _SUPER = 32, 256  # weights


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at a byte of each block: […]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _codes_of_4(blocks: Tensor, at: int) -> Tensor:
    """Returns 32 codes of 4 bits for each block: the low halves of 16 bytes, then the high ones."""
    packed = blocks[..., at : at + 16]
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Returns 16 for each code of a block whose fifth bit is set, else 0: 32 bits, the first one lowest."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _rows(codes: Tensor) -> Tensor:
    """Joins the blocks of a row."""
    return codes.flatten(-2)


def _signed(q: Tensor) -> Tensor:
    """Returns codes with a sign and seven bits for small integers."""
    return q.abs().to(torch.uint8) | (q < 0).to(torch.uint8) << 7


def _q4_0(blocks: Tensor) -> CodedWeight:
    codes = nibbles(_rows(_codes_of_4(blocks, 2)))
    return CodedWeight(codes, CENTRED, Numbers(_half(blocks, 0)), None, _BLOCK)


def _q4_1(blocks: Tensor) -> CodedWeight:
    codes = nibbles(_rows(_codes_of_4(blocks, 4)))
    scales, minima = (Numbers(_half(blocks, at)) for at in (0, 2))
    return CodedWeight(codes, UNSIGNED, scales, minima, _BLOCK)


def _q5_0(blocks: Tensor) -> CodedWeight:
    codes = _codes_of_4(blocks, 6) | _fifth_bits(blocks, 2)
    return CodedWeight(_rows(codes), OF_SIX - 16, Numbers(_half(blocks, 0)), None, _BLOCK)


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = _codes_of_4(blocks, 8) | _fifth_bits(blocks, 4)
    scales, minima = (Numbers(_half(blocks, at)) for at in (0, 2))
    return CodedWeight(_rows(codes), OF_SIX, scales, minima, _BLOCK)


def _q8_0(blocks: Tensor) -> CodedWeight:
    q = _rows(blocks[..., 2:].contiguous().view(torch.int8))
    scales = _half(blocks, 0)
    if not bool((q == -128).any()):
        return CodedWeight(_signed(q.short()), INTEGERS, Numbers(scales), None, _BLOCK)
    halves = torch.full_like(scales, -0.5)
    codes = _signed_halves(q)
    return CodedWeight(codes, INTEGERS + 0.5, Numbers(scales), Numbers(halves), _BLOCK, in_scales=True)


def _signed_halves(q: Tensor) -> Tensor:
    """Returns codes of q + 1/2 for q of -128 to 127."""
    return torch.where(q < 0, 127 - (q.short() + 128) | 128, q.short()).to(torch.uint8)


def _six_bits(blocks: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Returns the eight scales and minima of a block, which lie in twelve bytes: […, 8] uint8."""
    low, middle, high = torch.unflatten(blocks[..., at : at + 12], -1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    return scales, minima


def _of_super(blocks: Tensor, codes: Tensor, values: Tensor) -> CodedWeight:
    """Returns weights d · scale · code - dmin · minimum of blocks that begin with d, dmin and their six bits."""
    scales, minima = _six_bits(blocks, 4)
    d, least = _half(blocks, 0), -_half(blocks, 2)
    of_scales, of_minima = Numbers(_rows(scales), d, 8), Numbers(_rows(minima), least, 8)
    return CodedWeight(codes, values, of_scales, of_minima, _BLOCK)


def _q4_k(blocks: Tensor) -> CodedWeight:
    packed = torch.unflatten(blocks[..., 16:], -1, (4, 32))
    codes = torch.stack([packed & 15, packed >> 4], -2).flatten(-3)
    return _of_super(blocks, nibbles(_rows(codes)), UNSIGNED)


def _q5_k(blocks: Tensor) -> CodedWeight:
    packed = torch.unflatten(blocks[..., 48:], -1, (4, 32))
    low = torch.stack([packed & 15, packed >> 4], -2).flatten(-3, -2)  # […, 8, 32]
    fifth = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _of_super(blocks, _rows((low | fifth << 4).flatten(-2)), OF_SIX)


def _q6_k(blocks: Tensor) -> CodedWeight:
    low = torch.unflatten(blocks[..., :128], -1, (2, 2, 32))  # halves of a block, and of their 64 bytes
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    pairs = torch.cat([low & 15, low >> 4], -2)  # […, 2, 4, 32]
    q = pairs | (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    codes = _rows(q.flatten(-3))
    return CodedWeight(codes, CENTRED_SIX, Numbers(_rows(scales), _half(blocks, 208), 16), None, 16)


# Bytes of a block, and its codes, by the name of the type.
_TYPES: dict[str, tuple[int, Callable[[Tensor], CodedWeight]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}

KEPT = tuple(_TYPES)
# Of a weight in memory, with its share of scales and minima.
RESIDENT_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 6.5,
    "Q5_1": 7,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 6.625,
    "Q6_K": 6.5625,
}


def weight_of_blocks(kind: str, data: Tensor) -> CodedWeight:
    """Returns the weights of data […, out, bytes of a row] uint8. `kind` is one of `KEPT`."""
    size, decode = _TYPES[kind]
    return decode(torch.unflatten(data, -1, (-1, size)))
