"""Caches without a runtime, and requests that go through their whole cycle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.eviction import EvictionPolicy
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.lease import Admitted, Deferred, Lease, ReleaseReason
from rootstock.cache.plan import Plan
from rootstock.cache.radix_node import Boundary, Checkpoint, CheckpointKind, Node, walk
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.cache.types import Tokens

NAMESPACE = Namespace("weights", "float32")


def clock() -> Callable[[], float]:
    ticks = itertools.count(1)
    return lambda: float(next(ticks))


def make_cache(blocks: int = 64, block_size: int = 4, policy: EvictionPolicy | None = None) -> KVCache:
    return KVCache([FullAttention(1, 1)], blocks * block_size, block_size, policy=policy, clock=clock())


def make_hybrid(
    *families: Family, blocks: int = 64, block_size: int = 4, policy: EvictionPolicy | None = None
) -> KVCache:
    """Makes a cache whose budget pays for `blocks` rows of every family."""
    budget = blocks * sum(row_bytes(family, block_size) for family in families)
    return KVCache(families, budget, block_size, policy=policy, clock=clock())


def ints(*values: int | Sequence[int] | range) -> Tokens:
    flat: list[int] = []
    for value in values:
        flat.extend([value] if isinstance(value, int) else value)
    return np.array(flat, np.int32)


def admit(
    cache: KVCache,
    tokens: Tokens,
    namespace: Namespace = NAMESPACE,
    boundaries: Mapping[int, str] = {},
    hints: CacheHints | None = None,
) -> tuple[Lease, Plan]:
    at = [Boundary(position, CheckpointKind(kind)) for position, kind in boundaries.items()]
    answer = cache.admit(cache.match(tokens, namespace), boundaries=at, hints=hints)
    assert isinstance(answer, Admitted), answer
    cache.check()
    return answer.lease, answer.plan


def refused(cache: KVCache, tokens: Tokens, watermark_blocks: int = 0) -> Deferred:
    answer = cache.admit(cache.match(tokens, NAMESPACE), watermark_blocks)
    assert isinstance(answer, Deferred), answer
    cache.check()
    return answer


def prefill(cache: KVCache, lease: Lease, upto: int | None = None) -> None:
    """Computes the prompt, or its first part, in chunks that end at checkpoint positions."""
    upto = lease.num_tokens if upto is None else upto
    while lease.num_computed_tokens < upto:
        end = min(upto, upto if lease.next_checkpoint_position is None else lease.next_checkpoint_position)
        assert not isinstance(cache.extend(lease, end - lease.num_computed_tokens), Deferred)
        cache.commit(lease, lease.tokens[lease.num_computed_tokens : end].copy())
    cache.check()


def decode(cache: KVCache, lease: Lease, tokens: Tokens) -> None:
    for token in tokens:
        assert not isinstance(cache.extend(lease, 1), Deferred)
        cache.commit(lease, np.array([token], np.int32))
    cache.check()


def run(
    cache: KVCache,
    tokens: Tokens,
    answer: Tokens | None = None,
    namespace: Namespace = NAMESPACE,
    boundaries: Mapping[int, str] = {},
    hints: CacheHints | None = None,
) -> Lease:
    """Admits, computes and finishes; returns the ended lease."""
    lease, _ = admit(cache, tokens, namespace, boundaries, hints)
    prefill(cache, lease)
    if answer is not None:
        decode(cache, lease, answer)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    return lease


def hit(cache: KVCache, tokens: Tokens, namespace: Namespace = NAMESPACE) -> int:
    return cache.match(tokens, namespace).length


def checkpoints(cache: KVCache) -> dict[int, Checkpoint]:
    """Returns checkpoints by position. The caller knows that their positions differ."""
    return {at: checkpoint for node in nodes(cache) for at, checkpoint in node.checkpoints.items()}


def nodes(cache: KVCache) -> list[Node]:
    return sorted(
        (node for root in cache.tree.roots.values() for node in walk(root)), key=lambda n: (n.start, n.end)
    )


def state(cache: KVCache) -> tuple[object, ...]:
    """Returns all state that an operation without effect must leave unchanged."""
    owners = [rows.tobytes() for pool in cache.pools.every for rows in pool.pool.owners()]
    tree = [
        (
            n.start,
            n.end,
            n.tokens.tobytes(),
            n.blocks.tobytes(),
            n.ref_count,
            n.hits,
            n.last_used,
            n.queue_ticket,
        )
        for n in nodes(cache)
    ]
    return cache.stats(), owners, tree, cache.tree.version
