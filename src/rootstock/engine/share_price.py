"""The price of a model's cache in a shared budget: the seconds of prefill that a byte of it saves."""

from __future__ import annotations

from rootstock.cache.shared_budget import BudgetShare
from rootstock.engine.cost_model import PrefillSpeed
from rootstock.engine.parts import Forward, Part
from rootstock.runtime.base import ModelDescription

# Guess until a forward is measured: two operations per parameter, 100 billion a second.
_SECONDS_PER_PARAMETER = 2e-11


class SharePrice(Part):
    """Keeps the price of a share up to date, and executes evictions by other engines of the budget here."""

    def __init__(self, share: BudgetShare, description: ModelDescription, token_bytes: int) -> None:
        """Takes the bytes of a position of full attention as `token_bytes`."""
        self._share = share
        self._token_bytes = token_bytes
        self._speed = PrefillSpeed()
        share.price = _SECONDS_PER_PARAMETER * max(1, description.parameters) / token_bytes

    def before_forward(self) -> None:
        self._share.settle_others()

    def forwarded(self, forward: Forward) -> None:
        """Learns from a forward of mostly prefill."""
        if forward.only_decodes:
            return
        sizes = [(segment.past, len(segment.tokens)) for segment in forward.segments]
        self._speed.observe(sizes, forward.seconds)
        seconds_per_token = self._speed.seconds_per_token
        if seconds_per_token:
            self._share.price = seconds_per_token / self._token_bytes
