"""Products with coded weights: the true product of the stored numbers, rounded once, for every form and size."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from rootstock.kernels.cpu.code_values import pack_codes, table_of, unpack_codes
from rootstock.kernels.cpu.coded_products import (
    CodedProducts,
    has_coded_products,
    pack_scales,
)
from rootstock.kernels.torch.coded_weight import CodedWeight, Numbers, nibbles

pytestmark = pytest.mark.skipif(not has_coded_products(), reason="needs AVX512-BF16 and AVX512-VBMI")

TABLES = {
    4: torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    6: torch.arange(64) - 20.5,
    8: torch.arange(128) + 0.5,
}
SHAPES = [  # outputs, inputs, inputs of a group
    (64, 64, 32),
    (96, 1024, 16),
    (130, 384, 128),
    (64, 1728, 1728),  # one group, in segments
    (70, 500, 250),  # segments of 25 pairs
    (70, 524, 262),  # no segment divides the group
    (7, 70, 32),  # the last group is short
    (200, 4100, 64),  # more than a turn
    (64, 34, 2),
]
# Codes of 6 bits have two pairs of inputs together.
SHAPES_OF_6 = [
    (64, 64, 32),
    (96, 1024, 16),
    (130, 384, 128),
    (64, 1728, 1728),
    (70, 536, 268),
    (7, 72, 32),
    (200, 4100, 64),
    (64, 36, 4),
]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_codes(*shape: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)


def values_of(codes: Tensor, bits: int) -> Tensor:
    if bits != 8:
        return TABLES[bits][codes.long()]
    values = TABLES[8][(codes & 127).long()]
    return torch.where(codes >= 128, -values, values)


def widened(packed: Tensor, group: int, inputs: int) -> Tensor:
    return packed.double().repeat_interleave(group, -1)[..., :inputs]


def products_of(codes: Tensor, weight: CodedWeight, biases: Tensor) -> CodedProducts:
    """Returns products with the codes [experts, out, in], and the numbers of a weight beside them."""
    _, *numbers = weight.tensors()
    packed = weight.rebuilt(iter([pack_codes(codes, weight.bits), *map(pack_scales, numbers)]))
    experts, outputs, inputs = codes.shape
    return CodedProducts(packed, table_of(weight.values), (experts, outputs, inputs), biases)


def numbers_of(kind: str, experts: int, outputs: int, groups: int, seed: int) -> Numbers:
    """Returns random scales or minima: floats, or small integers times a float of three groups."""
    if kind in DTYPES:
        return Numbers(random(experts, outputs, groups, seed=seed).to(DTYPES[kind]))
    low, dtype = (0, torch.uint8) if kind == "uint8" else (-128, torch.int8)
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(low, low + 256, (experts, outputs, groups), generator=generator).to(dtype)
    shared = random(experts, outputs, -(-groups // 3), seed=seed + 1) / 128
    return Numbers(own, shared.half(), 3)


@pytest.mark.parametrize(
    ("bits", "experts", "outputs", "inputs"),
    [
        *((bits, *shape) for bits in (4, 8) for shape in ((1, 64, 2), (1, 130, 34), (3, 7, 16))),
        *((6, *shape) for shape in ((1, 64, 4), (1, 130, 36), (3, 7, 16))),
    ],
)
def test_codes_are_packed_and_unpacked(bits: int, experts: int, outputs: int, inputs: int) -> None:
    codes = random_codes(experts, outputs, inputs, bits=bits, seed=1)
    packed = pack_codes(codes, bits)
    assert packed.nbytes * 8 == experts * -(-outputs // 64) * 64 * inputs * bits
    assert torch.equal(unpack_codes(packed, bits, outputs), codes)


@pytest.mark.parametrize("kind", [*DTYPES, "uint8", "int8"])
@pytest.mark.parametrize("minimum", ["none", "own", "in scales"])
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group"),
    [*((bits, *shape) for bits in (4, 8) for shape in SHAPES), *((6, *shape) for shape in SHAPES_OF_6)],
)
def test_products_are_of_the_stored_numbers_rounded_once(
    bits: int,
    kind: str,
    minimum: str,
    outputs: int,
    inputs: int,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    groups = -(-inputs // group)
    codes = random_codes(1, outputs, inputs, bits=bits, seed=1)
    minima = None if minimum == "none" else numbers_of(kind, 1, outputs, groups, 5)
    weight = CodedWeight(
        nibbles(codes) if bits == 4 else codes,
        TABLES[bits],
        numbers_of(kind, 1, outputs, groups, 2),
        minima,
        group,
        in_scales=minimum == "in scales",
    )
    biases = random(1, outputs, seed=4)
    products = products_of(codes, weight, biases)
    scales = weight.scales.widened().double()
    exact = parts = values_of(codes, bits).double() * widened(scales, group, inputs)
    parts = parts.abs()
    if minima is not None:
        least = minima.widened().double()
        least = widened(least * scales if weight.in_scales else least, group, inputs)
        exact, parts = exact + least, parts + least.abs()
    torch.testing.assert_close(weight.widened().double(), exact, rtol=1e-6, atol=1e-6 * float(parts.max()))
    x = random(200, inputs, seed=5, dtype=torch.bfloat16)
    together = products(x)
    expected = x.double() @ exact[0].T + biases.double()
    magnitude = x.double().abs() @ parts[0].T + biases.double().abs()
    sums = inputs * torch.finfo(torch.float32).eps * magnitude
    rounding = torch.finfo(torch.bfloat16).eps * expected.abs()
    assert ((together.double() - expected).abs() <= rounding + sums).all()
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for first, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (90, 98), (0, 97), (5, 200), (0, 200)):
            assert torch.equal(products(x[first:end]), together[first:end])


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(("experts", "choices", "rows"), [(4, 2, 3), (16, 4, 40), (8, 8, 230)])
def test_rows_are_multiplied_by_the_experts_that_were_chosen(
    bits: int, experts: int, choices: int, rows: int
) -> None:
    outputs, inputs, group = 70, 96, 32
    codes = random_codes(experts, outputs, inputs, bits=bits, seed=1)
    scales, minima = (numbers_of("uint8", experts, outputs, inputs // group, seed) for seed in (2, 5))
    weight = CodedWeight(nibbles(codes) if bits == 4 else codes, TABLES[bits], scales, minima, group)
    biases = random(experts, outputs, seed=4)
    x = random(rows, inputs, seed=5, dtype=torch.bfloat16)
    chosen = torch.randint(-1, experts + 1, (rows, choices), generator=torch.Generator().manual_seed(rows))
    products = products_of(codes, weight, biases)
    got = products(x, chosen.flatten()).view(rows, choices, outputs)
    for expert in range(-1, experts + 1):
        of_row, choice = torch.where(chosen == expert)
        of_expert = got[of_row, choice]
        if 0 <= expert < experts:
            own = weight.rebuilt(tensor[expert][None] for tensor in weight.tensors())
            alone = products_of(codes[expert][None], own, biases[expert][None])
            assert torch.equal(alone(x[of_row]), of_expert)
        else:
            assert not of_expert.any()


def test_values_that_bfloat16_does_not_have_are_rounded_to_it() -> None:
    values = torch.arange(16) + 0.001
    assert torch.equal(table_of(values), table_of(values.bfloat16().float()))
    assert not torch.equal(table_of(values), table_of(values + 0.1))
