"""Sessions: the pauses between the requests of each session, from which the cache expects when the next one comes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

MAX_SESSIONS = 4096  # of one tenant; the one used longest ago is dropped
MAX_TENANTS = 256  # with sessions
MAX_ALL_SESSIONS = 65_536  # of all tenants: clients may choose the tenant's name
MAX_SESSION_TTL_S = 3600.0  # of retention that follows from a session alone
LEAST_SESSION_TTL_S = 5.0
FIRST_PAUSE_S = 60.0  # expected before any pause is known

# The estimate of TCP's retransmission timer (Jacobson and Karels, 1988).
_MEAN_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
_DEVIATIONS = 4.0


@dataclass(slots=True)
class Pauses:
    """Mean and mean deviation of pauses."""

    mean_s: float = FIRST_PAUSE_S
    deviation_s: float = FIRST_PAUSE_S / 2
    count: int = 0

    def learn(self, pause_s: float) -> None:
        if not self.count:
            self.mean_s, self.deviation_s = pause_s, pause_s / 2
        else:
            # The first pauses count as in a plain mean.
            gain = max(_MEAN_GAIN, 1 / (self.count + 1))
            self.deviation_s += max(_DEVIATION_GAIN, gain) * (abs(pause_s - self.mean_s) - self.deviation_s)
            self.mean_s += gain * (pause_s - self.mean_s)
        self.count += 1

    @property
    def ttl_s(self) -> float:
        """A time within which the next request comes in all likelihood, bounded."""
        return min(max(self.mean_s + _DEVIATIONS * self.deviation_s, LEAST_SESSION_TTL_S), MAX_SESSION_TTL_S)


@dataclass(slots=True)
class Session:
    id: int  # never used again
    pauses: Pauses
    running: int = 0  # requests
    idle_since: float | None = None  # None: no request has ended, or one is running


class Sessions:
    """Table of sessions. A session belongs to one tenant: equal names of two tenants are two sessions."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, OrderedDict[str, Session]] = OrderedDict()
        self._ids = itertools.count(1)
        self._by_id: dict[int, Session] = {}
        self._every: dict[str, Pauses] = {}  # of all sessions of a tenant: expected of a new one

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, tenant: str, name: str) -> Session | None:
        of_tenant = self._of.get(tenant)
        return None if of_tenant is None else of_tenant.get(name)

    def begin(self, tenant: str, name: str, now: float) -> Session:
        """Notes that a request of the session has been admitted; learns the pause before it."""
        of_tenant = self._of.setdefault(tenant, OrderedDict())
        self._of.move_to_end(tenant)
        session = of_tenant.get(name)
        if session is None:
            session = of_tenant[name] = Session(next(self._ids), Pauses())
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
            session.pauses.learn(pause_s)
            self._every.setdefault(tenant, Pauses()).learn(pause_s)
            session.idle_since = None
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

    def pauses(self, tenant: str, session: Session) -> Pauses:
        """Returns the pauses to expect: the session's own, or those of the tenant's other sessions before its
        second request."""
        if session.pauses.count:
            return session.pauses
        return self._every.get(tenant, session.pauses)
