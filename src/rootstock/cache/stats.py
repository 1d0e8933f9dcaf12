"""What the cache did, and what it holds. Counters count events; everything else is recounted on request."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    admissions: int = 0
    asked_tokens: int = 0  # of admitted prompts; asked = hit + missed
    hit_tokens: int = 0
    missed_tokens: int = 0
    copied_blocks: int = 0  # copy-on-write of a shared part of a block
    duplicate_blocks: int = 0  # computed twice and given back
    evicted_blocks: int = 0  # owners let go by eviction
    evicted_tokens: int = 0
    preemptions: int = 0

    def admitted(self, prompt_tokens: int, hit_tokens: int) -> None:
        self.admissions += 1
        self.asked_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        self.missed_tokens += prompt_tokens - hit_tokens

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CacheStats:
    block_size: int  # tokens
    block_bytes: int
    total_blocks: int  # = free + cached + live
    free_blocks: int
    cached_blocks: int  # findable and used by nobody
    live_blocks: int  # used by running requests
    nodes: int
    namespaces: int
    cached_tokens: int  # findable
    leases: int
    admissions: int
    asked_tokens: int
    hit_tokens: int
    missed_tokens: int
    copied_blocks: int
    duplicate_blocks: int
    evicted_blocks: int
    evicted_tokens: int
    preemptions: int

    @property
    def resident_bytes(self) -> int:
        return (self.total_blocks - self.free_blocks) * self.block_bytes

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0
