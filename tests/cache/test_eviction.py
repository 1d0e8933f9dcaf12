"""Order of eviction, and the prefixes that are never evicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cache.helpers import (
    NAMESPACE,
    admit,
    hit,
    ints,
    make_cache,
    make_hybrid,
    nodes,
    prefill,
    refused,
    run,
    state,
)
from rootstock.cache import FullAttention, KVCache, RecurrentState
from rootstock.cache.eviction import POLICIES, Evictable, EvictionPolicy, EvictionQueue
from rootstock.cache.lease import ReleaseReason
from rootstock.config import EVICTION_POLICIES


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = make_cache(blocks=8, block_size=4)
    for start in (0, 100, 200):
        run(cache, ints(range(start, start + 8)))
    run(cache, ints(range(8), 50))  # the oldest is used again
    run(cache, ints(range(300, 312)))
    assert hit(cache, ints(range(8), 1)) == 8
    assert hit(cache, ints(range(100, 108), 1)) == 0
    assert hit(cache, ints(range(200, 208), 1)) > 0


def test_an_old_prefix_that_is_used_often_is_not_evicted_first() -> None:
    cache = make_cache(blocks=10, block_size=4)
    run(cache, ints(range(8)))
    for i in range(50):
        run(cache, ints(range(8), 50 + i))
        run(cache, ints(1000 + i, 2000 + i, 3000 + i, 4000 + i))
    assert hit(cache, ints(range(8), 1)) == 8


@pytest.mark.behaviour(33)
def test_a_protected_prefix_is_evicted_after_all_unprotected_ones() -> None:
    cache = make_cache(blocks=8, block_size=4)
    for start in (0, 100, 200):
        run(cache, ints(range(start, start + 8)))
    protection = cache.protect(cache.match(ints(range(8), 1), NAMESPACE))  # the coldest of the three
    lease, _ = admit(cache, ints(range(300, 324)))  # six blocks
    assert hit(cache, ints(range(8), 1)) == 8
    assert hit(cache, ints(range(100, 108), 1)) == 0
    assert hit(cache, ints(range(200, 208), 1)) == 0
    cache.release(lease, ReleaseReason.ABORTED)
    cache.unprotect(protection)
    cache.clear()
    # If nothing else is left to evict, a protected prefix goes before a running request is preempted.
    run(cache, ints(range(8)))
    protection = cache.protect(cache.match(ints(range(8), 1), NAMESPACE))
    admit(cache, ints(range(300, 332)))
    assert hit(cache, ints(range(8), 1)) == 0
    cache.unprotect(protection)
    cache.check()


@pytest.mark.behaviour(34)
def test_a_hit_is_not_evicted_to_make_room_for_its_own_request() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(16)))  # the only thing cached, and the coldest
    run(cache, ints(range(100, 112)))
    lease, _ = admit(cache, ints(range(16), range(50, 66)))
    assert lease.hit_tokens == 16
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    assert hit(cache, ints(range(16), range(50, 66), 1)) == 32


@pytest.mark.behaviour(34)
def test_a_request_that_fits_only_by_evicting_its_own_hit_is_deferred() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(16)))
    other, _ = admit(cache, ints(range(100, 108)))
    before = state(cache)
    answer = refused(cache, ints(range(16), range(50, 62)))  # 4 hit + 3 fresh, 2 free
    assert (answer.needed_bytes, answer.available_bytes) == (12, 8)
    assert state(cache) == before
    cache.release(other, ReleaseReason.ABORTED)


def test_the_prefix_of_a_running_request_is_never_evicted() -> None:
    cache = make_cache(blocks=8, block_size=4)
    running, _ = admit(cache, ints(range(16)))
    prefill(cache, running)
    for i in range(5):
        run(cache, ints(range(100 * i + 100, 100 * i + 114)))
    assert hit(cache, ints(range(16), 1)) == 16
    cache.release(running, ReleaseReason.FINISHED)


def test_the_policy_can_be_replaced() -> None:
    class ShortestFirst:
        def rank(self, entry: Evictable) -> float:
            return float(entry.end)

        def observe_reuse(self, idle_s: float) -> bool:
            return False

    cache = make_cache(blocks=10, block_size=4, policy=ShortestFirst())
    run(cache, ints(range(16)))
    run(cache, ints(range(100, 108)))  # newer and shorter
    run(cache, ints(range(200, 224)))
    assert hit(cache, ints(range(16), 1)) == 16
    assert hit(cache, ints(range(100, 108), 1)) == 0


def test_the_option_names_every_policy() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_value_of_an_entry_falls_with_time(policy: Callable[[], EvictionPolicy]) -> None:
    assert policy().log_value(5.0, 5.0) == 0 > policy().log_value(5.0, 6.0)


@pytest.mark.parametrize(("policy", "kept"), [("value", [40]), ("lru", [8])])
def test_the_option_decides_between_an_old_entry_that_saves_much_and_a_new_one(
    policy: str, kept: list[int]
) -> None:
    cache = make_hybrid(FullAttention(1, 1), RecurrentState(1, 40), blocks=8, policy=POLICIES[policy]())
    run(cache, ints(range(40)), boundaries={40: "system"})
    run(cache, ints(range(100, 108)), boundaries={8: "system"})
    assert {node.end: bool(node.checkpoints) for node in nodes(cache)} == {40: True, 8: True}
    cache.tree.evict_checkpoints(1)
    assert [node.end for node in nodes(cache) if node.checkpoints] == kept


@pytest.mark.behaviour(38)
def test_ties_are_broken_the_same_way_in_every_run() -> None:
    def order() -> list[int]:
        cache = KVCache([FullAttention(1, 1)], 48, 4, clock=lambda: 0.0)  # every use at the same instant
        for start in (0, 100, 200, 300):
            run(cache, ints(range(start, start + 12)))
        lost = []
        for extra in range(1, 13):
            lease, _ = admit(cache, ints(range(1000, 1000 + 4 * extra)))
            lost.append([hit(cache, ints(range(start, start + 12), 1)) for start in (0, 100, 200, 300)])
            cache.release(lease, ReleaseReason.ABORTED)
        return list(itertools.chain.from_iterable(lost))

    assert order() == order()
    assert order()[:4] == [8, 12, 12, 12], "of equals the one that was queued first"


def test_the_queue_drops_stale_entries() -> None:
    cache = make_cache(blocks=16, block_size=4)
    for _ in range(2000):
        run(cache, ints(range(9)))
    queue: EvictionQueue[object] = cache.tree.queue  # type: ignore[assignment]
    assert len(queue._heap) < 200
