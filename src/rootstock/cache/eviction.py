"""Order of eviction: a policy ranks leaves and checkpoints, a heap keeps them in order of rank."""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """The facts about a leaf of the tree, or about a checkpoint, that a policy may read."""

    @property
    def last_used(self) -> float: ...  # of the cache's clock
    @property
    def hits(self) -> int: ...  # admissions that shared it
    @property
    def start(self) -> int: ...  # its first position: recomputing it attends to all positions before
    @property
    def end(self) -> int: ...
    @property
    def worth(
        self,
    ) -> float: ...  # prefill saved × chance of reuse ÷ bytes; 1 for plain blocks of the same age


class EvictionPolicy(Protocol):
    """Order of eviction, by rank."""

    def rank(self, entry: Evictable) -> float:
        """Rank of an entry; the lowest goes first. A pure function until `observe_reuse` returns True."""

    def observe_reuse(self, idle_s: float) -> bool:
        """Learns that an unreferenced entry was reused after `idle_s`. Returns True if all ranks have changed."""


class LeastRecentlyUsed:
    def rank(self, entry: Evictable) -> float:
        return entry.last_used

    def observe_reuse(self, idle_s: float) -> bool:
        return False


class MostValuableLast:
    """Ranks by expected saving per byte, if the chance of reuse falls by 1/e with every `patience_s` of idleness.

    value = worth · exp(-(now - last_used) / patience_s). Its logarithm orders alike at every instant, so `now` drops
    out and a rank, once computed, stays right. For plain blocks, all worth 1, this is least recently used.

    `patience_s` follows a moving average of the idle times that ended in a reuse: agents come back within seconds,
    people within minutes.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s  # that ranks are computed with
        self._idle_s = patience_s  # moving average

    def rank(self, entry: Evictable) -> float:
        worth = entry.worth
        return (
            entry.last_used
            if worth == 1.0
            else entry.last_used + self.patience_s * math.log(max(worth, 1e-9))
        )

    def observe_reuse(self, idle_s: float) -> bool:
        self._idle_s += _LEARNING * (idle_s - self._idle_s)
        patience_s = min(max(self._idle_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
        if 1 / _RENEW_AT < patience_s / self.patience_s < _RENEW_AT:
            return False
        self.patience_s = patience_s
        return True


_LEARNING = 0.1
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 3600.0
_RENEW_AT = 1.5  # factor by which the patience in the ranks may be out of date


class Queueable(Evictable, Protocol):
    queue_ticket: int  # of its newest entry in the queue; 0: must not be evicted now

    @property
    def is_protected(self) -> bool: ...  # a queued request would hit it


N = TypeVar("N", bound=Queueable)
Rank = tuple[bool, float]  # (protected by a queued request, the policy's rank): lowest goes first


class EvictionQueue(Generic[N]):
    """Unreferenced leaves or checkpoints, ordered by (protected by a queued request, rank, age of the entry).

    A binary heap with lazy deletion: an entry counts only while its ticket is the node's newest. Ties go to the
    older entry, so that every run evicts in the same order.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank_of = policy.rank
        self._heap: list[tuple[bool, float, int, N]] = []
        self._tickets = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def rank(self, node: N) -> Rank:
        return node.is_protected, self._rank_of(node)

    def put(self, node: N) -> None:
        """Queues a node, or queues it again where its rank may have fallen."""
        if node.queue_ticket == 0:
            self._valid += 1
        self._tickets += 1
        node.queue_ticket = self._tickets
        heapq.heappush(self._heap, (*self.rank(node), self._tickets, node))
        if len(self._heap) > 64 + 2 * self._valid:
            self._heap = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
            heapq.heapify(self._heap)

    def renew(self) -> None:
        """Computes all ranks again after the policy has learnt. O(n log n)."""
        alive = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
        self._heap = [(*self.rank(node), ticket, node) for _, _, ticket, node in alive]
        heapq.heapify(self._heap)

    def drop(self, node: N) -> None:
        """Takes out a node that is referenced again, is no leaf any more, or is gone."""
        if node.queue_ticket:
            node.queue_ticket = 0
            self._valid -= 1

    def peek(self) -> Rank | None:
        """The rank of the node to evict next. Brings the front of the heap up to date."""
        while self._heap:
            protected, rank, ticket, node = self._heap[0]
            if node.queue_ticket != ticket:
                heapq.heappop(self._heap)
            elif self.rank(node) > (protected, rank):  # used or protected since: queue it again
                heapq.heappop(self._heap)
                self.put(node)
            else:
                return protected, rank
        return None

    def pop(self) -> N:
        """Takes out the node whose rank `peek` has just returned."""
        node = heapq.heappop(self._heap)[3]
        self.drop(node)
        return node
