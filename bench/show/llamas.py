"""Llamas of random weights, on which shows compare Rootstock with others: the 80M and the 600M of A6 and D."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32_000
CONTEXT_LIMIT = 8192

MODELS: dict[str, dict[str, Any]] = {
    "80m": {
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_hidden_layers": 13,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "600m": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def save_model(name: str, folder: Path) -> Path:
    """In bfloat16, as hub models lie on disk; without a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT_LIMIT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **MODELS[name],
    )
    path = folder / name
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    say(f"{name}: a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million random weights")
    model.save_pretrained(path)
    return path


def random_prompts(count: int, tokens: int, seed: int = 0) -> np.ndarray:
    """[count, tokens] int32"""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (count, tokens)).astype(np.int32)


def say(text: str) -> None:
    print(text, flush=True)
