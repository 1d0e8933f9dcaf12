"""Labels of tenants in metrics: names for the most active tenants, one label for all others.

A header can name any tenant, and each label is a set of time series that Prometheus keeps for weeks. Their number is
therefore bounded for any headers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

OTHERS = "other"
_HASH_CHARS = 12
_CANDIDATES_PER_LABEL = 4
_LEAD = 2  # a candidate needs so many times the requests of the least active tenant with a label


def shown_tenant(of_key: str, named: str) -> str:
    """Returns a tenant as the operator sees it.

    A tenant of an API key is the operator's own word. One that a header names may be a secret salt or a user's name,
    and is shown as the first characters of its SHA-256.
    """
    if of_key or not named:
        return of_key
    return "sha256:" + hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARS]


class TenantLabels:
    """Chooses the tenants with labels of their own, by requests. `drop` is called when a tenant loses its label.

    The requests of tenants without a label are counted for a bounded number of candidates. A tenant that is seen once
    replaces only one that was also seen least often, so that invented tenants displace each other.
    """

    def __init__(self, limit: int, drop: Callable[[str], None]) -> None:
        self._limit = limit
        self._drop = drop
        self._labelled: Counter[str] = Counter()  # requests by tenant
        self._candidates: Counter[str] = Counter()

    def label(self, tenant: str) -> str:
        """Counts a request of a tenant, and returns its label. Requests without a tenant have the label ""."""
        if tenant in self._labelled or (tenant and len(self._labelled) < self._limit):
            self._labelled[tenant] += 1
            return tenant
        if not tenant or not self._limit:
            return OTHERS if tenant else ""
        if tenant not in self._candidates and len(self._candidates) >= self._limit * _CANDIDATES_PER_LABEL:
            del self._candidates[_least(self._candidates)]
        self._candidates[tenant] += 1
        loser = _least(self._labelled)
        if self._candidates[tenant] < _LEAD * self._labelled[loser]:
            return OTHERS
        self._labelled[tenant] = self._candidates.pop(tenant)
        self._candidates[loser] = self._labelled.pop(loser)
        self._drop(loser)
        return tenant


def _least(counts: Counter[str]) -> str:
    return min(counts, key=counts.__getitem__)
