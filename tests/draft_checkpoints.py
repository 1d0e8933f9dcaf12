"""Small checkpoints with draft heads, under the names that real ones have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints import save
from rootstock.runtime.torch.draft_heads import DIALECTS, HeadNames

# The name of the projection, by the type of the model.
HEADED = {
    "deepseek_v3": "eh_proj",
    "deepseek_v32": "eh_proj",
    "glm_moe_dsa": "eh_proj",
    "glm4_moe": "eh_proj",
    "qwen3_next": "fc",
    "qwen3_5_text": "fc",
    "qwen2": "input_proj",
}
LISTS = ("layer_types", "mlp_layer_types", "indexer_types")  # by layer
_LINEAR, _FULL = "linear_attention", "full_attention"


def names_of(model_type: str) -> HeadNames:
    return next(names for names in DIALECTS if names.projection == HEADED[model_type])


def with_head_layer(model_type: str, layers: int) -> dict[str, Any]:
    """Returns fields of a configuration with one more layer, which becomes the head's."""
    if not model_type.startswith(("qwen3_next", "qwen3_5")):
        return {"num_hidden_layers": layers + 1}
    kinds = [_FULL if (index + 1) % 4 == 0 else _LINEAR for index in range(layers)]
    return {"num_hidden_layers": layers + 1, "layer_types": [*kinds, _FULL]}


def save_headed(directory: Path, model_type: str, layers: int = 4, **overrides: object) -> Path:
    """Saves a model of so many layers, and a head of random weights."""
    save(directory, model_type, **with_head_layer(model_type, layers), **overrides)
    width, random = read_config(directory)["hidden_size"], torch.Generator().manual_seed(5)
    names = names_of(model_type)
    return name_head(
        directory,
        names,
        {
            part: torch.randn((width, 2 * width) if part == names.projection else (width,), generator=random)
            * 0.1
            for part in names.parts
        },
    )


def name_head(directory: Path, names: HeadNames, parts: Mapping[str, torch.Tensor]) -> Path:
    """Makes the last layer of a saved model its head, with these weights of the other parts."""
    config, file = read_config(directory), directory / "model.safetensors"
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers}
    config |= {name: config[name][:layers] for name in LISTS if config.get(name)}
    (directory / "config.json").write_text(json.dumps(config))
    own, last = names.own.format(layer=layers), f"model.layers.{layers}."
    tensors = {name.replace(last, own + names.block): tensor for name, tensor in load_file(file).items()}
    tensors |= {f"{own}{part}.weight": weight.contiguous() for part, weight in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
