"""Hints in the engine: outcomes in the events, pins that never stop it, and tenants that cannot crowd out others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from engine.helpers import Bench, numbers
from rootstock.cache import KVCache
from rootstock.cache.families import row_bytes
from rootstock.cache.retention.hint_types import (
    GREATEST_PRIORITY,
    MAX_TTL_S,
    CacheHints,
    HintOutcome,
    RetentionWish,
    Verdict,
)
from rootstock.cache.retention.pins import Pinned
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Event,
    Finished,
    Request,
    RequestId,
    StopParams,
    TokenEvent,
)
from rootstock.testing.fake_runtime import FULL, FakeRuntime

KEPT = CacheHints("a", "agent", "session", retentions=(RetentionWish("ttl", ttl_s=300.0),))


@pytest.mark.behaviour(27)
def test_the_first_token_and_the_end_carry_the_outcomes_of_hints() -> None:
    bench = Bench()
    client = bench.answer(numbers(1, 20), hints=KEPT)
    tokens = [event for event in client.events if isinstance(event, TokenEvent)]
    accepted = (HintOutcome("ttl", Verdict.ACCEPTED), HintOutcome("session", Verdict.ACCEPTED))
    assert tokens[0].hints == accepted
    assert all(event.hints == () for event in tokens[1:])
    assert isinstance(client.events[-1], Finished)
    assert client.events[-1].hints == accepted


@pytest.mark.behaviour(27)
def test_without_hints_there_are_no_outcomes() -> None:
    client = Bench().answer(numbers(1, 20))
    assert all(event.hints == () for event in client.events if isinstance(event, TokenEvent | Finished))


@pytest.mark.behaviour(27)
def test_a_request_that_is_preempted_keeps_its_first_outcomes() -> None:
    bench = Bench(blocks=12)
    clients = [bench.ask(numbers(seed, 16), 16, hints=KEPT) for seed in (1, 2)]
    bench.run()
    assert bench.cache.stats().preemptions > 0
    for client in clients:
        first = next(event for event in client.events if isinstance(event, TokenEvent))
        assert isinstance(client.events[-1], Finished)
        assert client.events[-1].hints == first.hints
        assert len(first.hints) == 2


@pytest.mark.behaviour(27)
def test_a_request_that_needs_the_whole_cache_gets_it_although_some_is_pinned() -> None:
    """At its admission, and in its answer: the pin is dropped as the last resort, and counted."""
    for prompt_tokens, answer_tokens in ((70, 4), (40, 36)):
        bench = Bench(blocks=20)
        bench.answer(numbers(1, 16), 1)
        assert isinstance(bench.engine.pin(np.array(numbers(1, 16), np.int32)), Pinned)
        client = bench.answer(numbers(2, prompt_tokens), answer_tokens)
        assert isinstance(client.events[-1], Finished)
        assert bench.engine.pins() == []
        assert bench.engine.stats().cache.dropped_pins == 1
        bench.cache.check()


@pytest.mark.behaviour(27)
def test_pins_are_not_dropped_for_requests_that_can_wait() -> None:
    bench = Bench(blocks=20)
    bench.answer(numbers(1, 16), 1)
    pinned = bench.engine.pin(np.array(numbers(1, 16), np.int32))
    assert isinstance(pinned, Pinned)
    for seed in range(2, 8):
        bench.ask(numbers(seed, 40), 4)
    bench.run()
    assert bench.engine.pins() == [pinned]
    assert bench.engine.release_pin(pinned.id)


# ------------------------------------------------------------------------------------ a greedy tenant


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def greedy(number: int) -> CacheHints:
    """Asks for all that hints can ask for."""
    kept = (RetentionWish("ttl", ttl_s=MAX_TTL_S, priority=GREATEST_PRIORITY),)
    return CacheHints("greedy", f"session {number}", "session", retentions=kept)


def modest(number: int) -> CacheHints:
    return CacheHints("modest", f"agent {number}", "session", retentions=(RetentionWish("ttl", ttl_s=300.0),))


def no_hints(number: int) -> None:
    return None


Hints = Callable[[int], CacheHints | None]


def hit_rate(of_agents: Hints, of_flood: Hints | None) -> float:
    """Returns the hit rate of four agents whose conversations fill two fifths of the cache, one request of each a
    minute. Between two of them a flood of new prompts comes, which would fill the cache twice."""
    clock, runtime = Clock(), FakeRuntime(97, families=(FULL,), eos_token_ids=())
    cache = KVCache((FULL,), 200 * row_bytes(FULL, 4), 4, clock=clock)
    runtime.allocate(cache.rows, 4)
    engine = Engine(runtime, cache, clock=clock)
    ended: list[Finished] = []

    def ask(id: str, tokens: list[int], salt: str, hints: CacheHints | None) -> None:
        def take(event: Event) -> None:
            if isinstance(event, Finished):
                ended.append(event)

        request = Request(
            RequestId(id),
            np.array(tokens, np.int32),
            ResolvedSampling(temperature=0.0),
            StopParams(max_tokens=1),
            salt=salt,
            hints=hints,
        )
        engine.submit(request, take)
        while engine.step():
            clock.now += 0.1

    asked = cached = 0
    for turn in range(8):
        for agent in range(4):
            ask(f"agent {turn} {agent}", numbers(agent, 16 + 8 * turn), "modest", of_agents(agent))
            asked += ended[-1].usage.prompt_tokens
            cached += ended[-1].usage.cached_tokens
        for number in range(0 if of_flood is None else 20):
            seed = 1000 + 20 * turn + number
            assert of_flood is not None
            ask(f"flood {seed}", numbers(seed, 80), "greedy", of_flood(seed))
        clock.now += 60.0
    cache.check()
    return cached / asked


@pytest.mark.behaviour(27)
def test_a_greedy_tenant_hardly_lowers_the_hit_rate_of_a_tenant_with_hints() -> None:
    assert hit_rate(modest, None) - hit_rate(modest, greedy) <= 0.05


@pytest.mark.behaviour(27)
def test_a_greedy_tenants_hints_hardly_lower_the_hit_rate_of_a_tenant_without() -> None:
    assert hit_rate(no_hints, no_hints) - hit_rate(no_hints, greedy) <= 0.05
    assert hit_rate(no_hints, None) - hit_rate(no_hints, greedy) <= 0.05
