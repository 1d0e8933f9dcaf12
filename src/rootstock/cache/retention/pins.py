"""Pins: prefixes that are kept until they are released.

A pin is a lease that computes nothing: it references the path of its prefix and uses its rows, so that they are not
available to others. The bounds leave running requests room. If a request still cannot run, even alone, the engine has
the newest pin dropped (`KVCache.drop_pin`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import xxhash

from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.lease import Lease
from rootstock.cache.retention.hint_types import RetainedLimits
from rootstock.cache.shared_budget import BudgetShare
from rootstock.cache.types import Tokens

PinId = NewType("PinId", str)

PINNED_SHARE = 0.25  # of the budget, for all tenants together
MAX_PINS = 1024


def pin_id(tenant: str, namespace: Namespace, prefix: Tokens) -> PinId:
    """Returns the name of a tenant's pin of this prefix. It tells nothing about the pins of others."""
    h = xxhash.xxh3_128(prefix_digest(namespace, prefix))
    h.update(tenant.encode("utf-8", "surrogatepass"))
    return PinId(f"pin-{h.hexdigest()}")


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """A pinned prefix."""

    id: PinId
    tenant: str
    tokens: int  # that are pinned
    asked_tokens: int  # more than `tokens` where not all were cached, or no family could resume there
    size_bytes: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class PinRefused:
    """Refusal of a pin. Nothing has changed."""

    reason: str


class Pins:
    """Table of pins. `share_bytes` bounds all of them; where there are several tenants, each has its part of it."""

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._pins: dict[PinId, Pinned] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._pins)

    def bytes_of(self, tenant: str | None) -> int:
        """Returns the sum of the sizes of a tenant's pins, or of all. A head that several share counts for each."""
        return sum(pinned.size_bytes for pinned in self.of(tenant))

    def of(self, tenant: str | None) -> list[Pinned]:
        """Returns the pins of a tenant, or all."""
        return [pinned for pinned in self._pins.values() if tenant is None or pinned.tenant == tenant]

    def refusal(
        self,
        tenant: str,
        size_bytes: int,
        tenants: int,
        limits: RetainedLimits,
        shared: BudgetShare | None = None,
    ) -> PinRefused | None:
        """Returns the reason why a pin of this size is refused; None: it is not. `tenants` divide the share. Pins in
        other caches of a shared budget count as well."""
        if len(self._pins) >= MAX_PINS:
            return PinRefused(f"there are {MAX_PINS:,} pins already: release one first")
        own, every = self.bytes_of(tenant), self.bytes_of(None)
        if shared is not None:
            own += shared.others_pinned_bytes(tenant)
            every += shared.others_pinned_bytes()
        share = self._share_bytes // tenants
        share = min(share, limits.of(tenant, share))
        if own + size_bytes > share:
            return PinRefused(
                f"the prefix has {size_bytes:,} bytes; this tenant can pin {share:,}, of which {own:,} are in use: "
                "release a pin first, or pin a shorter prefix"
            )
        if every + size_bytes > self._share_bytes:
            return PinRefused(
                "the pins of all tenants leave no room for it: pin a shorter prefix, or try later"
            )
        return None

    def find(self, pin: PinId) -> Pinned | None:
        return self._pins.get(pin)

    def add(self, pinned: Pinned) -> None:
        self._pins[pinned.id] = pinned

    def take(self, pin: PinId, tenant: str | None) -> Pinned | None:
        """Takes a pin out of the table; None if there is no such pin, or if it belongs to another tenant."""
        pinned = self._pins.get(pin)
        if pinned is None or (tenant is not None and pinned.tenant != tenant):
            return None
        return self._pins.pop(pin)
