"""Choosing the next token from a row of logits.

One `Sampler` serves one request. Its choice depends on the logits, the request's seed and the index of the token, and
not on the batch or on preemptions. The code is NumPy on whole rows. A vocabulary of 150,000 is never sorted, only
searched for candidates (`best_ids`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.engine.logits_processors import BIAS_LIMIT, Bias, Penalties, restrict
from rootstock.engine.request import Logprobs, ResolvedSampling, TokenLogprob
from rootstock.errors import SamplingFailed
from rootstock.text.constraints.progress import AnswerProgress

Row = NDArray[np.float32]  # [vocab] logits, or weights made of them
Rows = NDArray[np.float32]  # [rows, vocab] logits
Ids = NDArray[np.intp]

# Dividing by less than this overflows float32. At this temperature only the largest token has any weight.
_LEAST_TEMPERATURE = 1e-6
_CHUNK = 1024
_GROUP = 64
_SCORED_AT_ONCE = 128 * 1024  # logits: their exponentials fit into a core's cache


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: TokenLogprob | None
    completes_answer: bool = False  # the request's grammar allows nothing but the end


class Sampler:
    """Sampler of one request's tokens, one call of `sample` per token.

    The tokens in `eos` end the answer and are banned before `min_tokens` tokens. `generated` are the tokens of an
    earlier sampler of the same request: this one continues exactly after them. `progress` belongs to a constrained
    answer and is at its beginning. Its restriction applies after penalties and bias, and before temperature and
    filters. Where other bans leave no token that it allows, they do not count.
    """

    def __init__(
        self,
        params: ResolvedSampling,
        prompt: Tokens,
        vocab_size: int,
        seed: int,
        eos: tuple[int, ...] = (),
        min_tokens: int = 0,
        generated: Iterable[int] = (),
        progress: AnswerProgress | None = None,
    ) -> None:
        past = [int(token) for token in generated]
        self._params = params
        self._vocab_size = vocab_size
        self._eos = np.array([token for token in eos if 0 <= token < vocab_size], dtype=np.intp)
        self._min_tokens = min_tokens
        self._bias = Bias.of(params, vocab_size) if params.logit_bias else None
        self._penalties = None
        if params.has_penalties:
            self._penalties = Penalties.of(params, prompt, past, vocab_size)
        self._sampled = len(past)
        self._draws = None if params.greedy else _draws_from(seed, len(past))
        self._ends = frozenset(self._eos.tolist())
        self.progress = progress
        if progress is not None:
            for token in past:
                progress.accept(token)

    def sample(self, logits: Row) -> SampledToken:
        """Samples the next token from `logits` [vocab], which stay unchanged.

        Raises SamplingFailed and ConstraintFailed.
        """
        assert logits.shape == (self._vocab_size,), logits.shape
        best = int(logits.argmax())  # the first NaN if there is one, else the lowest id of the largest
        if not np.isfinite(logits[best]):
            raise SamplingFailed(f"the model gave the logit {logits[best]} for token {best}")

        row = self._edited(logits)
        if row is not logits:
            best = int(row.argmax())
            if row[best] == -np.inf and self.progress is not None:
                row = self._only_restricted(logits, self.progress)
                best = int(row.argmax())
            if row[best] == -np.inf:
                raise SamplingFailed(self._why_nothing_is_left())
        token = best if self._draws is None else _draw(row, best, self._params, _uniform(self._draws))

        self._sampled += 1
        if self._penalties is not None:
            self._penalties.count(token)
        if self.progress is not None and token not in self._ends:
            self.progress.accept(token)
        top = self._params.top_logprobs
        return SampledToken(token, None if top is None else _logprob(logits, token, top))

    def _edited(self, logits: Row) -> Row:
        """Returns an edited copy, or `logits` itself if there is nothing to edit."""
        too_early = self._sampled < self._min_tokens and self._eos.size > 0
        if self._penalties is None and self._bias is None and self.progress is None and not too_early:
            return logits
        row = logits.copy()
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias is not None:
            self._bias.apply(row)
        ends = row[self._eos]
        if too_early:
            row[self._eos] = -np.inf
        if self.progress is not None:
            restrict(row, self._eos, ends, self.progress)
        return row

    def _only_restricted(self, logits: Row, progress: AnswerProgress) -> Row:
        """Returns a copy that is edited by the constraint alone, whose tokens the other bans all forbid."""
        row = logits.copy()
        restrict(row, self._eos, row[self._eos], progress)
        return row

    def _why_nothing_is_left(self) -> str:
        constraint = "" if self.progress is None else "the request's grammar, "
        return f"{constraint}logit_bias and min_tokens leave no token that may be chosen"


def leaves_no_token(params: ResolvedSampling, vocab_size: int, ends: Iterable[int], min_tokens: int) -> bool:
    """Returns whether `logit_bias`, and `min_tokens` with the end tokens, ban the whole vocabulary."""
    forbidden = {token for token in ends if 0 <= token < vocab_size} if min_tokens > 0 else set()
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    forbidden |= {token for token, value in bias.items() if value <= -BIAS_LIMIT}
    only = {token for token, value in bias.items() if value >= BIAS_LIMIT}
    return only <= forbidden if only else len(forbidden) >= vocab_size


def score_prompt(logits: Rows, next_tokens: Tokens, top: int) -> Logprobs:
    """Returns the log-probabilities of `next_tokens` [rows] under `logits` [rows, vocab], with each row's `top` best.

    Raises SamplingFailed.
    """
    assert len(logits) == len(next_tokens), (logits.shape, next_tokens.shape)
    vocab_size = logits.shape[1]
    at_once = max(1, _SCORED_AT_ONCE // vocab_size)
    scratch = np.empty((at_once, vocab_size), dtype=np.float32)
    pieces = [slice(at, at + at_once) for at in range(0, max(1, len(logits)), at_once)]
    return Logprobs.joined([_score(logits[rows], next_tokens[rows], top, scratch) for rows in pieces])


def best_ids(row: Row, count: int) -> Ids:
    """Returns the ids of the `count` largest values, best first, ties to the lowest id; fewer if `row` is shorter.

    The `count`-th largest of the maxima of disjoint groups is a lower bound of the `count`-th largest value and is
    cheap to find. Only the few values above it are sorted.
    """
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, dtype=np.intp)
    grouped = len(row) // _GROUP
    if count <= grouped // 4:
        maxima = row[: grouped * _GROUP].reshape(grouped, _GROUP).max(axis=1)
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


# ---- drawing


def _draw(row: Row, best: int, params: ResolvedSampling, uniform: float) -> int:
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


def _draws_from(seed: int, index: int) -> np.random.Philox:
    """Returns the seed's random numbers from the `index`-th on. Philox is counter-based: it can start anywhere."""
    draws = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF)
    draws.advance(index // 4)  # a step of the counter makes four numbers
    for _ in range(index % 4):
        draws.random_raw()
    return draws


def _uniform(draws: np.random.Philox) -> float:
    return (int(draws.random_raw()) >> 11) * 2.0**-53


# ---- log-probabilities


def _logprob(row: Row, token: int, top: int) -> TokenLogprob:
    largest = row.max()
    log_total = float(largest) + float(np.log(np.exp(row - largest).sum()))
    if not np.isfinite(log_total):
        raise SamplingFailed(_NOT_FINITE)
    best = tuple((int(id), float(row[id]) - log_total) for id in best_ids(row, top))
    return TokenLogprob(token, float(row[token]) - log_total, best)


def _score(logits: Rows, tokens: Tokens, top: int, scratch: Rows) -> Logprobs:
    """Computes `_logprob`, bit for bit, for several rows at once. `scratch` has at least as many rows."""
    largest = logits.max(axis=1, keepdims=True)
    weights = np.subtract(logits, largest, out=scratch[: len(logits)])
    np.exp(weights, out=weights)
    log_totals = largest.astype(np.float64) + np.log(weights.sum(axis=1, keepdims=True)).astype(np.float64)
    if not np.isfinite(log_totals).all():
        raise SamplingFailed(_NOT_FINITE)
    best = _best_ids_of_rows(logits, top)
    scored = np.take_along_axis(logits, tokens[:, None].astype(np.intp), axis=1) - log_totals
    top_scored = np.take_along_axis(logits, best, axis=1) - log_totals
    return Logprobs(tokens, scored[:, 0], best.astype(np.int32), top_scored)


def _best_ids_of_rows(rows: Rows, count: int) -> Ids:
    """Returns `best_ids` of each row [rows, count]. The rows hold no NaN."""
    vocab_size = rows.shape[1]
    count = min(count, vocab_size)
    if count == 0:
        return np.empty((len(rows), 0), dtype=np.intp)
    size = min(_GROUP, vocab_size // (4 * count))  # of a group
    if size < 2:
        return np.argsort(-rows, axis=1, kind="stable")[:, :count]
    grouped = vocab_size // size
    # Members of a group stand `grouped` apart: the maxima of all groups are then one pass over contiguous memory.
    groups = rows[:, : grouped * size].reshape(len(rows), size, grouped)
    maxima = groups.max(axis=1)
    least = np.partition(maxima, grouped - count, axis=1)[:, grouped - count, None]
    of_row, group = np.nonzero(maxima >= least)
    found, member = np.nonzero(groups[of_row, :, group] >= least[of_row])
    of_row_rest, rest = np.nonzero(rows[:, grouped * size :] >= least)
    owners = np.concatenate((of_row[found], of_row_rest))
    if len(owners) > 16 * count * len(rows):  # many ties
        return np.stack([best_ids(row, count) for row in rows])
    ids = np.concatenate((member * grouped + group[found], grouped * size + rest))
    order = np.lexsort((ids, -rows[owners, ids], owners))
    starts = np.searchsorted(owners[order], np.arange(len(rows)))
    best: Ids = ids[order[starts[:, None] + np.arange(count)]]
    return best


_NOT_FINITE = "the model gave logits that are not finite"
