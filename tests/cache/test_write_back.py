"""Write-back queue: stores of evicted and published rows carry the right identity, each row is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, clock, ints, nodes, prefill, run
from rootstock.cache import KVCache
from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    row_bytes,
)
from rootstock.cache.keys import Namespace, RecordKind, identify
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.plan import Plan, Store
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import Tokens
from rootstock.cache.write_back import WriteBackQueue

FULL = FullAttention(layers=1, bytes_per_token=1)
WINDOW = SlidingWindow(layers=2, bytes_per_token=1, window=6)
STATE = RecurrentState(layers=3, bytes_per_state=4)
SIZE = 4
PROMPT = ints(range(22))


def over_a_tier(*families: Family, blocks: int = 64, through: bool = False) -> KVCache:
    budget = blocks * sum(row_bytes(family, SIZE) for family in families)
    stored = StoredIndex(families, SIZE)
    return KVCache(families, budget, SIZE, clock=clock(), stored=stored, through=through)


def queue_of(cache: KVCache) -> WriteBackQueue:
    assert cache.write_back is not None
    return cache.write_back


def index_of(cache: KVCache) -> StoredIndex:
    assert cache.stored is not None
    return cache.stored


def keep(cache: KVCache, stores: Iterable[Store]) -> None:
    """Adds the stores to the index, as a tier does after it has taken them."""
    for store in stores:
        index_of(cache).add(store.identity)


def named(stores: Iterable[Store], family: Family = FULL) -> list[tuple[int, int]]:
    """Returns (start, end) of each store of a family."""
    return [(s.identity.start, s.identity.end) for s in stores if s.identity.family == family.name]


def is_of(store: Store, tokens: Tokens, namespace: Namespace = NAMESPACE) -> bool:
    """Returns True if a request with these tokens would look up the store's identity."""
    asked = store.identity
    if asked.end > len(tokens):
        return False
    family = {f.name: f for f in (FULL, WINDOW, STATE)}[asked.family]
    named = identify(
        namespace, family.name, family.layers, "float32", asked.kind, tokens[: asked.end], asked.start
    )
    same_tokens = (asked.tokens == named.tokens).all()
    return asked.key == named.key and asked.parent == named.parent and bool(same_tokens)


def rows(cache: KVCache, stores: Iterable[Store]) -> dict[int, int]:
    """Returns the row of each store by its first position."""
    return {store.identity.start: store.part.row for store in stores}


# -- identities --------------------------------------------------------------------------------------------------


def test_stores_of_blocks_carry_their_tokens_and_a_partly_filled_block_fewer() -> None:
    cache = over_a_tier(FULL)
    run(cache, PROMPT)
    stores = cache.take_all_stores()
    assert named(stores) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)]
    assert all(is_of(store, PROMPT) for store in stores)
    assert [store.part.tokens for store in stores] == [4, 4, 4, 4, 4, 2]
    (node,) = nodes(cache)
    assert [store.part.row for store in stores] == node.blocks.tolist()


def test_stores_of_a_branch_carry_the_prefix_before_it() -> None:
    cache = over_a_tier(FULL)
    other = ints(PROMPT[:10].tolist(), 90, 91, 92)
    run(cache, PROMPT)
    run(cache, other)
    stores = cache.take_all_stores()
    assert len(named(stores)) == len(set(named(stores))) + 1  # both have a block from 8 to 12
    of_other = [store for store in stores if is_of(store, other)]
    assert sorted(named(of_other)) == [(0, 4), (4, 8), (8, 12), (12, 13)]
    assert all(is_of(store, PROMPT) or is_of(store, other) for store in stores)
    assert not any(store.identity.end == 10 for store in stores), "both blocks hold their common beginning"


def test_a_checkpoint_is_stored_with_its_window_blocks_and_its_state() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE)
    run(cache, PROMPT, boundaries={13: "user"})
    stores = cache.take_all_stores()
    assert all(is_of(store, PROMPT) for store in stores)
    states = [store.identity for store in stores if store.identity.kind is RecordKind.STATE]
    assert sorted((state.start, state.end) for state in states) == [(12, 13), (20, 21)]
    assert {(8, 12), (12, 13), (16, 20), (20, 21)} == set(named(stores, WINDOW))


def test_equal_prompts_of_two_tenants_have_different_keys() -> None:
    cache = over_a_tier(FULL)
    tenant = Namespace("weights", "float32", salt="tenant")
    run(cache, PROMPT)
    run(cache, PROMPT, namespace=tenant)
    stores = cache.take_all_stores()
    assert len(stores) == 12
    assert len({store.identity.key for store in stores}) == 12
    assert sum(is_of(store, PROMPT, tenant) for store in stores) == 6


def test_rows_of_a_private_namespace_are_never_stored() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE, through=True)
    run(cache, PROMPT, namespace=Namespace("weights", "float32", is_private=True))
    assert cache.take_all_stores() == ()


# -- eviction ----------------------------------------------------------------------------------------------------


def test_evicted_blocks_are_stored_before_their_rows_are_written_again() -> None:
    cache = over_a_tier(FULL, blocks=8)
    run(cache, PROMPT)
    (node,) = nodes(cache)
    held = dict(zip(range(0, 22, 4), node.blocks.tolist(), strict=True))
    lease, _ = admit(cache, ints(range(50, 70)))
    stores = cache.take_pending_plan().stores
    assert named(stores) == [(12, 16), (16, 20), (20, 22)]  # from its end, as many as were needed
    assert rows(cache, stores) == {start: held[start] for start in (12, 16, 20)}
    assert all(is_of(store, PROMPT) for store in stores)
    assert cache.take_pending_plan().stores == (), "told once"
    cache.release(lease, ReleaseReason.ABORTED)


def test_every_evicted_checkpoint_is_stored() -> None:
    cache = over_a_tier(FULL, STATE, blocks=3)
    prompts = [ints(first, 30, 31) for first in range(8)]
    stores = [store for prompt in prompts for plan in commits(cache, prompt) for store in plan.stores]
    assert 0 < cache.counters.checkpoints_evicted < 8
    states = [store for store in stores if store.identity.kind is RecordKind.STATE]
    assert len(states) == cache.counters.checkpoints_evicted
    assert all(any(is_of(store, prompt) for prompt in prompts) for store in stores)


def test_stored_records_are_not_stored_again() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE, blocks=12)
    run(cache, PROMPT)
    stores = cache.take_all_stores()
    keep(cache, stores)
    assert cache.take_all_stores() == ()
    used = queue_of(cache).take_used()
    assert {store.identity.key for store in stores} <= set(used), "it was in use until now"
    for first in range(4):
        run(cache, ints(80 + first, range(22)))
        keep(cache, cache.take_pending_plan().stores)
    run(cache, PROMPT)
    assert not any(is_of(store, PROMPT) for store in cache.take_all_stores())


def test_a_partly_filled_block_is_not_stored_if_a_stored_block_begins_with_it() -> None:
    cache = over_a_tier(FULL)
    run(cache, ints(range(24)))
    keep(cache, cache.take_all_stores())
    other = over_a_tier(FULL)
    for identity in index_of(cache).some(99):
        index_of(other).add(identity)
    run(other, PROMPT)
    assert other.take_all_stores() == ()
    run(other, ints(PROMPT[:21].tolist(), 77))
    assert named(other.take_all_stores()) == [(20, 22)]


def test_reasoning_that_a_conversation_has_dropped_is_not_stored() -> None:
    cache = over_a_tier(FULL, STATE, blocks=64)
    user = ints(range(12))
    run(cache, ints(user.tolist(), 20, 21), answer=ints(range(30, 42)), boundaries={12: "user"})
    kept = ints(user.tolist(), 20, 60, 61, 62)
    run(cache, kept)
    dropped = ints(user.tolist(), 20, 21, range(30, 42))
    assert any(node.passed_by for node in nodes(cache))
    stores = cache.take_all_stores()
    assert all(is_of(store, kept) for store in stores), [store.identity.end for store in stores]
    assert not any(is_of(store, dropped) for store in stores if store.identity.end > 13)


def test_a_closed_queue_adds_no_stores() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE, blocks=12, through=True)
    queue_of(cache).is_open = False
    run(cache, PROMPT)
    run(cache, ints(range(50, 72)))
    assert cache.take_pending_plan().stores == ()
    queue_of(cache).is_open = True
    assert cache.take_all_stores() != ()


def test_a_checkpoint_whose_chunk_begins_inside_a_block_is_not_stored() -> None:
    """The positions before the chunk in that block may never have been written."""
    cache = over_a_tier(FULL, ChunkedAttention(layers=1, bytes_per_token=1, chunk=6), STATE)
    run(cache, PROMPT[:20])  # its chunk begins at 18
    assert {store.identity.family for store in cache.take_all_stores()} == {"full"}
    cache = over_a_tier(FULL, ChunkedAttention(layers=1, bytes_per_token=1, chunk=6), STATE)
    run(cache, PROMPT[:14])  # at 12
    assert {store.identity.family for store in cache.take_all_stores()} == {"full", "chunked(6)", "state"}


def test_clearing_the_cache_stores_nothing() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE)
    run(cache, PROMPT)
    cache.clear()
    assert cache.take_pending_plan().stores == ()
    assert cache.take_all_stores() == ()


# -- written through ---------------------------------------------------------------------------------------------


def commits(cache: KVCache, tokens: Tokens, boundaries: Mapping[int, str] = {}) -> list[Plan]:
    """Returns the plans of a prefill in chunks of 5."""
    lease, _ = admit(cache, tokens, boundaries=boundaries)
    plans = []
    while lease.num_computed_tokens < len(tokens):
        end = min(lease.num_computed_tokens + 5, len(tokens))
        if lease.next_checkpoint_position is not None:
            end = min(end, lease.next_checkpoint_position)
        cache.extend(lease, end - lease.num_computed_tokens)
        plans.append(cache.commit(lease, tokens[lease.num_computed_tokens : end].copy()))
    cache.release(lease, ReleaseReason.FINISHED)
    plans.append(cache.take_pending_plan())
    return plans


def test_write_through_stores_full_blocks_at_once_and_the_last_block_at_the_end() -> None:
    plans = commits(over_a_tier(FULL, through=True), PROMPT)
    assert [named(plan.stores) for plan in plans] == [
        [(0, 4)],
        [(4, 8)],
        [(8, 12)],
        [(12, 16), (16, 20)],
        [],
        [(20, 22)],
    ]
    assert all(is_of(store, PROMPT) for plan in plans for store in plan.stores)


def test_write_through_stores_a_checkpoint_when_it_is_left() -> None:
    plans = commits(over_a_tier(FULL, WINDOW, STATE, through=True), PROMPT, {13: "user"})
    stores = [store for plan in plans for store in plan.stores]
    assert sorted(named(stores, STATE)) == [(12, 13), (20, 21)]
    assert {(8, 12), (12, 13), (16, 20), (20, 21)} <= set(named(stores, WINDOW))
    assert len(stores) == len({store.identity.key for store in stores})
    assert all(is_of(store, PROMPT) for store in stores)


def test_write_through_counts_stored_records_as_used() -> None:
    cache = over_a_tier(FULL, WINDOW, STATE, through=True)
    for plan in commits(cache, PROMPT):
        keep(cache, plan.stores)
    queue_of(cache).take_used()
    cache.clear()
    assert [plan.stores for plan in commits(cache, PROMPT) if plan.stores] == []
    assert queue_of(cache).take_used() != []


# -- rows that may be wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [False, True])
def test_records_and_stores_of_a_discarded_request_are_removed(through: bool) -> None:
    cache = over_a_tier(FULL, WINDOW, STATE, through=through)
    run(cache, PROMPT[:6], PROMPT[6:10])
    keep(cache, cache.take_all_stores())
    before = set(index_of(cache).some(99))
    lease, _ = admit(cache, PROMPT)
    assert lease.hit_tokens == 10
    prefill(cache, lease, 20)
    stored = cache.take_pending_plan().stores
    keep(cache, stored)  # some of it is stored already …
    prefill(cache, lease)  # … and some is about to be
    cache.discard(lease)
    assert set(queue_of(cache).take_wrong()) == {
        store.identity.key for store in stored if store.identity.end > 10
    }
    assert all(store.identity.end <= 10 for store in cache.take_pending_plan().stores)
    assert all(store.identity.end <= 10 for store in cache.take_all_stores())
    left = index_of(cache).some(99)
    assert all(identity.end <= 10 for identity in left)
    assert {identity.key for identity in before} <= {identity.key for identity in left}


def test_records_of_another_request_with_the_discarded_tokens_are_removed() -> None:
    cache = over_a_tier(FULL)
    run(cache, PROMPT)
    keep(cache, cache.take_all_stores())
    cache.clear()
    lease, _ = admit(cache, PROMPT)
    prefill(cache, lease, 9)
    cache.discard(lease)
    assert len(queue_of(cache).take_wrong()) == 6
    assert len(index_of(cache)) == 0


def test_the_tokens_of_a_store_are_a_copy() -> None:
    """The caller's prompt may change, or be freed, long before the record is written."""
    cache = over_a_tier(FULL, STATE)
    tokens = PROMPT.copy()
    run(cache, tokens)
    stores = cache.take_all_stores()
    assert not any(np.shares_memory(store.identity.tokens, tokens) for store in stores)


def test_a_request_that_computed_nothing_stores_nothing_at_its_end() -> None:
    """The shared part of its last block was to be copied, and may not have been."""
    cache = over_a_tier(FULL, through=True)
    run(cache, PROMPT)
    queue_of(cache).take()
    lease, _ = admit(cache, ints(PROMPT[:18], 90, 91))
    assert lease.hit_tokens == 18
    cache.release(lease, ReleaseReason.ABORTED)
    assert queue_of(cache).take() == ()
