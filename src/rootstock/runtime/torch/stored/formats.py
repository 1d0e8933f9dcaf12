"""Formats of quantized weights in safetensors: which tensors belong together, and the codes that they are.

A weight is a few tensors whose names begin alike, as the producer's own library writes them. Decoding rewrites them
exactly; only a minimum that is no multiple of its scale is rounded, to float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rootstock.kernels.torch.coded_weight import (
    CENTRED,
    INTEGERS,
    UNSIGNED,
    CodedWeight,
    Numbers,
    nibbles,
    signed_codes,
)

Parts = Mapping[str, Tensor]  # by the ends of their names

HALVES = torch.arange(128.0) + 0.5  # values of all 256 codes of a byte about their middle
# Of FP4 in two and a bit of mantissa, as OCP's microscaling formats define it.
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, slots=True)
class Decoded:
    """Codes of a weight, and whether the model has it as […, in, out]."""

    weight: CodedWeight
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Tensors of a weight: the ends of their names, and how they are decoded."""

    ends: tuple[str, ...]  # the first one marks a coded weight
    decode: Callable[[Parts, GroupSizes], Decoded]
    sizes: GroupSizes
    optional: tuple[str, ...] = ()
    name: str = ".weight"  # end of the weight's own name


class UndecodableWeight(Exception):
    """A weight's tensors do not fit together, or have numbers that the form does not hold. The message says which."""


# ---- codes


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """Unpacks int32 words […, n] to codes […, n · 32 / bits] uint8, the lowest bits first."""
    codes = torch.empty(*words.shape, 32 // bits, dtype=torch.uint8)
    for place in range(32 // bits):
        codes[..., place] = words >> place * bits & (1 << bits) - 1
    return codes.flatten(-2)


def unsigned(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, group: int) -> CodedWeight:
    """Returns weights scale · (code - zero) for codes […, in] of 0 to 2^bits - 1. zeros: […, groups] integers"""
    if bits == 4:
        minima = Numbers((8 - zeros.float()).half())
        return CodedWeight(nibbles(codes), CENTRED, Numbers(scales), minima, group, in_scales=True)
    minima = Numbers((127.5 - zeros.float()).half())
    return CodedWeight(about_the_middle(codes), HALVES, Numbers(scales), minima, group, in_scales=True)


def about_the_middle(codes: Tensor) -> Tensor:
    """Rewrites codes of 0 to 255 as sign and distance from 127.5."""
    return torch.where(codes >= 128, codes - 128, 255 - codes)


def signed(q: Tensor, scales: Tensor, group: int) -> CodedWeight:
    """Returns weights scale · q for q […, in] int8."""
    if bool((q == -128).any()):
        codes = about_the_middle(q.view(torch.uint8) ^ 128)
        minima = torch.full_like(scales, -0.5, dtype=torch.float16)
        return CodedWeight(codes, HALVES, Numbers(scales), Numbers(minima), group, in_scales=True)
    return CodedWeight(signed_codes(q), INTEGERS, Numbers(scales), None, group)


def floats(weight: Tensor, scales: Tensor, group: int) -> CodedWeight:
    """Returns weights scale · number for numbers of 8 bits […, in]: float8_e4m3fn or float8_e5m2."""
    codes = weight.view(torch.uint8)
    values = torch.arange(128, dtype=torch.uint8).view(weight.dtype).float()
    finite = values.isfinite()
    if not bool(finite[(codes & 127).int()].all()):
        raise UndecodableWeight("it holds numbers that are not finite")
    return CodedWeight(codes, values.where(finite, torch.zeros(())), Numbers(scales), None, group)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Sizes of groups that a configuration declares, of all its schemes."""

    groups: tuple[int, ...] = ()  # inputs
    blocks: tuple[tuple[int, int], ...] = ()  # outputs and inputs

    def group(self, inputs: int, groups: int) -> int:
        """Returns the inputs of a group where there are so many groups."""
        for size in self.groups:
            if size > 0 and -(-inputs // size) == groups:
                return size
        if groups == 0 or inputs % groups:
            raise UndecodableWeight(f"{inputs} inputs have {groups} scales")
        return inputs // groups

    def by_outputs(self, scales: Tensor, outputs: int, inputs: int) -> tuple[Tensor, int]:
        """Returns scales [out, groups] and the inputs of a group, from one for all, for each output, each group of
        inputs or each block of outputs and inputs."""
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
        if scales.dim() == 1:
            scales = scales[:, None]
        rows, groups = scales.shape
        if rows == outputs:
            return scales.contiguous(), self.group(inputs, groups)
        for of_outputs, of_inputs in self.blocks:
            if (-(-outputs // of_outputs), -(-inputs // of_inputs)) == (rows, groups):
                return scales.repeat_interleave(of_outputs, 0)[:outputs].contiguous(), of_inputs
        raise UndecodableWeight(
            f"{outputs} outputs of {inputs} inputs have scales of shape {list(scales.shape)}"
        )


def sizes_of(config: Mapping[str, Any]) -> GroupSizes:
    """Returns the sizes that the settings of a quantization declare."""
    schemes = config.get("config_groups")
    schemes = list(schemes.values()) if isinstance(schemes, dict) else []
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    given = [config, *(each for each in weights if isinstance(each, dict))]
    groups = [each.get("group_size") for each in given]
    blocks = [each.get(name) for each in given for name in ("block_structure", "weight_block_size")]
    return GroupSizes(
        tuple(size for size in groups if type(size) is int and size > 1),
        tuple(
            (block[0], block[1])
            for block in blocks
            if isinstance(block, (list, tuple))
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ),
    )


# ---- compressed-tensors


def _packed_integers(parts: Parts, sizes: GroupSizes) -> Decoded:
    words, scales = parts[".weight_packed"], parts[".weight_scale"]
    outputs, inputs = (int(n) for n in parts[".weight_shape"])
    bits = 32 // -(-inputs // words.shape[1]) if words.shape[1] else 0
    if bits not in (4, 8):
        raise UndecodableWeight(f"{bits} bits are not read")
    if len(words) != outputs:
        raise UndecodableWeight(f"{len(words)} rows of codes are not {outputs} outputs")
    codes = unpacked_words(words, bits)[:, :inputs]
    rows, group = sizes.by_outputs(scales, outputs, inputs)
    zeros = torch.full(rows.shape, 1 << bits - 1)
    if ".weight_zero_point" in parts:
        stored = parts[".weight_zero_point"]
        if stored.dtype == torch.int32:
            stored = unpacked_words(stored.T.contiguous(), bits).T[:outputs]
        else:
            stored = stored.int() + (1 << bits - 1)
        zeros = stored.reshape(rows.shape)
    elif bits == 8:
        return Decoded(signed((codes ^ 128).view(torch.int8), rows, group))
    weight = unsigned(codes, bits, rows, zeros, group)
    if ".weight_zero_point" not in parts:
        weight = CodedWeight(weight.codes, CENTRED, weight.scales, None, group)
    return Decoded(weight)


def _scaled(parts: Parts, sizes: GroupSizes) -> Decoded:
    weight = parts[".weight"]
    scales = parts[".weight_scale_inv"] if ".weight_scale_inv" in parts else parts[".weight_scale"]
    scales = scales.float() if scales.dtype == torch.float8_e8m0fnu else scales
    rows, group = sizes.by_outputs(scales, *weight.shape)
    if weight.dtype != torch.int8:
        return Decoded(floats(weight, rows, group))
    if ".weight_zero_point" in parts:
        zeros = parts[".weight_zero_point"].int().reshape(rows.shape) + 128
        return Decoded(unsigned(weight.view(torch.uint8) ^ 128, 8, rows, zeros, group))
    return Decoded(signed(weight, rows, group))


# ---- GPTQ, AWQ


def _gptq(config: Mapping[str, Any]) -> Callable[[Parts, GroupSizes], Decoded]:
    bits = int(config.get("bits", 4))
    shift = (
        0 if config.get("checkpoint_format") == "gptq_v2" else 1
    )  # the first version stored zeros less one

    def decode(parts: Parts, sizes: GroupSizes) -> Decoded:
        codes = unpacked_words(parts[".qweight"].T.contiguous(), bits)  # [out, in]
        scales = parts[".scales"].T.contiguous()
        zeros = unpacked_words(parts[".qzeros"], bits).T.int() + shift
        inputs = codes.shape[1]
        group = sizes.group(inputs, scales.shape[1])
        in_order = torch.arange(inputs) // group
        order: Tensor | None = None
        if ".g_idx" in parts and not torch.equal(places := parts[".g_idx"].long(), in_order):
            order = places.argsort(stable=True)  # act-order: groups of inputs that do not lie side by side
            if not torch.equal(places[order], in_order):
                raise UndecodableWeight("its groups do not have as many inputs each")
            codes = codes[:, order]
        return Decoded(replace(unsigned(codes, bits, scales, zeros, group), order=order))

    return decode


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places of a word's codes in the order of outputs


def _in_awq_order(codes: Tensor) -> Tensor:
    rows, outputs = codes.shape
    return codes.view(rows, -1, 8)[..., _AWQ_ORDER].reshape(rows, outputs)


def _awq(parts: Parts, sizes: GroupSizes) -> Decoded:
    codes, zeros = (_in_awq_order(unpacked_words(parts[end], 4)) for end in (".qweight", ".qzeros"))
    scales = parts[".scales"].T.contiguous()
    group = sizes.group(len(codes), scales.shape[1])
    return Decoded(unsigned(codes.T.contiguous(), 4, scales, zeros.T, group))


# ---- MXFP4, bitsandbytes


def _mxfp4(parts: Parts, sizes: GroupSizes) -> Decoded:
    blocks, exponents = parts["_blocks"], parts["_scales"]
    # A power of two of 8 bits is the exponent of a bfloat16, but for the least one, which is subnormal there.
    scales = torch.where(exponents == 0, 0x40, exponents.short() << 7).short().view(torch.bfloat16)
    return Decoded(CodedWeight(blocks.flatten(-2), FP4, Numbers(scales), None, 32), is_transposed=True)


def _bitsandbytes_8(parts: Parts, sizes: GroupSizes) -> Decoded:
    weight = parts[".weight"]
    scales = (parts[".SCB"].float() / 127)[:, None]
    return Decoded(signed(weight, scales, weight.shape[1]))


def _bitsandbytes_4(parts: Parts, sizes: GroupSizes) -> Decoded:
    """Decodes NF4 and FP4, whose scales may be codes themselves (Dettmers et al. 2023, arXiv 2305.14314)."""
    [state] = (part for end, part in parts.items() if ".quant_state." in end)
    try:
        described = json.loads(bytes(state.tolist()))
        outputs, inputs = (int(n) for n in described["shape"])
        group, middle = int(described["blocksize"]), float(described.get("nested_offset", 0.0))
        of_scales = int(described.get("nested_blocksize", 1))
    except (ValueError, KeyError, TypeError) as error:
        raise UndecodableWeight("its quantization state is not described") from error
    if group <= 0 or of_scales <= 0 or inputs % group:
        raise UndecodableWeight(f"{inputs} inputs are not in groups of {group}")
    scales = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        outer = parts[".weight.nested_absmax"].repeat_interleave(of_scales)[: len(scales)]
        scales = parts[".weight.nested_quant_map"][scales.int()] * outer + middle
    packed = parts[".weight"].flatten()
    codes = (packed >> 4 | packed << 4).view(outputs, inputs // 2)  # the first code is the high one
    values = parts[".weight.quant_map"].float()
    return Decoded(CodedWeight(codes, values, Numbers(scales.view(outputs, -1)), None, group))


# ---- MLX


def _mlx(bits: int, group: int, path: str = "") -> Callable[[Parts, GroupSizes], Decoded]:
    """Returns the decoder of weights scale · code + bias, whose codes are a stream of bits. `path` begins the names
    of the tensors."""

    def decode(parts: Parts, sizes: GroupSizes) -> Decoded:
        words, scales, biases = (parts[f"{path}.{name}"] for name in ("weight", "scales", "biases"))
        codes = _stream(words, bits)
        if codes.shape[-1] != scales.shape[-1] * group:
            raise UndecodableWeight(
                f"{codes.shape[-1]} inputs have {scales.shape[-1]} scales of groups of {group}"
            )
        if bits <= 4:
            return Decoded(CodedWeight(nibbles(codes), UNSIGNED, Numbers(scales), Numbers(biases), group))
        minima = biases.float() + 127.5 * scales.float()
        return Decoded(CodedWeight(about_the_middle(codes), HALVES, Numbers(scales), Numbers(minima), group))

    return decode


def _stream(words: Tensor, bits: int) -> Tensor:
    """Unpacks words […, n] of 32 bits to codes […, 32 n / bits] uint8, the lowest bits first. A code may be in two
    words; eight codes are as many bytes as a code has bits."""
    octets = torch.unflatten(words.contiguous().view(torch.uint8), -1, (-1, bits))
    codes = torch.empty(*octets.shape[:-1], 8, dtype=torch.uint8)
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        code = octets[..., first] >> shift
        if shift + bits > 8:
            code = code | octets[..., first + 1] << 8 - shift
        codes[..., place] = code & (1 << bits) - 1
    return codes.flatten(-2)


def _formats_of_mlx(config: Mapping[str, Any], sizes: GroupSizes) -> list[StoredFormat]:
    """Returns the formats of a repository of mlx-lm: of the weights that its configuration names, and of all others.
    None if one is not read."""
    named = {path: own for path, own in config.items() if isinstance(own, dict)}
    formats = []
    for path, own in (*named.items(), ("", config)):
        bits, group = own.get("bits", config.get("bits")), own.get("group_size", config.get("group_size"))
        is_affine = own.get("mode", config.get("mode", "affine")) == "affine"
        if not is_affine or bits not in (2, 3, 4, 5, 6, 8) or group not in (32, 64, 128):
            return []
        ends = tuple(f"{path}.{name}" for name in ("scales", "weight", "biases"))
        formats.append(StoredFormat(ends, _mlx(bits, group, path), sizes, name=f"{path}.weight"))
    return formats


_COMPRESSED = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Returns whether all schemes of compressed-tensors are read: no sparse weights, no other packing."""
    schemes = config.get("config_groups")
    schemes = list(schemes.values()) if isinstance(schemes, dict) else []
    formats = {scheme.get("format") for scheme in schemes if isinstance(scheme, dict)} - {None}
    return (formats or {config.get("format")}) <= _COMPRESSED and not config.get("sparsity_config")


def formats_of(method: str, config: Mapping[str, Any]) -> list[StoredFormat]:
    """Returns the formats of weights of a quantization method, by its name and settings in config.json; none for a
    method that is not read."""
    sizes = sizes_of(config)
    of_scales = (".weight_zero_point", ".input_scale", ".input_zero_point")
    scaled = [
        StoredFormat((end, ".weight"), _scaled, sizes, of_scales)
        for end in (".weight_scale_inv", ".weight_scale")
    ]
    match method:
        case "compressed-tensors" if _is_plain(config):
            ends = (".weight_packed", ".weight_scale", ".weight_shape")
            return [
                StoredFormat(ends, _packed_integers, sizes, (".weight_zero_point", ".weight_g_idx")),
                *scaled,
            ]
        case "fp8":
            return scaled
        case "gptq" if config.get("bits") in (4, 8):
            return [StoredFormat((".qweight", ".qzeros", ".scales"), _gptq(config), sizes, (".g_idx",))]
        case "awq" if config.get("bits") == 4 and str(config.get("version", "gemm")).lower() == "gemm":
            return [StoredFormat((".qweight", ".qzeros", ".scales"), _awq, sizes)]
        case "mxfp4":
            return [StoredFormat(("_blocks", "_scales"), _mxfp4, sizes, name="")]
        case "bitsandbytes" if config.get("load_in_4bit") is True:
            ends = (".weight.absmax", ".weight", ".weight.quant_map")
            states = (f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
            return [
                StoredFormat(
                    ends,
                    _bitsandbytes_4,
                    sizes,
                    (".weight.nested_absmax", ".weight.nested_quant_map", *states),
                )
            ]
        case "mlx":
            return _formats_of_mlx(config, sizes)
        case "bitsandbytes" if config.get("load_in_8bit") is True:
            return [StoredFormat((".SCB", ".weight"), _bitsandbytes_8, sizes, (".weight_format",))]
    return []
