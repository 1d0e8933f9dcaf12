"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootstock.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool
    detail: str
    running: int
    waiting: int
    steps: int


@dataclass(frozen=True, slots=True)
class Cleared:
    blocks: int
    bytes: int


@dataclass(slots=True)
class StepCounters:
    steps: int = 0
    computed_tokens: int = 0  # positions that went through a forward
    sampled_tokens: int = 0
    forward_s: float = 0.0
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    cache: CacheStats
    running: int
    waiting: int
    counters: StepCounters = field(default_factory=StepCounters)
