"""Nodes of the radix tree and the checkpoints on them: which token prefixes are cached, and in which blocks.

A node is an edge: a run of tokens at absolute positions start … end-1 and the blocks that hold their K/V. Blocks
lie on absolute block boundaries, so a node that starts inside a block owns a block whose first positions are its
parent's: either the very block of the parent (after a split) or a copy of it (after copy-on-write). Reading a
path from the root, a deeper node's block therefore replaces its ancestor's block of the same index.

Nodes do not own blocks of windows and chunks (`windows`). Checkpoints and running requests own them; a node has weak
references, which are void as soon as the last owner has released the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool, WeakReferences
from rootstock.cache.keys import Namespace
from rootstock.cache.retention.grants import Grant
from rootstock.cache.types import NO_TOKENS, BlockIds, SlotId, Tokens

# Worth of blocks behind the last checkpoint: no request can resume from them, except by coincidence.
USELESS = 1 / 64
# Chance that a request asks for a prefix of idle work, relative to one that a request has asked for.
CHANCE_WHEN_UNASKED = 0.5


class CheckpointKind(StrEnum):
    """The reason why a checkpoint is left at its position, which tells how likely a resumption there is."""

    SYSTEM = "system"  # end of system prompt and tools: other conversations branch off here
    USER = "user"  # end of the last user turn, before its reasoning: the next turn may drop the reasoning
    TOOL = "tool"  # end of a tool's result within a turn
    PROMPT = "prompt"  # end of a prompt
    ANSWER = "answer"  # end of an answer
    DIVERGENCE = "divergence"  # other requests diverged from this prefix here
    MARK = "mark"  # asked for by the client


# Likelihood of a resumption, relative to the end of a tool's turn. Every new conversation passes the end of the
# system prompt. The end of a user's turn, and a divergence, are used as often as their conversation: in replayed
# traces of agents (`bench/show/o3_replay.py`) four times the worth of others cost a point of hits.
CHANCE = {
    CheckpointKind.SYSTEM: 8.0,
    CheckpointKind.MARK: 8.0,
    CheckpointKind.USER: 1.0,
    CheckpointKind.DIVERGENCE: 1.0,
    CheckpointKind.ANSWER: 1.0,
    CheckpointKind.TOOL: 1.0,
    CheckpointKind.PROMPT: 1.0,
}

LIKELIEST = tuple(CHANCE)  # kinds: of two near each other, the first names their checkpoint

# Kinds that a single conversation resumes from once. After it has left a deeper checkpoint, little chance remains.
RESUMED_ONCE = frozenset({CheckpointKind.ANSWER, CheckpointKind.TOOL, CheckpointKind.PROMPT})
CHANCE_WHEN_SPENT = 1 / 16
# A checkpoint that its conversation has passed stays as a foothold if it saves so many times its own bytes: of a long
# conversation that is evicted in part, the rest can then be resumed. States take at most this part of a path's bytes.
FOOTHOLD = 16
MOST_SPENT = 8  # checkpoints that are skipped in a search for the previous one

# Of two positions nearer than this only the first gets a checkpoint, which serves both: recomputing the tokens
# between costs less than a state.
NEAR_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position of a prompt at which a later request can diverge: 0 < position <= prompt tokens."""

    position: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of one window family that a resumption reads: block indices `first` … `first` + len(ids) - 1."""

    first: int
    ids: BlockIds

    def whole(self, position: int, block_size: int) -> BlockIds:
        """Returns the blocks that are full up to `position`. They are shared; a partly filled one is copied."""
        return self.ids[: max(0, position // block_size - self.first)]


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree, with the edge that leads to it."""

    parent: Node | None
    start: int
    tokens: Tokens  # [end - start], owned
    blocks: BlockIds  # of block indices start // block_size … ceil(end / block_size) - 1
    windows: list[WeakReferences]  # of each window family, to its blocks of the same block indices
    last_used: float
    end: int = field(init=False)
    resume_anywhere: bool = field(init=False)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)  # by position, in (start, end]
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    # If the node ends a public head: the root of each tenant's tails.
    private_roots: dict[Namespace, Root] = field(default_factory=dict)
    ref_count: int = 0  # leases whose node is here or below: > 0 means not evictable
    protections: dict[HitProtection, None] = field(
        default_factory=dict
    )  # of queued requests that would hit it
    passed_by: bool = False  # its conversation went on elsewhere, from a user turn above
    unasked: bool = False  # computed or loaded in idle time, and not used by a request yet
    hits: int = 0
    queue_ticket: int = 0
    grant: Grant | None = None  # its retention
    grant_ticket: int = 0
    session: int = 0  # the only one whose requests have used it; 0: there were others
    evicted_checkpoints: tuple[int, ...] = ()  # positions on it whose checkpoints were evicted, for `explain`

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens)
        self.resume_anywhere = self.parent is None or self.parent.resume_anywhere

    @property
    def is_protected(self) -> bool:
        return bool(self.protections)

    @property
    def is_referenced(self) -> bool:
        return self.ref_count > 0

    @property
    def used_at(self) -> float:
        return self.last_used

    @property
    def is_retained(self) -> bool:
        """True if it is evicted after all entries without a time to live. Blocks behind the last checkpoint are not
        retained, because no request resumes from them."""
        if self.grant is None or not self.grant.ttl_s:
            return False
        return self.resume_anywhere or self.end_checkpoint is not None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        """True if nothing is cached or in use below it."""
        if self.children:
            return False
        return not self.private_roots or all(root.is_empty for root in self.private_roots.values())

    @property
    def deepest_checkpoint(self) -> Checkpoint | None:
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    @property
    def end_checkpoint(self) -> Checkpoint | None:
        """The checkpoint at the node's end, or so near to it that the tokens behind it take hardly any memory."""
        last = self.deepest_checkpoint
        return None if last is None or self.end - last.position >= NEAR_TOKENS else last

    @property
    def worth(self) -> float:
        """Saving of a leaf's last block per byte, for eviction policies: 1 for plain blocks.

        Where a model cannot resume at every position, blocks and the checkpoint behind them are useful only
        together, and blocks behind the last checkpoint are worth almost nothing.
        """
        if self.resume_anywhere:
            return CHANCE_WHEN_UNASKED if self.unasked else 1.0
        last = self.end_checkpoint
        return USELESS if last is None else last.worth

    @property
    def is_spent(self) -> bool:
        """True if hardly any request resumes at its end: the end has no checkpoint, or a spent one."""
        if self.resume_anywhere:
            return False
        last = self.end_checkpoint
        return last is None or last.is_spent

    def checkpoint_up_to(self, position: int) -> Checkpoint | None:
        """Returns the deepest checkpoint on the path to here that lies at `position` or before."""
        for node in self.path():
            within = [at for at in node.checkpoints if at <= position]
            if within:
                return node.checkpoints[max(within)]
        return None

    def path(self) -> Iterator[Node]:
        """Yields this node and its ancestors up to the root, both included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        return f"Node({self.start}…{self.end}, {len(self.children)} children, {self.ref_count} references)"


class Root(Node):
    """The beginning of a namespace: no tokens, no blocks, never evicted.

    A *private* root lies at the end of a public head, below the node that ends there. Below it are the continuations
    of one tenant's prompts. A namespace may have several private roots, and one without a parent, for prompts that
    begin with no public head.
    """

    __slots__ = ("namespace",)

    def __init__(
        self, namespace: Namespace, resume_anywhere: bool, now: float, parent: Node | None = None
    ) -> None:
        super().__init__(parent, 0 if parent is None else parent.end, NO_TOKENS, NO_BLOCKS, [], now)
        self.resume_anywhere = resume_anywhere
        self.namespace = namespace

    @property
    def is_empty(self) -> bool:
        """True if no prefix is cached below it, and no lease references it."""
        return not (self.children or self.ref_count)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Memory with which every family can resume at exactly one position of one prefix. Belongs to the node there.

    It holds the blocks of windows and chunks that a resumption there reads, and a copy of the recurrent state. No
    request writes to it: a request that resumes gets a copy of the state and of a partly filled block. It carries its
    position and its prefix's digest, and is refused where they differ.
    """

    node: Node | None  # None: dropped
    position: int
    digest: bytes  # of tokens 0 … position-1 and their namespace
    kind: CheckpointKind
    windows: tuple[WindowBlocks, ...]  # one for each window family
    slot: SlotId  # NO_SLOT if the model has no recurrent states
    cost_tokens: float  # its bytes, in tokens of full attention
    size_bytes: int
    last_used: float
    hits: int = 0
    ref_count: int = 0  # leases that resume from it and have not computed anything yet
    protections: dict[HitProtection, None] = field(
        default_factory=dict
    )  # of queued requests that would resume here
    queue_ticket: int = 0
    grant: Grant | None = None  # its retention
    grant_ticket: int = 0
    is_boundary: bool = True  # of the last request with boundaries that passed it

    @property
    def previous(self) -> Checkpoint | None:
        """The next shallower checkpoint on its path."""
        assert self.node is not None
        return self.node.checkpoint_up_to(self.position - 1)

    @property
    def start(self) -> int:
        """The position at which a request would resume without it. Spent checkpoints are evicted before it."""
        previous = self.previous
        for _ in range(MOST_SPENT):
            if previous is None or not previous.is_spent:
                break
            previous = previous.previous
        return 0 if previous is None else previous.position

    @property
    def end(self) -> int:
        return self.position

    @property
    def is_unused(self) -> bool:
        """True if no request has resumed from it or is about to."""
        return not (self.hits or self.ref_count or self.protections)

    @property
    def is_protected(self) -> bool:
        return bool(self.protections)

    @property
    def is_referenced(self) -> bool:
        return self.ref_count > 0 or (self.node is not None and self.node.ref_count > 0)

    @property
    def used_at(self) -> float:
        """The last use of the prefix that it ends. Requests that resume from a deeper checkpoint use this one as
        well if it is a boundary of their conversation, where they may leave it."""
        is_consumed_only = self.kind in RESUMED_ONCE or self.kind is CheckpointKind.DIVERGENCE
        if self.node is None or is_consumed_only or self.is_spent:
            return self.last_used
        return max(self.last_used, self.node.last_used)

    @property
    def is_retained(self) -> bool:
        return self.grant is not None and self.grant.ttl_s > 0

    @property
    def is_spent(self) -> bool:
        """True if hardly any request resumes there: its only conversation has moved on to a later position.

        A conversation goes on from its newest checkpoint, or from a boundary of its last request: the end of the last
        user turn, or a mark that the client still sends. Two resumptions show that a prefix is used by others too. A
        checkpoint that saves FOOTHOLD times its bytes stays, for a conversation that is evicted in part.
        """
        assert self.node is not None
        if self.node.passed_by:
            return True
        if self.kind is CheckpointKind.SYSTEM or self.hits > 1:
            return False
        if self.kind is CheckpointKind.DIVERGENCE and self.is_shared:
            return False
        if not ((self.kind in RESUMED_ONCE or not self.is_boundary) and self.is_passed):
            return False
        previous = self.previous
        saved = self.position - (0 if previous is None else previous.position)
        return saved < FOOTHOLD * self.cost_tokens

    @property
    def is_shared(self) -> bool:
        """True if several cached branches go on after it."""
        assert self.node is not None
        return self.position == self.node.end and len(self.node.children) > 1

    @property
    def is_passed(self) -> bool:
        """True if there is a deeper checkpoint, on its node or on a branch below it before the branch divides."""
        assert self.node is not None
        if max(self.node.checkpoints, default=0) > self.position:
            return True
        for child in self.node.children.values():
            step = child
            while not step.checkpoints and len(step.children) == 1:
                (step,) = step.children.values()
            if step.checkpoints:
                return True
        return False

    @property
    def worth(self) -> float:
        """Saved prefill × chance of a resumption relative to other kinds ÷ bytes, both amounts in tokens.

        Evicting a leaf's last checkpoint also evicts the blocks since the previous one, which serve nothing else.
        """
        assert self.node is not None
        chance = CHANCE[self.kind]
        if self.is_spent:
            chance *= CHANCE_WHEN_SPENT
        if self.node.unasked:
            chance *= CHANCE_WHEN_UNASKED
        saved, cost = self.position - self.start, self.cost_tokens
        if self.kind not in RESUMED_ONCE:
            chance *= 1 + min(self.hits, 7)
        if self.node.is_leaf and self.position >= max(self.node.checkpoints, default=0):
            cost += saved
        return chance * saved / cost

    def __repr__(self) -> str:
        return f"Checkpoint({self.kind} at {self.position}, slot {self.slot})"


@dataclass(slots=True, eq=False)
class HitProtection:
    """A queued request's protection of the prefix that it would hit. Unprotected entries are evicted first."""

    version: int  # of the tree when it was made
    nodes: list[Node] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def add(self, node: Node) -> None:
        node.protections[self] = None
        self.nodes.append(node)


def namespace_of(node: Node) -> Namespace:
    """Returns the namespace of a node: the nearest root's above it."""
    return next(step for step in node.path() if isinstance(step, Root)).namespace


@dataclass(frozen=True, slots=True)
class UnaskedEntry:
    """A prefix that idle work is about to add, for eviction policies."""

    used_at: float
    hits: int = 0
    start: int = 0
    end: int = 0
    worth: float = CHANCE_WHEN_UNASKED


def kept_part(tokens: Tokens) -> Tokens:
    """Returns a part of a node's tokens to keep: the view itself if its array is at most twice as long, else a
    copy.

    Shortening a long edge then costs nothing, and all edges together take at most twice their tokens.
    """
    whole = tokens.base
    return tokens if whole is None or 2 * tokens.nbytes >= whole.nbytes else tokens.copy()


def split(node: Node, position: int, pool: BlockPool, block_size: int) -> Node:
    """Splits an edge at a position inside it; returns the new upper half.

    `node` stays the lower half, with its children and its leases. A block that is divided belongs to both halves:
    both hold it. A checkpoint stays with the half that has its position.
    """
    assert node.parent is not None
    assert node.start < position < node.end
    upper_tokens = position - node.start
    first = node.start // block_size
    upper_blocks = -(-position // block_size) - first
    upper = Node(
        node.parent,
        node.start,
        kept_part(node.tokens[:upper_tokens]),
        node.blocks[:upper_blocks].copy(),
        [references[:upper_blocks].copy() for references in node.windows],
        node.last_used,
    )
    for at in [at for at in node.checkpoints if at <= position]:
        checkpoint = upper.checkpoints[at] = node.checkpoints.pop(at)
        checkpoint.node = upper
    upper.hits = node.hits
    upper.passed_by = node.passed_by
    upper.unasked = node.unasked
    upper.grant, upper.session = node.grant, node.session
    upper.evicted_checkpoints = tuple(at for at in node.evicted_checkpoints if at <= position)
    node.evicted_checkpoints = tuple(at for at in node.evicted_checkpoints if at > position)
    upper.ref_count = node.ref_count
    for protection in node.protections:
        protection.add(upper)
    upper.children[int(node.tokens[upper_tokens])] = node
    node.parent.children[int(node.tokens[0])] = upper
    node.parent = upper
    node.start = position
    node.tokens = kept_part(node.tokens[upper_tokens:])
    node.blocks = node.blocks[position // block_size - first :].copy()
    node.windows = [references[position // block_size - first :].copy() for references in node.windows]
    if position % block_size:
        pool.hold(node.blocks[:1])
    return upper


def block_table(node: Node, position: int, block_size: int) -> BlockIds:
    """Returns the blocks of positions 0 … position-1 along the path to `node`; the last may be partly filled."""
    table = np.empty(-(-position // block_size), np.int32)
    filled_from = len(table)
    for step in node.path():
        first = step.start // block_size
        if first < filled_from and len(step.blocks):
            table[first:filled_from] = step.blocks[: filled_from - first]
            filled_from = first
    return table


def window_blocks(node: Node, position: int, window: int, pool: BlockPool, block_size: int) -> BlockIds:
    """Returns the blocks of one window family for positions 0 … position-1 along the path to `node`; NO_BLOCK for
    released blocks. `position` <= node.end."""
    references = np.full(-(-position // block_size), -1, np.int64)
    filled_from = len(references)
    for step in node.path():
        first = step.start // block_size
        if first < filled_from and len(step.blocks):
            references[first:filled_from] = step.windows[window][: filled_from - first]
            filled_from = first
    return pool.resolve(references)


def replaced_blocks(node: Node, table: BlockIds, block_size: int) -> list[int]:
    """Returns the blocks of the ancestors of `node` that `table`, read along the path to `node`, does not contain:
    partly filled last blocks that a deeper block replaces.

    A lease on the path uses these as well: they cannot be evicted before the nodes below them.
    """
    found: dict[int, None] = {}
    step = node.parent
    while step is not None:
        if step.end % block_size and len(step.blocks):
            block = int(step.blocks[-1])
            if int(table[step.end // block_size]) != block:
                found[block] = None
        step = step.parent
    return list(found)


def walk(root: Node) -> Iterator[Node]:
    """Yields every node below a node but private roots, parents first. For reports and integrity checks."""
    stack = list(below(root))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(below(node))


def below(node: Node) -> Iterator[Node]:
    """Yields the nodes right below a node, including the nodes right below its private roots."""
    yield from node.children.values()
    for root in node.private_roots.values():
        yield from root.children.values()
