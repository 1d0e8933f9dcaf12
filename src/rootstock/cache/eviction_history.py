"""A bounded memory of evicted prefixes: lets `explain` tell an evicted prefix from one that was never cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from rootstock.cache.radix_node import Node, common_prefix, kept_part
from rootstock.cache.types import Tokens

# Together at most 8 MiB of tokens, and as much again that their arrays may keep alive.
MAX_RUNS = 4096
MAX_TOKENS = 2 * 1024**2
LONGEST_RUN = 32 * 1024


class EvictedRun:
    """Tokens that were cached below the end of `node`. Void (`node` is None) once replaced, cached again or
    forgotten.

    An edge is evicted from its tail, so its run grows at the front, by one part at a time.
    """

    __slots__ = ("first", "length", "node", "parts")

    def __init__(self, node: Node, parts: list[Tokens]) -> None:
        self.node: Node | None = node
        self.parts = parts  # the deepest first
        self.first = int(parts[-1][0])
        self.length = sum(map(len, parts))

    def agreed(self, tokens: Tokens) -> int:
        """Counts the leading `tokens` that agree with the run."""
        position = 0
        for part in reversed(self.parts):
            agreed = common_prefix(part, tokens[position:])
            position += agreed
            if agreed < len(part):
                break
        return position


class EvictionHistory:
    """Evicted runs by the node that they followed. Bounded in number and in tokens; drops the oldest first."""

    def __init__(self) -> None:
        self._runs: deque[EvictedRun] = deque()
        self._below: dict[
            Node, dict[int, EvictedRun]
        ] = {}  # by node, then by first token; never an empty inner one
        self.tokens = 0  # of runs that are not void

    def runs_below(self, node: Node) -> Collection[EvictedRun]:
        """The runs that followed the end of this node."""
        return self._below.get(node, {}).values()

    def evicted_after(self, node: Node, tokens: Tokens) -> int:
        """Counts the leading `tokens` that were cached below the end of this node and have been evicted."""
        run = self._below.get(node, {}).get(int(tokens[0]))
        return 0 if run is None else run.agreed(tokens)

    def remember(self, node: Node, tokens: Tokens, deeper: list[Tokens]) -> list[Node]:
        """Records that `tokens` were cached below `node`, and `deeper` after them. Takes over both arrays; the caller
        does not write to them again.

        Returns the nodes whose oldest runs were dropped to stay within the bounds.
        """
        deeper.append(kept_part(tokens[:LONGEST_RUN]))
        run = EvictedRun(node, deeper)
        while run.length - len(run.parts[0]) >= LONGEST_RUN:
            run.length -= len(run.parts.pop(0))
        here = self._below.setdefault(node, {})
        replaced = here.get(run.first)
        if replaced is not None:
            self._void(replaced)
        here[run.first] = run
        self._runs.append(run)
        self.tokens += run.length
        forgotten = []
        while self.tokens > MAX_TOKENS or len(self._runs) > MAX_RUNS:
            oldest = self._runs.popleft()
            if oldest.node is not None:
                forgotten.append(oldest.node)
                self.forget_run(oldest.node, oldest.first)
        return forgotten

    def take_below(self, node: Node) -> list[Tokens]:
        """Forgets the runs below a node that is evicted itself. Returns the parts of the longest: they follow the
        node's own run."""
        runs = self.runs_below(node)
        if not runs:
            return []
        parts = max(runs, key=lambda run: run.length).parts
        self.forget_below(node)
        return parts

    def forget_below(self, node: Node) -> None:
        """Forgets the runs below a node that is removed or whose end moves."""
        runs = self._below.pop(node, None)
        if runs is not None:
            for run in runs.values():
                self._void(run)

    def forget_run(self, node: Node, first: int) -> None:
        """Forgets the run below a node that begins with token `first`, for example because it is cached again."""
        runs = self._below.get(node)
        if runs is None:
            return
        run = runs.pop(first, None)
        if run is not None:
            self._void(run)
        if not runs:
            del self._below[node]

    def _void(self, run: EvictedRun) -> None:
        run.node, run.parts = None, []
        self.tokens -= run.length
