"""Statistics of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rootstock.cache.stats import CacheStats
from rootstock.engine.idle.prefills import IdleStats
from rootstock.engine.memory_watch import MemoryStats
from rootstock.engine.request import PromptTokens
from rootstock.engine.sequence import Phase
from rootstock.engine.tiers.connector import TierStats

HUNG_AFTER_S = 300.0  # a step that takes longer is reported as not alive
NEVER = math.inf  # begin of a step that no thread runs now


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool
    detail: str
    running: int
    waiting: int
    steps: int


def why_not_alive(closed: bool, has_thread: bool, working_s: float, work: str) -> str:
    """Returns why an engine does not work; "": it works. `working_s` is the time since its current step (`work`)
    began."""
    if closed:
        return "stopped"
    if not has_thread:
        return "the engine's thread has died"
    if working_s > HUNG_AFTER_S:
        return f"{work} has been running for {working_s:.0f} s"
    return ""


@dataclass(frozen=True, slots=True)
class Cleared:
    blocks: int
    bytes: int
    later: bool = False  # True: the tiers are cleared when their loads in flight have ended

    def __add__(self, other: Cleared) -> Cleared:
        return Cleared(self.blocks + other.blocks, self.bytes + other.bytes, self.later or other.later)


@dataclass(slots=True)
class StepCounters:
    steps: int = 0
    computed_tokens: int = 0  # positions that went through a forward
    sampled_tokens: int = 0
    forward_s: float = 0.0
    failed_steps: int = 0
    draft_tokens: int = 0  # verified draft tokens, also among computed_tokens
    accepted_draft_tokens: int = 0  # each saved a forward
    drafts: int = 0  # verified drafts, of one token or more
    accepted_by_position: list[int] = field(
        default_factory=list
    )  # accepted draft tokens by place in their draft
    prompts: PromptTokens = field(default_factory=PromptTokens)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Requests of LoRA adapters, by the adapter's name. Names of the same files share their requests."""

    most: int  # adapters that can be loaded
    running: dict[str, int]  # requests in the batch; never 0
    waiting: dict[str, int]


@dataclass(frozen=True, slots=True)
class KVEventStats:
    """Statistics of published events; counters since the start."""

    batches: int
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Statistics of sessions and of their admission; counters since the start."""

    known: int
    active: int
    by_hit_rate: dict[str, int]  # known sessions by the part of their prompts that was found, in steps
    expected_bytes: int  # of the working set: of sessions whose requests run or are expected soon
    active_bytes: int
    budget_bytes: int  # that sessions may keep
    held: int  # requests that wait for their session's place in memory
    admitted: dict[str, int]  # requests that were held, by the reason of their admission: room, idle, overdue
    held_s: float  # time for which these were held


@dataclass(frozen=True, slots=True)
class EngineStats:
    cache: CacheStats
    running: int
    waiting: int
    counters: StepCounters = field(default_factory=StepCounters)
    tier: TierStats | None = None  # None: there are no tiers
    verified: dict[str, int] = field(default_factory=dict)  # recomputed hits, by outcome
    # Prompt tokens that fit into the last step with decodes under --itl-target. None: no target, or no such step.
    paced_tokens: int | None = None
    idle: IdleStats | None = None  # None: idle work is off
    phases: dict[Phase, int] = field(default_factory=dict)  # requests, without those that have ended
    adapters: AdapterStats | None = None  # None: none was ever loaded
    sessions: SessionStats | None = None  # None: no session waits for another
    memory: MemoryStats | None = None  # None: the process's memory has no limit
    kv_events: KVEventStats | None = None  # None: none are published
    pool_copies: int | None = None  # arrays of the pools that writes have copied; None: not counted
