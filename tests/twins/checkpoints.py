"""Tiny random checkpoints of real architectures, written to disk as a hub model would lie there.

Weights are drawn wide (std 0.3), and norms, biases and sinks are shaken too: with the usual initialisation
attention is almost uniform, and hardly any mistake in it would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twins.architectures import ARCHITECTURES, COMMON, REFUSED, VOCAB

__all__ = ["SERVED", "VOCAB", "save", "tiny_model"]

# Full attention over plain K and V: the simplest, which tests of other things take as their example.
SERVED = (
    "llama",
    "qwen2",
    "qwen3",
    "olmo2",
    "gpt_neox",
    "granite",
    "gemma",
    "phi",
    "glm4",
    "smollm3",
    "qwen3_moe",
    "gpt2",
)

# Time constants of recurrent layers: their scale means something, and a shaken one can explode.
_UNSHAKEN = ("A_log", "dt_bias", ".D")


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """In float32, from a seed. `overrides` are fields of the configuration; None keeps its default."""
    known = AutoConfig.for_model(model_type)
    names = known.to_dict()
    common = {name: value for name, value in COMMON.items() if name in names}
    fields = common | (ARCHITECTURES | REFUSED).get(model_type, {}) | overrides
    fields = {name: value for name, value in fields.items() if value is not None}
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(type(known)(**fields), dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random))
            elif (parameter.dim() == 1 or name.endswith("bias")) and not name.endswith(_UNSHAKEN):
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


def save(directory: Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    tiny_model(model_type, seed, **overrides).save_pretrained(directory)
    return directory
