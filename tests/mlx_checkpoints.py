"""Models of `twins.mlx_models` as tests of loading need them: for chats, and with widths that groups of 64 divide.

They have more logits than their tokenizer has tokens, as most models have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from checkpoints import CHAT_VOCAB, chat_tokenizer, padded
from twins import mlx_models

__all__ = ["KINDS", "Quantization", "logits_of", "make_mlx_model", "mlx_config", "save_mlx_checkpoint"]

Quantization = Literal["4bit", "8bit", "mixed", "mxfp4"]
"""Of a checkpoint's weights. "mixed": 4 bits, with 8 for the embeddings and none for the first layer."""

_EOS = 2  # <|im_end|> of the tokenizer
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "kv_lora_rank": 32,
    "max_position_embeddings": 16_384,
}
# The fields of each that differ.
KINDS: dict[str, dict[str, Any]] = {
    # full attention
    "llama": {"num_hidden_layers": 3, "num_key_value_heads": 4},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {},
    # full attention over latents
    "deepseek_v3": {},
    # windows
    "gemma3_text": {},
    # windows and sinks
    "gpt_oss": {},
    # chunks
    "llama4": {},
    # recurrent states
    "mamba": {},
    "mamba2": {},
    # recurrent states and full attention
    "qwen3_next": {},
    "lfm2": {},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "num_hidden_layers": 4,
    },  # without experts
}


def logits_of(kind: str) -> int:
    """Returns the number of logits of a model of `KINDS`."""
    return padded(CHAT_VOCAB, kind)


def _sizes(kind: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    return _SIZES | {"vocab_size": logits_of(kind)} | KINDS[kind] | dict(config or {})


def mlx_config(kind: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of a model of `KINDS`. `config`: fields to use instead."""
    return mlx_models.config_of(kind, _sizes(kind, config)) | {"eos_token_id": _EOS}


def make_mlx_model(kind: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """Makes a model in float32, evaluated. Two with the same arguments are equal."""
    return mlx_models.build(kind, seed, sizes=_sizes(kind, config))


def save_mlx_checkpoint(
    directory: Path,
    kind: str,
    *,
    quantization: Quantization | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """Saves a model of `KINDS` as mlx-lm does, with `checkpoints.chat_tokenizer`."""
    return mlx_models.save(
        directory,
        kind,
        seed,
        dtype=dtype,
        bits={None: None, "8bit": 8}.get(quantization, 4),
        mode="mxfp4" if quantization == "mxfp4" else "affine",
        predicate=_mixed if quantization == "mixed" else None,
        sizes=_sizes(kind, config),
        tokenizer=chat_tokenizer(),
    )


def _mixed(path: str, module: nn.Module) -> bool | dict[str, Any]:
    if path.endswith(("embed_tokens", "embeddings", "lm_head")):
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    return ".layers.0." not in f".{path}"
