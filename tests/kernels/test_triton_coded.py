"""Triton's products with coded weights are as exact as with unpacked ones, on a CUDA device or by the interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from rootstock.kernels.cuda import triton_coded
from rootstock.kernels.cuda.triton_coded import TritonCodedLayers, ValueRule, block_shape, splits_of
from rootstock.kernels.torch.coded_weight import (
    CENTRED,
    CENTRED_SIX,
    INTEGERS,
    NORMAL,
    UNSIGNED,
    CodedWeight,
    Numbers,
    nibbles,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = (1, 3, 16, 33, 130)
INPUTS, OUTPUTS = 160, 70  # no multiples of a block: groups of 64 and 128 have a shorter last one
WHOLE = INPUTS
FP8 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
FP8_WIDE = torch.arange(128, dtype=torch.uint8).view(torch.float8_e5m2).float()
FP8_WIDE = FP8_WIDE.where(FP8_WIDE.isfinite(), torch.zeros(()))
TABLES = {4: NORMAL, 6: CENTRED_SIX, 8: INTEGERS}
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)  # of scales and minima
OF_SHARED = 3


def numbers(kind: torch.dtype, shape: tuple[int, ...], random: torch.Generator) -> Numbers:
    if kind.is_floating_point:
        return Numbers((torch.randn(shape, generator=random) / 16).to(kind))
    least = 0 if kind == torch.uint8 else -127
    own = torch.randint(least, 128, shape, generator=random).to(kind)
    shared = torch.rand(*shape[:-1], -(-shape[-1] // OF_SHARED), generator=random) / 1024
    return Numbers(own, shared.half(), OF_SHARED)


def coded_weight(
    values: Tensor,
    group: int,
    kind: torch.dtype = torch.float32,
    minima: str = "none",
    shape: tuple[int, int, int] = (1, OUTPUTS, INPUTS),
) -> CodedWeight:
    random = torch.Generator().manual_seed(group + len(values))
    most = {16: 16, 64: 64}.get(len(values), 256)
    codes = torch.randint(0, most, shape, generator=random).to(torch.uint8)
    codes[(values[codes.int() % len(values)] == 0) & (codes % 128 > 0) & (most > 16)] = (
        1  # no infinities of FP8
    )
    groups = (*shape[:2], -(-shape[2] // group))
    return CodedWeight(
        nibbles(codes) if most == 16 else codes,
        values,
        numbers(kind, groups, random),
        None if minima == "none" else numbers(kind, groups, random),
        group,
        in_scales=minima == "in scales",
    )


def some_rows(rows: int, inputs: int = INPUTS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def layers_of(weight: CodedWeight, dtype: torch.dtype, biases: Tensor | None = None) -> TritonCodedLayers:
    return TritonCodedLayers(weight.to(DEVICE), dtype, None if biases is None else biases.to(DEVICE))


def multiplied(layers: TritonCodedLayers, x: Tensor, experts: Tensor | None = None) -> Tensor:
    return layers.multiply(x.to(DEVICE), None if experts is None else experts.to(DEVICE)).cpu()


def assert_as_exact_as_unpacked(
    got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | float = 0.0, sums_off: float = 1e-6
) -> None:
    """Asserts that each number is off by no more than the rounding of the weights [out, in] and of the result, and
    all together by no more than with unpacked weights."""
    half = torch.finfo(x.dtype).eps / 2
    exact = x.double() @ weight.double().T + bias
    size = x.double().abs() @ weight.double().abs().T
    assert got.shape == exact.shape
    assert got.dtype == x.dtype
    off = (got.double() - exact).abs()
    assert bool((off <= 1.01 * half * (size + exact.abs()) + sums_off * (size + 1)).all())
    unpacked = (x.double() @ weight.to(x.dtype).double().T + bias).to(x.dtype)
    allowed = 1.05 * (unpacked.double() - exact).norm() + sums_off * size.norm()
    assert off.norm() <= allowed


@pytest.mark.parametrize("minima", ["none", "own", "in scales"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, WHOLE])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_form_for_few_and_many_rows(bits: int, group: int, minima: str) -> None:
    for number, kind in enumerate(KINDS):
        weight = coded_weight(TABLES[bits], group, kind, minima)
        assert weight.problem() == ""
        exact = weight.widened()[0]
        layers = layers_of(weight, torch.bfloat16)
        first = number + group // 16  # every number of rows with every kind, in some of the tests
        for rows in (ROWS[first % 5], ROWS[(first + 2) % 5]):
            x = some_rows(rows)
            assert_as_exact_as_unpacked(multiplied(layers, x), x, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "values", [UNSIGNED, CENTRED, NORMAL, INTEGERS, INTEGERS + 0.5, FP8, FP8_WIDE, INTEGERS.sqrt()]
)
def test_values_on_a_line_in_tables_and_of_floats(values: Tensor, dtype: torch.dtype) -> None:
    weight = coded_weight(values, 32)
    if values is FP8_WIDE:
        weight = replace(weight, scales=Numbers(weight.scales.own / 4096))  # within float16
    for rows in (3, 40):
        x = some_rows(rows, dtype=dtype)
        assert_as_exact_as_unpacked(
            multiplied(layers_of(weight, dtype), x), x, weight.widened()[0], sums_off=1e-5
        )


def test_values_are_computed_where_they_follow_a_rule() -> None:
    assert [ValueRule.of(v).kind for v in (UNSIGNED, CENTRED, INTEGERS, INTEGERS + 0.5)] == [1] * 4
    assert [ValueRule.of(v).kind for v in (FP8, FP8_WIDE)] == [2] * 2
    assert [ValueRule.of(v).kind for v in (NORMAL, INTEGERS.sqrt(), FP8 * 2)] == [0] * 3


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(64, 128, 64), (1, 2, 2), (130, 66, 64), (5, 96, 48), (129, 130, 6), (64, 100, 100), (33, 256, 4)],
)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_shapes_of_any_size(bits: int, outputs: int, inputs: int, group: int) -> None:
    weight = coded_weight(TABLES[bits], group, torch.float16, "own", (1, outputs, inputs))
    for rows in (1, 17, 65, 129):
        x = some_rows(rows, inputs)
        assert_as_exact_as_unpacked(multiplied(layers_of(weight, torch.bfloat16), x), x, weight.widened()[0])


def test_codes_of_8_bits_may_have_an_odd_number_of_inputs() -> None:
    weight = coded_weight(INTEGERS, 7, shape=(1, 9, 21))
    x = some_rows(5, 21)
    assert_as_exact_as_unpacked(multiplied(layers_of(weight, torch.bfloat16), x), x, weight.widened()[0])


@pytest.mark.parametrize("processors", [2, 132])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_of_wide_layers_are_split(dtype: torch.dtype, processors: int) -> None:
    weight = coded_weight(NORMAL, 64, torch.bfloat16, shape=(1, 20, 4160))
    bias = torch.randn(20, generator=torch.Generator().manual_seed(0)).to(dtype)
    layers = layers_of(weight, dtype, bias[None])
    layers._processors = processors
    for rows in (1, 20):
        x = some_rows(rows, 4160, dtype)
        got = multiplied(layers, x)
        assert_as_exact_as_unpacked(got, x, weight.widened()[0], bias.double())
        assert torch.equal(got, multiplied(layers, x))


def test_the_number_of_splits_fills_the_device() -> None:
    assert [splits_of(programs, 4096, 132) for programs in (1, 16, 64, 100, 132, 264, 1000)] == [
        *(8, 8, 4, 2, 2, 1, 1)
    ]
    assert [splits_of(1, inputs, 132) for inputs in (128, 1000, 1024, 2048)] == [1, 1, 2, 4]


@pytest.mark.parametrize("rows", ROWS)
def test_biases_are_added_before_the_rounding(rows: int) -> None:
    weight = coded_weight(UNSIGNED, 32, torch.uint8, "own")
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = some_rows(rows)
    linear = layers_of(weight, torch.bfloat16).linear(bias.to(DEVICE))
    got = linear(x.to(DEVICE)[None]).cpu()[0]
    assert_as_exact_as_unpacked(got, x, weight.widened()[0], bias.double())


def test_a_linear_layer_reorders_inputs_and_returns_its_weight() -> None:
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))
    weight = replace(coded_weight(NORMAL, 32, shape=(1, OUTPUTS, INPUTS)), order=order)
    linear = layers_of(weight, torch.bfloat16).linear(None)
    x = some_rows(4)
    assert_as_exact_as_unpacked(linear(x.to(DEVICE)).cpu(), x, weight.widened()[0])
    assert torch.equal(linear.unpacked().cpu(), weight.widened()[0].bfloat16())
    assert (linear.out_features, linear.in_features) == (OUTPUTS, INPUTS)
    assert linear.nbytes == weight.nbytes + order.nbytes
    assert linear(x.to(DEVICE)[:0]).shape == (0, OUTPUTS)


def test_rows_may_lie_apart() -> None:
    weight = coded_weight(INTEGERS, 32)
    layers, wide = layers_of(weight, torch.bfloat16), some_rows(6, 2 * INPUTS).to(DEVICE)
    for x in (wide[::2, :INPUTS], wide[:, ::2]):
        assert_as_exact_as_unpacked(layers.multiply(x).cpu(), x.cpu(), weight.widened()[0])


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_each_row_is_multiplied_by_its_expert(bits: int, rows: int) -> None:
    experts = 5
    weight = coded_weight(TABLES[bits], 32, torch.int8, "own", (experts, OUTPUTS, INPUTS))
    biases = torch.randn(experts, OUTPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = layers_of(weight, torch.bfloat16, biases)
    chosen = torch.randint(0, experts, (rows,), generator=torch.Generator().manual_seed(rows))
    chosen[chosen == 3] = 1  # an expert without rows
    x, exact = some_rows(rows), weight.widened()
    got = multiplied(layers, x, chosen)
    for expert in range(experts):
        of_expert = chosen == expert
        if bool(of_expert.any()):
            assert_as_exact_as_unpacked(got[of_expert], x[of_expert], exact[expert], biases[expert].double())


def test_sorted_rows_are_multiplied_by_the_experts_in_their_order() -> None:
    weight = coded_weight(NORMAL, 32, shape=(3, OUTPUTS, INPUTS))
    x, exact, ends = some_rows(50), weight.widened(), [0, 33, 47]  # of 50: the last rows belong to none
    got = layers_of(weight, torch.bfloat16).multiply_sorted(x.to(DEVICE), torch.tensor(ends).to(DEVICE)).cpu()
    for expert, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if first < end:
            assert_as_exact_as_unpacked(got[first:end], x[first:end], exact[expert])


def test_layers_are_joined_and_returned_as_codes() -> None:
    one, other = (coded_weight(NORMAL, 32, shape=(1, outputs, INPUTS)) for outputs in (OUTPUTS, 30))
    joined = TritonCodedLayers.joined([layers_of(each, torch.bfloat16) for each in (one, other)])
    exact = torch.cat([one.widened()[0], other.widened()[0]])
    x = some_rows(3)
    assert_as_exact_as_unpacked(multiplied(joined, x), x, exact)
    assert torch.equal(joined.coded(0, 1).widened().cpu()[0], exact)


def test_products_are_those_of_unpacked_weights() -> None:
    weight = coded_weight(CENTRED, 128, torch.float16, shape=(1, 256, 512))
    x = some_rows(20, 512)
    layers = layers_of(weight, torch.bfloat16)
    expected = nn.functional.linear(x.float(), layers.unpacked().cpu()[0].float())
    assert float((multiplied(layers, x).float() - expected).norm() / expected.norm()) < 2**-8


def test_blocks_grow_with_the_rows() -> None:
    assert [block_shape(rows, 2).rows for rows in (1, 16, 17, 64, 65, 5000)] == [16, 16, 64, 64, 128, 128]
    assert {block_shape(rows, 4).rows for rows in (1, 5000)} == {16}


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_devices_that_are_not_here(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_triton.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, str(script), str(capability), "products"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert "compiled" in ran.stdout


def test_the_interpreter_runs_the_kernel_only_without_a_device() -> None:
    assert triton_coded.INTERPRETED is (DEVICE.type == "cpu")
