"""Load or recompute: whether a prefix is loaded from a tier or computed again, by measured speeds (ADR 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rootstock.cache.explain import LoadChoice
from rootstock.cache.lease import Match
from rootstock.cache.tier_index import TierHit
from rootstock.engine.cost_model import LoadSpeed, PrefillSpeed
from rootstock.runtime.base import Segment
from rootstock.tiers.reader import LoadEnded

MOSTLY_PREFILL = 0.9  # least share of prefill tokens in a forward that is observed
STALE_S = 30.0  # an estimate against loading is checked again after this time


class LoadOrRecompute:
    """Comparison of the time of loading a prefix with the time of computing it."""

    def __init__(self, chunk_tokens: int, clock: Callable[[], float]) -> None:
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._measured_at = -STALE_S
        self._slow_until = -STALE_S  # after an overdue load: no load begins before this time
        self.prefill_speed = PrefillSpeed()
        self.load_speed = LoadSpeed()

    def choose(self, match: Match, hit: TierHit, waiting_bytes: int) -> LoadChoice:
        """Compares loading `hit` behind `waiting_bytes` of other loads with computing on from `match`."""
        load_s = self.load_speed.seconds(hit.records, hit.payload_bytes, waiting_bytes)
        compute_s = self.prefill_speed.seconds(match.length, hit.position, self._chunk_tokens)
        load = load_s is None or compute_s is None or load_s <= compute_s
        load = load and self._clock() > self._slow_until
        return LoadChoice(hit.position, hit.records, hit.payload_bytes, load_s, compute_s, load)

    @property
    def is_stale(self) -> bool:
        """Whether no load was measured for so long that an estimate against loading may be wrong."""
        return self._clock() - self._measured_at > STALE_S

    def pause(self) -> bool:
        """Lets requests compute for a while, after an overdue load. Returns False if they did already."""
        now = self._clock()
        begins = now > self._slow_until
        self._slow_until = now + STALE_S
        return begins

    def observe_forward(self, segments: Sequence[Segment], seconds: float) -> None:
        """Learns the speed of prefills from a forward."""
        new = [len(segment.tokens) for segment in segments]
        prefilled = sum(n for n in new if n > 1)
        if prefilled >= MOSTLY_PREFILL * sum(new):
            sizes = [(segment.past, n) for segment, n in zip(segments, new, strict=True)]
            self.prefill_speed.observe(sizes, seconds)

    def observe_load(self, ended: LoadEnded) -> None:
        """Learns the speed of the tier from a load."""
        if ended.loaded:
            self._measured_at = self._clock()
            self.load_speed.observe(ended.loaded, ended.payload_bytes, ended.seconds)
