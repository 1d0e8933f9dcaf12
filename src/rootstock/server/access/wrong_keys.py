"""Wrong keys: the answers to an address that guesses are held back.

A right key passes at once, even from an address with wrong keys: behind a proxy, one who guesses shares the address
with all others. A wrong one costs time on every route that would tell it from a right one.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import anyio

FREE_KEYS = 8  # wrong keys of one address whose answers are not held back
FORGET_S = 10.0  # in which an address has one more of them
HOLD_S = 1.0  # an answer is held back
MAX_COUNTED = 64  # wrong keys of one address: after ten minutes all are forgotten
MAX_ADDRESSES = 1024  # that are remembered
MAX_HELD = 256  # answers at once; further ones are not held back
_NETWORK_BITS = 64  # of IPv6, in which one sender has all addresses


class WrongKeys:
    """The wrong keys of addresses, as far as they are not forgotten. Used on the event loop's thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()  # and when; the oldest first
        self._held = 0

    def __len__(self) -> int:
        return len(self._counted)

    async def hold(self, address: str) -> None:
        """Counts a wrong key of an address, and waits if it has sent many."""
        network = _network_of(address)
        now = self._clock()
        before, at = self._counted.pop(network, (0.0, now))
        count = min(MAX_COUNTED, max(0.0, before - (now - at) / FORGET_S) + 1)
        self._counted[network] = count, now
        if len(self._counted) > MAX_ADDRESSES:
            self._counted.popitem(last=False)
        if count <= FREE_KEYS or self._held >= MAX_HELD:
            return
        self._held += 1
        try:
            await self._sleep(HOLD_S)
        finally:
            self._held -= 1


def _network_of(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4 or found.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((int(found), _NETWORK_BITS), strict=False))
