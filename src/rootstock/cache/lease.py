"""Leases: the rows that a running request owns in the cache. Also the answers to a match and to an admission."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.plan import Load, Plan
from rootstock.cache.radix_node import Boundary, Checkpoint, CheckpointKind, Node, WindowBlocks
from rootstock.cache.retention.grants import Claim
from rootstock.cache.retention.hint_types import CacheHints, HintOutcome
from rootstock.cache.retention.sessions import RequestCosts
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockIds, SlotId, Tokens

LeaseId = NewType("LeaseId", int)


class ReleaseReason(StrEnum):
    """The reason why a lease ends. In each case its computed tokens stay findable."""

    FINISHED = "finished"  # the request is complete
    ABORTED = "aborted"  # the client does not want the rest; the computed part is as good as any
    PREEMPTED = "preempted"  # others need its rows; it will be admitted again
    FAILED = "failed"  # its forward raised, so its working state may be half advanced
    UNUSED = "unused"  # nothing was computed with it: its load failed, or it was admitted to be read only

    @property
    def keeps_state(self) -> bool:
        """True if the working state is exactly that after the computed tokens, so that it can become a checkpoint."""
        return self not in (ReleaseReason.FAILED, ReleaseReason.UNUSED)


class BlockTable:
    """A growing block table. Blocks before `first` were released: their entries are NO_BLOCK."""

    __slots__ = ("_ids", "first", "length")

    def __init__(self, ids: BlockIds, first: int = 0) -> None:
        self._ids = ids  # [≥ length]; copied before it grows
        self.first = first
        self.length = len(ids)

    @property
    def ids(self) -> BlockIds:
        """[length] a view, valid until the table grows."""
        return self._ids[: self.length]

    @property
    def owned(self) -> BlockIds:
        return self._ids[self.first : self.length]

    @property
    def last(self) -> int | None:
        return int(self._ids[self.length - 1]) if self.length > self.first else None

    def grow(self, ids: BlockIds) -> None:
        needed = self.length + len(ids)
        if needed > len(self._ids):
            grown = np.empty(max(needed, 2 * len(self._ids), 8), np.int32)
            grown[: self.length] = self.ids
            self._ids = grown
        self._ids[self.length : needed] = ids
        self.length = needed

    def begin_at(self, index: int) -> None:
        """Makes a table that owns nothing continue at block `index`; no forward reads earlier blocks."""
        assert self.first == self.length, "a table that owns blocks was begun again"
        self._ids = np.full(index, NO_BLOCK, np.int32)
        self.first = self.length = index

    def release_before(self, index: int) -> BlockIds:
        """Takes the blocks before `index` out of the front; returns them."""
        index = min(index, self.length)
        if index <= self.first:
            return NO_BLOCKS
        released = self._ids[self.first : index].copy()
        self._ids[self.first : index] = NO_BLOCK
        self.first = index
        return released


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's block tables, its working state, and its place in the tree. Made by `KVCache.admit`, ended by
    `release` or `discard`; only the cache writes to it.

        0                num_cached_tokens      num_computed_tokens    num_tokens
        | in the tree    | computed, not yet    | known tokens, not    |
        |                | findable by others   | computed yet         |
    """

    id: LeaseId
    scope: Scope
    prompt: InitVar[Tokens]
    hit_tokens: int  # found at admission
    full: BlockTable  # the full family's table
    windows: list[BlockTable]  # one table for each window family
    _order: tuple[int, ...]  # for each of the model's token families: -1 for full, else an index of `windows`
    # Partly filled window blocks that the first plan copies, used until something is computed.
    copy_sources: list[WindowBlocks | None]
    prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False)
    num_cached_tokens: int = field(init=False)  # in the tree, where other requests find them
    _tokens: Tokens = field(init=False)  # [≥ num_tokens]; copied before it is written beyond the prompt
    node: Node | None = None  # ends at `num_cached_tokens`; None: not in the tree
    own_leaf: Node | None = None  # a leaf of the tree that only this lease extends
    replaced: list[int] = field(default_factory=list)  # blocks of nodes that the table replaces by others
    slot: SlotId = NO_SLOT  # the working state; no other request reads or writes it
    draft_slot: SlotId = NO_SLOT  # a second one, for a forward whose last rows may not count
    # Of checkpoints to leave, all beyond `num_computed_tokens`.
    checkpoint_positions: dict[int, CheckpointKind] = field(default_factory=dict)
    awaited_positions: set[int] = field(default_factory=set)  # some of these, which another request waits for
    checkpoints: list[Checkpoint] = field(default_factory=list)  # that it has left
    resumed_from: Checkpoint | None = None  # referenced until something is computed
    is_loaded: bool = False  # a part of its hit was loaded, after its first plan
    is_idle: bool = False  # of idle work: no request waits for it
    hints: CacheHints | None = None
    session: int = 0  # of its request; 0: none
    lost_tokens: int = 0  # of its prompt, within the length of its conversation, and not found
    costs: RequestCosts | None = None  # of its request, at the end, if it names a session
    claims: tuple[Claim, ...] = ()  # granted hints
    hint_outcomes: tuple[HintOutcome, ...] = ()
    act_outcomes: tuple[HintOutcome, ...] = ()  # known when it has ended
    ended: bool = False

    def __post_init__(self, prompt: Tokens) -> None:
        self.prompt_tokens = self.num_tokens = len(prompt)
        self.num_computed_tokens = self.num_cached_tokens = self.hit_tokens
        self._tokens = prompt

    @property
    def namespace(self) -> Namespace:
        """The namespace of its positions behind a public head."""
        return self.scope.namespace

    @property
    def table(self) -> BlockIds:
        """[blocks] the full family's block of each block index; a view, valid until the next call to the cache."""
        return self.full.ids

    @property
    def tables(self) -> tuple[BlockIds, ...]:
        """The block tables of the model's token families, in order, for a segment of a batch. Views, as `table`."""
        return tuple(self.full.ids if i < 0 else self.windows[i].ids for i in self._order)

    @property
    def table_blocks(self) -> int:
        return self.full.length

    @property
    def next_checkpoint_position(self) -> int | None:
        """The position at which a chunk of the prefill must end, because the working state is copied there. None: no
        such position. Window blocks are still there at the chunk's end."""
        return None if self.slot == NO_SLOT else min(self.checkpoint_positions, default=None)

    @property
    def tokens(self) -> Tokens:
        """[num_tokens] prompt and generated tokens; a view."""
        return self._tokens[: self.num_tokens]

    @property
    def computed_tokens(self) -> Tokens:
        """[num_computed_tokens] a view."""
        return self._tokens[: self.num_computed_tokens]

    @property
    def started(self) -> bool:
        """True if its first plan has been executed: positions were computed or loaded since."""
        return self.is_loaded or self.num_computed_tokens > self.hit_tokens

    def append(self, tokens: Tokens) -> None:
        """Adds computed tokens behind those computed before; those beyond `num_tokens` are new."""
        end = self.num_computed_tokens + len(tokens)
        if end > self.num_tokens:
            if end > len(self._tokens) or self.num_tokens == self.prompt_tokens:
                grown = np.empty(max(end + 64, len(self._tokens) * 3 // 2), np.int32)
                grown[: self.num_tokens] = self.tokens
                self._tokens = grown
            self._tokens[self.num_computed_tokens : end] = tokens
            self.num_tokens = end
        self.num_computed_tokens = end

    def take_due_checkpoints(self) -> list[Boundary]:
        """Takes out the positions up to `num_computed_tokens`. Returns those at which checkpoints can be left now: a
        state only at that very position."""
        if not self.checkpoint_positions or min(self.checkpoint_positions) > self.num_computed_tokens:
            return []
        passed = sorted(at for at in self.checkpoint_positions if at <= self.num_computed_tokens)
        kinds = [Boundary(at, self.checkpoint_positions.pop(at)) for at in passed]
        return [each for each in kinds if self.slot == NO_SLOT or each.position == self.num_computed_tokens]

    def __repr__(self) -> str:
        counts = f"{self.num_cached_tokens} ≤ {self.num_computed_tokens} ≤ {self.num_tokens}"
        return f"Lease({self.id}: {counts}, {self.table_blocks} blocks)"


@dataclass(frozen=True, slots=True)
class Pending:
    """A running request that is computing more of a prompt."""

    producer: Lease
    until: int  # its tokens agree up to here, and the waiting request will be able to resume here


@dataclass(slots=True)
class Match:
    """The position at which a prompt can resume. Valid until the cache next changes."""

    tokens: Tokens  # [prompt]
    scope: Scope
    length: int  # positions that need not be computed: at most prompt - 1
    found: int  # positions that agree with the cached prefix
    node: Node | None  # the deepest node that agrees; None: the namespaces hold nothing
    pending: Pending | None
    version: int  # of the tree it was read from
    limit: int = 0  # upper bound of `length`, even if more is cached
    capped_by: str | None = None  # the family that cannot resume as far as the prefix was found
    checkpoint: Checkpoint | None = None  # from which to resume
    windows: tuple[WindowBlocks, ...] = ()  # that a resumption reads, of each window family; (): none

    @property
    def namespace(self) -> Namespace:
        """The namespace of its positions behind a public head."""
        return self.scope.namespace

    @property
    def waiting_gain(self) -> int:
        """Number of positions that waiting for the producer would save."""
        return 0 if self.pending is None else min(self.pending.until, len(self.tokens) - 1) - self.length


class Admitted(NamedTuple):
    """A lease and its first plan. With `loads`, its blocks up to the position of the tier hit are void until all
    loads are executed and `KVCache.loaded` is called."""

    lease: Lease
    plan: Plan
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """Refusal for lack of memory. Nothing was changed; try again after blocks were released."""

    needed_bytes: int
    available_bytes: int  # free, or evictable without touching the request's own hit

    @property
    def reason(self) -> str:
        return f"{self.needed_bytes:,} bytes needed, {self.available_bytes:,} available"
