"""LoRA adapters of random weights in PEFT's format, and models with these weights merged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."


def linears_of(model: nn.Module, *ends: str) -> list[str]:
    """Returns the names of linear layers, without head and routers: of all, or of those whose name ends so."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D, FalconLinear)
        and module is not head
        and (not ends or name.endswith(ends))
    ]


def save_adapter(
    directory: Path,
    model: nn.Module,
    modules: Iterable[str],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.15,
    extra: dict[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Saves an adapter that changes the given linear layers and embeddings of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * size

    tensors: dict[str, Tensor] = {}
    ranks = fields.get("rank_pattern", {})
    for name in modules:
        module = model.get_submodule(name)
        r = next((ranks[end] for end in ranks if name.endswith(end)), rank)
        if isinstance(module, nn.Embedding):
            tensors[f"{PREFIX}{name}.lora_embedding_A"] = drawn(r, module.num_embeddings)
            tensors[f"{PREFIX}{name}.lora_embedding_B"] = drawn(module.embedding_dim, r)
            continue
        outputs, inputs = weight_of(module).shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = drawn(r, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = drawn(outputs, r)
        if fields.get("use_dora"):
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = weight_of(module).norm(dim=1) * (
                1 + drawn(outputs)
            )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(set(modules)),
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in (tensors | (extra or {})).items()},
        directory / "adapter_model.safetensors",
    )
    return directory


def weight_of(module: nn.Module) -> Tensor:
    """Returns [out, in]."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(module, Conv1D) else weight


@torch.no_grad()
def merge(model: nn.Module, directory: Path) -> nn.Module:
    """Merges an adapter into the model's weights, by LoRA's and DoRA's definitions."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.clone())  # an adapter changes one of the two
    for name, module in list(model.named_modules()):
        own = {
            key.removeprefix(f"{PREFIX}{name}."): each
            for key, each in tensors.items()
            if key.startswith(f"{PREFIX}{name}.")
        }
        if "weight" in own:
            module.weight.copy_(own["weight"])
        if "base_layer.bias" in own:
            module.bias.copy_(own["base_layer.bias"])
        if "lora_A.weight" not in own and "lora_embedding_A" not in own:
            continue
        rank = next(
            (r for end, r in config.get("rank_pattern", {}).items() if name.endswith(end)), config["r"]
        )
        alpha = next(
            (a for end, a in config.get("alpha_pattern", {}).items() if name.endswith(end)),
            config["lora_alpha"],
        )
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        if "lora_embedding_A" in own:
            module.weight += scaling * (own["lora_embedding_B"] @ own["lora_embedding_A"]).T
            continue
        merged = weight_of(module) + scaling * (own["lora_B.weight"] @ own["lora_A.weight"])
        if "lora_magnitude_vector" in own:
            merged = own["lora_magnitude_vector"][:, None] * merged / merged.norm(dim=1, keepdim=True)
        module.weight.copy_(merged.T if isinstance(module, Conv1D) else merged)
        if "lora_B.bias" in own:
            module.bias += scaling * own["lora_B.bias"]
    return model
