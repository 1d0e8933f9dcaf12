"""Active tenants: those that sent a request in the last hour. They divide the bytes that can be kept."""

from __future__ import annotations

from collections import OrderedDict

ACTIVE_S = 3600.0  # a tenant without a request for so long takes part in no division
MAX_TENANTS = 1024  # that are known as active


class Tenants:
    """Tenants with requests in the last hour. Requests without hints count as one tenant more, unless a tenant with
    hints uses their namespace too."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._salts: OrderedDict[str, None] = OrderedDict()  # of requests with hints
        self._others: OrderedDict[str, float] = OrderedDict()  # salts of requests without hints

    def note(self, tenant: str | None, salt: str, now: float) -> None:
        if tenant is None:
            if salt not in self._salts:
                self._others[salt] = now
                self._others.move_to_end(salt)
        else:
            self._seen[tenant] = now
            self._seen.move_to_end(tenant)
            self._salts[salt] = None
            self._salts.move_to_end(salt)
            self._others.pop(salt, None)
        for known in (self._seen, self._salts, self._others):
            while len(known) > MAX_TENANTS:
                known.popitem(last=False)

    def count(self, now: float) -> int:
        for known in (self._seen, self._others):
            while known and next(iter(known.values())) < now - ACTIVE_S:
                known.popitem(last=False)
        return max(1, len(self._seen) + bool(self._others))
