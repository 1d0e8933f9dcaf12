"""LoRA adapters of random weights for mlx-lm's models, in mlx-lm's and PEFT's formats, and models with these weights
merged by mlx-lm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import dequantize_model, load_model, save_config

from lora import PREFIX


def own_model(directory: Path) -> nn.Module:
    """Loads a checkpoint as mlx-lm does."""
    return load_model(directory)[0]


def save_mlx_adapter(
    directory: Path,
    checkpoint: Path,
    keys: Iterable[str] | None = None,
    *,
    rank: int = 4,
    scale: float = 2.0,
    size: float = 0.15,
    seed: int = 0,
    kind: str = "lora",
) -> Path:
    """Saves an adapter of a checkpoint as `mlx_lm.lora` does. `keys`: as in its configuration; None: all layers that
    it can adapt."""
    directory.mkdir(parents=True, exist_ok=True)
    model = own_model(checkpoint)
    model.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=kind == "dora")
    random = np.random.default_rng(seed)
    trained: Any = tree_flatten(model.trainable_parameters())
    weights = {
        name: mx.array(random.normal(size=array.shape).astype(np.float32) * size)
        for name, array in sorted(trained)
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    save_config(
        {
            "model": "a model",
            "fine_tune_type": kind,
            "num_layers": len(model.layers),
            "lora_parameters": parameters,
            "iters": 10,
            "seed": 0,
        },
        directory / "adapter_config.json",
    )
    return directory


def merged_by_mlx_lm(checkpoint: Path, adapter: Path) -> nn.Module:
    """Returns the model with an adapter of mlx-lm's format merged, as `mlx_lm.fuse` makes it of dequantized
    weights."""
    model = dequantize_model(own_model(checkpoint))
    model.set_dtype(mx.float32)
    model = load_adapters(model, str(adapter))
    fused = [(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(fused))
    model.eval()
    return model


def save_peft_adapter(
    directory: Path,
    model: nn.Module,
    modules: Iterable[str],
    *,
    rank: int = 4,
    alpha: float = 8,
    size: float = 0.15,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Saves an adapter in PEFT's format that changes the given linear layers and embeddings."""
    directory.mkdir(parents=True, exist_ok=True)
    named, random, tensors = dict(model.named_modules()), np.random.default_rng(seed), {}
    for name in modules:
        rows, width = named[name].weight.shape
        if isinstance(named[name], nn.Embedding):
            shapes = {"lora_embedding_A": (rank, rows), "lora_embedding_B": (width, rank)}
        else:
            shapes = {"lora_A.weight": (rank, width), "lora_B.weight": (rows, rank)}
        for end, shape in shapes.items():
            drawn = random.normal(size=shape).astype(np.float32) * size
            tensors[f"{PREFIX}{name}.{end}"] = mx.array(drawn)
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear", **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged_from_peft(checkpoint: Path, adapter: Path, scaling: float) -> nn.Module:
    """Returns the model with an adapter of PEFT's format merged by LoRA's definition. A head keeps the weight that it
    shares with an adapted embedding."""
    tensors: Any = mx.load(str(adapter / "adapter_model.safetensors"))
    model = own_model(checkpoint)
    for name, module in model.named_modules():
        a, b = (tensors.get(f"{PREFIX}{name}.lora_{letter}.weight") for letter in "AB")
        if a is not None:
            module.weight = module.weight + scaling * (b @ a)
        a, b = (tensors.get(f"{PREFIX}{name}.lora_embedding_{letter}") for letter in "AB")
        if a is not None:
            head = module.weight.T
            module.__class__ = type(
                "Untied", (nn.Embedding,), {"as_linear": lambda self, x, head=head: x @ head}
            )
            module.weight = module.weight + scaling * (b @ a).T
    mx.eval(model.parameters())
    return model


def greedy(model: Callable[..., mx.array], prompt: Iterable[int], tokens: int) -> list[int]:
    """Returns the greedy answer of the model's own code, computed anew for each token."""
    known = list(map(int, prompt))
    for _ in range(tokens):
        known.append(int(mx.argmax(model(mx.array(known)[None])[0, -1]).item()))
    return known[-tokens:]
