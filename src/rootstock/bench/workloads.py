"""Workloads: the requests of clients, a pure function of a seed and sizes.

A workload consists of *symbols*, numbers below `ALPHABET`. A target turns them into its prompts: words over HTTP
(`as_text`). A model's answer becomes part of the next turn's prompt, so prompts are known only while the workload
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rootstock.bench.corpus import ADJECTIVES, NOUNS, VERBS
from rootstock.errors import InvalidOption

Symbols = NDArray[np.int32]

ALPHABET = 1024
_WORDS = tuple(dict.fromkeys(NOUNS + VERBS + ADJECTIVES))[:ALPHABET]
assert len(_WORDS) == ALPHABET


@dataclass(frozen=True, slots=True)
class Sizes:
    conversations: int
    at_once: int  # conversations that are open at one time
    turns: int
    prefix_tokens: int  # length of the prefix that all conversations share
    new_tokens: tuple[int, int]  # least and most tokens that a turn adds
    answer_tokens: int

    def scaled(self, factor: float) -> Sizes:
        """Returns sizes with longer or shorter prompts; answers and numbers of requests stay."""
        least, most = self.new_tokens
        return replace(
            self,
            prefix_tokens=max(1, round(self.prefix_tokens * factor)),
            new_tokens=(max(1, round(least * factor)), max(1, round(most * factor))),
        )


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    new: Symbols  # the message of a user or a tool; at least one symbol
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadConversation:
    prefix: Symbols
    turns: tuple[WorkloadTurn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    seed: int
    sizes: Sizes
    conversations: tuple[WorkloadConversation, ...]

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


# The sizes suit a small model on a small machine; `scaled` makes longer prompts of them.
SIZES: dict[str, Sizes] = {
    # Agents with one system prompt and tool list; tools answer with a line or with a page.
    "agents": Sizes(8, 8, turns=6, prefix_tokens=1536, new_tokens=(16, 160), answer_tokens=32),
    # Chats of people: a short system prompt, and more conversations than are open at one time.
    "chat": Sizes(16, 8, turns=5, prefix_tokens=96, new_tokens=(8, 64), answer_tokens=48),
    # Many short questions after the same long examples.
    "fewshot": Sizes(48, 8, turns=1, prefix_tokens=1536, new_tokens=(16, 32), answer_tokens=8),
    # All conversations at one instant: the second request arrives before anything is cached.
    "burst": Sizes(32, 32, turns=1, prefix_tokens=1024, new_tokens=(16, 48), answer_tokens=16),
}


def make_workload(name: str, seed: int = 0, sizes: Sizes | None = None) -> Workload:
    """Makes the workload of a name in SIZES. Raises InvalidOption for any other name."""
    if name not in SIZES:
        raise InvalidOption("--workload", name, " | ".join(SIZES))
    sizes = sizes or SIZES[name]
    rng = np.random.default_rng([seed, *name.encode()])
    prefix = _symbols(rng, sizes.prefix_tokens)
    least, most = sizes.new_tokens

    def turn() -> WorkloadTurn:
        return WorkloadTurn(_symbols(rng, int(rng.integers(least, most + 1))), sizes.answer_tokens)

    conversations = tuple(
        WorkloadConversation(prefix, tuple(turn() for _ in range(sizes.turns)))
        for _ in range(sizes.conversations)
    )
    return Workload(name, seed, sizes, conversations)


def as_text(symbols: Symbols) -> str:
    return " ".join(_WORDS[symbol] for symbol in symbols.tolist())


def _symbols(rng: np.random.Generator, count: int) -> Symbols:
    return rng.integers(0, ALPHABET, count, dtype=np.int32)
