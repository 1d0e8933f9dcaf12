"""Models of about 80 million random weights, written to disk as hub models lie there, with a tokenizer.

Large enough that computing takes its time, small enough that every state of a restart can be measured often. The
tokenizer is the tiny models': prompts are made of token ids here, and what is generated means nothing anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_hybrids import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
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


def write_llama(directory: Path, vocab_size: int = VOCAB) -> Path:
    """The 80M model of A6: 13 layers of full attention."""
    config = LlamaConfig(
        **(_COMMON | {"vocab_size": vocab_size}),
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=13,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
    )
    return _write(directory, LlamaForCausalLM, config)


def write_streaming_llama(directory: Path, size: str = "80m") -> Path:
    """The 80M model, or one of 600M, with a tokenizer whose every id has a visible piece of text: whatever random
    weights say, each token can be streamed."""
    shape = {
        "80m": {
            "hidden_size": 640,
            "intermediate_size": 1728,
            "num_hidden_layers": 13,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 64,
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
    }[size]
    _write(directory, LlamaForCausalLM, LlamaConfig(**(_COMMON | shape)))
    _visible_tokenizer().save_pretrained(directory)
    return directory


def _visible_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, 32,000 pieces of ASCII. Without merges it reads bytes; what it writes is as long as words are."""
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "etaoinshrdlucmfwygpbvk"
    for first in letters:
        pieces += [f"\u0120{first}{b}{c}{d}" for b in letters for c in letters for d in letters[:3]]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces[:VOCAB])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


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
