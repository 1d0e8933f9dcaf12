"""What goes first: tails of cached prefixes, or checkpoints. A policy is a pure function; the order is kept, never
searched for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Use(Protocol):
    """What a policy may know of a leaf of the tree, or of a checkpoint."""

    @property
    def last_used(self) -> float: ...  # of the cache's clock
    @property
    def hits(self) -> int: ...  # admissions that shared it
    @property
    def start(self) -> int: ...  # its first position: what recomputing it must attend to
    @property
    def end(self) -> int: ...
    @property
    def worth(
        self,
    ) -> float: ...  # prefill saved × chance of reuse ÷ bytes; 1 for plain blocks of the same age


EvictionPolicy = Callable[[Use], float]  # lowest rank goes first


def least_recently_used(use: Use) -> float:
    return use.last_used


class MostValuableLast:
    """By expected saving per byte, if the chance of reuse falls by 1/e with every `patience_s` of idleness.

    value = worth · exp(-(now - last_used) / patience_s). Its logarithm orders alike at every instant, so `now` drops
    out and a rank, once computed, stays right. For plain blocks, all worth 1, this is least recently used.

    How long what is used again was idle before is learnt from what is used again: agents come back within seconds,
    people within minutes.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s  # that ranks are computed with
        self._idle_s = patience_s  # moving average

    def __call__(self, use: Use) -> float:
        worth = use.worth
        return use.last_used if worth == 1.0 else use.last_used + self.patience_s * math.log(max(worth, 1e-9))

    def reused(self, idle_s: float) -> bool:
        """Something was used again after so long. True if all ranks have changed for it."""
        self._idle_s += _LEARNING * (idle_s - self._idle_s)
        patience_s = min(max(self._idle_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
        if 1 / _RENEW_AT < patience_s / self.patience_s < _RENEW_AT:
            return False
        self.patience_s = patience_s
        return True


_LEARNING = 0.1
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 3600.0
_RENEW_AT = 1.5  # as much as ranks may be out of date


class Evictable(Use, Protocol):
    queue_ticket: int  # of its newest entry in the queue; 0: must not be evicted now

    @property
    def is_wanted(self) -> bool: ...  # a queued request would hit it


N = TypeVar("N", bound=Evictable)
Rank = tuple[bool, float]  # (a queued request wants it, the policy's rank): lowest goes first


class EvictionQueue(Generic[N]):
    """Leaves or checkpoints that nobody uses, by (wanted by a queued request, rank, age of the entry).

    A binary heap with lazy deletion: an entry counts only while its ticket is the node's newest. Ties go to the
    older entry, so that every run evicts in the same order.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[bool, float, int, N]] = []
        self._tickets = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def rank(self, node: N) -> Rank:
        return node.is_wanted, self._policy(node)

    def put(self, node: N) -> None:
        """Queues one, or queues it anew where its rank may have fallen."""
        if node.queue_ticket == 0:
            self._valid += 1
        self._tickets += 1
        node.queue_ticket = self._tickets
        heapq.heappush(self._heap, (*self.rank(node), self._tickets, node))
        if len(self._heap) > 64 + 2 * self._valid:
            self._heap = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
            heapq.heapify(self._heap)

    def renew(self) -> None:
        """Ranks everything anew: the policy has learnt something. O(n log n)."""
        alive = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
        self._heap = [(*self.rank(node), ticket, node) for _, _, ticket, node in alive]
        heapq.heapify(self._heap)

    def drop(self, node: N) -> None:
        """It is in use again, is no leaf any more, or is gone."""
        if node.queue_ticket:
            node.queue_ticket = 0
            self._valid -= 1

    def peek(self) -> Rank | None:
        """The rank of what is to be evicted next."""
        while self._heap:
            wanted, rank, ticket, node = self._heap[0]
            if node.queue_ticket != ticket:
                heapq.heappop(self._heap)
            elif self.rank(node) > (wanted, rank):  # used or wanted since: queue it anew
                heapq.heappop(self._heap)
                self.put(node)
            else:
                return wanted, rank
        return None

    def pop(self) -> N:
        """What `peek` has just told the rank of, taken out of the queue."""
        node = heapq.heappop(self._heap)[3]
        self.drop(node)
        return node
