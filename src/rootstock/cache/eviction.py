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

# How much older something worth e times as much may be before it is as good as gone: agents come back within
# minutes, and a prefix that nobody asked for in an hour is rarely asked for again.
PATIENCE_S = 300.0


def least_recently_used(use: Use) -> float:
    return use.last_used


def most_valuable_last(use: Use) -> float:
    """By expected saving per byte, if the chance of reuse falls by 1/e every PATIENCE_S.

    value = worth · exp(-(now - last_used) / PATIENCE_S). Its logarithm orders alike at every instant, so `now` drops
    out and a rank, once computed, stays right. For plain blocks, all worth 1, this is least recently used.
    """
    worth = use.worth
    return use.last_used if worth == 1.0 else use.last_used + PATIENCE_S * math.log(max(worth, 1e-9))


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

    def pop(self) -> N | None:
        """What to evict from next, taken out of the queue."""
        if self.peek() is None:
            return None
        node = heapq.heappop(self._heap)[3]
        self.drop(node)
        return node
