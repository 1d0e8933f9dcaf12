"""The working set: the memory of the sessions whose next request runs, or is expected soon.

Sessions that need more than the memory evict each other's prefixes, and every turn becomes a prefill (Denning 1968
describes the same of programs and pages). The engine keeps the working set within the memory: it holds requests back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
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
    is_lost: bool = False  # it was, and neither memory nor a tier has its prefix


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A session as it is seen at one moment."""

    tenant: str
    name: str
    held: int = 0  # requests that wait for its place in memory
    running: int = 0  # requests
    is_expected: bool = False  # it is in the working set
    is_active: bool = False
    idle_s: float = 0.0  # since its last request ended; 0: one runs, or was preempted just now
    expected_pause_s: float = 0.0  # after its last request
    size_bytes: int = 0  # of the part of the cache that it alone uses
    requests: int = 0
    prompt_tokens: int = 0  # of all its requests
    hit_tokens: int = 0  # of these
    hit_rate: float = 0.0
    held_s: float = 0.0  # for which its requests were held before their admission
    lost_tokens: int = 0  # of its prompts, within the length of its conversation, and not found
    lost_s: float = 0.0  # their part of the prefills' times
    queued_s: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


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
        if size <= SMALL_LOSS * session.size_bytes:
            return None  # a short request beside the conversation
        session.yields_its_place = True
        is_active = session.is_active(now)
        size = max(size, session.size_bytes)
        return Demand(hints.tenant, size, is_active or serves_active, is_lost=is_active and known > 0)

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

    def was_held(self, hints: CacheHints | None, seconds: float) -> None:
        """Notes that a request was held before its admission."""
        session = self._of(hints)
        if session is not None:
            session.held_s += seconds

    def expects(self, hints: CacheHints, now: float) -> bool:
        """Returns whether a request's session has a place in memory. From any thread."""
        session = self._of(hints)
        return session is not None and session.is_expected(now)

    def runs(self, hints: CacheHints | None) -> bool:
        """Returns whether another request of a request's session runs."""
        session = self._of(hints)
        return session is not None and session.running > 0

    def _of(self, hints: CacheHints | None) -> CacheSession | None:
        """Returns the session that a request names, if it is known."""
        if hints is None or hints.session is None:
            return None
        return self._sessions.find(hints.tenant, hints.session)

    def sessions(
        self, tenant: str | None, most: int = 1000, held: Mapping[tuple[str, str], int] | None = None
    ) -> list[SessionReport]:
        """Describes the latest sessions of a tenant, or of all, those with held requests first.

        `held` are the numbers of held requests by tenant and name, also of sessions that were never admitted.
        """
        now, waiting = self._clock(), held or {}
        known = self._sessions.of(tenant)
        latest = heapq.nlargest(most, known, key=lambda session: now if session.running else session.left_at)
        described = [
            _report(session, waiting.get((session.tenant, session.name), 0), now) for session in latest
        ]
        new = [
            SessionReport(*names, held=count)
            for names, count in waiting.items()
            if self._sessions.find(*names) is None
        ]
        return sorted([*new, *described], key=lambda session: not session.held)[:most]

    def count(self) -> tuple[int, int, list[float]]:
        """Counts the known sessions and the active ones, and returns the hit rates of the known ones."""
        now, known = self._clock(), self._sessions.of(None)
        rates = [session.hit_rate for session in known if session.prompt_tokens]
        return len(known), sum(session.is_active(now) for session in known), rates


def _report(session: CacheSession, held: int, now: float) -> SessionReport:
    return SessionReport(
        session.tenant,
        session.name,
        held,
        session.running,
        session.is_expected(now),
        session.is_active(now),
        0.0 if session.running else max(0.0, now - session.left_at),
        0.0 if session.pause is None else session.pause.mean_s,
        session.size_bytes,
        session.requests,
        session.prompt_tokens,
        session.hit_tokens,
        session.hit_rate,
        session.held_s,
        session.lost_tokens,
        session.lost_s,
        session.queued_s,
        session.draft_tokens,
        session.accepted_draft_tokens,
    )
