"""Llamas of 80 and 600 million random weights, and a hybrid of 80 million, in bfloat16 as hub models lie on disk.

They are large enough that computing takes time, and small enough that every state of a restart can be measured often.
Their tokenizers differ: none, where prompts are token ids; the tests' small one; one with a visible piece of text for
each id, so that each token can be streamed; or the demo's, for chats.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from checkpoints import byte_level, chat_tokenizer, save_plain
from rootstock.bench.tiny_model import BEGIN, DEMO_SPEC, END, TURN_END, write_tiny_model

VOCAB = 32_000
CONTEXT_LIMIT = 8192
LONG_CONTEXT = 16_384
A_WORD = re.compile(r" [a-z]+")

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
_COMMON: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "vocab_size": VOCAB,
    "max_position_embeddings": LONG_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(name: str, folder: Path) -> Path:
    """Saves a model without a tokenizer."""
    fields = _COMMON | MODELS[name] | {"max_position_embeddings": CONTEXT_LIMIT}
    say(f"{name}: a Llama of random weights")
    return save_plain(folder / name, "llama", **fields)


def write_llama(directory: Path, vocab_size: int = VOCAB) -> Path:
    """Saves the 80M model of A6: 13 layers of full attention."""
    return save_plain(
        directory, "llama", chat_tokenizer(), **_COMMON | MODELS["80m"] | {"vocab_size": vocab_size}
    )


def write_hybrid(directory: Path) -> Path:
    """Saves a hybrid of 80M: three layers of linear attention (gated delta nets) to one of full attention."""
    fields = {
        "num_hidden_layers": 12,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 10,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }
    return save_plain(directory, "qwen3_5_text", chat_tokenizer(), **_COMMON | MODELS["80m"] | fields)


def write_streaming_llama(directory: Path, size: str = "80m") -> Path:
    return save_plain(directory, "llama", _visible_tokenizer(), **_COMMON | MODELS[size])


def _visible_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer of 32,000 pieces of ASCII. Without merges it encodes bytes, but decodes
    words."""
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "etaoinshrdlucmfwygpbvk"
    for first in letters:
        pieces += [f"\u0120{first}{b}{c}{d}" for b in letters for c in letters for d in letters[:3]]
    tokenizer = byte_level(models.BPE({piece: id for id, piece in enumerate(pieces[:VOCAB])}, []))
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def write_chatting_llama(name: str, directory: Path, **fields: int) -> Path:
    """Saves one of MODELS for chats. `fields` of its configuration override those of MODELS[name]."""
    own = {"max_position_embeddings": CONTEXT_LIMIT}
    return write_chatting(directory, "llama", **_COMMON | MODELS[name] | fields | own)


def write_chatting(directory: Path, model_type: str, **fields: Any) -> Path:
    """Saves a model for chats on any server: it answers in words, and never ends by itself.

    It has the tokenizer and the chat template of the demo's model. Only tokens that are one word with a blank before
    it can be generated: the rows of all others in the head are zero, and the best of a thousand random scores is far
    above zero. Hence answers have the requested length on every server, also on one that cannot ignore ends; text
    that is sent back as history gives the generated tokens; and each token is a chunk of a stream. `fields` are those
    of the configuration, with the dtype.
    """
    directory.mkdir()
    write_tiny_model(DEMO_SPEC, directory)  # of which only the files that concern text are kept
    (directory / "model.safetensors").unlink()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = torch.tensor(word_tokens(tokenizer))
    own = {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END),
        # Embeddings of their own, so that tokens that cannot be generated can still be read.
        "tie_word_embeddings": False,
    }
    save_plain(directory, model_type, **fields | own)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=fields["dtype"])
    with torch.no_grad():
        head = model.lm_head.weight[words].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[words] = head
    model.save_pretrained(directory)
    return directory


def word_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of whole words whose text is encoded as the same token."""
    decoded = {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}
    return [
        number
        for number, text in decoded.items()
        if A_WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False).ids == [number]
    ]


def random_prompts(count: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Draws [count, tokens] int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (count, tokens)).astype(np.int32)


def say(text: str) -> None:
    print(text, flush=True)
