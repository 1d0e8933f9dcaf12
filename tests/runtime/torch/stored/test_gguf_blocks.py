"""GGUF's blocks: the numbers that the `gguf` package unpacks, from blocks that it wrote and from any bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from rootstock.kernels.cpu.coded_products import has_coded_products
from rootstock.kernels.torch.coded_linear import looped
from rootstock.runtime.torch.stored.gguf_blocks import KEPT, weight_of_blocks

# Bytes of the float16 numbers of a block.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("shape", [(4, 256), (3, 5, 768)])
def test_any_bytes_are_the_numbers_that_the_package_unpacks(kind: str, shape: tuple[int, ...]) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[qtype]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        numbers = random.normal(size=blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    data = blocks.reshape(*shape[:-1], -1)
    expected = gguf.dequantize(data, qtype).reshape(shape)
    got = weight_of_blocks(kind, torch.from_numpy(data))
    assert got.problem() == ""
    assert got.shape == shape
    np.testing.assert_allclose(got.widened().numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_that_the_package_wrote_are_read(kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    weight = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    data = gguf.quantize(weight, qtype)
    got = weight_of_blocks(kind, torch.from_numpy(data))
    np.testing.assert_allclose(got.widened().numpy(), gguf.dequantize(data, qtype), rtol=1e-6, atol=1e-6)
    assert np.abs(got.widened().numpy() - weight).max() < 0.5


@pytest.mark.parametrize(("kind", "most"), [("Q4_0", 1.0), ("Q8_0", 1.0), ("Q4_K", 1.03)])
def test_codes_take_as_many_bytes_as_the_blocks(kind: str, most: float) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = torch.zeros(64, 1024 // size[0] * size[1], dtype=torch.uint8)
    assert weight_of_blocks(kind, data).nbytes <= most * data.nbytes


@pytest.mark.skipif(not has_coded_products(), reason="needs AVX512-BF16 and AVX512-VBMI")
@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 1.03), ("Q5_K", 1.21), ("Q6_K", 1.0)])
def test_codes_in_the_order_of_the_loops_take_as_many_bytes_as_the_blocks(kind: str, most: float) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = torch.zeros(64, 1024 // size[0] * size[1], dtype=torch.uint8)
    layers = looped(weight_of_blocks(kind, data), torch.bfloat16)
    assert layers is not None
    assert layers.nbytes <= most * data.nbytes
