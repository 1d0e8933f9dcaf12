"""What was evicted, remembered for a while: lets `explain` tell a prefix that went from one that never came."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rootstock.cache.radix_node import common_prefix, kept_part
from rootstock.cache.types import Tokens

if TYPE_CHECKING:
    from rootstock.cache.radix_node import Node

# Together at most 8 MiB of tokens, and as much again that their arrays may keep alive.
MAX_RUNS = 4096
MAX_TOKENS = 2 * 1024**2
LONGEST_RUN = 32 * 1024


class EvictedRun:
    """Tokens that followed the end of `node` once. Void (`node` is None) when replaced, returned or forgotten.

    An edge goes tail by tail, so its run grows at the front, by one part at a time.
    """

    __slots__ = ("first", "length", "node", "parts")

    def __init__(self, node: Node, parts: list[Tokens]) -> None:
        self.node: Node | None = node
        self.parts = parts  # the deepest first
        self.first = int(parts[-1][0])
        self.length = sum(map(len, parts))

    def agreed(self, tokens: Tokens) -> int:
        """How many leading `tokens` are the run's."""
        position = 0
        for part in reversed(self.parts):
            agreed = common_prefix(part, tokens[position:])
            position += agreed
            if agreed < len(part):
                break
        return position


class EvictionHistory:
    """Bounded in number and in tokens; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._runs: deque[EvictedRun] = deque()
        self.tokens = 0  # of runs that are not void

    def remember(self, node: Node, tokens: Tokens, deeper: list[Tokens]) -> list[Node]:
        """`tokens` were cached below `node`, and `deeper` after them. Both are taken over: nobody writes them again.

        Returns the nodes whose oldest runs were forgotten for it.
        """
        deeper.append(kept_part(tokens[:LONGEST_RUN]))
        run = EvictedRun(node, deeper)
        while run.length - len(run.parts[0]) >= LONGEST_RUN:
            run.length -= len(run.parts.pop(0))
        replaced = node.evicted.get(run.first)
        if replaced is not None:
            self._void(replaced)
        node.evicted[run.first] = run
        self._runs.append(run)
        self.tokens += run.length
        forgotten = []
        while self.tokens > MAX_TOKENS or len(self._runs) > MAX_RUNS:
            oldest = self._runs.popleft()
            if oldest.node is not None:
                forgotten.append(oldest.node)
                del oldest.node.evicted[oldest.first]
                self._void(oldest)
        return forgotten

    def take_below(self, node: Node) -> list[Tokens]:
        """Forgets what followed the node's end; returns the parts of the longest run, for one that goes before it."""
        if not node.evicted:
            return []
        parts = max(node.evicted.values(), key=lambda run: run.length).parts
        self.forget_below(node)
        return parts

    def forget_below(self, node: Node) -> None:
        """The node's end moves, or the node goes: what followed its end follows it no more."""
        if not node.evicted:
            return
        for run in node.evicted.values():
            self._void(run)
        node.evicted.clear()

    def returned(self, node: Node, first: int) -> None:
        """Something is cached again where a run was."""
        run = node.evicted.pop(first, None)
        if run is not None:
            self._void(run)

    def _void(self, run: EvictedRun) -> None:
        run.node, run.parts = None, []
        self.tokens -= run.length
