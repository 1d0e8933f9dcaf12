"""Small models of random weights, written to disk as Hugging Face checkpoints. Tests and benchmarks make them here.

`tiny_model` and `save` make a model of any architecture, for comparisons of logits. Their weights are drawn wide
(std 0.3), and norms, biases and sinks are shaken too: with the usual initialisation attention is almost uniform, and
hardly any mistake in it would show. `save_plain` draws weights as transformers does, for any configuration.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from twins.architectures import ARCHITECTURES, COMMON, REFUSED, VOCAB

__all__ = ["SERVED", "VOCAB", "save", "save_plain", "saved", "tiny_model"]

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
    """Returns it in float32. `overrides` are fields of the configuration; None keeps its default."""
    known = AutoConfig.for_model(model_type)
    names = known.to_dict()
    common = {name: value for name, value in COMMON.items() if name in names}
    fields = common | (ARCHITECTURES | REFUSED).get(model_type, {}) | overrides
    fields = {name: value for name, value in fields.items() if value is not None}
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    model = _plain_model(type(known)(**fields), seed).eval()
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


_OF_THIS_PROCESS = tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


@functools.cache
def saved(model_type: str) -> Path:
    """Saves a model once for the process, for tests that do not change its files."""
    return save(Path(_OF_THIS_PROCESS.name) / model_type, model_type)


def save_plain(
    directory: Path,
    model_type: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Saves a model of the configuration that these fields give, and the tokenizer beside it.

    The model has more logits than its tokenizer has tokens, as most have: how many more differs by its type.
    """
    if tokenizer is not None:
        fields["vocab_size"] = padded(fields["vocab_size"], model_type)
    _plain_model(AutoConfig.for_model(model_type, **fields)).to(dtype).save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def padded(tokens: int, kind: str) -> int:
    """Returns a number of logits for so many tokens: 1 to 64 more, by the kind of model."""
    return tokens + 1 + sum(kind.encode()) % 64


def _plain_model(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# ------------------------------------------------------------------------------------------- a model to be served

SIMPLE_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def dense_greedy(directory: Path, prompt: str, count: int) -> str:
    """Generates with a saved model, by transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def save_served(directory: Path) -> Path:
    """Saves a Llama of two layers with a tokenizer of bytes and a chat template."""
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level(models.BPE({piece: id for id, piece in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = SIMPLE_TEMPLATE
    return save_plain(
        directory, "llama", wrapped, vocab_size=len(alphabet), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=0,
    )  # fmt: skip


def byte_level(model: models.BPE) -> Tokenizer:
    """Returns a tokenizer that reads bytes and writes them back."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# -------------------------------------------------------------- models of long chats, of every kind of family

CHAT_TEMPLATE = Path(__file__).parent / "text/prompts/templates/qwen3.jinja"
CHAT_VOCAB = 512
CHAT_WINDOW = 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens of their own, as in the models that the template is like. Generated, they are text.
_VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SLIDING, _LINEAR, _FULL = "sliding_attention", "linear_attention", "full_attention"
_CHAT: dict[str, Any] = {
    "vocab_size": CHAT_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Full attention alone; and three layers of recurrent states, or of sliding windows, to one of full attention.
CHAT_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "states": (
        "qwen3_next",
        {
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "windows": (
        "gemma3_text",
        {"layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL], "sliding_window": CHAT_WINDOW},
    ),
}


def save_chat(directory: Path, kind: str) -> Path:
    """Saves a model of a kind of `CHAT_KINDS` with `chat_tokenizer`."""
    model_type, fields = chat_fields(kind)
    return save_plain(directory, model_type, chat_tokenizer(), **fields)


def chat_fields(kind: str) -> tuple[str, dict[str, Any]]:
    """Returns the type of model and the fields of its configuration."""
    model_type, fields = CHAT_KINDS[kind]
    return model_type, _CHAT | fields


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Returns byte-level BPE with the chat template of Qwen3, trained on that template."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=CHAT_VOCAB - len(_VISIBLE),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CHAT_TEMPLATE.read_text()], trainer)
    tokenizer.add_tokens(list(_VISIBLE))
    assert tokenizer.get_vocab_size() == CHAT_VOCAB
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE.read_text()
    return wrapped
