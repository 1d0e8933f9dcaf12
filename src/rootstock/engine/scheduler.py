"""The scheduler: plans decodes, chunks of prefills, loads, admissions and preemption of each step.

It touches no tensor and no clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rootstock.cache.explain import LoadChoice
from rootstock.cache.image_tokens import chunk_end
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Admitted, Deferred, Lease, Match, ReleaseReason
from rootstock.cache.plan import NOTHING, together
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import NO_SLOT, NO_TOKENS, Tokens
from rootstock.engine.cost_model import StepSize, attended_positions
from rootstock.engine.sequence import (
    Decoding,
    Ended,
    Held,
    Loading,
    Phase,
    Preempted,
    Prefilling,
    Sequence,
    Waiting,
    WaitingForPrefix,
)
from rootstock.engine.tenant_turns import TenantTurns
from rootstock.errors import OutOfBlocks, RootstockError, SessionsFull
from rootstock.runtime.base import Segment

PROTECTED_REQUESTS = 16  # the first requests of the queue protect the entries that they would hit
CREDIT_STEPS = 64  # whole steps that a tenant has at once when it comes back with a long prompt
# Part of a step's tokens that prefills may have while the process is over its memory limit, and its least size.
SCARCE_SHARE, LEAST_SCARCE_TOKENS = 8, 32


class Pace(Protocol):
    """Limit of the prefill in steps with decodes."""

    def prefill_tokens(self, step: StepSize, past: int, most: int) -> int:
        """Returns how many prompt tokens, at most `most`, may be added to a step with decodes.

        The prompt is computed up to position `past`.
        """
        ...


class DraftSource(Protocol):
    """Source of drafts. A wrong draft costs time and never changes an answer."""

    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        """Proposes a draft for each of these decoding sequences, at most `room` tokens together."""
        ...

    def completed(self, sequence: Sequence, lease: Lease) -> None:
        """Learns from a complete sequence, whose lease has all its tokens."""
        ...


class LoadSource(Protocol):
    """Tiers from which prefixes are loaded."""

    @property
    def loading(self) -> int: ...  # loads in flight, also for ended requests

    @property
    def next_overdue_s(self) -> float | None: ...  # seconds until a load is overdue; None: no load can be

    def choose(self, match: Match) -> tuple[TierHit | None, LoadChoice | None]:
        """Decides whether to load the deeper prefix that a tier holds; None: there is none."""
        ...


class Gate(Protocol):
    """Gate that holds requests whose sessions have no place in memory."""

    @property
    def held(self) -> Mapping[Sequence, object]: ...  # always the same object

    def holds(self, sequence: Sequence, match: Match, now: float) -> bool:
        """Decides whether to hold a request, while others run. Raises SessionsFull."""
        ...

    def admit(self, now: float, *, is_idle: bool, earliest_waiting: int | None) -> list[Sequence]:
        """Takes out the requests that are held no longer: at least one if nothing else runs or waits."""
        ...

    def entered(self, sequence: Sequence) -> None:
        """Notes that the cache has admitted a request that was held."""
        ...

    def remove(self, sequence: Sequence) -> None: ...
    def clear(self) -> None: ...


class NoTiers:
    """No tiers: nothing is loaded."""

    loading = 0
    next_overdue_s = None

    def choose(self, match: Match) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence in a step, and the tokens that the step computes: the next ones after its computed tokens.

    The last `drafts` tokens are draft tokens. With a recurrent state, `is_forked` tells that the forward advances a
    copy of it: if a draft token turns out wrong, nothing of the step is committed, and the next one computes the
    tokens before it again, without a draft.
    """

    sequence: Sequence
    lease: Lease
    tokens: Tokens  # [new]
    drafts: int = 0
    is_forked: bool = False

    @property
    def decodes(self) -> bool:
        return isinstance(self.sequence.state, Decoding)

    @property
    def computes_last_token(self) -> bool:
        """True if this forward computes the last known token, so that the next one can be sampled."""
        return self.lease.num_computed_tokens + len(self.tokens) >= self.lease.num_tokens

    @property
    def logits_to_keep(self) -> int:
        """Number of last rows that need logits.

        Scoring a prompt needs all rows. Sampling a token needs one row, and one for each draft token.
        """
        if not self.sequence.prompt_scored:
            return len(self.tokens)
        return 1 + self.drafts if self.computes_last_token and self.sequence.max_tokens > 0 else 0

    def segment(self) -> Segment:
        """Returns the runtime's view of this sequence."""
        lease = self.lease
        return Segment(
            self.tokens,
            lease.num_computed_tokens,
            lease.tables,
            self.logits_to_keep,
            lease.draft_slot if self.is_forked else lease.slot,
            lease.scope.namespace.adapter,
            self.sequence.request.images,
            lease.id,
        )

    @property
    def takes_most_likely(self) -> bool:
        """True if the next step computes the most likely token behind the last one, unless that ends the answer."""
        sequence = self.sequence
        samples = self.computes_last_token and not self.drafts and sequence.sampler.takes_most_likely
        return samples and sequence.tokens_left > 1

    def following(self) -> Segment:
        """Returns the segment behind this one, whose token is not known yet. The lease has rows for it."""
        segment, past = self.segment(), self.lease.num_computed_tokens + len(self.tokens)
        return replace(segment, tokens=NO_TOKENS, past=past, logits_to_keep=1)

    def row(self, index: int) -> ScheduledSequence:
        """Returns one token of a decode with drafts, as if it had a step of its own. With a copied state, the last
        row has all tokens, and the others have none to commit."""
        if not self.is_forked:
            return ScheduledSequence(self.sequence, self.lease, self.tokens[index : index + 1])
        is_last = index == self.drafts
        return ScheduledSequence(
            self.sequence, self.lease, self.tokens if is_last else NO_TOKENS, is_forked=is_last
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step: the sequences of its forward, loads to begin before it, and requests that cannot run.

    Every block that the forward writes is reserved.
    """

    scheduled: list[ScheduledSequence]
    to_load: list[Sequence]  # admitted in this step. Execute their plans before their loads begin.
    given_up: list[tuple[Sequence, RootstockError]]
    following: dict[int, Segment]  # of the next step, for a runtime that computes ahead (`Batch`)

    def size(self) -> StepSize:
        """Counts the work of the forward, for the cost model. Call it before the forward."""
        return size_of(self.scheduled)


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    now: float
    budget: int = 0  # tokens that prefills may still add
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    to_load: list[Sequence] = field(default_factory=list)
    given_up: list[tuple[Sequence, RootstockError]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(item.tokens) for item in self.scheduled)

    def without_preempted(self) -> None:
        """Drops sequences that were preempted after they were scheduled."""
        self.scheduled = [item for item in self.scheduled if item.sequence.lease is item.lease]


class Scheduler:
    """The waiting queue, the running sequences, and the plan of each next step."""

    def __init__(
        self,
        cache: KVCache,
        max_batch: int,
        chunk_tokens: int,
        tiers: LoadSource | None = None,
        pace: Pace | None = None,
        proposer: DraftSource | None = None,
        idle_chunk_tokens: int | None = None,
        scored_chunk_tokens: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        """A step computes `chunk_tokens`, or up to `idle_chunk_tokens` if nothing decodes.

        `scored_chunk_tokens` bounds the tokens of prompts whose log-probabilities are wanted. `pace` bounds the
        prefill of a step with decodes. Without a `proposer` a decode is one token. Without a `gate` no session waits
        for another.
        """
        self._cache = cache
        self._gate = gate
        self._held: Mapping[Sequence, object] = {} if gate is None else gate.held
        self._proposer = proposer
        self.tiers = tiers or NoTiers()
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._idle_chunk_tokens = idle_chunk_tokens or chunk_tokens
        self._scored_chunk_tokens = min(chunk_tokens, scored_chunk_tokens or chunk_tokens)
        self._pace = pace
        self._others_decode: Callable[[], bool] = lambda: False
        self.explains_misses_of: int | None = None  # tokens; None: only requests that ask are explained
        self.paced_tokens: int | None = None  # prompt tokens that the last step with decodes had room for
        self.looks_ahead = False  # True: the runtime computes segments of the next step, too
        self.admits_one_by_one = (
            False  # True: memory is scarce, and no request is admitted while another runs
        )
        self.requests_held_for_memory = 0  # requests that have waited because memory was scarce
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._tenants = set[str]()  # of all requests; until the next step also of those that have ended
        self._turns = TenantTurns(CREDIT_STEPS * chunk_tokens)
        self._alone = "", 0  # the only tenant with requests, and the tokens that were computed for it since

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def running(self) -> int:
        return len(self._running)

    def phases(self) -> dict[Phase, int]:
        """Counts the requests by their phase."""
        counts = dict.fromkeys(Phase, 0)
        for sequence in self.sequences():
            counts[sequence.phase] += 1
        return counts

    def adapters(self) -> tuple[Counter[str], Counter[str]]:
        """Counts the requests of each LoRA adapter, by its fingerprint: running ones, and waiting ones."""
        running, waiting = Counter[str](), Counter[str]()
        for sequence in self.sequences():
            if sequence.request.adapter:
                counts = running if sequence.phase in (Phase.PREFILL, Phase.DECODE) else waiting
                counts[sequence.request.adapter] += 1
        return running, waiting

    @property
    def decodes(self) -> bool:
        return any(isinstance(sequence.state, Decoding) for sequence in self._running)

    def share_device(self, others_decode: Callable[[], bool]) -> None:
        """Makes steps short while another model of the device decodes, which `others_decode` reports."""
        self._others_decode = others_decode

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._held)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting
        yield from self._held

    # ------------------------------------------------------------------------------------------------ a step

    def schedule(self, now: float) -> StepPlan:
        """Plans the next step, in this order:

        1. Decodes: one token for each decoding sequence.
        2. Running prefills, first come first served, each the next chunk within the token budget. While a long one
           runs, prompts with few tokens left may have half of the budget before it: most turns of agents are short.
        3. Admissions from the queue, first come first served, while the batch and the budget have room. A request
           waits if a running one is computing more of its prefix. It is loaded if a tier holds more of its prefix
           and loading is faster than computing. Otherwise its first chunk is computed in this step.
        4. Drafts for the decodes, from the rest of the budget.

        While several tenants have requests, steps 2 and 3 serve those of one tenant after the other (`TenantTurns`).

        Steps 1 and 2 preempt when a sequence gets no block: the running sequence with the least progress goes back
        to the head of the queue, until the block is there or the sequence itself was preempted. The last running
        sequence is given up instead. Admissions and drafts never preempt.
        """
        step = _Step(now)
        if len(self._tenants) > 1:
            self._tenants, self._alone = self._turns.begin(self.sequences(), *self._alone), ("", 0)
        if self._held:
            self._admit_held(now)
        # Before an eviction takes them: the only request is admitted before anything else can evict.
        is_alone = not self._running and len(self._waiting) == 1
        if not is_alone:
            self._protect_hits_of_queued()
        self._schedule_decodes(step)
        self._schedule_short_prompts(step)
        self._serve_prompts(step)
        if is_alone:
            self._protect_hits_of_queued()  # for as long as it waits
        step.scheduled = [_up_to_checkpoint(item) for item in step.scheduled]
        self._add_drafts(step, self._chunk_tokens - self._counted(step))
        following = self._following(step) if self.looks_ahead else {}
        return StepPlan(step.scheduled, step.to_load, step.given_up, following)

    def _following(self, step: _Step) -> dict[int, Segment]:
        """Returns the next step's segments that are known but for their token, with rows that no sequence needs."""
        watermark = len(self._running)
        return {
            number: item.following()
            for number, item in enumerate(step.scheduled)
            if item.takes_most_likely and not self._extend_fails(item.lease, len(item.tokens) + 1, watermark)
        }

    def _counted(self, step: _Step) -> int:
        """Counts the tokens of a step for the turns of tenants, and returns how many there are."""
        tokens = step.tokens
        if len(self._tenants) > 1:
            for item in step.scheduled:
                self._turns.served(item.sequence, len(item.tokens))
        else:
            self._alone = next(iter(self._tenants), ""), self._alone[1] + tokens
        return tokens

    def _serve_prompts(self, step: _Step, most_left: int | None = None) -> None:
        """Schedules running prefills and admits requests, of one tenant after the other.

        With `most_left`, only those that have at most so many tokens left, and of the queue's first requests.
        """
        most = None if most_left is None else PROTECTED_REQUESTS
        if len(self._tenants) < 2:
            self._schedule_prefills(step, self._running, most_left)
            self._admit(step, itertools.islice(self._waiting, most), most_left)
            return
        waiting = self._turns.in_turn(self._waiting)[:most]
        admits = True
        for running, of_tenant in self._turns.grouped(self._running, waiting):
            self._schedule_prefills(step, running, most_left)
            admits = admits and self._admit(step, of_tenant, most_left)
            if step.budget <= 0:
                break

    def _protect_hits_of_queued(self) -> None:
        """Protects the entries that the first queued requests would hit, and again after each change of the cache."""
        waiting = self._waiting if len(self._tenants) < 2 else self._turns.in_turn(self._waiting)
        for sequence in itertools.islice(waiting, PROTECTED_REQUESTS):
            if sequence.prompt_scored and not self._cache.is_current(sequence.hit_protection):
                self._unprotect_hit(sequence)
                sequence.hit_protection = self._cache.protect(self._match(sequence))

    def _unprotect_hit(self, sequence: Sequence) -> None:
        if sequence.hit_protection is not None:
            self._cache.unprotect(sequence.hit_protection)
            sequence.hit_protection = None

    def _schedule_decodes(self, step: _Step) -> None:
        for sequence in list(self._running):
            state = sequence.state  # an earlier sequence may have preempted this one
            if not isinstance(state, Decoding):
                continue
            new = sequence.uncomputed(state.lease)
            if self._reserve(step, sequence, state.lease, len(new)):
                step.scheduled.append(ScheduledSequence(sequence, state.lease, new))
        step.without_preempted()
        decodes = step.tokens
        budget = self._chunk_tokens if decodes or self._others_decode() else self._idle_chunk_tokens
        step.budget = budget - decodes
        if self.admits_one_by_one:
            step.budget = min(step.budget, max(LEAST_SCARCE_TOKENS, self._chunk_tokens // SCARCE_SHARE))
        if decodes and self._pace is not None:
            self.paced_tokens = self._paced(step, 0)

    def _schedule_short_prompts(self, step: _Step) -> None:
        """Schedules prompts that half of the budget computes to their end, if another one would take all of it."""
        if not (self._waiting or len(self._running) > 1):
            return
        prefills = [each.state for each in self._running if isinstance(each.state, Prefilling)]
        if not prefills:
            return
        budget, room, planned = step.budget, min(step.budget, self._paced(step, 0)), step.tokens
        if all(_left(each.lease) <= room for each in prefills):
            return
        step.budget = room // 2
        self._serve_prompts(step, room // 2)
        step.budget = budget - (step.tokens - planned)
        self._end_with_first_token(step)

    def _schedule_prefills(self, step: _Step, running: Iterable[Sequence], most_left: int | None) -> None:
        """Schedules the prefills of these, or those that have at most `most_left` tokens left."""
        done = {item.sequence for item in step.scheduled}
        for sequence in list(running):
            # An earlier sequence may have preempted this one.
            if not isinstance(sequence.state, Prefilling) or step.budget <= 0 or sequence in done:
                continue
            if most_left is None or _left(sequence.state.lease) <= most_left:
                self._prefill(step, sequence, sequence.state.lease)
        step.without_preempted()

    def _prefill(self, step: _Step, sequence: Sequence, lease: Lease, at_least: int = 0) -> None:
        """Schedules the next chunk of a prompt, up to the next checkpoint position, and takes it off the budget.

        Scored prompts have at most `scored_chunk_tokens` in a step, because they keep the logits of every token.
        Admission reserved the prompt's blocks, but the blocks of a window are reserved chunk by chunk. A chunk that
        does not fit is halved before another sequence is preempted for it.
        """
        new = self._chunk(step, sequence, lease, at_least)
        if new:
            tokens = lease.tokens[lease.num_computed_tokens : lease.num_computed_tokens + new]
            step.scheduled.append(ScheduledSequence(sequence, lease, tokens))
            step.budget -= new
            if sequence.prefill_at is None:
                sequence.prefill_at = step.now
        self._end_with_first_token(step)

    def _chunk(self, step: _Step, sequence: Sequence, lease: Lease, at_least: int) -> int:
        """Reserves blocks for the next chunk of a prompt and returns its tokens."""
        budget = step.budget
        if not sequence.prompt_scored:
            scored = sum(len(item.tokens) for item in step.scheduled if not item.sequence.prompt_scored)
            budget = min(budget, self._scored_chunk_tokens - scored)
        paced = max(at_least, self._paced(step, lease.num_computed_tokens, budget))
        if paced <= 0:
            return 0
        end = min(lease.num_tokens, lease.num_computed_tokens + paced)
        if lease.next_checkpoint_position is not None:
            end = min(end, lease.next_checkpoint_position)
        past = lease.num_computed_tokens
        new, least = _whole(sequence, past, end), _whole(sequence, past, past + 1)
        while new > least and isinstance(self._cache.extend(lease, new), Deferred):
            new = max(least, _whole(sequence, past, past + new // 2))
        if at_least and least > 1 and len(self._running) > 1:  # an admission waits for the others
            return 0 if isinstance(self._cache.extend(lease, new), Deferred) else new
        if new == least and not self._reserve(step, sequence, lease, least):
            return 0
        return new

    def _end_with_first_token(self, step: _Step) -> None:
        """Lowers the budget after a completed prompt, so that its first token does not wait for other prefills.

        A step of several chunks then ends with the chunk in which the prompt is complete.
        """
        if step.scheduled and step.scheduled[-1].computes_last_token:
            step.budget = min(step.budget, -step.tokens % self._chunk_tokens)

    def _paced(self, step: _Step, past: int, budget: int | None = None) -> int:
        """Returns how much of the budget a prefill at position `past` may use without delaying the decodes."""
        budget = step.budget if budget is None else budget
        if self._pace is None:
            return budget
        size = size_of(step.scheduled)
        return self._pace.prefill_tokens(size, past, budget) if size.decode_tokens else budget

    def _admit(self, step: _Step, waiting: Iterable[Sequence], most_missed: int | None) -> bool:
        """Admits these requests, or those that miss few tokens. False: one waits for rows, and none overtakes it."""
        for sequence in list(waiting):
            if len(self._running) >= self._max_batch or step.budget <= 0 or self._paced(step, 0) <= 0:
                return True
            if isinstance(sequence.state, WaitingForPrefix) and not sequence.state.is_over:
                continue
            if self.admits_one_by_one and self._running:
                self.requests_held_for_memory += not sequence.was_held_for_memory
                sequence.was_held_for_memory = True
                return False
            match = self._match(sequence)
            if most_missed is not None and len(match.tokens) - match.length > most_missed:
                continue
            if sequence.admitted_at is None and self._is_explained(sequence, match):
                sequence.explanation = self._cache.explain_hit(match)
            if self._wait_for_prefix(sequence, match, step.now):
                continue
            loads = self._admit_to_load(step, sequence, match)
            if loads or (loads is False and self._is_held(step, sequence, match)):
                continue
            admitted = self._ask_for_rows(sequence, match)
            while isinstance(admitted, Deferred) and self._drop_pin():
                match = self._match(sequence)
                admitted = self._ask_for_rows(sequence, match)
            if isinstance(admitted, Deferred):
                return False  # first come, first served: later requests do not overtake
            self._start(step, sequence, admitted)
            running = len(self._running)
            self._prefill(step, sequence, admitted.lease, at_least=1)
            if sequence.request.images and not (step.scheduled and step.scheduled[-1].sequence is sequence):
                # The rows of an image that it begins with need more blocks at once than an admission reserves.
                if sequence in self._running:
                    self._preempt(sequence)
                return False
            assert step.scheduled[-1].sequence is sequence, "an admitted request computes in the same step"
            assert len(self._running) == running, "an admission never preempts"
        return True

    def _is_held(self, step: _Step, sequence: Sequence, match: Match) -> bool:
        """Holds a request whose session has no place in memory, while others run."""
        try:
            if self._gate is None or not self._running or not self._gate.holds(sequence, match, step.now):
                return False
        except SessionsFull as error:
            step.given_up.append((sequence, error))
        self._waiting.remove(sequence)
        self._unprotect_hit(sequence)
        return True

    def _admit_held(self, now: float) -> None:
        assert self._gate is not None
        earliest = min((sequence.arrival for sequence in self._waiting), default=None)
        # Behind the turns that wait: a held session has more to compute than they have.
        self._waiting.extend(self._gate.admit(now, is_idle=not self._running, earliest_waiting=earliest))

    def _ask_for_rows(
        self, sequence: Sequence, match: Match, tier_hit: TierHit | None = None
    ) -> Admitted | Deferred:
        request, comes_back = sequence.request, sequence.admitted_at is not None
        while True:
            admitted = self._cache.admit(
                match,
                self._watermark,
                request.boundaries,
                tier_hit,
                comes_back=comes_back,
                hints=request.hints,
            )
            if not isinstance(admitted, Deferred) or not self._drop_forks():
                return admitted

    def _drop_forks(self) -> bool:
        """Drops the second states of all running sequences, which only drafts need."""
        leases = [sequence.lease for sequence in self._running]
        return sum(lease is not None and self._cache.drop_fork(lease) for lease in leases) > 0

    def _drop_pin(self) -> bool:
        """Drops a pin if nothing runs: a request that could not run even alone would wait forever."""
        if self._running or self.tiers.loading or self._cache.others_have_requests:
            return False
        return self._cache.drop_pin()

    def _is_explained(self, sequence: Sequence, match: Match) -> bool:
        least = self.explains_misses_of
        missed = len(sequence.request.tokens) - match.length
        return sequence.request.diagnose or (least is not None and missed >= least)

    def _match(self, sequence: Sequence) -> Match:
        reusable = None if sequence.prompt_scored else 0  # scoring needs the logits of every position
        scope = sequence.scope
        return self._cache.match(
            sequence.tokens, scope.namespace, reusable, public_tokens=scope.public_tokens
        )

    def _wait_for_prefix(self, sequence: Sequence, match: Match, now: float) -> bool:
        """Makes a request wait if a running one is computing at least a block more of its prefix."""
        pending = match.pending
        if pending is None or match.waiting_gain < self._cache.block_size or not sequence.prompt_scored:
            return False
        # The producer is running: its blocks are ready no later than this request's own would be.
        sequence.state = WaitingForPrefix(pending.producer, pending.until)
        if sequence.admitted_at is None and sequence.waited_at is None:
            sequence.waited_at = now
        self._cache.request_checkpoint(pending.producer, pending.until)
        return True

    def _admit_to_load(self, step: _Step, sequence: Sequence, match: Match) -> bool | None:
        """Admits a request whose prefix is worth loading from a tier. Returns False if it should compute instead.

        None: it should load, and there are no rows for that now."""
        if not sequence.may_load or not sequence.prompt_scored:
            return False
        hit, sequence.load_choice = self.tiers.choose(match)
        if hit is None or sequence.load_choice is None or not sequence.load_choice.load:
            return False
        admitted = self._ask_for_rows(sequence, match, hit)
        if isinstance(admitted, Deferred):
            sequence.did_not_load()  # computing may need fewer blocks
            return None
        self._start(step, sequence, admitted)
        sequence.state = Loading(admitted.lease, hit.position, admitted.loads)
        if sequence.cached_tokens is None:
            sequence.load_began_at = step.now
        step.to_load.append(sequence)
        return True

    @property
    def _watermark(self) -> int:
        """Blocks that an admission leaves free, so that running decodes are not preempted right after it."""
        return sum(isinstance(s.state, Decoding) for s in self._running)

    def _start(self, step: _Step, sequence: Sequence, admitted: Admitted) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._unprotect_hit(sequence)
        sequence.state = Prefilling(admitted.lease)
        sequence.plan = admitted.plan
        sequence.prompt_scores.clear()  # scoring starts over after a preemption
        if sequence.admitted_at is None:
            if self._gate is not None and sequence.held_s:
                self._gate.entered(sequence)
            sequence.admitted_at = step.now
            sequence.hint_outcomes = admitted.lease.hint_outcomes
        if sequence.cached_tokens is None:
            sequence.memory_tokens = admitted.lease.hit_tokens
            if not admitted.loads:
                sequence.cached_tokens = admitted.lease.hit_tokens

    def _add_drafts(self, step: _Step, room: int) -> None:
        """Gives decodes drafts, `room` tokens at most, and blocks that no sequence needs."""
        scheduled = step.scheduled
        decodes = [item for item in scheduled if item.decodes]
        if self._proposer is None or room <= 0 or not decodes:
            return
        if self._pace is not None and len(decodes) < len(scheduled):
            return  # prefills fill the step up to its target
        found = self._proposer.drafts(
            [item.sequence for item in decodes], [item.lease for item in decodes], room
        )
        drafts = {item.lease.id: draft for item, draft in zip(decodes, found, strict=True) if len(draft)}
        for i, item in enumerate(scheduled):
            # Behind a wrong draft, the state catches up first.
            if item.lease.id in drafts and len(item.tokens) == 1:
                scheduled[i] = self._with_draft(item, drafts[item.lease.id][:room])
                room -= scheduled[i].drafts

    def _with_draft(self, item: ScheduledSequence, draft: Tokens) -> ScheduledSequence:
        lease = item.lease
        most = min(len(draft), item.sequence.tokens_left - 1)  # the last token is not computed
        if lease.next_checkpoint_position is not None:
            most = min(most, lease.next_checkpoint_position - lease.num_computed_tokens - 1)
        most = self._reserve_draft(lease, most)
        is_crowded = self._waiting and lease.draft_slot == NO_SLOT
        fork = None if most <= 0 or is_crowded else self._cache.fork_state(lease)
        if fork is None:
            return item
        item.sequence.plan = together([item.sequence.plan, fork])
        tokens = np.concatenate((item.tokens, draft[:most]))
        return ScheduledSequence(item.sequence, lease, tokens, most, lease.slot != NO_SLOT)

    def _reserve_draft(self, lease: Lease, most: int) -> int:
        """Reserves blocks for a draft and returns how many of its tokens have blocks.

        New blocks are taken only if no request waits, and only if enough blocks stay free for every running sequence
        to advance by as many positions as the draft has.
        """
        size = self._cache.block_size
        watermark = len(self._running) * (most // size + 1)
        if most > 0 and not self._waiting and not self._extend_fails(lease, 1 + most, watermark):
            return most
        most = min(most, lease.table_blocks * size - lease.num_computed_tokens - 1)
        return 0 if most <= 0 or self._extend_fails(lease, 1 + most, watermark) else most

    def _extend_fails(self, lease: Lease, tokens: int, watermark: int) -> bool:
        return isinstance(self._cache.extend(lease, tokens, watermark), Deferred)

    def _reserve(self, step: _Step, sequence: Sequence, lease: Lease, tokens: int) -> bool:
        """Reserves blocks for the next tokens. Preempts the sequences with the least progress if need be.

        Returns False if `sequence` itself was preempted or given up.
        """
        while True:
            extended = self._cache.extend(lease, tokens, is_least=True)  # more than one within an image
            if not isinstance(extended, Deferred):
                return True
            if self._drop_forks():
                continue
            # A load cannot be stopped, but ends soon. Another sequence therefore makes room, or this one waits.
            candidates = [s for s in self._running if not isinstance(s.state, Loading)]
            if len(self._running) == 1 and not self.tiers.loading and self._cache.others_have_requests:
                self._preempt(sequence)  # until another model's request has ended
                return False
            if len(self._running) == 1 and not self.tiers.loading:
                if self._cache.drop_pin():
                    continue
                # Preempting the last sequence would not help: no other one would free blocks for it.
                self.remove(sequence)
                error = OutOfBlocks(extended.needed_bytes, self._cache.budget_bytes)
                step.given_up.append((sequence, error))
                return False
            victim = min(candidates, key=_progress)
            self._preempt(victim)
            if victim is sequence:
                return False

    def _preempt(self, victim: Sequence) -> None:
        lease = victim.lease
        assert lease is not None
        self._cache.release(lease, ReleaseReason.PREEMPTED)
        self._running.remove(victim)
        victim.state = Preempted()
        victim.plan = NOTHING
        self._put_back(victim)

    def _put_back(self, sequence: Sequence) -> None:
        """Inserts a sequence into the queue before every new request, in order of arrival."""
        ahead = sum(s.admitted_at is not None and s.arrival < sequence.arrival for s in self._waiting)
        self._waiting.insert(ahead, sequence)

    # ------------------------------------------------------------------------------------- between two steps

    def add(self, sequence: Sequence) -> None:
        """Appends a new sequence to the queue."""
        self._waiting.append(sequence)
        self._tenants.add(sequence.tenant)

    def loaded(self, sequence: Sequence, lease: Lease) -> None:
        """Makes a sequence whose prefix has been loaded part of the next step."""
        sequence.state = Prefilling(lease)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.hit_tokens

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence whose load failed back into the queue, ahead of later arrivals."""
        self._running.remove(sequence)
        self._put_back(sequence)
        sequence.state = Waiting()

    def complete(self, sequence: Sequence, lease: Lease) -> None:
        """Takes out a running sequence that has all its tokens."""
        self._running.remove(sequence)
        if self._proposer is not None:
            self._proposer.completed(sequence, lease)
        if lease.session:
            lease.costs = sequence.costs
        self._cache.release(lease, ReleaseReason.FINISHED)
        sequence.hint_outcomes += lease.act_outcomes
        sequence.state = Waiting()

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue or the running set. Its computed tokens stay in the cache.

        The lease of a sequence that is loading stays with the load.
        """
        lease = sequence.lease
        if isinstance(sequence.state, Loading):
            self._running.remove(sequence)
        elif lease is not None:
            self._running.remove(sequence)
            self._cache.release(lease, ReleaseReason.ABORTED)
        elif isinstance(sequence.state, Held):
            assert self._gate is not None
            self._gate.remove(sequence)
        elif sequence in self._waiting:  # or else its prompt is still looked up in a shared tier
            self._waiting.remove(sequence)
        self._unprotect_hit(sequence)
        sequence.state = Waiting()

    def fail(self, sequence: Sequence, lease: Lease) -> None:
        """Takes out a running sequence whose forward raised. Tokens computed before it stay in the cache."""
        self._running.remove(sequence)
        self._cache.release(lease, ReleaseReason.FAILED)
        sequence.state = Waiting()

    def discard(self, sequence: Sequence, lease: Lease) -> None:
        """Takes out a running sequence whose results cannot be trusted. None of its computed tokens are kept."""
        self._running.remove(sequence)
        self._cache.discard(lease)
        sequence.state = Waiting()

    def drain(self) -> None:
        """Drops every sequence without telling the cache. Use it when the cache itself is emptied."""
        left = list(self.sequences())
        self._running.clear()
        self._waiting.clear()
        if self._gate is not None:
            self._gate.clear()
        for sequence in left:
            sequence.state, sequence.hit_protection = Waiting(), None

    def check(self) -> None:
        """Asserts the invariants between two steps."""
        for sequence in self._running:
            lease = sequence.state.lease if isinstance(sequence.state, Loading) else sequence.lease
            assert lease is not None
            assert not lease.ended
        for sequence in self._waiting:
            assert sequence.lease is None
            assert not isinstance(sequence.state, Ended | Held)
        for sequence in self._held:
            assert isinstance(sequence.state, Held)


def size_of(scheduled: list[ScheduledSequence]) -> StepSize:
    """Counts the tokens of a step and the positions that they attend to."""
    prefill_tokens = prefill_attended = decode_tokens = decode_attended = 0
    for item in scheduled:
        past, new = item.lease.num_computed_tokens, len(item.tokens)
        if item.decodes:
            decode_tokens += new
            decode_attended += past
        else:
            prefill_tokens += new
            prefill_attended += attended_positions(past, past + new)
    return StepSize(prefill_tokens, prefill_attended, decode_tokens, decode_attended)


def _left(lease: Lease) -> int:
    return lease.num_tokens - lease.num_computed_tokens


def _up_to_checkpoint(item: ScheduledSequence) -> ScheduledSequence:
    """Shortens a chunk to the checkpoint position that a later admission asked for inside it."""
    position = item.lease.next_checkpoint_position
    if position is None or item.lease.num_computed_tokens + len(item.tokens) <= position:
        return item
    new = _whole(item.sequence, item.lease.num_computed_tokens, position)
    return ScheduledSequence(item.sequence, item.lease, item.tokens[:new])


def _whole(sequence: Sequence, past: int, end: int) -> int:
    """Returns the tokens of a chunk that was to end at `end`, and that cuts no rows that see each other."""
    images = sequence.request.images
    return (chunk_end(images, past, end) if images else end) - past


def _progress(sequence: Sequence) -> tuple[int, int, int]:
    """Orders victims of preemption: least generated first, then least computed, then the latest arrival."""
    lease = sequence.lease
    assert lease is not None
    return len(sequence.generated), lease.num_computed_tokens - lease.hit_tokens, -sequence.arrival
