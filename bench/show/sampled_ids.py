"""Answers that are cut into tokens at random places, which is never the choice of the tokenizer: a part of G2.

- plain answers, sampled at temperature 1 on the oracle runtime;
- answers with reasoning and a call, in turns of tool calls. The model writes compact JSON, the client sends it back
  in another order and with other spacing, and the template prints a spacing of its own.

A figure is the share of the sampled tokens with which the next prompt begins, behind the prompt before them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.helpers import Bench
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import StopParams
from rootstock.text.prompts.prompt_tokenizer import ChatPrompt, PromptTokenizer, chat_prompt, escaped
from rootstock.text.prompts.tenant_salt import ANYBODY
from rootstock.text.prompts.text_alignment import shared
from text.prompts.chat_tokenizers import template_of
from text.prompts.test_splicing import TOOLS, VISIBLE, hf_tokenizer, id_of, own_tokens, token_of

Message = dict[str, Any]
END = "<|im_end|>"
WORDS = ["the tool", "answers", "reader", "asks", "and then", "library", "é", "w17"]


@dataclass
class Counts:
    sampled: int = 0
    found: int = 0

    def add(self, prompt: ChatPrompt, ids: Sequence[int], following: ChatPrompt) -> None:
        cached = np.concatenate((prompt.tokens, np.array(ids, np.int32)))
        self.sampled += len(ids)
        self.found += max(0, shared(following.tokens, cached) - len(prompt.tokens))

    @property
    def share(self) -> float:
        return round(self.found / self.sampled, 4)


def cut_at_random(tokenizer: PromptTokenizer, text: str, rng: random.Random) -> list[int]:
    """Returns random tokens that spell a text."""
    known, raw, ids = token_of(tokenizer.model_tokenizer), text.encode(), []
    while raw:
        length = rng.choice([n for n in range(1, 9) if raw[:n] in known])
        ids.append(known[raw[:length]])
        raw = raw[length:]
    return ids


def ids_of(tokenizer: PromptTokenizer, parts: Sequence[str], rng: random.Random) -> list[int]:
    return [
        id
        for part in parts
        for id in (
            [id_of(tokenizer, part)] if part in (*VISIBLE, END) else cut_at_random(tokenizer, part, rng)
        )
    ]


def prompt_of(
    tokenizer: PromptTokenizer, messages: Sequence[Message], tools: Sequence[Any] = ()
) -> ChatPrompt:
    return chat_prompt(
        escaped(template_of(tokenizer.model_tokenizer, messages, tools), tokenizer), tokenizer, ANYBODY
    )


def said(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))


def plain(tokenizer: PromptTokenizer, rng: random.Random, counts: Counts) -> None:
    model_tokenizer = tokenizer.model_tokenizer
    bench = Bench(4_000, vocab_size=800, tokenizer=model_tokenizer)
    hidden = {id: -1e9 for id in range(800) if model_tokenizer.is_added(id)}
    messages: list[Message] = [{"role": "user", "content": said(rng)}]
    for _ in range(6):
        prompt = prompt_of(tokenizer, messages)
        sampling = ResolvedSampling(temperature=1.0, logit_bias=hidden, seed=rng.randrange(2**31))
        stop = StopParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
        client = bench.answer(prompt.tokens, sampling=sampling, stop=stop, place=prompt.place)
        messages += [{"role": "assistant", "content": client.text}, {"role": "user", "content": said(rng)}]
        counts.add(prompt, client.tokens, prompt_of(tokenizer, messages))


def reasoning_and_calls(tokenizer: PromptTokenizer, rng: random.Random, counts: Counts) -> None:
    messages: list[Message] = [{"role": "user", "content": said(rng)}]
    for step in range(6):
        prompt = prompt_of(tokenizer, messages, TOOLS)
        thought, id = said(rng), f"call_{step}"
        arguments = {"word": said(rng), "count": rng.randint(0, 99), "of": [said(rng), None, True, 1.5]}
        body = json.dumps(
            {"name": "look_up", "arguments": arguments}, separators=(",", ":"), ensure_ascii=False
        )
        call = ["<tool_call>", f"\n{body}\n", "</tool_call>"]
        ids = ids_of(tokenizer, ["<think>", f"\n{thought}\n", "</think>", "\n\n", *call, END], rng)
        prompt.place.remember(ids)
        prompt.place.remember_call(id, "look_up", arguments, "".join(call))
        returned = json.dumps(dict(reversed(arguments.items())), indent=rng.choice([None, 2]))
        function = {"name": "look_up", "arguments": returned}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": thought,
                "tool_calls": [{"id": id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": id, "content": said(rng)},
        ]
        counts.add(prompt, ids, prompt_of(tokenizer, messages, TOOLS))


def shares_found(conversations: int, memory_bytes: int) -> tuple[dict[str, float], int]:
    """Returns the share of each kind of answer, and the number of all sampled tokens."""
    kinds: dict[str, tuple[str, Callable[[PromptTokenizer, random.Random, Counts], None]]] = {
        "plain": ("chatml", plain),
        "reasoning_and_calls": ("qwen3", reasoning_and_calls),
    }
    told, sampled = {}, 0
    for name, (template, run) in kinds.items():
        counts = Counts()
        for seed in range(conversations):
            run(PromptTokenizer(hf_tokenizer(template), 10**6, memory_bytes), random.Random(seed), counts)
        told[name] = counts.share
        sampled += counts.sampled
    return told, sampled


def first_prompt_is_the_tokenizers() -> bool:
    """Returns whether a prompt without sampled tokens has the tokenizer's own tokens."""
    tokenizer = PromptTokenizer(hf_tokenizer("chatml"), 10**6)
    messages = [{"role": "user", "content": "What is a tree?"}]
    return bool(np.array_equal(prompt_of(tokenizer, messages).tokens, own_tokens(tokenizer, messages)))
