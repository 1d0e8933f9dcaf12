"""Bounded memory of several owners: the owner with the most bytes loses its least recently used value first."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")

Key = tuple[str, bytes]  # the salt of a namespace, and a digest


@dataclass(slots=True)
class _OwnerValues(Generic[V]):
    """The values of one owner, the most recently used last."""

    values: OrderedDict[Key, tuple[V, int]] = field(default_factory=OrderedDict)
    nbytes: int = 0


class FairMemory(Generic[V]):
    """Values by owner and key, up to `cap_bytes` of all owners together. For any thread.

    An owner with many values cannot displace values of an owner with few: owners that need less than an equal share
    of the memory keep all of their values.
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._owners: dict[str, _OwnerValues[V]] = {}
        self._largest: list[tuple[int, str]] = []  # a heap of (-bytes, owner), some of them outdated
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.dropped = 0  # values that had to make room

    def __len__(self) -> int:
        with self._lock:
            return sum(len(held.values) for held in self._owners.values())

    def get(self, owner: str, key: Key) -> V | None:
        """Returns a value and makes it the most recently used one of its owner."""
        with self._lock:
            held = self._owners.get(owner)
            found = None if held is None else held.values.get(key)
            if held is None or found is None:
                return None
            held.values.move_to_end(key)
            return found[0]

    def put(self, owner: str, key: Key, value: V, nbytes: int) -> None:
        """Adds or replaces a value of `nbytes`. A value above the cap is not kept."""
        with self._lock:
            self._remove(owner, key)
            if nbytes > self._cap_bytes:
                return
            held = self._owners.setdefault(owner, _OwnerValues())
            held.values[key] = (value, nbytes)
            self._resize(owner, held, nbytes)
            while self.held_bytes > self._cap_bytes:
                self._drop_one()

    def take(self, owner: str, key: Key) -> V | None:
        """Returns a value and removes it."""
        found = self.get(owner, key)
        with self._lock:
            self._remove(owner, key)
        return found

    def forget(self, salt: str | None) -> None:
        """Drops the values of one salt, or all."""
        with self._lock:
            for owner, held in list(self._owners.items()):
                for key in [key for key in held.values if salt is None or key[0] == salt]:
                    self._remove(owner, key)

    def _remove(self, owner: str, key: Key) -> None:
        held = self._owners.get(owner)
        if held is not None and key in held.values:
            self._resize(owner, held, -held.values.pop(key)[1])
            if not held.values:
                del self._owners[owner]

    def _resize(self, owner: str, held: _OwnerValues[V], nbytes: int) -> None:
        held.nbytes += nbytes
        self.held_bytes += nbytes
        heapq.heappush(self._largest, (-held.nbytes, owner))
        if len(self._largest) > 64 + 4 * len(self._owners):
            self._largest = [(-each.nbytes, name) for name, each in self._owners.items()]
            heapq.heapify(self._largest)

    def _drop_one(self) -> None:
        while True:
            size, owner = heapq.heappop(self._largest)
            held = self._owners.get(owner)
            if held is not None and held.nbytes == -size:
                self._remove(owner, next(iter(held.values)))
                self.dropped += 1
                return
