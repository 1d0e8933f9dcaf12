"""Random schedules of a whole engine on the oracle runtime or another subject, from a seed.

The oracle has one family or several: full attention, windows, chunks, recurrent states. Requests share, diverge,
repeat, continue each other's answers, are scored, cancelled and preempted, with and without an adapter, under a
budget that is far too small, while forwards fail now and then, some with the loss of all pools, and the memory of the
process goes up and down. In each
schedule every request ends exactly once and gets the tokens that it would have got alone, and at the end every row of
every pool is accounted for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from block_listener import BlockListener
from property.provenance import SALTS, Provenance, heads_of
from property.simulated_tier import (
    Failing,
    RecordCheck,
    SimulatedTier,
    SimulatedTierConnector,
    check_oracle_record,
)
from rootstock.cache import KVCache
from rootstock.cache.families import Family, FullAttention, SlidingWindow, row_bytes
from rootstock.cache.image_tokens import ImageLayout, PlacedImage, chunk_end
from rootstock.cache.lease import Lease
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.retention.hint_types import ActKind, CacheHints, PrefixAct, RetentionWish
from rootstock.cache.retention.pins import Pinned
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import NO_SLOT, Tokens
from rootstock.config import EngineConfig
from rootstock.engine.adapters import NamedAdapter
from rootstock.engine.clearing import Clearing
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import IdleKind, IdlePrefill
from rootstock.engine.kv_budget import divided_rows
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.memory_watch import MemoryWatch
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    PromptScored,
    Request,
    RequestId,
    StopParams,
    TokenEvent,
)
from rootstock.engine.sampling import SampledToken, Sampler
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.heads import HeadProposer
from rootstock.engine.speculation.proposer import Proposer
from rootstock.errors import PoolsLost, RootstockError, StepFailed
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, Runtime
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, chunked, window

VOCAB = 5  # few tokens, so that prompts and answers meet often
EOS = 4
ADAPTER = "adapter"  # of some requests: the oracle has other tokens for them
LOST_SHARE = 0.3  # of forwards that fail: they lose the pools
# Images with one run of rows and with two, most of which see each other.
IMAGES = tuple(
    ImageLayout(
        hashlib.sha256(bytes([number])).digest(), "", 0, np.array(rows, np.int32), sees_both_directions=both
    )
    for number, (rows, both) in enumerate(
        [
            ([0], True),
            ([*range(5)], True),
            ([*range(9)], True),
            ([0, 1, 2, 5, 6, 7], True),
            ([*range(7)], False),
        ]
    )
)
SHARED = np.random.default_rng(7).integers(0, VOCAB, 200)  # the same in every schedule


class Injected(Exception):
    """Failure of a forward, on purpose."""


class Judged(Runtime, Protocol):
    """Runtime whose right answers are known by other means."""

    @property
    def adapters(self) -> set[str]: ...

    def expected_logits(self, tokens: Tokens, adapter: str = "") -> Logits:
        """Computes the logits [vocab] that follow these tokens, without a cache, a batch or a pool."""
        ...

    def expected_rows(self, tokens: Tokens, first: int, adapter: str = "") -> Logits:
        """Computes the same for the first `first` of these tokens and each longer prefix, up to all of them."""
        ...


class MakeRuntime(Protocol):
    def __call__(self, families: tuple[Family, ...], fault: Callable[[Batch], None]) -> Judged:
        """Makes a runtime that calls `fault` before each forward, which fails if `fault` raises: with PoolsLost so
        that the pools are lost."""
        ...


@dataclass(frozen=True)
class Subject:
    """Runtime that schedules run on."""

    make: MakeRuntime
    families: tuple[Family, ...] | None = None  # None: any
    takes_adapters: bool = True
    takes_images: bool = False
    log_probability_error: float | None = (
        None  # largest one allowed. None: few requests ask for probabilities
    )
    record_check: Callable[[], RecordCheck] = lambda: check_oracle_record
    is_injected: Callable[[BaseException], bool] = lambda cause: isinstance(cause, Injected)
    end: Callable[[Judged], None] = lambda runtime: None  # called when a life has ended


def _oracle(families: tuple[Family, ...], fault: Callable[[Batch], None]) -> FakeRuntime:
    return FakeRuntime(VOCAB, families=families, eos_token_ids=(EOS,), fault=fault, computes_ahead=True)


ORACLE = Subject(_oracle, takes_images=True)


@dataclass
class Outcome:
    """Counts of a schedule's events. A test checks that each of them occurred."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    failed_by_lost_pools: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    copied_blocks: int = 0
    evicted_blocks: int = 0
    duplicate_blocks: int = 0
    waited_for_prefix: int = 0
    refused: int = 0
    checkpoints_taken: int = 0
    checkpoints_hit: int = 0
    checkpoints_evicted: int = 0
    checkpoints_skipped: int = 0
    returned_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    idle_tokens: int = 0
    idle_hit_tokens: int = 0
    idle_evicted_tokens: int = 0
    accepted_hints: int = 0
    clipped_hints: int = 0
    refused_hints: int = 0
    expired_grants: int = 0
    displaced_grants: int = 0
    evicted_retained_tokens: int = 0
    pinned_prefixes: int = 0
    releases: int = 0  # of unused memory
    held_for_memory: int = 0
    held_sessions: int = 0

    def add(self, other: Outcome) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class TierOutcome(Outcome):
    """Further counts of a schedule with a tier."""

    loaded_tokens: int = 0
    loads_finished: int = 0
    loads_missed: int = 0
    loads_cancelled: int = 0
    declined: int = 0
    stored: int = 0
    refused_stores: int = 0
    records_gone: int = 0
    lives: int = 0
    verified: int = 0


@dataclass
class ScopedOutcome(Outcome):
    """Further counts of a schedule with public heads."""

    public_hits: int = 0
    private_hits: int = 0


@dataclass
class ScopedTierOutcome(TierOutcome, ScopedOutcome):
    """Counts of a schedule with public heads and a tier."""


def play(run: Callable[[int], Outcome], seeds: range, rare: Collection[str] = ()) -> Outcome:
    """Plays schedules. Asserts that each event of an outcome occurred, unless it is rare: they would prove less."""
    total: Outcome | None = None
    for seed in seeds:
        try:
            outcome = run(seed)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
        if total is None:
            total = outcome
        else:
            total.add(outcome)
    assert total is not None
    for name in total.__dataclass_fields__.keys() - set(rare):
        assert getattr(total, name) > 0, f"no schedule had any {name}"
    return total


@dataclass
class Client:
    request: Request
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed | Aborted)


# Every kind of family at once, windows shorter and longer than a block.
EVERYTHING: tuple[Family, ...] = (FULL, window(5), window(24), chunked(8), STATE)


def run_schedule(
    seed: int,
    check_every_step: bool = True,
    families: tuple[Family, ...] | None = None,
    drafts: bool = False,
    subject: Subject = ORACLE,
    outcome: Outcome | None = None,
) -> Outcome:
    """Plays the schedule of a seed, which chooses the families if none are given. With `drafts`,
    decodes verify right and wrong drafts."""
    rng = np.random.default_rng(seed)
    fault = _faults(rng, seed)
    families = families or subject.families or _families(rng)
    outcome = outcome or Outcome()
    _live(rng, seed, families, fault, outcome, [], check_every_step, drafts=drafts, subject=subject)
    return outcome


def run_scoped_schedule(
    seed: int, *, tiered: bool, subject: Subject = ORACLE, outcome: ScopedTierOutcome | None = None
) -> Outcome:
    """Plays a schedule of several tenants whose prompts begin with public heads. Asserts that no request hits, waits
    for or drafts what another tenant has computed behind a head."""
    provenance = Provenance(heads_of(SHARED, np.random.default_rng([seed, 3])))
    counted: ScopedTierOutcome | ScopedOutcome = outcome or (
        ScopedTierOutcome() if tiered else ScopedOutcome()
    )
    if tiered:
        assert isinstance(counted, ScopedTierOutcome)
        run_tiered_schedule(seed, drafts=True, outcome=counted, provenance=provenance, subject=subject)
    else:
        rng = np.random.default_rng(seed)
        families = subject.families or _families(rng)
        fault = _faults(rng, seed)
        _live(rng, seed, families, fault, counted, [], drafts=True, provenance=provenance, subject=subject)
    counted.public_hits += provenance.public_hits
    counted.private_hits += provenance.private_hits
    return counted


def run_tiered_schedule(
    seed: int,
    check_every_step: bool = True,
    families: tuple[Family, ...] | None = None,
    drafts: bool = False,
    outcome: TierOutcome | None = None,
    provenance: Provenance | None = None,
    subject: Subject = ORACLE,
    lost_share: float = LOST_SHARE,
) -> TierOutcome:
    """Plays a schedule with a tier that refuses, loses and damages records, through restarts and crashes. Requests
    after a restart continue earlier ones. `lost_share` of the forwards that fail lose the pools."""
    rng = np.random.default_rng([seed, 1])
    fault = _faults(rng, seed, lost_share)
    families = families or subject.families or _families(rng)
    failing = Failing(
        stores=float(rng.choice([0.0, 0.1])),
        loads=float(rng.choice([0.0, 0.05, 0.3])),
        disappearing=float(rng.choice([0.0, 0.05])),
        declined=float(rng.choice([0.0, 0.2])),
        overdue=float(rng.choice([0.0, 0.02])),
    )
    tier = SimulatedTier(rng, failing, subject.record_check())
    outcome = outcome or TierOutcome()
    clients: list[Client] = []
    block_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
    for _ in range(int(rng.integers(1, 4))):
        outcome.lives += 1
        clients = _live(
            rng,
            seed,
            families,
            fault,
            outcome,
            clients,
            check_every_step,
            tier,
            failing,
            block_size,
            drafts,
            provenance,
            subject,
        )
    outcome.stored += failing.stored
    outcome.refused_stores += failing.refused
    outcome.records_gone += failing.gone
    return outcome


def _live(
    rng: np.random.Generator,
    seed: int,
    families: tuple[Family, ...],
    fault: Callable[[Batch], None],
    outcome: Outcome,
    before: list[Client],
    check_every_step: bool = True,
    tier: SimulatedTier | None = None,
    failing: Failing | None = None,
    block_size: int | None = None,
    drafts: bool = False,
    provenance: Provenance | None = None,
    subject: Subject = ORACLE,
) -> list[Client]:
    """Runs one engine from its start to its end. Returns all clients up to now."""
    failed: list[Batch] = []

    def noted_fault(batch: Batch) -> None:
        try:
            fault(batch)
        except BaseException:
            failed.append(batch)
            raise

    runtime = subject.make(families, noted_fault)
    described = runtime.description
    if block_size is None:
        block_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
    blocks = int(rng.integers(max(2, 24 // block_size), 30 + 120 // block_size))
    cache_clock = Clock(-1.0)
    shares = np.random.default_rng([seed, 6])
    budget_bytes = blocks * sum(row_bytes(family, block_size) for family in families)
    rows = None if described.memory == "host" else divided_rows(families, budget_bytes, block_size)
    cache = (KVCache if provenance is None else provenance.cache())(
        families,
        budget_bytes,
        block_size,
        rows=rows,
        lazy_states=described.lazy_states,
        clock=cache_clock,
        reuse=tier is not None or bool(rng.random() < 0.95),
        stored=None if tier is None else StoredIndex(families, block_size),
        through=tier is not None and bool(rng.random() < 0.4),
        retained_share=float(shares.choice([0.2, 0.9])),
        pinned_share=float(shares.choice([0.25, 1.0])),
        announces=seed % 3 > 0,
    )
    runtime.allocate(cache.rows, block_size)
    connector = None
    if tier is not None:
        assert failing is not None
        queue_bytes = int(rng.choice([500, 5_000, 10**9]))
        connector = SimulatedTierConnector(rng, failing, runtime, cache, tier, queue_bytes)
    config = EngineConfig(
        max_batch=int(rng.integers(1, 9)),
        chunk_tokens=int(rng.integers(1, 40)),
        max_queue=int(rng.integers(4, 20)),
        context_limit=max(2, blocks * block_size),  # also for models without a limit of their own
        seed=seed,
        draft_tokens=None if drafts else 0,
        idle_work=seed // 3 % 2 == 0,
        max_session_wait_s=float(shares.choice([0.0, 3.0, 50.0, 86_400.0])),
    )
    verify_hits = 0.0 if tier is None else float(rng.choice([0.0, 0.5]))
    clock = itertools.count(0.0).__next__  # every forward takes as long, so that every draft pays
    if drafts and isinstance(runtime, FakeRuntime):
        runtime.draft_heads = OracleHeads(seed, runtime)
    guesses = Guesses(seed, runtime, catches_up=lambda: cache.reuse and not failed)
    engine = Engine(
        runtime,
        cache,
        config,
        clock=clock,
        tier_connector=connector,
        verify_hits=verify_hits,
        proposer=guesses if seed % 4 < 3 else None,
        memory_watch=_scarce_memory(seed) if seed % 5 < 2 else None,
    )
    guesses.limit = engine.context_limit
    if isinstance(heads := engine.parts.proposer, HeadProposer):
        heads._cost.relative = lambda sequences, seconds: 0.0  # type: ignore[method-assign]
    if subject.takes_adapters:
        runtime.adapters.add(ADAPTER)
        engine.adapters.add(
            NamedAdapter(ADAPTER, Path(), LoadedAdapter(ADAPTER, modules=1, rank=1, nbytes=0))
        )
    if provenance is not None:
        engine.public_heads = provenance.heads
    pinning = Pinning(seed, cache, engine)
    listener = BlockListener(block_size)
    clients: list[Client] = []
    idle_rng = np.random.default_rng([seed, 2])
    to_come = int(rng.integers(3, 16))
    while to_come or engine.scheduler.has_work:
        action = rng.random()
        if to_come and (action < 0.4 or not engine.scheduler.has_work):
            to_come -= 1
            salts = ("", "", "", "tenant") if provenance is None else SALTS
            with_images = subject.takes_images and seed % 3 == 1
            others = [*before, *clients]
            request = _request(rng, others, engine.context_limit, salts, with_images=with_images)
            if subject.takes_adapters and provenance is None and (request.sampling.seed or 0) % 5 == 0:
                request = replace(request, adapter=ADAPTER)
            if subject.log_probability_error is not None:
                request = replace(request, sampling=replace(request.sampling, top_logprobs=2))
            client = Client(request)
            _warm(idle_rng, engine, [client])
            _work_while_idle(idle_rng, engine)
            try:
                engine.submit(client.request, client.events.append)
                clients.append(client)
            except RootstockError:
                outcome.refused += 1
        elif action < 0.42 and clients:
            engine.abort(clients[int(rng.integers(len(clients)))].request.id)
        elif action < 0.43:
            engine.clear_cache()
        elif action < 0.435:
            engine.clear_cache("tenant")
        elif action < 0.44 and provenance is not None:
            engine.clear(Clearing(public=True))
        pinning.act(clients, cache_clock)
        engine.step()
        _warm(idle_rng, engine, [*before, *clients])
        _work_while_idle(idle_rng, engine)
        if connector is not None:
            connector.run()
            verifier = engine.parts.hit_verifier
            while verifier and verifier.has_work and not engine.scheduler.has_work and rng.random() < 0.8:
                engine.work_idly()
        outcome.waited_for_prefix += sum(
            type(s.state).__name__ == "WaitingForPrefix" for s in engine.scheduler.sequences()
        )
        # Rows that are divided among the families are two of each at least, however small the budget is.
        taken_at_most = cache.budget_bytes if rows is None else max(cache.budget_bytes, _bytes_of(cache))
        assert cache.pools.backed_bytes <= taken_at_most, "more memory is taken than the budget allows"
        if provenance is not None:
            provenance.judge_waiting(engine)
        _hear(listener, cache)
        if check_every_step:
            cache.check()
            engine.scheduler.check()
    for client in clients:
        _judge(client, runtime, outcome, engine.context_limit, subject)
    engine.parts.idle_work.pause()
    if connector is not None:
        if engine.parts.hit_verifier is not None:
            engine.parts.hit_verifier.pause()
            engine.parts.hit_verifier.restart()
            assert not engine.parts.hit_verifier.counts["differs"], "a false alarm"
            outcome.verified += engine.parts.hit_verifier.counts["agrees"]
        connector.reader.drain()  # loads for requests that are gone
        engine.step()
        assert not connector.loading
    if engine.parts.idle_prefills is not None:
        engine.parts.idle_prefills.close()
        assert not engine.parts.idle_prefills.waiting
    pinning.end()
    outcome.pinned_prefixes += pinning.pinned
    of_sessions = engine.stats().sessions
    if of_sessions is not None:
        assert of_sessions.held == 0
        outcome.held_sessions += sum(of_sessions.admitted.values())
    outcome.held_for_memory += engine.scheduler.requests_held_for_memory
    stats = cache.stats()
    assert stats.live_blocks == 0, "blocks are in use when nothing runs"
    assert stats.leases == 0
    assert stats.hit_tokens + stats.missed_tokens == stats.asked_tokens
    for source in (engine.stats().counters, stats, runtime):
        for name in Outcome.__dataclass_fields__.keys() & set(dir(source)):
            setattr(outcome, name, getattr(outcome, name) + getattr(source, name))
    assert stats.checkpoints_refused == 0
    assert all(family.live_rows == 0 for family in stats.families)
    if connector is not None:
        assert isinstance(outcome, TierOutcome)
        outcome.loaded_tokens += stats.loaded_tokens
        outcome.loads_finished += connector.counters.loads["loaded"]
        outcome.loads_missed += connector.counters.loads["missed"]
        outcome.loads_cancelled += connector.counters.loads["cancelled"]
        outcome.declined += connector.counters.choices["recompute"]
        if rng.random() < 0.5:
            engine.stop()  # writes memory's blocks to the tier; otherwise it is a crash
    cache.clear()
    cache.check()
    _hear(listener, cache)
    assert not any(listener.groups.values()), "blocks are announced that are gone"
    assert cache.pools.owned_bytes == 0, "rows were lost"
    assert cache.pool.free_blocks == cache.pool.total_blocks, "blocks were lost"
    subject.end(runtime)
    return [*before, *clients]


def _hear(listener: BlockListener, cache: KVCache) -> None:
    """Announces the changes since the last call, and compares all that the listener knows with the cache's set."""
    resumable = cache.tree.resumable
    if resumable is None:
        return
    listener.hear(resumable.take())
    for group, keys in listener.groups.items():
        assert keys == resumable.keys(group)
    late = BlockListener(listener.block_size)
    late.hear(resumable.all(cache.tree.nodes()))
    assert {group: keys for group, keys in listener.groups.items() if keys} == late.groups


def _bytes_of(cache: KVCache) -> int:
    """Returns the bytes of all rows of all pools."""
    return sum(pool.pool.total_blocks * pool.row_bytes for pool in cache.pools.every)


def _scarce_memory(seed: int) -> MemoryWatch:
    """Returns a watch over a process whose footprint goes up and down at random, around its limit."""
    rng = np.random.default_rng([seed, 7])
    footprint = 900

    def measure() -> int:
        nonlocal footprint
        footprint = int(np.clip(footprint + rng.integers(-150, 151), 700, 1100))
        return footprint

    return MemoryWatch(1000, measure, lambda: None, itertools.count(0.0, 0.5).__next__)


def _warm(rng: np.random.Generator, engine: Engine, clients: Listed[Client]) -> None:
    """Asks at times for idle work on the prompt of a request, whole or in part, or with other tokens at its end."""
    if engine.parts.idle_prefills is None or not clients or rng.random() < 0.7:
        return
    of = clients[int(rng.integers(len(clients)))].request
    tokens = of.tokens[: int(rng.integers(1, len(of.tokens) + 1))]
    if rng.random() < 0.5:
        tokens = np.concatenate((tokens, rng.integers(0, VOCAB, int(rng.integers(1, 30)), np.int32)))
    boundaries = tuple(each for each in of.boundaries if each.position <= len(tokens))
    kind = list(IdleKind)[int(rng.integers(len(IdleKind)))]
    owner = None if rng.random() < 0.5 else "owner"
    with contextlib.suppress(RootstockError):
        engine.prefill_in_idle_time(IdlePrefill(kind, tokens, of.salt, owner, boundaries))


def _work_while_idle(rng: np.random.Generator, engine: Engine) -> None:
    """Does some idle work, unless a request is in the engine."""
    if engine.parts.idle_prefills is None or engine.scheduler.has_work:
        return
    engine.step()  # the commands that queue it
    while engine.parts.idle_prefills.has_work and rng.random() < 0.9:
        engine.work_idly()


class Guesses(Proposer):
    """Proposer of right, wrong and partly right drafts, also beyond the end of the answer. A seed gives always the
    same."""

    def __init__(self, seed: int, runtime: Judged, *, catches_up: Callable[[], bool]) -> None:
        """`catches_up`: tokens of a state that a wrong last draft has left out are always computed again."""
        self.limit = 0  # of a request's tokens: set when the engine is there
        self._catches_up = catches_up
        self._runtime = runtime
        self._rng = np.random.default_rng([seed, 2])
        self._answers: dict[RequestId, list[int]] = {}

    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        drafts = []
        for sequence in sequences:
            draft = self._draft(sequence)[:room]
            room -= len(draft)
            drafts.append(draft)
        return drafts

    def _draft(self, sequence: Sequence) -> Tokens:
        kind, most = self._rng.random(), int(self._rng.integers(0, 14))
        draft = self._rng.integers(0, VOCAB, most).astype(np.int32)
        if kind < 0.3:
            return draft
        request = sequence.request
        if request.id not in self._answers:
            alone, _ = answer_alone(request, self._runtime, self.limit)
            self._answers[request.id] = [sampled.token for sampled in alone]
        right = self._answers[request.id][len(sequence.generated) :][:most]
        if kind < 0.65:
            right = right[: int(self._rng.integers(0, most + 1))]
        draft[: len(right)] = right
        return draft

    def completed(self, sequence: Sequence, lease: Lease) -> None:
        known = len(sequence.request.tokens) + max(0, len(sequence.generated) - 1)
        assert len(lease.tokens) == known or (lease.slot != NO_SLOT and not self._catches_up())


class OracleHeads:
    """Heads that write to the rows behind the known tokens, as real ones do, and guess."""

    def __init__(self, seed: int, runtime: FakeRuntime) -> None:
        self._rng = np.random.default_rng([seed, 3])
        self._runtime = runtime

    def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        for segment in batch.segments:
            assert len(segment.tokens) == 1
            for pool, blocks in zip(self._runtime._pools, segment.tables, strict=True):
                size = pool.block_size
                assert segment.past + most <= len(blocks) * size, "a head has no row for its draft"
                if isinstance(pool.family, FullAttention):
                    for position in range(segment.past, segment.past + most):
                        pool.hashes[blocks[position // size], position % size] = 54321
        shape = len(batch.segments), most
        return self._rng.integers(0, VOCAB, shape).astype(np.int32), np.full(shape, 0.9, np.float32)


def _faults(rng: np.random.Generator, seed: int, lost_share: float = LOST_SHARE) -> Callable[[Batch], None]:
    """Draws how often forwards fail: never in two thirds of the schedules. Some failures lose the pools."""
    fail_rate = float(rng.choice([0.0, 0.0, 0.03]))
    losses = np.random.default_rng([seed, 8])

    def fault(batch: Batch) -> None:
        for segment in batch.segments:
            end = segment.past + len(segment.tokens)
            assert chunk_end(segment.images, segment.past, end) == end, "a chunk ends inside an image"
        if fail_rate and rng.random() < fail_rate:
            raise PoolsLost(Injected()) if losses.random() < lost_share else Injected

    return fault


def _families(rng: np.random.Generator) -> tuple[Family, ...]:
    """Draws full attention alone for a third of the schedules, otherwise any mixture of families."""
    kind = rng.random()
    if kind < 0.34:
        return (FULL,)
    families: list[Family] = [FULL] if rng.random() < 0.75 else []
    if rng.random() < 0.6:
        families.append(window(int(rng.choice([1, 2, 5, 7, 16, 40]))))
    if rng.random() < 0.2:
        families.append(window(3))
    if rng.random() < 0.3 and families:
        families.append(chunked(int(rng.choice([2, 8, 12]))))
    remembers = FULL in families or any(isinstance(f, SlidingWindow) and f.window > 1 for f in families)
    if rng.random() < 0.6 or not remembers:  # the oracle needs one that has the position before
        families.append(STATE)
    return tuple(dict.fromkeys(families))


def _request(
    rng: np.random.Generator,
    clients: list[Client],
    limit: int,
    salts: Listed[str] = ("",),
    *,
    with_images: bool = False,
) -> Request:
    shared = SHARED
    kind = rng.random()
    if kind < 0.45 or not clients:
        head = shared[: rng.integers(0, min(60, limit))]
    else:  # another's prompt and answer, whole or cut somewhere
        other = clients[int(rng.integers(len(clients)))]
        head = np.concatenate((other.request.tokens, np.array(other.tokens, np.int64)))
        if rng.random() < 0.5:
            head = head[: rng.integers(0, len(head) + 1)]
    tail = rng.integers(0, VOCAB, rng.integers(0 if len(head) else 1, 12))
    tokens: Tokens = np.concatenate((head, tail)).astype(np.int32)
    tokens = tokens[: max(1, limit - 1)]
    room, number = limit - len(tokens), int(rng.integers(10**9))
    images: tuple[PlacedImage, ...] = ()
    if with_images:
        tokens, images = _with_images(np.random.default_rng([number, 9]), tokens, clients, limit)
        room = limit - len(tokens)
    return Request(
        id=RequestId(f"r{len(clients)}-{number}"),
        tokens=tokens,
        sampling=ResolvedSampling(
            temperature=float(rng.choice([0.0, 0.0, 1.0])),
            seed=int(rng.integers(1000)),
            top_logprobs=None if rng.random() < 0.9 else 2,
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
        ),
        stop=StopParams(
            max_tokens=min(room, int(rng.integers(0, 25))) if rng.random() < 0.9 else None,
            stop_tokens=(3,) if rng.random() < 0.2 else (),
            ignore_eos=bool(rng.random() < 0.7),
        ),
        salt=str(rng.choice(salts)),
        boundaries=tuple(
            Boundary(int(at), CheckpointKind(str(rng.choice(["system", "user", "tool"]))))
            for at in np.unique(rng.integers(1, len(tokens) + 1, int(rng.integers(0, 4))))
        ),
        prompt_logprobs=1 if rng.random() < 0.08 and not images else None,
        images=images,
        hints=_hints(np.random.default_rng([number, 3]), len(tokens)),
    )


def _with_images(
    rng: np.random.Generator, tokens: Tokens, clients: list[Client], limit: int
) -> tuple[Tokens, tuple[PlacedImage, ...]]:
    """Puts images into a prompt, or takes another prompt with images and goes on behind one of them."""
    # The prompt may go on with another one, whose images are cut.
    tokens = np.where(tokens < VOCAB, tokens, 0)
    images: list[PlacedImage] = []
    seen = [client.request for client in clients if client.request.images]
    if seen and rng.random() < 0.5:
        other = seen[int(rng.integers(len(seen)))]
        images = list(other.images[: int(rng.integers(1, len(other.images) + 1))])
        after = int(rng.integers(images[-1].end, len(other.tokens) + 1))
        after = min([after, *(image.start for image in other.images[len(images) :])])
        tokens = np.concatenate((other.tokens[:after], tokens[: int(rng.integers(1, 12))]))
    while len(images) < 3 and rng.random() < 0.6:
        layout = IMAGES[int(rng.integers(len(IMAGES)))]
        at = int(rng.integers(images[-1].end if images else 0, len(tokens) + 1))
        shown = np.zeros(layout.span, np.int32)
        shown[layout.offsets] = layout.tokens()
        tokens = np.concatenate((tokens[:at], shown, tokens[at:]))
        images.append(PlacedImage(layout, b"", at))
    if len(tokens) >= limit:
        tokens = tokens[: min([limit - 1, *(image.start for image in images if image.end >= limit)])]
    if not len(tokens):
        tokens = np.zeros(1, np.int32)
    return tokens.astype(np.int32), tuple(image for image in images if image.end <= len(tokens))


def _hints(rng: np.random.Generator, prompt_tokens: int) -> CacheHints | None:
    """Draws hints for half of the requests, senseless ones included."""
    if rng.random() < 0.5:
        return None
    retentions = tuple(
        RetentionWish(
            f"field{number}",
            None if rng.random() < 0.5 else int(rng.integers(0, prompt_tokens + 3)),
            None if rng.random() < 0.3 else float(rng.choice([-1.0, 20.0, 200.0, 1e9])),
            int(rng.choice([-200, -3, 0, 0, 0, 2, 7])),
        )
        for number in range(int(rng.integers(0, 4)))
    )
    session = None if rng.random() < 0.5 else str(rng.integers(3))
    tenant = str(rng.choice(["", "a", "b"]))
    ends_session = bool(rng.random() < 0.2)
    acts = tuple(
        PrefixAct(
            f"act{number}",
            ActKind(str(rng.choice(list(ActKind)))),
            None if rng.random() < 0.1 else int(rng.choice([0, 0, 1, 7])),
            None if rng.random() < 0.5 else int(rng.integers(0, prompt_tokens + 3)),
            None if rng.random() < 0.7 else str(rng.integers(3)),
        )
        for number in range(int(rng.choice([0, 0, 1, 3])))
    )
    return CacheHints(
        tenant, session, "session", ends_session, retentions, acts, may_pin=bool(rng.random() < 0.5)
    )


class Pinning:
    """Pins and releases of a schedule, and the jumps of its clock."""

    def __init__(self, seed: int, cache: KVCache, engine: Engine) -> None:
        self._rng = np.random.default_rng([seed, 7])
        self._cache = cache
        self._engine = engine
        self.pinned = 0

    def act(self, clients: Listed[Client], clock: Clock) -> None:
        kind = self._rng.random()
        if kind < 0.05:
            clock.now += float(self._rng.choice([50.0, 500.0]))
        elif kind < 0.1 and clients:
            tokens = clients[int(self._rng.integers(len(clients)))].request.tokens
            tokens = tokens[: int(self._rng.integers(1, len(tokens) + 1))]
            salt = str(self._rng.choice(["", "tenant"]))
            pinned = self._engine.pin(tokens, str(self._rng.choice(["", "a"])), self._engine.namespace(salt))
            self.pinned += isinstance(pinned, Pinned)
        elif kind < 0.15 and clients:
            tokens = clients[int(self._rng.integers(len(clients)))].request.tokens
            hints = _hints(self._rng, len(tokens))
            if hints is not None:
                self._engine.apply_hints(
                    tokens, hints, self._engine.namespace(self._rng.choice(["", "tenant"]))
                )
        elif kind < 0.17 and (pins := self._engine.pins()):
            assert self._engine.release_pin(pins[int(self._rng.integers(len(pins)))].id)

    def end(self) -> None:
        for pin in self._cache.pins():
            assert self._cache.release_pin(pin.id)


@dataclass
class Clock:
    """A clock that passes by one at each reading."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def answer_alone(
    request: Request, runtime: Judged, limit: int, given: Listed[int] = (), whole: bool = True
) -> tuple[list[SampledToken], str]:
    """Returns the tokens and the reason of the end that a request gets without a cache, a batch or a pool.

    `given`: the tokens that it was given. The logits behind them are computed at once, and are used as long as the
    tokens are the right ones. Without `whole` the answer ends behind as many tokens.
    """
    eos = () if request.stop.ignore_eos else runtime.description.eos_token_ids
    ends = {*eos, *request.stop.stop_tokens}
    assert request.sampling.seed is not None
    sampler = Sampler(request.sampling, request.tokens, VOCAB, request.sampling.seed, tuple(ends))
    tokens = request.tokens.tolist()
    known = np.array([*tokens, *given], np.int32)
    rows = runtime.expected_rows(known, len(tokens), request.adapter) if given else ()
    room = limit - len(tokens) if request.stop.max_tokens is None else request.stop.max_tokens
    if not whole:
        room = min(room, len(given))
    alone: list[SampledToken] = []
    while len(alone) < room:
        if len(alone) < len(rows) and tokens == known[: len(tokens)].tolist():
            logits = rows[len(alone)]
        else:
            logits = runtime.expected_logits(np.array(tokens, np.int32), request.adapter)
        sampled = sampler.sample(logits)
        tokens.append(sampled.token)
        if sampled.token in ends:
            return alone, "stop"
        alone.append(sampled)
    return alone, "length"


def _judge(client: Client, runtime: Judged, outcome: Outcome, limit: int, subject: Subject) -> None:
    request, events = client.request, client.events
    outcome.requests += 1
    assert client.ended, f"{request.id} has no terminal event"
    assert sum(isinstance(event, Finished | Failed | Aborted) for event in events) == 1
    finished = isinstance(events[-1], Finished)
    sampled, reason = answer_alone(request, runtime, limit, client.tokens, whole=finished)
    alone = [each.token for each in sampled]
    assert client.tokens == alone[: len(client.tokens)], f"{request.id} was given other tokens than alone"
    given = [event.logprob for event in events if isinstance(event, TokenEvent)]
    for ours, own in zip(given, sampled, strict=False):
        assert (ours is None) == (own.logprob is None)
        if ours is not None and own.logprob is not None:
            assert math.isclose(
                ours.logprob, own.logprob.logprob, abs_tol=subject.log_probability_error or 0.0
            ), f"{request.id} was given other probabilities than alone"
    match events[-1]:
        case Finished() as end:
            outcome.finished += 1
            assert client.tokens == alone
            assert end.reason == reason
            assert end.usage.prompt_tokens == len(request.tokens)
            assert 0 <= end.usage.cached_tokens < len(request.tokens)
            hints = request.hints
            hinted = 0 if hints is None else len(hints.retentions) + (hints.session is not None)
            acts = 0 if hints is None else len(hints.acts)
            assert len(end.hints) == hinted + acts
            if client.tokens:
                first = next(event for event in events if isinstance(event, TokenEvent))
                assert first.hints == end.hints[:hinted]
            scored = [event for event in events if isinstance(event, PromptScored)]
            assert len(scored) == (request.prompt_logprobs is not None)
            for event in scored:
                assert [s.token for s in event.logprobs] == request.tokens[1:].tolist()
        case Aborted():
            outcome.aborted += 1
        case Failed(_, error):
            outcome.failed += 1
            outcome.failed_by_lost_pools += isinstance(error, PoolsLost)
            assert isinstance(error, StepFailed | PoolsLost), repr(error) + repr(error.__cause__)
            assert subject.is_injected(error.cause), f"{request.id} failed for another reason: {error}"
