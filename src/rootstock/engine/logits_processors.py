"""Changes of a row of logits before a token is chosen: penalties, biases, and the mask of a constrained answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.engine.request import ResolvedSampling
from rootstock.text.constraints.progress import AnswerProgress, Banned, Forced, Masked

Row = NDArray[np.float32]  # [vocab] logits
Ids = NDArray[np.intp]

BIAS_LIMIT = 100.0  # OpenAI: -100 bans a token, 100 selects among the tokens that have it


def restrict(row: Row, eos: Ids, ends: Row, progress: AnswerProgress) -> None:
    """Bans the tokens that a constraint does not allow, in place.

    `ends` are the logits of the end tokens `eos` without bans.
    """
    match progress.restriction():
        case Forced(token):
            row[:] = -np.inf
            row[token] = 0.0
        case Banned(ids):
            row[ids] = -np.inf
        case Masked(forbidden, may_end):
            allowed = row[eos]
            row[forbidden] = -np.inf
            if may_end:
                row[eos] = allowed
                if row.max() == -np.inf:  # bans of the end do not count where only the end is left
                    row[eos] = ends


class Penalties:
    """Penalties of one request's tokens.

    Repetition, over prompt and output, divides positive logits and multiplies negative ones (CTRL). Presence and
    frequency, over the output, are subtracted once and once per occurrence (OpenAI).
    """

    def __init__(self, params: ResolvedSampling, ids: Ids) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        # The distinct tokens so far, in arrays that double when full: a step needs no Python loop.
        self._index = {int(token): index for index, token in enumerate(ids)}
        self._ids = ids
        self._counts = np.zeros(len(ids), dtype=np.float32)  # occurrences in the output

    @staticmethod
    def of(params: ResolvedSampling, prompt: Tokens, past: list[int], vocab_size: int) -> Penalties:
        repeats = params.repetition_penalty != 1.0
        in_prompt = np.unique(prompt) if repeats else np.empty(0, dtype=np.int32)
        # A prompt may hold ids that have an embedding and no logit.
        penalties = Penalties(params, in_prompt[in_prompt < vocab_size].astype(np.intp))
        for token in past:
            penalties.count(token)
        return penalties

    def count(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.intp)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[index] = token
        self._counts[index] += 1.0

    def apply(self, row: Row) -> None:
        ids = self._ids[: len(self._index)]
        counts = self._counts[: len(self._index)]
        values = row[ids]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._presence * (counts > 0) + self._frequency * counts
        row[ids] = values


@dataclass(frozen=True, slots=True)
class Bias:
    """Values that `logit_bias` adds to logits, and the tokens that it bans or selects."""

    added: tuple[Ids, Row]
    banned: Ids
    only: Ids  # if there are any, no other token may be chosen

    @staticmethod
    def of(params: ResolvedSampling, vocab_size: int) -> Bias | None:
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        if not bias:
            return None
        ids = np.array(list(bias), dtype=np.intp)
        values = np.array(list(bias.values()))  # in float32, a value below the limit can become the limit
        between = np.abs(values) < BIAS_LIMIT
        return Bias(
            added=(ids[between], values[between].astype(np.float32)),
            banned=ids[values <= -BIAS_LIMIT],
            only=ids[values >= BIAS_LIMIT],
        )

    def apply(self, row: Row) -> None:
        ids, values = self.added
        row[ids] += values
        row[self.banned] = -np.inf
        if self.only.size:
            allowed = row[self.only]
            row[:] = -np.inf
            row[self.only] = allowed
