"""The record of an engine's activity: phases, hits by source, ends and misses."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np

from engine.helpers import Bench, numbers
from rootstock.engine import activity as of
from rootstock.engine.activity import Outcome, Phase
from rootstock.engine.request import PromptTokens
from rootstock.testing.fake_runtime import FULL, STATE

SYSTEM, BODY = numbers(1, 100), numbers(2, 80)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 10_000.0

    def __call__(self) -> float:
        return self.now


def phases(bench: Bench) -> list[list[Phase]]:
    return [[span.phase for span in request.spans] for request in bench.engine.requests()]


def test_a_request_is_seen_in_each_phase() -> None:
    clock = Clock()
    bench = Bench(clock=clock, chunk_tokens=50)
    bench.ask(SYSTEM, 3)
    assert phases(bench) == [[Phase.QUEUED]]
    clock.now += 2
    bench.engine.step()
    (seen,) = bench.engine.requests()
    assert [span.phase for span in seen.spans] == [Phase.QUEUED, Phase.PREFILL]
    assert (seen.spans[0].began, seen.spans[0].ended) == (clock.now - 2, clock.now)
    assert seen.spans[1].ended is None
    assert (seen.prompt_tokens, seen.computed_tokens, seen.cached_tokens) == (100, 50, 0)
    clock.now += 1
    bench.engine.step()
    (seen,) = bench.engine.requests()
    assert [span.phase for span in seen.spans] == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE]
    assert (seen.completion_tokens, seen.outcome) == (1, Outcome.OPEN)
    bench.run()
    assert bench.engine.requests() == []
    (ended,) = bench.engine.parts.activity.latest_ended()
    assert (ended.outcome, ended.completion_tokens) == (Outcome.LENGTH, 3)
    assert ended.spans[-1].ended == clock.now


def test_a_request_that_waits_for_a_prefix_is_seen_to_wait() -> None:
    bench = Bench(clock=Clock())
    bench.ask(SYSTEM, 2)
    bench.ask([*SYSTEM, 5], 2)
    bench.engine.step()
    assert phases(bench)[1] == [Phase.WAITING_FOR_PREFIX]
    bench.run()


def test_an_aborted_request_is_kept_with_its_outcome() -> None:
    bench = Bench()
    client = bench.ask(SYSTEM)
    bench.engine.step()
    bench.engine.abort(client.request.id)
    bench.run()
    (ended,) = bench.engine.parts.activity.latest_ended()
    assert (ended.id, ended.outcome) == (client.request.id, Outcome.ABORTED)


def test_hits_agree_with_the_cache_and_leave_with_time() -> None:
    clock = Clock()
    bench = Bench(clock=clock, families=(FULL, STATE))
    for tokens in (SYSTEM, [*SYSTEM, *BODY], [*SYSTEM, 3]):
        bench.answer(tokens, salt="red")
    bench.answer(SYSTEM, salt="blue")
    activity, counters = bench.engine.parts.activity, bench.cache.counters
    hits = activity.hits(60)
    assert (hits.requests, hits.memory, hits.loaded) == (4, counters.hit_tokens, 0)
    assert hits.computed == counters.missed_tokens
    assert activity.hits(60, ["blue"]).computed == len(SYSTEM)
    assert activity.hits(60, ["green"]).requests == 0
    assert activity.hits(60, ["red", "blue"]) == hits
    assert sum(span.requests for span in activity.history()) == 4
    clock.now += 120
    assert activity.hits(60).requests == 0
    assert activity.hits(300) == hits
    clock.now += of.HISTORY_S
    assert activity.hits(900).requests == 0
    assert all(span.requests == 0 for span in activity.history())


def test_salts_of_one_span_are_bounded_and_the_total_is_not() -> None:
    bench = Bench(blocks=2000, clock=Clock())
    for index in range(of.MAX_SALTS + 5):
        bench.answer([1, 2, 3], 1, salt=str(index))
    activity = bench.engine.parts.activity
    assert activity.hits(900).requests == of.MAX_SALTS + 5
    assert activity.hits(900, [str(of.MAX_SALTS + 4)]).requests == 0
    assert len(activity.latest_ended()) == of.MAX_ENDED


def test_the_history_of_rates_is_bounded_in_time_and_in_number() -> None:
    """Over days, with as many salts as anyone likes to send."""
    clock = Clock()
    activity = of.Activity(clock)
    prompts = PromptTokens(memory=3, computed=5)
    spans = int(of.HISTORY_S / of.SPAN_S)
    random = np.random.default_rng(0)
    for step in range(20 * spans):
        for number in range(3 if step % 50 else of.MAX_SALTS + 50):
            sequence = Mock(request=Mock(salt=f"{step}-{number}"))
            activity.prompt_computed(sequence, prompts)
        assert len(activity._spans) <= spans
        assert all(len(span.by_salt) <= of.MAX_SALTS for span in activity._spans)
        clock.now += random.choice(
            [0.0, 1.0, of.SPAN_S, 3 * of.SPAN_S, 2 * of.HISTORY_S], p=[0.1, 0.1, 0.6, 0.19, 0.01]
        )
    assert len(activity.history()) == spans
    assert activity.hits(of.HISTORY_S).requests <= spans * (of.MAX_SALTS + 50)


def test_large_misses_are_explained_only_where_it_is_asked_for() -> None:
    bench = Bench()
    bench.answer(SYSTEM)
    assert bench.engine.parts.activity.latest_misses() == []
    bench.engine.scheduler.explains_misses_of = of.MIN_MISSED_TOKENS
    client = bench.answer([*SYSTEM[:20], *BODY])
    assert client.finished.diagnosis is None, "the client has not asked for it"
    (miss,) = bench.engine.parts.activity.latest_misses()
    assert (miss.diagnosis.cause, miss.diagnosis.position) == ("diverged", 20)
    assert miss.before.tolist() == SYSTEM[:20]
    assert miss.asked.tolist() == BODY[: len(miss.asked)]
    assert miss.cached == (SYSTEM[20],)
    bench.answer([*SYSTEM, 1, 2, 3])  # misses too little
    assert len(bench.engine.parts.activity.latest_misses()) == 1
