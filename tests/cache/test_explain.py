"""Explanation of a hit: the position where a prompt stops hitting, and the reason."""

from __future__ import annotations

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, checkpoints, ints, make_cache, make_hybrid, nodes, run
from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.families import RecurrentState
from rootstock.cache.lease import ReleaseReason


@pytest.mark.behaviour(30)
def test_a_divergence_is_told_with_its_position_and_both_tokens() -> None:
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
def test_an_evicted_prefix_is_told_apart_from_one_never_cached() -> None:
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


def test_a_prefix_cached_again_is_not_called_evicted() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(24)))
    run(cache, ints(range(100, 116)))
    run(cache, ints(range(24)))
    assert cache.explain(ints(range(24), 1), NAMESPACE).cap == "end_of_cached"


@pytest.mark.behaviour(30)
def test_a_whole_hit_is_told_apart_from_the_end_of_the_cached_prefix() -> None:
    cache = make_cache()
    run(cache, ints(range(20)))
    assert cache.explain(ints(range(20)), NAMESPACE).cap == "last_token"
    assert cache.explain(ints(range(20), 5), NAMESPACE).cap == "end_of_cached"
    assert cache.explain(ints(range(20)), Namespace("x", "y")).cap == "nothing_cached"


def test_tokens_that_a_running_request_computes_are_told() -> None:
    cache = make_cache()
    admit(cache, ints(range(30)))
    assert cache.explain(ints(range(25), 99), NAMESPACE).pending_tokens == 25


def test_a_cache_that_is_off_says_so() -> None:
    cache = KVCache([FullAttention(1, 1)], 400, 4, reuse=False)
    run(cache, ints(range(20)))
    assert cache.explain(ints(range(20)), NAMESPACE).cap == "cache_off"


def test_the_history_of_evictions_is_bounded() -> None:
    cache = make_cache(blocks=64, block_size=64)
    rng = np.random.default_rng(0)
    for _ in range(1600):  # more tokens than are remembered
        run(cache, rng.integers(0, 10**6, 1500).astype(np.int32))
    everywhere = [*cache.tree.roots.values(), *nodes(cache)]
    kept = sum(
        len(part) for node in everywhere for run in cache.tree.evicted.runs_below(node) for part in run.parts
    )
    assert kept == cache.tree.evicted.tokens <= 2 * 1024**2
    assert len(cache.tree.roots) == 1


def test_a_long_edge_evicted_block_by_block_is_remembered_once() -> None:
    cache = make_cache(blocks=2048, block_size=4)
    other, long = ints(range(50_000, 50_040)), ints(range(8000))
    run(cache, other)
    run(cache, long)
    lease, _ = admit(cache, ints(range(60_000, 60_004)))
    cache.release(lease, ReleaseReason.ABORTED)
    for extra in range(1, 1500):  # each takes one block more from the tail of the long edge
        protection = cache.protect(cache.match(other, NAMESPACE))
        answer = cache.admit(cache.match(ints(range(70_000, 70_000 + 4 * (38 + extra))), NAMESPACE))
        cache.release(answer.lease, ReleaseReason.ABORTED)  # type: ignore[union-attr]
        cache.unprotect(protection)
    assert cache.tree.evicted.tokens <= 8200
    assert cache.explain(long, NAMESPACE).cap == "evicted"


def test_an_eviction_behind_one_position_is_not_told_of_another() -> None:
    cache = make_cache(blocks=8, block_size=4)
    lease, _ = admit(cache, ints(range(16)))
    cache.commit(lease, ints(range(8)))
    run(cache, ints(range(8), range(60, 68)))
    filler, _ = admit(cache, ints(range(100, 116)))  # evicts the tokens behind position 8
    cache.release(filler, ReleaseReason.ABORTED)
    cache.commit(lease, ints(range(8, 16)))
    told = cache.explain(ints(range(16), range(60, 68)), NAMESPACE)
    assert (told.matched_tokens, told.evicted_tokens) == (16, 0)


def test_the_newest_eviction_behind_a_position_outlives_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.cache.eviction.MAX_RUNS", 3)
    cache = make_cache(blocks=4, block_size=4)
    for start in (0, 0, 100, 0):
        run(cache, ints(range(start, start + 16)))
        cache.admit(cache.match(ints(range(900, 916)), NAMESPACE))
        for lease in list(cache._leases.values()):
            cache.release(lease, ReleaseReason.ABORTED)
    assert cache.explain(ints(range(16)), NAMESPACE).cap == "evicted"


def test_a_tenant_without_cached_prefixes_leaves_no_root() -> None:
    cache = make_cache()
    for tenant in range(50):
        lease, _ = admit(cache, ints(range(10)), Namespace("w", "f", salt=str(tenant)))
        cache.discard(lease)
    assert cache.stats().namespaces == 0


# -- checkpoints

HYBRID = (FullAttention(1, 1), RecurrentState(1, 8))


@pytest.mark.behaviour(30)
def test_an_evicted_checkpoint_is_told_apart_from_one_that_was_never_left() -> None:
    cache = make_hybrid(*HYBRID)
    run(cache, ints(range(40)), ints(range(100, 110)), boundaries={10: "tool", 30: "tool"})
    while set(checkpoints(cache)) & {30, 39}:
        cache.tree._evict_first(
            by_leaf=cache.tree.checkpoints.peek() is None, missing_blocks=0, missing_bytes=0
        )
    told = cache.explain(ints(range(36), 99), NAMESPACE)
    assert (told.cap, told.evicted_checkpoint) == ("no_checkpoint", 30)
    assert told.message.endswith("because the checkpoint at 30 has been evicted since.")
    whole = cache.explain(ints(range(40)), NAMESPACE)
    assert whole.evicted_checkpoint == 39
    for each in (whole, whole.of_the_prompt()):
        assert each.message.startswith(f"KV to 39, state only to {whole.matched_tokens}: "), "as one computes"
    assert cache.explain(ints(range(25), 99), NAMESPACE).evicted_checkpoint in (None, 10)
    own = told.of_the_prompt()
    assert own.evicted_checkpoint is None
    assert "evicted" not in own.message, "evictions tell about other requests"
    run(cache, ints(range(36), 99))  # leaves one at 36
    assert cache.explain(ints(range(36), 98), NAMESPACE).evicted_checkpoint is None


@pytest.mark.behaviour(30)
def test_a_checkpoint_that_was_evicted_with_its_tokens_is_told() -> None:
    cache = make_hybrid(*HYBRID)
    run(cache, ints(range(40)), ints(range(100, 110)), boundaries={10: "user", 30: "user"})
    (leaf,) = nodes(cache)
    cache.tree.queue.drop(leaf)
    cache.pool.unhold(cache.tree._trim(leaf, 3))  # the tail, with the answer's checkpoint
    cache.check()
    cache.tree.drop(checkpoints(cache)[39])  # the K/V behind the checkpoint at 30 stay
    told = cache.explain(ints(range(40), range(100, 110), 9), NAMESPACE)
    assert (told.cap, told.matched_tokens, told.evicted_checkpoint) == ("no_checkpoint", 30, 50)


def test_a_checkpoint_behind_the_last_position_is_told() -> None:
    cache = make_hybrid(*HYBRID)
    run(cache, ints(range(40)), ints(range(100, 110)))
    cache.tree.drop(checkpoints(cache)[39])
    told = cache.explain(ints(range(40), range(100, 110)), NAMESPACE)  # resumes at 49 at most
    assert told.matched_tokens == 0
    assert told.message.endswith("is at 50, behind the last position at which the prompt can resume.")
