"""Checkpoints of small models with quantized weights, as producers store them, and the unquantized twins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import save

Parts = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Parts, Tensor]]
"""Quantizes a weight [out, in] of bfloat16: its tensors by the ends of their names, and the numbers in float32."""

_OF_LAYERS = re.compile(r"(_proj|gate_up|in_proj\w*|fc\d|w[123]|query_key_value|dense\w*)\.weight$")
_OF_EXPERTS = re.compile(r"\.experts\.(\d+)\.|\.experts\.")


def compressed(compressor: Any, **fields: Any) -> Quantize:
    """Returns a quantizer by a compressor of compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields))

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        scale, zero = calculate_qparams(*ranges(weight, scheme), scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        wide = {
            name: part.float() if part.is_floating_point() and name != "weight" else part
            for name, part in packed.items()
        }
        expected = compressor.decompress(wide, scheme)["weight"].float()
        return {f".{name}": part for name, part in packed.items()}, expected

    return quantize


def ranges(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest weight that share a scale."""
    args = scheme.weights
    assert args is not None
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, 1, -1)
        case "channel":
            parts = weight[:, None]
        case "group":
            parts = weight.unflatten(1, (-1, args.group_size))
        case _:
            rows, columns = args.block_structure
            parts = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).permute(0, 2, 1, 3).flatten(2)
    return parts.amin(-1), parts.amax(-1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes […, n] to int32, the first in the lowest bits."""
    steps = torch.arange(0, 32, bits)
    return (codes.long().unflatten(-1, (-1, 32 // bits)) << steps).sum(-1).to(torch.int32)


def _affine(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight to codes [out, in] with scales [out, groups] float16 and zero points from 0 on."""
    parts = weight.float().unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    most = (1 << bits) - 1
    scales = ((high - low) / most).half().clamp(min=1e-4)
    zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scales, zeros.int()


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    parts = codes.unflatten(1, (-1, group)) - zeros[..., None]
    return (parts.float() * scales.float()[..., None]).flatten(1)


def gptq(bits: int, group: int, version: int, *, in_order: bool = True) -> Quantize:
    """Returns a quantizer to GPTQ's tensors. Version 1 stores zero points less one. If not `in_order`, groups are of
    inputs here and there, in another order for each number of outputs."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        order = torch.arange(inputs)
        if not in_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(outputs))
        back = order.argsort()
        codes, scales, zeros = _affine(weight[:, order], bits, group)
        numbers = _numbers(codes, scales, zeros, group)[:, back]
        codes = codes[:, back]
        stored = zeros - (1 if version == 1 else 0)
        parts = {
            ".qweight": _words(codes, bits).T.contiguous(),
            ".qzeros": _words(stored.T.contiguous(), bits),
            ".scales": scales.T.contiguous(),
            ".g_idx": (back // group).int(),
        }
        return parts, numbers

    return quantize


def awq(group: int) -> Quantize:
    """Returns a quantizer to AWQ's tensors (gemm), whose words have eight outputs in an order of their own."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(codes: Tensor) -> Tensor:
        return _words(codes.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, scales, zeros = _affine(weight, 4, group)
        parts = {".qweight": words(codes), ".qzeros": words(zeros), ".scales": scales.T.contiguous()}
        return parts, _numbers(codes, scales, zeros, group)

    return quantize


def fp8_blocks(rows: int, columns: int) -> Quantize:
    """Returns a quantizer to FP8 with a scale for each block, as DeepSeek's checkpoints have it."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -inputs % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        wide = (codes.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)[:outputs, :inputs]
        stored = codes.flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
        return {".weight": stored, ".weight_scale_inv": scales}, wide

    return quantize


def bitsandbytes_8(weight: Tensor) -> tuple[Parts, Tensor]:
    """Quantizes as LLM.int8() does: a scale for each output."""
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    return {".weight": codes, ".SCB": largest}, codes.float() * (largest[:, None] / 127)


# Of NF4 (Dettmers et al. 2023, arXiv 2305.14314), as bitsandbytes has them.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)


def bitsandbytes_4(group: int, *, nested: bool) -> Quantize:
    """Returns a quantizer to NF4. If `nested`, scales are codes of 8 bits about their mean."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        groups = weight.float().reshape(-1, group)
        scales = groups.abs().amax(1)
        codes = (groups[..., None] / scales[:, None, None] - NF4).abs().argmin(-1).to(torch.uint8).flatten()
        described = {
            "quant_type": "nf4",
            "blocksize": group,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        parts = {".weight": (codes[::2] << 4 | codes[1::2])[:, None], ".weight.quant_map": NF4.clone()}
        if nested:
            table, middle, of_scales = torch.linspace(-1, 1, 256), float(scales.mean()), 256
            padded = torch.nn.functional.pad(scales - middle, (0, -len(scales) % of_scales)).view(
                -1, of_scales
            )
            outer = padded.abs().amax(1)
            own = (padded[..., None] / outer[:, None, None] - table).abs().argmin(-1).flatten()[: len(scales)]
            scales = table[own] * outer.repeat_interleave(of_scales)[: len(scales)] + middle
            parts |= {".weight.absmax": own.to(torch.uint8), ".weight.nested_absmax": outer}
            parts |= {".weight.nested_quant_map": table.clone()}
            described |= {"nested_blocksize": of_scales, "nested_dtype": "float32", "nested_offset": middle}
        else:
            parts[".weight.absmax"] = scales
        state = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
        parts[".weight.quant_state.bitsandbytes__nf4"] = state
        numbers = NF4[codes.long()].view(-1, group) * scales[:, None]
        return parts, numbers.view(weight.shape)

    return quantize


_GROUPS_OF_32 = {"group_0": {"targets": ["Linear"], "weights": {"strategy": "group", "group_size": 32}}}

FORMATS: Mapping[str, tuple[dict[str, Any], Quantize]] = {
    "W4A16": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS_OF_32},
        compressed(PackedQuantizationCompressor, num_bits=4, strategy="group", group_size=32),
    ),
    "W4A16 asymmetric": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS_OF_32},
        compressed(
            PackedQuantizationCompressor, num_bits=4, strategy="group", group_size=32, symmetric=False
        ),
    ),
    "W8A16": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        compressed(PackedQuantizationCompressor, num_bits=8, strategy="channel"),
    ),
    "W8A8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        compressed(IntQuantizationCompressor, num_bits=8, strategy="channel"),
    ),
    "FP8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        compressed(FloatQuantizationCompressor, num_bits=8, type="float", strategy="channel"),
    ),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8_blocks(32, 32)),
    "GPTQ 4": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32, 1)),
    "GPTQ 8": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, gptq(8, 32, 1)),
    "GPTQ 4 v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, 2),
    ),
    "GPTQ act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        gptq(4, 32, 1, in_order=False),
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_8),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes_4(64, nested=False)),
    "NF4 nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes_4(32, nested=True)),
}


def mxfp4(weights: Tensor) -> tuple[Parts, Tensor]:
    """Quantizes experts of gpt-oss [experts, in, out] as its checkpoints have them. The numbers are in that order."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weights.float().mT.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=1e-6) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    places = (scaled.abs()[..., None] - values).abs().argmin(-1)
    codes = (places + 8 * (scaled < 0)).to(torch.uint8)
    numbers = (values[places] * scaled.sign() * exponents.exp2()[..., None]).flatten(-2).mT
    parts = {"_blocks": codes[..., ::2] | codes[..., 1::2] << 4, "_scales": (exponents + 127).to(torch.uint8)}
    return parts, numbers.contiguous()


def save_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Saves a small gpt-oss whose experts are MXFP4, like `save_quantized`."""
    is_quantized = re.compile(r"experts\.(gate_up|down)_proj$").search
    return _save_both(
        directory, "gpt_oss", {"quant_method": "mxfp4"}, lambda name, _: is_quantized(name), mxfp4
    )


def save_quantized(directory: Path, model_type: str, format: str, **overrides: Any) -> tuple[Path, Path]:
    """Saves a model with quantized weights, and the same numbers unquantized in float32. Returns both directories."""

    def is_quantized(name: str, tensor: Tensor) -> bool:
        fits = tensor.dim() == 2 and tensor.shape[1] % 32 == 0 and len(tensor) % 8 == 0
        return fits and _OF_LAYERS.search(name) is not None

    declared, quantize = FORMATS[format]
    return _save_both(directory, model_type, declared, is_quantized, quantize, **overrides)


def quantize_in_place(directory: Path, declared: Mapping[str, Any], quantize: Quantize) -> Path:
    """Quantizes the linear layers of a saved model of bfloat16, and returns its directory."""
    tensors = load_file(directory / "model.safetensors")
    quantized: Parts = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and _OF_LAYERS.search(name):
            parts, _ = quantize(tensor)
            quantized |= {
                name.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()
            }
        else:
            quantized[name] = tensor
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": dict(declared)}))
    return directory


def w4a16(group: int) -> tuple[dict[str, Any], Quantize]:
    """Returns the settings and the quantizer of 4 bits in groups of so many inputs."""
    weights = {"strategy": "group", "group_size": group, "num_bits": 4, "type": "int", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    declared = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    declared |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    return declared, compressed(PackedQuantizationCompressor, num_bits=4, strategy="group", group_size=group)


def _save_both(
    directory: Path,
    model_type: str,
    declared: Mapping[str, Any],
    is_quantized: Callable[[str, Tensor], object],
    quantize: Quantize,
    **overrides: Any,
) -> tuple[Path, Path]:
    stored, plain = directory / "stored", directory / "plain"
    for each in (stored, plain):
        save(each, model_type, **overrides)
    tensors = load_file(plain / "model.safetensors")
    quantized: Parts = {}
    for name, tensor in tensors.items():
        rounded = tensor.bfloat16() if tensor.is_floating_point() else tensor
        if is_quantized(name, tensor):
            parts, tensors[name] = quantize(rounded)
            prefix = name.removesuffix(".weight")
            quantized |= {prefix + end: part.contiguous() for end, part in parts.items()}
        else:
            quantized[name] = rounded
            tensors[name] = rounded.float() if rounded.is_floating_point() else rounded
    assert len(quantized) > len(tensors)
    save_file(quantized, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = stored / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": declared}))
    return stored, plain
