"""Choice of a replica for a request: it begins soonest there, and costs the others least.

The cost of a replica is in seconds: the prefill that was assigned to it and is not done, and the prompt's tokens that
it has not cached, divided by its speed. In the end each of these tokens evicts another one that may be wanted again,
the sooner the more tokens a replica gets; so they weigh more where the replica has got more of them than others
lately. Replicas whose costs are nearly equal are ordered by the highest random weight of the prompt's
first block and the replica's name: equal beginnings meet at the same replica, also if several routers decide.

A prompt that was just assigned counts as cached there (a claim) until its blocks are announced: sessions
that begin at once meet where the first one went.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import xxhash

from rootstock.fleet.prefix_index import Keys, PrefixIndex

ALIKE = 2.0  # speeds that differ by a smaller factor are equal
NEAR_S = 0.02  # costs that differ by less are equal
REPORT_VALID_S = 5.0  # after that, requests that were assigned may have ended
RUNNING_S = 0.002  # cost of each running request: it slows down a new one
# Weights of a token that is computed. The prompt's own time: 1. The replica's, which others need:
REPEAT_WEIGHT = 0.25
# The token that it evicts, at a replica that gets as many new ones as others:
EVICTION_WEIGHT = 2.0
FEW_TOKENS = 150.0  # got lately, which make no difference between replicas: at the start, one would be a lot
LATELY_S = 30.0  # after which a new token counts a third of what it did
CLAIM_FACTOR, CLAIM_S = 1.5, 0.5  # a claim lasts longer than the prefill is expected to take
MOST_CLAIMED_BLOCKS = 4096  # of a replica
ON_THE_WAY_S, MOST_ON_THE_WAY = 0.25, 256  # requests so new that a report may not count them
WORK_SMOOTHING = 0.1  # weight of the newest request in a replica's mean


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The load of a replica, as it reports it about once a second."""

    waiting: int
    running: int
    prefilling: int  # requests without a first token, also waiting ones
    tokens_per_s: float  # of prefill, as measured; 0.0: not yet


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica to which a request may go."""

    slot: int
    cost_s: float
    backlog_s: float  # until its prefill begins
    prefill_s: float
    cached_tokens: int  # announced or claimed
    new_tokens: int


@dataclass(slots=True)
class _Replica:
    name: bytes
    tokens_per_s: float  # as compared with the others' measured speeds
    measured: float = 0.0  # tokens per second; 0.0: none was reported
    running: int = 0  # requests, also waiting ones: as reported, and assigned since
    reported_s: float = -math.inf
    busy_until_s: float = 0.0  # end of the prefill that was assigned to it
    work_s: float = 0.0  # mean prefill of a request
    assigned_s: float = -math.inf  # the last request
    new_tokens: float = 0.0  # that it got lately, as of then
    on_the_way: deque[tuple[float, float]] = field(  # when they were assigned, and their prefill: seconds
        default_factory=lambda: deque(maxlen=MOST_ON_THE_WAY)
    )
    claims: dict[int, float] = field(default_factory=dict)  # a block's key to its end, oldest first

    def lately(self, now_s: float) -> float:
        """Returns how many new tokens it got, recent ones first of all."""
        return self.new_tokens * math.exp((self.assigned_s - now_s) / LATELY_S)

    def claimed(self, keys: Sequence[int], cached: int, now_s: float) -> int:
        """Returns how many of a prompt's first blocks are cached or claimed, if so many are cached.

        All blocks before a claimed one are claimed."""
        claims = self.claims
        if cached == len(keys) or claims.get(keys[cached], now_s) <= now_s:
            return cached
        return bisect_left(keys, True, cached + 1, key=lambda key: claims.get(key, now_s) <= now_s)

    def claim(self, keys: Sequence[int], now_s: float, until_s: float) -> None:
        claims = self.claims
        for key in reversed(keys):  # the first block is forgotten last
            claims[key] = max(claims.pop(key, 0.0), until_s)
        ended = [key for key in islice(claims, 2 * len(keys)) if claims[key] <= now_s]
        for key in ended:
            del claims[key]
        for key in list(islice(claims, max(0, len(claims) - MOST_CLAIMED_BLOCKS))):
            del claims[key]


class RoutingPolicy:
    """The decision for each request. It belongs to one thread, and reads no clock: `now_s` is the time on any one."""

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
        """Corrects the expected load of a replica by its report."""
        replica = self._replicas[slot]
        on_the_way = replica.on_the_way
        while on_the_way and on_the_way[0][0] < now_s - ON_THE_WAY_S:
            on_the_way.popleft()
        if report.waiting:
            replica.busy_until_s = max(replica.busy_until_s, now_s + report.waiting * replica.work_s)
        elif not report.prefilling:  # as after requests that were refused or aborted
            coming_s = sum(prefill_s for _, prefill_s in on_the_way)
            replica.busy_until_s = min(replica.busy_until_s, now_s + coming_s)
        replica.reported_s = now_s
        replica.running = report.running + report.waiting + len(on_the_way)
        if report.tokens_per_s > 0:
            replica.measured = report.tokens_per_s
            self._compare_speeds()

    def _compare_speeds(self) -> None:
        """Takes replicas of about one speed for equally fast: measurements differ, and a prompt should not go to a
        replica because it was measured at a good moment, or first."""
        common = median(replica.measured for replica in self._replicas.values() if replica.measured)
        for replica in self._replicas.values():
            is_alike = common / ALIKE <= (replica.measured or common) <= common * ALIKE
            replica.tokens_per_s = common if is_alike else replica.measured

    def ranked(self, keys: Keys, tokens: int, slots: Sequence[int], now_s: float) -> list[Candidate]:
        """Returns the candidates, the best one first.

        `keys`: of the prompt's full blocks; none if they are not known. `tokens`: of the whole prompt."""
        matched, of_blocks = self._index.matched(keys, slots), keys.tolist()
        lately = [self._replicas[slot].lately(now_s) for slot in slots]
        mean = FEW_TOKENS + sum(lately) / max(1, len(lately))
        found = []
        for slot, got in zip(slots, lately, strict=True):
            replica = self._replicas[slot]
            blocks = replica.claimed(of_blocks, matched[slot], now_s)
            cached = min(tokens, blocks * self._block_size)
            backlog_s = max(0.0, replica.busy_until_s - now_s)
            prefill_s = (tokens - cached) / replica.tokens_per_s
            running_s = RUNNING_S * replica.running if now_s - replica.reported_s < REPORT_VALID_S else 0.0
            cost_s = (
                backlog_s
                + running_s
                + prefill_s * (1 + REPEAT_WEIGHT + EVICTION_WEIGHT * (FEW_TOKENS + got) / mean)
            )
            found.append(Candidate(slot, cost_s, backlog_s, prefill_s, cached, tokens - cached))
        found.sort(key=lambda candidate: candidate.cost_s)
        near = sum(candidate.cost_s <= found[0].cost_s + NEAR_S for candidate in found)
        return sorted(found[:near], key=self._order(of_blocks)) + found[near:]

    def assigned(self, candidate: Candidate, keys: Keys, now_s: float) -> None:
        """Notes that a request goes to a candidate."""
        replica = self._replicas[candidate.slot]
        prefill_s = candidate.prefill_s
        replica.busy_until_s = max(replica.busy_until_s, now_s) + prefill_s
        replica.work_s += WORK_SMOOTHING * (prefill_s - replica.work_s)
        replica.running += 1
        replica.new_tokens = replica.lately(now_s) + candidate.new_tokens
        replica.assigned_s = now_s
        replica.on_the_way.append((now_s, prefill_s))
        replica.claim(
            keys.tolist(), now_s, now_s + CLAIM_FACTOR * (candidate.backlog_s + prefill_s) + CLAIM_S
        )

    def _order(self, keys: Sequence[int]) -> Callable[[Candidate], float]:
        """Returns the order of equal candidates: by the first block, or the one that has waited longest."""
        if not keys:
            return lambda candidate: self._replicas[candidate.slot].assigned_s
        return lambda candidate: -xxhash.xxh3_64_intdigest(self._replicas[candidate.slot].name, keys[0])
