"""Admission by session: requests are held while the sessions that run need the memory.

A request is never held if its prefix is in memory or worth loading from a tier, or if rows are free for it. Of the
others, those of active sessions go first, as soon as the working set has room for them. New and long-idle sessions
become active if, beyond that, the active sessions do not compete: their memory is at most OVERCOMMIT of what they may
keep, or none of their requests was held for some time. A tenant that uses less than its part of the memory goes first
and needs no room.

No request is held while nothing runs, or longer than its bound. A session that was held so long takes the place of
the one that has been active longest: that one counts as a new session with its next request.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Match
from rootstock.cache.retention.working_set import Demand, SessionMemory
from rootstock.engine.parts import Part
from rootstock.engine.request import Request
from rootstock.engine.sequence import Ended, Held, Sequence, Waiting
from rootstock.engine.stats import SessionStats
from rootstock.errors import SessionsFull

log = logging.getLogger(__name__)

OVERCOMMIT = 1.5  # of the memory that sessions may keep: most sessions pause most of the time
ADMISSIONS = ("room", "idle", "overdue")  # reasons
ROTATION = 0.1  # last part of the longest wait, in which a request enters as soon as it can have its rows
HIT_RATES = (0.95, 0.9, 0.8, 0.5, 0.0)  # at least, in the statistics
CALM_S = 60.0  # without a held request of an active session: from then on, others become active


@dataclass(frozen=True, slots=True, eq=False)
class HeldRequest:
    """A held request, and what its session needs."""

    sequence: Sequence
    demand: Demand
    since: float

    @property
    def is_entering(self) -> bool:
        """True between its admission here and by the cache."""
        return self.sequence.admitted_at is None and not isinstance(self.sequence.state, Ended)


class SessionGate(Part):
    """The gate of requests whose sessions have no place in memory. Owned by the engine's thread."""

    def __init__(self, cache: KVCache, most_wait_s: float, most_held: int, *, has_tier: bool = False) -> None:
        """Holds at most `most_held` requests, each for `most_wait_s` at most. `held` stays the same object."""
        self._cache = cache
        self._has_tier = has_tier  # from which evicted sessions are loaded
        self._most_wait_s = most_wait_s
        self._most_held = most_held
        self.held: dict[Sequence, HeldRequest] = {}  # in order of arrival at the gate
        self._tenants = Counter[str]()  # held requests by tenant
        self._entering: list[HeldRequest] = []  # admitted here, and not yet by the cache
        self._known: tuple[tuple[float, int], SessionMemory] | None = (
            None  # at a time, of a version of the tree
        )
        self._rotated_for: HeldRequest | None = None
        self._contended_at: float | None = None  # when a request of an active session was held last
        self._counts = Counter[str]()  # held requests by the reason of their admission
        self._held_s = 0.0  # in all, of those that were admitted

    def refuse_if_full(self, request: Request, now: float) -> None:
        """Raises SessionsFull for a request that would be held one too many. From any thread."""
        hints = request.hints
        if hints is None or hints.session is None or not self._is_full(hints.tenant):
            return
        if not self._cache.working_set.expects(hints, now):
            raise SessionsFull(self._most_held, self._most_wait_s)

    def _is_full(self, tenant: str) -> bool:
        """Returns whether no more requests of a tenant can be held: tenants with held requests have equal parts."""
        part = self._most_held // max(1, len(self._tenants) + (tenant not in self._tenants))
        return len(self.held) >= self._most_held or self._tenants.get(tenant, 0) >= max(1, part)

    def held_before(self, request: Request) -> int:
        """Returns how many requests of the request's tenant are held, if it names a session. From any thread."""
        return self._tenants.get(request.hints.tenant, 0) if _session_of(request) and request.hints else 0

    def holds(self, sequence: Sequence, match: Match, now: float) -> bool:
        """Decides whether to hold a request, while others run. It is held once at most. Raises SessionsFull."""
        hints = sequence.request.hints
        if hints is None or hints.session is None:
            return False
        if (
            sequence.held_at is not None
            or sequence.admitted_at is not None
            or self._cache.has_free_rows(match)
        ):
            return False
        demand = self._cache.working_set.demand(match, hints)
        if demand is None:
            return False
        self._note_contention(now)
        held, memory = HeldRequest(sequence, demand, now), self._memory(now)
        if self._first(self._fitting([*self.held.values(), held], memory, now), memory) is held:
            memory.expected[demand.tenant] += demand.size_bytes
            return False
        if self._is_full(demand.tenant):
            raise SessionsFull(self._most_held, self._most_wait_s)
        sequence.state, sequence.held_at = Held(), now
        self.held[sequence] = held
        self._tenants[demand.tenant] += 1
        log.info(
            "a request is held until its session has a place in memory: %d are held",
            len(self.held),
            extra=sequence.log_fields,
        )
        return True

    def admit(self, now: float, *, is_idle: bool, earliest_waiting: int | None) -> list[Sequence]:
        """Takes out the requests that are held no longer.

        `is_idle`: nothing runs. `earliest_waiting` is the arrival of the first request that waits for admission:
        none that came later enters before it, but for one at the end of its longest wait.
        """
        self._note_contention(now)
        overdue = list(itertools.takewhile(lambda held: self._waited(held, now) >= 1, self.held.values()))
        if overdue:
            return [self._admit_overdue(held, now) for held in overdue]
        for held in self.held.values():
            if self._cache.working_set.runs(held.sequence.request.hints):
                return [self._admit(held, now, "room")]
        memory = self._memory(now)
        first, reason = self._first(self._fitting(self.held.values(), memory, now), memory), "room"
        if first is None and is_idle:
            first, reason = self._first(self.held.values(), memory), "idle"
        may_enter = first is not None and (
            earliest_waiting is None or first.sequence.arrival < earliest_waiting
        )
        if first is not None and may_enter and (is_idle or self._has_rows(first)):
            return [self._admit(first, now, reason)]
        oldest = next(iter(self.held.values()))
        # One enters after the other: many at once would delay all others, and none of them would be faster.
        if self._entering or self._waited(oldest, now) < 1 - ROTATION:
            return []
        self._rotate_for(oldest)
        return [self._admit_overdue(oldest, now)] if self._has_rows(oldest) else []

    def entered(self, sequence: Sequence) -> None:
        """Notes that the cache has admitted a request that was held."""
        self._cache.working_set.was_held(sequence.request.hints, sequence.held_s)

    def _waited(self, held: HeldRequest, now: float) -> float:
        """Returns how long a request has been held, as a part of the longest wait."""
        return (now - held.since) / self._most_wait_s

    def _rotate_for(self, held: HeldRequest) -> None:
        if self._rotated_for is not held:
            self._cache.working_set.rotate()
            self._rotated_for = held

    def _admit_overdue(self, held: HeldRequest, now: float) -> Sequence:
        self._rotate_for(held)
        return self._admit(held, now, "overdue")

    def _has_rows(self, held: HeldRequest) -> bool:
        """Returns whether a held request would run at once, instead of making others wait for its rows."""
        scope = held.sequence.scope
        match = self._cache.match(held.sequence.tokens, scope.namespace, public_tokens=scope.public_tokens)
        return self._cache.has_rows(match)

    def _admit(self, held: HeldRequest, now: float, reason: str) -> Sequence:
        self.remove(held.sequence)
        self._entering.append(held)
        held.sequence.state, held.sequence.held_s = Waiting(), now - held.since
        self._counts[reason] += 1
        self._held_s += held.sequence.held_s
        return held.sequence

    def _memory(self, now: float) -> SessionMemory:
        """Adds up the memory of the sessions that go on, and of those that are about to."""
        key = now, self._cache.tree.version
        if self._known is None or self._known[0] != key:
            memory = self._cache.working_set.memory()
            self._entering = [held for held in self._entering if held.is_entering]
            for held in self._entering:
                memory.expected[held.demand.tenant] += held.demand.size_bytes
            self._known = key, memory
        return self._known[1]

    def _first(self, held: Iterable[HeldRequest], memory: SessionMemory) -> HeldRequest | None:
        """Returns the next one to admit: of the tenant that uses least, of an active session, held longest."""
        return min(
            held,
            key=lambda each: (memory.expected[each.demand.tenant], not each.demand.is_active),
            default=None,
        )

    def _fitting(
        self, held: Iterable[HeldRequest], memory: SessionMemory, now: float
    ) -> Iterator[HeldRequest]:
        return (each for each in held if self._fits(each.demand, memory, now))

    def _note_contention(self, now: float) -> None:
        if any(held.demand.is_active for held in self.held.values()):
            self._contended_at = now

    def _fits(self, demand: Demand, memory: SessionMemory, now: float) -> bool:
        """Returns whether the memory has room for a session, or must make room for it."""
        budget_bytes = self._cache.working_set.budget_bytes
        tenants = {*memory.expected, *self._tenants, demand.tenant}
        if len(tenants) > 1 and memory.expected[demand.tenant] + demand.size_bytes <= budget_bytes // len(
            tenants
        ):
            return True
        is_calm = self._contended_at is None or now - self._contended_at > CALM_S
        if self._has_tier and is_calm and not demand.is_lost:
            return True  # sessions that it evicts are loaded again
        if memory.expected_bytes + demand.size_bytes > budget_bytes:
            return False
        return (
            demand.is_active
            or is_calm
            or memory.active_bytes + demand.size_bytes <= OVERCOMMIT * budget_bytes
        )

    def sessions(self, tenant: str | None) -> Counter[tuple[str, str]]:
        """Counts the held requests of each session, by tenant and name: of one tenant, or of all."""
        named = [sequence.request.hints for sequence in self.held]
        return Counter(
            (hints.tenant, hints.session)
            for hints in named
            if hints is not None and hints.session is not None and tenant in (None, hints.tenant)
        )

    def remove(self, sequence: Sequence) -> None:
        """Takes a held request out."""
        held = self.held.pop(sequence)
        self._tenants[held.demand.tenant] -= 1
        if not self._tenants[held.demand.tenant]:
            del self._tenants[held.demand.tenant]

    def clear(self) -> None:
        """Drops every held request."""
        self.held.clear()
        self._tenants.clear()
        self._entering.clear()
        self._known = None

    def stats(self) -> Mapping[str, Any]:
        working_set = self._cache.working_set
        memory, (known, active, hit_rates) = working_set.memory(), working_set.count()
        by_hit_rate = dict.fromkeys(map(str, HIT_RATES), 0)
        for found in hit_rates:
            by_hit_rate[str(next(rate for rate in HIT_RATES if found >= rate))] += 1
        return {
            "sessions": SessionStats(
                known=known,
                active=active,
                by_hit_rate=by_hit_rate,
                expected_bytes=memory.expected_bytes,
                active_bytes=memory.active_bytes,
                budget_bytes=working_set.budget_bytes,
                held=len(self.held),
                admitted=dict(self._counts),
                held_s=self._held_s,
            )
        }


def _session_of(request: Request) -> str | None:
    return None if request.hints is None else request.hints.session
