"""Shares of a tier's space that hints may keep from eviction, by tenant."""

from __future__ import annotations

from collections import Counter

_KEPT_PART = 2  # at most a half of a tier is kept
_MOST_SHARES = 8  # of the kept part: of more tenants, each may still have an eighth


class KeptBytes:
    """Bytes of the kept records of each tenant, by a key that the tier chooses for it."""

    def __init__(self, usable_bytes: int) -> None:
        self._limit_bytes = 0
        self._of: Counter[int | str] = Counter()  # never 0
        self.resize(usable_bytes)

    def resize(self, usable_bytes: int) -> None:
        """Sets the bytes of the tier. More may be kept already."""
        self._limit_bytes = max(0, usable_bytes) // _KEPT_PART

    @property
    def total_bytes(self) -> int:
        return self._of.total()

    def add(self, tenant: int | str, added_bytes: int) -> None:
        """Adds bytes, or takes them away."""
        self._of[tenant] += added_bytes
        if not self._of[tenant]:
            del self._of[tenant]

    def has_room(self, tenant: int | str, needed_bytes: int) -> bool:
        """Returns whether the tenant can keep so many more bytes."""
        tenants = len({*self._of, tenant})
        share = self._limit_bytes // min(tenants, _MOST_SHARES)
        within_all = self.total_bytes + needed_bytes <= self._limit_bytes
        return within_all and self._of[tenant] + needed_bytes <= share

    def of(self) -> dict[int | str, int]:
        """Returns the bytes by tenant."""
        return dict(self._of)
