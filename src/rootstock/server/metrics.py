"""What /metrics tells Prometheus. The names are the vocabulary's; times are in seconds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rootstock.engine.engine import Engine
from rootstock.engine.request import Usage
from rootstock.engine.tiers.connector import TIER_STATES, TierStats
from rootstock.errors import EngineStopped

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rootstock_requests",
            "HTTP requests by how they ended",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter("rootstock_prompt_tokens", "Prompt tokens asked", registry=self.registry)
        self.cached_tokens = Counter(
            "rootstock_cached_prompt_tokens", "Prompt tokens found in the cache", registry=self.registry
        )
        self.completion_tokens = Counter(
            "rootstock_completion_tokens", "Tokens generated", registry=self.registry
        )
        self.queue_s = self._histogram("rootstock_queue_seconds", "Submission to admission", _LATENCY_S)
        self.ttft_s = self._histogram("rootstock_ttft_seconds", "Submission to first token", _LATENCY_S)
        self.itl_s = LoopHistogram("rootstock_itl_seconds", "Between two tokens of a request", _ITL_S)
        self.registry.register(self.itl_s)
        self.registry.register(_EngineCollector(engine))

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self.registry)

    def timing(self, requests: int) -> Timing:
        return Timing(self, requests)

    def answered(self, route: str, outcome: str, usage: Usage | None = None) -> None:
        """One HTTP request ended: "ok", "error" or "disconnected"."""
        self.requests.labels(route, outcome).inc()
        if usage is not None:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_tokens)
            self.completion_tokens.inc(usage.completion_tokens)

    def render(self) -> bytes:
        """Asks the engine's thread: not for an event loop."""
        return generate_latest(self.registry)


class Timing:
    """The times of one HTTP request's sequences."""

    def __init__(self, metrics: Metrics, requests: int) -> None:
        self._metrics = metrics
        self._last_token_at: list[float | None] = [None] * requests

    def now(self) -> float:
        return time.monotonic()

    def token(self, index: int, now: float) -> None:
        last = self._last_token_at[index]
        if last is not None:
            self._metrics.itl_s.observe(now - last)
        self._last_token_at[index] = now

    def finished(self, usage: Usage) -> None:
        self._metrics.queue_s.observe(usage.queued_s)
        self._metrics.ttft_s.observe(usage.ttft_s)


class LoopHistogram(Collector):
    """A histogram that one thread observes, the event loop's, once for every token: it takes no lock, which would
    cost more than the rest of what is done about a token."""

    def __init__(self, name: str, help: str, buckets: tuple[float, ...]) -> None:
        self._name, self._help, self._buckets = name, help, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        reached = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=reached, sum_value=self._sum)


class _EngineCollector(Collector):
    """The engine's and the cache's state, asked for at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing can be asked before the engine runs

    def collect(self) -> Iterator[Metric]:
        health = self._engine.health()
        yield GaugeMetricFamily("rootstock_alive", "1 while the engine works", value=float(health.alive))
        try:
            stats = self._engine.stats()
        except EngineStopped:
            return
        requests = GaugeMetricFamily("rootstock_engine_requests", "Requests in the engine", labels=["state"])
        requests.add_metric(["running"], stats.running)
        requests.add_metric(["waiting"], stats.waiting)
        yield requests
        if stats.paced_tokens is not None:
            yield GaugeMetricFamily(
                "rootstock_prefill_chunk_tokens",
                "Of prompts, that the last step with decodes had room for under the target inter-token latency",
                value=stats.paced_tokens,
            )
        blocks = GaugeMetricFamily("rootstock_cache_blocks", "Blocks of the pool", labels=["state"])
        blocks.add_metric(["free"], stats.cache.free_blocks)
        blocks.add_metric(["cached"], stats.cache.cached_blocks)
        blocks.add_metric(["live"], stats.cache.live_blocks)
        yield blocks
        checkpoints = GaugeMetricFamily("rootstock_cache_checkpoints", "Places that requests can resume at")
        checkpoints.add_metric([], stats.cache.checkpoints)
        yield checkpoints
        used = GaugeMetricFamily("rootstock_cache_bytes", "Memory of the cache", labels=["of"])
        used.add_metric(["budget"], stats.cache.budget_bytes)
        used.add_metric(["used"], stats.cache.used_bytes)
        used.add_metric(["checkpoints"], stats.cache.checkpoint_bytes)
        yield used
        rows = GaugeMetricFamily(
            "rootstock_cache_rows", "Rows of each family's pool", labels=["family", "state"]
        )
        for family in stats.cache.families:
            rows.add_metric([family.name, "free"], family.free_rows)
            rows.add_metric([family.name, "cached"], family.cached_rows)
            rows.add_metric([family.name, "live"], family.live_rows)
        yield rows
        events = CounterMetricFamily(
            "rootstock_checkpoint_events", "What became of checkpoints", labels=["event"]
        )
        events.add_metric(["taken"], stats.cache.checkpoints_taken)
        events.add_metric(["hit"], stats.cache.checkpoints_hit)
        events.add_metric(["evicted"], stats.cache.checkpoints_evicted)
        events.add_metric(["skipped"], stats.cache.checkpoints_skipped)
        yield events
        drafted = CounterMetricFamily("rootstock_draft_tokens", "Tokens guessed ahead and verified")
        drafted.add_metric([], stats.counters.draft_tokens)
        yield drafted
        accepted = CounterMetricFamily(
            "rootstock_accepted_draft_tokens", "Of those, the ones that were right"
        )
        accepted.add_metric([], stats.counters.accepted_draft_tokens)
        yield accepted
        yield _counted(
            "rootstock_hits_verified",
            "Hits that were computed anew, by what came of it",
            "result",
            stats.verified,
        )
        differs = stats.verified.get("differs", 0)
        yield GaugeMetricFamily(
            "rootstock_alarm", "1 if the cache was found to hold something wrong", value=float(differs > 0)
        )
        if stats.tier is not None:
            loaded = CounterMetricFamily(
                "rootstock_loaded_prompt_tokens", "Of those found, from a tier below"
            )
            loaded.add_metric([], stats.cache.loaded_tokens)
            yield loaded
            yield from _tier(stats.tier)


def _tier(tier: TierStats) -> Iterator[Metric]:
    state = GaugeMetricFamily("rootstock_tier_state", "1 at the state that the tier is in", labels=["state"])
    for name in TIER_STATES:
        state.add_metric([name], float(tier.state == name))
    yield state
    size = GaugeMetricFamily("rootstock_tier_bytes", "Of the tier below", labels=["of"])
    size.add_metric(["used"], tier.used_bytes)
    size.add_metric(["foreign"], tier.foreign_bytes)
    size.add_metric(["cap"], tier.cap_bytes)
    size.add_metric(["waiting_to_be_stored"], tier.waiting_store_bytes)
    size.add_metric(["waiting_to_be_loaded"], tier.waiting_load_bytes)
    yield size
    records = GaugeMetricFamily("rootstock_tier_records", "In the tier's index", labels=["of"])
    records.add_metric(["this_model"], tier.records)
    records.add_metric(["others"], tier.foreign_records)
    yield records
    speed = GaugeMetricFamily(
        "rootstock_estimated_speed",
        "By which loading or computing is chosen; absent until measured",
        labels=["of"],
    )
    if tier.load_bytes_per_s is not None:
        speed.add_metric(["load_bytes_per_second"], tier.load_bytes_per_s)
    if tier.prefill_tokens_per_s is not None:
        speed.add_metric(["prefill_tokens_per_second"], tier.prefill_tokens_per_s)
    yield speed
    counters = tier.counters
    yield _counted(
        "rootstock_tier_choices",
        "Requests that could be loaded, by what was chosen",
        "choice",
        counters.choices,
    )
    yield _counted("rootstock_tier_loads", "Loads of requests, by how they ended", "ended", counters.loads)
    yield _counted("rootstock_tier_misses", "Records that could not be loaded, by why", "kind", tier.misses)
    refused = Tally(counters.stores_refused) + Tally(tier.refused)
    yield _counted("rootstock_tier_stores_refused", "Rows that were not stored, by why", "why", refused)
    moved = CounterMetricFamily("rootstock_tier_moved_bytes", "Between memory and the tier", labels=["way"])
    moved.add_metric(["stored"], tier.stored_bytes)
    moved.add_metric(["written"], tier.written_bytes)
    moved.add_metric(["loaded"], counters.loaded_bytes)
    yield moved
    stored = CounterMetricFamily("rootstock_tier_stored_records", "Records that were stored, durably")
    stored.add_metric([], tier.stored_records)
    yield stored
    struck = CounterMetricFamily("rootstock_tier_quarantined_records", "Records that were found to be wrong")
    struck.add_metric([], tier.quarantined_records)
    yield struck
    yield GaugeMetricFamily(
        "rootstock_tier_write_amplification", "Bytes written per byte stored", value=tier.write_amplification
    )


def _counted(name: str, help: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=[label])
    for what, count in sorted(counts.items()):
        family.add_metric([str(what)], count)
    return family
