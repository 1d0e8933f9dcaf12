"""Sessions: the pauses between the requests of each session, from which the cache expects when the next one comes."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

MAX_SESSIONS = 4096  # of one tenant; the one used longest ago is dropped
MAX_TENANTS = 256  # with sessions
MAX_ALL_SESSIONS = 65_536  # of all tenants: clients may choose the tenant's name
MAX_SESSION_TTL_S = 3600.0  # of retention that follows from a session alone
LEAST_SESSION_TTL_S = 5.0
# Part of a tenant's sessions that a hint has ended. From then on, a late session is not taken for an ended one.
ENDS_ARE_TOLD = 1 / 8
FIRST_PAUSE_S = 60.0  # expected before any pause is known
FIRST_PART = 0.5  # of the time to live that a client asks for, before any pause is known
MOST_PART = 100.0  # learned from one pause: a client may ask for a microsecond

# The estimate of TCP's retransmission timer (Jacobson and Karels, 1988), on the logarithms of pauses: most calls of
# tools take seconds, and a few take hours.
_MEAN_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
_FIRST_DEVIATION = 0.5
_NEAR_DEVIATIONS, _SOON_DEVIATIONS, _DEVIATIONS = 0.5, 1.0, 4.0
_LEAST_SAMPLE = 1e-3


@dataclass(slots=True)
class Estimate:
    """Mean and mean deviation of the logarithm of a quantity, from samples."""

    mean: float
    deviation: float = _FIRST_DEVIATION
    count: int = 0

    @classmethod
    def of(cls, quantity: float) -> Estimate:
        return cls(math.log(quantity))

    def learn(self, quantity: float) -> None:
        sample = math.log(max(quantity, _LEAST_SAMPLE))
        if not self.count:
            self.mean, self.deviation = sample, _FIRST_DEVIATION
        else:
            # The first samples count as in a plain mean.
            gain = max(_MEAN_GAIN, 1 / (self.count + 1))
            self.deviation += max(_DEVIATION_GAIN, gain) * (abs(sample - self.mean) - self.deviation)
            self.mean += gain * (sample - self.mean)
        self.count += 1

    def at(self, deviations: float) -> float:
        """Returns the quantity so many mean deviations above its geometric mean."""
        return math.exp(self.mean + deviations * self.deviation)


@dataclass(slots=True)
class Pauses:
    """Estimates of the pauses of a session, or of all sessions of a tenant.

    A client that asks for another time to live from request to request knows how long the work between them takes: a
    short test, a long build. For requests with a time to live, the pause is learned as a part of it, and the next
    one is expected to be the same part of the next time to live. With equal times to live this is the mean pause.
    """

    seconds: Estimate = field(default_factory=lambda: Estimate.of(FIRST_PAUSE_S))
    parts: Estimate = field(default_factory=lambda: Estimate.of(FIRST_PART))  # of the time to live

    def learn(self, pause_s: float, ttl_s: float) -> None:
        """Learns a pause after a request that asked for `ttl_s`; 0: it asked for none."""
        self.seconds.learn(pause_s)
        if ttl_s:
            self.parts.learn(pause_s / max(ttl_s, pause_s / MOST_PART))

    def knows(self, ttl_s: float) -> bool:
        """Returns True if a pause after a request like this one has been learned."""
        return bool(self.parts.count if ttl_s else self.seconds.count)

    def expected(self, ttl_s: float, *, ends_are_told: bool = False) -> ExpectedPause:
        """Returns the pause to expect after a request that asks for `ttl_s`; 0: it asks for none."""
        of, unit_s = (self.parts, ttl_s) if ttl_s else (self.seconds, 1.0)
        near = _DEVIATIONS if ends_are_told else _NEAR_DEVIATIONS
        near_s, soon_s, most_s = (
            min(max(of.at(deviations) * unit_s, LEAST_SESSION_TTL_S), MAX_SESSION_TTL_S)
            for deviations in (near, _SOON_DEVIATIONS, _DEVIATIONS)
        )
        return ExpectedPause(of.at(0.0) * unit_s, near_s, soon_s, most_s)


@dataclass(frozen=True, slots=True)
class ExpectedPause:
    mean_s: float  # geometric
    near_s: float  # a time after which the session has probably ended, bounded
    soon_s: float  # a time for which it keeps its place in memory while others wait for one, bounded
    ttl_s: float  # a time within which the next request comes in all likelihood, bounded


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """Costs of a request of a session, which the engine tells at its end."""

    queued_s: float
    prefill_s: float  # from its first forward to its first token
    draft_tokens: int
    accepted_draft_tokens: int


@dataclass(slots=True)
class CacheSession:
    id: int  # never used again
    tenant: str
    name: str
    pauses: Pauses
    ttl_s: float = 0.0  # that the last request asked for; 0: none
    running: int = 0  # requests
    idle_since: float | None = None  # None: no request has ended, or one is running
    left_at: float = -math.inf  # when its last request ended, or was preempted
    pause: ExpectedPause | None = None  # after the last request
    active_since: float | None = None  # None: it is not active
    yields_its_place: bool = False  # its prefix was evicted, or its last answer calls no tool
    size_bytes: int = 0  # of the part of the cache that it alone uses
    tokens: int = 0  # of its last prompt and answer
    requests: int = 0
    prompt_tokens: int = 0  # of all its requests
    hit_tokens: int = 0  # of these
    held_s: float = 0.0  # for which its requests were held before their admission
    lost_tokens: int = 0  # of its prompts, within the length of its conversation, and not found
    lost_s: float = 0.0  # their part of the prefills' times
    queued_s: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def add_costs(self, costs: RequestCosts, lost_part: float) -> None:
        """Adds the costs of a request, of whose prefill a part was lost."""
        self.lost_s += lost_part * costs.prefill_s
        self.queued_s += costs.queued_s
        self.draft_tokens += costs.draft_tokens
        self.accepted_draft_tokens += costs.accepted_draft_tokens

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def is_expected(self, now: float) -> bool:
        """Returns whether a request runs, or is expected so soon that the session keeps its place in memory."""
        if self.running or self.yields_its_place or self.pause is None:
            return self.running > 0
        return now <= self.left_at + self.pause.soon_s

    def goes_on(self, now: float) -> bool:
        """Returns whether a request runs, or is expected within the longest pause."""
        return self.running > 0 or (self.pause is not None and now <= self.left_at + self.pause.ttl_s)

    def is_active(self, now: float) -> bool:
        """Returns whether it takes part in the use of memory: it was admitted, and goes on since."""
        return self.active_since is not None and self.goes_on(now)


class SessionTable:
    """Table of sessions. A session belongs to one tenant: equal names of two tenants are two sessions."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[str, CacheSession]] = OrderedDict()
        self._ids = itertools.count(1)
        self._by_id: dict[int, CacheSession] = {}
        self._recent: dict[int, CacheSession] = {}  # those that go on, and some that do not
        self._every: dict[str, Pauses] = {}  # of all sessions of a tenant: expected of a new one
        self._begun, self._ended = Counter[str](), Counter[str]()  # sessions of a tenant; ended by a hint

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, tenant: str, name: str) -> CacheSession | None:
        of_tenant = self._of.get(tenant)
        return None if of_tenant is None else of_tenant.get(name)

    def begin(self, tenant: str, name: str, now: float, ttl_s: float = 0.0) -> CacheSession:
        """Notes that a request of the session has been admitted, which asks for a time to live (0: for none); learns
        the pause before it."""
        of_tenant = self._of.setdefault(tenant, OrderedDict())
        self._of.move_to_end(tenant)
        session = of_tenant.get(name)
        if session is None:
            session = of_tenant[name] = CacheSession(next(self._ids), tenant, name, Pauses())
            self._begun[tenant] += 1
            self._by_id[session.id] = session
            while len(of_tenant) > MAX_SESSIONS:
                self._drop(of_tenant.popitem(last=False)[1])
            while len(self._of) > MAX_TENANTS:
                self._drop_tenant(next(iter(self._of)))
            while len(self._by_id) > MAX_ALL_SESSIONS:
                oldest = next(iter(self._of))
                if self._of[oldest]:
                    self._drop(self._of[oldest].popitem(last=False)[1])
                else:
                    self._drop_tenant(oldest)
        of_tenant.move_to_end(name)
        if not session.is_active(now):
            session.active_since = now
        if session.idle_since is not None:
            pause_s = max(0.0, now - session.idle_since)
            session.pauses.learn(pause_s, session.ttl_s)
            self._every.setdefault(tenant, Pauses()).learn(pause_s, session.ttl_s)
            session.idle_since = None
        session.ttl_s = ttl_s
        session.running += 1
        session.yields_its_place = False
        session.pause = self.expected(tenant, session)
        self._recent[session.id] = session
        return session

    def get(self, session_id: int) -> CacheSession | None:
        """Returns the session of an id; None: it was dropped, or has ended."""
        return self._by_id.get(session_id)

    def of(self, tenant: str | None) -> list[CacheSession]:
        """Returns the sessions of a tenant, or all, the one used longest ago first."""
        if tenant is None:
            return [session for of_tenant in self._of.values() for session in of_tenant.values()]
        return list(self._of.get(tenant, {}).values())

    def recent(self, now: float) -> list[CacheSession]:
        """Returns the sessions that go on."""
        for session in [each for each in self._recent.values() if not each.goes_on(now)]:
            del self._recent[session.id]
        return list(self._recent.values())

    def _drop(self, session: CacheSession) -> None:
        del self._by_id[session.id]
        self._recent.pop(session.id, None)

    def _drop_tenant(self, tenant: str) -> None:
        for table in (self._every, self._begun, self._ended):
            table.pop(tenant, None)
        for each in self._of.pop(tenant).values():
            self._drop(each)

    def end(self, session_id: int, now: float, *, comes_back: bool) -> None:
        """Notes that a request of the session has ended. `comes_back` is True for one that is preempted: no pause
        begins."""
        session = self._by_id.get(session_id)
        if session is None:  # dropped meanwhile
            return
        session.running -= 1
        session.left_at = now
        if not session.running and not comes_back:
            session.idle_since = now

    def forget(self, tenant: str, name: str) -> None:
        """Forgets a session that has ended."""
        of_tenant = self._of.get(tenant)
        session = None if of_tenant is None else of_tenant.pop(name, None)
        if session is not None:
            self._drop(session)
            self._ended[tenant] += 1

    def expected(self, tenant: str, session: CacheSession) -> ExpectedPause:
        """Returns the pause to expect after the session's last request: from the session's own pauses, or from those
        of the tenant's other sessions before its second request."""
        every = self._every.get(tenant)
        known = every if every is not None and not session.pauses.knows(session.ttl_s) else session.pauses
        told = self._ended[tenant] >= ENDS_ARE_TOLD * self._begun[tenant]
        return known.expected(session.ttl_s, ends_are_told=told)
