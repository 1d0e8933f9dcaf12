"""Checks that a model's weights fit into the free memory. They need only the files' headers and the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rootstock.errors import ModelTooLarge
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.gguf_files import GgufTensor
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.runtime.memory_fit import (
    Demands,
    WeightBytes,
    refuse_adapter_beyond,
    refuse_beyond,
    refuse_beyond_limit,
)
from rootstock.runtime.model_files import StoredTensor
from rootstock.runtime.torch.packed_experts import are_experts
from rootstock.runtime.torch.stored.gguf_blocks import RESIDENT_BITS
from rootstock.units import in_units

# safetensors' names of the dtypes that loading converts to the model's.
_CONVERTED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ELEMENT_BITS: dict[str, float] = {
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_ELEMENT_BITS |= RESIDENT_BITS | {
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
    "U64": 64,
}
_ROUNDED_BITS = {"int8": 8, "int4": 4}  # without scales: the lower bound of a weight's size


def weight_bytes(
    stored: Sequence[StoredTensor] | Sequence[GgufTensor],
    empty: nn.Module,
    dtype: torch.dtype,
    quantize: str,
    keeps_codes: bool = True,
) -> WeightBytes:
    """Estimates the weights' bytes from the files' headers and from the meta device's modules. Returns the smaller,
    or the latter for a device that does not keep quantized weights as they are stored.

    A checkpoint may hold tensors that the architecture does not use (vision towers, MTP heads). A checkpoint with
    quantized weights has fewer bytes than the architecture, which does not know about the quantization.
    """
    kept = converted = 0
    for tensor in stored:
        own = _CONVERTED.get(tensor.dtype)
        if own is None:
            kept += int(tensor.elements * _ELEMENT_BITS.get(tensor.dtype, 8 * dtype.itemsize)) // 8
        elif own == dtype:
            kept += tensor.elements * dtype.itemsize
        else:
            converted += tensor.elements * dtype.itemsize
    parameters = sum(parameter.numel() for parameter in empty.parameters()) * dtype.itemsize
    resident = min(kept + converted, parameters) if keeps_codes else parameters
    converted = min(converted, resident)
    if quantize in _ROUNDED_BITS:
        weights = {id(weight): weight.numel() for m in empty.modules() for weight in _quantized(m)}
        saved_bits = 8 * dtype.itemsize - _ROUNDED_BITS[quantize]
        resident = max(0, resident - sum(weights.values()) * saved_bits // 8)
    return WeightBytes(resident, converted)


def _quantized(module: nn.Module) -> Iterator[Tensor]:
    """Yields the weights of a module that `--quantize` may round: of a linear layer, or of a mixture's experts."""
    if isinstance(module, nn.Linear):
        yield module.weight
    elif are_experts(module):
        yield from (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3)


def refuse_too_large(
    model: str, weights: WeightBytes, dtype: str, quantize: str, device: torch.device, demands: Demands
) -> None:
    """Raises ModelTooLarge if the weights do not fit in the free memory, InvalidOption if weights and budgets
    together do not."""
    words = dtype if quantize == "none" else f"{dtype} with {quantize} weights"
    resident, converted = weights.resident + weights.adapters, weights.converted
    if weights.adapters:
        words = f"{words}, with {in_units(weights.adapters)} of LoRA adapters"
    free_host = free_host_bytes()
    if device.type != "cuda":
        if converted > free_host:  # all weights are loaded before the first is quantized
            raise ModelTooLarge(model, converted, dtype, free_host, "main memory")
        refuse_beyond(model, resident, words, "--kv-budget", demands.pool_bytes, free_host, "main memory")
        refuse_beyond_limit(model, resident, words, demands)
        return
    free_device = torch.cuda.mem_get_info(device)[0]
    refuse_beyond(
        model, resident, words, "--kv-budget", demands.pool_bytes, free_device, f"memory of {device}"
    )
    refuse_beyond(model, converted, dtype, "--host-budget", demands.host_bytes, free_host, "main memory")


def refuse_large_adapter(source: AdapterSource, dtype: torch.dtype, device: torch.device) -> None:
    """Raises AdapterUnusable if an adapter's weights do not fit in the memory that is free beside the model's."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, memory = torch.cuda.mem_get_info(device)[0] + reserved, f"memory of {device}"
    else:
        free, memory = free_host_bytes(), "main memory"
    refuse_adapter_beyond(source, dtype.itemsize, free, memory)
