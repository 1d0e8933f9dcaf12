"""Sessions: the pauses between the requests of each session, from which the cache expects when the next one comes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_SESSIONS = 4096  # of one tenant; the one used longest ago is dropped
MAX_TENANTS = 256  # with sessions
MAX_ALL_SESSIONS = 65_536  # of all tenants: clients may choose the tenant's name
MAX_SESSION_TTL_S = 3600.0  # of retention that follows from a session alone
LEAST_SESSION_TTL_S = 5.0
FIRST_PAUSE_S = 60.0  # expected before any pause is known
FIRST_PART = 0.5  # of the time to live that a client asks for, before any pause is known
MOST_PART = 100.0  # learned from one pause: a client may ask for a microsecond

# The estimate of TCP's retransmission timer (Jacobson and Karels, 1988).
_MEAN_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
_DEVIATIONS = 4.0


@dataclass(slots=True)
class Estimate:
    """Mean and mean deviation of a quantity, from samples."""

    mean: float
    deviation: float
    count: int = 0

    def learn(self, sample: float) -> None:
        if not self.count:
            self.mean, self.deviation = sample, sample / 2
        else:
            # The first samples count as in a plain mean.
            gain = max(_MEAN_GAIN, 1 / (self.count + 1))
            self.deviation += max(_DEVIATION_GAIN, gain) * (abs(sample - self.mean) - self.deviation)
            self.mean += gain * (sample - self.mean)
        self.count += 1


@dataclass(slots=True)
class Pauses:
    """Estimates of the pauses of a session, or of all sessions of a tenant.

    A client that asks for another time to live from request to request knows how long the work between them takes: a
    short test, a long build. For requests with a time to live, the pause is learned as a part of it, and the next
    one is expected to be the same part of the next time to live. With equal times to live this is the mean pause.
    """

    seconds: Estimate = field(default_factory=lambda: Estimate(FIRST_PAUSE_S, FIRST_PAUSE_S / 2))
    parts: Estimate = field(
        default_factory=lambda: Estimate(FIRST_PART, FIRST_PART / 2)
    )  # of the time to live

    def learn(self, pause_s: float, ttl_s: float) -> None:
        """Learns a pause after a request that asked for `ttl_s`; 0: it asked for none."""
        self.seconds.learn(pause_s)
        if ttl_s:
            self.parts.learn(pause_s / max(ttl_s, pause_s / MOST_PART))

    def knows(self, ttl_s: float) -> bool:
        """Returns True if a pause after a request like this one has been learned."""
        return bool(self.parts.count if ttl_s else self.seconds.count)

    def expected(self, ttl_s: float) -> ExpectedPause:
        """Returns the pause to expect after a request that asks for `ttl_s`; 0: it asks for none."""
        of, unit_s = (self.parts, ttl_s) if ttl_s else (self.seconds, 1.0)
        most_s = (of.mean + _DEVIATIONS * of.deviation) * unit_s
        return ExpectedPause(of.mean * unit_s, min(max(most_s, LEAST_SESSION_TTL_S), MAX_SESSION_TTL_S))


@dataclass(frozen=True, slots=True)
class ExpectedPause:
    mean_s: float
    ttl_s: float  # a time within which the next request comes in all likelihood, bounded


@dataclass(slots=True)
class CacheSession:
    id: int  # never used again
    pauses: Pauses
    ttl_s: float = 0.0  # that the last request asked for; 0: none
    running: int = 0  # requests
    idle_since: float | None = None  # None: no request has ended, or one is running


class SessionTable:
    """Table of sessions. A session belongs to one tenant: equal names of two tenants are two sessions."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[str, CacheSession]] = OrderedDict()
        self._ids = itertools.count(1)
        self._by_id: dict[int, CacheSession] = {}
        self._every: dict[str, Pauses] = {}  # of all sessions of a tenant: expected of a new one

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
            session = of_tenant[name] = CacheSession(next(self._ids), Pauses())
            self._by_id[session.id] = session
            while len(of_tenant) > MAX_SESSIONS:
                del self._by_id[of_tenant.popitem(last=False)[1].id]
            while len(self._of) > MAX_TENANTS:
                self._drop_tenant(next(iter(self._of)))
            while len(self._by_id) > MAX_ALL_SESSIONS:
                oldest = next(iter(self._of))
                if self._of[oldest]:
                    del self._by_id[self._of[oldest].popitem(last=False)[1].id]
                else:
                    self._drop_tenant(oldest)
        of_tenant.move_to_end(name)
        if session.idle_since is not None:
            pause_s = max(0.0, now - session.idle_since)
            session.pauses.learn(pause_s, session.ttl_s)
            self._every.setdefault(tenant, Pauses()).learn(pause_s, session.ttl_s)
            session.idle_since = None
        session.ttl_s = ttl_s
        session.running += 1
        return session

    def _drop_tenant(self, tenant: str) -> None:
        self._every.pop(tenant, None)
        for each in self._of.pop(tenant).values():
            del self._by_id[each.id]

    def end(self, session_id: int, now: float, *, comes_back: bool) -> None:
        """Notes that a request of the session has ended. `comes_back` is True for one that is preempted: no pause
        begins."""
        session = self._by_id.get(session_id)
        if session is None:  # dropped meanwhile
            return
        session.running -= 1
        if not session.running and not comes_back:
            session.idle_since = now

    def forget(self, tenant: str, name: str) -> None:
        """Forgets a session that has ended."""
        of_tenant = self._of.get(tenant)
        session = None if of_tenant is None else of_tenant.pop(name, None)
        if session is not None:
            del self._by_id[session.id]

    def expected(self, tenant: str, session: CacheSession) -> ExpectedPause:
        """Returns the pause to expect after the session's last request: from the session's own pauses, or from those
        of the tenant's other sessions before its second request."""
        every = self._every.get(tenant)
        known = every if every is not None and not session.pauses.knows(session.ttl_s) else session.pauses
        return known.expected(session.ttl_s)
