"""Block pool: contiguous allocation, and exact counts of blocks in each state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock.cache import FullAttention, KVCache
from rootstock.cache.block_pool import BlockPool
from rootstock.cache.types import BlockIds
from rootstock.errors import BudgetTooSmall


def runs(ids: BlockIds) -> int:
    return 1 + int(np.count_nonzero(np.diff(ids) != 1)) if len(ids) else 0


def test_blocks_are_contiguous_where_a_free_run_is_long_enough() -> None:
    pool = BlockPool(100)
    first, second, third = pool.allocate(30), pool.allocate(40), pool.allocate(30)
    pool.unuse(second)
    assert runs(pool.allocate(25)) == 1
    pool.unuse(first)
    pool.unuse(third)
    assert runs(pool.allocate(30)) == 1


def test_a_growing_sequence_stays_contiguous_while_its_neighbour_is_free() -> None:
    pool = BlockPool(100)
    mine = pool.allocate(10)
    for _ in range(5):
        mine = np.concatenate((mine, pool.allocate(1, after=int(mine[-1]))))
    assert runs(mine) == 1


def test_a_fragmented_pool_gives_single_blocks_rather_than_refusing() -> None:
    pool = BlockPool(20)
    singles = [pool.allocate(1) for _ in range(20)]
    for block in singles[::2]:
        pool.unuse(block)
    got = pool.allocate(10)
    assert sorted(got.tolist()) == list(range(0, 20, 2))
    pool.check()


def test_blocks_given_back_in_any_order_merge_into_one_run() -> None:
    pool = BlockPool(64)
    ids = pool.allocate(64)
    order = np.random.default_rng(1).permutation(64)
    for chunk in np.array_split(ids[order], 9):
        pool.unuse(chunk)
        pool.check()
    assert runs(pool.allocate(64)) == 1


@settings(max_examples=150)
@given(st.data())
def test_every_block_has_exactly_one_state_after_any_sequence_of_operations(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    pool = BlockPool(total)
    owned: list[BlockIds] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if owned and data.draw(st.booleans()):
            ids = owned.pop(data.draw(st.integers(0, len(owned) - 1)))
            cut = data.draw(st.integers(0, len(ids)))
            shuffled = np.array(data.draw(st.permutations(ids.tolist())), np.int32)
            if cut:
                pool.unuse(shuffled[:cut])
            if cut < len(ids):
                owned.append(shuffled[cut:])
        else:
            wanted = data.draw(st.integers(0, pool.free_blocks))
            after = data.draw(st.none() | st.integers(0, total - 1))
            got = pool.allocate(wanted, after)
            assert len(set(got.tolist())) == wanted
            if wanted:
                owned.append(got)
        pool.check()
        assert pool.live_blocks == sum(map(len, owned))
        assert pool.free_blocks + pool.live_blocks == total


@pytest.mark.behaviour(31)
def test_the_budget_bounds_real_bytes_and_too_small_a_budget_is_refused() -> None:
    families = [FullAttention(layers=4, bytes_per_token=4096)]
    cache = KVCache(families, budget_bytes=10 * 32 * 4096 + 5, block_size=32)
    assert cache.pool.total_blocks == 10
    assert cache.pool.total_blocks * cache.block_bytes <= 10 * 32 * 4096 + 5
    with pytest.raises(BudgetTooSmall, match=r"one block takes 128\.0 KiB") as refused:
        KVCache(families, budget_bytes=200_000, block_size=32)
    assert refused.value.budget_bytes == 200_000
    assert refused.value.needed_bytes == 2 * 32 * 4096
