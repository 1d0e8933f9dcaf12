"""Volatile spans: siblings that part for a few tokens and agree again, found and counted by namespace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.helpers import NAMESPACE, ints, make_cache, make_hybrid, run
from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.families import RecurrentState
from rootstock.cache.types import Tokens
from rootstock.cache.volatile import (
    MAX_NAMESPACES,
    MAX_SPAN,
    MAX_SPANS,
    MIN_AGREED,
    MIN_DISTINCT,
    VolatileSpans,
    realigned,
)

HEAD, BODY = ints(range(1, 41)), ints(range(100, 200))
OTHER = Namespace("weights", "float32", salt="other")


def prompt(value: Tokens, *, head: Tokens = HEAD, body: Tokens = BODY) -> Tokens:
    return np.concatenate((head, value, body))


def slowly_realigned(asked: Tokens, cached: Tokens) -> tuple[int, int] | None:
    """The definition, without bounds on the work."""
    found = [
        (i + j, i, j)
        for i in range(MAX_SPAN + 1)
        for j in range(MAX_SPAN + 1)
        if len(asked) >= i + MIN_AGREED
        and len(cached) >= j + MIN_AGREED
        and asked[i : i + MIN_AGREED].tolist() == cached[j : j + MIN_AGREED].tolist()
        and len(set(asked[i : i + MIN_AGREED].tolist())) >= MIN_DISTINCT
    ]
    return min(found)[1:] if found else None


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_realignments_equal_those_of_the_definition(data: Any) -> None:
    tokens = st.integers(0, data.draw(st.sampled_from([2, 9, 40, 2**31 - 2])))
    common = data.draw(st.lists(tokens, max_size=140))
    asked = [*data.draw(st.lists(tokens, max_size=80)), *common]
    cached = [*data.draw(st.lists(tokens, max_size=80)), *common, *data.draw(st.lists(tokens, max_size=5))]
    one, other = np.array(asked, np.int32), np.array(cached, np.int32)
    assert realigned(one, other) == slowly_realigned(one, other)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_prompt_and_its_sibling_agree_again_where_the_definition_says(data: Any) -> None:
    tokens = st.integers(0, data.draw(st.sampled_from([9, 40, 2**31 - 2])))
    common = data.draw(st.lists(tokens, min_size=MIN_AGREED - 2, max_size=MIN_AGREED + 20))
    asked = [1, *data.draw(st.lists(tokens, max_size=MAX_SPAN + 2)), *common]
    cached = [2, *data.draw(st.lists(tokens, max_size=MAX_SPAN + 2)), *common]
    cache = make_cache(400)
    run(cache, prompt(ints(cached), body=ints()))
    place = cache.explain(prompt(ints(asked), body=ints()), NAMESPACE).volatile
    expected = slowly_realigned(ints(asked), ints(cached))
    assert (place and (len(place.asked), len(place.cached))) == expected


def test_an_admission_leaves_the_comparison_to_the_time_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(asked: Tokens, cached: Tokens) -> tuple[int, int] | None:
        nonlocal compared
        compared += 1
        return realigned(asked, cached)

    monkeypatch.setattr("rootstock.cache.volatile.realigned", counted)
    cache = make_cache(400)
    for value in (50, 60, 70):
        run(cache, prompt(ints(value)))
    assert compared == 0
    cache.compare_diverged()
    assert compared > 0
    [span] = cache.volatile.of(NAMESPACE)
    assert span.count == 2


def test_prompts_that_nobody_compares_are_bounded() -> None:
    cache = make_cache(4000)
    for value in range(100):
        run(cache, prompt(ints(1000 + value)))
        assert len(cache._diverged) <= 17
    [span] = cache.volatile.of(NAMESPACE)
    assert span.count == 99


@pytest.mark.parametrize("hybrid", [False, True], ids=["full", "state"])
def test_prompts_that_differ_in_a_few_tokens_name_the_span(hybrid: bool) -> None:
    cache = make_hybrid(FullAttention(1, 1), RecurrentState(1, 8), blocks=400) if hybrid else make_cache(400)
    run(cache, prompt(ints(50, 51, 52)))
    assert cache.volatile.of(None) == []
    run(cache, prompt(ints(60, 61)))
    [span] = cache.volatile.of(NAMESPACE)
    assert (span.position, span.count, span.recomputed_tokens) == (len(HEAD), 1, len(BODY))
    assert [example.tolist() for example in span.examples] == [[50, 51, 52], [60, 61]]
    assert span.before.tolist() == HEAD.tolist()
    assert span.after.tolist() == BODY[:MIN_AGREED].tolist()
    run(cache, prompt(ints(70)))
    [span] = cache.volatile.of(NAMESPACE)
    assert (span.count, span.recomputed_tokens) == (2, 2 * len(BODY))
    stats = cache.stats()
    assert (stats.volatile_spans, stats.volatile_misses, stats.volatile_tokens) == (1, 2, 2 * len(BODY))


def test_values_that_begin_alike_are_one_span() -> None:
    cache = make_cache(400)
    for value in ((50, 51, 52), (60, 61, 62), (50, 51, 53), (50, 58, 59), (61, 61, 62)):
        run(cache, prompt(ints(*value)))
    [span] = cache.volatile.of(NAMESPACE)
    assert (span.position, span.count) == (len(HEAD), 4)
    assert span.examples[-2].tolist() == [50, 58, 59]


def test_the_tokens_behind_a_span_are_counted_across_nodes_and_up_to_the_next_difference() -> None:
    cache = make_cache(400)
    run(cache, prompt(ints(50)))
    run(cache, prompt(ints(50), body=np.concatenate((BODY[:60], ints(900, 901)))))  # splits the body
    run(cache, prompt(ints(60), body=np.concatenate((BODY[:80], ints(902)))))
    assert [span.recomputed_tokens for span in cache.volatile.of(NAMESPACE)] == [80]


@pytest.mark.parametrize(
    "following",
    [
        prompt(ints(range(300, 300 + MAX_SPAN + 1))),  # too long
        prompt(ints(60), body=np.concatenate((BODY[: MIN_AGREED - 1], ints(range(400, 440))))),  # too short
        prompt(ints(60), body=ints([7] * 100)),
        prompt(ints(50), body=np.concatenate((BODY, ints(range(500, 600))))),  # a continuation
        prompt(ints(50)),
    ],
)
def test_other_prompts_name_none(following: Tokens) -> None:
    cache = make_cache(400)
    run(cache, prompt(ints(50)))
    run(cache, prompt(ints(55), body=ints([7] * 100)))
    cache.volatile.forget(None)
    run(cache, following)
    assert cache.volatile.of(None) == []


def test_a_prompt_that_was_evicted_is_no_volatile_one() -> None:
    cache = make_cache(40)
    run(cache, prompt(ints(50)))
    run(cache, ints(range(1000, 1080)))  # evicts the end of the first
    cache.volatile.forget(None)
    assert cache.explain(prompt(ints(50)), NAMESPACE).cap == "evicted"
    run(cache, prompt(ints(50)))
    assert cache.volatile.of(None) == []


def test_tenants_have_spans_of_their_own_and_clearing_drops_them() -> None:
    cache = make_cache(400)
    run(cache, prompt(ints(50)))
    run(cache, prompt(ints(60)), namespace=OTHER)
    assert cache.volatile.of(None) == []
    run(cache, prompt(ints(61)), namespace=OTHER)
    assert cache.volatile.of(NAMESPACE) == []
    assert [span.namespace for span in cache.volatile.of(None)] == [OTHER]
    cache.clear(NAMESPACE)
    assert len(cache.volatile) == 1
    cache.clear(OTHER)
    assert len(cache.volatile) == 0
    run(cache, prompt(ints(62)), namespace=OTHER)
    run(cache, prompt(ints(63)), namespace=OTHER)
    cache.clear()
    assert len(cache.volatile) == 0


def test_the_number_of_spans_is_bounded() -> None:
    spans = VolatileSpans()
    cache = make_cache(400)
    run(cache, prompt(ints(50)))
    match = cache.match(prompt(ints(60)), NAMESPACE)
    place = cache.explain(match.tokens, NAMESPACE).volatile
    assert place is not None
    for number in range(2 * MAX_SPANS):
        tokens = np.concatenate((ints(range(number * 200 + 1000)), match.tokens))
        spans.add(NAMESPACE, tokens, number * 200 + 1000 + len(HEAD), place, 0.0)
    assert len(spans.of(NAMESPACE)) == MAX_SPANS
    for number in range(2 * MAX_NAMESPACES):
        spans.add(Namespace("w", "d", salt=str(number)), match.tokens, len(HEAD), place, 0.0)
    assert len(spans) == MAX_NAMESPACES


def test_explain_names_the_span_to_those_who_may_see_other_prompts() -> None:
    cache = make_cache(400)
    run(cache, prompt(ints(50, 51)))
    explanation = cache.explain(prompt(ints(60)), NAMESPACE)
    assert explanation.cap == "diverged"
    assert explanation.volatile is not None
    assert explanation.volatile.asked.tolist() == [60]
    assert explanation.volatile.cached.tolist() == [50, 51]
    assert explanation.message.endswith(
        "1 tokens differ (in the cached prefix 2), and the next 100 are cached behind other tokens."
    )
    own = explanation.of_the_prompt()
    assert own.volatile is None
    assert "100" not in own.message
    assert cache.volatile.of(None) == []


def test_the_work_of_an_admission_does_not_grow_with_the_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(asked: Tokens, cached: Tokens) -> tuple[int, int] | None:
        nonlocal compared
        compared += 1
        assert len(cached) <= MAX_SPAN + MIN_AGREED
        return realigned(asked, cached)

    monkeypatch.setattr("rootstock.cache.volatile.realigned", counted)
    cache, rng = make_cache(40_000), random.Random(1)
    for number in range(300):
        body = ints([rng.randrange(10**6) for _ in range(100)])
        compared = 0
        run(cache, prompt(ints(10**6 + number), body=body))
        cache.compare_diverged()
        assert compared <= 4


def test_a_cache_without_reuse_has_no_spans() -> None:
    cache = KVCache([FullAttention(1, 1)], 400 * 4, 4, reuse=False)
    for value in (50, 60):
        run(cache, prompt(ints(value)))
    assert cache.volatile.of(None) == []
