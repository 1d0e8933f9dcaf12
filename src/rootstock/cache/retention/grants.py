"""Retention: grants of nodes and checkpoints that requests asked to keep, and the bytes that each tenant has kept.

A *claim* is the part of a request's hints that the cache has granted. Each node and checkpoint that it covers gets a
*grant*. Grants last for a time after the last use. The rank of an entry depends on its grant and not on the clock, so
the grant of an entry is removed when it has expired: before each eviction, the tree takes the expired ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rootstock.cache.retention.hints import Keep

# Priorities of grants that cost nothing. They are below all priorities of clients.
ENDED_PRIORITY = -102  # the private part of a session that has ended
OVERDRAWN_PRIORITY = -101  # the rest of a tenant whose share is full, while there are others

Level = tuple[bool, int, int]  # (within its time to live, priority, nearness): lowest is given up first
_NEARNESS_BASE = 1.5  # two expected times that differ by less than this factor count as equal


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

    def merged(self, later: Grant) -> Grant:
        """Returns this grant with a later one of the same entry. A promise is kept: `until` never falls. A later
        grant of the same tenant and session replaces the rest, any other one only adds to it."""
        until = max(self.until, later.until)
        if (later.tenant, later.session) == (self.tenant, self.session):
            return replace(later, until=until)
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


@dataclass(slots=True)
class _Account:
    """The retained entries of a tenant."""

    bytes_at: dict[Level, int] = field(default_factory=dict)  # never 0
    # (level, last use, -start, ticket, entry): the first is given up first. Entries with an old ticket are void.
    heap: list[tuple[Level, float, int, int, Grantee]] = field(default_factory=list)
    entries: int = 0

    @property
    def charged_bytes(self) -> int:
        return sum(self.bytes_at.values())


class RetentionLedger:
    """Accounts of the retained entries, by tenant and by the time at which they expire.

    The tree tells it of each change of an entry's bytes. Its heaps delete lazily, like an `EvictionQueue`.
    """

    def __init__(self) -> None:
        self.charged_bytes = 0
        self._accounts: dict[str, _Account] = {}  # never an empty one
        self._expiry: list[tuple[float, int, Grantee]] = []
        self._tickets = 0
        self._timed = 0  # entries whose grants expire

    @property
    def tenants(self) -> list[str]:
        return list(self._accounts)

    def bytes_of(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.charged_bytes

    def bytes_at(self, tenant: str) -> dict[Level, int]:
        """Returns a tenant's bytes by level."""
        account = self._accounts.get(tenant)
        return {} if account is None else dict(account.bytes_at)

    def set(self, entry: Grantee, grant: Grant, size_bytes: int) -> None:
        """Gives an entry a grant, in place of the one that it has."""
        self.clear(entry, size_bytes)
        entry.grant = grant
        if grant.is_charged:
            self._account(grant, size_bytes)
        self._add(entry, grant)

    def divided(self, entry: Grantee) -> None:
        """Adds an entry that was divided from another one with the same grant: their bytes together stay the same."""
        grant = entry.grant
        assert grant is not None
        self._add(entry, grant)

    def clear(self, entry: Grantee, size_bytes: int) -> None:
        """Takes an entry's grant away, if it has one."""
        grant = entry.grant
        if grant is None:
            return
        entry.grant, entry.grant_ticket = None, 0
        if grant.is_timed:
            self._timed -= 1
        if grant.is_charged:
            account = self._accounts[grant.tenant]
            account.entries -= 1
            self._account(grant, -size_bytes)
            if not account.entries:
                assert not account.bytes_at, "bytes are charged for nothing"
                del self._accounts[grant.tenant]

    def resized(self, entry: Grantee, added_bytes: int) -> None:
        """Records that an entry has grown, or shrunk."""
        if entry.grant is not None and entry.grant.is_charged:
            self._account(entry.grant, added_bytes)

    def lowest(self, tenant: str) -> Grantee | None:
        """Returns the tenant's entry to give up first. Brings the front of its heap up to date."""
        account = self._accounts.get(tenant)
        while account is not None and account.heap:
            level, used_at, _, ticket, entry = account.heap[0]
            grant = entry.grant
            if grant is None or entry.grant_ticket != ticket:
                heapq.heappop(account.heap)
            elif entry.used_at > used_at:
                heapq.heapreplace(account.heap, (level, entry.used_at, -entry.start, ticket, entry))
            else:
                return entry
        return None

    def expired(self, now: float) -> Iterator[Grantee]:
        """Yields the entries whose grants have ended. The caller clears each grant at once."""
        while self._expiry and self._expiry[0][0] <= now:
            _, ticket, entry = self._expiry[0]
            grant = entry.grant
            if grant is None or entry.grant_ticket != ticket:
                heapq.heappop(self._expiry)
                continue
            end = now + grant.lasts_s if entry.is_referenced else grant.end(entry.used_at)
            if end > now:
                heapq.heapreplace(self._expiry, (end, ticket, entry))
            else:
                heapq.heappop(self._expiry)
                yield entry

    def _account(self, grant: Grant, added_bytes: int) -> None:
        account = self._accounts.setdefault(grant.tenant, _Account())
        self.charged_bytes += added_bytes
        left = account.bytes_at.get(grant.level, 0) + added_bytes
        assert left >= 0, "more bytes were given back than charged"
        if left:
            account.bytes_at[grant.level] = left
        else:
            account.bytes_at.pop(grant.level, None)

    def _add(self, entry: Grantee, grant: Grant) -> None:
        self._tickets += 1
        ticket = entry.grant_ticket = self._tickets
        if grant.is_timed:
            self._timed += 1
            heapq.heappush(self._expiry, (grant.end(entry.used_at), ticket, entry))
            if len(self._expiry) > 64 + 2 * self._timed:
                self._expiry = [item for item in self._expiry if item[2].grant_ticket == item[1]]
                heapq.heapify(self._expiry)
        if grant.is_charged:
            account = self._accounts.setdefault(grant.tenant, _Account())
            account.entries += 1
            heapq.heappush(account.heap, (grant.level, entry.used_at, -entry.start, ticket, entry))
            if len(account.heap) > 64 + 2 * account.entries:
                account.heap = [item for item in account.heap if item[4].grant_ticket == item[3]]
                heapq.heapify(account.heap)

    def check(self, charged: dict[str, dict[Level, int]]) -> None:
        """Asserts that the accounts equal a recount: bytes by tenant and level."""
        counted = {tenant: account.bytes_at for tenant, account in self._accounts.items() if account.bytes_at}
        assert self.charged_bytes == sum(sum(levels.values()) for levels in charged.values())
        assert counted == charged, "the bytes charged to tenants do not match the tree"
        assert all(account.entries > 0 for account in self._accounts.values())
