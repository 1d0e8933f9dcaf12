"""Lengths of ways through the references of a schema and the rules of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Depths(Generic[Name]):
    """Approximate lengths of the longest paths through a graph. A path that returns to itself counts up to there.

    The code does not recurse, because clients send the graphs.
    """

    def __init__(self, following: Callable[[Name], Iterable[Name]]) -> None:
        self._following = following
        self._depths: dict[Name, int] = {}
        self.ring: Name | None = None  # that a way comes back to

    def of(self, first: Name) -> int:
        open_ones: dict[Name, list[Name]] = {}
        waiting = [first]
        while waiting:
            name = waiting[-1]
            if name in self._depths:
                waiting.pop()
            elif name in open_ones:
                waiting.pop()
                below = (self._depths.get(each, 0) for each in open_ones.pop(name))
                self._depths[name] = 1 + max(below, default=0)
            else:
                inner = open_ones[name] = list(self._following(name))
                self.ring = next((each for each in inner if each in open_ones), self.ring)
                waiting += [each for each in inner if each not in open_ones and each not in self._depths]
        return self._depths[first]
