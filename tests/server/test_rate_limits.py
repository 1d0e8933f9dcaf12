"""Limits of tenants: exact with many threads, told in headers of either API, and forgotten for idle tenants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rootstock.errors import RateLimited
from rootstock.server.access import guard as access
from rootstock.server.access.rate_limits import Bucket, Meter, RateLimiter, duration
from rootstock.server.access.rules import TenantLimits
from server.conftest import user
from server.held import Held
from server.test_access import COMPLETIONS, code, key, salted

Clock = Callable[[], float]


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers limit by a clock that stands still: what a test has taken does not come back while it runs."""
    monkeypatch.setattr(access, "RateLimiter", lambda _: RateLimiter(Time()))


def test_a_bucket_fills_evenly_up_to_a_minutes_worth() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(50, 0.0)
    assert bucket.level(1.0) == 11.0
    assert bucket.missing_s(20, 1.0) == pytest.approx(9.0)
    assert bucket.level(1000.0) == 60.0
    assert bucket.missing_s(10_000, 1000.0) == 0.0, "a full bucket lets any amount pass"
    bucket.take(100, 1000.0)
    assert bucket.missing_s(1, 1000.0) == pytest.approx(41.0)


def test_a_limit_is_exact_with_many_threads() -> None:
    limiter, admitted = RateLimiter(Time()), list[int]()
    limits = TenantLimits(requests_per_minute=500, max_concurrency=1000)

    def ask(number: int) -> None:
        for _ in range(100):
            try:
                limiter.enter("a", limits)
            except RateLimited:
                continue
            admitted.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 500


def test_requests_in_progress_are_limited_and_counted_until_their_end() -> None:
    limiter, limits = RateLimiter(Time()), TenantLimits(max_concurrency=2)
    first, _ = limiter.enter("a", limits), limiter.enter("a", limits)
    with pytest.raises(RateLimited, match="max_concurrency is 2"):
        limiter.enter("a", limits)
    limiter.enter("b", limits)
    first.leave()
    limiter.enter("a", limits)


def test_answers_may_owe_tokens_that_the_next_request_waits_for() -> None:
    time = Time()
    limiter, limits = RateLimiter(time), TenantLimits(tokens_per_minute=60)
    meter = Meter(limiter.enter("a", limits))
    meter.begin([40, 40], 2)  # two choices of one prompt
    meter.generated(30)
    with pytest.raises(RateLimited) as refused:
        limiter.enter("a", limits)
    assert refused.value.retry_after_s == pytest.approx(11.0)
    time.now += 11.0
    with pytest.raises(RateLimited, match="tokens_per_minute is 60"):
        Meter(limiter.enter("a", limits)).begin([2], 1)
    time.now += 1.0
    Meter(limiter.enter("a", limits)).begin([2], 1)


def test_cached_tokens_are_given_back_once() -> None:
    time = Time()
    limiter, limits = RateLimiter(time), TenantLimits(uncached_tokens_per_minute=100)
    meter = Meter(limiter.enter("a", limits))
    meter.begin([250], 1)
    with pytest.raises(RateLimited):
        limiter.enter("a", limits)
    for _ in range(2):
        meter.admitted(0, 240)
    meter.generated(1_000)
    use = limiter.enter("a", limits)
    assert use._buckets["uncached_tokens_per_minute"].level(time.now) == 90


def test_changed_limits_keep_the_debts() -> None:
    limiter = RateLimiter(Time())
    for _ in range(4):
        limiter.enter("a", TenantLimits(requests_per_minute=4))
    with pytest.raises(RateLimited, match="is 100"):
        limiter.enter("a", TenantLimits(requests_per_minute=100))
    limiter.enter("a", TenantLimits(max_concurrency=9))


def test_idle_tenants_are_forgotten_and_busy_ones_are_not() -> None:
    limiter, limits = RateLimiter(Time(), most=3), TenantLimits(requests_per_minute=1)
    limiter.enter("busy", limits)
    for number in range(100):
        limiter.enter(f"t{number}", limits).leave()
    assert len(limiter) == 3
    with pytest.raises(RateLimited):
        limiter.enter("busy", limits)


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.0195, 0.9991, 1.2, 59.9, 60, 61)] == [
        "0ms",
        "20ms",
        "1s",
        "2s",
        "1m0s",
        "1m0s",
        "1m1s",
    ]


def test_every_route_with_a_body_is_limited(keyed: Any) -> None:
    """A new route is limited wherever its path begins. Only probes and the dashboard are not."""
    with keyed("keys: [{key: k, tenant: a}]\ntenants: {a: {requests_per_minute: 1}}") as served:
        paths = [path for path, methods in served.app.openapi()["paths"].items() if "post" in methods]
        assert {"/tokenize", "/detokenize", "/v1/responses/compact", "/ping"} <= set(paths)
        for path in ["/v1/models/x", *paths]:
            answer = served.client.post(path, json={}, headers=key("k"))
            if path == "/v1/models/x":
                assert code(answer) == "method_not_allowed"  # takes the minute's one request
            elif path == "/ping" or path.startswith("/dashboard/"):
                assert answer.status_code != 429, path
            else:
                assert answer.status_code == 429, path


def test_each_api_tells_of_limits_in_its_own_form(keyed: Any) -> None:
    with keyed(
        "keys: [{key: k1, tenant: a}, {key: k2, tenant: a}, {key: free, tenant: b}]\n"
        "tenants: {a: {requests_per_minute: 2, tokens_per_minute: 100000}}"
    ) as served:

        def asked(value: str, path: str = COMPLETIONS, **body: Any) -> Any:
            body = body or {"prompt": "once", "max_tokens": 3, "ignore_eos": True}
            return served.client.post(path, json=body, headers=key(value))

        told = asked("k1").headers
        assert told["x-ratelimit-limit-requests"] == "2"
        assert told["x-ratelimit-remaining-requests"] == "1"
        assert told["x-ratelimit-reset-requests"] == "30s"
        assert told["x-ratelimit-remaining-tokens"] == str(100_000 - len("once") - 3)
        body = {"messages": user("hi"), "max_tokens": 1}
        told = asked("k2", "/v1/messages", **body).headers
        assert told["anthropic-ratelimit-requests-remaining"] == "0"
        assert told["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert not any(name.startswith("x-ratelimit") for name in told)
        refused = asked("k1")
        assert (refused.status_code, code(refused)) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "30"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        refused = asked("k2", "/v1/messages/count_tokens", **body)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "k2" not in refused.text
        assert code(served.client.get("/v1/models", headers=key("k1"))) is None, "reading costs nothing"
        told = asked("free").headers
        assert not any("ratelimit" in name for name in told)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_answers_count_as_they_come(keyed: Any, stream: bool) -> None:
    with keyed("keys: [{key: k, tenant: a}]\ntenants: {a: {tokens_per_minute: 60}}") as served:
        body = {
            "prompt": "once upon",
            "max_tokens": 70,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
        }
        answer = served.client.post(COMPLETIONS, json=body, headers=key("k"))
        assert answer.status_code == 200
        refused = served.client.post(COMPLETIONS, json=body, headers=key("k"))
        assert code(refused) == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "20"  # 9 + 70 tokens of 60, and one more


def test_a_prompt_beyond_the_rest_of_the_minute_is_refused_before_it_is_computed(keyed: Any) -> None:
    with keyed("keys: [{key: k, tenant: a}]\ntenants: {a: {tokens_per_minute: 60}}") as served:
        body = {"prompt": "x" * 40, "max_tokens": 0}
        statuses = [
            served.client.post(COMPLETIONS, json=body, headers=key("k")).status_code for _ in range(2)
        ]
        assert statuses == [200, 429]
        assert served.assembly.engine.stats().cache.admissions == 1


def test_requests_in_progress_hold_their_place_until_they_end(keyed: Any) -> None:
    held = Held()
    with keyed(
        "keys: [{key: k, tenant: a}]\ndefault: {max_concurrency: 1}", fault=held, api_key="proxy"
    ) as served:
        body = {"prompt": "once", "max_tokens": 3, "stream": True}
        with served.client.stream("POST", COMPLETIONS, json=body, headers=key("k")):
            refused = served.client.post(COMPLETIONS, json=body, headers=key("k"))
            assert code(refused) == "rate_limit_exceeded"
            assert "max_concurrency is 1" in refused.text
            named = served.client.get("/v1/models", headers=key("proxy") | salted("b"))
            assert named.status_code == 200
            held.let_go()
        served.settled()
        body["stream"] = False
        assert code(served.client.post(COMPLETIONS, json=body, headers=key("k"))) is None
