"""Metrics of a server for Prometheus. Their names use the words of docs/architecture.md; times are in seconds.

docs/metrics.md lists them, and vLLM's names for those that mean the same.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rootstock.cache.stats import CacheStats
from rootstock.engine.embedding import EmbeddingStats
from rootstock.engine.idle.prefills import IdleStats
from rootstock.engine.session_gate import ADMISSIONS
from rootstock.engine.stats import EngineStats, StepCounters
from rootstock.engine.tiers.connector import TIER_STATES, TierStats
from rootstock.errors import EngineStopped, RequestError, RootstockError
from rootstock.server.models.embedding_model import EmbeddingModel
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.metric_families import Families, Labels
from rootstock.server.observe.request_metrics import Labelled, RequestMetrics, add_requests
from rootstock.server.observe.vllm_metrics import (
    add_vllm_adapters,
    add_vllm_drafts,
    add_vllm_embeddings,
    add_vllm_engine,
    add_vllm_requests,
)
from rootstock.server.request_info import RequestInfo
from rootstock.server.wire.api_call import ApiCall
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.tiers.remote.tier import RemoteCounts

_TOOL = re.compile(r"(?:tools|functions)(?:\[|$)")  # the path of a field within a request's tools


@dataclass(frozen=True, slots=True)
class ResponseStoreStats:
    """The state of the store of responses."""

    responses: int
    stored_bytes: int
    budget_bytes: int
    waiting_bytes: int  # of responses that are not written yet
    events: Mapping[str, int]  # responses by event, since the start


class Metrics:
    def __init__(
        self,
        models: ModelRegistry,
        response_store: Callable[[], ResponseStoreStats],
        labelled_tenants: int = 0,
    ) -> None:
        self._of_requests = RequestMetrics(labelled_tenants)
        own = CollectorRegistry()
        counter = partial(Counter, registry=own)
        self.requests = counter("rootstock_requests", "HTTP requests by their outcome", ["route", "outcome"])
        self.errors = counter("rootstock_errors", "Errors of HTTP requests to a model", ["route", "code"])
        self.responses = counter(
            "http_requests", "Responses by route, method and class of status", ["handler", "method", "status"]
        )
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
        self.unread_media = counter(
            "rootstock_unread_media",
            "Images, audio, video and files of messages, for which prompts have a line of text",
            ["kind"],
        )
        self.refused_tools = counter(
            "rootstock_refused_tools", "Requests refused because of a tool or its definition", ["code"]
        )
        ProcessCollector(registry=own)
        self._for_operator = CollectorRegistry()
        self._for_others = CollectorRegistry()
        for registry, labelled in (
            (self._for_operator, self._of_requests.by_tenant),
            (self._for_others, self._of_requests.by_model),
        ):
            registry.register(own)
            registry.register(_ScrapeCollector(models, self._of_requests, labelled, response_store))

    def observe(self, info: RequestInfo) -> None:
        """Counts a request that has ended. Call it on the event loop's thread."""
        if info.outcome is not None:
            self.requests.labels(info.route, info.outcome).inc()
            if info.model:
                self._of_requests.observe(info)
            if info.call is not None:
                self._left_out(info.call)
        if info.outcome == "error":
            self.errors.labels(info.route, info.error).inc()
        elif info.refusal is not None:
            self.errors.labels(info.route, info.refusal.code).inc()

    def responded(self, route: str, method: str, status: int) -> None:
        """Counts a response, of any route, by the names that vLLM's server has for it."""
        self.responses.labels(route, method, f"{status // 100}xx").inc()

    def _left_out(self, call: ApiCall) -> None:
        """Counts the parts of a request that the model does not see."""
        for head in call.dropped:
            self.dropped_blocks.labels(head.begins).inc()
            self.dropped_chars.labels(head.begins).inc(head.chars)

        for type in call.ignored_tools:
            self.ignored_tools.labels(type).inc()
        for kind, count in Tally(medium.kind for medium in call.media).items():
            self.unread_media.labels(kind).inc(count)

    def refused(self, error: RootstockError) -> None:
        """Counts a refusal if its reason is a tool."""
        if isinstance(error, RequestError) and _TOOL.match(error.param or ""):
            self.refused_tools.labels(error.code).inc()

    def render(self) -> bytes:
        """Renders all metrics, without tenants. Waits for the engines' threads: not for an event loop."""
        return generate_latest(self._for_others)

    def render_for_operator(self) -> bytes:
        """Renders all metrics, by tenant where they have one. Waits as `render` does."""
        return generate_latest(self._for_operator)


class _ScrapeCollector(Collector):
    """The metrics that are made at each scrape: of requests, engines, answers and the store of responses."""

    def __init__(
        self,
        models: ModelRegistry,
        of_requests: RequestMetrics,
        labelled: Labelled,
        response_store: Callable[[], ResponseStoreStats],
    ) -> None:
        self._models = models
        self._of_requests = of_requests
        self._labelled = labelled
        self._response_store = response_store

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the engines may not run yet

    def collect(self) -> Iterator[Metric]:
        families = Families()
        add_requests(families, self._labelled)
        for model in list(self._models.loaded):
            labels = {"model_name": model.name}
            vllm_labels = {**labels, "engine": "0"}  # in vLLM's words, the number of a model's engine
            series = self._of_requests.of_model(model.name)
            add_vllm_requests(families, series, model.context_limit, vllm_labels)
            alive = model.engine.health().alive
            families.gauge("rootstock_alive", "1 while the engine works", alive, labels)
            _add_prompts(families, model.tokenizer, labels)
            if not alive:
                continue  # it would not answer
            try:
                stats = model.engine.stats()
            except EngineStopped:
                continue
            _add_engine(families, stats, labels)
            config = {
                "enable_prefix_caching": str(model.reuses_prefixes),
                "cache_dtype": model.description.kv_dtype,
            }
            add_vllm_engine(families, stats, config, vllm_labels)
            if model.engine.parts.why_no_drafts is None:
                add_vllm_drafts(families, stats.counters, vllm_labels)
            if stats.adapters is not None:
                add_vllm_adapters(families, stats.adapters, vllm_labels)
        for embedding in self._models.loaded_embeddings:
            self._add_embedding(families, embedding)
        _add_response_store(families, self._response_store())
        yield from families

    def _add_embedding(self, families: Families, model: EmbeddingModel) -> None:
        """Adds an embedding model: its engine has steps and requests, but no cache and no sampled tokens."""
        labels = {"model_name": model.name}
        vllm_labels = {**labels, "engine": "0"}
        series = self._of_requests.of_model(model.name)
        add_vllm_requests(families, series, model.engine.most_tokens, vllm_labels)
        families.gauge("rootstock_alive", "1 while the engine works", model.engine.health().alive, labels)
        stats = model.engine.stats()
        phases = {"queued": stats.waiting, "prefill": stats.running}
        _add_steps(families, stats, stats.running, stats.waiting, phases, labels)
        add_vllm_embeddings(families, stats, vllm_labels)


def _add_steps(
    families: Families,
    counters: StepCounters | EmbeddingStats,
    running: int,
    waiting: int,
    phases: Mapping[str, int],
    labels: Labels,
) -> None:
    """Adds the requests and the steps of an engine."""
    in_engine = {"running": running, "waiting": waiting}
    help = "Requests in the engine"
    families.gauges("rootstock_engine_requests", help, "state", in_engine, labels)
    help = "Requests in the engine by their phase"
    families.gauges("rootstock_engine_phases", help, "phase", phases, labels)
    for name, help, count in (
        ("steps", "Steps of the engine", counters.steps),
        ("failed_steps", "Steps whose forward failed", counters.failed_steps),
        ("forward_seconds", "Time in forwards", counters.forward_s),
        ("computed_tokens", "Positions that went through a forward", counters.computed_tokens),
    ):
        families.counter(f"rootstock_{name}", help, count, labels)


def _add_engine(families: Families, stats: EngineStats, labels: Labels) -> None:
    cache, counters = stats.cache, stats.counters

    def gauge(name: str, help: str, value: float) -> None:
        families.gauge(f"rootstock_{name}", help, value, labels)

    def gauges(name: str, help: str, label: str, values: Mapping[str, float | None]) -> None:
        families.gauges(f"rootstock_{name}", help, label, values, labels)

    def counter(name: str, help: str, count: float) -> None:
        families.counter(f"rootstock_{name}", help, count, labels)

    def counts(name: str, help: str, label: str, values: Mapping[str, float]) -> None:
        families.counters(f"rootstock_{name}", help, label, values, labels)

    phases = {phase.value: count for phase, count in stats.phases.items()}
    _add_steps(families, counters, stats.running, stats.waiting, phases, labels)
    if stats.paced_tokens is not None:
        help = (
            "Prompt tokens for which the last step with decodes had time, by the target inter-token latency"
        )
        gauge("prefill_chunk_tokens", help, stats.paced_tokens)
    counter("sampled_tokens", "Tokens that were sampled", counters.sampled_tokens)
    prompts = counters.prompts
    sources = {"memory": prompts.memory, "computed": prompts.computed}
    if stats.tier is not None:
        sources |= {"host": prompts.host, "disk": prompts.disk}
    counts(
        "prompt_tokens_by_source", "Tokens of computed prompts by the source of their K/V", "source", sources
    )
    blocks = {"free": cache.free_blocks, "cached": cache.cached_blocks, "live": cache.live_blocks}
    gauges("cache_blocks", "Blocks of the pool", "state", blocks)
    gauge("cache_checkpoints", "Positions that requests can resume at", cache.checkpoints)
    used = {
        "used": cache.used_bytes,
        "checkpoints": cache.checkpoint_bytes,
        "retained": cache.retained_bytes,
        "pinned": cache.pinned_bytes,
    }
    gauges("cache_bytes", "Memory of the cache", "of", {"budget": cache.budget_bytes, **used})
    for family in cache.families:
        rows = {"free": family.free_rows, "cached": family.cached_rows, "live": family.live_rows}
        for state, number in rows.items():
            where = {**labels, "family": family.name, "state": state}
            families.gauge("rootstock_cache_rows", "Rows of each family's pool", number, where)
            size = number * family.row_bytes
            families.gauge("rootstock_cache_row_bytes", "Bytes of each family's rows", size, where)
    counter("evicted_tokens", "Cached tokens that were evicted from memory", cache.evicted_tokens)
    help = (
        "Cached prompt tokens behind the last whole block of a hit, which a cache of whole blocks would miss"
    )
    counter("hit_tokens_inside_blocks", help, cache.inside_block_tokens)
    moved = {
        "copied": cache.copied_blocks,
        "duplicate": cache.duplicate_blocks,
        "evicted": cache.evicted_blocks,
    }
    counts("block_events", "Blocks by event", "event", moved)
    verdicts = {
        "accepted": cache.accepted_hints,
        "clipped": cache.clipped_hints,
        "refused": cache.refused_hints,
    }
    counts("hints", "Hints of admitted requests by the decision about them", "verdict", verdicts)
    lost = {"expired": cache.expired_grants, "displaced": cache.displaced_grants}
    counts("lost_grants", "Cached entries that lost their retention, by the reason", "reason", lost)
    help = "Cached tokens that were evicted within their time to live"
    counter("evicted_retained_tokens", help, cache.evicted_retained_tokens)
    gauge("pins", "Pinned prefixes", cache.pins)
    counter("dropped_pins", "Pins given up for a request that could not run otherwise", cache.dropped_pins)
    counter("preemptions", "Running requests that were put back into the queue", cache.preemptions)
    events = {
        "taken": cache.checkpoints_taken,
        "hit": cache.checkpoints_hit,
        "evicted": cache.checkpoints_evicted,
        "skipped": cache.checkpoints_skipped,
    }
    counts("checkpoint_events", "Checkpoints by event", "event", events)
    help = "Tokens computed again behind a volatile span, such as a date or an id"
    counter("volatile_prompt_tokens", help, cache.volatile_tokens)
    counter("draft_tokens", "Draft tokens verified", counters.draft_tokens)
    counter("accepted_draft_tokens", "Draft tokens accepted", counters.accepted_draft_tokens)
    counts("hits_verified", "Recomputed hits by result", "result", stats.verified)
    gauge("alarm", "1 if the cache was found to hold wrong data", stats.verified.get("differs", 0) > 0)
    if stats.tier is not None:
        counter("loaded_prompt_tokens", "Cached tokens of prompts loaded from a tier", cache.loaded_tokens)
        _add_tier(stats.tier, gauge, gauges, counter, counts)
    if stats.idle is not None:
        _add_idle(families, stats.idle, cache, labels)
    if stats.sessions is not None:
        sessions = stats.sessions
        of = {"known": sessions.known, "active": sessions.active}
        gauges("sessions", "Sessions of requests", "state", of)
        help = "Known sessions by the part of their prompts that was found, at least"
        gauges("sessions_by_hit_rate", help, "hit_rate", sessions.by_hit_rate)
        needed = {
            "expected": sessions.expected_bytes,
            "active": sessions.active_bytes,
            "budget": sessions.budget_bytes,
        }
        gauges("session_bytes", "Memory that sessions need for themselves", "of", needed)
        admitted = dict.fromkeys(ADMISSIONS, 0) | sessions.admitted
        help = "Requests that were held for their session's place in memory, by the reason of their admission"
        counts("held_requests", help, "admitted", admitted)
        counter("held_seconds", "Time for which these requests were held", sessions.held_s)
    if stats.memory is not None:
        memory = stats.memory
        gauge("memory_limit_bytes", "Memory that the process may take", memory.limit_bytes)
        gauge("memory_footprint_bytes", "Memory that the process takes", memory.footprint_bytes)
        gauge("memory_pressure", "1 near the memory limit, 2 where requests wait for memory", memory.pressure)
        help = "Requests that waited because the process was close to its memory limit"
        counter("memory_held_requests", help, memory.held_requests)
        counter("memory_returns", "Returns of unused memory to the system", memory.returns)
    if stats.kv_events is not None:
        counter("kv_event_batches", "Batches of KV events published", stats.kv_events.batches)
        counter("kv_events", "KV events published", stats.kv_events.events)
        counter("kv_event_bytes", "Bytes of published batches of KV events", stats.kv_events.bytes)
    if stats.pool_copies is not None:
        help = "Arrays of the pools that writes have copied as a whole: always 0, unless there is a fault"
        counter("pool_copies", help, stats.pool_copies)


def _add_tier(
    tier: TierStats,
    gauge: Callable[[str, str, float], None],
    gauges: Callable[[str, str, str, Mapping[str, float | None]], None],
    counter: Callable[[str, str, float], None],
    counts: Callable[[str, str, str, Mapping[str, float]], None],
) -> None:
    counters = tier.counters
    states = {name: float(tier.state == name) for name in TIER_STATES}
    gauges("tier_state", "1 for the state of the tier", "state", states)
    sizes = {
        "used": tier.used_bytes,
        "foreign": tier.foreign_bytes,
        "cap": tier.cap_bytes,
        "waiting_to_be_stored": tier.waiting_store_bytes,
        "waiting_to_be_loaded": tier.waiting_load_bytes,
    }
    gauges("tier_bytes", "Bytes of the tier", "of", sizes)
    records = {"this_model": tier.records, "others": tier.foreign_records}
    gauges("tier_records", "Records in the tier's index", "of", records)
    help = "Estimates by which the engine chooses between loading and computing; absent until measured"
    speeds = {
        "load_bytes_per_second": tier.load_bytes_per_s,
        "prefill_tokens_per_second": tier.prefill_tokens_per_s,
    }
    gauges("estimated_speed", help, "of", speeds)
    counts("tier_choices", "Requests that could be loaded, by choice", "choice", counters.choices)
    counts("tier_loads", "Loads of requests, by their end", "ended", counters.loads)
    counts("tier_misses", "Records that could not be loaded, by reason", "kind", tier.misses)
    refused = Tally(counters.stores_refused) + Tally(tier.refused)
    counts("tier_stores_refused", "Rows that were not stored, by reason", "why", refused)
    moved = {"stored": tier.stored_bytes, "written": tier.written_bytes, "loaded": counters.loaded_bytes}
    counts("tier_moved_bytes", "Bytes between memory and the tier", "way", moved)
    help = "Of the bytes loaded, those that the host's RAM had"
    counter("tier_loaded_from_host_bytes", help, counters.loaded_from_host_bytes)
    counter("tier_stored_records", "Records stored durably", tier.stored_records)
    counter("tier_quarantined_records", "Records found to be damaged", tier.quarantined_records)
    gauge("tier_write_amplification", "Bytes written per byte stored", tier.write_amplification)
    if tier.remote is not None:
        _add_remote(tier, tier.remote, gauge, gauges, counter, counts)


def _add_remote(
    tier: TierStats,
    remote: RemoteCounts,
    gauge: Callable[[str, str, float], None],
    gauges: Callable[[str, str, str, Mapping[str, float | None]], None],
    counter: Callable[[str, str, float], None],
    counts: Callable[[str, str, str, Mapping[str, float]], None],
) -> None:
    gauge("remote_ready", "1 while the shared server can be reached", tier.remote_is_ready)
    counter("remote_outages", "Times at which the shared server could no longer be reached", remote.outages)
    counter("remote_lookups", "Prompts looked up in the shared server", remote.lookups)
    records = {
        "stored": remote.stored_records,
        "already_stored": remote.already_stored,
        "found": remote.found_records,
        "loaded": remote.loaded_records,
    }
    counts("remote_records", "Records of the shared server by event", "event", records)
    moved = {"stored": remote.stored_bytes, "loaded": remote.loaded_bytes}
    counts("remote_moved_bytes", "Bytes between memory and the shared server", "way", moved)
    misses = {str(kind): count for kind, count in remote.misses.items()}
    counts("remote_misses", "Records that the shared server did not have as they were stored", "kind", misses)
    refused = {str(why): count for why, count in remote.refused.items()}
    counts("remote_stores_refused", "Records that the shared server did not take", "why", refused)
    usage = tier.remote_usage
    if usage is not None:
        sizes = {"used": usage.used_bytes, "cap": usage.cap_bytes}
        gauges(
            "remote_server_bytes", "Memory of the shared server, of all its users; cap 0: none", "of", sizes
        )
        counter("remote_server_evicted_keys", "Keys that the shared server has evicted", usage.evicted_keys)


def _add_idle(families: Families, idle: IdleStats, cache: CacheStats, labels: Labels) -> None:
    for kind, ends in sorted(idle.ended.items()):
        where = {**labels, "kind": str(kind)}
        help = "Prompts of idle work, by their kind and end"
        families.counters("rootstock_idle_work", help, "ended", ends, where)
    families.gauge("rootstock_idle_work_waiting", "Prompts that wait for idle time", idle.waiting, labels)
    events = {
        "computed": idle.computed_tokens,
        "loaded": idle.loaded_tokens,
        "hit": cache.idle_hit_tokens,
        "evicted": cache.idle_evicted_tokens,
    }
    help = "Tokens of idle work by event: computed or loaded, then hit by a request or evicted before"
    families.counters("rootstock_idle_tokens", help, "event", events, labels)


def _add_prompts(families: Families, prompts: PromptTokenizer, labels: Labels) -> None:
    """Adds the memory of sampled answers and of tokenized prompts."""
    answers = prompts.answers
    counters = answers.counters
    help = "Prompt tokens that got the ids with which the server had sampled them"
    families.counter("rootstock_spliced_prompt_tokens", help, counters.spliced_tokens, labels)
    events = {
        "remembered": counters.answers,
        "calls_remembered": counters.calls,
        "calls_restored": counters.restored_calls,
        "dropped": answers.dropped,
    }
    help = "Answers and tool calls by event"
    families.counters("rootstock_sampled_answers", help, "event", events, labels)
    help = "Memory of sampled answers"
    families.gauge("rootstock_sampled_answers_bytes", help, answers.held_bytes, labels)
    help = "Memory of the tokenized pieces of recent prompts"
    families.gauge("rootstock_tokenized_bytes", help, prompts.tokenized_bytes, labels)


def _add_response_store(families: Families, stats: ResponseStoreStats) -> None:
    families.gauge("rootstock_stored_responses", "Responses in the store", stats.responses, {})
    sizes = {
        "used": stats.stored_bytes,
        "budget": stats.budget_bytes,
        "waiting_to_be_stored": stats.waiting_bytes,
    }
    help = "Bytes of the store of responses"
    families.gauges("rootstock_stored_responses_bytes", help, "of", sizes, {})
    help = "Responses by event"
    families.counters("rootstock_stored_responses_events", help, "event", stats.events, {})
