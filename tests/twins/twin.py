"""A loaded model beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.runtime.base import Runtime
from twins.chunkings import Prompts, Served
from twins.driving import random_tokens
from twins.ways import Ran, Way

LENGTHS = (33, 22, 14, 9)  # of the sequences that run together
TOLERANCE = 1e-3  # of the standard deviation of the logits
ALLOWED_NOISE = 4.0  # times the noise of the model's own cache, which depends on the processor


@dataclass(frozen=True)
class Twin:
    """A model on a runtime with pools, and the logits [tokens, vocab] that its own library computes in one pass."""

    model_type: str
    runtime: Runtime
    logits: Callable[[Tokens], NDArray[np.float32]]
    tolerance: float = TOLERANCE
    noise: Callable[[Ran], float] = lambda ran: 0.0  # of the model's own cache on the same tokens

    @property
    def prompts(self) -> Prompts:
        return Prompts.drawn(0, self.runtime.description.vocab_size)

    def assert_agrees(self, way: Way) -> None:
        vocab = self.runtime.description.vocab_size
        sequences = [random_tokens(vocab, length, seed) for seed, length in enumerate(LENGTHS)]
        for ran in way(self.runtime, sequences):
            self.assert_right(ran)

    def assert_right(self, ran: Ran) -> None:
        expected = self.logits(ran.tokens)
        spread = float(expected.std())
        difference = largest_difference(ran.logits, expected[ran.first :]) / spread
        assert difference <= self.tolerance or difference <= ALLOWED_NOISE * self.noise(ran) / spread, (
            f"differs by {difference:.2g} of {len(ran.tokens)}, cut at {ran.cuts}"
        )

    def assert_steady(self, served: Served) -> None:
        for ran in served.ran:
            self.assert_right(ran)
        assert all(len(answers) == 1 for answers in served.answers.values())


def largest_difference(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Returns the largest absolute difference, and infinity if any value is not finite."""
    difference = float(np.abs(ours - expected).max())
    return difference if np.isfinite(difference) else float("inf")
