"""Which cached prefix goes first. A policy is a pure function; the order of leaves is kept, never searched for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class NodeUse(Protocol):
    """What a policy may know of a leaf."""

    @property
    def last_used(self) -> float: ...  # of the cache's clock
    @property
    def hits(self) -> int: ...  # admissions that shared it
    @property
    def start(self) -> int: ...  # its first position: what recomputing it must attend to
    @property
    def end(self) -> int: ...


EvictionPolicy = Callable[[NodeUse], float]  # lowest rank goes first


def least_recently_used(node: NodeUse) -> float:
    return node.last_used


class EvictableNode(NodeUse, Protocol):
    queue_ticket: int  # of its newest entry in the queue; 0: must not be evicted now

    @property
    def is_wanted(self) -> bool: ...  # a queued request would hit it


N = TypeVar("N", bound=EvictableNode)


class EvictionQueue(Generic[N]):
    """Leaves that nobody uses, by (wanted by a queued request, rank, age of the entry).

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

    def put(self, node: N) -> None:
        """Queues a leaf, or queues it anew where its rank may have fallen."""
        if node.queue_ticket == 0:
            self._valid += 1
        self._tickets += 1
        node.queue_ticket = self._tickets
        heapq.heappush(self._heap, (node.is_wanted, self._policy(node), self._tickets, node))
        if len(self._heap) > 64 + 2 * self._valid:
            self._heap = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
            heapq.heapify(self._heap)

    def drop(self, node: N) -> None:
        """The node is in use again, is no leaf any more, or is gone."""
        if node.queue_ticket:
            node.queue_ticket = 0
            self._valid -= 1

    def pop(self) -> N | None:
        """The leaf to evict from next, taken out of the queue."""
        while self._heap:
            wanted, rank, ticket, node = heapq.heappop(self._heap)
            if node.queue_ticket != ticket:
                continue
            if (node.is_wanted, self._policy(node)) > (wanted, rank):  # used or wanted since: queue it anew
                self.put(node)
                continue
            self.drop(node)
            return node
        return None
