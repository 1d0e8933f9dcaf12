"""Metrics by vLLM's names, where they mean the same: boards and routers made for vLLM read them.

docs/metrics.md compares each name with vLLM's documentation. A name that would mean something else is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rootstock.engine.embedding import EmbeddingStats
from rootstock.engine.sequence import Phase
from rootstock.engine.stats import AdapterStats, EngineStats, StepCounters
from rootstock.server.observe.metric_families import Families, Labels
from rootstock.server.observe.request_metrics import (
    VLLM_CHOICES,
    VLLM_ITL_S,
    VLLM_REQUEST_S,
    VLLM_TTFT_S,
    Series,
    token_bounds,
)

_DRAFT_POSITIONS = 32  # that have a label
_LISTED_ADAPTERS = 32  # in a label
_ENDS = ("stop", "length", "abort", "error")  # each has a series from the start


def add_vllm_requests(families: Families, series: Series, context_limit: int, labels: Labels) -> None:
    """Adds the metrics per request. `series` has the requests of all tenants."""
    tokens = token_bounds(context_limit)
    for name, help, buckets, bounds in (
        ("time_to_first_token_seconds", "Time to first token", series.ttft_s, VLLM_TTFT_S),
        ("inter_token_latency_seconds", "Time between two tokens", series.itl_s, VLLM_ITL_S),
        ("request_time_per_output_token_seconds", "Mean time per token", series.mean_itl_s, VLLM_ITL_S),
        ("e2e_request_latency_seconds", "Time of a request", series.total_s, VLLM_REQUEST_S),
        ("request_queue_time_seconds", "Time until computing begins", series.waiting_s, VLLM_REQUEST_S),
        ("request_inference_time_seconds", "Time of prefill and decode", series.inference_s, VLLM_REQUEST_S),
        ("request_prefill_time_seconds", "Time of prefill", series.prefill_s, VLLM_REQUEST_S),
        ("request_decode_time_seconds", "Time of decode", series.decode_s, VLLM_REQUEST_S),
        ("request_prompt_tokens", "Tokens of a prompt", series.prompt_tokens, tokens),
        ("request_generation_tokens", "Tokens of an answer", series.completion_tokens, tokens),
        ("request_prefill_kv_computed_tokens", "Prompt tokens computed", series.computed_tokens, tokens),
        ("request_params_max_tokens", "Parameter max_tokens", series.max_tokens, tokens),
        ("request_params_n", "Parameter n", series.choices, VLLM_CHOICES),
    ):
        families.histogram(f"vllm:{name}", help, buckets, bounds, labels)
    ended = dict.fromkeys(_ENDS, 0) | dict(series.ended)
    families.counters("vllm:request_success", "Requests by their end", "finished_reason", ended, labels)


def add_vllm_engine(
    families: Families, stats: EngineStats, cache_config: Mapping[str, str], labels: Labels
) -> None:
    """Adds the metrics per engine."""
    cache, counters, phases, prompts = stats.cache, stats.counters, stats.phases, stats.counters.prompts
    queued, running = phases[Phase.QUEUED], phases[Phase.PREFILL] + phases[Phase.DECODE]

    def gauge(name: str, help: str, value: float) -> None:
        families.gauge(f"vllm:{name}", help, value, labels)

    def counter(name: str, help: str, count: float) -> None:
        families.counter(f"vllm:{name}", help, count, labels)

    # A request that waits for a load from a tier is not running in vLLM's words.
    deferred = phases[Phase.HELD] + phases[Phase.WAITING_FOR_PREFIX] + phases[Phase.LOADING]
    _add_open_requests(families, running, queued, deferred, labels)
    live_bytes = sum(family.live_rows * family.row_bytes for family in cache.families)
    help = "Share of the KV cache that running requests use, from 0 to 1"
    gauge("kv_cache_usage_perc", help, live_bytes / cache.budget_bytes if cache.budget_bytes else 0.0)
    counter("num_preemptions", "Preemptions", cache.preemptions)
    counter("generation_tokens", "Tokens generated", counters.sampled_tokens)
    counter("prompt_tokens", "Tokens of prompts", prompts.all)
    counter("prompt_tokens_cached", "Tokens of prompts that were cached", prompts.memory + prompts.loaded)
    sources = {
        "local_compute": prompts.computed,
        "local_cache_hit": prompts.memory,
        "external_kv_transfer": prompts.loaded,
    }
    help = "Tokens of prompts by source"
    families.counters("vllm:prompt_tokens_by_source", help, "source", sources, labels)
    counter("prefix_cache_queries", "Tokens looked up in memory", prompts.all)
    counter("prefix_cache_hits", "Tokens found in memory", prompts.memory)
    if stats.tier is not None:
        counter("external_prefix_cache_queries", "Tokens looked up in tiers", prompts.all - prompts.memory)
        counter("external_prefix_cache_hits", "Tokens loaded from tiers", prompts.loaded)
    config = {
        **labels,
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(cache.total_blocks),
        **cache_config,
    }
    families.gauge("vllm:cache_config_info", "Configuration of the cache", 1, config)


def add_vllm_embeddings(families: Families, stats: EmbeddingStats, labels: Labels) -> None:
    """Adds the metrics per engine of an embedding model."""
    _add_open_requests(families, stats.running, stats.waiting, 0, labels)
    families.counter("vllm:prompt_tokens", "Tokens of prompts", stats.computed_tokens, labels)


def _add_open_requests(families: Families, running: int, queued: int, deferred: int, labels: Labels) -> None:
    families.gauge("vllm:num_requests_running", "Requests in the batch", running, labels)
    families.gauge("vllm:num_requests_waiting", "Requests that wait", queued + deferred, labels)
    reasons = {"capacity": queued, "deferred": deferred}
    help = "Requests that wait, by reason"
    families.gauges("vllm:num_requests_waiting_by_reason", help, "reason", reasons, labels)


def add_vllm_drafts(families: Families, counters: StepCounters, labels: Labels) -> None:
    """Adds the counters of speculative decoding, which an engine without it does not have."""
    for name, help, count in (
        ("drafts", "Drafts", counters.drafts),
        ("draft_tokens", "Draft tokens", counters.draft_tokens),
        ("accepted_tokens", "Draft tokens accepted", counters.accepted_draft_tokens),
    ):
        families.counter(f"vllm:spec_decode_num_{name}", help, count, labels)
    accepted = counters.accepted_by_position[:_DRAFT_POSITIONS]
    by_position = {str(position): count for position, count in enumerate(accepted)}
    help = "Draft tokens accepted, by place in the draft"
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    families.counters(name, help, "position", by_position, labels)


def add_vllm_adapters(families: Families, stats: AdapterStats, labels: Labels) -> None:
    """Adds the LoRA adapters with requests: one series, whose labels list them and whose value is the time."""
    listed = {
        **labels,
        "max_lora": str(stats.most),
        "waiting_lora_adapters": _listed(stats.waiting),
        "running_lora_adapters": _listed(stats.running),
    }
    families.gauge("vllm:lora_requests_info", "LoRA adapters with requests", time.time(), listed)


def _listed(requests: Mapping[str, int]) -> str:
    """Lists the adapters with the most requests. They are ordered by name, so that the same adapters are
    the same series. Readers divide the list at commas."""
    names = [name for name in requests if "," not in name]
    most = sorted(names, key=lambda name: (-requests[name], name))[:_LISTED_ADAPTERS]
    return ",".join(sorted(most))
