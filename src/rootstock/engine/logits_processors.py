"""Parameters of sampling and what they change: penalties, biases and the mask of a constrained answer on a row of
logits, then temperature and filters of the draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.text.constraints.progress import AnswerProgress, Banned, Forced, Masked

Row = NDArray[np.float32]  # [vocab] logits, or weights made of them
Ids = NDArray[np.intp]

# Dividing by less than this overflows float32. At this temperature only the largest token has any weight.
_LEAST_TEMPERATURE = 1e-6
_CHUNK = 1024
GROUP = 64  # values whose maximum stands for them in a search
BIAS_LIMIT = 100.0  # OpenAI: -100 bans a token, 100 selects among the tokens that have it


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Parameters of sampling. Filters apply in this order: penalties and bias, temperature, top-k, top-p, min-p.

    `temperature` 0 is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, Keskar et al. 2019)
    presence_penalty: float = 0.0  # over the output, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: the engine draws one
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's alone; n: also the n best

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


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


# ---- drawing


def draw(row: Row, best: int, params: ResolvedSampling, uniform: float) -> int:
    """Inverts the cumulative distribution of `row` at `uniform` in [0, 1), after temperature and filters."""
    temperature = max(params.temperature, _LEAST_TEMPERATURE)
    top = row[best]
    if params.top_k > 0:
        ids = best_ids(row, params.top_k)
        weights = _weights(row[ids], top, temperature)
        mass = params.top_p * float(weights.sum(dtype=np.float64))
        kept = len(ids) if params.top_p >= 1.0 else _reach(weights, mass)
        ids, weights = ids[:kept], weights[:kept]
    elif params.top_p < 1.0:
        weights = _weights(row, top, temperature)
        ids = _nucleus(weights, params.top_p)
        weights = weights[ids]
    else:
        weights = _weights(row, top, temperature)
        ids = None
    if params.min_p > 0.0:
        probable = np.flatnonzero(weights >= params.min_p)  # the best token's weight is 1
        ids = probable if ids is None else ids[probable]
        weights = weights[probable]
    picked = _pick(weights, uniform)
    return picked if ids is None else int(ids[picked])


def _weights(logits: Row, top: np.float32, temperature: float) -> Row:
    """Computes exp((logits - top) / temperature): proportional to the probabilities, 1 for the best token."""
    weights = logits - top
    weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _reach(weights: Row, mass: float) -> int:
    """Counts the first `weights` whose sum reaches `mass`; at least one."""
    return int(np.searchsorted(np.cumsum(weights, dtype=np.float64), mass, side="left")) + 1


def _nucleus(weights: Row, top_p: float) -> Ids:
    """Returns the ids, ascending, of the fewest weights that sum to `top_p` of the total; ties to the lowest id.

    Avoids sorting the vocabulary: weights are counted in bins, and only the bin on the border is sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    # All lighter weights together are less than 1 - top_p of the total.
    ids = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    weights = weights[ids]
    # Positive floats have the order of their bits. The upper half makes 128 bins per power of two.
    bins = weights.view(np.uint32) >> 16
    reached = np.cumsum(np.bincount(bins, weights)[::-1])  # from the heaviest bin down
    mass = top_p * total
    passed = int(np.searchsorted(reached, mass, side="left"))
    if passed == len(reached):  # because of rounding
        return ids
    border = len(reached) - 1 - passed
    kept = bins > border
    on_border = np.flatnonzero(bins == border)
    on_border = on_border[np.argsort(-weights[on_border], kind="stable")]
    missing = mass - (float(reached[passed - 1]) if passed else 0.0)
    kept[on_border[: _reach(weights[on_border], missing)]] = True
    return ids[kept]


def _pick(weights: Row, uniform: float) -> int:
    """Finds the index whose share of the cumulated weights holds `uniform`. In chunks: cumulated sums are slow."""
    start = 0
    if len(weights) > 2 * _CHUNK:
        starts = np.arange(0, len(weights), _CHUNK)
        sums = np.add.reduceat(weights, starts)
        chunk, offset = _invert(sums, uniform * float(sums.sum(dtype=np.float64)))
        start = int(starts[chunk])
        weights = weights[start : start + _CHUNK]
    else:
        offset = uniform * float(weights.sum(dtype=np.float64))
    return start + _invert(weights, offset)[0]


def _invert(weights: Row, target: float) -> tuple[int, float]:
    """Finds the first index whose cumulated weight exceeds `target`, and the offset of `target` in it."""
    reached = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(reached, target, side="right"))
    if index == len(weights):  # `target` was rounded up to the total: the last one that has any weight
        index = int(np.flatnonzero(weights)[-1])
    return index, target - (float(reached[index - 1]) if index else 0.0)


def best_ids(row: Row, count: int) -> Ids:
    """Returns the ids of the `count` largest values, best first, ties to the lowest id; fewer if `row` is shorter.

    The `count`-th largest of the maxima of disjoint groups is a lower bound of the `count`-th largest value and is
    cheap to find. Only the few values above it are sorted.
    """
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, dtype=np.intp)
    grouped = len(row) // GROUP
    if count <= grouped // 4:
        maxima = row[: grouped * GROUP].reshape(grouped, GROUP).max(axis=1)
        candidates = np.flatnonzero(row >= np.partition(maxima, -count)[-count])
    else:
        candidates = np.arange(len(row))
    if len(candidates) > 4 * count:  # a large part of the vocabulary, or many ties
        values = row[candidates]
        least = np.partition(values, -count)[-count]
        above = values > least
        ties = np.flatnonzero(values == least)[: count - int(above.sum())]
        above[ties] = True
        candidates = candidates[above]
    order = np.argsort(-row[candidates], kind="stable")[:count]
    return candidates[order]
