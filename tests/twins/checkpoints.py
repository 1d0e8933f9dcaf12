"""Tiny random checkpoints of real architectures, written to disk as a hub model would lie there.

Weights are drawn wide (std 0.3), and norms, biases and sinks are shaken too: with the usual initialisation
attention is almost uniform, and hardly any mistake in it would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96},
    "gpt_neox": {"num_key_value_heads": None},
    "phi": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gemma": {"tie_word_embeddings": True},
}

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


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """In float32, from a seed."""
    known = AutoConfig.for_model(model_type)
    wanted = _COMMON | _OWN.get(model_type, {}) | overrides
    given = {k: v for k, v in wanted.items() if v is not None and (hasattr(known, k) or k in overrides)}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(type(known)(**given), dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random))
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model


def save(directory: Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    tiny_model(model_type, seed, **overrides).save_pretrained(directory)
    return directory
