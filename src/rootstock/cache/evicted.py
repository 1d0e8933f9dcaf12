"""What was evicted, remembered for a while: lets `explain` tell a prefix that went from one that never came."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from rootstock.cache.plan import Tokens

if TYPE_CHECKING:
    from rootstock.cache.radix import Node

# Together at most 8 MiB of tokens.
MAX_RUNS = 4096
MAX_TOKENS = 2 * 1024**2
LONGEST_RUN = 32 * 1024


class EvictedRun:
    """Tokens that followed the end of `node` once. Void (`node` is None) when replaced, returned or forgotten."""

    __slots__ = ("node", "tokens")

    def __init__(self, node: Node, tokens: Tokens) -> None:
        self.node: Node | None = node
        self.tokens = tokens


class EvictedRuns:
    """Bounded in number and in tokens; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._runs: deque[EvictedRun] = deque()
        self.tokens = 0  # of runs that are not void

    def remember(self, node: Node, tokens: Tokens) -> list[Node]:
        """`tokens`, as `joined` makes them, were cached below `node`.

        Returns the nodes whose oldest runs were forgotten for it.
        """
        run = EvictedRun(node, tokens)
        first = int(tokens[0])
        replaced = node.evicted.get(first)
        if replaced is not None:
            self._void(replaced)
        node.evicted[first] = run
        self._runs.append(run)
        self.tokens += len(run.tokens)
        forgotten = []
        while self.tokens > MAX_TOKENS or len(self._runs) > MAX_RUNS:
            oldest = self._runs.popleft()
            if oldest.node is not None:
                forgotten.append(oldest.node)
                del oldest.node.evicted[int(oldest.tokens[0])]
                self._void(oldest)
        return forgotten

    def longest_below(self, node: Node) -> Tokens | None:
        run = max(node.evicted.values(), key=lambda run: len(run.tokens), default=None)
        return None if run is None else run.tokens

    def forget_below(self, node: Node) -> None:
        """The node's end moves, or the node goes: what followed its end follows it no more."""
        for run in node.evicted.values():
            self._void(run)
        node.evicted.clear()

    def returned(self, node: Node, first: int) -> None:
        """Something is cached again where a run was."""
        run = node.evicted.pop(first, None)
        if run is not None:
            self._void(run)

    def _void(self, run: EvictedRun) -> None:
        run.node = None
        self.tokens -= len(run.tokens)


def joined(tokens: Tokens, deeper: Tokens | None) -> Tokens:
    """A run and what followed it, as an array of its own; `tokens` itself if nothing else keeps it alive."""
    if deeper is None and tokens.base is None and len(tokens) <= LONGEST_RUN:
        return tokens
    parts = (tokens[:LONGEST_RUN],) if deeper is None else (tokens[:LONGEST_RUN], deeper)
    return np.concatenate(parts)[:LONGEST_RUN].copy()
