"""The parts that an engine has by its configuration, and the scheduler that asks some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rootstock.cache.keys import Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.plan import Plan
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.activity import Activity
from rootstock.engine.idle.prefills import IdlePrefill, IdlePrefills
from rootstock.engine.idle.returns import AwaitedReturns
from rootstock.engine.idle.work import IdleWork
from rootstock.engine.kv_events.part import KVEvents
from rootstock.engine.memory_watch import MemoryGuard, MemoryWatch
from rootstock.engine.pacing import Pacing
from rootstock.engine.parts import Part, PartHooks
from rootstock.engine.request import Request
from rootstock.engine.scheduler import Scheduler
from rootstock.engine.session_gate import SessionGate
from rootstock.engine.share_price import SharePrice
from rootstock.engine.speculation.heads import HeadProposer
from rootstock.engine.speculation.proposer import NgramProposer, Proposer, why_not
from rootstock.engine.tiers.connector import TierConnector
from rootstock.engine.tiers.hit_verifier import HitVerifier
from rootstock.engine.tiers.loads import PrefixLoads
from rootstock.runtime.base import ModelDescription, Runtime

# Float32 logits of one step's scored prompts: 262 rows of 32,000 tokens. Computing them takes as long as the rest of
# a small model's forward.
SCORED_LOGITS_BYTES = 32 * 1024**2


class Owner(Protocol):
    """The interface of an engine that its parts use."""

    def run_soon(self, command: Callable[[], None]) -> None:
        """Queues a function for the engine's thread, from any thread."""
        ...

    def scope_of(self, asked: Request | IdlePrefill) -> Scope: ...

    def adapter_name(self, fingerprint: str) -> str: ...


class PlanExecutor:
    """Executor of the cache's plans where there are tiers: the tiers store, the runtime does everything else."""

    def __init__(self, runtime: Runtime, tiers: TierConnector) -> None:
        self._runtime = runtime
        self._tiers = tiers

    def apply(self, plan: Plan) -> None:
        """Executes the stores first: the rest of the plan may overwrite their rows."""
        if plan.stores:
            self._tiers.store(plan.stores)
        if plan:
            self._runtime.apply(plan)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The scheduler and the parts of one engine. None: that part is off. Owned by the engine's thread."""

    scheduler: Scheduler
    apply: Callable[[Plan], None]  # executes a plan of the cache
    hooks: PartHooks
    activity: Activity
    why_no_drafts: str | None  # None: drafts are on
    proposer: Proposer | None
    gate: SessionGate | None
    hit_verifier: HitVerifier | None
    idle_prefills: IdlePrefills | None
    returns: AwaitedReturns | None
    kv_events: KVEvents | None
    idle_work: IdleWork

    @classmethod
    def of(
        cls,
        engine: Owner,
        runtime: Runtime,
        cache: KVCache,
        config: EngineConfig,
        clock: Callable[[], float],
        tiers: TierConnector | None,
        verify_hits: float,
        proposer: Proposer | None,
        memory_watch: MemoryWatch | None,
    ) -> EngineParts:
        """Makes the parts. `proposer` replaces the n-gram lookup, if drafts are on."""
        described = runtime.description
        apply = runtime.apply if tiers is None else PlanExecutor(runtime, tiers).apply
        why_no_drafts = why_not(described, config.draft_tokens)
        if why_no_drafts is not None:
            proposer = None
        elif proposer is None and runtime.draft_heads is not None:
            proposer = HeadProposer(cache, runtime.draft_heads, apply, clock, config.draft_tokens)
        elif proposer is None:
            proposer = NgramProposer(cache, config.draft_tokens)
        pacing = None if config.itl_target_s is None else Pacing(config.itl_target_s, clock)
        gate = None
        if config.max_session_wait_s and cache.reuse:
            has_tier = tiers is not None
            gate = SessionGate(cache, config.max_session_wait_s, config.max_held, has_tier=has_tier)
        scheduler = Scheduler(
            cache,
            config.max_batch,
            config.chunk_tokens,
            tiers,
            pacing,
            proposer,
            config.idle_chunk_tokens or config.chunk_tokens * _idle_chunks(described),
            max(1, SCORED_LOGITS_BYTES // (4 * described.vocab_size)),
            gate,
        )
        scheduler.looks_ahead = runtime.computes_ahead and proposer is None

        def distrust(tokens: Tokens, scope: Scope, first: int) -> None:
            cache.forget(tokens, scope.namespace, first, public_tokens=scope.public_tokens)
            if tiers is not None:
                tiers.follow()

        guard = loads = price = verifier = prefills = returns = kv_events = None
        if memory_watch is not None:
            guard = MemoryGuard(memory_watch, runtime, cache, scheduler, apply)
        if tiers is not None:
            loads = PrefixLoads(tiers, cache, scheduler, apply, engine.run_soon)
        if cache.share is not None:
            token_bytes = max(1, cache.pools.full.row_bytes // cache.block_size)
            price = SharePrice(cache.share, described, token_bytes)
        if verify_hits:
            verifier = HitVerifier(
                runtime, cache, verify_hits, config.chunk_tokens, apply, distrust, config.seed
            )
        if config.idle_work and cache.reuse:
            prefills = IdlePrefills(
                runtime, cache, config.chunk_tokens, apply, tiers, clock, engine.run_soon, engine.scope_of
            )
            if tiers is not None:
                returns = AwaitedReturns(cache, prefills, clock, engine.scope_of)
                prefills.expect = returns.expect
        if config.kv_events is not None:
            kv_events = KVEvents.open(config.kv_events, cache, engine.run_soon, engine.adapter_name)
        activity = Activity(clock)
        parts: tuple[Part | None, ...] = (
            *(guard, loads, price, pacing, proposer, gate),
            *(returns, prefills, verifier, activity, kv_events),
        )
        idle = IdleWork(
            [task for task in (returns, prefills, verifier) if task is not None],
            is_held=lambda: guard is not None and guard.holds_idle_work,
        )
        return cls(
            scheduler,
            apply,
            PartHooks(part for part in parts if part is not None),
            activity,
            why_no_drafts,
            proposer,
            gate,
            verifier,
            prefills,
            returns,
            kv_events,
            idle,
        )


def _idle_chunks(described: ModelDescription) -> int:
    """Returns how many chunks a step may take while nothing decodes.

    A model that runs one sequence per forward uses its own attention, with the scores of the whole chunk in memory at
    once: a larger chunk takes more memory and saves no time.
    """
    return 1 if described.execution_mode == "one sequence per forward" else 4
