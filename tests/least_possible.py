"""Fewest prompt tokens that any prefix cache could compute for a played workload."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_target import TokenSample
from rootstock.bench.play import Played


class LeastPossible:
    """Count of the prompt tokens that the best possible prefix cache would compute: a trie of all known tokens.

    Calls come in the order of events. A prompt costs its tokens beyond those in the trie. If it has none, it costs
    its last token, whose logits are needed. The tokens of an answer are free, because decoding computed them. The
    last one was sampled and never computed.
    """

    def __init__(self) -> None:
        self.new_tokens = 0
        self.known_prompts = 0
        self._children: dict[tuple[int, int], int] = {}  # (node, token) → node; the root is 0

    @property
    def tokens(self) -> int:
        return self.new_tokens + self.known_prompts

    def forget_costs(self) -> None:
        """Resets the counts and keeps the known tokens."""
        self.new_tokens = self.known_prompts = 0

    def asked(self, prompt: NDArray[Any]) -> None:
        """Counts a prompt of at least one token."""
        new_tokens = self._insert(prompt)
        self.new_tokens += new_tokens
        self.known_prompts += new_tokens == 0

    def answered(self, prompt_and_answer: NDArray[Any]) -> None:
        self._insert(prompt_and_answer[:-1])

    def _insert(self, tokens: NDArray[Any]) -> int:
        """Adds tokens to the trie and returns the number of new nodes."""
        children, before, node = self._children, len(self._children), 0
        for token in tokens.tolist():
            node = children.setdefault((node, token), len(children) + 1)
        return len(children) - before


def least_possible(played: Played, before: Played | None = None) -> LeastPossible:
    """Counts the fewest prompt tokens that a cache could compute after `before` has run."""
    least = LeastPossible()
    if before is not None:
        _tell(before, least)
        least.forget_costs()
    _tell(played, least)
    return least


def _tell(played: Played, least: LeastPossible) -> None:
    events: list[tuple[float, int, TokenSample]] = []
    for sample in played.flat:
        assert isinstance(sample, TokenSample)
        events += [(sample.sent_at, 1, sample), (sample.ended_at, 0, sample)]
    events.sort(key=lambda event: event[:2])  # at one instant, ends come before new requests
    for _, sent, sample in events:
        if sent:
            least.asked(sample.prompt)
        elif sample.error is None:
            least.answered(np.concatenate([sample.prompt, sample.answer_tokens]))
