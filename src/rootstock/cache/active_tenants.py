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
        self._salts: OrderedDict[str, float] = OrderedDict()  # of requests with hints
        self._others: OrderedDict[str, float] = OrderedDict()  # salts of requests without hints

    def note(self, tenant: str | None, salt: str, now: float) -> None:
        if tenant is None:
            if salt not in self._salts:
                _note(self._others, salt, now)
        else:
            _note(self._seen, tenant, now)
            _note(self._salts, salt, now)
            self._others.pop(salt, None)

    def count(self, now: float) -> int:
        for known in (self._seen, self._others):
            while known and next(iter(known.values())) < now - ACTIVE_S:
                known.popitem(last=False)
        return max(1, len(self._seen) + bool(self._others))


def _note(known: OrderedDict[str, float], name: str, now: float) -> None:
    """Makes a name the latest of the known ones."""
    known[name] = now
    known.move_to_end(name)
    if len(known) > MAX_TENANTS:
        known.popitem(last=False)
