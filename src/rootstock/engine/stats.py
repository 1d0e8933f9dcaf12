"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootstock.cache.stats import CacheStats
from rootstock.engine.tiers.connector import TierStats


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
    later: bool = False  # the tiers below are cleared when what is being loaded from them has ended


@dataclass(slots=True)
class StepCounters:
    steps: int = 0
    computed_tokens: int = 0  # positions that went through a forward
    sampled_tokens: int = 0
    forward_s: float = 0.0
    failed_steps: int = 0
    draft_tokens: int = 0  # guessed ahead and verified, also among computed_tokens
    accepted_draft_tokens: int = 0  # forwards that were saved


@dataclass(frozen=True, slots=True)
class EngineStats:
    cache: CacheStats
    running: int
    waiting: int
    counters: StepCounters = field(default_factory=StepCounters)
    tier: TierStats | None = None  # None: there is nothing below the device's memory
    verified: dict[str, int] = field(default_factory=dict)  # hits that were computed anew, by what came of it
    # Of prompts, that the last step with decodes had room for under --itl-target; None: no target, or no such step.
    paced_tokens: int | None = None
