"""What a running request owns in the cache, and the answers to asking for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS
from rootstock.cache.checkpoints import Checkpoint, CheckpointKind, TailBlocks
from rootstock.cache.keys import Namespace
from rootstock.cache.plan import NOTHING, Load, Plan
from rootstock.cache.radix_node import Node
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockIds, SlotId, Tokens

LeaseId = NewType("LeaseId", int)


class BlockTable:
    """A growing table. Blocks before `first` were released: their entries are NO_BLOCK."""

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
        """The table, which owns nothing, goes on at block `index`: whatever lies before is not needed."""
        assert self.first == self.length, "a table that owns blocks was begun anew"
        self._ids = np.full(index, NO_BLOCK, np.int32)
        self.first = self.length = index

    def release_before(self, index: int) -> BlockIds:
        """Takes blocks out of the front; returns them."""
        index = min(index, self.length)
        if index <= self.first:
            return NO_BLOCKS
        released = self._ids[self.first : index].copy()
        self._ids[self.first : index] = NO_BLOCK
        self.first = index
        return released


class Lease:
    """One sequence's block tables, its working state, and its place in the tree. Made by `KVCache.admit`, ended by
    `finish`, `preempt` or `abort`; only the cache writes to it.

    Positions 0 … published-1 can be found by others, published … computed-1 are computed and not found yet,
    computed … known-1 are tokens that are known and will be computed.
    """

    __slots__ = (
        "_full",
        "_order",
        "_tails",
        "_tokens",
        "computed",
        "cuts",
        "ended",
        "hit_tokens",
        "id",
        "is_loaded",
        "known",
        "left",
        "namespace",
        "prompt_tokens",
        "published",
        "replaced",
        "resumed_from",
        "slot",
        "sources",
        "tip",
        "waited_for",
    )

    def __init__(
        self,
        id: LeaseId,
        namespace: Namespace,
        prompt: Tokens,
        hit_tokens: int,
        full: BlockTable,
        tails: list[BlockTable],
        order: tuple[int, ...],
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.prompt_tokens = len(prompt)
        self.hit_tokens = hit_tokens  # found at admission
        self.known = len(prompt)
        self.computed = hit_tokens
        self.published = hit_tokens
        self.tip: Node | None = None  # the node that ends at `published`; None: not attached to the tree
        self.replaced: list[int] = []  # blocks of pinned nodes that the table replaces by others
        self.slot: SlotId = NO_SLOT  # the working state; nobody else reads or writes it
        self.cuts: dict[int, CheckpointKind] = {}  # where a checkpoint is to be left, all beyond `computed`
        self.waited_for: set[int] = set()  # those cuts for which another request waits
        self.left: list[Checkpoint] = []  # that it has left
        self.resumed_from: Checkpoint | None = None  # pinned until something is computed
        # Tail blocks copied from, owned until something is computed.
        self.sources: list[TailBlocks | None] = []
        self.is_loaded = False  # a part of its hit was loaded, after its first plan
        self.ended = False
        self._tokens = prompt  # [≥ known]; copied before it is written beyond the prompt
        self._full = full
        self._tails = tails
        self._order = order  # for each of the model's token families: -1 for full, else which tail

    @property
    def table(self) -> BlockIds:
        """[blocks] the full family's block of each block index; a view, valid until the next call to the cache."""
        return self._full.ids

    @property
    def tables(self) -> tuple[BlockIds, ...]:
        """Of each of the model's token families, in order: what a segment takes. Views, as `table`."""
        return tuple(self._full.ids if i < 0 else self._tails[i].ids for i in self._order)

    @property
    def table_blocks(self) -> int:
        return self._full.length

    @property
    def next_cut(self) -> int | None:
        """The position at which the next prefill chunk must end, if it gets there."""
        return min(self.cuts, default=None)

    @property
    def tokens(self) -> Tokens:
        """[known] prompt and generated tokens; a view."""
        return self._tokens[: self.known]

    def _append(self, tokens: Tokens) -> None:
        """Takes tokens at positions computed …; beyond what is known they are new."""
        end = self.computed + len(tokens)
        if end > self.known:
            if end > len(self._tokens) or self.known == self.prompt_tokens:
                grown = np.empty(max(end + 64, len(self._tokens) * 3 // 2), np.int32)
                grown[: self.known] = self.tokens
                self._tokens = grown
            self._tokens[self.computed : end] = tokens
            self.known = end
        self.computed = end

    def __repr__(self) -> str:
        return (
            f"Lease({self.id}: {self.published} ≤ {self.computed} ≤ {self.known}, {self.table_blocks} blocks)"
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """A running request is computing more of what was asked for."""

    producer: Lease
    until: int  # position up to which its tokens agree, and at which the request will be able to resume


@dataclass(slots=True)
class Match:
    """Where a prompt can resume. Reads only; stands until the cache is next changed."""

    tokens: Tokens  # [prompt]
    namespace: Namespace
    length: int  # positions that need not be computed: at most prompt - 1
    found: int  # positions that agree with what is cached
    node: Node | None  # the deepest node that agrees; None: this namespace holds nothing
    pending: Pending | None
    version: int  # of the tree it was read from
    limit: int = 0  # what `length` could be at most, whatever is cached
    capped_by: str | None = None  # the family that cannot resume as far as the prefix was found
    checkpoint: Checkpoint | None = None  # from which to resume
    tails: tuple[TailBlocks, ...] = ()  # of each tail family, what a resumption reads; (): nothing

    @property
    def waiting_gain(self) -> int:
        """Positions that waiting for the producer would save."""
        return 0 if self.pending is None else min(self.pending.until, len(self.tokens) - 1) - self.length


@dataclass(frozen=True, slots=True)
class Admitted:
    """With `loads`, the lease's blocks up to where it is to resume are void until all of them are executed and
    `KVCache.loaded` is told."""

    lease: Lease
    plan: Plan
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True)
class Extended:
    plan: Plan = NOTHING


@dataclass(frozen=True, slots=True)
class Deferred:
    """Nothing was changed. Try again when blocks were released."""

    needed_bytes: int
    available_bytes: int  # free, or evictable without touching what the request would hit

    @property
    def reason(self) -> str:
        return f"{self.needed_bytes:,} bytes needed, {self.available_bytes:,} can be had"
