"""A request that asks for it is told why its prompt was not found in the cache, as it was at its admission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Client, numbers
from rootstock.cache.explain import LoadChoice
from rootstock.engine.diagnosis import Diagnosis, diagnosis_of
from rootstock.engine.request import TokenEvent
from rootstock.testing.fake_runtime import FULL, STATE

SYSTEM, BODY = numbers(1, 40), numbers(2, 80)


def told(client: Client) -> Diagnosis:
    diagnosis = client.finished.diagnosis
    assert diagnosis is not None
    first, *others = [event for event in client.events if isinstance(event, TokenEvent)]
    assert first.diagnosis == diagnosis
    assert all(event.diagnosis is None for event in others)
    assert diagnosis.cached_tokens == client.cached_tokens
    return diagnosis


def asked(bench: Bench, tokens: list[int], **more: Any) -> Diagnosis:
    return told(bench.answer(tokens, diagnose=True, **more))


def test_a_request_that_does_not_ask_is_told_nothing() -> None:
    client = Bench().answer(SYSTEM)
    assert client.finished.diagnosis is None
    assert all(event.diagnosis is None for event in client.events if isinstance(event, TokenEvent))


def test_the_first_prompt_misses_because_nothing_is_cached_and_its_own_tokens_do_not_count() -> None:
    diagnosis = asked(Bench(), SYSTEM)
    assert (diagnosis.cause, diagnosis.position, diagnosis.missed_tokens) == (
        "nothing_cached",
        0,
        len(SYSTEM),
    )
    assert (diagnosis.matched_tokens, diagnosis.prompt_tokens) == (0, len(SYSTEM))


@pytest.mark.parametrize("more", [[], [1, 2, 3]])
def test_a_prompt_that_goes_on_from_the_cached_prefix_misses_nothing(more: list[int]) -> None:
    bench = Bench()
    bench.answer(SYSTEM, max_tokens=0)
    diagnosis = asked(bench, [*SYSTEM, *more])
    assert (diagnosis.cause, diagnosis.position, diagnosis.missed_tokens) == ("none", None, 0)


def test_a_prompt_that_diverges_is_told_where() -> None:
    bench = Bench()
    bench.answer([*SYSTEM, 1, *numbers(3, 20)])
    diagnosis = asked(bench, [*SYSTEM, 2, *numbers(4, 20)])
    assert (diagnosis.cause, diagnosis.position, diagnosis.missed_tokens) == ("diverged", len(SYSTEM), 21)


def test_a_prompt_that_differs_in_a_volatile_span_is_told_the_span() -> None:
    bench = Bench()
    bench.answer([*SYSTEM, 1, 1, *BODY])
    diagnosis = asked(bench, [*SYSTEM, 2, *BODY])
    assert (diagnosis.cause, diagnosis.position, diagnosis.missed_tokens) == ("volatile_span", 40, len(BODY))
    assert diagnosis.volatile is not None
    assert (diagnosis.volatile.asked.tolist(), diagnosis.volatile.cached.tolist()) == ([2], [1, 1])


def test_a_model_without_a_checkpoint_is_told_the_family() -> None:
    bench = Bench(families=(FULL, STATE))
    bench.answer([*SYSTEM, 1, *numbers(3, 20)])
    diagnosis = asked(bench, [*SYSTEM, 2, *numbers(4, 20)])
    assert (diagnosis.cause, diagnosis.family, diagnosis.position) == ("no_checkpoint", STATE.name, 0)
    assert diagnosis.missed_tokens == len(SYSTEM)


def test_an_evicted_prompt_is_told_how_much_was_evicted() -> None:
    bench = Bench(20)
    bench.answer(SYSTEM)
    bench.answer(numbers(9, 60))
    diagnosis = asked(bench, SYSTEM)
    assert diagnosis.cause == "evicted"
    assert diagnosis.position == diagnosis.matched_tokens
    assert 0 < diagnosis.missed_tokens <= len(SYSTEM) - diagnosis.matched_tokens


def test_other_tenants_prefixes_do_not_count() -> None:
    bench = Bench()
    bench.answer([*SYSTEM, 1, *BODY], salt="other")
    assert asked(bench, [*SYSTEM, 2, *BODY], salt="mine").cause == "nothing_cached"


def test_a_scored_prompt_and_a_cache_that_is_off_are_told() -> None:
    bench = Bench()
    bench.answer(SYSTEM)
    diagnosis = asked(bench, SYSTEM, prompt_logprobs=0)
    assert (diagnosis.cause, diagnosis.missed_tokens) == ("scored", len(SYSTEM))
    assert asked(Bench(reuse=False), SYSTEM).cause == "cache_off"


def test_tokens_that_are_computed_although_a_tier_has_them_are_told() -> None:
    bench = Bench()
    bench.answer(SYSTEM[:10])
    explanation = bench.engine.explain(np.array(SYSTEM, np.int32))
    choice = LoadChoice(36, 1, 100, load_s=2.0, compute_s=1.0, load=False)
    computed = diagnosis_of(replace(explanation, below=choice), 10, scored=False)
    assert (computed.cause, computed.position, computed.missed_tokens) == ("on_disk", 10, 26)
    loaded = diagnosis_of(replace(explanation, below=replace(choice, load=True)), 36, scored=False)
    assert (loaded.cause, loaded.cached_tokens, loaded.missed_tokens) == ("none", 36, 0)


def test_a_request_that_waits_for_another_ones_prefix_is_told_its_hit_then() -> None:
    bench = Bench(chunk_tokens=8)
    first = bench.ask([*SYSTEM, *BODY])
    bench.run(1)
    second = bench.ask([*SYSTEM, *BODY, 5], diagnose=True)
    bench.run()
    assert first.finished
    assert told(second).cause == "none"
    assert second.cached_tokens == len(SYSTEM) + len(BODY)
