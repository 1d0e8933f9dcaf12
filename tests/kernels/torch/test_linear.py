"""Linear layers packed for the device: exactness against float64, fused layers, odd sizes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from rootstock.kernels.cpu.packed_products import PackedLayers, over_onednn
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.torch.linear import (
    Blocked,
    Plain,
    Prepacked,
    has_matrix_units,
    packs_bfloat16,
    prepare,
    stacked,
)

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
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64, 97, 513])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(64, 96), (33, 17), (1000, 40), (640, 1280), (96, 2050), (2, 64), (1728, 640), (4100, 70)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_bfloat16_is_the_true_product_rounded_once(
    rows: int, inputs: int, outputs: int, with_bias: bool
) -> None:
    x = random(rows, inputs, seed=1, dtype=torch.bfloat16)
    weight = random(outputs, inputs, seed=2, dtype=torch.bfloat16)
    bias = random(outputs, seed=3, dtype=torch.bfloat16) if with_bias else None
    for linear in {prepare(weight, bias), Prepacked(weight, bias)}:
        assert_rounded_once(linear(x), x, weight, bias)


@needs_bfloat16_units
def test_own_loops_multiply_where_nothing_else_is_faster() -> None:
    loops = has_pair_products() and not has_matrix_units()
    for inputs in (64, 33):
        linear = prepare(random(20, inputs, seed=0, dtype=torch.bfloat16), None)
        assert isinstance(linear, Blocked if loops and inputs % 2 == 0 else Prepacked)


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
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(640, 1280), (1728, 640), (64, 1), (96, 2050), (32, 32_000), (4100, 70)]
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_rows_bits_depend_neither_on_other_rows_nor_on_threads(
    inputs: int, outputs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    bias = random(outputs, seed=2, dtype=torch.bfloat16)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    blocked = Blocked(weight, bias)
    x = random(200, inputs, seed=3, dtype=torch.bfloat16)
    together = blocked(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for first, end in ((0, 1), (1, 3), (3, 6), (6, 10), (90, 98), (0, 97), (5, 200)):
        assert torch.equal(blocked(x[first:end]), together[first:end])


@needs_pair_products
@pytest.mark.parametrize(("inputs", "outputs"), [(640, 1280), (1728, 640), (64, 1), (96, 2050)])
def test_onednns_packed_weight_is_read_in_place(inputs: int, outputs: int) -> None:
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    bias = random(outputs, seed=2, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1 if outputs < 1024 else 512)
    assert over_onednn(packed, weight, bias) is not None, "oneDNN packs such a weight in another order here"
    for rows in (1, 3):
        x = random(rows, inputs, seed=3, dtype=torch.bfloat16)
        assert torch.equal(Prepacked(weight, bias)(x), Blocked(weight, bias)(x))


@needs_pair_products
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (64, 100)])
def test_a_weight_in_an_unknown_order_is_left_to_onednn(inputs: int, outputs: int) -> None:
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    assert over_onednn(packed, weight, None) is not None
    for place in ((0, 0), (outputs - 1, inputs - 1), (outputs // 2, 3)):
        other = weight.clone()
        other[place] += 1
        assert over_onednn(packed, other, None) is None
    assert over_onednn(packed, weight[:64], None) is None
    odd = weight[:, 1:]
    assert over_onednn(torch.ops.mkldnn._reorder_linear_weight(odd, 1), odd, None) is None


@needs_pair_products
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (32, 7), (768, 640), (4100, 70)])
@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (4, 2), (16, 4), (60, 8)])
@pytest.mark.parametrize("rows", [1, 3, 40, 230])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_are_multiplied_by_the_experts_that_were_chosen(
    inputs: int,
    outputs: int,
    experts: int,
    choices: int,
    rows: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of no expert give zeros. One expert may be chosen by all rows, or by none."""
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weights = random(experts, outputs, inputs, seed=1, dtype=torch.bfloat16)
    biases = random(experts, outputs, seed=2, dtype=torch.bfloat16)
    x = random(rows, inputs, seed=3, dtype=torch.bfloat16)
    layers = PackedLayers(weights, biases)
    assert torch.equal(layers.unpacked(), weights)
    generator = torch.Generator().manual_seed(rows)
    mixed = torch.randint(-1, experts + 2, (rows, choices), generator=generator)
    crowded = torch.full((rows, choices), experts - 1)
    for chosen in (mixed, crowded):
        got = layers.multiply(x, chosen.flatten()).view(rows, choices, outputs)
        for expert in range(-1, experts + 2):
            of_row, choice = torch.where(chosen == expert)
            products = got[of_row, choice]
            if 0 <= expert < experts:
                assert_rounded_once(products, x[of_row], weights[expert], biases[expert])
                own = PackedLayers(weights[expert][None], biases[expert][None])
                assert torch.equal(own.multiply(x[of_row]), products)
            else:
                assert not products.any()


@needs_bfloat16_units
def test_packed_weights_are_a_copy_and_can_be_unpacked() -> None:
    for inputs in (33, 64):
        weight = random(40, inputs, seed=0, dtype=torch.bfloat16)
        before = weight.clone()
        linear = prepare(weight, None)
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
