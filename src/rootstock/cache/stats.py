"""Statistics of the cache. Counters count events; all other numbers are recounted on request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    admissions: int = 0
    asked_tokens: int = 0  # of admitted prompts; asked = hit + missed
    hit_tokens: int = 0
    inside_block_tokens: int = (
        0  # of those hit, behind the last whole block: a cache of whole blocks misses them
    )
    missed_tokens: int = 0
    copied_blocks: int = 0  # copy-on-write of a shared part of a block
    duplicate_blocks: int = 0  # computed twice and returned to the pool
    evicted_blocks: int = 0  # owners removed by eviction
    evicted_tokens: int = 0
    preemptions: int = 0
    loaded_tokens: int = 0  # of those hit, from a tier below
    checkpoints_taken: int = 0
    checkpoints_hit: int = 0  # admissions that resumed from one
    checkpoints_evicted: int = 0
    checkpoints_skipped: int = 0  # due, but would have evicted an entry of higher rank
    checkpoints_refused: int = (
        0  # found where they do not belong: a bug, and a miss rather than a wrong answer
    )
    volatile_misses: int = 0  # admissions that diverged in a volatile span
    volatile_tokens: int = 0  # that they would have found behind it
    idle_tokens: int = 0  # cached by idle work
    idle_hit_tokens: int = 0  # of these, those that a request has used
    idle_evicted_tokens: int = 0  # of these, those that were evicted before any request used them
    accepted_hints: int = 0  # hints of admitted requests, by the decision about them
    clipped_hints: int = 0
    refused_hints: int = 0
    expired_grants: int = 0  # entries whose retention has ended
    displaced_grants: int = 0  # entries that lost it to others of their tenant, or to another tenant's share
    evicted_retained_tokens: int = 0  # evicted within their time to live
    dropped_pins: int = 0  # pins that were given up for a request that could not run otherwise


@dataclass(frozen=True, slots=True)
class FamilyStats:
    """One family's pool; total = free + cached + live rows. Free rows can be allocated as far as the budget goes."""

    name: str
    row_bytes: int
    total_rows: int
    free_rows: int
    cached_rows: int  # held by checkpoints or nodes, and used by no lease
    live_rows: int


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The memory of all pools at one moment."""

    budget_bytes: int
    used_bytes: int  # of rows that are not free
    families: tuple[FamilyStats, ...]
    hit_tokens: int  # both are counted since the start
    inside_block_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    block_size: int  # tokens
    block_bytes: int  # of a block in every family
    budget_bytes: int  # for all families together
    used_bytes: int  # of rows that are not free, in all pools
    total_blocks: int  # of the full family's pool; = free + cached + live
    free_blocks: int
    cached_blocks: int  # findable and used by no lease
    live_blocks: int  # used by running requests
    families: tuple[FamilyStats, ...]
    checkpoints: int
    checkpoint_bytes: int  # their states, and the blocks of windows and chunks that they hold
    nodes: int
    namespaces: int
    cached_tokens: int  # findable
    leases: int
    volatile_spans: int  # kept for reports
    retained_bytes: int  # of entries that are kept within their time to live, or by a priority above 0
    pinned_bytes: int
    pins: int
    sessions: int  # whose pauses are known
    admissions: int
    asked_tokens: int
    hit_tokens: int
    inside_block_tokens: int
    missed_tokens: int
    copied_blocks: int
    duplicate_blocks: int
    evicted_blocks: int
    evicted_tokens: int
    preemptions: int
    loaded_tokens: int
    checkpoints_taken: int
    checkpoints_hit: int
    checkpoints_evicted: int
    checkpoints_skipped: int
    checkpoints_refused: int
    volatile_misses: int
    volatile_tokens: int
    idle_tokens: int
    idle_hit_tokens: int
    idle_evicted_tokens: int
    accepted_hints: int
    clipped_hints: int
    refused_hints: int
    expired_grants: int
    displaced_grants: int
    evicted_retained_tokens: int
    dropped_pins: int

    @property
    def resident_bytes(self) -> int:
        return self.used_bytes

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0
