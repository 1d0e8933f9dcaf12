"""Models of about 80 million random weights, written to disk as hub models lie there, with a tokenizer.

Large enough that computing takes its time, small enough that every state of a restart can be measured often. The
tokenizer is the tiny models': prompts are made of token ids here, and what is generated means nothing anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_hybrids import make_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

VOCAB = 32_000
CONTEXT = 16_384

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def write_llama(directory: Path) -> Path:
    """The 80M model of A6: 13 layers of full attention."""
    config = LlamaConfig(
        **_COMMON,
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=13,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
    )
    return _write(directory, LlamaForCausalLM, config)


def write_hybrid(directory: Path) -> Path:
    """Its hybrid twin: three layers of linear attention (gated delta nets) to one of full attention."""
    config = Qwen3_5TextConfig(
        **_COMMON,
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=12,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        linear_num_key_heads=5,
        linear_num_value_heads=10,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
    )
    return _write(directory, Qwen3_5ForCausalLM, config)


def _write(directory: Path, architecture: type[PreTrainedModel], config: Any) -> Path:
    torch.manual_seed(0)
    architecture(config).to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
