"""Requests that run at the same time share their common prefix."""

from __future__ import annotations

import numpy as np
import pytest

from engine.helpers import Bench, Client
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import TokenEvent

PREFIX = list(np.random.default_rng(3).integers(0, 97, 60))


@pytest.mark.behaviour(11)
def test_two_requests_in_flight_with_the_same_prefix_store_and_compute_it_once() -> None:
    bench = Bench(chunk_tokens=16)
    first = bench.ask([*PREFIX, 1, 2, 3])
    second = bench.answer([*PREFIX, 4, 5, 6, 7])
    assert bench.runtime.computed_tokens == 60 + 3 + 4 + 2 * 3, (
        "prefix once, tails, decoded tokens but the last"
    )
    assert second.cached_tokens == 60
    assert first.cached_tokens == 0
    bench.expect(first, second)
    assert bench.cache.stats().duplicate_blocks == 0


@pytest.mark.behaviour(11)
def test_many_requests_at_one_instant_compute_their_prefix_once() -> None:
    bench = Bench(blocks=400, chunk_tokens=32, max_batch=16)
    clients = [bench.ask([*PREFIX, i, i + 1]) for i in range(16)]
    bench.run()
    assert bench.runtime.computed_tokens == 60 + 16 * (2 + 3)
    bench.expect(*clients)


def test_waiters_share_a_prefix_longer_than_the_producers() -> None:
    bench = Bench(blocks=400, chunk_tokens=16)
    more = list(range(40))
    bench.ask([*PREFIX, 90])
    a = bench.ask([*PREFIX, *more, 91])
    b = bench.answer([*PREFIX, *more, 92])
    assert bench.runtime.computed_tokens == 60 + 1 + 40 + 1 + 1 + 3 * 3
    assert a.cached_tokens == 60
    assert b.cached_tokens == 100


def test_a_waiter_computes_for_itself_when_its_producer_is_cancelled() -> None:
    bench = Bench(chunk_tokens=16)
    producer = bench.ask([*PREFIX, 1])
    waiter = bench.ask([*PREFIX, 2])
    bench.run(steps=2)
    assert waiter.events == []
    bench.engine.abort(producer.request.id)
    bench.run()
    bench.expect(waiter)
    assert waiter.cached_tokens == 32, "the tokens that the producer had computed were kept"


def test_a_short_common_prefix_is_not_worth_waiting_for() -> None:
    bench = Bench(block_size=8, chunk_tokens=64)
    bench.ask([1, 2, 3, *range(20, 40)])
    second = bench.ask([1, 2, 3, *range(50, 70)])
    bench.run(steps=1)
    assert second.tokens != []


@pytest.mark.behaviour(29)
def test_cached_tokens_in_the_usage_are_the_tokens_that_were_not_computed() -> None:
    bench = Bench(blocks=400)
    asked = computed = 0
    for turn in range(6):
        before = bench.runtime.computed_tokens
        client = bench.answer([*PREFIX[: 20 + 7 * turn], turn, turn], max_tokens=1)
        usage = client.finished.usage
        assert usage.prompt_tokens - usage.cached_tokens == bench.runtime.computed_tokens - before
        asked += usage.prompt_tokens
        computed += bench.runtime.computed_tokens - before
    stats = bench.cache.stats()
    assert (stats.asked_tokens, stats.missed_tokens) == (asked, computed)


def test_cached_tokens_come_with_the_first_token() -> None:
    bench = Bench()
    bench.answer(PREFIX)
    again = bench.answer(PREFIX)
    first = again.events[0]
    assert isinstance(first, TokenEvent)
    assert first.cached_tokens == 59 == again.cached_tokens


@pytest.mark.behaviour(9)
def test_tenants_with_different_salts_never_share() -> None:
    bench = Bench()
    bench.answer(PREFIX, salt="a")
    other, same = bench.ask(PREFIX, salt="b"), bench.ask(PREFIX, salt="a")
    bench.run()
    assert other.cached_tokens == 0
    assert same.cached_tokens == 59


def test_a_scored_prompt_is_computed_whole_and_still_shared_with_others() -> None:
    bench = Bench()
    bench.answer(PREFIX, max_tokens=1)
    scored = bench.answer(PREFIX, max_tokens=1, prompt_logprobs=2)
    assert scored.cached_tokens == 0
    assert bench.cache.stats().duplicate_blocks == 15
    assert bench.cache.pool.cached_blocks == 15


def test_n_choices_are_n_requests_that_share_one_prompt() -> None:
    bench = Bench(blocks=400, chunk_tokens=64)
    sampling = [ResolvedSampling(temperature=1.0, seed=i) for i in range(4)]
    choices = [bench.ask(PREFIX, sampling=s) for s in sampling]
    bench.run()
    assert bench.runtime.computed_tokens == 60 + 3 * 1 + 4 * 3
    assert len({tuple(c.tokens) for c in choices}) > 1


def test_the_cache_can_be_switched_off_and_answers_stay_the_same() -> None:
    on, off = Bench(), Bench(reuse=False)
    answers: list[list[list[int]]] = []
    for bench in (on, off):
        clients: list[Client] = []
        for tail in range(4):
            clients.append(bench.ask([*PREFIX, tail]))
            bench.run()
        answers.append([c.tokens for c in clients])
    assert answers[0] == answers[1]
    assert off.cache.stats().hit_tokens == 0
    assert off.cache.pool.free_blocks == 200, "nothing is kept"
