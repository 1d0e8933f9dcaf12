"""Eviction: policies that rank leaves and checkpoints, the queue that orders them by rank, and a bounded history.

The history lets `explain` tell an evicted prefix from one that was never cached.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from rootstock.cache.longest_match import common_prefix
from rootstock.cache.radix_node import Node, kept_part
from rootstock.cache.retention.grants import Grant
from rootstock.cache.types import Tokens


class Evictable(Protocol):
    """The facts about a leaf of the tree, or about a checkpoint, that a policy may read."""

    @property
    def used_at(self) -> float: ...  # of the cache's clock
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
        """Returns an entry's rank; the lowest goes first. A pure function until `observe_reuse` returns True."""

    def observe_reuse(self, idle_s: float) -> bool:
        """Learns that an unreferenced entry was reused after `idle_s`. Returns True if all ranks have changed."""

    def log_value(self, rank: float, now: float) -> float:
        """Returns the logarithm of the value of an entry with this rank: 0 for a plain block that is used now."""


class MostValuableLast:
    """Ranks by expected saving per byte, if the chance of reuse falls e-fold with every `patience_s` of idleness.

    value = worth · exp(-(now - used_at) / patience_s). Its logarithm orders alike at every instant, so `now` drops
    out and a rank, once computed, stays right. For plain blocks, all worth 1, this is least recently used.

    `patience_s` follows the geometric mean of the idle times that ended in a reuse: agents come back within seconds,
    people within minutes. The arithmetic mean would follow the few that come back after hours, and make the worth of
    an entry count for more than its age.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s  # that ranks are computed with
        self._log_idle = math.log(patience_s)  # moving average

    def rank(self, entry: Evictable) -> float:
        worth = entry.worth
        return entry.used_at if worth == 1.0 else entry.used_at + self.patience_s * math.log(max(worth, 1e-9))

    def observe_reuse(self, idle_s: float) -> bool:
        self._log_idle += _LEARNING * (math.log(max(idle_s, _LEAST_PATIENCE_S)) - self._log_idle)
        patience_s = min(math.exp(self._log_idle), _MOST_PATIENCE_S)
        if 1 / _RENEW_AT < patience_s / self.patience_s < _RENEW_AT:
            return False
        self.patience_s = patience_s
        return True

    def log_value(self, rank: float, now: float) -> float:
        return (rank - now) / self.patience_s


class LeastRecentlyUsedFirst:
    """Ranks by the last use alone: a checkpoint and the blocks before it count alike, whatever they save."""

    def rank(self, entry: Evictable) -> float:
        return entry.used_at

    def observe_reuse(self, idle_s: float) -> bool:
        return False

    def log_value(self, rank: float, now: float) -> float:
        return (rank - now) / _LRU_PATIENCE_S


# By the values of the option `eviction`.
POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "value": MostValuableLast,
    "lru": LeastRecentlyUsedFirst,
}

_LRU_PATIENCE_S = 60.0  # only compares ages with the prices of other models' caches
_LEARNING = 0.1
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 3600.0
_RENEW_AT = 1.5  # factor by which the patience in the ranks may be out of date


class Queueable(Evictable, Protocol):
    queue_ticket: int  # of its newest entry in the queue; 0: must not be evicted now

    @property
    def is_protected(self) -> bool: ...  # a queued request would hit it
    @property
    def is_retained(self) -> bool: ...  # within its time to live
    @property
    def is_spent(
        self,
    ) -> bool: ...  # hardly any request resumes there: it is evicted before all others
    @property
    def grant(self) -> Grant | None: ...


N = TypeVar("N", bound=Queueable)
# (protected by a queued request, retained, priority, nearness of its next use, not spent, the policy's rank): lowest
# goes first.
Rank = tuple[bool, bool, int, int, bool, float]


def rank_of(entry: Queueable, policy: EvictionPolicy) -> Rank:
    """Returns the place of an entry in the order of eviction. Reads no clock: expired grants are removed before."""
    grant = entry.grant
    if grant is None:
        return entry.is_protected, False, 0, 0, not entry.is_spent, policy.rank(entry)
    retained = entry.is_retained
    near = grant.nearness if retained else 0
    return entry.is_protected, retained, grant.priority, near, not entry.is_spent, policy.rank(entry)


class EvictionQueue(Generic[N]):
    """Unreferenced leaves or checkpoints, ordered by (rank, age of the entry).

    A binary heap with lazy deletion: an entry counts only while its ticket is the node's newest. Ties go to the
    older entry, so that every run evicts in the same order.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # The parts of a rank, a ticket and its node. One flat tuple is compared in half the time of nested ones.
        self._heap: list[tuple[bool, bool, int, int, bool, float, int, N]] = []
        self._tickets = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def rank(self, node: N) -> Rank:
        return rank_of(node, self._policy)

    def put(self, node: N) -> None:
        """Queues a node, or queues it again where its rank may have fallen."""
        if node.queue_ticket == 0:
            self._valid += 1
        self._tickets += 1
        node.queue_ticket = self._tickets
        heapq.heappush(self._heap, (*rank_of(node, self._policy), self._tickets, node))
        if len(self._heap) > 64 + 2 * self._valid:
            self._heap = [entry for entry in self._heap if entry[7].queue_ticket == entry[6]]
            heapq.heapify(self._heap)

    def renew(self) -> None:
        """Computes all ranks again after the policy has learnt. O(n log n)."""
        alive = [entry[6:] for entry in self._heap if entry[7].queue_ticket == entry[6]]
        self._heap = [(*self.rank(node), ticket, node) for ticket, node in alive]
        heapq.heapify(self._heap)

    def drop(self, node: N) -> None:
        """Takes out a node that is referenced again, is no leaf any more, or is gone."""
        if node.queue_ticket:
            node.queue_ticket = 0
            self._valid -= 1

    def peek(self) -> Rank | None:
        """Returns the rank of the node to evict next. Brings the front of the heap up to date."""
        while self._heap:
            entry = self._heap[0]
            node = entry[7]
            if node.queue_ticket != entry[6]:
                heapq.heappop(self._heap)
                continue
            queued, rank = entry[:6], rank_of(node, self._policy)
            if rank <= queued:
                return queued
            self._tickets += 1  # used, protected or retained since: queue it again
            node.queue_ticket = self._tickets
            heapq.heapreplace(self._heap, (*rank, self._tickets, node))
        return None

    def check(self) -> None:
        """Asserts that no entry is queued above its level, where `peek` would find it too late. Within a level the
        policy's rank may have fallen a little: worth depends on checkpoints that are far away."""
        newest = [(entry[:6], entry[7]) for entry in self._heap if entry[7].queue_ticket == entry[6]]
        assert len(newest) == self._valid
        for rank, node in newest:
            assert rank[:5] <= self.rank(node)[:5], f"{node} is queued at {rank}, and is {self.rank(node)}"

    def pop(self) -> N:
        """Takes out the node whose rank `peek` has just returned."""
        node = heapq.heappop(self._heap)[7]
        self.drop(node)
        return node


# ---------------------------------------------------------------------------------------------- history

# Together at most 8 MiB of tokens, and as much again that their arrays may keep alive.
MAX_RUNS = 4096
MAX_TOKENS = 2 * 1024**2
LONGEST_RUN = 32 * 1024
MAX_CHECKPOINTS = 16  # evicted ones that are remembered of a node, and of a run


class EvictedRun:
    """Tokens that were cached below the end of `node`. Void (`node` is None) once replaced, cached again or
    forgotten.

    An edge is evicted from its tail, so its run grows at the front, by one part at a time.
    """

    __slots__ = ("checkpoints", "first", "length", "node", "parts", "was_retained")

    def __init__(
        self, node: Node, parts: list[Tokens], checkpoints: tuple[int, ...], was_retained: bool
    ) -> None:
        self.node: Node | None = node
        self.checkpoints = checkpoints[-MAX_CHECKPOINTS:]  # their positions; evicted with it
        self.was_retained = was_retained  # its first part: it was evicted within its time to live
        self.parts = parts  # the deepest first
        self.first = parts[-1].item(0)
        self.length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))

    def agreed(self, tokens: Tokens) -> int:
        """Counts the leading `tokens` that agree with the run."""
        position = 0
        for part in reversed(self.parts):
            agreed = common_prefix(part, tokens[position:])
            position += agreed
            if agreed < len(part):
                break
        return position


_LENGTH = attrgetter("length")


class EvictionHistory:
    """Evicted runs by the node that they followed. Bounded in number and in tokens; drops the oldest first."""

    def __init__(self) -> None:
        self._runs: deque[EvictedRun] = deque()
        self._below: dict[
            Node, dict[int, EvictedRun]
        ] = {}  # by node, then by first token; never an empty inner one
        self.tokens = 0  # of runs that are not void

    def runs_below(self, node: Node) -> Collection[EvictedRun]:
        """Returns the runs that followed the end of this node."""
        return self._below.get(node, {}).values()

    def evicted_after(self, node: Node, tokens: Tokens) -> int:
        """Counts the leading `tokens` that were cached below the end of this node and have been evicted."""
        run = self._below.get(node, {}).get(int(tokens[0]))
        return 0 if run is None else run.agreed(tokens)

    def checkpoints_after(self, node: Node, tokens: Tokens) -> tuple[int, ...]:
        """Returns the positions of the evicted checkpoints on the run that begins like `tokens`."""
        run = self._below.get(node, {}).get(int(tokens[0]))
        return () if run is None else run.checkpoints

    def was_retained(self, node: Node, tokens: Tokens) -> bool:
        """Returns True if the run that begins like `tokens` was evicted within its time to live."""
        run = self._below.get(node, {}).get(int(tokens[0]))
        return run is not None and run.was_retained

    def remember(
        self,
        node: Node,
        tokens: Tokens,
        deeper: list[Tokens],
        checkpoints: tuple[int, ...] = (),
        was_retained: bool = False,
    ) -> list[Node]:
        """Records that `tokens` were cached below `node`, and `deeper` after them, with `checkpoints` on both. Takes
        over both arrays; the caller does not write to them again.

        Returns the nodes whose oldest runs were dropped to stay within the bounds.
        """
        deeper.append(kept_part(tokens if len(tokens) <= LONGEST_RUN else tokens[:LONGEST_RUN]))
        run = EvictedRun(node, deeper, checkpoints, was_retained)
        while run.length - len(run.parts[0]) >= LONGEST_RUN:
            run.length -= len(run.parts.pop(0))
        here = self._below.setdefault(node, {})
        replaced = here.get(run.first)
        if replaced is not None:
            self._void(replaced)
        here[run.first] = run
        self._runs.append(run)
        self.tokens += run.length
        forgotten = []
        while self.tokens > MAX_TOKENS or len(self._runs) > MAX_RUNS:
            oldest = self._runs.popleft()
            if oldest.node is not None:
                forgotten.append(oldest.node)
                self.forget_run(oldest.node, oldest.first)
        return forgotten

    def take_below(self, node: Node) -> tuple[list[Tokens], tuple[int, ...]]:
        """Forgets the runs below a node that is evicted itself. Returns the parts of the longest, and its
        checkpoints: they follow the node's own run."""
        runs = self._below.pop(node, None)
        if runs is None:
            return [], ()
        longest = max(runs.values(), key=_LENGTH)
        parts = longest.parts
        for run in runs.values():
            self._void(run)
        return parts, longest.checkpoints

    def forget_below(self, node: Node) -> None:
        """Forgets the runs below a node that is removed or whose end moves."""
        runs = self._below.pop(node, None)
        if runs is not None:
            for run in runs.values():
                self._void(run)

    def forget_run(self, node: Node, first: int) -> None:
        """Forgets the run below a node that begins with token `first`, for example because it is cached again."""
        runs = self._below.get(node)
        if runs is None:
            return
        run = runs.pop(first, None)
        if run is not None:
            self._void(run)
        if not runs:
            del self._below[node]

    def _void(self, run: EvictedRun) -> None:
        run.node, run.parts = None, []
        self.tokens -= run.length
