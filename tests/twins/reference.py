"""Reference logits of a tiny checkpoint, by transformers with the modelling file's own attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from twins.architectures import OWN_DECODES_ARE_WRONG, OWN_PIECES_ARE_WRONG
from twins.torch_models import Dense
from twins.twin import largest_difference
from twins.ways import Ran, random_cuts


class Reference:
    """Logits of one pass, and the noise of the model's own cache relative to them."""

    def __init__(self, model_type: str, directory: Path) -> None:
        self._dense = Dense(directory, attention="eager")
        self._decodes_are_wrong = model_type in OWN_DECODES_ARE_WRONG
        self._pieces_are_wrong = model_type in OWN_PIECES_ARE_WRONG
        self._one_pass: dict[bytes, NDArray[np.float32]] = {}

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """Returns [tokens, vocab] of the model's one pass."""
        known = self._one_pass.get(tokens.tobytes())
        if known is None:
            known = self._one_pass[tokens.tobytes()] = self._dense.logits(tokens)
        return known

    def noise(self, runs: Iterable[Ran]) -> float:
        """Returns the largest difference that the model's own cache makes on the same sequences, and at least a
        rounding of the logits."""
        runs = list(runs)
        largest_logit = max(float(np.abs(self.logits(run.tokens)).max()) for run in runs)
        own = self._continued_token_by_token(runs) if self._pieces_are_wrong else self._in_pieces(runs)
        return max(float(np.finfo(np.float32).eps) * largest_logit, *own)

    def noise_of(self, run: Ran) -> float:
        """Returns the noise of one sequence, also cut as in its run."""
        noise = self.noise([run])
        if self._pieces_are_wrong or self._decodes_are_wrong:
            return noise
        own = self._dense.cached_logits(run.tokens[None], run.cuts)[0]
        return max(noise, largest_difference(own, self.logits(run.tokens)))

    def _continued_token_by_token(self, runs: Sequence[Ran]) -> Iterator[float]:
        """Continues runs from their first cut token by token, for models whose mixers cannot continue in pieces."""
        for start, tokens in {
            (run.cuts[0], run.tokens.tobytes()): run.tokens for run in runs if run.cuts
        }.items():
            cuts = range(start[0], len(tokens))
            yield largest_difference(self._dense.cached_logits(tokens[None], cuts)[0], self.logits(tokens))

    def _in_pieces(self, runs: Sequence[Ran]) -> Iterator[float]:
        """Runs sequences of one length at once: prefilled and then decoded, from two positions, and in random pieces.

        There are no pieces of one token if the model's own decodes are wrong: a mistake is not noise.
        """
        by_length: dict[int, dict[bytes, Tokens]] = {}
        for run in runs:
            by_length.setdefault(len(run.tokens), {})[run.tokens.tobytes()] = run.tokens
        for length, sequences in by_length.items():
            shortest = 2 if self._decodes_are_wrong else 1
            ways: list[Sequence[int]] = [random_cuts(length, seed, shortest) for seed in range(3)]
            if not self._decodes_are_wrong:
                ways += [range(max(1, length // part), length) for part in (2, 8)]
            together = np.stack(list(sequences.values()))
            expected = np.stack([self.logits(tokens) for tokens in sequences.values()])
            for cuts in ways:
                # Products of one row are summed in another order than those of many: the first also runs alone.
                yield largest_difference(self._dense.cached_logits(together[:1], cuts), expected[:1])
                yield largest_difference(self._dense.cached_logits(together, cuts), expected)
