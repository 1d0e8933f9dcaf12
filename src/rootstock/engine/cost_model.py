"""Cost models of prefills, loads and steps, fitted to the observed times on this machine.

The seconds of each are a sum of counts, each at a price. Prices are fitted to the last observations by relative
errors, so that short forwards count as much as long ones. Outliers weigh less. No price is negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REMEMBERED = 128  # observations
_FORGETTING = 0.97  # an observation multiplies the weight of the earlier ones by this
_TOLERANCE = 0.2  # a larger relative error counts no more than this one (Huber)
_ROUNDS = 4  # of weighting by the errors and fitting again, per observation
_INERTIA = 1e-3  # keeps prices near their last values if the observations do not determine them
_SURPRISE = 1.5  # an observation this many times slower or faster than predicted …
_CHANGE = 4  # … is an outlier, but so many in a row are a change of the machine:
_AFTER_CHANGE = 0.05  # remaining weight of the observations before a change
_CLOCK_S = 1e-9  # shorter times are errors of the clock


class PrefillSpeed:
    """Seconds of a forward = c + a·tokens + b·attended. A token attends to as many positions as precede it.

    Not thread-safe: the engine's thread observes and asks.
    """

    def __init__(self) -> None:
        self._fit = _Fit(3)

    def observe(self, segments: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learns from one forward of mostly prefill. Each segment is (past, new): positions past … past+new-1."""
        tokens = sum(new for _, new in segments)
        attended = sum(attended_positions(past, past + new) for past, new in segments)
        if tokens > 0:
            self._fit.observe((1, tokens, attended), seconds, alone=1)

    def seconds(self, first: int, end: int, chunk_tokens: int) -> float | None:
        """Predicts a prefill of positions first … end-1 in chunks. None before the first observation."""
        tokens = max(end - first, 0)
        forwards = -(-tokens // chunk_tokens)
        return self._fit.predict((forwards, tokens, attended_positions(first, first + tokens)))

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of a token in a forward of the recent typical size. None before the first observation."""
        if not self._fit.observed:
            return None
        tokens = max(1.0, self._fit.typical(1))
        seconds = self._fit.predict((1, tokens, self._fit.typical(2)))
        return None if seconds is None else seconds / tokens

    def tokens_per_s_at(self, depth: int) -> float | None:
        """Predicts the speed at position `depth`, in forwards of the recent typical size."""
        if not self._fit.observed:
            return None
        tokens = max(1, round(self._fit.typical(1)))
        return _rate(tokens, self.seconds(depth, depth + tokens, chunk_tokens=tokens))


class StepSize(NamedTuple):
    """Work of a step: its tokens, and the positions that they attend to."""

    prefill_tokens: int
    prefill_attended: int
    decode_tokens: int  # one for each decoding sequence, and their drafts
    decode_attended: int


class StepSpeed:
    """Seconds of a step = c + a·prefill tokens + b·attended by them + d·decode tokens + e·attended by them.

    Tokens of prompts and of decodes have prices of their own, because the rows of one prompt share their reads.
    Not thread-safe: the engine's thread observes and asks.
    """

    def __init__(self) -> None:
        self._fit = _Fit(5)

    @property
    def observed(self) -> bool:
        return self._fit.observed

    @property
    def prefill_prices(self) -> tuple[float, float]:
        """Seconds per token of a prompt, and per position that it attends to."""
        return self._fit.price(1), self._fit.price(2)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learns from one step."""
        if size.prefill_tokens or size.decode_tokens:
            self._fit.observe((1, *size), seconds, alone=1 if size.prefill_tokens else 3)

    def seconds(self, size: StepSize) -> float:
        """Predicts a step. Requires at least one observation."""
        seconds = self._fit.predict((1, *size))
        assert seconds is not None
        return seconds


class LoadSpeed:
    """Seconds of a load from one tier = r·records + payload bytes / bandwidth.

    Not thread-safe: the engine's thread observes and asks.
    """

    def __init__(self) -> None:
        self._fit = _Fit(2)

    def observe(self, records: int, payload_bytes: int, seconds: float) -> None:
        if records > 0 or payload_bytes > 0:
            self._fit.observe((records, payload_bytes), seconds, alone=1 if payload_bytes > 0 else 0)

    def seconds(self, records: int, payload_bytes: int, waiting_bytes: int = 0) -> float | None:
        """Predicts a load that begins after the waiting bytes, taken to be of records like the recent ones.

        None before the first observation.
        """
        own = self._fit.predict((records, payload_bytes))
        if own is None or waiting_bytes <= 0:
            return own
        speed = self.bytes_per_s
        return own if speed is None else own + waiting_bytes / speed

    @property
    def bytes_per_s(self) -> float | None:
        """Speed for records like the recent ones: below the bandwidth, because each record has a cost."""
        if not self._fit.observed:
            return None
        records, payload_bytes = self._fit.typical(0), self._fit.typical(1)
        return _rate(payload_bytes, self._fit.predict((records, payload_bytes)))


class _Fit:
    """Weighted least squares of seconds = counts · prices, prices ≥ 0, over the last observations."""

    def __init__(self, columns: int) -> None:
        self._counts: Floats = np.empty((0, columns))  # [observations, columns], the newest last
        self._seconds: Floats = np.empty(0)  # [observations]
        self._weights: Floats = np.empty(0)  # [observations]
        self._prices: Floats = np.zeros(columns)
        self._surprises = 0  # in a row; negative: faster than predicted

    @property
    def observed(self) -> bool:
        return len(self._seconds) > 0

    def observe(self, counts: Sequence[float], seconds: float, alone: int) -> None:
        """Learns from one observation. The first one is put down to the column `alone`."""
        if not math.isfinite(seconds) or seconds < _CLOCK_S:
            return
        foreseen = self.predict(counts)
        row = np.asarray(counts, np.float64)
        self._counts = np.vstack([self._counts, row])[-_REMEMBERED:]
        self._seconds = np.append(self._seconds, seconds)[-_REMEMBERED:]
        self._weights = np.append(self._weights * _FORGETTING, 1.0)[-_REMEMBERED:]
        if foreseen is None:
            self._prices[alone] = seconds / row[alone]
            return
        self._notice_change(foreseen, seconds)
        for _ in range(_ROUNDS):
            self._prices = self._fitted()

    def predict(self, counts: Sequence[float]) -> float | None:
        return float(np.asarray(counts, np.float64) @ self._prices) if self.observed else None

    def price(self, column: int) -> float:
        return float(self._prices[column])

    def typical(self, column: int) -> float:
        """Returns the weighted mean of a column."""
        return float(np.average(self._counts[:, column], weights=self._weights))

    def _notice_change(self, foreseen: float, seconds: float) -> None:
        if seconds > foreseen * _SURPRISE:
            self._surprises = max(self._surprises, 0) + 1
        elif seconds * _SURPRISE < foreseen:
            self._surprises = min(self._surprises, 0) - 1
        else:
            self._surprises = 0
        if abs(self._surprises) == _CHANGE:
            # Scale all prices until more is known.
            fitted = self._counts[-_CHANGE:] @ self._prices
            factor = float(np.median(self._seconds[-_CHANGE:] / fitted)) if fitted.all() else 1.0
            self._prices = self._prices * factor
            self._seconds[:-_CHANGE] *= factor
            self._weights[:-_CHANGE] *= _AFTER_CHANGE
            self._surprises = 0

    def _fitted(self) -> Floats:
        """Fits once: weights by the errors of the last prices, then the best prices under these weights."""
        fitted = self._counts @ self._prices
        # Errors are relative to the fitted times: relative to measured times, fast outliers would count for more.
        # Where the two are far apart, the unit stays between them.
        unit = np.clip(fitted, self._seconds / 2, self._seconds * 2)
        error = np.abs(self._seconds - fitted) / unit
        root = np.sqrt(self._weights * _TOLERANCE / np.maximum(error, _TOLERANCE)) / unit
        rows = self._counts * root[:, None]
        scale = np.linalg.norm(rows, axis=0)  # [columns] of very different sizes
        scale[scale == 0.0] = 1.0
        rows /= scale
        normal = rows.T @ rows + _INERTIA * np.eye(len(scale))
        right = rows.T @ (self._seconds * root) + _INERTIA * scale * self._prices
        prices: Floats = _non_negative(normal, right) / scale
        return prices


def _non_negative(normal: Floats, right: Floats) -> Floats:
    """Minimizes x·normal·x - 2·right·x over x ≥ 0, by trying each set of free components."""
    best, best_value = np.zeros_like(right), math.inf
    for free in _subsets(len(right)):
        x = np.linalg.solve(normal[np.ix_(free, free)], right[free])
        value = -float(right[free] @ x)
        if (x >= 0.0).all() and value < best_value:
            best, best_value = np.zeros_like(right), value
            best[free] = x
            if len(free) == len(right):
                break  # no component is at 0
    return best


def _subsets(count: int) -> Iterator[list[int]]:
    """Yields the non-empty subsets, the largest first."""
    for size in range(count, 0, -1):
        for subset in combinations(range(count), size):
            yield list(subset)


def attended_positions(first: int, end: int) -> int:
    """Counts the positions that the tokens at first … end-1 attend to, as the sum of these positions."""
    return (first + end - 1) * (end - first) // 2


def _rate(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if seconds and amount > 0 else None
