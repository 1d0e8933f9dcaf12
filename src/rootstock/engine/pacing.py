"""Limits the prefill of a step, so that decodes get their next token in time.

The seconds of a step are a sum of counts, each at a price learnt from earlier steps (`StepSpeed`). More prefill in a
step delays every sequence in it. `Pacing` turns a target for that delay into a number of tokens. No output depends on
it: a prompt may be cut into any chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rootstock.engine.cost_model import StepSize, StepSpeed
from rootstock.engine.parts import Part
from rootstock.engine.scheduler import StepPlan

LEAST_TOKENS = 16  # of a prompt in every step, even above the target, so that no prefill starves
_AIM = 0.9  # share of the target to plan for, because half of all steps take longer than predicted
_DECODES_OBSERVED = 8  # one in so many steps without prefill is observed, because they are all alike


class Pacing(Part):
    """Limit of prefills that keeps the predicted time of steps with decodes within `target_s`."""

    def __init__(self, target_s: float, clock: Callable[[], float]) -> None:
        self._target_s = target_s
        self._clock = clock
        self._speed = StepSpeed()
        self._decode_steps = 0
        self._step: tuple[StepSize, float] | None = None  # the size and the begin of the step, without drafts

    def planned(self, plan: StepPlan, began: float) -> None:
        has_drafts = any(item.drafts for item in plan.scheduled)
        self._step = None if has_drafts or not plan.scheduled else (plan.size(), began)

    def after_step(self) -> None:
        if self._step is not None:
            size, began = self._step
            self.observe(size, self._clock() - began)

    def observe(self, step: StepSize, seconds: float) -> None:
        """Learns from one whole step, from its plan to its events."""
        if not step.prefill_tokens:
            self._decode_steps += 1
            if self._decode_steps % _DECODES_OBSERVED:
                return
        self._speed.observe(step, seconds)

    def prefill_tokens(self, step: StepSize, past: int, most: int) -> int:
        if not self._speed.observed:
            return most
        floor = min(most, max(0, LEAST_TOKENS - step.prefill_tokens))
        left_s = _AIM * self._target_s - self._speed.seconds(step)
        return max(floor, min(most, self._within(left_s, past)))

    def _within(self, seconds: float, past: int) -> int:
        """Solves for the largest n with per_token·n + per_attended·(past·n + n²/2) ≤ seconds."""
        if seconds <= 0.0:
            return 0
        per_token, per_attended = self._speed.prefill_prices
        linear, square = per_token + per_attended * past, per_attended / 2
        if linear + square <= 0.0:
            return 1 << 30  # no cost was observed yet
        # The root that does not subtract two large numbers.
        return int(min(1 << 30, 2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds))))
