"""Linear layers packed for the device: exactness against float64, fused layers, odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock.kernels.cpu.packed_products import FEW_ROWS, for_few_rows
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.torch.linear import Plain, Prepacked, packs_bfloat16, prepare, stacked

CPU = torch.device("cpu")
needs_bfloat16_units = pytest.mark.skipif(
    not packs_bfloat16(CPU), reason="this processor has no bfloat16 units, so nothing is packed"
)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def assert_rounded_once(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Asserts one rounding of the true result. Sums in float32 may lose `in_features` roundings on the way."""
    expected = exact(x, weight, bias)
    magnitude = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    sums = weight.shape[1] * torch.finfo(torch.float32).eps * magnitude
    rounding = torch.finfo(got.dtype).eps * expected.abs()
    assert ((got.double() - expected).abs() <= rounding + sums).all()


@needs_bfloat16_units
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64, 513])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 96), (33, 17), (1000, 40), (640, 1280), (96, 2050), (2, 64), (1728, 640)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_bfloat16_is_the_true_product_rounded_once(
    rows: int, inputs: int, outputs: int, with_bias: bool
) -> None:
    x = random(rows, inputs, seed=1, dtype=torch.bfloat16)
    weight = random(outputs, inputs, seed=2, dtype=torch.bfloat16)
    bias = random(outputs, seed=3, dtype=torch.bfloat16) if with_bias else None
    linear = prepare(weight, bias)
    assert isinstance(linear, Prepacked)
    assert_rounded_once(linear(x), x, weight, bias)


@needs_bfloat16_units
def test_packed_weights_take_any_leading_axes_and_strides_and_no_rows_at_all() -> None:
    weight = random(20, 64, seed=0, dtype=torch.bfloat16)
    linear = prepare(weight, None)
    x = random(2, 6, 64, seed=1, dtype=torch.bfloat16)
    for given in (x, x[:, ::2], x[0, 0], x[:, :0], x.transpose(0, 1)):
        assert torch.equal(linear(given), torch.nn.functional.linear(given, weight))


needs_pair_products = pytest.mark.skipif(
    not (packs_bfloat16(CPU) and has_pair_products()),
    reason="needs products of bfloat16 pairs (AVX512-BF16)",
)


@needs_pair_products
@pytest.mark.parametrize(("inputs", "outputs"), [(640, 1280), (1728, 640), (64, 1), (96, 2050), (32, 32_000)])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_rows_read_the_packed_weight_where_it_is(
    inputs: int, outputs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's bits depend neither on other rows nor on threads; the memory behind the result is not written."""
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    bias = random(outputs, seed=2, dtype=torch.bfloat16)
    linear = Prepacked(weight, bias)
    assert linear.few_rows is not None, "oneDNN packs such a weight in another order here"
    x = random(FEW_ROWS, inputs, seed=3, dtype=torch.bfloat16)
    together = linear.few_rows(x)
    assert_rounded_once(together, x, weight, bias)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for count in range(1, FEW_ROWS + 1):
        for first in range(FEW_ROWS - count + 1):
            assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@needs_pair_products
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (64, 100)])
def test_a_weight_in_an_unknown_order_is_left_to_onednn(inputs: int, outputs: int) -> None:
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    assert for_few_rows(packed, weight, None) is not None
    for place in ((0, 0), (outputs - 1, inputs - 1), (outputs // 2, 3)):
        other = weight.clone()
        other[place] += 1
        assert for_few_rows(packed, other, None) is None
    assert for_few_rows(packed, weight[:64], None) is None
    assert (
        for_few_rows(torch.ops.mkldnn._reorder_linear_weight(weight[:, 1:], 1), weight[:, 1:], None) is None
    )


@needs_bfloat16_units
def test_packed_weights_are_a_copy_and_can_be_unpacked() -> None:
    weight = random(40, 33, seed=0, dtype=torch.bfloat16)
    before = weight.clone()
    linear = Prepacked(weight, None)
    weight.fill_(torch.nan)
    assert torch.equal(linear.unpacked(), before)
    assert linear.nbytes == before.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    weight, bias = random(24, 50, seed=0, dtype=dtype), random(24, seed=1, dtype=dtype)
    linear = prepare(weight, bias)
    assert isinstance(linear, Plain)
    assert linear.weight is weight
    assert linear.nbytes == weight.nbytes + bias.nbytes
    x = random(5, 50, seed=2, dtype=dtype)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight, bias))


def test_stacked_layers_give_each_layers_slice() -> None:
    weights = [random(n, 16, seed=n, dtype=torch.float32) for n in (8, 3, 5)]
    biases = [None, random(3, seed=1, dtype=torch.float32), None]
    weight, bias = stacked(weights, biases)
    assert bias is not None
    x = random(4, 16, seed=9, dtype=torch.float32)
    parts = prepare(weight, bias)(x).split([8, 3, 5], -1)
    for part, w, b in zip(parts, weights, biases, strict=True):
        torch.testing.assert_close(part, torch.nn.functional.linear(x, w, b))
    assert stacked(weights, [None] * 3)[1] is None
    assert stacked(weights[:1], [None])[0] is weights[0]
