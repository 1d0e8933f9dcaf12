"""Where a request goes: to the replica at which it begins soonest, and which it costs least.

The cost of a replica is in seconds: the prefill that was assigned to it and is not done, and the prompt's tokens that
it has not cached, divided by its speed. Where its memory is full, each of these tokens evicts one that may be wanted
again, so they weigh more. Replicas whose costs are nearly equal are ordered by the highest random weight of the
prompt's first block and the replica's name: equal beginnings meet at the same replica, also across routers that do
not know each other.

A prompt that was just assigned counts as cached there (a claim) until its blocks are announced: sessions
that begin at once meet where the first one went.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from rootstock.fleet.prefix_index import Keys, PrefixIndex

NEAR_S = 0.02  # costs that differ by less are equal
RUNNING_S = 0.002  # cost of each running request: it slows down a new one
FULL_WEIGHT = 1.0  # of an evicted token, beside the 1.0 of computing one
FULL_FROM = 0.9  # share of memory in use above which new blocks evict others
CLAIM_FACTOR, CLAIM_S = 1.5, 0.5  # a claim lasts longer than the prefill is expected to take
MOST_CLAIMED_BLOCKS = 16_384  # of a replica
ON_THE_WAY_S = 0.25  # from the assignment of a request to a report that counts it
WORK_SMOOTHING = 0.1  # weight of the newest request in a replica's mean


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says about itself, about once a second."""

    waiting: int
    running: int
    tokens_per_s: float  # of prefill, as measured; 0.0: not yet
    memory_use: float  # share of the KV cache's memory that holds blocks, cached ones included


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica to which a request may go."""

    slot: int
    cost_s: float
    backlog_s: float  # until its prefill begins
    prefill_s: float
    cached_tokens: int  # announced or claimed


@dataclass(slots=True)
class _Replica:
    name: bytes
    tokens_per_s: float
    memory_use: float = 0.0
    running: int = 0  # as reported, and assigned since
    busy_until_s: float = 0.0  # end of the prefill that was assigned to it
    work_s: float = 0.0  # mean prefill of a request
    on_the_way: deque[tuple[float, float]] = field(  # assigned at, its prefill: seconds
        default_factory=lambda: deque(maxlen=256)
    )
    claims: dict[int, float] = field(default_factory=dict)  # block's key to its end, oldest first
    assigned_s: float = 0.0  # the last request

    def claimed(self, keys: list[int], now_s: float) -> int:
        """Returns how many of the first blocks are claimed. Each claim has all blocks before it."""
        return bisect_left(keys, True, key=lambda key: self.claims.get(key, now_s) <= now_s)

    def claim(self, keys: list[int], now_s: float, for_s: float) -> None:
        claims = self.claims
        for key in reversed(keys):  # the first block is forgotten last
            claims[key] = max(claims.pop(key, 0.0), now_s + for_s)
        ended = [key for key in islice(claims, 2 * len(keys)) if claims[key] <= now_s]
        for key in ended:
            del claims[key]
        for key in list(islice(claims, max(0, len(claims) - MOST_CLAIMED_BLOCKS))):
            del claims[key]


class RoutingPolicy:
    """The decision for each request. It belongs to one thread, and reads no clock: `now_s` is on any one."""

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self._index = index
        self._block_size = block_size
        self._replicas: dict[int, _Replica] = {}  # by slot

    def add(self, slot: int, name: str, tokens_per_s: float) -> None:
        """Adds a replica. `tokens_per_s`: its expected speed, until it reports one."""
        self._replicas[slot] = _Replica(name.encode(), tokens_per_s)

    def remove(self, slot: int) -> None:
        del self._replicas[slot]

    def report(self, slot: int, report: ReplicaReport, now_s: float) -> None:
        """Corrects what was expected of a replica by what it reports."""
        replica = self._replicas[slot]
        while replica.on_the_way and replica.on_the_way[0][0] < now_s - ON_THE_WAY_S:
            replica.on_the_way.popleft()
        coming_s = sum(work_s for _, work_s in replica.on_the_way)
        if report.waiting:
            replica.busy_until_s = max(replica.busy_until_s, now_s + report.waiting * replica.work_s)
        elif not report.running:
            replica.busy_until_s = min(replica.busy_until_s, now_s + coming_s)
        replica.running = report.running + report.waiting + len(replica.on_the_way)
        replica.memory_use = report.memory_use
        if report.tokens_per_s > 0:
            replica.tokens_per_s = report.tokens_per_s

    def ranked(self, keys: Keys, tokens: int, slots: Sequence[int], now_s: float) -> list[Candidate]:
        """Returns the candidates, the best one first. `keys`: of the full blocks of the prompt, none if they are not
        known; `tokens`: of the whole prompt."""
        matched = self._index.matched(keys, slots)
        of_blocks: list[int] = keys.tolist()
        found = []
        for slot in slots:
            replica = self._replicas[slot]
            blocks = max(matched[slot], replica.claimed(of_blocks, now_s))
            cached = min(tokens, blocks * self._block_size)
            backlog_s = max(0.0, replica.busy_until_s - now_s)
            prefill_s = (tokens - cached) / replica.tokens_per_s
            weight = 1.0 + (FULL_WEIGHT if replica.memory_use > FULL_FROM else 0.0)
            cost_s = backlog_s + weight * prefill_s + RUNNING_S * replica.running
            found.append(Candidate(slot, cost_s, backlog_s, prefill_s, cached))
        found.sort(key=lambda candidate: candidate.cost_s)
        near = sum(candidate.cost_s <= found[0].cost_s + NEAR_S for candidate in found)
        if near > 1:
            found[:near] = sorted(found[:near], key=self._order(of_blocks))
        return found

    def assigned(self, candidate: Candidate, keys: Keys, now_s: float) -> None:
        """Notes that a request goes to a candidate."""
        replica = self._replicas[candidate.slot]
        replica.busy_until_s = max(replica.busy_until_s, now_s) + candidate.prefill_s
        replica.work_s += WORK_SMOOTHING * (candidate.prefill_s - replica.work_s)
        replica.running += 1
        replica.assigned_s = now_s
        replica.on_the_way.append((now_s, candidate.prefill_s))
        replica.claim(
            keys.tolist(), now_s, CLAIM_FACTOR * (candidate.backlog_s + candidate.prefill_s) + CLAIM_S
        )

    def _order(self, keys: list[int]) -> Callable[[Candidate], float]:
        """Returns the order of equal candidates: the first block's replica, or the one that has waited longest."""
        if not keys:
            return lambda candidate: self._replicas[candidate.slot].assigned_s
        return lambda candidate: -xxhash.xxh3_64_intdigest(self._replicas[candidate.slot].name, keys[0])
