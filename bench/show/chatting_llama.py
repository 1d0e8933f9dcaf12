"""A Llama of random weights that can be chatted with on any server: it answers in words, and never ends by itself.

It has the tokenizer and the chat template of the demo's model. Only tokens that are one word with a blank before it
can be generated: the rows of all others in the head are zero, and the best of a thousand random scores is far above
zero. Hence answers have the length that was asked for on every server, whether it can ignore ends or not; text that
is sent back as history gives the very tokens that were generated; and each token is a piece of a stream.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from llamas import CONTEXT_LIMIT, MODELS, VOCAB
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from rootstock.bench.tiny_model import BEGIN, DEMO_SPEC, END, TURN_END, write_tiny_model

A_WORD = re.compile(r" [a-z]+")


def write_chatting_llama(name: str, directory: Path, **fields: int) -> Path:
    """Writes the model in bfloat16. `fields` of its configuration override those of MODELS[name]."""
    directory.mkdir()
    write_tiny_model(DEMO_SPEC, directory)  # of which only what concerns text is kept
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = torch.tensor(word_tokens(tokenizer))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT_LIMIT,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END),
        # Embeddings of their own, so that tokens that cannot be generated can still be read.
        **{**MODELS[name], **fields, "tie_word_embeddings": False},
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        head = model.lm_head.weight[words].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[words] = head
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory)
    return directory


def word_tokens(tokenizer: Tokenizer) -> list[int]:
    """Those that are a whole word, and that its text is made into again."""
    decoded = {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}
    return [
        number
        for number, text in decoded.items()
        if A_WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False).ids == [number]
    ]
