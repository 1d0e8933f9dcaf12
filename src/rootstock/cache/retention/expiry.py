"""The expiry of grants: the time to live of a hint begins anew with each use of its entry."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rootstock.cache.retention.grants import Grant, Grantee


class Expiry:
    """Entries by the time at which their grants end. The heap deletes lazily, like an `EvictionQueue`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Grantee]] = []  # (end, ticket, entry): an old ticket is void
        self._timed = 0  # entries whose grants expire

    def add(self, entry: Grantee, grant: Grant) -> None:
        """Adds an entry whose grant and ticket are new."""
        if not grant.is_timed:
            return
        self._timed += 1
        heapq.heappush(self._heap, (grant.end(entry.used_at), entry.grant_ticket, entry))
        if len(self._heap) > 64 + 2 * self._timed:
            self._heap = [item for item in self._heap if item[2].grant_ticket == item[1]]
            heapq.heapify(self._heap)

    def removed(self, grant: Grant) -> None:
        """Notes that an entry has lost its grant. Its ticket is void."""
        self._timed -= grant.is_timed

    def expired(self, now: float) -> Iterator[Grantee]:
        """Yields the entries whose grants have ended. The caller clears each grant at once."""
        while self._heap and self._heap[0][0] <= now:
            _, ticket, entry = self._heap[0]
            grant = entry.grant
            if grant is None or entry.grant_ticket != ticket:
                heapq.heappop(self._heap)
                continue
            end = now + grant.lasts_s if entry.is_referenced else grant.end(entry.used_at)
            if end > now:
                heapq.heapreplace(self._heap, (end, ticket, entry))
            else:
                heapq.heappop(self._heap)
                yield entry
