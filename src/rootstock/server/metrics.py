"""Metrics of a server for Prometheus. Their names use the words of docs/architecture.md; times are in seconds."""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rootstock.cache.stats import CacheStats
from rootstock.engine.conversation.volatile_heads import DroppedHead
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import IdleStats
from rootstock.engine.prompts.sampled_answers import SampledAnswers
from rootstock.engine.request import Usage
from rootstock.engine.tiers.connector import TIER_STATES, TierStats
from rootstock.errors import EngineStopped, RequestError, RootstockError
from rootstock.server.models import ModelRegistry

_TOOL = re.compile(r"(?:tools|functions)(?:\[|$)")  # the path of a field within a request's tools

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class ResponseStoreStats:
    """The state of the store of responses."""

    responses: int
    stored_bytes: int
    budget_bytes: int
    waiting_bytes: int  # of responses that are not written yet
    events: Mapping[str, int]  # responses by event, since the start


class Metrics:
    def __init__(self, models: ModelRegistry, response_store: Callable[[], ResponseStoreStats]) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("rootstock_requests", "HTTP requests by their outcome", ["route", "outcome"])
        self.prompt_tokens = counter("rootstock_prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter(
            "rootstock_cached_prompt_tokens", "Tokens of prompts that were found in the cache"
        )
        self.completion_tokens = counter("rootstock_completion_tokens", "Tokens generated")
        self.dropped_blocks = counter(
            "rootstock_dropped_volatile_blocks", "Volatile blocks dropped from system prompts", ["begins"]
        )
        self.dropped_chars = counter(
            "rootstock_dropped_volatile_characters", "Characters of the volatile blocks dropped", ["begins"]
        )
        self.ignored_tools = counter(
            "rootstock_ignored_tools",
            "Tools left out of prompts, because the server has none of their type",
            ["type"],
        )
        self.refused_tools = counter(
            "rootstock_refused_tools", "Requests refused because of a tool or its definition", ["code"]
        )
        self.queue_s = histogram("rootstock_queue_seconds", "Submission to admission", buckets=_LATENCY_S)
        self.ttft_s = histogram("rootstock_ttft_seconds", "Submission to first token", buckets=_LATENCY_S)
        self.itl_s = LoopHistogram("rootstock_itl_seconds", "Between two tokens of a request", _ITL_S)
        self.registry.register(self.itl_s)
        self.registry.register(_ModelsCollector(models))
        self.registry.register(_ResponsesCollector(response_store))

    def timing(self, requests: int) -> Timing:
        return Timing(self, requests)

    def answered(self, route: str, outcome: str, usage: Usage | None = None) -> None:
        """Counts the end of an HTTP request: "ok", "error" or "disconnected"."""
        self.requests.labels(route, outcome).inc()
        if usage is not None:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_tokens)
            self.completion_tokens.inc(usage.completion_tokens)

    def dropped(self, heads: Iterable[DroppedHead]) -> None:
        for head in heads:
            self.dropped_blocks.labels(head.begins).inc()
            self.dropped_chars.labels(head.begins).inc(head.chars)

    def tools_ignored(self, types: Iterable[str]) -> None:
        for type in types:
            self.ignored_tools.labels(type).inc()

    def refused(self, error: RootstockError) -> None:
        """Counts a refusal if its reason is a tool."""
        if isinstance(error, RequestError) and _TOOL.match(error.param or ""):
            self.refused_tools.labels(error.code).inc()

    def render(self) -> bytes:
        """Renders all metrics. Waits for the engine's thread: not for an event loop."""
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
    """A histogram for the event loop's thread alone, which observes every token.

    It has no lock: that would cost more than the rest of the work on a token.
    """

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


class _ModelsCollector(Collector):
    """The state of each model at each scrape. The samples of several models have a label `model`."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the engines may not run yet

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for model in self._models.loaded:
            label = {"model": model.name} if self._models.are_several else {}
            of_engine = _EngineCollector(model.engine).collect()
            for metric in itertools.chain(of_engine, _AnswersCollector(model.tokenizer.answers).collect()):
                kept = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    kept.add_sample(sample.name, sample.labels | label, sample.value)
        yield from found.values()


class _EngineCollector:
    """The state of an engine and its cache at a scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield _gauge("alive", "1 while the engine works", self._engine.health().alive)
        try:
            stats = self._engine.stats()
        except EngineStopped:
            return
        cache, counters = stats.cache, stats.counters
        yield _gauges(
            "engine_requests", "Requests in the engine", "state", running=stats.running, waiting=stats.waiting
        )
        if stats.paced_tokens is not None:
            yield _gauge(
                "prefill_chunk_tokens",
                "Prompt tokens for which the last step with decodes had time, by the target inter-token latency",
                stats.paced_tokens,
            )
        blocks = {"free": cache.free_blocks, "cached": cache.cached_blocks, "live": cache.live_blocks}
        yield _gauges("cache_blocks", "Blocks of the pool", "state", **blocks)
        yield _gauge("cache_checkpoints", "Positions that requests can resume at", cache.checkpoints)
        used = {"used": cache.used_bytes, "checkpoints": cache.checkpoint_bytes}
        yield _gauges("cache_bytes", "Memory of the cache", "of", budget=cache.budget_bytes, **used)
        rows = GaugeMetricFamily(
            "rootstock_cache_rows", "Rows of each family's pool", labels=["family", "state"]
        )
        for family in cache.families:
            rows.add_metric([family.name, "free"], family.free_rows)
            rows.add_metric([family.name, "cached"], family.cached_rows)
            rows.add_metric([family.name, "live"], family.live_rows)
        yield rows
        yield _counters(
            "checkpoint_events",
            "Checkpoints by event",
            "event",
            taken=cache.checkpoints_taken,
            hit=cache.checkpoints_hit,
            evicted=cache.checkpoints_evicted,
            skipped=cache.checkpoints_skipped,
        )
        yield _counter(
            "volatile_prompt_tokens",
            "Tokens computed again behind a volatile span, such as a date or an id",
            cache.volatile_tokens,
        )
        yield _counter("draft_tokens", "Draft tokens verified", counters.draft_tokens)
        yield _counter("accepted_draft_tokens", "Draft tokens accepted", counters.accepted_draft_tokens)
        yield _counters("hits_verified", "Recomputed hits by result", "result", **stats.verified)
        yield _gauge(
            "alarm", "1 if the cache was found to hold wrong data", stats.verified.get("differs", 0) > 0
        )
        if stats.tier is not None:
            yield _counter(
                "loaded_prompt_tokens", "Cached tokens of prompts loaded from a tier", cache.loaded_tokens
            )
            yield from _tier(stats.tier)
        if stats.idle is not None:
            yield from _idle(stats.idle, cache)


class _AnswersCollector:
    """The memory of a model's sampled answers at a scrape."""

    def __init__(self, answers: SampledAnswers) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        counters = self._answers.counters
        yield _counter(
            "spliced_prompt_tokens",
            "Prompt tokens that got the ids with which the server had sampled them",
            counters.spliced_tokens,
        )
        yield _counters(
            "sampled_answers",
            "Answers and tool calls by event",
            "event",
            remembered=counters.answers,
            calls_remembered=counters.calls,
            calls_restored=counters.restored_calls,
            dropped=self._answers.dropped,
        )
        yield _gauge("sampled_answers_bytes", "Memory of sampled answers", self._answers.held_bytes)


class _ResponsesCollector(Collector):
    """The store of responses at each scrape."""

    def __init__(self, stats: Callable[[], ResponseStoreStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge("stored_responses", "Responses in the store", stats.responses)
        yield _gauges(
            "stored_responses_bytes",
            "Bytes of the store of responses",
            "of",
            used=stats.stored_bytes,
            budget=stats.budget_bytes,
            waiting_to_be_stored=stats.waiting_bytes,
        )
        yield _counters("stored_responses_events", "Responses by event", "event", **stats.events)


def _idle(idle: IdleStats, cache: CacheStats) -> Iterator[Metric]:
    prompts = CounterMetricFamily(
        "rootstock_idle_work", "Prompts of idle work, by their kind and end", labels=["kind", "ended"]
    )
    for kind, ends in sorted(idle.ended.items()):
        for end, count in sorted(ends.items()):
            prompts.add_metric([kind, end], count)
    yield prompts
    yield _gauge("idle_work_waiting", "Prompts that wait for idle time", idle.waiting)
    yield _counters(
        "idle_tokens",
        "Tokens of idle work by event: computed or loaded, then hit by a request or evicted before",
        "event",
        computed=idle.computed_tokens,
        loaded=idle.loaded_tokens,
        hit=cache.idle_hit_tokens,
        evicted=cache.idle_evicted_tokens,
    )


def _tier(tier: TierStats) -> Iterator[Metric]:
    counters = tier.counters
    states = {name: float(tier.state == name) for name in TIER_STATES}
    yield _gauges("tier_state", "1 for the state of the tier", "state", **states)
    yield _gauges(
        "tier_bytes",
        "Bytes of the tier",
        "of",
        used=tier.used_bytes,
        foreign=tier.foreign_bytes,
        cap=tier.cap_bytes,
        waiting_to_be_stored=tier.waiting_store_bytes,
        waiting_to_be_loaded=tier.waiting_load_bytes,
    )
    records = {"this_model": tier.records, "others": tier.foreign_records}
    yield _gauges("tier_records", "Records in the tier's index", "of", **records)
    yield _gauges(
        "estimated_speed",
        "Estimates by which the engine chooses between loading and computing; absent until measured",
        "of",
        load_bytes_per_second=tier.load_bytes_per_s,
        prefill_tokens_per_second=tier.prefill_tokens_per_s,
    )
    yield _counters("tier_choices", "Requests that could be loaded, by choice", "choice", **counters.choices)
    yield _counters("tier_loads", "Loads of requests, by their end", "ended", **counters.loads)
    yield _counters("tier_misses", "Records that could not be loaded, by reason", "kind", **tier.misses)
    refused = Tally(counters.stores_refused) + Tally(tier.refused)
    yield _counters("tier_stores_refused", "Rows that were not stored, by reason", "why", **refused)
    moved = {"stored": tier.stored_bytes, "written": tier.written_bytes, "loaded": counters.loaded_bytes}
    yield _counters("tier_moved_bytes", "Bytes between memory and the tier", "way", **moved)
    yield _counter("tier_stored_records", "Records stored durably", tier.stored_records)
    yield _counter("tier_quarantined_records", "Records found to be damaged", tier.quarantined_records)
    yield _gauge("tier_write_amplification", "Bytes written per byte stored", tier.write_amplification)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rootstock_{name}", help, value=float(value))


def _gauges(name: str, help: str, label: str, /, **values: float | None) -> Metric:
    """Makes a family with one value for each value of its label. None is left out."""
    family = GaugeMetricFamily(f"rootstock_{name}", help, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _counter(name: str, help: str, count: int) -> Metric:
    return CounterMetricFamily(f"rootstock_{name}", help, value=count)


def _counters(name: str, help: str, label: str, /, **counts: int) -> Metric:
    family = CounterMetricFamily(f"rootstock_{name}", help, labels=[label])
    for key, count in sorted(counts.items()):
        family.add_metric([key], count)
    return family
