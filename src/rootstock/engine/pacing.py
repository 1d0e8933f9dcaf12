"""How much of a prompt a step may take along, so that those who decode get their next token in time.

A step's seconds are a sum of things that can be counted, each at a price learnt from the steps until now. The more of
a prompt a step computes the longer everybody in it waits; `Pacing` turns a target for that wait into a number of
tokens. Nobody's output depends on it: prompts may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rootstock.engine.cost_model import Share, StepSpeed

LEAST_TOKENS = 16  # of a prompt in every step, whatever the target: nobody who prefills starves
_AIM = 0.9  # of the target: half of all steps take longer than foreseen
_DECODES_OBSERVED = 8  # one of so many steps without prefill is observed: they are all alike


class Pace(Protocol):
    def prefill_tokens(self, step: Sequence[Share], past: int, most: int) -> int:
        """How many of at most `most` tokens of a prompt that is computed up to position `past` may be added to
        `step`, in which somebody decodes."""
        ...


class Pacing:
    """Keeps steps that carry decodes within `target_s`, as far as it can be foreseen. For one thread."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._speed = StepSpeed()
        self._decode_steps = 0

    def observe(self, step: Sequence[Share], seconds: float) -> None:
        """A whole step took so long, from its plan to its events."""
        if all(share.decodes for share in step):
            self._decode_steps += 1
            if self._decode_steps % _DECODES_OBSERVED:
                return
        self._speed.observe(step, seconds)

    def prefill_tokens(self, step: Sequence[Share], past: int, most: int) -> int:
        if not self._speed.observed:
            return most
        prefilled = sum(share.new for share in step if not share.decodes)
        floor = min(most, max(0, LEAST_TOKENS - prefilled))
        left_s = _AIM * self._target_s - self._speed.seconds(step)
        return max(floor, min(most, self._within(left_s, past)))

    def _within(self, seconds: float, past: int) -> int:
        """The largest n with per_token·n + per_attended·(past·n + n²/2) ≤ seconds."""
        if seconds <= 0.0:
            return 0
        per_token, per_attended = self._speed.prefill_prices
        linear, square = per_token + per_attended * past, per_attended / 2
        if linear + square <= 0.0:
            return 1 << 30  # nothing was seen to cost anything
        # The root that does not subtract two large numbers.
        return int(min(1 << 30, 2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds))))
