"""Tokenizers of two kinds with the chat templates of common models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import TemplateInput, template_input
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
# Many newer templates open the reasoning at the end of the prompt.
TEMPLATES["qwen3_thinking"] = TEMPLATES["qwen3"].replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
)
WITHOUT_TOOLS = ("gemma", "strict")

_SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>",
    "<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|output|>",
]  # fmt: skip
_TEXT = (
    "You are a helpful assistant of a small library. The reader asks, the tool answers, and then you say what it "
    "means. Done. Well. Go on. Yes? No? system user assistant tool function name arguments look up word count"
)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Trains a tokenizer of a kind.

    'bytes': byte-level BPE within words. 'pieces': like SentencePiece, with a space before each text and merges
    across words.
    """
    tokenizer = Tokenizer(models.BPE())
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
        alphabet = [*map(chr, range(32, 127)), "\n", "\u2581", "é", "\ue000"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT, _TEXT.replace(" ", "\n"), *_TEXT.split(" ")], trainer)
    return tokenizer


@functools.cache
def chat_tokenizer(template: str, kind: str = "bytes") -> HFTokenizer:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind), eos_token="<|im_end|>")
    return HFTokenizer(wrapped, TEMPLATES[template])


def template_of(
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> TemplateInput:
    """Translates OpenAI's messages and tools to the arguments of the tokenizer's template."""
    return template_input(conversation_of(messages, tools, options=options), tokenizer)
