"""What the logits of a tiny checkpoint should be: its own, by transformers and the modelling file's own attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from twins.architectures import OWN_DECODES_ARE_WRONG, OWN_PIECES_ARE_WRONG
from twins.driving import Dense
from twins.ways import Ran, random_cuts


class Reference:
    """What the logits should be, and how well the model itself meets that."""

    def __init__(self, model_type: str, directory: Path) -> None:
        self._dense = Dense(directory, attention="eager")
        self._decodes_are_wrong = model_type in OWN_DECODES_ARE_WRONG
        self._pieces_are_wrong = model_type in OWN_PIECES_ARE_WRONG
        self._one_pass: dict[bytes, NDArray[np.float32]] = {}

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """[tokens, vocab] of the model's one pass."""
        known = self._one_pass.get(tokens.tobytes())
        if known is None:
            known = self._one_pass[tokens.tobytes()] = self._dense.logits(tokens)
        return known

    def noise(self, runs: Iterable[Ran]) -> float:
        """The largest difference that the model's own cache makes on the same sequences; never less than a rounding
        of the logits."""
        runs = list(runs)
        largest_logit = max(float(np.abs(self.logits(run.tokens)).max()) for run in runs)
        own = self._continued_token_by_token(runs) if self._pieces_are_wrong else self._in_pieces(runs)
        return max(float(np.finfo(np.float32).eps) * largest_logit, *own)

    def noise_of(self, run: Ran) -> float:
        """Like `noise`, of one sequence, and in the pieces in which it was run as well."""
        noise = self.noise([run])
        if self._pieces_are_wrong or self._decodes_are_wrong:
            return noise
        own = self._dense.cached_logits(run.tokens[None], run.cuts)[0]
        return max(noise, largest_difference(own, self.logits(run.tokens)))

    def _continued_token_by_token(self, runs: Sequence[Ran]) -> Iterator[float]:
        """From where the runs were first cut, as models are run whose mixers cannot continue in pieces."""
        for start, tokens in {
            (run.cuts[0], run.tokens.tobytes()): run.tokens for run in runs if run.cuts
        }.items():
            cuts = range(start[0], len(tokens))
            yield largest_difference(self._dense.cached_logits(tokens[None], cuts)[0], self.logits(tokens))

    def _in_pieces(self, runs: Sequence[Ran]) -> Iterator[float]:
        """Prefilled and then decoded, from two positions, and in random pieces; all of one length at once. Without
        pieces of one token, if the model's own decodes are wrong: a mistake is not noise."""
        by_length: dict[int, dict[bytes, Tokens]] = {}
        for run in runs:
            by_length.setdefault(len(run.tokens), {})[run.tokens.tobytes()] = run.tokens
        for length, sequences in by_length.items():
            shortest = 2 if self._decodes_are_wrong else 1
            ways: list[Sequence[int]] = [random_cuts(length, seed, shortest) for seed in range(3)]
            if not self._decodes_are_wrong:
                ways += [range(length // 2, length), range(length // 8, length)]
            together = np.stack(list(sequences.values()))
            expected = np.stack([self.logits(tokens) for tokens in sequences.values()])
            for cuts in ways:
                # Products of one row are summed otherwise than those of many, so the first is also run alone.
                yield largest_difference(self._dense.cached_logits(together[:1], cuts), expected[:1])
                yield largest_difference(self._dense.cached_logits(together, cuts), expected)


def largest_difference(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Infinite if something is not a number."""
    difference = float(np.abs(ours - expected).max())
    return difference if np.isfinite(difference) else float("inf")
