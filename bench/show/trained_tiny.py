"""Three tiny models of different kinds that were trained for a minute on the demo's text, byte by byte.

Random weights do not show the effect of rounding on greedy answers: their best two tokens are near ties, and any
error changes the answer. Trained ones are sure of most of their next bytes, like models in use.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from llamas import say
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from rootstock.bench.corpus import paragraph

VOCAB = 256
TOKENS, SEQUENCES = 160, 12  # of a training step
STEPS = 300
LEARNING_RATE = 3e-3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def models() -> dict[str, PreTrainedModel]:
    """Makes three kinds: the usual; windows and full attention, with norms on all sides; and one with biases and
    attention beside the MLP."""
    torch.manual_seed(0)
    sliding, full = "sliding_attention", "full_attention"
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=4)),
        "gemma3": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_COMMON,
                num_hidden_layers=4,
                layer_types=[sliding, sliding, sliding, full],
                sliding_window=64,
                query_pre_attn_scalar=32,
            )
        ),
        "gpt_neox": GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=VOCAB,
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=2048,
                bos_token_id=None,
                eos_token_id=None,
            )
        ),
    }


def text_tokens(seed: int, tokens: int) -> torch.Tensor:
    """Returns [tokens] bytes of the seed's own text."""
    rng, text = random.Random(seed), b""
    while len(text) < tokens:
        text += paragraph(rng, 60).encode("ascii", "ignore") + b"\n"
    return torch.tensor(list(text[:tokens]))


def train_and_save(name: str, model: PreTrainedModel, directory: Path) -> Path:
    """Trains in float32 with AdamW."""
    text = text_tokens(1, 400_000)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    picks = torch.Generator().manual_seed(2)
    losses = []
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(STEPS):
            starts = torch.randint(0, len(text) - TOKENS, (SEQUENCES,), generator=picks)
            batch = torch.stack([text[start : start + TOKENS] for start in starts.tolist()])
            loss = model(batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    say(f"{name}: trained, {sum(losses[-20:]) / 20:.2f} nats a byte, {losses[0]:.2f} before")
    model.eval().save_pretrained(directory / name)
    return directory / name
