"""Drafts of the model's own heads, where the n-gram lookup finds none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listed

import numpy as np

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.plan import Plan
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.draft_cost import LEAST_GAIN, Floats, worth_verifying
from rootstock.engine.speculation.proposer import NO_GUESS, Guess, NgramProposer, possible
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch, DraftHeads, Segment

log = logging.getLogger(__name__)

MOST_HEAD_TOKENS = 3  # of a head that was trained for one token, later ones are accepted far less often

_FIRST_CHANCE = 0.7  # that a head's token is accepted
_LEARNING = 0.2  # weight of one more observation of a head's time


class HeadProposer(NgramProposer):
    """Proposer of drafts by n-gram lookup, and else by the model's heads, for all sequences of a step together."""

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
        self._seconds: dict[int, float] = {}  # of a head's draft of one token, by its sequences

    def _guesses(
        self, sequences: Listed[Sequence], leases: Listed[Lease], longer: Floats, *, repeats: bool
    ) -> list[Guess]:
        guesses = super()._guesses(sequences, leases, longer, repeats=repeats)
        open_ones = [
            number
            for number, (sequence, lease, guess) in enumerate(zip(sequences, leases, guesses, strict=True))
            if guess is NO_GUESS
            and sequence.tokens_left > 1
            and not sequence.request.images
            and len(sequence.uncomputed(lease)) == 1
        ]
        open_ones = [number for number in open_ones if not sequences[number].acceptance.skip()]
        if not open_ones or self._heads is None:
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
        for number, drafted, chance in zip(open_ones, tokens, chances, strict=True):
            left = possible(sequences[number], drafted[: sequences[number].tokens_left - 1])
            if len(left):
                guesses[number] = Guess(left, np.cumprod(chance[: len(left)], dtype=np.float64))
        return guesses

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
        best, best_gain = 0, LEAST_GAIN
        beside = self._cost.relative(len(sequences), self._seconds.get(len(open_ones), 0.0))
        for most in range(1, min(MOST_HEAD_TOKENS, self._most, room) + 1):
            chances = [guess.chances for guess in guesses]
            for number in open_ones:
                one = sequences[number].acceptance.probability(_FIRST_CHANCE)
                chances[number] = one ** np.arange(1, 1 + most, dtype=np.float64)
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
