"""Costs and gains of drafts: the rate of acceptance, and the extra time of a step that verifies drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import NO_TOKENS, Tokens

Floats = NDArray[np.float64]

LEAST_GAIN = 1.02  # least expected speed-up at which drafts are verified

_FORGETTING = 0.95  # a draft multiplies the weight of the earlier ones by this
_BELIEF = 3.0  # weight of the first guess, in tokens of evidence
_AGEING = 0.99  # of evidence with each step: a text that could not be guessed is tried again
_LONGEST_PAUSE = 64  # steps
_PRIOR = 8.0  # weight of a source's own measure, in tokens of evidence
_REMEMBERING = 0.998  # of the evidence of all sequences

_BUCKETS = 8  # 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, and more
_LEARNING = 0.3  # weight of one more step without drafts
_REMEMBERED = 7  # steps of a shape, whose median is its estimate: one that something held up tells no cost
_STALE_STEPS = 64  # longest run of steps with drafts before one without is made for comparison
_SAME_CONTEXT = 0.25  # relative difference of context up to which two steps are compared
_SAME_CONTEXT_TOKENS = 256
_HOPE = 0.997  # a cost that rules out drafts shrinks by this factor a step, until drafts are tried again


@dataclass(slots=True)
class AcceptanceRate:
    """Rate at which one sequence's draft tokens are accepted."""

    _right: float = 0.0
    _wrong: float = 0.0
    _misses: int = 0  # drafts in a row without an accepted token
    _pause: int = 0  # drafts to skip

    def probability(self, guess: float) -> float:
        """Estimates the chance that a draft token is accepted if those before it are. `guess` is the prior."""
        return (self._right + _BELIEF * guess) / (self._right + self._wrong + _BELIEF)

    def skip(self) -> bool:
        """Returns whether to skip this draft, and counts it. Call it once for each draft."""
        self._right *= _AGEING
        self._wrong *= _AGEING
        if self._pause:
            self._pause -= 1
            return True
        return False

    def compared(self, tokens: int, right: int) -> None:
        """Learns from one draft of which so many tokens could be compared with those that came."""
        self._right = self._right * _FORGETTING + right
        self._wrong = self._wrong * _FORGETTING + (right < tokens)
        if right:
            self._misses = 0
            return
        self._misses += 1
        if self._misses > 1:
            self._pause = min(2 ** (self._misses - 1), _LONGEST_PAUSE)


class Calibration:
    """Rates at which draft tokens come, by how sure their source is of them, over all sequences.

    A source's own measure says too much or too little: a long agreement of random words is chance, and a head's
    probability is not the chance that the model's most likely token is the same.
    """

    def __init__(self, levels: int) -> None:
        """`levels`: numbers by which the source says how sure it is."""
        self._right = [0.0] * levels
        self._wrong = [0.0] * levels

    def chance(self, level: int, guess: float) -> float:
        """Estimates the chance that a token comes if those before it did. `guess` is the prior."""
        right = self._right[level]
        return (right + _PRIOR * guess) / (right + self._wrong[level] + _PRIOR)

    def overall(self, guess: float) -> float:
        """Estimates that chance for a token of which nothing is known."""
        right = sum(self._right)
        return (right + _PRIOR * guess) / (right + sum(self._wrong) + _PRIOR)

    def learn(self, level: int, *, came: bool) -> None:
        self._right[level] = self._right[level] * _REMEMBERING + came
        self._wrong[level] = self._wrong[level] * _REMEMBERING + (not came)


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft, the chance that each of its tokens is accepted, falling, and what learns whether they come."""

    tokens: Tokens
    chances: Floats
    levels: Sequence[int]  # of the calibration, for each token
    calibration: Calibration
    rate: AcceptanceRate  # of the sequence
    place: int  # generated tokens before it


NO_GUESS = Guess(NO_TOKENS, np.empty(0), (), Calibration(0), AcceptanceRate(), 0)


@dataclass(slots=True)
class _Plain:
    """Steps without drafts, of a number of sequences."""

    seconds: float
    context: int  # positions that they attended to
    step: int


class DraftCost:
    """Extra time of steps that verify drafts, learnt from the times of steps.

    Makes no assumption about the machine: extra rows are nearly free if a step is bound by reading weights, and cost
    as much as a step if it is not. Tries more drafts once fewer are known to pay.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._plain: dict[int, _Plain] = {}  # by sequences
        # [sequences, drafts] in buckets: extra time relative to a step without drafts. NaN: unknown.
        self._longer: Floats = np.full((_BUCKETS, _BUCKETS), np.nan)
        self._seen: Floats = np.full((_BUCKETS, _BUCKETS, _REMEMBERED), np.nan)  # the last ones, as a ring
        self._tried = np.zeros((_BUCKETS, _BUCKETS), np.int64)

    def observe(self, sequences: int, drafts: int, context: int, seconds: float) -> None:
        """Learns from one step of decodes alone."""
        self._steps += 1
        plain = self._plain.get(sequences)
        alike = plain is not None and _alike(plain.context, context)
        if not drafts:
            if plain is None or not alike:
                self._plain[sequences] = _Plain(seconds, context, self._steps)
                return
            seconds = min(seconds, 2 * plain.seconds)  # bounds an outlier
            plain.seconds += _LEARNING * (seconds - plain.seconds)
            plain.context, plain.step = context, self._steps
            return
        if plain is None or not alike:
            return
        at = _bucket(sequences), _bucket(drafts)
        self._tried[at] += 1
        if self._tried[at] == 1:
            return  # first of its shape: kernels are chosen and buffers grow
        longer = max(0.0, seconds / plain.seconds - 1.0)
        seen = self._seen[at]
        seen[self._tried[at] % _REMEMBERED] = longer
        self._longer[at] = np.nanmedian(seen)

    def longer(self, sequences: int, context: int, most: int) -> Floats | None:
        """Returns the relative extra time of 1, 2, … drafts [≤ `most`], as far as it is known and a step further.

        None: make a step without drafts to compare with.
        """
        plain = self._plain.get(sequences)
        if plain is None or not _alike(plain.context, context) or self._steps - plain.step > _STALE_STEPS:
            return None
        filled: list[float] = []
        for known in self._longer[_bucket(sequences)].tolist():
            if math.isnan(known):
                # One step beyond the known counts: twice the drafts are taken to cost twice as much.
                filled.append(2 * filled[-1] if filled else 0.0)
                break
            filled.append(known)
        most = min(most, 2 ** (len(filled) - 1))
        return np.asarray(np.array(filled)[_BUCKET_OF[:most]])

    def relative(self, sequences: int, seconds: float) -> float:
        """Returns a time relative to a step without drafts; 0 if none is known."""
        plain = self._plain.get(sequences)
        return 0.0 if plain is None else seconds / plain.seconds

    def relax(self, sequences: int) -> None:
        """Lowers an estimate that ruled out drafts, so that they are tried again some time."""
        self._longer[_bucket(sequences)] *= _HOPE
        self._seen[_bucket(sequences)] *= _HOPE


@dataclass(frozen=True, slots=True)
class Worth:
    """The tokens of each draft that are worth verifying, and how many times as many tokens a second they give."""

    counts: list[int]
    gain: float


def worth_verifying(
    sequences: int, chances: list[Floats], longer: Floats, *, repeats: bool = False, beside: float = 0.0
) -> Worth:
    """Chooses how many tokens of each draft to verify, so that the step yields the most tokens a second.

    chances[i][j] is the chance that token j of draft i is accepted, falling in j. longer[d-1] is the relative extra
    time of a step with d draft tokens. `repeats`: behind a wrong token, the next step computes those before it again,
    and has no draft. `beside`: relative time that the drafts themselves take.
    """
    owner = np.repeat(np.arange(len(chances)), [len(of_draft) for of_draft in chances])
    all_chances = np.concatenate(chances) if chances else np.empty(0)
    order = np.argsort(-all_chances, kind="stable")[: len(longer)]
    if not len(order):
        return Worth([0] * len(chances), 1.0)
    more = np.cumsum(all_chances[order])
    if repeats:
        more = _more_with_pauses(all_chances[order].tolist(), owner[order].tolist())
    gain = (sequences + more) / (sequences * (1.0 + beside + longer[: len(order)]))
    best = int(gain.argmax())
    if gain[best] < LEAST_GAIN:
        return Worth([0] * len(chances), float(gain[best]))
    counts: list[int] = np.bincount(owner[order[: best + 1]], minlength=len(chances)).tolist()
    return Worth(counts, float(gain[best]))


def _more_with_pauses(chances: list[float], owners: list[int]) -> Floats:
    """Returns the tokens more of a step with 1, 2, … draft tokens, in the order in which they are chosen.

    A sequence whose draft has a wrong token has none in the next step, which gives it one token.
    """
    accepted: dict[int, float] = {}
    gains: dict[int, float] = {}
    total, more = 0.0, []
    for chance, owner in zip(chances, owners, strict=True):
        accepted[owner] = accepted.get(owner, 0.0) + chance
        gained = accepted[owner] / (2.0 - chance)  # of 1 + (1 - chance) steps
        total += gained - gains.get(owner, 0.0)
        gains[owner] = gained
        more.append(total)
    return np.array(more)


def could_pay(sequences: int, longer: Floats) -> bool:
    """Returns whether drafts would pay if all of them were accepted."""
    tokens = sequences + np.arange(1, len(longer) + 1)
    return bool((tokens >= LEAST_GAIN * sequences * (1.0 + longer)).any())


def _alike(context: int, other: int) -> bool:
    return abs(context - other) <= _SAME_CONTEXT * context + _SAME_CONTEXT_TOKENS


def _bucket(count: int) -> int:
    return min((count - 1).bit_length(), _BUCKETS - 1)


_BUCKET_OF = np.array([_bucket(count) for count in range(1, 1025)])
