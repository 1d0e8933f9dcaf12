"""Namespaces: their number is bounded by the cached prefixes, and explanations tell nothing of other tenants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.helpers import NAMESPACE, admit, hit, ints, make_cache, make_hybrid, prefill, run
from rootstock.cache import FullAttention, Namespace
from rootstock.cache.families import RecurrentState, SlidingWindow
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.prefix_tree import MAX_EMPTY_ROOTS


def tenant(number: int) -> Namespace:
    return Namespace("weights", "float32", salt=str(number))


@pytest.mark.behaviour(10)
def test_ten_thousand_tenants_leave_no_more_namespaces_than_cached_prefixes() -> None:
    cache = make_cache(blocks=16, block_size=4)
    for number in range(10_000):
        admission = cache.admit(cache.match(ints(range(8)), tenant(number)))
        lease = admission.lease  # type: ignore[union-attr]
        cache.extend(lease, 8)
        cache.commit(lease, lease.tokens.copy())
        cache.release(lease, ReleaseReason.FINISHED)
        assert len(cache.tree.roots) <= 8 + MAX_EMPTY_ROOTS
    cache.check()
    assert cache.stats().namespaces == 8 + MAX_EMPTY_ROOTS  # two blocks each of the last 8
    assert len(cache.tree._emptied) == MAX_EMPTY_ROOTS
    assert cache.tree.evicted.tokens == 8 * MAX_EMPTY_ROOTS, "evictions of forgotten namespaces are forgotten"
    assert [hit(cache, ints(range(8), 1), tenant(9_999 - i)) for i in (0, 7, 8)] == [8, 8, 0]


@pytest.mark.behaviour(30)
def test_evictions_of_the_namespaces_emptied_last_are_remembered() -> None:
    cache = make_cache(blocks=2, block_size=4)
    for number in range(MAX_EMPTY_ROOTS + 2):
        run(cache, ints(range(8)), namespace=tenant(number))
    caps = [
        cache.explain(ints(range(8)), tenant(n)).cap for n in (0, 1, MAX_EMPTY_ROOTS, MAX_EMPTY_ROOTS + 1)
    ]
    assert caps == ["nothing_cached", "evicted", "evicted", "last_token"]


def test_a_namespace_stays_while_a_lease_uses_it_and_can_be_filled_again() -> None:
    cache = make_cache(blocks=4, block_size=4)
    lease, _ = admit(cache, ints(range(8)), tenant(0))
    for number in range(1, 2 * MAX_EMPTY_ROOTS):
        run(cache, ints(range(8)), namespace=tenant(number))
    assert tenant(0) in cache.tree.roots
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    assert hit(cache, ints(range(8), 1), tenant(0)) == 8
    back = 2 * MAX_EMPTY_ROOTS - 3  # emptied, and remembered
    assert cache.explain(ints(range(8)), tenant(back)).cap == "evicted"
    run(cache, ints(range(8)), namespace=tenant(back))
    for number in range(
        1000, 1000 + 2 * MAX_EMPTY_ROOTS
    ):  # it is among the emptied again, and forgotten in its turn
        run(cache, ints(range(8)), namespace=tenant(number))
    assert tenant(back) not in cache.tree.roots


def test_the_check_finds_a_namespace_that_outlives_its_prefixes() -> None:
    cache = make_cache()
    cache.tree.ensure_root(tenant(1))
    with pytest.raises(AssertionError, match="outlives"):
        cache.check()


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("hybrid", [False, True])
def test_clearing_one_namespace_leaves_all_others_unchanged(hybrid: bool) -> None:
    families = (FullAttention(1, 1), SlidingWindow(1, 1, window=6), RecurrentState(1, 8))
    cache = make_hybrid(*families) if hybrid else make_cache()
    for branch in (50, 60):
        run(cache, ints(range(10), branch, 1, 2), ints(7), tenant(1))
        run(cache, ints(range(10), branch, 1, 2), ints(7), tenant(2))
    before = hit(cache, ints(range(10), 50, 1, 2, 7, 9), tenant(2))
    used = cache.stats().cached_tokens
    freed = cache.clear(tenant(1))
    cache.check()
    assert freed > 0
    assert tenant(1) not in cache.tree.roots
    assert cache.stats().cached_tokens == used // 2
    assert hit(cache, ints(range(10), 50, 1, 2, 7, 9), tenant(2)) == before > 10
    assert cache.explain(ints(range(10)), tenant(1)).cap == "nothing_cached"
    assert cache.clear(tenant(3)) == 0


def test_clearing_a_namespace_keeps_prefixes_in_use_and_forgets_evictions() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(24)), namespace=tenant(1))
    lease, _ = admit(cache, ints(range(8), 99, 98), tenant(1))  # resumes at 8
    run(cache, ints(range(100, 116)), namespace=tenant(2))  # evicts the first one's tail
    assert cache.explain(ints(range(24)), tenant(1)).evicted_tokens
    cache.clear(tenant(1))
    cache.check()
    assert cache.explain(ints(range(24)), tenant(1)).evicted_tokens == 0
    assert hit(cache, ints(range(24)), tenant(1)) == 8
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    assert hit(cache, ints(range(8), 99, 98, 1), tenant(1)) == 10


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(prompt=TEXT, others=st.lists(TEXT, max_size=4), evicted=TEXT, running=TEXT)
def test_an_explanation_of_the_prompt_depends_only_on_its_cached_length(
    prompt: list[int], others: list[list[int]], evicted: list[int], running: list[int]
) -> None:
    asked = ints(prompt)
    cache = make_cache(blocks=64, block_size=4)
    for other in others:
        run(cache, ints(other))
    admit(cache, ints(running))
    cache.tree.evicted.remember(cache.tree.ensure_root(NAMESPACE), ints(evicted), [])
    told = cache.explain(asked, NAMESPACE)
    alone = make_cache(blocks=64, block_size=4)
    if told.found_tokens:
        run(alone, asked[: told.found_tokens])
    expected = alone.explain(asked, NAMESPACE).of_the_prompt()
    assert told.of_the_prompt() == expected
    assert expected.cached_tokens_there is expected.evicted_tokens is expected.pending_tokens is None
    assert expected.cap in ("nothing_cached", "not_cached", "last_token")
    if expected.divergence is not None:
        assert expected.asked_token == int(asked[expected.divergence])


def test_a_missing_checkpoint_is_told_with_the_cached_length() -> None:
    cache = make_hybrid(FullAttention(1, 1), RecurrentState(1, 8))
    run(cache, ints(range(36)))
    told = cache.explain(ints(range(30), 99), NAMESPACE).of_the_prompt()
    assert (told.cap, told.found_tokens, told.matched_tokens) == ("no_checkpoint", 30, 0)
    assert np.array_equal(told.cached_tokens_there or (), ())
