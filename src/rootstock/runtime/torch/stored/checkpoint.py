"""Lazy state dict of a checkpoint whose weights are quantized: transformers reads and places what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rootstock.runtime.torch.stored.coded_tensor import CodedTensor
from rootstock.runtime.torch.stored.formats import StoredFormat, UndecodableWeight


class StoredWeight:
    """Coded weight in files. Indexing with `...` reads it, as of a slice of safetensors."""

    def __init__(self, name: str, format: StoredFormat, parts: dict[str, Any], dtype: torch.dtype) -> None:
        self._name, self._format, self._parts, self._dtype = name, format, parts, dtype

    def __getitem__(self, index: Any) -> Tensor:
        assert index is ..., "weights are read whole"
        try:
            decoded = self._format.decode(
                {end: part[...] for end, part in self._parts.items()}, self._format.sizes
            )
        except (UndecodableWeight, RuntimeError, ValueError) as error:
            raise UndecodableWeight(f"{self._name}: {error}") from error
        if problem := decoded.weight.problem():
            raise UndecodableWeight(f"{self._name}: its tensors do not fit together: {problem}")
        return CodedTensor(decoded.weight, self._dtype, is_transposed=decoded.is_transposed)


class _Experts:
    """Gates and inputs of experts, which mlx-lm has apart. Indexing with `...` reads both, one behind the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __getitem__(self, index: Any) -> Tensor:
        return torch.cat([part[index] for part in self._parts], 1)


class _Kernel:
    """Kernel of a convolution, which mlx-lm has as [channels, width, 1]."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, index: Any) -> Tensor:
        kernel: Tensor = self._stored[index]
        return kernel.mT.contiguous() if kernel.shape[-1] == 1 else kernel


def with_names_of_mlx(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict of a repository of mlx-lm by transformers' names and orders."""
    found: dict[str, Any] = {}
    for name, stored in state.items():
        head, _, tail = name.rpartition(".switch_mlp.")
        if head and tail == "gate_proj.weight":
            found[f"{head}.experts.gate_up_proj"] = _Experts(
                [stored, state[f"{head}.switch_mlp.up_proj.weight"]]
            )
        elif head and tail == "down_proj.weight":
            found[f"{head}.experts.down_proj"] = stored
        elif not head:
            found[name] = _Kernel(stored) if name.endswith(("conv.weight", "conv1d.weight")) else stored
    return found


def lazy_state(
    files: Sequence[Path], formats: Sequence[StoredFormat], dtype: torch.dtype, opened: ExitStack
) -> dict[str, Any]:
    """Returns what indexing with `...` reads, by the name of a tensor of the unquantized model.

    `opened` closes the files. Scales of activations and other tensors that only the quantization has are left out.
    """
    stored: dict[str, Any] = {}
    for file in files:
        reader = opened.enter_context(safe_open(file, framework="pt"))
        for name in reader.keys():  # noqa: SIM118 (not a mapping)
            stored[name] = reader.get_slice(name)
    found: dict[str, Any] = {}
    for format in formats:
        mark = format.ends[0]
        for name in [name for name in stored if name.endswith(mark)]:
            prefix = name.removesuffix(mark)
            if not all(prefix + end in stored for end in format.ends):
                continue
            ends = [end for end in (*format.ends, *format.optional) if prefix + end in stored]
            parts = {end: stored.pop(prefix + end) for end in ends}
            found[prefix + format.name] = StoredWeight(prefix + format.name, format, parts, dtype)
    return stored | found
