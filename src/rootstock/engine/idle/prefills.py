"""Prefills in idle time: prompts that no request has sent yet are computed, or loaded from a tier, into the cache.

No token is sampled. A prefill uses free rows, and rows of entries that are worth less than its own
(`KVCache.make_idle_room`). Its computed part stays in the cache when a request interrupts it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from rootstock.cache.image_tokens import PlacedImage, chunk_end
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Admitted, Deferred, Lease, Match, ReleaseReason
from rootstock.cache.plan import Plan
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import Tokens
from rootstock.engine.idle.work import ChunkPace
from rootstock.engine.parts import Part
from rootstock.engine.tiers.connector import LoadInFlight, TierConnector
from rootstock.errors import EngineStopped, IdleWorkFull, PoolsLost
from rootstock.runtime.base import Batch, Runtime, Segment
from rootstock.tiers.reader import LoadEnded

log = logging.getLogger(__name__)

IDLE_STEP_S = 0.02  # longest forward of idle work, by prediction: a request that arrives waits for its rest
MOST_WAITING, MOST_WAITING_TOKENS = 256, 1 << 22
MOST_OF_OWNER, MOST_TOKENS_OF_OWNER = 32, 1 << 20
# Share of the cache that one tenant's idle work may fill before requests use it.
OWNER_SHARE = 0.25


class IdleKind(StrEnum):
    """The reason for a prefill, the most urgent first."""

    NEXT_TURN = "next_turn"  # the known beginning of a conversation's next request
    PREFETCH = "prefetch"  # an evicted prefix that a tier holds: it is loaded, not computed
    WARM = "warm"  # a prompt that a client has declared


MAX_AGE_S = {IdleKind.NEXT_TURN: 120.0, IdleKind.PREFETCH: 600.0, IdleKind.WARM: 24 * 3600.0}


# Fewer new tokens are not worth a forward.
LEAST_GAIN = {IdleKind.NEXT_TURN: 16, IdleKind.PREFETCH: 16, IdleKind.WARM: 1}


class IdleEnd(StrEnum):
    """The end of a prefill."""

    CACHED = "cached"  # the whole prompt is in the cache
    NO_MEMORY = "no_memory"  # all other entries are worth more
    TOO_MUCH = "too_much"  # the owner's share is full of idle work that no request has used
    NOT_STORED = "not_stored"  # no tier holds more of the prefix, or computing it is faster
    EXPIRED = "expired"  # no idle time came
    CLEARED = "cleared"  # with the cache of its salt
    FAILED = "failed"
    STOPPED = "stopped"  # with the engine


@dataclass(frozen=True, slots=True, eq=False)
class IdlePrefill:
    """A prompt to cache."""

    kind: IdleKind
    tokens: Tokens  # [prompt] int32, all to be cached
    salt: str
    owner: str | None  # the tenant or salt whose bounds it counts against; None: the operator, who has none
    boundaries: tuple[Boundary, ...] = ()
    end: CheckpointKind = CheckpointKind.PROMPT  # of the checkpoint at its end
    adapter: str = ""  # fingerprint of a loaded LoRA adapter; empty: the base model
    comes_back: bool = False  # its client is expected soon, with a tool's result
    hints: CacheHints | None = None  # a session that it belongs to, and retentions that it asks for
    ended: Callable[[IdleEnd], None] = lambda end: None  # called once: must not block and must not raise
    images: tuple[PlacedImage, ...] = ()  # of the prompt


@dataclass(slots=True)
class IdleStats:
    """Statistics of idle prefills; counters since the start."""

    waiting: int = 0  # prefills that have not ended
    computed_tokens: int = 0  # positions that went through a forward
    loaded_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # of forwards
    longest_step_s: float = 0.0
    ended: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind, then by end


@dataclass(slots=True, eq=False)
class _PrefillJob:
    prefill: IdlePrefill
    scope: Scope
    submitted_at: float
    may_load: bool = True


@dataclass(slots=True, eq=False)
class _Computing:
    job: _PrefillJob
    lease: Lease


class IdlePrefills(Part):
    """The prefills that wait for idle time, and the one that runs. Any thread submits; the engine's thread owns the
    rest. `run_soon` queues a function for that thread."""

    next_poll_s = None  # others bring its work

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        chunk_tokens: int,
        apply: Callable[[Plan], None],
        tier_connector: TierConnector | None,
        clock: Callable[[], float],
        run_soon: Callable[[Callable[[], None]], None],
        scope_of: Callable[[IdlePrefill], Scope],
    ) -> None:
        self._runtime = runtime
        self._cache = cache
        self._apply = apply
        self._tier_connector = tier_connector
        self._clock = clock
        self._run_soon = run_soon
        self._scope_of = scope_of
        self._pace = ChunkPace(IDLE_STEP_S, chunk_tokens)
        self._queues: dict[IdleKind, deque[_PrefillJob]] = {kind: deque() for kind in IdleKind}
        self._computing: _Computing | None = None
        self._loading: tuple[_PrefillJob, Lease] | None = None
        self._namespaces: dict[str, set[Namespace]] = {}  # of owners' unused idle work
        self.expect: Callable[[IdlePrefill], None] = lambda prefill: (
            None
        )  # called when `comes_back` has ended
        self._lock = threading.Lock()  # of the fields below
        self._open: dict[_PrefillJob, None] = {}
        self._closed = False
        self._stats = IdleStats()
        self._ended: Counter[tuple[IdleKind, IdleEnd]] = Counter()

    # -------------------------------------------------------------------------------------- for any thread

    @property
    def waiting(self) -> int:
        """Prefills that have not ended."""
        return len(self._open)

    def submit(self, prefill: IdlePrefill) -> None:
        """Queues a prefill. Raises IdleWorkFull and EngineStopped."""
        scope = self._scope_of(prefill)
        job = _PrefillJob(prefill, scope, self._clock())
        with self._lock:
            if self._closed:
                raise EngineStopped()
            open_ones = [each.prefill for each in self._open]
            own = [each for each in open_ones if each.owner == prefill.owner]
            if (
                len(open_ones) >= MOST_WAITING
                or _tokens(open_ones) + len(prefill.tokens) > MOST_WAITING_TOKENS
                or (prefill.owner is not None and len(own) >= MOST_OF_OWNER)
                or (prefill.owner is not None and _tokens(own) + len(prefill.tokens) > MOST_TOKENS_OF_OWNER)
            ):
                raise IdleWorkFull(len(own), MOST_OF_OWNER)
            self._open[job] = None
            self._run_soon(lambda: self._queues[prefill.kind].append(job))

    def close(self, *, is_sound: bool = True) -> None:
        """Ends all prefills, and accepts no more."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for job in left:
            self._end(job, IdleEnd.STOPPED)

    # ------------------------------------------------------------------------------------- for idle time

    @property
    def has_work(self) -> bool:
        return self._computing is not None or (self._loading is None and any(self._queues.values()))

    def step(self) -> None:
        if self._computing is None:
            self._begin()
        else:
            self._compute(self._computing)

    def pause(self) -> bool:
        if self._loading is not None and self._tier_connector is not None:
            self._tier_connector.cancel(self._loading[1])
        if self._computing is None:
            return False
        computing, self._computing = self._computing, None
        self._cache.release(computing.lease, ReleaseReason.ABORTED)
        self._put_back(computing.job)
        return True

    @property
    def holds_rows(self) -> bool:
        return self._computing is not None or self._loading is not None

    def restart(self) -> None:
        self._computing = self._loading = None
        for queue in self._queues.values():
            queue.clear()
        with self._lock:
            left = list(self._open)  # also one that was taken from its queue when the engine failed
        for job in left:
            self._end(job, IdleEnd.FAILED)

    def forget(self, namespace: Namespace | None) -> None:
        """Drops the prefills of a namespace, or all: they would bring back cleared prefixes. Call `pause` before."""
        for queue in self._queues.values():
            for job in [each for each in queue if scope_touches(each.scope, namespace)]:
                queue.remove(job)
                self._end(job, IdleEnd.CLEARED)
        if self._loading is not None and scope_touches(self._loading[0].scope, namespace):
            self._end(self._loading[0], IdleEnd.CLEARED)  # `_load_ended` drops the rows

    def drop_adapter(self, fingerprint: str) -> None:
        self.pause()
        for queue in self._queues.values():
            for job in [each for each in queue if each.prefill.adapter == fingerprint]:
                queue.remove(job)
                self._end(job, IdleEnd.CLEARED)

    def stats(self) -> dict[str, IdleStats]:
        return {"idle": self.idle_stats()}

    def idle_stats(self) -> IdleStats:
        ended: dict[str, dict[str, int]] = {}
        for (kind, end), count in self._ended.items():
            ended.setdefault(kind.value, {})[end.value] = count
        return replace(self._stats, waiting=self.waiting, ended=ended)

    # ---------------------------------------------------------------------------------------- a prefill

    def _begin(self) -> None:
        """Admits the most urgent prefill, or ends it without work."""
        job = next(queue for queue in self._queues.values() if queue).popleft()
        prefill = job.prefill
        if job not in self._open:
            return  # it ended before it was queued
        if self._clock() - job.submitted_at > MAX_AGE_S[prefill.kind]:
            self._end(job, IdleEnd.EXPIRED)
            return
        # One more token, which is not computed: a match leaves the last token of a prompt.
        tokens = np.append(prefill.tokens, np.int32(0))
        match = self._match(job, tokens)
        if len(prefill.tokens) - match.length < LEAST_GAIN[prefill.kind]:
            self._end(job, IdleEnd.CACHED)
            return
        tier_hit = self._tier_hit(job, match)
        if tier_hit is None and prefill.kind is IdleKind.PREFETCH:
            self._end(job, IdleEnd.NOT_STORED)
            return
        if not self._owner_has_room(job, len(prefill.tokens) - match.length):
            self._end(job, IdleEnd.TOO_MUCH)
            return
        has_room = self._cache.make_idle_room(match, tier_hit)
        self._apply(self._cache.take_pending_plan())
        if not has_room:
            self._end(job, IdleEnd.NO_MEMORY)
            return
        match = self._match(job, tokens)  # the evictions made the first one void
        if tier_hit is not None:
            tier_hit = self._cache.tier_hit(match)
        boundaries = (*prefill.boundaries, Boundary(len(prefill.tokens), prefill.end))
        admitted = self._cache.admit(
            match, 0, boundaries, tier_hit, counted=False, is_idle=True, hints=prefill.hints
        )
        if isinstance(admitted, Deferred):
            self._end(job, IdleEnd.NO_MEMORY)
            return
        self._apply(admitted.plan)
        if tier_hit is None:
            self._pace.restart()
            self._computing = _Computing(job, admitted.lease)
        else:
            self._load(job, admitted, tier_hit)

    def _match(self, job: _PrefillJob, tokens: Tokens) -> Match:
        return self._cache.match(tokens, job.scope.namespace, public_tokens=job.scope.public_tokens)

    def _owner_has_room(self, job: _PrefillJob, new_tokens: int) -> bool:
        asker = job.prefill.owner
        if asker is None:
            return True
        used = {each for each in self._namespaces.get(asker, ()) if self._cache.unasked_tokens(each)}
        self._namespaces[asker] = {*used, job.scope.namespace}
        for owner in [owner for owner, held in self._namespaces.items() if not self._holds(held)]:
            if owner != asker:
                del self._namespaces[owner]
        held_tokens = sum(map(self._cache.unasked_tokens, used))
        return held_tokens + new_tokens <= OWNER_SHARE * self._cache.capacity_tokens

    def _holds(self, namespaces: set[Namespace]) -> bool:
        return any(map(self._cache.unasked_tokens, namespaces))

    def _compute(self, computing: _Computing) -> None:
        """Computes a chunk."""
        job, lease = computing.job, computing.lease
        new = min(self._pace.tokens, len(job.prefill.tokens) - lease.num_computed_tokens)
        if lease.next_checkpoint_position is not None:
            new = min(new, lease.next_checkpoint_position - lease.num_computed_tokens)
        new = chunk_end(job.prefill.images, lease.num_computed_tokens, lease.num_computed_tokens + new)
        new -= lease.num_computed_tokens
        if isinstance(self._cache.extend(lease, new), Deferred):
            self._finish(computing, ReleaseReason.FINISHED, IdleEnd.NO_MEMORY)
            return
        self._apply(self._cache.take_pending_plan())
        past = lease.num_computed_tokens
        tokens = lease.tokens[past : past + new]
        began = self._clock()
        try:
            # With a row of logits, the forward's time includes its computation, also on asynchronous devices.
            prefill = job.prefill
            segment = Segment(tokens, past, lease.tables, 1, lease.slot, prefill.adapter, prefill.images)
            logits = self._runtime.forward(Batch([segment]))
        except PoolsLost:
            raise
        except Exception:
            log.exception("idle work failed: a prompt of %d tokens is not cached", len(job.prefill.tokens))
            self._finish(computing, ReleaseReason.FAILED, IdleEnd.FAILED)
            return
        seconds = self._clock() - began
        self._pace.observe(new, seconds)
        self._stats.steps += 1
        self._stats.computed_tokens += new
        self._stats.seconds += seconds
        self._stats.longest_step_s = max(self._stats.longest_step_s, seconds)
        if not np.isfinite(logits).all():
            self._computing = None
            self._cache.discard(lease)
            self._end(job, IdleEnd.FAILED)
            return
        self._apply(self._cache.commit(lease, tokens))
        if lease.num_computed_tokens == len(job.prefill.tokens):
            self._finish(computing, ReleaseReason.FINISHED, IdleEnd.CACHED)

    def _finish(self, computing: _Computing, reason: ReleaseReason, end: IdleEnd) -> None:
        self._computing = None
        self._cache.release(computing.lease, reason)
        self._apply(self._cache.take_pending_plan())
        self._end(computing.job, end)

    def _put_back(self, job: _PrefillJob) -> None:
        self._queues[job.prefill.kind].appendleft(job)

    def _end(self, job: _PrefillJob, end: IdleEnd) -> None:
        with self._lock:
            if job not in self._open:
                return
            del self._open[job]
        self._ended[job.prefill.kind, end] += 1
        if job.prefill.comes_back and end not in (IdleEnd.CLEARED, IdleEnd.FAILED, IdleEnd.STOPPED):
            self.expect(job.prefill)
        try:
            job.prefill.ended(end)
        except Exception:
            log.exception("the callback of idle work raised")

    # ------------------------------------------------------------------------------------------- a load

    def _tier_hit(self, job: _PrefillJob, match: Match) -> TierHit | None:
        if self._tier_connector is None or not job.may_load:
            return None
        hit, choice = self._tier_connector.choose(match)
        return hit if choice is not None and choice.load else None

    def _load(self, job: _PrefillJob, admitted: Admitted, tier_hit: TierHit) -> None:
        """Begins a load that no request waits for, so that a slow tier delays none."""
        assert self._tier_connector is not None
        lease = admitted.lease
        self._cache.detach(lease)
        self._loading = job, lease
        self._tier_connector.begin(
            None,
            lease,
            tier_hit.position,
            admitted.loads,
            lambda load, ended: self._run_soon(lambda: self._load_ended(job, load, ended)),
        )

    def _load_ended(self, job: _PrefillJob, load: LoadInFlight, ended: LoadEnded) -> None:
        connector = self._tier_connector
        assert connector is not None
        if not connector.is_in_flight(load):
            return  # the cache was emptied meanwhile
        self._loading = None
        complete = connector.end(load, ended)
        if complete and job in self._open:
            self._stats.loaded_tokens += load.position - load.lease.num_computed_tokens
            self._apply(self._cache.loaded(load.lease, load.position))
            self._cache.release(load.lease, ReleaseReason.FINISHED)
        else:
            self._cache.release(load.lease, ReleaseReason.UNUSED)
            job.may_load = ended.cancelled  # a request came in between, or else records are missing
        self._apply(self._cache.take_pending_plan())
        if job in self._open:
            self._put_back(job)


def scope_touches(scope: Scope, namespace: Namespace | None) -> bool:
    """Returns whether a prompt has positions in a namespace. None: in any."""
    return namespace is None or scope.has(namespace)


def _tokens(prefills: list[IdlePrefill]) -> int:
    return sum(len(each.tokens) for each in prefills)
