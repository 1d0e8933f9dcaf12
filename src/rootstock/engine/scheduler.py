"""What the next forward computes: who decodes, who prefills how much, who is admitted, who must make room.

Order of a step: running decodes, one token each; running prefills, first come first served, within the token
budget; then admissions from the queue; then drafts for the decodes, of what is left. Nothing here touches a tensor or
a clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.lease import Admitted, Deferred, Lease, Match, ReleaseReason
from rootstock.cache.plan import NOTHING, Tokens
from rootstock.cache.tier_index import TierHit
from rootstock.engine.cost_model import Share
from rootstock.engine.pacing import Pace
from rootstock.engine.sequence import (
    Decoding,
    Ended,
    Loading,
    Preempted,
    Prefilling,
    Sequence,
    Waiting,
    WaitingForPrefix,
)
from rootstock.engine.speculation.proposer import Proposer
from rootstock.errors import OutOfBlocks, RootstockError

WANTING_REQUESTS = 16  # how many of the queue's first requests protect what they would hit


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's share of a step: these tokens, which follow what its lease has computed. The last `drafts` of
    them are guesses."""

    sequence: Sequence
    lease: Lease
    tokens: Tokens  # [new]
    drafts: int = 0

    @property
    def completes_prompt(self) -> bool:
        """After this forward every known token is computed, and the next one can be sampled."""
        return self.lease.computed + len(self.tokens) >= self.lease.known

    @property
    def share(self) -> Share:
        return Share(self.lease.computed, len(self.tokens), isinstance(self.sequence.state, Decoding))


class Scheduler:
    """Owns the queue and the running set. `reach` says what is worth loading for a match from a tier below, `pace`
    how much prefill a step with decodes may carry; without a `drafter` every decode is one token."""

    def __init__(
        self,
        cache: KVCache,
        max_batch: int,
        chunk_tokens: int,
        reach: Callable[[Sequence, Match], TierHit | None] = lambda sequence, match: None,
        pace: Pace | None = None,
        drafter: Proposer | None = None,
        idle_chunk_tokens: int | None = None,
        scored_chunk_tokens: int | None = None,
    ) -> None:
        """`chunk_tokens` are computed in one step, or up to `idle_chunk_tokens` while nobody decodes or will. Of
        prompts that are scored, `scored_chunk_tokens` at most."""
        self._cache = cache
        self._drafter = drafter
        self._reach = reach
        self._to_load: list[Sequence] = []
        self.loading = (
            0  # loads under way, also for requests that are gone: set by the engine before each step
        )
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._idle_chunk_tokens = idle_chunk_tokens or chunk_tokens
        self._scored_chunk_tokens = min(chunk_tokens, scored_chunk_tokens or chunk_tokens)
        self._pace = pace
        self.paced_tokens: int | None = None  # of prompts, that the last step with decodes had room for
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._given_up: list[tuple[Sequence, RootstockError]] = []
        self.now = 0.0  # set by the engine before each step

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; what it has computed stays in the cache. The lease of one that is
        loading stays with the load."""
        lease = sequence.lease
        if isinstance(sequence.state, Loading):
            self._running.remove(sequence)
        elif lease is not None:
            self._running.remove(sequence)
            self._cache.release(lease, ReleaseReason.ABORTED)
        else:
            self._waiting.remove(sequence)
        self._drop_want(sequence)
        sequence.state = Waiting()

    def fail(self, sequence: Sequence, lease: Lease) -> None:
        """Takes out a running sequence whose forward raised: what it had computed before stays."""
        self._running.remove(sequence)
        self._cache.release(lease, ReleaseReason.FAILED)
        sequence.state = Waiting()

    def discard(self, sequence: Sequence, lease: Lease) -> None:
        """A running sequence whose results are not to be trusted: nothing that it computed is kept."""
        self._running.remove(sequence)
        self._cache.discard(lease)
        sequence.state = Waiting()

    def loaded(self, sequence: Sequence, lease: Lease) -> None:
        """What it waited for is there: it takes part in the next step."""
        sequence.state = Prefilling(lease)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.hit_tokens

    def requeue(self, sequence: Sequence) -> None:
        """What it was to be loaded did not come: it is admitted anew, before those that came after it."""
        self._running.remove(sequence)
        self._put_back(sequence)
        sequence.state = Waiting()

    def take_to_load(self) -> list[Sequence]:
        """Those that the last step admitted to be loaded. Their plans are to be executed before they are."""
        to_load, self._to_load = self._to_load, []
        return to_load

    def complete(self, sequence: Sequence, lease: Lease) -> None:
        """A running sequence has all its tokens."""
        self._running.remove(sequence)
        if self._drafter is not None:
            self._drafter.ended(sequence, lease)
        self._cache.release(lease, ReleaseReason.FINISHED)
        sequence.state = Waiting()

    def drain(self) -> list[Sequence]:
        """Everything out, without telling the cache: for when the cache itself is started anew."""
        left = list(self.sequences())
        self._running.clear()
        self._waiting.clear()
        self._to_load.clear()
        for sequence in left:
            sequence.state, sequence.want = Waiting(), None
        return left

    # ------------------------------------------------------------------------------------------ a step

    def schedule(self) -> tuple[list[Work], list[tuple[Sequence, RootstockError]]]:
        """The next forward, every block of which is reserved, and whom the scheduler had to give up on."""
        self._given_up = []
        self._protect_hits_of_queued()  # before anybody may evict what they would hit
        work = self._decodes()
        budget = self._chunk_tokens - len(work) if work else self._idle_chunk_tokens
        if work and self._pace is not None:
            self.paced_tokens = self._paced(work, 0, budget)
        for sequence in list(self._running):
            # One further up may have preempted this one meanwhile.
            if isinstance(sequence.state, Prefilling) and budget > 0:
                budget -= self._prefill(sequence, sequence.state.lease, budget, work)
                budget = self._until_somebody_is_done(budget, work)
        work = [w for w in work if w.sequence.lease is w.lease]
        self._admit(work, budget)
        return self._with_drafts([_cut(w) for w in work]), self._given_up

    def _decodes(self) -> list[Work]:
        work: list[Work] = []
        for sequence in list(self._running):
            # A sequence further up may have preempted this one meanwhile.
            if isinstance(sequence.state, Decoding) and self._reserve(sequence, sequence.state.lease, 1):
                work.append(Work(sequence, sequence.state.lease, np.array(sequence.generated[-1:], np.int32)))
        # … or one further down a sequence whose work is planned already.
        return [w for w in work if w.sequence.lease is w.lease]

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """Decodes get drafts of what is left of the step's tokens, and of blocks that nobody misses."""
        room = self._chunk_tokens - sum(len(w.tokens) for w in work)
        decodes = [w for w in work if isinstance(w.sequence.state, Decoding)]
        if self._drafter is None or room <= 0 or not decodes:
            return work
        if self._pace is not None and len(decodes) < len(work):
            return work  # the step is as long as it may be
        found = self._drafter.drafts([w.sequence for w in decodes], [w.lease for w in decodes], room)
        drafts = {w.lease.id: draft for w, draft in zip(decodes, found, strict=True) if len(draft)}
        for i, item in enumerate(work):
            if item.lease.id in drafts:
                work[i] = self._with_draft(item, drafts[item.lease.id][:room])
                room -= work[i].drafts
        return work

    def _with_draft(self, work: Work, draft: Tokens) -> Work:
        lease = work.lease
        most = min(len(draft), work.sequence.tokens_left - 1)  # the last token is not computed
        if lease.next_cut is not None:
            most = min(most, lease.next_cut - lease.computed - 1)
        most = self._reserve_draft(lease, most)
        if most <= 0:
            return work
        return Work(work.sequence, lease, np.concatenate((work.tokens, draft[:most])), most)

    def _reserve_draft(self, lease: Lease, most: int) -> int:
        """How many tokens of a draft have blocks. New ones are taken only if nobody waits for blocks, and if all that
        run find theirs for as long as these are ahead of time."""
        size = self._cache.block_size
        headroom = len(self._running) * (most // size + 1)
        if most > 0 and not self._waiting and not self._deferred(lease, 1 + most, headroom):
            return most
        most = min(most, lease.table_blocks * size - lease.computed - 1)
        return 0 if most <= 0 or self._deferred(lease, 1 + most, headroom) else most

    def _deferred(self, lease: Lease, tokens: int, headroom: int) -> bool:
        return isinstance(self._cache.extend(lease, tokens, headroom), Deferred)

    def _reserve(self, sequence: Sequence, lease: Lease, tokens: int) -> bool:
        """Blocks for the next tokens; others are preempted if need be, the least-progressed first."""
        while True:
            extended = self._cache.extend(lease, tokens)
            if not isinstance(extended, Deferred):
                return True
            # One that loads cannot be stopped, and ends soon: somebody else makes room, or this one waits for that.
            others = [s for s in self._running if not isinstance(s.state, Loading)]
            if len(self._running) == 1 and not self.loading:
                # The last one is never preempted: nobody would make room for it.
                self.remove(sequence)
                error = OutOfBlocks(extended.needed_bytes, self._cache.budget_bytes)
                self._given_up.append((sequence, error))
                return False
            victim = min(others, key=_progress)
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
        """Ahead of what was never admitted, in order of arrival among its like."""
        ahead = sum(s.admitted_at is not None and s.arrival < sequence.arrival for s in self._waiting)
        self._waiting.insert(ahead, sequence)

    def _prefill(
        self, sequence: Sequence, lease: Lease, budget: int, work: list[Work], at_least: int = 0
    ) -> int:
        """Adds the next chunk, up to where the prompt is cut for a checkpoint; returns how many tokens it has. Of
        prompts that are scored a step has `scored_chunk_tokens` at most: logits of every token are a lot of memory.

        The prompt's own blocks were reserved at admission. Those of a window are reserved chunk by chunk, so a chunk
        that does not fit is made shorter before anybody is preempted for it.
        """
        if not sequence.prompt_scored:
            scored = sum(len(item.tokens) for item in work if not item.sequence.prompt_scored)
            budget = min(budget, self._scored_chunk_tokens - scored)
        paced = max(at_least, self._paced(work, lease.computed, budget))
        if paced <= 0:
            return 0
        end = min(lease.known, lease.computed + paced)
        if lease.next_cut is not None:
            end = min(end, lease.next_cut)
        new = end - lease.computed
        while new > 1 and isinstance(self._cache.extend(lease, new), Deferred):
            new //= 2
        if new == 1 and not self._reserve(sequence, lease, 1):
            return 0
        work.append(Work(sequence, lease, lease.tokens[lease.computed : lease.computed + new]))
        return new

    def _until_somebody_is_done(self, budget: int, work: list[Work]) -> int:
        """What is left of `budget` after the last of `work`. A step of several chunks ends with the chunk in which it
        has computed somebody's prompt: whose first token does not wait for what others could be given besides."""
        if not work or not work[-1].completes_prompt:
            return budget
        computed = sum(len(item.tokens) for item in work)
        return min(budget, -computed % self._chunk_tokens)

    def _paced(self, work: list[Work], past: int, budget: int) -> int:
        """What is left of `budget` for a prompt that is computed up to `past`, so that decodes need not wait long."""
        if self._pace is None:
            return budget
        step = [item.share for item in work]
        if not any(share.decodes for share in step):
            return budget
        return self._pace.prefill_tokens(step, past, budget)

    def _admit(self, work: list[Work], budget: int) -> None:
        for sequence in list(self._waiting):
            if len(self._running) >= self._max_batch or budget <= 0 or self._paced(work, 0, budget) <= 0:
                return
            if isinstance(sequence.state, WaitingForPrefix) and not sequence.state.is_over:
                continue
            match = self._match(sequence)
            if (
                match.pending is not None
                and match.waiting_gain >= self._cache.block_size
                and sequence.prompt_scored
            ):
                # The producer is running, so its blocks come at least as soon as our own would.
                sequence.state = WaitingForPrefix(match.pending.producer, match.pending.until)
                self._cache.request_checkpoint(match.pending.producer, match.pending.until)
                continue
            # Those that run must not be preempted at once for the sake of the newcomer.
            headroom = sum(isinstance(s.state, Decoding) for s in self._running)
            boundaries = sequence.request.boundaries
            reach = self._reach(sequence, match) if sequence.may_load and sequence.prompt_scored else None
            if reach is not None:
                admitted = self._cache.admit(match, headroom, boundaries, reach)
                if isinstance(admitted, Admitted):
                    self._start(sequence, admitted)
                    sequence.state = Loading(admitted.lease, reach.position, admitted.loads)
                    self._to_load.append(sequence)
                    continue
                sequence.did_not_load()  # there is no room for it: perhaps there is for computing
            admitted = self._cache.admit(match, headroom, boundaries)
            if isinstance(admitted, Deferred):
                return  # first come, first served: nobody overtakes
            self._start(sequence, admitted)
            budget -= self._first_chunk(sequence, admitted.lease, budget, work)
            budget = self._until_somebody_is_done(budget, work)

    def _first_chunk(self, sequence: Sequence, lease: Lease, budget: int, work: list[Work]) -> int:
        """As `_prefill`, but nobody is preempted for a newcomer: what it needs was there when it was admitted."""
        before = len(self._running)
        new = self._prefill(sequence, lease, budget, work, at_least=1)
        assert new
        assert len(self._running) == before
        return new

    def _match(self, sequence: Sequence) -> Match:
        nothing_to_reuse = None if sequence.prompt_scored else 0  # the logits of every position are wanted
        return self._cache.match(sequence.tokens, sequence.namespace, nothing_to_reuse)

    def _start(self, sequence: Sequence, admitted: Admitted) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._drop_want(sequence)
        sequence.state = Prefilling(admitted.lease)
        sequence.plan = admitted.plan
        sequence.prompt_scores.clear()  # a prompt that is scored begins anew after a preemption
        if sequence.admitted_at is None:
            sequence.admitted_at = self.now
        if sequence.cached_tokens is None and not admitted.loads:
            sequence.cached_tokens = admitted.lease.hit_tokens

    def _protect_hits_of_queued(self) -> None:
        """What they would hit changes with the cache, so a claim is made anew when the cache has changed."""
        for sequence in itertools.islice(self._waiting, WANTING_REQUESTS):
            if sequence.prompt_scored and not self._cache.is_current(sequence.want):
                self._drop_want(sequence)
                sequence.want = self._cache.protect(self._cache.match(sequence.tokens, sequence.namespace))

    def _drop_want(self, sequence: Sequence) -> None:
        if sequence.want is not None:
            self._cache.unprotect(sequence.want)
            sequence.want = None

    def check(self) -> None:
        """Asserts what must hold between steps."""
        for sequence in self._running:
            lease = sequence.state.lease if isinstance(sequence.state, Loading) else sequence.lease
            assert lease is not None
            assert not lease.ended
        for sequence in self._waiting:
            assert sequence.lease is None
            assert not isinstance(sequence.state, Ended)


def _cut(work: Work) -> Work:
    """Somebody may have asked for a checkpoint inside a chunk since it was planned."""
    cut = work.lease.next_cut
    if cut is None or work.lease.computed + len(work.tokens) <= cut:
        return work
    return Work(work.sequence, work.lease, work.tokens[: cut - work.lease.computed])


def _progress(sequence: Sequence) -> tuple[int, int, int]:
    """Least first; of equals the latest comer."""
    lease = sequence.lease
    assert lease is not None
    return len(sequence.generated), lease.computed - lease.hit_tokens, -sequence.arrival
