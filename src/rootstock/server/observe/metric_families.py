"""Metric families of one scrape, and histograms that cost little to observe."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = Mapping[str, str]


class Buckets:
    """A histogram for the event loop's thread alone, which observes every token.

    It has no lock: that would cost more than the rest of the work on a token. Other threads may read it.
    """

    __slots__ = ("_bounds", "_cells")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, in order, without the last one, infinity."""
        self._bounds = tuple(bounds)
        self._cells: list[float] = [0] * (len(bounds) + 2)  # observations by bucket, then their sum

    def observe(self, value: float) -> None:
        cells = self._cells
        cells[bisect_left(self._bounds, value)] += 1
        cells[-1] += value

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Observes many values at once, in the time that Python needs for a few."""
        places = np.searchsorted(self._bounds, values)  # as bisect_left finds them
        counts = np.bincount(places, minlength=len(self._bounds) + 1).tolist()
        self._cells = [
            mine + its for mine, its in zip(self._cells, [*counts, float(values.sum())], strict=True)
        ]

    def add(self, other: Buckets) -> None:
        """Adds the observations of another histogram with the same bounds."""
        self._cells = [mine + its for mine, its in zip(self._cells, list(other._cells), strict=True)]

    def sampled(self, bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
        """Returns the cumulative counts up to some of the bounds and infinity, and the sum."""
        *counts, total = list(self._cells)  # a copy: the loop goes on to observe
        reached = dict(zip((*self._bounds, float("inf")), accumulate(counts), strict=True))
        found: list[tuple[str, float]] = [(_text(bound), reached[bound]) for bound in bounds]
        return [*found, ("+Inf", reached[float("inf")])], total


class Families:
    """The metric families of one scrape. Models and tenants add their values one after the other.

    All values of a family have labels of the same names.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, GaugeMetricFamily] = {}
        self._counters: dict[str, CounterMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}

    def __iter__(self) -> Iterator[Metric]:
        yield from self._gauges.values()
        yield from self._counters.values()
        yield from self._histograms.values()

    def gauge(self, name: str, help: str, value: float, labels: Labels) -> None:
        family = self._gauges.get(name)
        if family is None:
            family = self._gauges[name] = GaugeMetricFamily(name, help, labels=list(labels))
        family.add_metric(list(labels.values()), float(value))

    def gauges(
        self, name: str, help: str, label: str, values: Mapping[str, float | None], labels: Labels
    ) -> None:
        """Adds one value for each value of a label. None is left out."""
        for key, value in values.items():
            if value is not None:
                self.gauge(name, help, value, {**labels, label: key})

    def counter(self, name: str, help: str, count: float, labels: Labels) -> None:
        family = self._counters.get(name)
        if family is None:
            family = self._counters[name] = CounterMetricFamily(name, help, labels=list(labels))
        family.add_metric(list(labels.values()), count)

    def counters(self, name: str, help: str, label: str, counts: Mapping[str, float], labels: Labels) -> None:
        for key, count in sorted(counts.items()):
            self.counter(name, help, count, {**labels, label: key})

    def histogram(
        self, name: str, help: str, buckets: Buckets, bounds: Sequence[float], labels: Labels
    ) -> None:
        family = self._histograms.get(name)
        if family is None:
            family = self._histograms[name] = HistogramMetricFamily(name, help, labels=list(labels))
        reached, total = buckets.sampled(bounds)
        family.add_metric(list(labels.values()), reached, total)


def _text(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
