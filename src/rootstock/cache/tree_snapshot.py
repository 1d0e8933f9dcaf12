"""A walk over the prefix tree in pieces, for the dashboard: the engine works between two pieces.

A walk of 100,000 nodes takes longer than a step. Between two pieces the tree changes: nodes are added, split, trimmed
and removed. Each node is reported as it is when the walk reaches it, after its parent. A node that is removed before
the walk reaches it is left out. A node that is added behind the walk's place may be left out.

Nodes are reported some hundreds at once, column by column, in a quarter of the time of one node after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from rootstock.cache.keys import Namespace
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Node, Root
from rootstock.cache.types import NO_TOKENS, Tokens

MAX_ROOTS = 2**16 - 1  # private ones, at the ends of public heads, included
MAX_NODES = 500_000  # of one walk; further ones are left out
AT_ONCE = 256  # nodes that are reported between two looks at the clock

_PARENT, _START, _END, _LAST_USED, _SESSION, _LEASES, _CHECKPOINTS = map(
    attrgetter, ("parent", "start", "end", "last_used", "session", "ref_count", "checkpoints")
)


@dataclass(frozen=True, slots=True)
class CheckpointDetail:
    position: int
    kind: str
    bytes: int
    hits: int


@dataclass(frozen=True, slots=True, eq=False)
class NodeDetail:
    number: int
    namespace: Namespace
    start: int
    end: int
    tokens: Tokens  # [end - start]
    bytes: int
    hits: int
    idle_s: float
    leases: int  # of running requests, here or below
    children: int
    checkpoints: tuple[CheckpointDetail, ...]


@dataclass(slots=True)
class NodeColumns:
    """The nodes of a tree, one entry for each in every column. A parent comes before its children."""

    number: array[int]  # names the node in later walks as well
    parent: array[int]  # row of the node above; -1: there is none
    root: array[int]  # index of its namespace in `TreeWalk.namespaces`
    start: array[int]
    end: array[int]
    last_used: array[float]  # by the cache's clock
    session: array[int]  # the only one whose requests have used it; 0: there were others, or none
    leases: array[int]  # of running requests, here or below
    checkpoints: array[int]
    checkpoint_bytes: array[float]  # of all its checkpoints


class TreeWalk:
    """A walk over the trees of all namespaces. Nodes keep the numbers of the `previous` walk; new nodes get the next
    numbers from `numbers`.

    Belongs to the thread that owns the cache.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pools: Pools,
        numbers: Iterator[int],
        previous: TreeWalk | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._numbers = numbers
        self.columns = NodeColumns(
            array("I"),
            array("i"),
            array("H"),
            array("i"),
            array("i"),
            array("d"),
            array("Q"),
            array("i"),
            array("i"),
            array("f"),
        )
        self._known: Mapping[Node, int] = {}  # rows of the previous walk
        self._known_numbers = array("I")
        if previous is not None:
            self._known, self._known_numbers = previous._rows, previous.columns.number
        self._at_once = at_once
        self.token_bytes = pools.full.row_bytes / pools.block_size  # of a position
        # Bytes of a checkpoint if all are equal; with windows, counted for each.
        self._state_bytes = None if pools.windows else pools.bytes_of(Rows(0, (), 1))
        self._nodes: list[Node] = []  # by row
        self._rows: dict[Node, int] = {}
        self.namespaces: list[Namespace] = []
        self._roots: dict[Root, int] = {}
        # Roots to enter, the next one at the end.
        self._waiting = list(reversed(tree.roots.values()))[-MAX_ROOTS:]
        # Nodes to report, parents first: from `_at` on. With the parent that each had when it was noted.
        self._pending: list[Node] = []
        self._parents: list[Node] = []
        self._above: list[int] = []  # rows of the nodes above them; -1: there is none
        self._root: list[int] = []
        self._at = 0
        # A node was found below another parent: some may have been reported out of turn.
        self._has_moved = False
        self.is_truncated = False
        self.work_s = 0.0  # of all pieces

    def __len__(self) -> int:
        return len(self._nodes)

    def _enter(self, root: Root) -> None:
        if root.children and len(self._roots) < MAX_ROOTS and root not in self._roots:
            self._roots[root] = len(self.namespaces)
            self.namespaces.append(root.namespace)
            # A private root lies below the end of a public head, which is then the node above.
            above = -1 if root.parent is None else self._rows[root.parent]
            self._note(root, above, self._roots[root])

    def _note(self, parent: Node, row: int, root: int) -> None:
        """Notes the nodes below a node or a root."""
        below = parent.children.values()
        self._pending += below
        self._parents += [parent] * len(below)
        self._above += [row] * len(below)
        self._root += [root] * len(below)

    def advance(self, for_s: float, clock: Callable[[], float]) -> bool:
        """Walks on for some time by the clock. Returns whether nodes are left."""
        began = clock()
        while self._pending or self._waiting:
            self._advance()
            if len(self) >= MAX_NODES:
                self.is_truncated = bool(self._pending or self._waiting)
                self._pending, self._waiting = [], []
            if clock() - began >= for_s:
                break
        goes_on = bool(self._pending or self._waiting)
        if not goes_on:
            self._known, self._known_numbers = {}, array("I")
        self.work_s += clock() - began
        return goes_on

    def _advance(self) -> None:
        """Reports some nodes, or enters some roots."""
        if not self._pending:
            for _ in range(min(self._at_once, len(self._waiting))):
                self._enter(self._waiting.pop())
            return
        at, until = self._at, self._at + self._at_once
        nodes, parents = self._pending[at:until], self._parents[at:until]
        above, roots = self._above[at:until], self._root[at:until]
        self._at += len(nodes)
        if self._has_moved or list(map(_PARENT, nodes)) != parents:
            self._has_moved = True
            for node, parent, row, root in zip(nodes, parents, above, roots, strict=True):
                if node.parent is not parent:
                    self._visit(node)
                elif node not in self._rows:
                    self._report([node], [row], [root])
        else:
            self._report(nodes, above, roots)
        if self._at >= len(self._pending):
            self._pending, self._parents, self._above, self._root, self._at = [], [], [], [], 0

    def _visit(self, node: Node) -> None:
        """Reports a node, after ancestors of it that a split has added since its place was noted."""
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step not in self._rows and step not in self._roots:
            if isinstance(step, Root):  # made after the head above it was reported
                return
            path.append(step)
            step = step.parent
        if step is None:  # removed
            return
        for each in reversed(path):
            parent = each.parent
            assert parent is not None
            if isinstance(parent, Root):
                row = -1 if parent.parent is None else self._rows[parent.parent]
                self._report([each], [row], [self._roots[parent]])
            else:
                row = self._rows[parent]
                self._report([each], [row], [self.columns.root[row]])

    def _report(self, nodes: list[Node], above: list[int], roots: list[int]) -> None:
        """Reports nodes below nodes of these rows, in these namespaces, and notes the nodes below them."""
        columns, first = self.columns, len(self._nodes)
        self._rows.update(zip(nodes, range(first, first + len(nodes)), strict=True))
        self._nodes += nodes
        known, numbers = self._known_numbers, self._numbers
        columns.number.fromlist(
            [next(numbers) if row is None else known[row] for row in map(self._known.get, nodes)]
        )
        columns.parent.fromlist(above)
        columns.root.fromlist(roots)
        columns.start.fromlist(list(map(_START, nodes)))
        columns.end.fromlist(list(map(_END, nodes)))
        columns.last_used.fromlist(list(map(_LAST_USED, nodes)))
        columns.session.fromlist(list(map(_SESSION, nodes)))
        columns.leases.fromlist(list(map(_LEASES, nodes)))
        counts = list(map(len, map(_CHECKPOINTS, nodes)))
        columns.checkpoints.fromlist(counts)
        each = self._state_bytes
        columns.checkpoint_bytes.fromlist(
            [_checkpoint_bytes(node) if count else 0 for node, count in zip(nodes, counts, strict=True)]
            if each is None
            else [count * each for count in counts]
        )
        for row, node in enumerate(nodes, first):
            if node.children:
                self._note(node, row, roots[row - first])
            if node.private_roots:
                for root in node.private_roots.values():
                    self._enter(root)

    def _node(self, number: int) -> Node | None:
        rows = np.flatnonzero(np.array(self.columns.number, np.uint32) == number)
        if not len(rows):
            return None
        node = self._nodes[rows[0]]
        if node.parent is None:  # removed
            return None
        *_, top = node.path()
        return node if isinstance(top, Root) and self._tree.roots.get(top.namespace) is top else None

    def detail(self, number: int, now: float) -> NodeDetail | None:
        """Describes a node as it is now; None if it is gone."""
        node = self._node(number)
        if node is None:
            return None
        return NodeDetail(
            number,
            next(each for each in node.path() if isinstance(each, Root)).namespace,
            node.start,
            node.end,
            node.tokens,
            # By tokens: two nodes may share a block.
            (node.end - node.start) * self._pools.full.row_bytes // self._pools.block_size
            + _checkpoint_bytes(node),
            node.hits,
            max(0.0, now - node.last_used),
            node.ref_count,
            len(node.children),
            tuple(
                CheckpointDetail(at, each.kind.value, each.size_bytes, each.hits)
                for at, each in sorted(node.checkpoints.items())
            ),
        )

    def prefix(self, number: int) -> tuple[Namespace, Tokens] | None:
        """Returns the namespace of a node and all tokens from the root to its end; None if it is gone."""
        node = self._node(number)
        if node is None:
            return None
        path = list(node.path())
        namespace = next(each for each in path if isinstance(each, Root)).namespace
        return namespace, np.concatenate([NO_TOKENS, *(step.tokens for step in reversed(path))])


def _checkpoint_bytes(node: Node) -> int:
    return sum(checkpoint.size_bytes for checkpoint in node.checkpoints.values())
