"""Workloads: what clients ask, as a pure function of a seed and sizes.

A workload is made of *symbols*, numbers below `ALPHABET`. Targets turn them into what they speak: token ids in
process (`as_tokens`), words over HTTP (`as_text`). What a model answers becomes part of the next turn's prompt, so
prompts are known only as the workload runs; the least that could be computed is therefore counted afterwards, from
the prompts and answers that there were (`LeastPossible`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock.bench.corpus import ADJECTIVES, NOUNS, VERBS
from rootstock.cache.plan import Tokens
from rootstock.errors import InvalidOption

Symbols = NDArray[np.int32]

ALPHABET = 1024
_WORDS = tuple(dict.fromkeys(NOUNS + VERBS + ADJECTIVES))[:ALPHABET]
assert len(_WORDS) == ALPHABET

# Ids of small value are special in most vocabularies.
_FIRST_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    conversations: int
    at_once: int  # conversations that are open at one time
    turns: int
    prefix_tokens: int  # that all conversations begin with
    new_tokens: tuple[int, int]  # least and most that a turn adds
    answer_tokens: int

    def scaled(self, factor: float) -> Sizes:
        """With longer or shorter prompts; answers and numbers of requests stay."""
        least, most = self.new_tokens
        return replace(
            self,
            prefix_tokens=max(1, round(self.prefix_tokens * factor)),
            new_tokens=(max(1, round(least * factor)), max(1, round(most * factor))),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    new: Symbols  # what the user or a tool says; at least one
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    prefix: Symbols
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    seed: int
    sizes: Sizes
    conversations: tuple[Conversation, ...]

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


# The sizes suit a small model on a small machine; `scaled` makes longer prompts of them.
SIZES: dict[str, Sizes] = {
    # Agents with one system prompt and tool list; tools answer with a line or with a page.
    "agents": Sizes(8, 8, turns=6, prefix_tokens=1536, new_tokens=(16, 160), answer_tokens=32),
    # People who chat: a short system prompt, and more of them than are served at one time.
    "chat": Sizes(16, 8, turns=5, prefix_tokens=96, new_tokens=(8, 64), answer_tokens=48),
    # Many short questions after the same long examples.
    "fewshot": Sizes(48, 8, turns=1, prefix_tokens=1536, new_tokens=(16, 32), answer_tokens=8),
    # Everybody at one instant: nothing is cached yet when the second request comes.
    "burst": Sizes(32, 32, turns=1, prefix_tokens=1024, new_tokens=(16, 48), answer_tokens=16),
}


def make_workload(name: str, seed: int = 0, sizes: Sizes | None = None) -> Workload:
    """Raises InvalidOption if there is none of that name."""
    if name not in SIZES:
        raise InvalidOption("--workload", name, " | ".join(SIZES))
    sizes = sizes or SIZES[name]
    rng = np.random.default_rng([seed, *name.encode()])
    prefix = _symbols(rng, sizes.prefix_tokens)
    least, most = sizes.new_tokens

    def turn() -> Turn:
        return Turn(_symbols(rng, int(rng.integers(least, most + 1))), sizes.answer_tokens)

    conversations = tuple(
        Conversation(prefix, tuple(turn() for _ in range(sizes.turns))) for _ in range(sizes.conversations)
    )
    return Workload(name, seed, sizes, conversations)


def as_tokens(symbols: Symbols, vocab_size: int) -> Tokens:
    """Token ids; of different symbols different ones, if the vocabulary is large enough."""
    first = _FIRST_TOKEN if vocab_size >= _FIRST_TOKEN + ALPHABET else 0
    return np.asarray(first + symbols % (vocab_size - first), np.int32)


def as_text(symbols: Symbols) -> str:
    return " ".join(_WORDS[symbol] for symbol in symbols.tolist())


def _symbols(rng: np.random.Generator, count: int) -> Symbols:
    return rng.integers(0, ALPHABET, count, dtype=np.int32)


class LeastPossible:
    """How many prompt tokens the best imaginable prefix cache would have computed: a trie of everything known.

    Told in the order of events. A prompt costs its tokens beyond what the trie holds, and if that is nothing its
    last one, for whose logits it was sent. What an answer adds is free: decoding computed it, all but its last
    token, which was sampled and never fed.
    """

    def __init__(self) -> None:
        self.new_tokens = 0
        self.known_prompts = 0
        self._children: dict[tuple[int, int], int] = {}  # (node, token) → node; the root is 0

    @property
    def tokens(self) -> int:
        return self.new_tokens + self.known_prompts

    def forget_costs(self) -> None:
        """What is known stays."""
        self.new_tokens = self.known_prompts = 0

    def asked(self, prompt: NDArray[Any]) -> None:
        """`prompt` has at least one token."""
        new_tokens = self._insert(prompt)
        self.new_tokens += new_tokens
        self.known_prompts += new_tokens == 0

    def answered(self, prompt_and_answer: NDArray[Any]) -> None:
        self._insert(prompt_and_answer[:-1])

    def _insert(self, tokens: NDArray[Any]) -> int:
        """How many nodes are new."""
        children, before, node = self._children, len(self._children), 0
        for token in tokens.tolist():
            node = children.setdefault((node, token), len(children) + 1)
        return len(children) - before
