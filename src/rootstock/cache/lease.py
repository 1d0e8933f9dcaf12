"""What a running request owns in the cache, and the answers to asking for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np

from rootstock.cache.keys import Namespace
from rootstock.cache.plan import NOTHING, BlockIds, Plan, Tokens
from rootstock.cache.radix import Node

LeaseId = NewType("LeaseId", int)


class Lease:
    """One sequence's block table and its place in the tree. Made by `KVCache.admit`, ended by `finish`,
    `preempt` or `abort`; only the cache writes to it.

    Positions 0 … published-1 can be found by others, published … computed-1 are computed and not found yet,
    computed … known-1 are tokens that are known and will be computed.
    """

    __slots__ = (
        "_table",
        "_tokens",
        "computed",
        "ended",
        "hit_tokens",
        "id",
        "known",
        "namespace",
        "prompt_tokens",
        "published",
        "replaced",
        "table_blocks",
        "tip",
    )

    def __init__(
        self, id: LeaseId, namespace: Namespace, prompt: Tokens, hit_tokens: int, table: BlockIds
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
        self.table_blocks = len(table)
        self.ended = False
        self._tokens = prompt  # [≥ known]; copied before it is written beyond the prompt
        self._table = table  # [≥ table_blocks]

    @property
    def table(self) -> BlockIds:
        """[table_blocks] the block of each block index; a view, valid until the next call to the cache."""
        return self._table[: self.table_blocks]

    @property
    def tokens(self) -> Tokens:
        """[known] prompt and generated tokens; a view."""
        return self._tokens[: self.known]

    @property
    def last_block(self) -> int | None:
        return int(self._table[self.table_blocks - 1]) if self.table_blocks else None

    def _grow_table(self, ids: BlockIds) -> None:
        needed = self.table_blocks + len(ids)
        if needed > len(self._table):
            grown = np.empty(max(needed, 2 * len(self._table), 8), np.int32)
            grown[: self.table_blocks] = self.table
            self._table = grown
        self._table[self.table_blocks : needed] = ids
        self.table_blocks = needed

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
    until: int  # position up to which its tokens agree


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

    @property
    def waiting_gain(self) -> int:
        """Positions that waiting for the producer would save."""
        return 0 if self.pending is None else min(self.pending.until, len(self.tokens) - 1) - self.length


@dataclass(frozen=True, slots=True)
class Admitted:
    lease: Lease
    plan: Plan


@dataclass(frozen=True, slots=True)
class Extended:
    plan: Plan = NOTHING


@dataclass(frozen=True, slots=True)
class Deferred:
    """Nothing was changed. Try again when blocks were released."""

    needed_blocks: int
    available_blocks: int  # free, or evictable without touching what the request would hit

    @property
    def reason(self) -> str:
        return f"{self.needed_blocks} blocks needed, {self.available_blocks} can be had"
