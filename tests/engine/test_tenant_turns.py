"""Turns of tenants: one with few requests does not wait for those of another, and nobody starves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from engine.helpers import Bench, Client, numbers
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.engine.request import Finished
from rootstock.engine.sequence import Sequence
from rootstock.engine.tenant_turns import MOST_TENANTS, TenantTurns

CHUNK = 16
PROMPT = 64


def ask(bench: Bench, tenant: str, seed: int, prompt: int = PROMPT, answer: int = 2) -> Client:
    hints = CacheHints(tenant) if tenant else None
    return bench.ask(numbers(seed, prompt), answer, hints=hints, salt=tenant)


def steps_to(bench: Bench, client: Client) -> int:
    """Runs steps until a request has its first token."""
    for steps in itertools.count():
        if client.tokens:
            return steps
        bench.run(1)
    raise AssertionError


@pytest.mark.behaviour(52)
@pytest.mark.parametrize("others", [1, 3, 10, 40])
@pytest.mark.parametrize("prompt", [3, CHUNK, PROMPT])
@pytest.mark.parametrize("begun", [0, 1, 5])
def test_a_tenant_with_one_request_does_not_wait_for_those_of_another(
    others: int, prompt: int, begun: int
) -> None:
    bench = Bench(blocks=4_000, chunk_tokens=CHUNK, max_batch=64)
    for seed in range(others):
        ask(bench, "large", seed)
    bench.run(begun)
    # Half of the tokens are its part. Decodes of the others take a token each from the step.
    most = 2 * -(-prompt // CHUNK) + 1 + others // CHUNK
    assert steps_to(bench, ask(bench, "small", 99, prompt)) <= most


@pytest.mark.behaviour(52)
def test_a_tenant_that_had_no_requests_has_a_whole_prompt_at_once() -> None:
    bench = Bench(blocks=4_000, chunk_tokens=CHUNK, max_batch=64)
    for seed in range(40):
        ask(bench, "large", seed)
    bench.run(PROMPT // CHUNK + 1)
    assert steps_to(bench, ask(bench, "small", 99)) == PROMPT // CHUNK


def test_answers_do_not_depend_on_turns() -> None:
    bench = Bench(blocks=60, chunk_tokens=CHUNK, max_batch=4)
    asked = [ask(bench, ("", "a", "b")[seed % 3], seed, 3 + 7 * seed % 60, 5) for seed in range(24)]
    bench.run()
    bench.expect(*asked)


@pytest.mark.behaviour(52)
def test_requests_of_one_tenant_are_served_in_the_order_of_their_arrival() -> None:
    bench = Bench(blocks=4_000, chunk_tokens=CHUNK)
    ask(bench, "other", 50, 400)
    asked = [ask(bench, "one", seed) for seed in range(8)]
    bench.run()
    assert [client for client in bench.ended if client in asked] == asked


@pytest.mark.parametrize("many", [1, 8])
@pytest.mark.parametrize("tenants", [2, 3, 5])
def test_tenants_that_always_have_requests_get_equal_numbers_of_tokens(tenants: int, many: int) -> None:
    bench = Bench(blocks=8_000, chunk_tokens=CHUNK, max_batch=8)
    names = [f"tenant {number}" for number in range(tenants)]
    open_requests: dict[str, list[Client]] = {name: [] for name in names}
    seeds = itertools.count()
    served = Counter[str]()
    for _ in range(3_000):
        for number, name in enumerate(names):
            open_requests[name] = [client for client in open_requests[name] if not client.terminals]
            while len(open_requests[name]) < (many if number else 1):
                open_requests[name].append(ask(bench, name, next(seeds)))
        before = len(bench.ended)
        bench.run(1)
        for client in bench.ended[before:]:
            assert isinstance(client.events[-1], Finished)
            assert client.request.hints is not None
            served[client.request.hints.tenant] += 1
    # A tenant with one request at a time loses a step between two of them.
    assert min(served.values()) >= 0.75 * max(served.values()), served


def sequence_of(tenant: str) -> Sequence:
    client = Client([1, 2], hints=CacheHints(tenant))
    never: Callable[..., None] = lambda *_: None  # noqa: E731
    return Sequence(
        request=client.request,
        sink=never,
        scope=Scope(Namespace("weights", "float32")),
        max_tokens=1,
        sampler=None,  # type: ignore[arg-type]
        detokenizer=None,  # type: ignore[arg-type]
        stop_tokens=frozenset(),
        submitted_at=0.0,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("credit", [0, 100, 10_000])
def test_a_stream_of_new_tenants_does_not_starve_one_that_is_there(seed: int, credit: int) -> None:
    rng = np.random.default_rng(seed)
    turns, served = TenantTurns(credit), Counter[str]()
    stays = sequence_of("stays")
    steps = 4_000
    for step in range(steps):
        others = [sequence_of(f"{step + number}") for number in range(int(rng.integers(0, 4)))]
        alone = int(rng.integers(0, 20)) if step % 7 == 0 and not others else 0
        present = turns.begin([stays, *others], "stays", alone)
        assert present == {sequence.tenant for sequence in (stays, *others)}
        chosen = turns.in_turn([stays, *others])[0]
        turns.served(chosen, 10)
        served[chosen.tenant] += 10
    # A name that comes back within four steps is at most one of four: each new name has its credit once.
    newcomers = steps * 10 - served["stays"]
    assert served["stays"] >= min(newcomers / 4, steps * 10 / 5) - credit


def test_a_tenant_that_leaves_between_its_requests_gains_no_tokens() -> None:
    turns, stays, comes = TenantTurns(50), sequence_of("stays"), sequence_of("comes")
    served = Counter[str]()
    for step in range(1_000):
        here = [stays, comes] if step % 2 else [stays]
        turns.begin(here)
        first = turns.in_turn(here)[0]
        turns.served(first, 10)
        served[first.tenant] += 10
    assert served["comes"] <= served["stays"] + 50


def test_the_counters_are_bounded() -> None:
    turns = TenantTurns(1 << 40)
    stays = sequence_of("stays")
    for number in range(3 * MOST_TENANTS):
        other = sequence_of(f"{number}")
        turns.begin([stays, other])
        turns.served(other, 1)
    turns.begin([stays])
    assert len(turns._counts) <= MOST_TENANTS + 2
