"""Why a request missed can be asked."""

from __future__ import annotations

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, ints, make_cache, run
from rootstock.cache import FullAttention, KVCache, Namespace


@pytest.mark.behaviour(30)
def test_a_divergence_is_told_with_its_position_the_token_and_what_is_cached_there() -> None:
    cache = make_cache()
    run(cache, ints(range(20)))
    told = cache.explain(ints(range(7), 99, 8, 9), NAMESPACE)
    assert (told.cap, told.matched_tokens, told.divergence) == ("diverged", 7, 7)
    assert (told.asked_token, told.cached_tokens_there) == (99, (7,))
    assert "position 7" in told.message
    assert "token 99" in told.message


@pytest.mark.behaviour(30)
def test_a_divergence_at_a_branch_names_every_branch() -> None:
    cache = make_cache()
    for branch in (50, 60, 70):
        run(cache, ints(range(8), branch, 1))
    told = cache.explain(ints(range(8), 80), NAMESPACE)
    assert told.cap == "diverged"
    assert sorted(told.cached_tokens_there) == [50, 60, 70]


@pytest.mark.behaviour(30)
def test_what_was_evicted_is_told_apart_from_what_never_came() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(24)))
    run(cache, ints(range(100, 116)))  # evicts the tail of the first
    told = cache.explain(ints(range(24), 1), NAMESPACE)
    assert told.cap == "evicted"
    assert told.matched_tokens == 16
    assert told.evicted_tokens == 8
    assert "evicted" in told.message
    run(cache, ints(range(200, 232)))  # evicts everything
    told = cache.explain(ints(range(24), 1), NAMESPACE)
    assert (told.cap, told.matched_tokens, told.evicted_tokens) == ("evicted", 0, 24)
    never = cache.explain(ints(range(700, 710)), NAMESPACE)
    assert (never.cap, never.evicted_tokens) == ("nothing_cached", 0)


def test_what_came_back_is_not_called_evicted() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(24)))
    run(cache, ints(range(100, 116)))
    run(cache, ints(range(24)))
    assert cache.explain(ints(range(24), 1), NAMESPACE).cap == "end_of_cached"


@pytest.mark.behaviour(30)
def test_a_whole_hit_and_the_end_of_what_is_cached_are_told_apart() -> None:
    cache = make_cache()
    run(cache, ints(range(20)))
    assert cache.explain(ints(range(20)), NAMESPACE).cap == "last_token"
    assert cache.explain(ints(range(20), 5), NAMESPACE).cap == "end_of_cached"
    assert cache.explain(ints(range(20)), Namespace("x", "y")).cap == "nothing_cached"


def test_what_a_running_request_is_computing_is_told() -> None:
    cache = make_cache()
    admit(cache, ints(range(30)))
    assert cache.explain(ints(range(25), 99), NAMESPACE).pending_tokens == 25


def test_a_cache_that_is_off_says_so() -> None:
    cache = KVCache([FullAttention(1, 1)], 400, 4, reuse=False)
    run(cache, ints(range(20)))
    assert cache.explain(ints(range(20)), NAMESPACE).cap == "cache_off"


def test_memory_of_evictions_is_bounded() -> None:
    cache = make_cache(blocks=64, block_size=64)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        run(cache, rng.integers(0, 10**6, 1500).astype(np.int32))
    assert cache._remembered_tokens <= 2 * 1024**2
    assert len(cache._roots) == 1
