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
from rootstock.engine.logits_processors import (
    BIAS_LIMIT,
    GROUP,
    Bias,
    Penalties,
    ResolvedSampling,
    best_ids,
    draw,
    restrict,
)
from rootstock.engine.request import Logprobs, TokenLogprob
from rootstock.errors import SamplingFailed
from rootstock.text.constraints.progress import AnswerProgress

Row = NDArray[np.float32]  # [vocab] logits, or weights made of them
Rows = NDArray[np.float32]  # [rows, vocab] logits
Ids = NDArray[np.intp]

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
        self._edits = self._penalties is not None or self._bias is not None or progress is not None
        # It takes the token of the largest logit, unless that would end the answer too early.
        self.takes_most_likely = params.greedy and not self._edits
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
        token = best if self._draws is None else draw(row, best, self._params, _uniform(self._draws))

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
        if not self._edits and not too_early:
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


# ---- random numbers


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
    size = min(GROUP, vocab_size // (4 * count))  # of a group
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
