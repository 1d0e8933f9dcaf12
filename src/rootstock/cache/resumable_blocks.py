"""Full blocks of the tree up to which a request can resume, by content, and how they change.

Routers of several servers ask which of them has a prompt's beginning. A block's *key* names its namespace and every
token up to its end (`prefix_keys`), so that equal keys mean equal prefixes. A model that resumes anywhere announces
every full block. Any other model announces the full blocks before a checkpoint, because a request that finds K/V
behind the last checkpoint computes it again.

The tree reports each change of its nodes and checkpoints. Only the changed part of a path is read, so that the
work is proportional to the change and to the number of nodes above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from rootstock.cache.families import Family, FullAttention
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.pools import Pools
from rootstock.cache.radix_node import Checkpoint, Node, Root, namespace_of
from rootstock.cache.types import Tokens

BlockKeys = NDArray[np.uint64]
NO_KEYS: BlockKeys = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """Consecutive blocks that were added to the set."""

    group: int
    keys: BlockKeys
    parent: int | None  # key of the block before the first one; None: it is the prompt's first
    namespace: Namespace  # of the last one
    tokens: Tokens  # [len(keys) * block_size]


@dataclass(frozen=True, slots=True, eq=False)
class BlocksRemoved:
    """Blocks that were removed from the set."""

    group: int
    keys: BlockKeys


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """All blocks of all groups were removed. The first change of every set."""


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared
PREFIXES = 0  # the group of the blocks up to which a request can resume


def block_groups(families: Sequence[Family]) -> tuple[Family | None, ...]:
    """Returns the groups of blocks: prefixes from which a request can resume (None), and the families whose memory
    only checkpoints have. The last full block before a checkpoint is in each of their groups."""
    return None, *(family for family in families if not isinstance(family, FullAttention))


@dataclass(slots=True)
class _NodeBlocks:
    """The full blocks of a node: those whose last position it has."""

    keys: BlockKeys = field(default_factory=lambda: NO_KEYS)
    resumable: int = 0  # the first so many are in the set
    resumable_children: int = 0  # nodes right below from which, or from below which, a request can resume


class ResumableBlocks:
    """The set, and its changes since the last `take`. Belongs to the thread that owns the tree."""

    def __init__(self, pools: Pools, groups: int) -> None:
        """`groups`: number of `block_groups` of the model."""
        self._size = pools.block_size
        self._anywhere = pools.resume_anywhere
        self._checkpoint_groups = range(1, groups)
        self._of: dict[Node, _NodeBlocks] = {}
        self._last_of: dict[Checkpoint, int] = {}  # the key of the last full block before each checkpoint
        self._checkpoints_at: Counter[int] = Counter()  # by that key
        self._changes: list[BlockChange] = [BlocksCleared()]

    def take(self) -> list[BlockChange]:
        """Takes the changes since the last call, in their order."""
        changes, self._changes = self._changes, []
        return changes

    def keys(self, group: int) -> set[int]:
        """Returns the keys of a group's blocks, for checks."""
        if group:
            return set(self._checkpoints_at)
        return {key for of in self._of.values() for key in of.keys[: of.resumable].tolist()}

    def all(self, nodes: Iterable[Node]) -> Iterator[BlocksStored]:
        """Yields the whole set for a listener that comes later. `nodes` are all nodes of the tree, parents first."""
        stored_at = set[int]()
        for node in nodes:
            of = self._of[node]
            if of.resumable:
                yield self._stored(node, of, 0, of.resumable)
            for checkpoint in node.checkpoints.values():
                key = self._last_of.get(checkpoint)
                if key is not None and key not in stored_at:
                    stored_at.add(key)
                    yield from self._stored_at(checkpoint)

    # ----------------------------------------------------------------------- reports of the tree

    def grown(self, node: Node) -> None:
        """Notes a new leaf, or a leaf whose edge is longer."""
        of = self._of.get(node)
        if of is None:
            of = self._of[node] = _NodeBlocks()
        begin, end = node.start // self._size + len(of.keys), node.end // self._size
        if begin < end and not namespace_of(node).is_private:  # no other request finds private blocks
            of.keys = np.concatenate((of.keys, self._new_keys(node, of, begin, end)))
        if self._anywhere:
            self._settle(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Notes that an edge was divided. No block enters or leaves the set."""
        of = self._of[lower]
        cut = upper.end // self._size - upper.start // self._size
        above = self._of[upper] = _NodeBlocks(of.keys[:cut], min(of.resumable, cut))
        of.keys, of.resumable = of.keys[cut:], max(0, of.resumable - cut)
        above.resumable_children = int(self._can_resume(lower))

    def trimmed(self, leaf: Node) -> None:
        """Notes that a leaf has lost its tail, after the checkpoints there were dropped."""
        of = self._of[leaf]
        kept = leaf.end // self._size - leaf.start // self._size
        if self._anywhere:
            self._settle(leaf)
        of.keys = of.keys[:kept].copy()

    def removed(self, leaf: Node) -> None:
        """Notes that a leaf is removed. It has no checkpoints any more."""
        of = self._of.pop(leaf)
        if of.resumable:
            self._changes.append(BlocksRemoved(PREFIXES, of.keys[: of.resumable]))

    def kept(self, checkpoint: Checkpoint) -> None:
        """Notes a new checkpoint on a node."""
        node = checkpoint.node
        assert node is not None
        if self._anywhere:
            return
        changed = [node]
        is_first = len(node.checkpoints) == 1 and not self._of[node].resumable_children
        while is_first and (above := changed[-1].parent) is not None:
            of = self._of.setdefault(above, _NodeBlocks())
            of.resumable_children += 1
            is_first = of.resumable_children == 1 and not above.checkpoints
            changed.append(above)
        for step in reversed(changed):  # a block after the block before it
            self._settle(step)
        self._note_last_block(checkpoint, node)

    def dropped(self, checkpoint: Checkpoint, node: Node) -> None:
        """Notes that a node has lost a checkpoint."""
        if self._anywhere:
            return
        key = self._last_of.pop(checkpoint, None)
        if key is not None:
            self._checkpoints_at[key] -= 1
            if not self._checkpoints_at[key]:
                del self._checkpoints_at[key]
                gone = np.array([key], np.uint64)
                self._changes += [BlocksRemoved(group, gone) for group in self._checkpoint_groups]
        self._settle(node)
        step = node
        while not self._can_resume(step) and (above := step.parent) is not None:
            of = self._of[above]
            of.resumable_children -= 1
            if not isinstance(above, Root):
                self._settle(above)
            elif not of.resumable_children:
                del self._of[above]
            step = above

    # --------------------------------------------------------------------------------------- inside

    def _can_resume(self, node: Node) -> bool:
        """Returns whether a request can resume at a position of the node or below it."""
        of = self._of.get(node)
        return self._anywhere or bool(node.checkpoints) or (of is not None and of.resumable_children > 0)

    def _settle(self, node: Node) -> None:
        """Takes the node's blocks into the set up to the last position at which a request can resume, and others
        out of it."""
        of = self._of[node]
        if self._anywhere or of.resumable_children:
            resumable_end = node.end
        else:
            resumable_end = max(node.checkpoints, default=node.start)
        now = min(resumable_end // self._size - node.start // self._size, len(of.keys))
        before, of.resumable = of.resumable, now
        if now > before:
            self._changes.append(self._stored(node, of, before, now))
        elif now < before:
            self._changes.append(BlocksRemoved(PREFIXES, of.keys[now:before]))

    def _stored(self, node: Node, of: _NodeBlocks, first: int, end: int) -> BlocksStored:
        begin = node.start // self._size
        parent = int(of.keys[first - 1]) if first else self._key_above(node)
        tokens = self._tokens(node, (begin + first) * self._size, (begin + end) * self._size)
        return BlocksStored(PREFIXES, of.keys[first:end], parent, namespace_of(node), tokens)

    def _note_last_block(self, checkpoint: Checkpoint, node: Node) -> None:
        if not self._checkpoint_groups or namespace_of(node).is_private:
            return
        count = checkpoint.position // self._size - node.start // self._size
        key = int(self._of[node].keys[count - 1]) if count else self._key_above(node)
        if key is None:
            return
        self._last_of[checkpoint] = key
        self._checkpoints_at[key] += 1
        if self._checkpoints_at[key] == 1:
            self._changes += self._stored_at(checkpoint)

    def _stored_at(self, checkpoint: Checkpoint) -> list[BlocksStored]:
        """Returns the last block before a checkpoint, for each family whose memory the checkpoint has."""
        node = checkpoint.node
        assert node is not None
        end = checkpoint.position // self._size * self._size
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        of, number = self._of[node], end // self._size - node.start // self._size - 1
        parent = int(of.keys[number - 1]) if number else self._key_above(node)
        key, tokens = of.keys[number : number + 1], self._tokens(node, end - self._size, end)
        return [
            BlocksStored(group, key, parent, namespace_of(node), tokens) for group in self._checkpoint_groups
        ]

    def _key_above(self, node: Node) -> int | None:
        """Returns the key of the last full block before the node's first one. None: there is none."""
        if node.start < self._size:
            return None
        step = node.parent
        while step is not None:
            of = self._of.get(step)
            if of is not None and len(of.keys):
                return int(of.keys[-1])
            step = step.parent
        return None

    def _new_keys(self, node: Node, of: _NodeBlocks, begin: int, end: int) -> BlockKeys:
        """Computes the keys of the node's blocks `begin` … end - 1."""
        above = int(of.keys[-1]) if len(of.keys) else self._key_above(node)
        tokens = self._tokens(node, begin * self._size, end * self._size)
        return _chain(above, namespace_of(node), tokens, self._size)

    def _tokens(self, node: Node, begin: int, end: int) -> Tokens:
        """Returns the tokens of positions `begin` … end - 1 on the path to the node."""
        if begin >= node.start:
            return node.tokens[begin - node.start : end - node.start].copy()
        tokens = np.empty(end - begin, np.int32)
        step: Node | None = node
        while step is not None and end > begin:
            if step.start < end:
                first = max(step.start, begin)
                tokens[first - begin : end - begin] = step.tokens[first - step.start : end - step.start]
                end = first
            step = step.parent
        return tokens


def prefix_keys(tokens: Tokens, scope: Scope, block_size: int) -> BlockKeys:
    """Returns the keys of the full blocks of a prompt, as `ResumableBlocks` names them."""
    whole = len(tokens) // block_size * block_size
    public = min(whole, scope.public_tokens // block_size * block_size)
    head = _chain(None, scope.public, tokens[:public], block_size) if public else NO_KEYS
    above = int(head[-1]) if len(head) else None
    return np.concatenate((head, _chain(above, scope.namespace, tokens[public:whole], block_size)))


def _chain(above: int | None, namespace: Namespace, tokens: Tokens, block_size: int) -> BlockKeys:
    """Hashes consecutive blocks, each with the key of the block before it and the namespace."""
    owner = namespace.digest()
    raw = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    step = 4 * block_size
    keys = np.empty(len(raw) // step, np.uint64)
    key = b"" if above is None else above.to_bytes(8, "little")
    for number in range(len(keys)):
        h = xxhash.xxh3_64(key)
        h.update(owner)
        h.update(raw[number * step : (number + 1) * step])
        of_block = h.intdigest()
        keys[number] = of_block
        key = of_block.to_bytes(8, "little")
    return keys
