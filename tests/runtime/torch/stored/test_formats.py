"""Formats of quantized weights: the numbers that the producer's library unpacks, from the tensors that it wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rootstock.runtime.torch.stored.formats import Decoded, UndecodableWeight, formats_of
from stored_checkpoints import FORMATS, ranges

OUTPUTS, INPUTS = 96, 256


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(method: str, config: dict[str, Any], parts: dict[str, Tensor]) -> Decoded:
    """Decodes a weight by the format of the method whose tensors it has."""
    named = {f".{name}" if not name.startswith("_") else name: tensor for name, tensor in parts.items()}
    for format in formats_of(method, config):
        if all(end in named for end in format.ends):
            ends = [end for end in (*format.ends, *format.optional) if end in named]
            return format.decode({end: named[end] for end in ends}, format.sizes)
    raise AssertionError(f"no format of {method} has {list(named)}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("compressor", "fields"),
    [
        (PackedQuantizationCompressor, {"num_bits": 4, "strategy": "group", "group_size": 128}),
        (
            PackedQuantizationCompressor,
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        (PackedQuantizationCompressor, {"num_bits": 4, "strategy": "channel"}),
        (PackedQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        (
            PackedQuantizationCompressor,
            {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
        ),
        (IntQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        (IntQuantizationCompressor, {"num_bits": 8, "strategy": "tensor"}),
        (IntQuantizationCompressor, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        (FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        (FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        (
            FloatQuantizationCompressor,
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 128]},
        ),
    ],
)
def test_compressed_tensors_has_the_numbers_of_its_own_library(
    compressor: Any, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields))
    weight = random(OUTPUTS, INPUTS).to(dtype)
    scale, zero = calculate_qparams(*ranges(weight, scheme), scheme.weights)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    packed = compressor.compress(state, scheme)
    wide = {
        name: t.float() if t.is_floating_point() and name != "weight" else t for name, t in packed.items()
    }
    expected = compressor.decompress(wide, scheme)["weight"].float()
    config = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": fields}}}
    got = decoded("compressed-tensors", config, packed)
    assert not got.is_transposed
    torch.testing.assert_close(got.weight.widened(), expected, rtol=1e-6, atol=1e-7)
    assert (expected - weight.float()).abs().max() < 0.6 * weight.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("outputs", [64, 96])
def test_a_format_is_read_as_it_is_defined(format: str, outputs: int) -> None:
    config, quantize = FORMATS[format]
    parts, expected = quantize(random(outputs, 192).bfloat16())
    got = decoded(
        config["quant_method"], config, {end.removeprefix("."): part for end, part in parts.items()}
    )
    torch.testing.assert_close(got.weight.widened(), expected, rtol=1e-6, atol=1e-7)
    most = 1.15 if format == "FP8 blocks" else 1.1  # blocks of 32 inputs; usual ones have 128
    assert got.weight.nbytes <= most * sum(part.nbytes for end, part in parts.items() if end != ".g_idx")


def test_mxfp4_has_the_numbers_that_transformers_unpacks() -> None:
    experts, groups = 3, INPUTS // 32
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, OUTPUTS, groups, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 255, (experts, OUTPUTS, groups), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    got = decoded("mxfp4", {}, {"_blocks": blocks, "_scales": scales})
    assert got.is_transposed
    assert torch.equal(got.weight.widened().mT, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_finite_numbers_of_8_bits_are_read_and_others_refused(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes[codes.float().isfinite()][None]
    parts = {"weight": finite, "weight_scale": torch.ones(())}
    assert torch.equal(decoded("fp8", {}, parts).weight.widened(), finite.float())
    with pytest.raises(UndecodableWeight, match="not finite"):
        decoded("fp8", {}, {"weight": codes[None], "weight_scale": torch.ones(())})


def test_all_integers_of_8_bits_are_read() -> None:
    q = torch.arange(-128, 128).to(torch.int8)[None]
    for numbers in (q, q[:, 1:]):
        got = decoded(
            "compressed-tensors",
            {"format": "int-quantized"},
            {"weight": numbers, "weight_scale": torch.ones(1)},
        )
        assert torch.equal(got.weight.widened(), numbers.float())


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((3, 4), {}),  # three rows of scales are blocks only if the configuration says so
        ((3, 4), {"weight_block_size": [64, 64]}),
        ((96, 5), {}),
        ((96, 0), {}),
        ((2, 3, 4), {}),
    ],
)
def test_scales_of_other_shapes_are_refused(shape: tuple[int, ...], config: dict[str, Any]) -> None:
    weight = random(96, INPUTS).to(torch.float8_e4m3fn)
    with pytest.raises((UndecodableWeight, ValueError)):
        decoded("fp8", config, {"weight": weight, "weight_scale_inv": torch.ones(shape)})
