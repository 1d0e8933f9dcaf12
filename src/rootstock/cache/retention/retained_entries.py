"""The entries that hints retain: of one cache, and of all caches of its budget.

The bounds hold for the caches of a budget together. Each cache has a ledger of its own. The entry that gives up its
place may be in any cache: it is the entry of the lowest level that saves the least prefill per byte.
"""

from __future__ import annotations

from collections.abc import Collection

from rootstock.cache.lease import LeaseId
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Checkpoint, Node, walk
from rootstock.cache.retention.grants import Grantee, Level
from rootstock.cache.shared_budget import BudgetShare, RetainingCache, Standing
from rootstock.cache.stats import Counters


class Retained:
    """The retained entries of one cache."""

    def __init__(self, tree: PrefixTree, counters: Counters) -> None:
        self.promised: dict[LeaseId, tuple[str, int]] = {}  # bytes that running leases will retain, by tenant
        self._tree = tree
        self._ledger = tree.ledger
        self._counters = counters

    def expire(self) -> None:
        self._tree.expire_grants()

    @property
    def tenants(self) -> list[str]:
        return self._ledger.tenants

    def bytes_of(self, tenant: str | None) -> int:
        return self._ledger.charged_bytes if tenant is None else self._ledger.bytes_of(tenant)

    def firm_bytes(self, tenant: str, level: Level, now: float) -> int:
        held, lowest = self._ledger.bytes_at(tenant), self._ledger.lowest(tenant)
        firm = sum(held.values())
        if lowest is not None and _yields(lowest, level, now):
            is_overdue = lowest.grant is not None and lowest.grant.level == level
            firm = sum(
                size for other, size in held.items() if other > level or (other == level and not is_overdue)
            )
        return firm + sum(size for owner, size in self.promised.values() if owner == tenant)

    def least(
        self, tenant: str, kept: Collection[object], now: float, below: Level | None
    ) -> Standing | None:
        entry = self._lowest(tenant)
        if entry is None or entry.grant is None or _node_of(entry) in kept:
            return None
        if below is not None and not _yields(entry, below, now):
            return None
        return entry.grant.level, self._tree.log_value(entry)

    def displace_least(self, tenant: str) -> None:
        victim = self._lowest(tenant)
        assert victim is not None
        # The tenant's grants below a node depend on the node.
        entries: list[Node | Checkpoint] = [victim]
        if isinstance(victim, Node):
            entries += walk(victim)
            entries += [at for node in (victim, *walk(victim)) for at in node.checkpoints.values()]
        for entry in entries:
            if entry.grant is not None and entry.grant.is_charged and entry.grant.tenant == tenant:
                self._counters.displaced_grants += 1
                self._tree.ungrant(entry)

    def _lowest(self, tenant: str) -> Node | Checkpoint | None:
        entry = self._ledger.lowest(tenant)
        assert entry is None or isinstance(entry, Node | Checkpoint)
        return entry


class RetainedOfBudget:
    """The retained entries of all caches of a budget, as one of these caches sees them."""

    def __init__(self, own: Retained, share: BudgetShare | None) -> None:
        """`share`: the cache's part in a budget of several caches; None: the budget is the cache's alone."""
        self._own = own
        self._share = share

    def _parts(self) -> list[tuple[RetainingCache, float]]:
        """Returns the retained entries of each cache, and the logarithm of its price."""
        if self._share is None:
            return [(self._own, 0.0)]
        return [(self._own, self._share.log_price), *self._share.others_retained()]

    def expire(self) -> None:
        """Ends the grants that have expired."""
        for part, _ in self._parts():
            part.expire()

    @property
    def tenants(self) -> list[str]:
        """The tenants with retained entries."""
        return list(dict.fromkeys(tenant for part, _ in self._parts() for tenant in part.tenants))

    def bytes_of(self, tenant: str | None) -> int:
        """Returns the bytes that a tenant retains, or that all tenants retain."""
        return sum(part.bytes_of(tenant) for part, _ in self._parts())

    def firm_bytes(self, tenant: str, level: Level, now: float) -> int:
        """Returns the bytes that do not yield to new entries of a level, with the promised bytes."""
        return sum(part.firm_bytes(tenant, level, now) for part, _ in self._parts())

    def displace(self, tenant: str, kept: Collection[object], now: float, below: Level | None = None) -> bool:
        """Takes away the first grant that the tenant gives up, among its grants that yield to the level `below`.

        Returns False if there is no such grant outside of `kept`.
        """
        found: tuple[Standing, RetainingCache] | None = None
        for part, log_price in self._parts():
            standing = part.least(tenant, kept, now, below)
            if standing is not None:
                standing = standing[0], standing[1] + log_price
                if found is None or standing < found[0]:
                    found = standing, part
        if found is None:
            return False
        found[1].displace_least(tenant)
        return True


def _node_of(entry: Node | Checkpoint) -> Node | None:
    return entry.node if isinstance(entry, Checkpoint) else entry


def _yields(entry: Grantee, level: Level, now: float) -> bool:
    """Returns True if an entry gives its place to one of `level`: its level is lower, or equal and overdue."""
    grant = entry.grant
    assert grant is not None
    if grant.level != level:
        return grant.level < level
    return not entry.is_referenced and entry.used_at + grant.gap_s < now
