"""A walk over the prefix tree in pieces, for people who look at it: the engine works between two pieces.

A walk of 100,000 nodes takes longer than a step. Between two pieces the tree changes: nodes are added, split, trimmed
and removed. Each node is reported as it is when the walk comes to it, after its parent. A node that is removed before
that is left out, and one that is added behind the walk's place may be.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from rootstock.cache.keys import Namespace
from rootstock.cache.pools import Pools
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Checkpoint, Node, Root
from rootstock.cache.types import NO_TOKENS, Tokens

MAX_ROOTS = 2**16 - 1  # private ones, at the ends of public heads, included
MAX_NODES = 500_000  # of one walk; further ones are left out
_AT_ONCE = 64  # nodes between two looks at the clock


class NodeFlags(IntFlag):
    LIVE = 1  # a running request uses it
    CHECKPOINT = 2
    PROTECTED = 4  # a queued request would hit it
    RETAINED = 8  # a hint keeps it for some time


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
    bytes: array[float]  # of its positions and its checkpoints, those of nodes below not included
    last_used: array[float]  # by the cache's clock
    session: array[int]  # the only one whose requests have used it; 0: there were others, or none
    flags: array[int]


class TreeWalk:
    """A walk over the trees of all namespaces. `previous` is the last walk, whose numbers of nodes it repeats. Other
    nodes get the next ones of `numbers`.

    Belongs to the thread that owns the cache.
    """

    def __init__(
        self, tree: PrefixTree, pools: Pools, numbers: Iterator[int], previous: TreeWalk | None = None
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._rows: dict[Node, int] = {}
        self._by_number: dict[int, Node] = {}
        self._previous = previous
        self._numbers = numbers
        self.namespaces: list[Namespace] = []
        self._roots: dict[Root, int] = {}
        self._stack: list[Node] = []
        self.columns = NodeColumns(
            array("I"),
            array("i"),
            array("H"),
            array("i"),
            array("i"),
            array("f"),
            array("d"),
            array("I"),
            array("B"),
        )
        self.is_truncated = False
        for root in itertools.islice(tree.roots.values(), MAX_ROOTS):
            self._enter(root)

    def __len__(self) -> int:
        return len(self._rows)

    def _enter(self, root: Root) -> None:
        if root.children and len(self._roots) < MAX_ROOTS and root not in self._roots:
            self._roots[root] = len(self.namespaces)
            self.namespaces.append(root.namespace)
            self._stack.extend(root.children.values())

    def advance(self, until: float, clock: Callable[[], float]) -> bool:
        """Walks on until the clock shows `until`. Returns whether nodes are left."""
        while self._stack:
            for _ in range(_AT_ONCE):
                if not self._stack:
                    break
                self._visit(self._stack.pop())
            if len(self._rows) >= MAX_NODES:
                self.is_truncated = bool(self._stack)
                self._stack.clear()
            if clock() >= until:
                break
        if not self._stack:
            self._previous = None
        return bool(self._stack)

    def _visit(self, node: Node) -> None:
        """Reports a node, after ancestors of it that a split has added since its place was noted."""
        rows = self._rows
        if node in rows:
            return
        parent = node.parent
        if parent in rows or parent in self._roots:
            self._report(node)
            return
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step not in rows and step not in self._roots:
            if isinstance(step, Root):  # made after the head above it was reported
                return
            path.append(step)
            step = step.parent
        if step is None:  # removed
            return
        for each in reversed(path):
            self._report(each)

    def _report(self, node: Node) -> None:
        columns, row, parent = self.columns, len(self._rows), node.parent
        assert parent is not None
        # A private root lies below the end of a public head, which is then the node above.
        parent_node = parent.parent if isinstance(parent, Root) else parent
        above = -1 if parent_node is None else self._rows[parent_node]
        number = self._number_of(node)
        self._rows[node] = row
        self._by_number[number] = node
        columns.number.append(number)
        columns.parent.append(above)
        if isinstance(parent, Root):
            columns.root.append(self._roots[parent])
        else:
            columns.root.append(columns.root[above])
        columns.start.append(node.start)
        columns.end.append(node.end)
        columns.bytes.append(self._bytes(node))
        columns.last_used.append(node.last_used)
        columns.session.append(node.session & 0xFFFFFFFF)
        columns.flags.append(
            (NodeFlags.LIVE.value if node.ref_count else 0)
            | (NodeFlags.CHECKPOINT.value if node.checkpoints else 0)
            | (NodeFlags.PROTECTED.value if node.protections else 0)
            | (NodeFlags.RETAINED.value if node.is_retained else 0)
        )
        self._stack.extend(node.children.values())
        for root in node.private_roots.values():
            self._enter(root)

    def _number_of(self, node: Node) -> int:
        previous = self._previous
        if previous is not None and node in previous._rows:
            return previous.columns.number[previous._rows[node]]
        return next(self._numbers)

    def _bytes(self, node: Node) -> int:
        """Returns the bytes of a node's positions, by tokens: two nodes may share a block. And of its checkpoints."""
        own = (node.end - node.start) * self._pools.full.row_bytes // self._pools.block_size
        if node.checkpoints:
            own += sum(map(self._checkpoint_bytes, node.checkpoints.values()))
        return own

    def _checkpoint_bytes(self, checkpoint: Checkpoint) -> int:
        pools = self._pools
        of_windows = zip(checkpoint.windows, pools.windows, strict=True)
        bytes = sum(len(held.ids) * pool.row_bytes for held, pool in of_windows)
        return bytes + (0 if pools.states is None else pools.states.row_bytes)

    def _node(self, number: int) -> Node | None:
        node = self._by_number.get(number)
        if node is None or node.parent is None:  # removed
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
            self._bytes(node),
            node.hits,
            max(0.0, now - node.last_used),
            node.ref_count,
            len(node.children),
            tuple(
                CheckpointDetail(at, each.kind.value, self._checkpoint_bytes(each), each.hits)
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
