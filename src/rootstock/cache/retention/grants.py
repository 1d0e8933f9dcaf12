"""Retention: grants of nodes and checkpoints that requests asked to keep.

A *claim* is the part of a request's hints that the cache has granted. Each node and checkpoint that it covers gets a
*grant*. Grants last for a time after the last use. The rank of an entry depends on its grant and not on the clock, so
the grant of an entry is removed when it has expired: before each eviction, the tree takes the expired ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rootstock.cache.retention.hint_types import Keep

# Priorities of grants that cost nothing. They are below all priorities of clients.
ENDED_PRIORITY = -103  # the private part of a session that has ended
OVERDRAWN_PRIORITY = -102  # the rest of a tenant whose share is full, while there are others
ANSWERED_PRIORITY = -101  # the end of a conversation that its user has to continue

Level = tuple[bool, int, int]  # (within its time to live, priority, nearness): lowest is given up first
_NEARNESS_BASE = 1.5  # two expected times that differ by less than this factor count as equal
OVERDUE = -100  # the nearness of an entry whose session should have come back: less than any other


def nearness(gap_s: float) -> int:
    """Returns how soon an entry is expected to be used again, in steps of a factor: greater is sooner."""
    return -round(math.log(max(gap_s, 0.1), _NEARNESS_BASE))


@dataclass(frozen=True, slots=True)
class Claim:
    """The granted part of a hint: tokens 0 … end-1 of its request."""

    tenant: str
    session: int  # 0: none
    end: int | None  # None: the prompt and its answer
    ttl_s: float  # 0: no time to live, a priority alone
    lasts_s: float  # of the grant, after each use
    priority: int
    nearness: int  # of the next use
    gap_s: float  # expected time until then: an entry that is overdue yields to new ones of its level
    near_s: float  # after each use, within which its nearness lasts

    def covers(self, position: int) -> bool:
        """Returns True if the token before `position` belongs to it."""
        return self.end is None or position <= self.end

    def grant(self, now: float) -> Grant:
        return Grant(
            self.tenant,
            self.session,
            self.ttl_s,
            self.lasts_s,
            now + self.lasts_s,
            self.priority,
            self.nearness if self.ttl_s else 0,
            self.gap_s,
            self.near_s,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """The retention of one node or checkpoint."""

    tenant: str  # whose share pays for it
    session: int
    ttl_s: float
    lasts_s: float
    until: float  # of the cache's clock; a use moves the end to `lasts_s` after it
    priority: int
    nearness: int
    gap_s: float
    near_s: float = math.inf
    is_joint: bool = False  # several tenants or sessions asked for it: none of them can end it

    @staticmethod
    def demotion(priority: int) -> Grant:
        """Returns a grant that makes an entry go first, until it is used again. It costs nothing."""
        return Grant("", 0, 0.0, math.inf, math.inf, priority, 0, 0.0)

    @property
    def is_charged(self) -> bool:
        return self.ttl_s > 0 or self.priority > 0

    @property
    def is_timed(self) -> bool:
        return not math.isinf(self.until)

    @property
    def level(self) -> Level:
        return self.ttl_s > 0, self.priority, self.nearness

    def end(self, used_at: float) -> float:
        """Returns when it expires if its entry was last used at `used_at`."""
        return max(self.until, used_at + self.lasts_s)

    def changes(self, used_at: float) -> float:
        """Returns when its level changes, or when it expires, if its entry was last used at `used_at`."""
        return min(used_at + self.near_s, self.end(used_at))

    @property
    def overdue(self) -> Grant:
        """The rest of the grant after its next use should have come: entries that are near come first."""
        return replace(self, nearness=OVERDUE, near_s=math.inf)

    def merged(self, later: Grant) -> Grant:
        """Returns this grant with a later one of the same entry. A promise is kept: `until` never falls. A later
        grant of the same tenant and session replaces the rest, any other one only adds to it."""
        until = max(self.until, later.until)
        if (later.tenant, later.session) == (self.tenant, self.session):
            return replace(later, until=until, is_joint=self.is_joint)
        payer = later if later.until > self.until else self
        timed = [grant.nearness for grant in (self, later) if grant.ttl_s]
        return Grant(
            payer.tenant,
            payer.session,
            max(self.ttl_s, later.ttl_s),
            max(self.lasts_s, later.lasts_s),
            until,
            max(self.priority, later.priority),
            max(timed, default=0),
            payer.gap_s,
            max(self.near_s, later.near_s),
            self.is_joint or self.tenant != later.tenant or bool(self.session and later.session),
        )


def strongest(claims: Sequence[Claim], now: float) -> Grant:
    """Returns the grant of an entry that several claims of one request cover: of the highest level, and as long as
    any of them."""
    best = max((claim.grant(now) for claim in claims), key=lambda grant: grant.level)
    lasts_s = max(claim.lasts_s for claim in claims if bool(claim.ttl_s) == bool(best.ttl_s))
    return replace(
        best,
        ttl_s=max(claim.ttl_s for claim in claims),
        lasts_s=lasts_s,
        until=now + lasts_s,
        priority=max(claim.priority for claim in claims),
    )


class Grantee(Protocol):
    """A node or a checkpoint."""

    grant: Grant | None
    grant_ticket: int  # of its newest entries in the ledger's heaps; 0: none

    @property
    def used_at(self) -> float: ...  # of the cache's clock
    @property
    def start(self) -> int: ...
    @property
    def is_referenced(self) -> bool: ...  # by a lease: it counts as used now


def keep_of(entry: Grantee, now: float) -> Keep | None:
    """Returns the rest of an entry's retention, for its records in the tier below."""
    grant = entry.grant
    if grant is None or not grant.is_charged:
        return None
    left_s = grant.end(entry.used_at) - now
    return Keep(grant.tenant, left_s, grant.priority) if left_s > 0 else None
