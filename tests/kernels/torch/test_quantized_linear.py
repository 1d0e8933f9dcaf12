"""Weights in 8 and 4 bits: their rounding errors, and agreement of all ways of multiplying."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock.kernels.torch.coded_linear import Rounding, coded
from rootstock.kernels.torch.coded_weight import NORMAL
from rootstock.kernels.torch.linear import Linear
from rootstock.kernels.torch.quantized_linear import (
    FEW_ROWS,
    DequantizeScratch,
    Int4,
    _packs_lanes,
    not_rounded,
    rounded,
)

DTYPES = [torch.float32, torch.bfloat16]
needs_packed_lanes = pytest.mark.skipif(
    not _packs_lanes(), reason="torch packs 4 bits in a different order on this processor: they are refused"
)
ROUNDINGS = ["int8", pytest.param("int4", marks=needs_packed_lanes)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(linear: Linear, dtype: torch.dtype) -> Tensor:
    """Returns the weights [out, in] in float32 that many rows are multiplied with, by multiplying unit vectors."""
    rows = torch.eye(linear.in_features, dtype=dtype)
    return linear(torch.cat([rows, rows])[: max(FEW_ROWS + 1, linear.in_features)])[
        : linear.in_features
    ].T.float()


def relative(difference: Tensor, size: Tensor) -> float:
    return float(difference.double().square().mean().sqrt() / size.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rounding", "inputs", "most"),
    [
        ("int8", 256, 0.01),
        pytest.param("int4", 256, 0.09, marks=needs_packed_lanes),
        pytest.param("int4", 96, 0.08, marks=needs_packed_lanes),
    ],
)
def test_normally_distributed_weights_lose_as_little_as_their_bits_allow(
    rounding: Rounding, inputs: int, most: float, dtype: torch.dtype
) -> None:
    weight = random(128, inputs, dtype=dtype)
    kept = weights_of(rounded(weight, None, rounding, DequantizeScratch()), dtype)
    assert relative(kept - weight.float(), weight.float()) <= most


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = random(64, 128, dtype=dtype)
    kept = weights_of(rounded(weight, None, "int8", DequantizeScratch()), dtype)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    # A scale in bfloat16 is off by up to 1/256, and the product with it as well.
    slack = 1e-5 if dtype == torch.float32 else 1.5
    assert ((kept - weight.float()).abs() <= step * (0.5 + slack)).all()


@needs_packed_lanes
def test_4_bits_represent_sixteen_even_values() -> None:
    weight = (torch.arange(64) % 16 - 8.0).expand(64, 64) / 4
    kept = weights_of(rounded(weight, None, "int4", DequantizeScratch()), torch.float32)
    torch.testing.assert_close(kept, weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_codes_of_4_bits_represent_the_values_of_their_table(sign: float) -> None:
    weight = (NORMAL * sign / 4).bfloat16().repeat(64, 4)
    assert torch.equal(coded(weight[None], "int4").widened()[0], weight.float())


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.0])
def test_constant_weights_are_exact(rounding: Rounding, constant: float) -> None:
    weight = torch.full((64, 64), constant)
    kept = weights_of(rounded(weight, None, rounding, DequantizeScratch()), torch.float32)
    torch.testing.assert_close(kept, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (96, 100), (640, 333)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_and_many_rows_and_any_shape_of_them_give_the_same_product(
    rounding: Rounding, inputs: int, outputs: int, with_bias: bool, dtype: torch.dtype
) -> None:
    weight, x = (
        random(outputs, inputs, seed=1, dtype=dtype),
        random(2 * FEW_ROWS, inputs, seed=2, dtype=dtype),
    )
    bias = random(outputs, seed=3, dtype=dtype) if with_bias else None
    linear = rounded(weight, bias, rounding, DequantizeScratch())
    kept = weights_of(rounded(weight, None, rounding, DequantizeScratch()), dtype).double()
    expected = x.double() @ kept.T + (0 if bias is None else bias.double())
    eps = torch.finfo(dtype).eps
    for first, end in ((0, 1), (1, 4), (0, FEW_ROWS), (0, FEW_ROWS + 1), (0, 2 * FEW_ROWS)):
        product = linear(x[first:end])
        assert product.dtype == dtype
        assert product.is_contiguous()
        assert relative(product.double() - expected[first:end], expected) <= 8 * eps
    assert torch.equal(linear(x[:8].view(2, 4, inputs)), linear(x[:8]).view(2, 4, outputs))
    assert linear(x[0]).shape == (outputs,)
    assert linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_weights_larger_than_a_tile_are_widened_tile_by_tile(
    rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random(300, 64), random(FEW_ROWS + 1, 64, seed=1)
    whole = rounded(weight, None, rounding, DequantizeScratch())(x)
    monkeypatch.setattr("rootstock.kernels.torch.quantized_linear._TILE", 64 * 100)
    tiled = rounded(weight, None, rounding, DequantizeScratch())
    torch.testing.assert_close(tiled(x), whole)
    assert tiled._scratch._memory.nbytes <= 64 * 128 * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounding", "share"), [("int8", 0.26), pytest.param("int4", 0.16, marks=needs_packed_lanes)]
)
def test_quantized_weights_take_less_memory_and_keep_nothing_of_the_original(
    rounding: Rounding, share: float
) -> None:
    weight, x = random(256, 256), random(3, 256)
    linear = rounded(weight, None, rounding, DequantizeScratch())
    before = linear(x)
    assert linear.nbytes <= share * weight.nbytes
    weight.fill_(torch.nan)
    assert torch.equal(linear(x), before)


@needs_packed_lanes
def test_groups_are_as_long_as_divides_the_inputs() -> None:
    assert Int4(random(64, 640), None, DequantizeScratch())._group == 64
    assert Int4(random(64, 96), None, DequantizeScratch())._group == 32


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 64), torch.float32, ""),
        ((64, 1000), torch.float32, "the number of its inputs, 1000, is not a multiple of 32"),
        ((8, 64), torch.bfloat16, "it has 8 outputs, and fewer than 64 are not quantized"),
        ((64, 64), torch.float16, "float16 on cpu is not quantized"),
    ],
)
def test_the_reason_why_weights_are_not_quantized(
    shape: tuple[int, int], dtype: torch.dtype, reason: str, rounding: Rounding
) -> None:
    assert not_rounded(torch.zeros(shape, dtype=dtype), rounding) == reason


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_the_same_for_any_number_of_threads(rounding: Rounding, dtype: torch.dtype) -> None:
    weight = random(333, 640, dtype=dtype)
    before = torch.get_num_threads()
    kept = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kept.append(weights_of(rounded(weight, None, rounding, DequantizeScratch()), dtype))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


@pytest.mark.skipif(_packs_lanes(), reason="torch packs 4 bits as they are read here")
def test_4_bits_are_refused_where_torch_packs_them_in_a_different_order() -> None:
    assert "different order on this processor" in not_rounded(torch.zeros(64, 64), "int4")
