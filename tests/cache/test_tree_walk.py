"""Walks over the prefix tree in pieces, between which it changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rootstock.cache import KVCache
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.cache.tree_snapshot import TreeWalk
from rootstock.cache.types import Tokens
from rootstock.testing.fake_runtime import FULL, STATE

RED, BLUE = Namespace("w", "f", salt="red"), Namespace("w", "f", salt="blue")
rng = np.random.default_rng(0)


def put(cache: KVCache, tokens: Tokens, namespace: Namespace = RED) -> None:
    admitted = cache.admit(cache.match(tokens, namespace))
    assert isinstance(admitted, Admitted)
    lease = admitted.lease
    cache.commit(lease, tokens[lease.num_computed_tokens :])
    cache.release(lease, ReleaseReason.FINISHED)


NUMBERS = itertools.count(1)  # of all walks, as a server has them


def filled(prompts: int, hybrid: bool = False) -> KVCache:
    cache = KVCache([FULL, STATE] if hybrid else [FULL], 4 * 2**20, 4)
    heads = [rng.integers(0, 9, 6) for _ in range(5)]
    for index in range(prompts):
        tail = rng.integers(0, 9, int(rng.integers(1, 9)))
        tokens = np.concatenate([heads[int(rng.integers(0, 5))], tail]).astype(np.int32)
        put(cache, tokens, RED if index % 3 else BLUE)
    return cache


def begin(cache: KVCache, previous: TreeWalk | None = None) -> TreeWalk:
    return TreeWalk(cache.tree, cache.pools, NUMBERS, previous, at_once=16)


def piece(walk: TreeWalk) -> bool:
    """Walks the shortest piece."""
    return walk.advance(0.0, lambda: 1.0)


def whole(cache: KVCache, previous: TreeWalk | None = None) -> TreeWalk:
    walk = begin(cache, previous)
    while piece(walk):
        pass
    return walk


def assert_forest(walk: TreeWalk) -> None:
    """Asserts that parents come first, that each child begins where its parent ended, and that numbers are unique."""
    columns = walk.columns
    assert len(set(columns.number)) == len(walk)
    for row, parent in enumerate(columns.parent):
        assert -1 <= parent < row
        assert columns.start[row] < columns.end[row]
        if parent >= 0:
            assert columns.root[parent] == columns.root[row]


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_walk_reports_every_node_once(hybrid: bool) -> None:
    cache = filled(400, hybrid)
    walk, stats = whole(cache), cache.stats()
    columns = walk.columns
    assert_forest(walk)
    assert len(walk) == stats.nodes
    assert sum(columns.end) - sum(columns.start) == stats.cached_tokens
    for row, parent in enumerate(columns.parent):
        assert columns.start[row] == (0 if parent < 0 else columns.end[parent])
    assert {namespace.salt for namespace in walk.namespaces} == {"red", "blue"}
    assert sum(columns.checkpoints) == stats.checkpoints
    assert bool(stats.checkpoints) == hybrid
    for number, leases, held in zip(columns.number, columns.leases, columns.checkpoint_bytes, strict=True):
        detail = walk.detail(number, 0.0)
        assert detail is not None
        assert detail.leases == leases
        assert detail.bytes == (detail.end - detail.start) * walk.token_bytes + held
        assert held == sum(checkpoint.bytes for checkpoint in detail.checkpoints)
    assert not walk.is_truncated


def test_later_walks_repeat_the_numbers() -> None:
    cache = filled(200)
    first = whole(cache)
    for _ in range(50):
        put(cache, rng.integers(0, 9, 12).astype(np.int32))
    second = whole(cache, first)
    assert_forest(second)
    assert set(first.columns.number) <= set(second.columns.number)
    for number in first.columns.number:
        one, other = first.prefix(number), second.prefix(number)
        assert one is not None
        assert other is not None
        assert np.array_equal(one[1], other[1])


def test_a_walk_goes_on_while_the_tree_changes() -> None:
    for seed in range(20):
        cache = filled(300)
        changes = np.random.default_rng(seed)
        walk = begin(cache)
        while piece(walk):
            for _ in range(10):
                put(cache, changes.integers(0, 9, int(changes.integers(2, 14))).astype(np.int32))
            if changes.random() < 0.1:
                cache.clear(BLUE)
        assert_forest(walk)
        cache.check()


def test_a_cleared_tree_has_no_nodes_to_describe() -> None:
    cache = filled(50)
    walk = begin(cache)
    piece(walk)
    cache.clear()
    while piece(walk):
        pass
    for number in walk.columns.number:
        assert walk.detail(number, 0.0) is None
        assert walk.prefix(number) is None
    assert len(whole(cache, walk)) == 0


def test_a_node_is_described() -> None:
    cache = filled(0)
    head = np.arange(10, dtype=np.int32)
    put(cache, np.concatenate([head, [50, 51]]).astype(np.int32))
    put(cache, np.concatenate([head, [60]]).astype(np.int32))
    walk = whole(cache)
    details = [walk.detail(number, 1e9) for number in walk.columns.number]
    top = next(detail for detail in details if detail is not None and detail.start == 0)
    assert top.tokens.tolist() == head.tolist()
    assert (top.end, top.children, top.namespace, top.leases) == (10, 2, RED, 0)
    assert top.idle_s > 0
    assert top.bytes == 10 * 16
    leaf = next(detail for detail in details if detail is not None and detail.tokens.tolist() == [50, 51])
    prefix = walk.prefix(leaf.number)
    assert prefix is not None
    assert prefix[0] == RED
    assert prefix[1].tolist() == [*head.tolist(), 50, 51]
    assert walk.detail(10_000, 0.0) is None


def test_usage_agrees_with_the_statistics() -> None:
    cache = filled(100, hybrid=True)
    usage, stats = cache.usage(), cache.stats()
    assert (usage.budget_bytes, usage.used_bytes) == (stats.budget_bytes, stats.used_bytes)
    assert usage.families == stats.families


def test_a_walk_that_follows_no_other_gives_no_number_again() -> None:
    cache = filled(20)
    first, second = whole(cache), whole(cache)
    assert len(first) == len(second) > 20
    assert not set(first.columns.number) & set(second.columns.number)
