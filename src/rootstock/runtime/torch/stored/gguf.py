"""Weights of GGUF files by the names of transformers' parameters, read when they are asked for, as codes if possible.

transformers knows the names and the order of rows of each architecture. Its newer ones have conversions of tensors,
which coded tensors go through; its older ones a processor of arrays, which is given the numbers of rows here, so that
what it does with rows is done with codes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from rootstock.kernels.torch.coded_weight import CodedWeight
from rootstock.runtime.gguf_files import GgufTensor
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor
from rootstock.runtime.torch.stored.formats import UndecodableWeight
from rootstock.runtime.torch.stored.gguf_blocks import KEPT, weight_of_blocks

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
UNPACKED = set(GGML_NAME.values()) - set(KEPT)  # types that take more memory here than in the file
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_OF_OTHER_MEDIA = ("v.", "a.", "mm.")  # towers and projectors that some files hold beside the text model
_AT_ONCE = 1 << 21  # bytes of blocks

Change = Callable[[list[Tensor]], Tensor]


class GgufWeight:
    """Parameter in GGUF files. Indexing with `...` reads it, as of a slice of safetensors."""

    def __init__(self, sources: Sequence[GgufTensor], change: Change, dtype: torch.dtype) -> None:
        self._sources, self._change, self._dtype = sources, change, dtype

    def __getitem__(self, index: Any) -> Tensor:
        assert index is ..., "weights are read whole"
        return self._change([read_tensor(source, self._dtype) for source in self._sources])


def read_tensor(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Reads a tensor: coded if codes can have its type, and otherwise in floats, of `dtype` if it was quantized."""
    if tensor.offset + tensor.nbytes > Path(tensor.file).stat().st_size:
        raise UndecodableWeight(f"{tensor.name}: its file has become shorter")
    # The map is private, so that torch may take it for memory of its own. Nothing writes there.
    mapped = np.memmap(tensor.file, np.uint8, "c", tensor.offset, (tensor.nbytes,))
    data = torch.from_numpy(mapped)
    if (own := _FLOATS.get(tensor.dtype)) is not None:
        return data.clone().view(own).view(tensor.shape)
    rows = data.view(-1, tensor.nbytes * tensor.shape[-1] // tensor.elements)
    if tensor.dtype in KEPT and len(tensor.shape) > 1:
        weight = _decoded(tensor.dtype, rows)
        weight = weight.rebuilt(each.view(*tensor.shape[:-1], -1) for each in weight.tensors())
        if problem := weight.problem():
            raise UndecodableWeight(f"{tensor.name}: {problem}")
        return CodedTensor(weight, dtype)
    types = {name: kind for kind, name in GGML_NAME.items()}
    if tensor.dtype not in types:
        raise UndecodableWeight(f"{tensor.name}: the type {tensor.dtype} is not read")
    parts = (dequantize(part, types[tensor.dtype], torch.float32).to(dtype) for part in _split(rows))
    return torch.cat(list(parts)).view(tensor.shape)


def _split(rows: Tensor) -> Sequence[Tensor]:
    """Splits rows of blocks into parts that are decoded at once, because that takes several bytes a number."""
    return torch.split(rows, max(1, _AT_ONCE // rows.shape[1]))


def _decoded(kind: str, rows: Tensor) -> CodedWeight:
    """Decodes rows [out, bytes], a part at a time into memory of the whole."""
    parts = _split(rows)
    first = weight_of_blocks(kind, parts[0])
    whole = [torch.empty(len(rows), each.shape[-1], dtype=each.dtype) for each in first.tensors()]
    done = 0
    for part in parts:
        weight = first if done == 0 else weight_of_blocks(kind, part)
        if (weight.minima is None) != (first.minima is None) or not torch.equal(weight.values, first.values):
            return weight_of_blocks(kind, rows)  # a part that needs another form
        for into, each in zip(whole, weight.tensors(), strict=True):
            into[done : done + len(part)] = each
        done += len(part)
    return first.rebuilt(iter(whole))


def gguf_state(
    tensors: Sequence[GgufTensor], architecture: str, empty: nn.Module, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Returns what indexing with `...` reads, by the name of a parameter of `empty`.

    Raises UndecodableWeight for a tensor that is no parameter: without it the model would be another one.
    """
    tensors = [
        tensor
        for tensor in tensors
        if tensor.name not in _IN_CONFIG and not tensor.name.startswith(_OF_OTHER_MEDIA)
    ]
    config: Any = empty.config
    if is_gguf_arch_supported(architecture):
        return _converted(tensors, get_gguf_conversion_mapping(architecture, config), dtype)
    return _processed(tensors, architecture, empty, dtype)


def _converted(
    tensors: Sequence[GgufTensor], mapping: Sequence[Any], dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Returns parameters by conversions of tensors."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found: dict[str, dict[str | None, GgufTensor]] = {}
    for tensor in tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        found.setdefault(name, {})[pattern] = tensor

    def change(name: str, patterns: Sequence[str | None]) -> Change:
        converter = next((each for each in converters if set(patterns) & set(each.source_patterns)), None)

        def convert(read: list[Tensor]) -> Tensor:
            if converter is None:
                return read[0]
            values: Any = {pattern: [tensor] for pattern, tensor in zip(patterns, read, strict=True)}
            for operation in converter.operations:
                values = operation.convert(
                    values,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=name,
                )
            [value] = values.values()
            converted: Tensor = value[0] if isinstance(value, list) else value
            return converted

        return convert

    return {
        name: GgufWeight(list(sources.values()), change(name, list(sources)), dtype)
        for name, sources in found.items()
    }


def _processed(
    tensors: Sequence[GgufTensor], architecture: str, empty: nn.Module, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Returns parameters by a processor of arrays. Two tensors of one parameter are the gates and the inputs of
    experts, which stand one behind the other."""
    config: Any = empty.config
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=copy.deepcopy(config.to_dict()))
    names = get_gguf_hf_weights_map(_Names(empty), processor)
    base: Any = getattr(empty, "base_model", empty)
    if base is not empty:  # some files have names as of the inner model
        of_base = get_gguf_hf_weights_map(_Names(base), processor, qual_name=f"{empty.base_model_prefix}.")
        names = of_base | names
    found: dict[str, list[GgufTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):  # ffn_gate_exps before ffn_up_exps
        name = names.get(tensor.name, names.get(tensor.name.removesuffix(".weight")))
        if name is None:
            raise UndecodableWeight(f"{tensor.name}: the architecture has no such parameter")
        found.setdefault(name, []).append(tensor)

    def change(sources: Sequence[GgufTensor]) -> Change:
        def process(read: list[Tensor]) -> Tensor:
            parts = [_after(processor, source.name, part) for source, part in zip(sources, read, strict=True)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

        return process

    return {name: GgufWeight(sources, change(sources), dtype) for name, sources in found.items()}


class _Names:
    """Names of a model's parameters, for transformers' map of names: it would go through all modules one by one."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._state = dict.fromkeys(model.state_dict())

    def state_dict(self) -> dict[str, None]:
        return self._state

    def named_children(self) -> list[tuple[str, nn.Module]]:
        return []


def _after(processor: Any, name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor as a processor leaves it. What it does with rows of codes is learned from their numbers."""
    if isinstance(tensor, CodedTensor):
        numbers = np.arange(tensor.shape[:-1].numel()).reshape(*tensor.shape[:-1], 1)
        with contextlib.suppress(ValueError):  # it reads more than rows
            places = _process(processor, name, numbers)
            if places.shape == numbers.shape:
                if np.array_equal(places, numbers):
                    return tensor
                rows = tensor.reshape(-1, tensor.shape[-1]).index_select(
                    0, torch.from_numpy(places).flatten()
                )
                return rows.view(tensor.shape)
        tensor = tensor.unpacked()
    array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return torch.from_numpy(np.ascontiguousarray(_process(processor, name, array)))


def _process(processor: Any, name: str, array: Any) -> Any:
    return processor.process(array, name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}).weights
