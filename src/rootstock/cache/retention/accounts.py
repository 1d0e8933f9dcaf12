"""The bytes that each tenant retains, and the entry that a tenant gives up first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from rootstock.cache.retention.expiry import Expiry
from rootstock.cache.retention.grants import Grant, Grantee, Level


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
    """Accounts of the retained entries, by tenant.

    The tree reports each change of an entry's bytes. The heaps delete lazily, like an `EvictionQueue`.
    """

    def __init__(self) -> None:
        self.charged_bytes = 0
        self._accounts: dict[str, _Account] = {}  # never an empty one
        self.expiry = Expiry()
        self._tickets = 0

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
        self.expiry.removed(grant)
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
        self.expiry.add(entry, grant)
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
