"""Small models of mlx-lm's architectures with random weights, in memory or as the checkpoints that mlx-lm writes.

Weights are drawn wide, and norms, biases and sinks are shaken, too: as mlx-lm makes them they are small, or all zeros
or ones, and hardly any mistake in attention would show.

The CPU build of MLX compiles every fused function with a C++ compiler, which takes minutes. Tests therefore call
`mx.disable_compile()`, or set MLX_DISABLE_COMPILE=1.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path
from mlx_lm.utils import quantize_model, save_model

from checkpoints import CHAT_VOCAB, chat_tokenizer

__all__ = ["KINDS", "Quantization", "make_mlx_model", "mlx_config", "save_mlx_checkpoint", "save_mlx_model"]

Quantization = Literal["4bit", "8bit", "mixed", "mxfp4"]
"""Of a checkpoint's weights. "mixed": 4 bits, with 8 for the embeddings and none for the first layer."""

_EOS = 2  # <|im_end|> of the tokenizer
_CONTEXT = 16_384  # tokens
_GROUP = 32  # weights that share a scale

# Widths are multiples of 64, so that weights can be quantized with mlx-lm's default groups, too.
_COMMON: dict[str, Any] = {
    "vocab_size": CHAT_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": _CONTEXT,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_ROPE: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
_WINDOWS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 9}

KINDS: dict[str, dict[str, Any]] = {
    # full attention
    "llama": {**_HEADS, **_ROPE, "num_key_value_heads": 4},
    "qwen3": {**_HEADS, **_ROPE, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_HEADS,
        **_ROPE,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    # full attention over latents
    "deepseek_v3": {
        **_HEADS,
        **_ROPE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "rope_scaling": None,
        "first_k_dense_replace": 1,
    },
    # windows
    "gemma3_text": {**_HEADS, **_WINDOWS, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    # windows and sinks
    "gpt_oss": {
        **_HEADS,
        **_WINDOWS,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # chunks
    "llama4": {
        "text_config": {
            **_COMMON,
            **_HEADS,
            **_ROPE,
            "model_type": "llama4",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 12,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    # recurrent states
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    # recurrent states and full attention
    "qwen3_next": {
        **_HEADS,
        **_ROPE,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "lfm2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 96,
        "full_attn_idxs": [1, 3],
        "rope_theta": 10_000.0,
    },
    "nemotron_h": {
        **_HEADS,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
}


def mlx_config(kind: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of a model of `KINDS`. `config`: fields to use instead; None drops a field."""
    fields = {**({} if "text_config" in KINDS[kind] else _COMMON), **KINDS[kind], **(config or {})}
    return {"model_type": kind, "eos_token_id": _EOS} | {
        name: value for name, value in fields.items() if value is not None or name == "rope_scaling"
    }


def make_mlx_model(kind: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """Makes a model in float32, evaluated. Two with the same arguments are equal."""
    mx.random.seed(seed)
    architecture = importlib.import_module(f"mlx_lm.models.{kind}")
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(mlx_config(kind, config)))
    model.update(tree_map(lambda w: 1.5 * w + 0.2 * mx.random.normal(w.shape, w.dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


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
    model = make_mlx_model(kind, config, seed)
    return save_mlx_model(directory, model, mlx_config(kind, config), quantization, dtype)


def save_mlx_model(
    directory: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    quantization: Quantization | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """Saves a model, which is quantized and cast in place, with its config.json and a tokenizer."""
    is_cast = getattr(model, "cast_predicate", lambda name: True)
    model.update(
        tree_map_with_path(
            lambda name, w: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) and is_cast(name) else w,
            model.parameters(),
        )
    )
    saved = dict(config)
    if quantization is not None:
        mode = "mxfp4" if quantization == "mxfp4" else "affine"
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits of a weight
            model, saved = quantize_model(
                model,
                saved,
                _GROUP,
                8 if quantization == "8bit" else 4,
                mode=mode,
                quant_predicate=_mixed if quantization == "mixed" else None,
            )
    save_model(directory, model)
    (directory / "config.json").write_text(json.dumps(saved, indent=2))
    chat_tokenizer().save_pretrained(directory)
    return directory


def _mixed(path: str, module: nn.Module) -> bool | dict[str, Any]:
    if path.endswith(("embed_tokens", "embeddings", "lm_head")):
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    return ".layers.0." not in f".{path}"
