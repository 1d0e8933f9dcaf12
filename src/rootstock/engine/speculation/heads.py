"""Drafts of the model's own heads, where the n-gram lookup finds none, or a less likely one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listed

import numpy as np

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.plan import Plan
from rootstock.cache.types import Tokens
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.draft_cost import (
    LEAST_GAIN,
    Calibration,
    Floats,
    Guess,
    worth_verifying,
)
from rootstock.engine.speculation.proposer import NgramProposer, possible
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch, DraftHeads, Segment

log = logging.getLogger(__name__)

MOST_HEAD_TOKENS = 3  # of a head that was trained for one token, later ones are accepted far less often

_FIRST_CHANCE = 0.7  # that a head's token is accepted
_LEVELS = 10  # of a head's probability
_LEARNING = 0.2  # weight of one more observation of a head's time


class HeadProposer(NgramProposer):
    """Proposer of drafts by n-gram lookup, or by the model's heads where these are likelier to be right. The heads
    draft for all sequences of a step together."""

    def __init__(
        self,
        cache: KVCache,
        draft_heads: DraftHeads,
        apply: Callable[[Plan], None],
        clock: Callable[[], float],
        most: int | None = None,
    ) -> None:
        """`apply` executes a plan of the cache: heads write to rows, whose stores must be made before."""
        super().__init__(cache, most)
        self._heads: DraftHeads | None = draft_heads
        self._apply = apply
        self._clock = clock
        # By a head's probability of a token: for greedy choice, then for random sampling.
        self._by_certainty = Calibration(2 * _LEVELS)
        self._seconds: dict[int, float] = {}  # of a head's draft of one token, by its sequences

    def _guesses(
        self, sequences: Listed[Sequence], leases: Listed[Lease], longer: Floats, *, repeats: bool
    ) -> list[Guess]:
        guesses = super()._guesses(sequences, leases, longer, repeats=repeats)
        if self._heads is None:
            return guesses
        open_ones = [
            number
            for number, (sequence, lease, guess) in enumerate(zip(sequences, leases, guesses, strict=True))
            if guess.chances.sum() < self._expected(sequence).sum()
            and sequence.tokens_left > 1
            and not sequence.request.images
            and len(sequence.uncomputed(lease)) == 1
        ]
        open_ones = [number for number in open_ones if not sequences[number].head_rate.skip()]
        if not open_ones:
            return guesses
        segments = [
            Segment(
                np.array(sequences[n].generated[-1:], np.int32),
                leases[n].num_computed_tokens,
                leases[n].tables,
                0,
            )
            for n in open_ones
        ]
        size = self._cache.block_size
        room = min(leases[n].table_blocks * size - s.past for n, s in zip(open_ones, segments, strict=True))
        most = self._worth_drafting(sequences, guesses, open_ones, longer, min(room, len(longer)), repeats)
        if not most:
            return guesses
        began = self._clock()
        self._apply(self._cache.take_pending_plan())
        try:
            tokens, chances = self._heads.draft(Batch(segments), most)
        except PoolsLost:
            raise
        except Exception:
            log.exception("the model's draft heads failed, and are used no more")
            self._heads = None
            return guesses
        self._observe(len(segments), (self._clock() - began) / most)
        chances = np.nan_to_num(chances)  # a head that overflows is sure of nothing
        for number, drafted, certainty in zip(open_ones, tokens, chances, strict=True):
            left = possible(sequences[number], drafted[: sequences[number].tokens_left - 1])
            if len(left):
                own = self._calibrated(sequences[number], left, certainty[: len(left)].tolist())
                guesses[number] = max(guesses[number], own, key=lambda guess: float(guess.chances.sum()))
        return guesses

    def _calibrated(self, sequence: Sequence, tokens: Tokens, certainty: Listed[float]) -> Guess:
        """Returns the guess of tokens that the head holds for so probable."""
        first = 0 if sequence.sampler.takes_most_likely else _LEVELS
        levels = [first + min(int(_LEVELS * each), _LEVELS - 1) for each in certainty]
        each = [self._by_certainty.chance(level, own) for level, own in zip(levels, certainty, strict=True)]
        chances = np.cumprod(each, dtype=np.float64)
        place = len(sequence.generated)
        return Guess(tokens, chances, levels, self._by_certainty, sequence.head_rate, place)

    def _expected(self, sequence: Sequence, most: int = MOST_HEAD_TOKENS) -> Floats:
        """Returns the chances that tokens of the head come, before they are drafted."""
        one = sequence.head_rate.probability(self._by_certainty.overall(_FIRST_CHANCE))
        return one ** np.arange(1, 1 + most, dtype=np.float64)

    def _worth_drafting(
        self,
        sequences: Listed[Sequence],
        guesses: Listed[Guess],
        open_ones: Listed[int],
        longer: Floats,
        room: int,
        repeats: bool,
    ) -> int:
        """Returns for how many tokens the heads are worth their time; 0: for none."""
        without = worth_verifying(
            len(sequences), [guess.chances for guess in guesses], longer, repeats=repeats
        )
        best, best_gain = 0, LEAST_GAIN * max(1.0, without.gain)
        beside = self._cost.relative(len(sequences), self._seconds.get(len(open_ones), 0.0))
        for most in range(1, min(MOST_HEAD_TOKENS, self._most, room) + 1):
            chances = [guess.chances for guess in guesses]
            for number in open_ones:
                chances[number] = self._expected(sequences[number], most)
            worth = worth_verifying(len(sequences), chances, longer, repeats=repeats, beside=most * beside)
            if worth.gain > best_gain:
                best, best_gain = most, worth.gain
        if not best:
            self._cost.relax(len(sequences))
        return best

    def _observe(self, sequences: int, seconds: float) -> None:
        known = self._seconds.get(sequences)
        if known is None:
            self._seconds[sequences] = 0.0  # of the first one: buffers grow
        elif known == 0.0:
            self._seconds[sequences] = seconds
        else:
            self._seconds[sequences] = known + _LEARNING * (min(seconds, 2 * known) - known)
