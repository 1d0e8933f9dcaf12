"""The prefix tree and its pool: splits, copies, leases, admissions and evictions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, decode, hit, ints, make_cache, nodes, prefill, refused, run, state
from rootstock.cache import KVCache, Namespace
from rootstock.cache.block_pool import BlockPool
from rootstock.cache.lease import Admitted, Deferred, ReleaseReason
from rootstock.cache.plan import BlockCopy
from rootstock.cache.radix_node import Node, block_table
from rootstock.errors import CacheMisuse


def path_tokens(node: Node) -> list[int]:
    return [int(t) for step in reversed(list(node.path())) for t in step.tokens]


@pytest.mark.behaviour(1)
def test_a_divergence_inside_an_edge_splits_the_node_with_its_blocks_and_tokens() -> None:
    cache = make_cache(block_size=4)
    run(cache, ints(range(16)))
    (whole,) = nodes(cache)
    blocks = whole.blocks.copy()

    run(cache, ints(range(8), 90, 91, 92, 93))

    upper, branch, lower = nodes(cache)
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 8, 8, 16)
    assert upper.tokens.tolist() == list(range(8))
    assert lower.tokens.tolist() == list(range(8, 16))
    assert np.concatenate((upper.blocks, lower.blocks)).tolist() == blocks.tolist()
    assert [cache.pool.refcount(b) for b in blocks.tolist()] == [1, 1, 1, 1]
    assert path_tokens(branch) == [*range(8), 90, 91, 92, 93]


@pytest.mark.behaviour(1)
def test_a_split_inside_a_block_leaves_the_block_with_both_halves() -> None:
    cache = make_cache(block_size=4)
    run(cache, ints(range(12)))
    (whole,) = nodes(cache)
    middle = int(whole.blocks[1])
    admit(cache, ints(range(6), 90, 91))
    upper, lower = nodes(cache)
    assert (upper.end, lower.start) == (6, 6)
    assert int(upper.blocks[-1]) == int(lower.blocks[0]) == middle


@pytest.mark.behaviour(2)
def test_a_divergence_inside_a_block_gives_the_new_branch_a_copy_of_the_shared_part_only() -> None:
    cache = make_cache(block_size=8)
    run(cache, ints(range(16)))
    source = int(nodes(cache)[0].blocks[1])
    lease, plan = admit(cache, ints(range(11), 90, 91))
    assert lease.hit_tokens == 11
    assert plan.copies == (BlockCopy(source, int(lease.table[1]), 3),)  # type: ignore[arg-type]
    # Nothing in the plan or in the lease's own blocks touches the sibling's.
    sibling = set(nodes(cache)[-1].blocks.tolist())
    assert not sibling & set(lease.table[1:].tolist())


@pytest.mark.behaviour(3)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 100, 256, 2048])
def test_a_prefix_hit_is_counted_in_tokens_for_every_block_size(block_size: int) -> None:
    cache = make_cache(blocks=-(-5000 // block_size) + 4, block_size=block_size)
    run(cache, ints(range(2000)))
    assert hit(cache, ints(range(1000), 5000, 5001)) == 1000
    assert hit(cache, ints(range(1000))) == 999, "the last token is always computed"
    assert hit(cache, ints(range(2000), 7)) == 2000


@pytest.mark.behaviour(4)
def test_blocks_computed_twice_are_returned_and_the_cached_ones_stay() -> None:
    cache = make_cache(block_size=4)
    tokens = ints(range(14))
    first, _ = admit(cache, tokens)
    second, _ = admit(cache, tokens)  # admitted before anything was published: both compute
    prefill(cache, first)
    canonical = nodes(cache)[0].blocks.copy()
    free = cache.pool.free_blocks
    prefill(cache, second)
    assert cache.pool.free_blocks == free + 3, "the three whole duplicates are free again"
    assert second.table[:3].tolist() == canonical[:3].tolist()
    assert second.table[3] != canonical[3], "the last block, which it will write to, stays its own"
    assert cache.stats().duplicate_blocks == 3
    assert len(nodes(cache)) == 1


@pytest.mark.behaviour(5)
def test_the_refcount_is_the_number_of_live_owners_and_free_live_and_cached_make_the_total() -> None:
    cache = make_cache(blocks=20, block_size=4)
    run(cache, ints(range(8)))
    shared = nodes(cache)[0].blocks.tolist()
    assert [cache.pool.refcount(b) for b in shared] == [1, 1]
    leases = [admit(cache, ints(range(8), 50 + i))[0] for i in range(3)]
    assert [cache.pool.refcount(b) for b in shared] == [4, 4]
    pool = cache.pool
    assert (pool.free_blocks, pool.cached_blocks, pool.live_blocks) == (15, 0, 5)
    for lease in leases:
        cache.release(lease, ReleaseReason.ABORTED)
        cache.check()
    assert [cache.pool.refcount(b) for b in shared] == [1, 1]
    assert (pool.free_blocks, pool.cached_blocks, pool.live_blocks) == (18, 2, 0)


@pytest.mark.behaviour(6)
def test_using_a_free_block_is_an_assertion_and_changes_nothing() -> None:
    pool = BlockPool(8)
    mine = pool.allocate(2)
    with pytest.raises(AssertionError, match="free block was used"):
        pool.use(np.array([int(mine[0]), 7], np.int32))
    assert pool.refcount(int(mine[0])) == 1, "the first block is unchanged too"
    with pytest.raises(AssertionError, match="free block was held"):
        pool.hold(np.array([int(mine[0]), 7], np.int32))
    pool.check()


@pytest.mark.behaviour(6)
def test_releasing_a_block_twice_is_an_assertion_and_changes_nothing() -> None:
    pool = BlockPool(8)
    mine = pool.allocate(2)
    pool.unuse(mine[:1])
    with pytest.raises(AssertionError, match="released twice"):
        pool.unuse(mine)
    assert pool.refcount(int(mine[1])) == 1
    pool.check()


@pytest.mark.behaviour(6)
def test_a_block_in_use_is_not_freed_when_the_tree_releases_it() -> None:
    pool = BlockPool(4)
    mine = pool.allocate(1)
    pool.hold(mine)
    pool.unhold(mine)
    assert pool.free_blocks == 3
    with pytest.raises(AssertionError, match="that no node holds"):
        pool.unhold(mine)
    pool.unuse(mine)
    assert pool.free_blocks == 4
    pool.check()


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_hits_inside_blocks_are_counted(size: int) -> None:
    """Against whole blocks of the same size: the positions behind the last whole block of each hit."""
    cache = make_cache(block_size=size)
    expected = 0
    for prompt, found in (
        (range(11), 0),
        (range(11), 10),
        ([*range(7), 50, 51], 7),
        ([*range(9), 60], 9),
        ([*range(7), 50, 51, 52], 9),
        ([77], 0),
    ):
        assert run(cache, ints(*prompt)).hit_tokens == found
        expected += found % size
        stats = cache.stats()
        assert stats.inside_block_tokens == cache.usage().inside_block_tokens == expected
        assert stats.hit_tokens == cache.usage().hit_tokens


@pytest.mark.behaviour(6)
def test_ending_a_lease_twice_is_an_error() -> None:
    cache = make_cache()
    lease = run(cache, ints(1, 2, 3))
    with pytest.raises(CacheMisuse, match="a lease is ended once"):
        cache.release(lease, ReleaseReason.FINISHED)


@pytest.mark.behaviour(7)
def test_a_shared_partly_filled_block_is_copied_before_it_is_written() -> None:
    cache = make_cache(block_size=8)
    run(cache, ints(range(11)))
    tail = int(nodes(cache)[0].blocks[-1])
    lease, plan = admit(cache, ints(range(11), 50, 51))
    assert int(lease.table[1]) != tail
    assert plan.copies == (BlockCopy(tail, int(lease.table[1]), 3),)  # type: ignore[arg-type]


@pytest.mark.behaviour(7)
def test_full_shared_blocks_are_adopted_and_never_written() -> None:
    cache = make_cache(block_size=4)
    run(cache, ints(range(8)))
    shared = nodes(cache)[0].blocks.tolist()
    lease, plan = admit(cache, ints(range(8), 50, 51))
    assert lease.table[:2].tolist() == shared
    assert plan.copies == ()
    assert lease.num_computed_tokens == 8, "its first write goes behind them"


def test_a_conversation_whose_turns_end_inside_blocks_costs_as_many_blocks_as_one_long_prompt() -> None:
    cache = make_cache(block_size=16)
    for end in range(5, 200, 7):
        run(cache, ints(range(end)))
    pool = cache.pool
    assert pool.cached_blocks == -(-194 // 16)


@pytest.mark.behaviour(8)
def test_match_changes_nothing() -> None:
    cache = make_cache(block_size=4)
    run(cache, ints(range(14)))
    run(cache, ints(range(9), 50))
    running, _ = admit(cache, ints(range(14), range(60, 70)))
    before = state(cache)
    for tokens in (ints(range(14)), ints(range(6), 3), ints(99), ints(range(14), range(60, 65)), ints()):
        cache.match(tokens, NAMESPACE)
        cache.match(tokens, Namespace("other", "float32"))
        cache.explain(tokens, NAMESPACE)
    assert state(cache) == before
    cache.release(running, ReleaseReason.ABORTED)


@pytest.mark.behaviour(8)
def test_a_rejected_admission_changes_nothing_at_all() -> None:
    cache = make_cache(blocks=8, block_size=4)
    run(cache, ints(range(10)))
    running, _ = admit(cache, ints(range(100, 117)))  # 5 of 8 blocks
    before = state(cache)
    refused(cache, ints(range(10), range(50, 60)))
    refused(cache, ints(range(6), range(50, 60)))
    refused(cache, ints(range(10), 50), watermark_blocks=4)
    assert state(cache) == before
    cache.release(running, ReleaseReason.ABORTED)


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Namespace)])
def test_different_weights_dtype_rope_regime_adapter_or_tenant_never_hit_each_other(field: str) -> None:
    cache = make_cache()
    run(cache, ints(range(20)))
    other = dataclasses.replace(NAMESPACE, **{field: "different"})
    assert hit(cache, ints(range(20)), other) == 0
    run(cache, ints(range(20)), namespace=other)
    assert hit(cache, ints(range(20)), other) == 19
    assert not set(nodes(cache)[0].blocks.tolist()) & set(nodes(cache)[1].blocks.tolist())
    assert NAMESPACE.digest() != other.digest()


@pytest.mark.behaviour(10)
def test_evicting_a_leaf_evicts_unused_ancestors_and_ends_their_protection() -> None:
    cache = make_cache(blocks=12, block_size=4)
    run(cache, ints(range(16)))
    run(cache, ints(range(8), range(50, 58)))
    protection = cache.protect(cache.match(ints(range(16), 1), NAMESPACE))
    big, _ = admit(cache, ints(range(100, 148)))  # all twelve blocks
    assert nodes(cache) == []
    assert protection.nodes == []
    cache.unprotect(protection)
    cache.release(big, ReleaseReason.ABORTED)
    cache.check()


def test_an_eviction_takes_the_tail_of_a_leaf_rather_than_the_leaf() -> None:
    cache = make_cache(blocks=10, block_size=4)
    run(cache, ints(range(32)))  # 8 blocks
    lease, _ = admit(cache, ints(range(100, 112)))  # 3 blocks: one must go
    assert hit(cache, ints(range(32), 1)) == 28
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(11)
def test_a_request_sees_that_another_is_computing_its_prefix_and_how_far() -> None:
    cache = make_cache(block_size=4)
    producer, _ = admit(cache, ints(range(30)))
    match = cache.match(ints(range(20), 90, 91), NAMESPACE)
    assert match.length == 0
    assert match.pending is not None
    assert match.pending.producer is producer
    assert match.pending.until == 20
    assert match.waiting_gain == 20
    cache.commit(producer, ints(range(12)))
    match = cache.match(ints(range(20), 90, 91), NAMESPACE)
    assert (match.length, match.waiting_gain) == (12, 8)
    prefill(cache, producer)
    match = cache.match(ints(range(20), 90, 91), NAMESPACE)
    assert (match.length, match.pending) == (20, None)
    cache.release(producer, ReleaseReason.FINISHED)


def test_a_producer_that_ended_is_not_pending() -> None:
    cache = make_cache(block_size=4)
    producer, _ = admit(cache, ints(range(30)))
    cache.commit(producer, ints(range(10)))
    cache.release(producer, ReleaseReason.ABORTED)
    match = cache.match(ints(range(30)), NAMESPACE)
    assert (match.length, match.pending) == (10, None)


@pytest.mark.behaviour(12)
def test_five_siblings_adopt_one_prefix_at_once_and_none_consumes_it() -> None:
    cache = make_cache(blocks=40, block_size=4)
    run(cache, ints(range(18)))
    leases = [admit(cache, ints(range(18), 50 + i))[0] for i in range(5)]
    assert [lease.hit_tokens for lease in leases] == [18] * 5
    assert len({tuple(lease.table[:4].tolist()) for lease in leases}) == 1
    for lease in leases:
        prefill(cache, lease)
        cache.release(lease, ReleaseReason.FINISHED)
    assert hit(cache, ints(range(18), 99)) == 18


@pytest.mark.behaviour(13)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 8, 9, 63, 64])
def test_tokens_can_be_any_length_from_zero_up(length: int) -> None:
    cache = make_cache(blocks=32, block_size=4)
    assert hit(cache, ints(range(length))) == 0
    if length:
        run(cache, ints(range(length)))
        assert hit(cache, ints(range(length))) == length - 1
        assert hit(cache, ints(range(length), 7)) == length
    assert hit(cache, ints()) == 0


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    cache = make_cache(blocks=64, block_size=8)
    run(cache, ints(range(20)), answer=ints(range(100, 117)))
    assert hit(cache, ints(range(20), range(100, 117), 5)) == 37


def test_a_block_of_generated_tokens_is_found_while_its_request_still_runs() -> None:
    cache = make_cache(blocks=64, block_size=8)
    lease, _ = admit(cache, ints(range(16)))
    prefill(cache, lease)
    decode(cache, lease, ints(range(100, 109)))
    assert hit(cache, ints(range(16), range(100, 109), 5)) == 24
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(28)
def test_an_abort_leaves_what_was_computed_and_leaks_nothing() -> None:
    cache = make_cache(blocks=16, block_size=4)
    lease, _ = admit(cache, ints(range(30)))
    cache.commit(lease, ints(range(13)))
    cache.release(lease, ReleaseReason.ABORTED)
    assert hit(cache, ints(range(30))) == 13
    assert cache.pool.live_blocks == 0
    cache.clear()
    assert cache.pool.free_blocks == 16


def test_a_lone_request_can_use_every_block_even_if_its_hit_references_replaced_blocks() -> None:
    cache = make_cache(blocks=4, block_size=4)
    run(cache, ints(range(6), 50))
    run(cache, ints(range(6), 60))
    lease, _ = admit(cache, ints(range(6), 70, range(80, 88)))  # 15 tokens: every block there is
    prefill(cache, lease)
    decode(cache, lease, ints(1))
    assert cache.pool.free_blocks == 0
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    assert hit(cache, ints(range(6), 70, range(80, 88), 1, 2)) == 16


def test_a_block_table_reads_the_deeper_block_where_two_nodes_share_an_index() -> None:
    cache: KVCache = make_cache(block_size=8)
    run(cache, ints(range(11)))
    run(cache, ints(range(11), 50, 51))
    run(cache, ints(range(11), 60, 61))
    for leaf in nodes(cache)[1:]:
        table = block_table(leaf, leaf.end, 8)
        assert int(table[1]) == int(leaf.blocks[0])


def test_a_deferred_extension_changes_nothing() -> None:
    cache = make_cache(blocks=6, block_size=4)
    run(cache, ints(range(6), 50, 51))
    first, _ = admit(cache, ints(range(6), 60))
    second, _ = admit(cache, ints(range(6), 70))
    for lease in (first, second):
        prefill(cache, lease)
    before = state(cache)
    assert isinstance(cache.extend(first, 12), Deferred)
    assert state(cache) == before
    assert first.node is not None


def test_tokens_of_a_discarded_lease_are_not_found_and_shared_ones_stay() -> None:
    cache = make_cache(blocks=32, block_size=4)
    run(cache, ints(range(10)))
    lease, _ = admit(cache, ints(range(10), range(50, 70)))
    cache.commit(lease, ints(range(50, 60)))
    cache.discard(lease)
    cache.check()
    assert hit(cache, ints(range(10), range(50, 70))) == 10
    assert cache.pool.live_blocks == 0
    assert cache.stats().cached_blocks == 3


def test_a_producer_too_far_behind_to_help_is_not_pending() -> None:
    cache = make_cache(blocks=200, block_size=4)
    run(cache, ints(range(100)))
    scored = cache.admit(cache.match(ints(range(100), range(200, 220)), NAMESPACE, at_most=0))
    assert isinstance(scored, Admitted)
    asked = ints(range(100), range(200, 221))
    assert cache.match(asked, NAMESPACE).pending is None
    cache.commit(scored.lease, ints(range(96)))
    pending = cache.match(asked, NAMESPACE).pending
    assert pending is not None
    assert pending.until == 120
