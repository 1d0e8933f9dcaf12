"""Metrics of requests by model and tenant: times, lengths and ends. `vllm_metrics.py` shows them by vLLM's names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from rootstock.engine.request import Usage
from rootstock.server.access.tenant_labels import OTHERS, TenantLabels
from rootstock.server.observe.metric_families import Buckets, Families
from rootstock.server.request_info import Measured, RequestInfo

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SHARE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_LONGEST_TOKENS = 10_000_000

# vLLM's bounds. A board that adds up servers of both kinds needs the same ones.
VLLM_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
VLLM_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)  # fmt: skip
VLLM_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
VLLM_CHOICES = (1, 2, 5, 10, 20)


def token_bounds(longest: int) -> tuple[float, ...]:
    """Returns the bounds 1, 2, 5, 10, … up to a length."""
    bounds = (digit * 10**power for power in range(8) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= longest)


_REQUEST_S = sorted({*LATENCY_S, *VLLM_REQUEST_S, *VLLM_TTFT_S})
_TOKEN_S = sorted({*ITL_S, *VLLM_ITL_S})
TOKENS = token_bounds(_LONGEST_TOKENS)


class Series:
    """Metrics of the requests of one model and one tenant. The event loop's thread writes, other threads read."""

    def __init__(self) -> None:
        self.ttft_s = Buckets(_REQUEST_S)
        self.itl_s = Buckets(_TOKEN_S)
        self.queue_s = Buckets(_REQUEST_S)
        self.loading_s = Buckets(_REQUEST_S)
        self.prefill_s = Buckets(_REQUEST_S)
        self.decode_s = Buckets(_REQUEST_S)
        self.total_s = Buckets(_REQUEST_S)
        self.prompt_tokens = Buckets(TOKENS)
        self.completion_tokens = Buckets(TOKENS)
        self.cached_share = Buckets(SHARE)
        # Sums and quotients of the above, of which a histogram can't be made later.
        self.waiting_s = Buckets(_REQUEST_S)  # queue and load
        self.inference_s = Buckets(_REQUEST_S)  # prefill and decode
        self.mean_itl_s = Buckets(_TOKEN_S)
        self.computed_tokens = Buckets(TOKENS)
        self.choices = Buckets(VLLM_CHOICES)
        self.max_tokens = Buckets(TOKENS)
        self.ended: Counter[str] = Counter()  # requests by their end
        self._lock = threading.Lock()  # of ended: requests may be aborted on another thread
        self.tokens: Counter[str] = (
            Counter()
        )  # of answered HTTP requests: the prompt counts once for all choices

    def count_ends(self, reason: str, requests: int) -> None:
        with self._lock:
            self.ended[reason] += requests

    def finished(self, usage: Usage) -> None:
        prefill_s = usage.ttft_s - usage.queued_s - usage.loading_s
        decode_s = usage.total_s - usage.ttft_s
        gaps = usage.completion_tokens - 1
        for buckets, value in (
            (self.queue_s, usage.queued_s),
            (self.loading_s, usage.loading_s),
            (self.prefill_s, prefill_s),
            (self.decode_s, decode_s),
            (self.total_s, usage.total_s),
            (self.prompt_tokens, usage.prompt_tokens),
            (self.completion_tokens, usage.completion_tokens),
            (self.cached_share, usage.cached_tokens / usage.prompt_tokens),
            (self.waiting_s, usage.queued_s + usage.loading_s),
            (self.inference_s, prefill_s + decode_s),
            (self.mean_itl_s, decode_s / gaps if gaps > 0 else 0.0),
            (self.computed_tokens, usage.prompt_tokens - usage.cached_tokens),
        ):
            buckets.observe(value)

    def embedded(self, usage: Usage) -> None:
        """Observes a request to an embedding model, which has no tokens of an answer."""
        computing_s = usage.total_s - usage.queued_s
        for buckets, value in (
            (self.queue_s, usage.queued_s),
            (self.waiting_s, usage.queued_s),
            (self.prefill_s, computing_s),
            (self.inference_s, computing_s),
            (self.total_s, usage.total_s),
            (self.prompt_tokens, usage.prompt_tokens),
            (self.computed_tokens, usage.prompt_tokens),
        ):
            buckets.observe(value)

    def answered(self, usage: Usage) -> None:
        """Counts the tokens of an HTTP request that was answered."""
        self.tokens["prompt"] += usage.prompt_tokens
        self.tokens["cached"] += usage.cached_tokens
        self.tokens["completion"] += usage.completion_tokens

    def observe(self, info: RequestInfo) -> None:
        """Observes a request to a model, which has ended."""
        if info.measured is not None:
            self._measured(info.measured)
        if info.usage is not None and info.embedding is not None:
            self.count_ends("stop", 1)
            self.embedded(info.usage)
        if info.usage is not None:
            self.answered(info.usage)
        if info.usage is not None and info.call is not None:
            self.choices.observe(info.call.choices_per_prompt)

    def _measured(self, measured: Measured) -> None:
        if len(measured.token_times):
            # All at once: an answer of 100,000 tokens must not stop the event loop of other streams.
            request_of = np.frombuffer(measured.token_requests, np.int32)
            order = np.argsort(request_of, kind="stable")
            times = np.frombuffer(measured.token_times, np.float64)[order]
            is_first = np.diff(request_of[order], prepend=-1) != 0
            self.ttft_s.observe_all(times[is_first] - measured.submitted_at)
            self.itl_s.observe_all(np.diff(times)[~is_first[1:]])
        for end, max_tokens in measured.finished:
            self.count_ends(end.reason, 1)
            self.finished(end.usage)
            if max_tokens is not None:
                self.max_tokens.observe(max_tokens)
        for reason, requests in measured.unanswered.items():
            self.count_ends(reason, requests)

    def histograms(self) -> Iterator[tuple[str, Buckets]]:
        for name, value in vars(self).items():
            if isinstance(value, Buckets):
                yield name, value

    def add(self, other: Series) -> None:
        mine = dict(self.histograms())
        for name, buckets in other.histograms():
            mine[name].add(buckets)
        self.ended.update(other.ended)
        self.tokens.update(other.tokens)


class RequestMetrics:
    """The series of all models and tenants. The event loop's thread adds to them, other threads read them."""

    def __init__(self, labelled_tenants: int) -> None:
        self._series: dict[tuple[str, str], Series] = {}  # by model and label of the tenant
        self._labels = TenantLabels(labelled_tenants, self._drop)

    def observe(self, info: RequestInfo) -> None:
        """Observes a request to a model, which has ended."""
        self._of(info.model, self._labels.label(info.tenant)).observe(info)

    def _of(self, model: str, label: str) -> Series:
        return self._series.setdefault((model, label), Series())

    def _drop(self, label: str) -> None:
        """Adds the series of a tenant to the series of the others: a sum over the tenants never decreases."""
        for model, other in list(self._series):
            if other == label:
                self._of(model, OTHERS).add(self._series.pop((model, label)))

    def by_tenant(self) -> Iterator[tuple[dict[str, str], Series]]:
        """Yields each series and its labels."""
        for (model, label), series in list(self._series.items()):
            yield {"model_name": model, "tenant": label}, series

    def by_model(self) -> Iterator[tuple[dict[str, str], Series]]:
        """Yields the series of each model, for readers who may not see tenants."""
        for model in dict.fromkeys(model for model, _ in list(self._series)):
            yield {"model_name": model}, self.of_model(model)

    def of_model(self, model: str) -> Series:
        """Adds up the tenants of a model."""
        total = Series()
        for (name, _), series in list(self._series.items()):
            if name == model:
                total.add(series)
        return total


Labelled = Callable[[], Iterator[tuple[dict[str, str], Series]]]  # by tenant or by model


def add_requests(families: Families, labelled: Labelled) -> None:
    """Adds the metrics of requests by our names."""
    for labels, series in labelled():
        for name, help, buckets, bounds in (
            ("queue_seconds", "Submission to admission", series.queue_s, LATENCY_S),
            (
                "loading_seconds",
                "Admission to first forward: a load from a tier",
                series.loading_s,
                LATENCY_S,
            ),
            ("prefill_seconds", "First forward to first token", series.prefill_s, LATENCY_S),
            ("decode_seconds", "First token to end", series.decode_s, LATENCY_S),
            ("request_seconds", "Submission to end", series.total_s, LATENCY_S),
            ("ttft_seconds", "Submission to first token", series.ttft_s, LATENCY_S),
            ("itl_seconds", "Between two tokens of a request", series.itl_s, ITL_S),
            ("request_prompt_tokens", "Tokens of a prompt", series.prompt_tokens, TOKENS),
            ("request_completion_tokens", "Tokens of an answer", series.completion_tokens, TOKENS),
            ("request_cached_share", "Share of a prompt found in the cache", series.cached_share, SHARE),
        ):
            families.histogram(f"rootstock_{name}", help, buckets, bounds, labels)
        help = "Requests in the engine by their end; a choice is a request"
        families.counters("rootstock_ended_requests", help, "reason", dict(series.ended), labels)
        for name, help, key in (
            ("prompt_tokens", "Tokens of prompts", "prompt"),
            ("cached_prompt_tokens", "Tokens of prompts that were found in the cache", "cached"),
            ("completion_tokens", "Tokens generated", "completion"),
        ):
            families.counter(f"rootstock_{name}", help, series.tokens[key], labels)
