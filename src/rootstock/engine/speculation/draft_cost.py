"""Whether a draft pays: how likely it is accepted, and how much longer a step takes that verifies it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_GAIN = (
    1.02  # expected tokens a second, relative to a step without drafts, from which on drafts are verified
)

_FORGETTING = 0.95  # what one more draft leaves of the weight of those before it
_BELIEF = 2.0  # how many tokens' worth of evidence the first guess is
_LONGEST_PAUSE = 64  # steps

_BUCKETS = 8  # 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, and more
_LEARNING = 0.3  # weight of one more observation
_LEARNING_WORSE = 0.7  # of one that says that drafts cost more than thought
_STALE_STEPS = 64  # a step without drafts is made to compare with, so often at least
_SAME_CONTEXT = 0.25  # relative difference up to which two steps attend to as much
_SAME_CONTEXT_TOKENS = 256
_HOPE = 0.997  # an estimate that speaks against drafts shrinks by so much a step, until it is tried again


@dataclass(slots=True)
class AcceptanceRate:
    """How often drafts for one sequence were right."""

    _right: float = 0.0
    _wrong: float = 0.0
    _misses: int = 0  # drafts in a row of which nothing was accepted
    _pause: int = 0  # drafts to be left out

    def probability(self, guess: float) -> float:
        """Of one more token's being right, if those before it were. `guess` is what is thought without evidence."""
        return (self._right + _BELIEF * guess) / (self._right + self._wrong + _BELIEF)

    @property
    def pauses(self) -> bool:
        """Whether this draft is to be left out; asked once for each."""
        if self._pause:
            self._pause -= 1
            return True
        return False

    def verified(self, drafted: int, accepted: int, *, cut_short: bool = False) -> None:
        """`cut_short`: the sequence ended, so nothing is known of what came after the accepted ones."""
        self._right = self._right * _FORGETTING + accepted
        self._wrong = self._wrong * _FORGETTING + (accepted < drafted and not cut_short)
        if accepted:
            self._misses = 0
            return
        self._misses += 1
        if self._misses > 1:
            self._pause = min(2 ** (self._misses - 1), _LONGEST_PAUSE)


@dataclass(slots=True)
class _Plain:
    """Steps of so many sequences without drafts."""

    seconds: float
    context: int  # positions that they attended to
    step: int


class DraftCost:
    """How much longer steps take that verify drafts, learnt from how long steps took.

    Nothing is assumed about the machine: extra rows are nearly free where a step is bound by reading weights, and
    cost as much as a step where it is not. More drafts are tried when fewer are known to pay.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._plain: dict[int, _Plain] = {}  # by sequences
        # [sequences, drafts] in buckets: how much longer, relative to a step without drafts; NaN: not known.
        self._longer: Floats = np.full((_BUCKETS, _BUCKETS), np.nan)
        self._tried = np.zeros((_BUCKETS, _BUCKETS), np.int64)

    def observe(self, sequences: int, drafts: int, context: int, seconds: float) -> None:
        """One step of decodes alone."""
        self._steps += 1
        plain = self._plain.get(sequences)
        alike = plain is not None and _alike(plain.context, context)
        if not drafts:
            if plain is None or not alike:
                self._plain[sequences] = _Plain(seconds, context, self._steps)
                return
            seconds = min(seconds, 2 * plain.seconds)  # machines hiccup
            plain.seconds += _LEARNING * (seconds - plain.seconds)
            plain.context, plain.step = context, self._steps
            return
        if plain is None or not alike:
            return
        at = _bucket(sequences), _bucket(drafts)
        self._tried[at] += 1
        if self._tried[at] == 1:
            return  # of a new shape: kernels are chosen, buffers grow
        longer = max(0.0, seconds / plain.seconds - 1.0)
        known = float(self._longer[at])
        if np.isnan(known):
            self._longer[at] = longer
            return
        longer = min(longer, 2 * known + 0.1)
        self._longer[at] = known + (_LEARNING_WORSE if longer > known else _LEARNING) * (longer - known)

    def longer(self, sequences: int, context: int, most: int) -> Floats | None:
        """[at most `most`] how much longer a step takes with 1, 2, … drafts, as far as that is known and a step
        further; None: make one without, to compare with."""
        plain = self._plain.get(sequences)
        if plain is None or not _alike(plain.context, context) or self._steps - plain.step > _STALE_STEPS:
            return None
        filled: list[float] = []
        for known in self._longer[_bucket(sequences)].tolist():
            if math.isnan(known):
                # The first step into the unknown is a short one: twice the drafts are taken to cost twice as much.
                filled.append(2 * filled[-1] if filled else 0.0)
                break
            filled.append(known)
        most = min(most, 2 ** (len(filled) - 1))
        return np.asarray(np.array(filled)[_BUCKET_OF[:most]])

    def hope(self, sequences: int) -> None:
        """Drafts were left out because of what they cost when they were last tried: they will be tried again."""
        self._longer[_bucket(sequences)] *= _HOPE


def worth_verifying(sequences: int, chances: list[Floats], longer: Floats) -> list[int]:
    """How many tokens of each draft to verify, so that the step yields the most tokens a second.

    chances[i][j]: of the j-th token of draft i being accepted, falling. longer[d-1]: how much longer a step takes
    with d drafted tokens.
    """
    owner = np.repeat(np.arange(len(chances)), [len(of_draft) for of_draft in chances])
    all_chances = np.concatenate(chances) if chances else np.empty(0)
    order = np.argsort(-all_chances, kind="stable")[: len(longer)]
    if not len(order):
        return [0] * len(chances)
    gain = (sequences + np.cumsum(all_chances[order])) / (sequences * (1.0 + longer[: len(order)]))
    best = int(gain.argmax())
    if gain[best] < LEAST_GAIN:
        return [0] * len(chances)
    counts: list[int] = np.bincount(owner[order[: best + 1]], minlength=len(chances)).tolist()
    return counts


def could_pay(sequences: int, longer: Floats) -> bool:
    """Whether drafts would pay if all of them were accepted."""
    tokens = sequences + np.arange(1, len(longer) + 1)
    return bool((tokens >= LEAST_GAIN * sequences * (1.0 + longer)).any())


def _alike(context: int, other: int) -> bool:
    return abs(context - other) <= _SAME_CONTEXT * context + _SAME_CONTEXT_TOKENS


def _bucket(count: int) -> int:
    return min((count - 1).bit_length(), _BUCKETS - 1)


_BUCKET_OF = np.array([_bucket(count) for count in range(1, 1025)])
