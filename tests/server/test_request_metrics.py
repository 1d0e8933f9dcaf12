"""Series of requests: observations keep their sum when a tenant loses its label."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rootstock.engine.request import Finished, RequestId, Usage
from rootstock.server.access.tenant_labels import OTHERS
from rootstock.server.observe.metric_families import Buckets, Families
from rootstock.server.observe.request_metrics import (
    LATENCY_S,
    RequestMetrics,
    Series,
    add_requests,
    token_bounds,
)
from rootstock.server.request_info import Measured, RequestInfo

USAGE = Usage(100, 75, 5, queued_s=1.0, ttft_s=4.0, total_s=8.0, loading_s=2.0, loaded_tokens=50)


def end(usage: Usage = USAGE) -> Finished:
    return Finished(RequestId("x"), "stop", usage)


def info(
    measured: Measured | None = None, usage: Usage | None = None, model: str = "m", tenant: str = ""
) -> RequestInfo:
    """Returns the facts about a request that has ended."""
    return RequestInfo("id", "POST", "/", measured=measured, usage=usage, model=model, tenant=tenant)


def test_buckets_count_up_to_their_bounds_and_any_subset_can_be_shown() -> None:
    buckets = Buckets((1, 2, 5))
    for value in (0.5, 1, 1.5, 7):
        buckets.observe(value)
    assert buckets.sampled((1, 2, 5)) == ([("1.0", 2), ("2.0", 3), ("5.0", 3), ("+Inf", 4)], 10.0)
    assert buckets.sampled((2,)) == ([("2.0", 3), ("+Inf", 4)], 10.0)


def test_values_that_are_observed_at_once_count_as_one_by_one() -> None:
    values = np.concatenate(([0.0, 1.0, 2.0, 5.0, 9.0], np.random.default_rng(0).exponential(2.0, 100)))
    at_once, one_by_one = Buckets((1, 2, 5)), Buckets((1, 2, 5))
    at_once.observe_all(values)
    for value in values:
        one_by_one.observe(value)
    counts, total = at_once.sampled((1, 2, 5))
    assert counts == one_by_one.sampled((1, 2, 5))[0]
    assert total == pytest.approx(one_by_one.sampled(())[1])
    at_once.observe_all(np.empty(0))
    assert at_once.sampled((1, 2, 5)) == (counts, total)


def test_gaps_are_between_the_tokens_of_one_request() -> None:
    series = Series()
    times, requests = array("d", [1.0, 1.1, 1.5, 3.1]), array("i", [1, 0, 1, 0])
    series.observe(info(Measured(3, 0.9, times, requests)))  # the third had no token
    assert series.ttft_s.sampled(()) == ([("+Inf", 2)], pytest.approx(0.3))
    assert series.itl_s.sampled(()) == ([("+Inf", 2)], pytest.approx(2.5))


def test_phases_of_a_request_are_disjoint_and_add_up_to_its_time() -> None:
    series = Series()
    series.observe(info(Measured(1, finished=[(end(), 5)])))
    sums = {name: buckets.sampled(())[1] for name, buckets in series.histograms()}
    assert (
        sums["queue_s"] + sums["loading_s"] + sums["prefill_s"] + sums["decode_s"] == sums["total_s"] == 8.0
    )
    assert sums["waiting_s"] == 3.0
    assert sums["inference_s"] == 5.0
    assert sums["mean_itl_s"] == 1.0
    assert sums["computed_tokens"] == 25
    assert sums["cached_share"] == 0.75
    assert series.ended == {"stop": 1}


def test_tokens_are_observed_as_the_first_one_and_as_gaps() -> None:
    series = Series()
    times, requests = array("d", [1.0, 1.0, 1.0, 2.0]), array("i", [0, 1, 0, 0])
    series.observe(info(Measured(2, 0.5, times, requests)))
    assert series.ttft_s.sampled(())[0] == [("+Inf", 2)]
    assert series.itl_s.sampled(())[0] == [("+Inf", 2)]


def total(metrics: RequestMetrics, name: str) -> dict[str, float]:
    families = Families()
    add_requests(families, metrics.by_tenant)
    return {
        sample.labels["tenant"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_what_a_tenant_without_a_label_had_is_added_to_the_others() -> None:
    metrics = RequestMetrics(1)
    metrics.observe(info(Measured(1, finished=[(end(), 5)]), tenant="first"))
    for _ in range(2):
        metrics.observe(info(usage=USAGE, tenant="second"))
    assert total(metrics, "rootstock_ended_requests_total") == {OTHERS: 1}
    # A request that began when its tenant had the label.
    measured = Measured(1, finished=[(end(), 5)], unanswered=Counter(abort=1))
    metrics.observe(info(measured, tenant="first"))
    assert total(metrics, "rootstock_request_seconds_count") == {OTHERS: 2, "second": 0}
    assert total(metrics, "rootstock_prompt_tokens_total") == {OTHERS: 100, "second": 100}
    assert metrics.of_model("m").ended == {"stop": 2, "abort": 1}


def test_the_number_of_series_is_bounded_whatever_tenants_are_named() -> None:
    metrics = RequestMetrics(3)
    for number in range(1_000):
        metrics.observe(info(usage=USAGE, tenant=f"tenant {number}"))
    found = total(metrics, "rootstock_prompt_tokens_total")
    assert len(found) == 4
    assert sum(found.values()) == 100 * 1_000


def test_models_are_kept_apart_and_tenants_added_up_for_readers_who_may_not_see_them() -> None:
    metrics = RequestMetrics(3)
    for model, tenant in (("a", "x"), ("a", "y"), ("b", "x")):
        metrics.observe(info(usage=USAGE, model=model, tenant=tenant))
    found = [(labels, series.tokens["prompt"]) for labels, series in metrics.by_model()]
    assert found == [({"model_name": "a"}, 200), ({"model_name": "b"}, 100)]


@pytest.mark.parametrize(
    ("longest", "bounds"), [(1, (1,)), (12, (1, 2, 5, 10)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_bounds_of_tokens_go_up_to_the_longest(longest: int, bounds: Any) -> None:
    assert token_bounds(longest) == bounds


def test_latency_bounds_are_all_kept() -> None:
    assert [float(bound) for bound, _ in Series().ttft_s.sampled(LATENCY_S)[0]] == [*LATENCY_S, float("inf")]
