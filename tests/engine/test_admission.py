"""Budget, admission and preemption, while there is no room for all requests."""

from __future__ import annotations

import numpy as np
import pytest

from engine.helpers import Bench
from rootstock.cache.keys import Scope
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Finished,
    Request,
    Sink,
    StopParams,
)
from rootstock.engine.sequence import Sequence, SequenceFactory, WaitingForPrefix
from rootstock.errors import CompletionTooLong, InvalidParameter, PromptTooLong, QueueFull

RNG = np.random.default_rng(11)


def prompt(length: int) -> list[int]:
    return [int(t) for t in RNG.integers(0, 97, length)]


@pytest.mark.behaviour(31)
def test_over_budget_requests_wait_and_all_finish_with_the_right_tokens() -> None:
    bench = Bench(blocks=20, block_size=4, max_batch=8)
    clients = [bench.ask(prompt(30), max_tokens=8) for _ in range(6)]
    bench.run()
    bench.expect(*clients)
    assert bench.cache.pool.live_blocks == 0


@pytest.mark.behaviour(32)
def test_blocks_for_the_next_forward_are_reserved_before_it_runs() -> None:
    bench = Bench(blocks=30, block_size=4, chunk_tokens=16)
    for _ in range(5):
        bench.ask(prompt(20), max_tokens=10)
    bench.run()
    for batch in bench.batches:
        for segment in batch.segments:
            assert len(segment.tables[0]) * 4 >= segment.past + len(segment.tokens)


@pytest.mark.behaviour(33)
def test_prefixes_that_queued_requests_would_hit_are_evicted_last() -> None:
    bench = Bench(blocks=24, block_size=4, max_batch=1)
    wanted = prompt(32)
    bench.answer(wanted, max_tokens=1)
    bench.answer(prompt(32), max_tokens=1)  # newer, and no queued request would hit it
    bench.ask(prompt(40), max_tokens=1)  # takes ten blocks: eight free, two to be found
    queued = bench.answer([*wanted, 1], max_tokens=1)
    assert queued.cached_tokens == 32


@pytest.mark.behaviour(33)
def test_prefixes_of_queued_requests_are_evicted_before_a_preemption() -> None:
    bench = Bench(blocks=16, block_size=4, max_batch=1)
    wanted = prompt(32)
    bench.answer(wanted, max_tokens=1)
    runner = bench.ask(prompt(16), max_tokens=40)
    queued = bench.answer([*wanted, 1], max_tokens=1)
    bench.expect(runner)
    assert queued.tokens == bench.alone([*wanted, 1], 1)
    assert bench.cache.stats().preemptions == 0


@pytest.mark.behaviour(33, 35)
def test_the_least_progressed_running_request_is_preempted() -> None:
    bench = Bench(blocks=16, block_size=4, max_batch=4, chunk_tokens=64)
    first = bench.ask(prompt(20), max_tokens=30)
    bench.run(steps=6)
    second = bench.answer(prompt(12), max_tokens=30)
    assert bench.cache.stats().preemptions > 0
    bench.expect(first, second)
    assert bench.ended == [first, second], "the one with less progress gave way"


@pytest.mark.behaviour(35)
def test_a_preempted_request_keeps_its_computed_prefix_in_the_tree() -> None:
    bench = Bench(blocks=24, block_size=4, max_batch=4, chunk_tokens=64)
    bench.ask(prompt(20), max_tokens=40)
    bench.run(steps=6)
    second = bench.ask(prompt(24), max_tokens=30)
    while bench.cache.stats().preemptions == 0:
        bench.run(steps=1)
    done = [*second.request.tokens.tolist(), *second.tokens, 0]
    found = bench.cache.match(np.array(done, np.int32), bench.engine.namespace()).found
    assert found > 0, "eviction may take its tail, but not all of it at once"
    bench.run()
    bench.expect(second)


@pytest.mark.behaviour(33)
def test_a_running_set_never_preempts_its_last_member() -> None:
    bench = Bench(blocks=16, block_size=4)
    lone = bench.answer(prompt(10), max_tokens=54)  # fills the pool exactly
    bench.expect(lone)
    assert bench.cache.stats().preemptions == 0


@pytest.mark.behaviour(36)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(blocks=16, block_size=4)
    with pytest.raises(PromptTooLong, match="70 tokens") as long:
        bench.ask(prompt(70))
    assert (long.value.prompt_tokens, long.value.limit_tokens) == (70, 64)
    with pytest.raises(CompletionTooLong, match="74") as both:
        bench.ask(prompt(34), max_tokens=40)
    assert (both.value.prompt_tokens, both.value.max_tokens, both.value.limit_tokens) == (34, 40, 64)
    assert not bench.engine.step(), "nothing was queued"


@pytest.mark.parametrize(
    ("bias", "stop_tokens", "min_tokens"),
    [
        (dict.fromkeys(range(97), -100.0), (), 0),
        ({7: 100.0}, (7,), 1),
        ({}, tuple(range(97)), 1),
        (dict.fromkeys(range(96), -100.0), (96,), 1),
    ],
)
def test_a_request_that_bans_every_token_is_refused(
    bias: dict[int, float], stop_tokens: tuple[int, ...], min_tokens: int
) -> None:
    bench = Bench(vocab_size=97)
    stop = StopParams(max_tokens=3, min_tokens=min_tokens, stop_tokens=stop_tokens)
    with pytest.raises(InvalidParameter, match="some token may be chosen"):
        bench.ask(prompt(5), sampling=ResolvedSampling(logit_bias=bias), stop=stop)


def test_min_tokens_beyond_the_context_is_refused() -> None:
    bench = Bench(blocks=16, block_size=4)
    with pytest.raises(InvalidParameter, match="at most 4,"):
        bench.ask(prompt(60), stop=StopParams(min_tokens=5))


def test_the_context_limit_is_the_models_or_the_pools() -> None:
    assert Bench(blocks=16, block_size=4, context_limit=50).engine.context_limit == 50
    assert Bench(blocks=10, block_size=4, context_limit=50).engine.context_limit == 40


def test_without_max_tokens_an_answer_goes_to_the_limit() -> None:
    bench = Bench(blocks=16, block_size=4)
    client = bench.answer(prompt(30), max_tokens=None)
    assert client.finished.reason == "length"
    assert len(client.tokens) == 34


def test_a_queue_that_is_full_refuses_at_once_and_recovers() -> None:
    bench = Bench(max_batch=2, max_queue=3)
    accepted = [bench.ask(prompt(8)) for _ in range(5)]
    with pytest.raises(QueueFull) as full:
        bench.ask(prompt(8))
    assert (full.value.max_batch, full.value.max_queue) == (2, 3)
    bench.run()
    assert all(isinstance(c.events[-1], Finished) for c in accepted)
    bench.answer(prompt(8))


@pytest.mark.behaviour(37)
def test_a_long_prompt_delays_decodes_by_one_chunk_at_most() -> None:
    bench = Bench(blocks=400, chunk_tokens=16)
    decoding = bench.ask(prompt(8), max_tokens=40)
    bench.run(steps=2)
    long = bench.ask(prompt(300), max_tokens=1)
    bench.batches.clear()
    bench.run(steps=20)
    assert all(batch.new_tokens <= 16 for batch in bench.batches)
    assert all(any(len(s.tokens) == 1 and s.past >= 8 for s in batch.segments) for batch in bench.batches)
    bench.run()
    bench.expect(long)
    assert len(decoding.tokens) == 40


@pytest.mark.behaviour(38)
def test_ties_are_broken_the_same_way_in_every_run() -> None:
    def shape() -> list[list[tuple[int, int]]]:
        rng = np.random.default_rng(5)
        bench = Bench(blocks=20, block_size=4, max_batch=6, chunk_tokens=24)
        for _ in range(12):
            bench.ask(rng.integers(0, 97, int(rng.integers(4, 40))), max_tokens=int(rng.integers(1, 20)))
        bench.run()
        assert bench.cache.stats().preemptions > 0
        return [[(s.past, len(s.tokens)) for s in batch.segments] for batch in bench.batches]

    assert shape() == shape()


def test_a_prompt_can_be_cached_or_scored_without_generating() -> None:
    bench = Bench()
    client = bench.answer(prompt(20), stop=StopParams(max_tokens=0), prompt_logprobs=0)
    assert client.tokens == []
    assert client.finished.usage.completion_tokens == 0


def test_the_hit_of_a_lone_queued_request_is_protected_from_decodes() -> None:
    bench = Bench(blocks=30, block_size=4, max_batch=1)
    wanted = prompt(32)
    bench.answer([*wanted, 1], max_tokens=1)
    bench.answer(prompt(40), max_tokens=1)  # newer, and no queued request would hit it
    bench.ask(prompt(8), max_tokens=60)
    bench.run(steps=2)
    queued = bench.answer([*wanted, 2, 3], max_tokens=1)
    assert queued.cached_tokens == 32


def test_the_hit_of_a_queued_request_is_protected_once_it_is_cached() -> None:
    bench = Bench(blocks=30, block_size=4, max_batch=1)
    wanted = prompt(32)
    bench.ask([*wanted, 1], max_tokens=1)
    bench.ask(prompt(40), max_tokens=1)
    bench.ask(prompt(60), max_tokens=1)
    queued = bench.answer([*wanted, 2, 3], max_tokens=1)  # queued before anything was cached
    assert queued.cached_tokens == 32


def test_preempted_requests_come_back_in_the_order_of_arrival() -> None:
    bench = Bench(max_batch=4)
    for start in (0, 20, 40):
        bench.ask(list(range(start, start + 9)), max_tokens=30)
    bench.run(steps=3)
    scheduler = bench.engine.scheduler
    first, second, third = scheduler._running
    lease = first.lease
    assert lease is not None
    scheduler._preempt(third)
    third.state = WaitingForPrefix(lease, 9)
    scheduler._preempt(second)
    bench.ask([90, 91])
    bench.engine._drain_commands()
    assert [sequence.arrival for sequence in scheduler._waiting] == [1, 2, 3]


def test_a_sequence_is_made_before_the_lock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt with penalties must not delay other submissions and the engine's health."""
    bench = Bench()
    engine, own = bench.engine, SequenceFactory.make
    was_free = []

    def watched(self: SequenceFactory, request: Request, sink: Sink, scope: Scope, now: float) -> Sequence:
        was_free.append(engine._requests._lock.acquire(blocking=False))
        engine._requests._lock.release()
        return own(self, request, sink, scope, now)

    monkeypatch.setattr(SequenceFactory, "make", watched)
    bench.ask([1, 2, 3])
    assert was_free == [True]
