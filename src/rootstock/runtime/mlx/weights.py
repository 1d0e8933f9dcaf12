"""Weights of mlx-lm's models: read from a checkpoint's files, cast or quantized, and evaluated.

mlx-lm reads all files that it finds in a directory. It therefore gets a directory of links: to the configuration that
was checked, and to the weight files that the index names, whose content the fingerprint covers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model as load_by_mlx_lm

from rootstock.errors import ModelUnsupported, ModelWeightsMissing, shown
from rootstock.runtime.mlx.checkpoint import MlxCheckpoint
from rootstock.runtime.mlx.runner import dtype_name
from rootstock.runtime.model_files import CONFIG, Progress, first_line, in_one_line, stored_tensors
from rootstock.runtime.model_formats import MLX, Quantization, quantization_of
from rootstock.units import MIB

_EVALUATED_BYTES = 256 * MIB  # of weights at a time, between two reports of progress
_QUANTIZED_BITS = {"int8": 8, "int4": 4}
_WEIGHT = ".weight"
_GROUP = 64  # weights that share a scale, as mlx_lm.convert quantizes


def lazy_model(model: str, checkpoint: MlxCheckpoint, files: Sequence[Path]) -> nn.Module:
    """Builds the model with weights that are not read yet. Raises ModelWeightsMissing or ModelUnsupported."""
    _refuse_repeated(model, files)
    try:
        with tempfile.TemporaryDirectory(prefix="rootstock-") as folder:
            Path(folder, CONFIG).write_text(json.dumps(checkpoint.config), encoding="utf-8")
            for number, file in enumerate(files):
                Path(folder, f"model-{number:05d}.safetensors").symlink_to(file.resolve())
            built: nn.Module = load_by_mlx_lm(Path(folder), lazy=True)[0]
    except (
        Exception
    ) as error:  # ValueError for weights of other names or shapes, and any error of the model's code
        quantization = quantization_of(checkpoint.config)
        if quantization is not None and quantization.method != MLX:  # a variant that mlx-lm does not read
            raise ModelUnsupported(model, quantization.refusal(in_one_line(error), by_mlx=True)) from error
        raise ModelWeightsMissing(model, in_one_line(error)) from error
    for path, module in _quantizable(built):
        if not mx.issubdtype(module.weight.dtype, mx.floating):
            found = quantization_of(checkpoint.config) or Quantization("", dtype_name(module.weight.dtype))
            reason = f"mlx-lm reads {path}.weight as {dtype_name(module.weight.dtype)} without its scales"
            raise ModelUnsupported(model, found.refusal(reason, by_mlx=True))
    return built


def _refuse_repeated(model: str, files: Sequence[Path]) -> None:
    """Raises ModelWeightsMissing for a tensor in two files: mlx-lm takes either."""
    seen: set[str] = set()
    for tensor in stored_tensors(model, list(files)):
        if tensor.name in seen:
            raise ModelWeightsMissing(model, f"two files hold a tensor {shown(tensor.name)}")
        seen.add(tensor.name)


def stored_modules(checkpoint: MlxCheckpoint, files: Sequence[Path]) -> dict[str, str | None]:
    """Returns the model's name of each module whose weight the files hold, by the name there. None: mlx-lm makes
    other weights of it, or none. Reads headers only."""
    stored: dict[str, mx.array] = {}
    for file in files:
        arrays: Any = mx.load(str(file))
        stored.update(arrays)
    model: Any = checkpoint.make_model()  # some may change themselves by the weights, and only once
    kept = dict(model.sanitize(dict(stored))) if hasattr(model, "sanitize") else stored
    names = {id(array): name for name, array in kept.items()}

    def place(name: str, array: mx.array) -> str | None:
        found = name if kept.get(name) is array else names.get(id(array))
        return None if found is None else found.removesuffix(_WEIGHT)

    return {
        name.removesuffix(_WEIGHT): place(name, array)
        for name, array in stored.items()
        if name.endswith(_WEIGHT)
    }


def stored_dtype(built: nn.Module) -> mx.Dtype:
    """Returns the dtype of most weights, or of most scales of a quantized model."""
    counts: dict[mx.Dtype, int] = {}
    for _, weight in _named(built):
        if mx.issubdtype(weight.dtype, mx.floating):
            counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.size
    return max(counts, key=lambda dtype: counts[dtype], default=mx.bfloat16)


def cast(built: Any, dtype: mx.Dtype) -> None:
    """Casts weights and scales, when they are evaluated. Keeps those that mlx-lm never casts (`cast_predicate`)."""
    is_cast = getattr(built, "cast_predicate", lambda path: True)
    built.update(
        tree_map_with_path(
            lambda path, w: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) and is_cast(path) else w,
            built.parameters(),
        )
    )


def is_quantized(built: nn.Module) -> bool:
    return any(name.rpartition(".")[-1] == "scales" for name, _ in _named(built))


def quantize(built: nn.Module, quantization: str) -> list[str]:
    """Quantizes the weights, when they are evaluated, as `mlx_lm.convert` does. Returns the names of layers whose
    widths do not allow it."""
    chosen = getattr(built, "quant_predicate", None) or (lambda path, module: True)
    kept: list[str] = []

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        if module.weight.shape[-1] % _GROUP:
            kept.append(path)
            return False
        its: bool | dict[str, Any] = chosen(path, module)
        return its

    nn.quantize(built, _GROUP, _QUANTIZED_BITS[quantization], class_predicate=predicate)
    return kept


def _named(built: Any) -> list[tuple[str, mx.array]]:
    """Returns names and arrays of the parameters."""
    named: Any = tree_flatten(built.parameters())
    return list(named)


def _quantizable(built: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and modules whose weights are not quantized, but can be."""
    leaves: Any = tree_flatten(built.leaf_modules(), is_leaf=nn.Module.is_module)
    for path, module in leaves:
        if hasattr(module, "to_quantized") and "weight" in module:
            yield path, module


def evaluate_weights(model: str, built: nn.Module, report: Progress) -> None:
    """Reads the weights from the files and computes the arrays that depend on them. Raises ModelWeightsMissing.

    Another thread cannot evaluate lazy arrays of this one. Every array of every module is therefore evaluated, also
    arrays that are no parameters, such as the frequencies of RoPE.
    """
    arrays = list(arrays_of(built))
    total = sum(array.nbytes for array in arrays) or 1
    done, pending, pending_bytes = 0, [], 0
    for number, array in enumerate(arrays):
        pending.append(array)
        pending_bytes += array.nbytes
        if pending_bytes < _EVALUATED_BYTES and number + 1 < len(arrays):
            continue
        try:
            mx.eval(pending)
        except RuntimeError as error:
            raise ModelWeightsMissing(model, first_line(error)) from error
        done, pending, pending_bytes = done + pending_bytes, [], 0
        report("load", done / total)


def arrays_of(built: nn.Module) -> Iterator[mx.array]:
    """Yields each array that a module holds, directly or within other objects of the model, once."""
    seen: set[int] = set()
    pending: list[Any] = [built]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, mx.array):
            yield one
            continue
        if isinstance(one, Mapping):
            pending.extend(one.values())
        elif isinstance(one, (list, tuple, set)):
            pending.extend(one)
        if isinstance(one, nn.Module) or type(one).__module__.startswith("mlx_lm."):
            pending.extend(getattr(one, "__dict__", {}).values())
