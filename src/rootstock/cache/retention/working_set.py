"""The working set: the memory of the sessions whose next request runs, or is expected soon.

Sessions that need more than the memory evict each other's prefixes, and every turn becomes a prefill (Denning 1968
describes the same of programs and pages). The engine keeps the working set within the memory: it holds requests back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rootstock.cache.lease import Match
from rootstock.cache.retention.hint_decisions import Retainer
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.cache.retention.sessions import CacheSession
from rootstock.cache.shared_budget import BudgetShare

SMALL_LOSS = 1 / 8  # part of a session's tokens: if no more was evicted, its turn goes on


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that a request's session needs and does not have."""

    tenant: str
    size_bytes: int
    is_active: bool  # the session, or the one that it works for, was admitted before, and goes on since


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A session as it is seen at one moment."""

    tenant: str
    name: str
    running: int  # requests
    is_expected: bool  # it is in the working set
    is_active: bool
    idle_s: float  # since its last request ended; 0: one runs, or was preempted just now
    expected_pause_s: float  # after its last request
    size_bytes: int  # of the part of the cache that it alone uses
    requests: int
    prompt_tokens: int  # of all its requests
    hit_tokens: int  # of these

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """The memory that sessions need."""

    expected: Counter[str]  # bytes of the working set, by tenant
    active_bytes: int  # of all active sessions of this cache, also those that are not expected soon
    others_bytes: int = 0  # of the working sets of other caches of the budget

    @property
    def expected_bytes(self) -> int:
        return self.expected.total() + self.others_bytes


class WorkingSet:
    """The working set of one cache. `budget_bytes` is what sessions may keep."""

    def __init__(
        self, retainer: Retainer, budget_bytes: int, share: BudgetShare | None, clock: Callable[[], float]
    ) -> None:
        """`share` is the cache's part in a budget of several caches; None: the budget is its own."""
        self.budget_bytes = budget_bytes
        self._retainer = retainer
        self._sessions = retainer.sessions
        self._share = share
        self._clock = clock
        if share is not None:
            share.expected_bytes = lambda: self._own().expected.total()

    def demand(self, match: Match, hints: CacheHints) -> Demand | None:
        """Returns what the session of a request needs; None: it has it, or another request of it runs."""
        assert hints.session is not None, "only sessions have demands"
        session, now = self._sessions.find(hints.tenant, hints.session), self._clock()
        size = self._retainer.prompt_bytes(len(match.tokens) - match.length)
        parent = None if hints.parent is None else self._sessions.find(hints.tenant, hints.parent)
        serves_active = parent is not None and parent.is_active(now)  # whose tool call waits for it
        if session is None:
            return Demand(hints.tenant, size, serves_active)
        known = min(session.tokens, len(match.tokens))
        if session.running or (known and known - match.length <= SMALL_LOSS * known):
            return None
        session.yields_its_place = True
        is_active = serves_active or session.is_active(now)
        return Demand(hints.tenant, max(size, session.size_bytes), is_active)

    def memory(self) -> SessionMemory:
        """Adds up the memory of the sessions that go on."""
        own, share = self._own(), self._share
        if share is None:
            return own
        others = sum(other.expected_bytes() for other in share.budget.beside(share))
        return SessionMemory(own.expected, own.active_bytes, others)

    def _own(self) -> SessionMemory:
        now, expected, active_bytes = self._clock(), Counter[str](), 0
        for session in self._sessions.recent(now):
            if session.is_expected(now):
                expected[session.tenant] += session.size_bytes
            if session.active_since is not None:
                active_bytes += session.size_bytes
        return SessionMemory(expected, active_bytes)

    def rotate(self) -> None:
        """Makes the session that has been active longest a new one, for one that has waited long."""
        active = [
            (session.active_since, session.id, session)
            for session in self._sessions.recent(self._clock())
            if session.active_since is not None
        ]
        if active:
            min(active)[2].active_since = None

    def sessions(self, tenant: str | None = None) -> list[SessionReport]:
        """Describes the known sessions of a tenant, or all; of a tenant, the one used longest ago first."""
        now = self._clock()
        return [_report(session, now) for session in self._sessions.of(tenant)]


def _report(session: CacheSession, now: float) -> SessionReport:
    return SessionReport(
        session.tenant,
        session.name,
        session.running,
        session.is_expected(now),
        session.is_active(now),
        0.0 if session.running else max(0.0, now - session.left_at),
        0.0 if session.pause is None else session.pause.mean_s,
        session.size_bytes,
        session.requests,
        session.prompt_tokens,
        session.hit_tokens,
    )
