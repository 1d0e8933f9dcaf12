"""The expiry of grants: the times of a hint begin anew with each use of its entry."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rootstock.cache.retention.grants import Grant, Grantee


class Expiry:
    """Entries by the time at which their grants change or end. The heap deletes lazily, like an `EvictionQueue`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Grantee]] = []  # (time, ticket, entry): an old ticket is void
        self._timed = 0  # entries whose grants expire

    def add(self, entry: Grantee, grant: Grant) -> None:
        """Adds an entry whose grant and ticket are new."""
        if not grant.is_timed:
            return
        self._timed += 1
        heapq.heappush(self._heap, (grant.changes(entry.used_at), entry.grant_ticket, entry))
        if len(self._heap) > 64 + 2 * self._timed:
            self._heap = [item for item in self._heap if item[2].grant_ticket == item[1]]
            heapq.heapify(self._heap)

    def removed(self, grant: Grant) -> None:
        """Notes that an entry has lost its grant. Its ticket is void."""
        self._timed -= grant.is_timed

    def expired(self, now: float) -> Iterator[Grantee]:
        """Yields the entries whose grants have ended, or whose next use is overdue. The caller replaces or clears
        each grant at once."""
        while self._heap and self._heap[0][0] <= now:
            _, ticket, entry = self._heap[0]
            grant = entry.grant
            if grant is None or entry.grant_ticket != ticket:
                heapq.heappop(self._heap)
                continue
            due = grant.changes(now if entry.is_referenced else entry.used_at)
            if due > now:
                heapq.heapreplace(self._heap, (due, ticket, entry))
            else:
                heapq.heappop(self._heap)
                yield entry
