"""Configurations of checkpoints for mlx-lm, checked before mlx-lm's code reads them.

No code of a checkpoint is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes as classes_of

from rootstock.errors import ModelFileInvalid, ModelUnsupported, shown
from rootstock.runtime.model_config import CONTEXT_NAMES, context_limit, declared_positions, eos_token_ids
from rootstock.runtime.model_files import (
    CONFIG,
    in_one_line,
    read_configs,
    read_json,
)
from rootstock.runtime.model_formats import quantization_of

MODELOPT_CONFIG = "hf_quant_config.json"  # where NVIDIA's exports describe their quantization

# Far above real configurations. mlx-lm goes through all fields for each field, and through layers and their kinds.
_MAX_FIELDS = 10_000
_MAX_LAYERS = 10_000
_OF_LAYERS = re.compile("layer|block|pattern|idxs|indices")  # names of fields with an entry for each layer

# mlx-lm's RoPE that depends on the length. Its other types have fixed frequencies, also longrope.
_CHANGING_ROPE = ("dynamic",)

# (bits, group sizes) of MLX's quantization, by mode.
_QUANTIZATIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
# Other libraries' quantization that mlx-lm reads. It reads no other, and does not say so.
_FOREIGN = ("awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")


@dataclass(frozen=True, slots=True)
class MlxCheckpoint:
    """Configuration of a checkpoint that mlx-lm can serve."""

    config: Mapping[str, Any]
    architecture: str  # module of mlx-lm, for example "llama"
    context_limit: int
    rope_regime: str
    eos_token_ids: tuple[int, ...]
    make_model: Callable[[], nn.Module]  # with random weights, which are lazy and take no memory


def read_checkpoint(model: str, directory: Path) -> MlxCheckpoint:
    """Reads and checks the configuration. Raises ModelFileInvalid, or ModelUnsupported if mlx-lm does not know the
    architecture or the quantization."""
    config, text, generation = read_configs(model, directory)
    _check_sizes(model, config, text)
    if config.get("model_file") is not None:
        raise ModelUnsupported(
            model,
            f"its {CONFIG} names {shown(config['model_file'])} as its code (model_file), and the MLX runtime runs no "
            "code of a checkpoint",
        )
    _add_quantization(model, directory, config, text)
    _check_quantization(model, config)
    model_class, arguments = _mlx_lm_class(model, config)
    try:
        limit, regime = context_limit(
            {**text, CONTEXT_NAMES[0]: _declared_limit(text, arguments)}, _CHANGING_ROPE
        )
    except ValueError as error:
        raise ModelFileInvalid(model, CONFIG, str(error)) from error
    return MlxCheckpoint(
        config,
        model_class.__module__.rpartition(".")[-1],
        limit,
        regime,
        eos_token_ids(generation, text, config),
        lambda: model_class(arguments),
    )


def _check_sizes(model: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for fields in (config, text):
        if len(fields) > _MAX_FIELDS:
            raise ModelFileInvalid(
                model, CONFIG, f"it has {len(fields):,} fields, at most {_MAX_FIELDS:,} are allowed"
            )
        for name, value in fields.items():
            if isinstance(value, (list, str)) and len(value) > _MAX_LAYERS and _OF_LAYERS.search(name):
                raise ModelFileInvalid(
                    model,
                    CONFIG,
                    f"{shown(name)} has {len(value):,} entries, at most {_MAX_LAYERS:,} are allowed",
                )


def _mlx_lm_class(model: str, config: Mapping[str, Any]) -> tuple[Callable[..., nn.Module], Any]:
    """Returns mlx-lm's class of the model and its arguments. Raises ModelFileInvalid or ModelUnsupported."""
    kind, names = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, str) or not re.fullmatch(r"[\w-]{1,100}", kind):
        raise ModelFileInvalid(
            model, CONFIG, f"model_type is {shown(kind)}, but must be the name of an architecture"
        )
    listed = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) for name in listed):
        raise ModelFileInvalid(model, CONFIG, f"architectures is {shown(names)}, but must be a list of names")
    try:
        # The lookup of mlx-lm's own loader. It has no public name, and mlx-lm is pinned.
        model_class, arguments_class = classes_of(config)
    except Exception as error:
        raise ModelUnsupported(model, _unknown(kind, error)) from error
    try:
        arguments = arguments_class.from_dict(config)
    except Exception as error:  # the code that reads a configuration checks it, and may raise anything
        raise ModelFileInvalid(model, CONFIG, in_one_line(error)) from error
    try:
        model_class(arguments)  # lazy: its random weights take no memory
    except Exception as error:
        raise ModelUnsupported(model, f"mlx-lm cannot build it: {in_one_line(error)}") from error
    return model_class, arguments


def _unknown(kind: str, error: Exception) -> str:
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and not (cause.name or "").startswith("mlx_lm.models"):
        return f"mlx-lm's {kind} needs the package {cause.name}, which is not installed"
    return f"mlx-lm {version('mlx-lm')} has no model of type {shown(kind)}"


def _declared_limit(text: Mapping[str, Any], arguments: Any) -> Any:
    """Returns the context limit that config.json declares, or mlx-lm's default for this architecture."""
    inner = getattr(arguments, "text_config", None) or arguments
    defaults = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", {})
    return declared_positions(text, defaults)


# ---- quantization


def _add_quantization(model: str, directory: Path, config: dict[str, Any], text: Mapping[str, Any]) -> None:
    """Adds the description of the quantization from where exports of other libraries keep it."""
    if "quantization_config" not in config and "quantization_config" in text:
        config["quantization_config"] = text["quantization_config"]
    if "quantization_config" not in config and (directory / MODELOPT_CONFIG).exists():
        config["quantization_config"] = {
            "quant_method": "modelopt",  # mlx-lm needs it, and the file may not have it
            **read_json(model, directory, MODELOPT_CONFIG),
        }
    for name in ("quantization", "quantization_config"):
        if config.get(name) is None:  # as mlx-lm reads null
            config.pop(name, None)


def _check_quantization(model: str, config: Mapping[str, Any]) -> None:
    """Raises ModelFileInvalid for a quantization that MLX does not have, ModelUnsupported for another library's."""
    if "quantization" in config:
        found = config["quantization"]
        if not isinstance(found, dict):
            raise ModelFileInvalid(model, CONFIG, f"quantization is {shown(found)}, but must be an object")
        _check_parameters(model, "quantization", found, ("bits", "group_size"))
        for layer, its in found.items():
            if isinstance(its, dict):
                _check_parameters(model, f"quantization of {shown(layer)}", its, ())
    elif "quantization_config" in config:
        found = config["quantization_config"]
        method = found.get("quant_method") if isinstance(found, dict) else None
        if not isinstance(method, str):
            raise ModelFileInvalid(model, CONFIG, "quantization_config names no quant_method")
        declared = quantization_of(config)
        if method not in _FOREIGN and declared is not None:
            raise ModelUnsupported(model, declared.refusal(by_mlx=True))


def _check_parameters(model: str, where: str, found: Mapping[str, Any], required: Sequence[str]) -> None:
    mode = found.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _QUANTIZATIONS:
        allowed = ", ".join(_QUANTIZATIONS)
        raise ModelFileInvalid(
            model, CONFIG, f"mode of {where} is {shown(mode)}, but must be one of {allowed}"
        )
    for name, allowed_numbers in zip(("bits", "group_size"), _QUANTIZATIONS[mode], strict=True):
        value = found.get(name)
        if value is None and name not in required:
            continue
        if type(value) is not int or value not in allowed_numbers:
            numbers = " or ".join(map(str, allowed_numbers))
            raise ModelFileInvalid(
                model, CONFIG, f"{name} of {where} is {shown(value)}, but must be {numbers}"
            )
