"""The radix tree: which token prefixes are cached, and in which blocks.

A node is an edge: a run of tokens at absolute positions start … end-1 and the blocks that hold their K/V. Blocks
lie on absolute block boundaries, so a node that starts inside a block owns a block whose first positions are its
parent's: either the very block of the parent (after a split) or a copy of it (after copy-on-write). Reading a
path from the root, a deeper node's block therefore replaces its ancestor's block of the same index.

Blocks of windows and chunks (`tails`) are only referred to: checkpoints and running requests own them, and when the
last owner lets go the reference is void by itself.

Walking compares NumPy arrays at memory speed and costs O(tokens), never O(what is cached).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool, References
from rootstock.cache.keys import Namespace
from rootstock.cache.types import BlockIds, Tokens

if TYPE_CHECKING:
    from rootstock.cache.checkpoints import Checkpoint
    from rootstock.cache.eviction_history import EvictedRun
    from rootstock.cache.lease import Lease

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


USELESS = 1 / 64  # the worth of what can only become useful again by a coincidence


class Node:
    __slots__ = (
        "blocks",
        "checkpoints",
        "children",
        "end",
        "evicted",
        "hits",
        "last_used",
        "parent",
        "passed_by",
        "pins",
        "queue_ticket",
        "resume_anywhere",
        "start",
        "tails",
        "tips",
        "tokens",
        "wants",
        "writer",
    )

    def __init__(
        self,
        parent: Node | None,
        start: int,
        tokens: Tokens,
        blocks: BlockIds,
        tails: list[References],
        now: float,
    ) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens  # [end - start], owned
        self.blocks = blocks  # of block indices start // block_size … ceil(end / block_size) - 1
        self.tails = tails  # for each tail family, references to its blocks of the same block indices
        self.checkpoints: dict[int, Checkpoint] = {}  # by position, in (start, end]
        self.children: dict[int, Node] = {}  # by first token
        self.tips: dict[Lease, None] = {}  # leases whose published prefix ends exactly at `end`
        self.pins = 0  # leases whose tip is here or below: > 0 means not evictable
        self.wants: dict[object, None] = {}  # queued requests that would hit this node
        self.writer: Lease | None = None  # the lease that computed it, while it runs
        self.evicted: dict[int, EvictedRun] = {}  # what followed `end` once, by first token
        self.resume_anywhere: bool = parent is None or parent.resume_anywhere
        self.passed_by = False  # its conversation has gone on elsewhere, from a user turn above
        self.last_used = now
        self.hits = 0
        self.queue_ticket = 0

    @property
    def is_wanted(self) -> bool:
        return bool(self.wants)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def deepest_checkpoint(self) -> Checkpoint | None:
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    @property
    def worth(self) -> float:
        """For eviction policies, of a leaf: what its last block saves per byte, 1 for plain blocks.

        Where not every position can be resumed at, blocks and the checkpoint behind them are worth something
        together, and blocks behind the last checkpoint hardly anything.
        """
        if self.resume_anywhere:
            return 1.0
        last = self.deepest_checkpoint
        return USELESS if last is None or last.position != self.end else last.worth

    def checkpoint_up_to(self, position: int) -> Checkpoint | None:
        """The deepest one on the path to here that lies at `position` or before."""
        for node in self.path():
            within = [at for at in node.checkpoints if at <= position]
            if within:
                return node.checkpoints[max(within)]
        return None

    def path(self) -> Iterator[Node]:
        """From this node up to the root, both included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        return f"Node({self.start}…{self.end}, {len(self.children)} children, {self.pins} pins)"


class Root(Node):
    """Where a namespace begins: no tokens, no blocks, never evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, resume_anywhere: bool, now: float) -> None:
        super().__init__(None, 0, NO_TOKENS, NO_BLOCKS, [], now)
        self.resume_anywhere = resume_anywhere
        self.namespace = namespace

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached below it, and no lease hangs on it."""
        return not (self.children or self.pins)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def kept_part(tokens: Tokens) -> Tokens:
    """A part of a node's tokens, to be kept: the view itself if it keeps at most as much again alive, else a copy.

    Cutting a long edge short then costs nothing, and what all edges take is at most twice their tokens.
    """
    whole = tokens.base
    return tokens if whole is None or 2 * tokens.nbytes >= whole.nbytes else tokens.copy()


def descend(root: Node, tokens: Tokens) -> tuple[Node, int]:
    """The deepest node that a prefix of `tokens` reaches, and how many tokens agree.

    The position lies in (node.start, node.end], or is 0 at the root.
    """
    node, position, length = root, 0, len(tokens)
    while position < length:
        child = node.children.get(int(tokens[position]))
        if child is None:
            break
        node = child
        position += common_prefix(child.tokens, tokens[position:])
        if position < child.end:
            break
    return node, position


def continuation(node: Node, tokens: Tokens, most: int) -> Tokens:
    """What follows `tokens`, which follow the end of `node`, in the tree: up to `most` tokens of the branch that was
    used last; empty if nothing does."""
    passed = 0
    while passed < len(tokens):
        child = node.children.get(int(tokens[passed]))
        if child is None:
            return NO_TOKENS
        agreed = common_prefix(child.tokens, tokens[passed:])
        passed += agreed
        if agreed < len(child.tokens):
            return child.tokens[agreed : agreed + most] if passed == len(tokens) else NO_TOKENS
        node = child
    parts: list[Tokens] = []
    while most > 0 and node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
        parts.append(node.tokens[:most])
        most -= len(parts[-1])
    return np.concatenate(parts) if parts else NO_TOKENS


def split(node: Node, position: int, pool: BlockPool, block_size: int) -> Node:
    """Cuts an edge at a position inside it; returns the new upper half.

    `node` stays the lower half, with its children, its tips and its writer. A block that the cut goes through
    belongs to both halves: both hold it. A checkpoint stays with the half that has its position.
    """
    assert node.parent is not None
    assert node.start < position < node.end
    cut = position - node.start
    first = node.start // block_size
    upper_blocks = -(-position // block_size) - first
    upper = Node(
        node.parent,
        node.start,
        kept_part(node.tokens[:cut]),
        node.blocks[:upper_blocks].copy(),
        [references[:upper_blocks].copy() for references in node.tails],
        node.last_used,
    )
    for at in [at for at in node.checkpoints if at <= position]:
        checkpoint = upper.checkpoints[at] = node.checkpoints.pop(at)
        checkpoint.node = upper
    upper.hits = node.hits
    upper.passed_by = node.passed_by
    upper.pins = node.pins
    for want in node.wants:
        upper.wants[want] = None
    upper.children[int(node.tokens[cut])] = node
    node.parent.children[int(node.tokens[0])] = upper
    node.parent = upper
    node.start = position
    node.tokens = kept_part(node.tokens[cut:])
    node.blocks = node.blocks[position // block_size - first :].copy()
    node.tails = [references[position // block_size - first :].copy() for references in node.tails]
    if position % block_size:
        pool.hold(node.blocks[:1])
    return upper


def block_table(node: Node, position: int, block_size: int) -> BlockIds:
    """Blocks of positions 0 … position-1 along the path to `node`; the last may be partly filled."""
    table = np.empty(-(-position // block_size), np.int32)
    filled_from = len(table)
    for step in node.path():
        first = step.start // block_size
        if first < filled_from:
            table[first:filled_from] = step.blocks[: filled_from - first]
            filled_from = first
    return table


def tail_blocks(node: Node, position: int, family: int, pool: BlockPool, block_size: int) -> BlockIds:
    """For one tail family, the blocks of positions 0 … position-1 along the path to `node` that still stand,
    NO_BLOCK for the others. `position` <= node.end."""
    references = np.full(-(-position // block_size), -1, np.int64)
    filled_from = len(references)
    for step in node.path():
        first = step.start // block_size
        if first < filled_from and not step.is_root:
            references[first:filled_from] = step.tails[family][: filled_from - first]
            filled_from = first
    return pool.resolve(references)


def replaced_blocks(node: Node, table: BlockIds, block_size: int) -> list[int]:
    """Blocks of the ancestors of `node` that `table`, which leads along the path into it, does not contain: tails
    filled in part that a deeper block replaces.

    Whoever pins the path owns these as well: they cannot be evicted before the nodes below them.
    """
    found: dict[int, None] = {}
    step = node.parent
    while step is not None:
        if step.end % block_size:
            block = int(step.blocks[-1])
            if int(table[step.end // block_size]) != block:
                found[block] = None
        step = step.parent
    return list(found)


def walk(root: Node) -> Iterator[Node]:
    """Every node below the root, parents first. For reports and integrity checks."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
