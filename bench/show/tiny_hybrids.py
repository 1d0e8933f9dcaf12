"""Tiny models with random weights that cannot resume just anywhere, written to disk as hub models lie there:
a hybrid of recurrent states and full attention, and one of sliding windows and full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

TEMPLATE = Path(__file__).resolve().parents[2] / "tests/server/templates/qwen3.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens of their own, as in the models that the template is like; what a model says of them is text.
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCAB = 512
WINDOW = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_states(directory: Path) -> Path:
    """Three layers of recurrent states to one of full attention."""
    config = Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    )
    return _write(directory, Qwen3NextForCausalLM, config)


def write_windows(directory: Path) -> Path:
    """Three layers of sliding windows to one of full attention."""
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    )
    return _write(directory, Gemma3ForCausalLM, config)


def _write(directory: Path, architecture: type[PreTrainedModel], config: Any) -> Path:
    torch.manual_seed(0)
    architecture(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over words of the conversations' kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(VISIBLE),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEMPLATE.read_text(), Path(__file__).read_text()], trainer)
    tokenizer.add_tokens(list(VISIBLE))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = TEMPLATE.read_text()
    return wrapped
