"""Steps of the engine: plan → apply → forward → commit → sample → emit events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.plan import NOTHING, Plan, together
from rootstock.cache.types import NO_SLOT
from rootstock.engine.part_list import EngineParts
from rootstock.engine.parts import Forward
from rootstock.engine.request import (
    Aborted,
    Finished,
    Logprobs,
    PromptScored,
    PromptTokens,
    RequestId,
    TokenEvent,
)
from rootstock.engine.request_table import RequestTable
from rootstock.engine.sampling import SampledToken, score_prompt
from rootstock.engine.scheduler import ScheduledSequence
from rootstock.engine.sequence import Decoding, Sequence
from rootstock.engine.speculation.acceptance import accepted_rows
from rootstock.engine.stats import StepCounters
from rootstock.errors import EngineFault, ImageFailed, PoolsLost, RootstockError, StepFailed
from rootstock.runtime.base import Batch, Logits, Runtime
from rootstock.text.constraints.mask_worker import MaskWorker
from rootstock.text.constraints.progress import AnswerProgress

log = logging.getLogger(__name__)

LOGGED_IDS = 16  # of requests, in one log line


class StepRunner:
    """Runner of the engine's steps, which also ends requests. Owned by the engine's thread.

    A forward that raises fails the requests of its step only. An exception between forwards is a bug in the
    engine: it fails every request and empties the cache, because the cache's state is then unknown.
    """

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        requests: RequestTable,
        parts: EngineParts,
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._cache = cache
        self._scheduler = parts.scheduler
        self._requests = requests
        self._apply = parts.apply
        self._hooks = parts.hooks
        self._idle_work = parts.idle_work
        self._clock = clock
        self._masks = MaskWorker()
        self.counters = StepCounters()
        self.is_stalled = False  # nothing can run before a load has ended
        self.is_blocked = False  # nothing can run before a request of another model has ended
        if cache.share is not None:
            cache.share.settle = self.settle

    def close(self) -> None:
        self._masks.close()

    # --------------------------------------------------------------------------------------- a request

    def add(self, sequence: Sequence) -> None:
        if self._requests.holds(sequence):  # it may have failed before this command ran
            self._scheduler.add(sequence)

    def abort(self, request: RequestId) -> None:
        sequence = self._requests.get(request)
        if sequence is not None:
            self._take_out(sequence)
            self._requests.end(sequence, Aborted(request, sequence.usage(self._clock())))

    def fail_all(self, error: RootstockError) -> None:
        for sequence in list(self._scheduler.sequences()):
            self._take_out(sequence)
        self._requests.fail_all(error)
        self._requests.notify()

    def _take_out(self, sequence: Sequence) -> None:
        for act in self._hooks.taken_out:
            act(sequence)
        self._scheduler.remove(sequence)

    def _discard(self, sequence: Sequence, lease: Lease, error: RootstockError) -> None:
        self._scheduler.discard(sequence, lease)
        self._requests.fail(sequence, error)

    def _fail_by_image(self, item: ScheduledSequence, error: ImageFailed) -> None:
        log.warning("an image of request %s failed", item.sequence.request.id, exc_info=error.cause)
        self._scheduler.fail(item.sequence, item.lease)
        self._requests.fail(item.sequence, error)

    # ------------------------------------------------------------------------------------------ a step

    def run(self) -> None:
        """Runs one step. The scheduler has work."""
        began = self._clock()
        if self._idle_work.may_hold_rows:
            self._idle_work.pause()
        self._cache.compare_diverged()  # prompts of the last step, whose events have been sent
        for act in self._hooks.before_step:
            act()
        plan = self._scheduler.schedule(began)
        for act in self._hooks.planned:
            act(plan, began)
        for sequence, error in plan.given_up:
            self._requests.fail(sequence, error)
        if not plan.scheduled:
            self.is_stalled = self._scheduler.tiers.loading > 0
            waits = self._scheduler.has_work and not self.is_stalled
            self.is_blocked = waits and self._cache.others_have_requests
            assert plan.given_up or self.is_blocked or not waits, "requests wait and nothing runs"
            self._execute(self._cache.take_pending_plan())
            return
        self.is_stalled = self.is_blocked = False
        if self._requests.has_news:
            self._requests.notify()  # before the forward takes its time
        # A plan that fails is half executed. Rows of other requests may then be wrong, so the exception goes to
        # `restart`.
        self._execute(
            together([self._cache.take_pending_plan(), *(item.sequence.plan for item in plan.scheduled)])
        )
        constrained = [
            progress
            for item in plan.scheduled
            if (progress := item.sequence.sampler.progress) is not None and item.computes_last_token
        ]
        try:
            for act in self._hooks.before_forward:
                act()
            batch = Batch([item.segment() for item in plan.scheduled], plan.following)
            logits = self._forward(plan.scheduled, batch, constrained)
        except PoolsLost:
            self.counters.failed_steps += 1
            raise  # other sequences' rows are lost, too
        except ImageFailed as error:  # nothing was computed: the next step has the others again
            self._fail_by_image(plan.scheduled[error.segment], error)
            return
        except Exception as error:
            ids = [item.sequence.request.http_id or item.sequence.request.id for item in plan.scheduled]
            told = ", ".join(ids[:LOGGED_IDS]) + (", …" if len(ids) > LOGGED_IDS else "")
            log.exception("a forward failed; its %d requests fail, others go on: %s", len(ids), told)
            self.counters.failed_steps += 1
            for item in plan.scheduled:
                self._scheduler.fail(item.sequence, item.lease)
                self._requests.fail(item.sequence, StepFailed(error))
            return
        row = 0
        results: list[Logits | _Result] = []
        for item, segment in zip(plan.scheduled, batch.segments, strict=True):
            rows = logits[row : row + segment.logits_to_keep]
            results.append(rows if item.drafts else self._result(item, rows))
            row += segment.logits_to_keep
        for answer in constrained:
            answer.send()
        for item, result in zip(plan.scheduled, results, strict=True):
            if isinstance(result, np.ndarray):
                self._take_verified(item, result)
            else:
                self._take(item, result)
        self._execute(self._cache.take_pending_plan())
        for act in self._hooks.after_step:
            act()

    def _execute(self, plan: Plan) -> None:
        if plan is not NOTHING:
            self._apply(plan)

    def settle(self) -> None:
        """Executes the cache's pending plan between two steps."""
        try:
            self._execute(self._cache.take_pending_plan())
        except Exception as error:
            self.restart(error)

    def _forward(
        self, scheduled: list[ScheduledSequence], batch: Batch, constrained: list[AnswerProgress]
    ) -> Logits:
        now = self._clock()
        for item in scheduled:
            item.sequence.plan = NOTHING  # executed
            if item.sequence.computed_at is None:
                item.sequence.computed_at = now
        if constrained:
            self._masks.begin(constrained)
        began = self._clock()
        try:
            logits = self._runtime.forward(batch)
        finally:
            if constrained:
                self._masks.wait()
        seconds = self._clock() - began
        self.counters.forward_s += seconds
        forward = Forward(scheduled, batch.segments, seconds)
        for act in self._hooks.forwarded:
            act(forward)
        self.counters.steps += 1
        self.counters.computed_tokens += sum(len(item.tokens) for item in scheduled)
        return logits

    def _take_verified(self, item: ScheduledSequence, logits: Logits) -> None:
        """Takes the rows of a decode with drafts one by one, as if each had a step of its own."""
        self.counters.drafts += 1
        self.counters.draft_tokens += item.drafts
        by_position = self.counters.accepted_by_position
        for row in accepted_rows(item):
            if row > 0:
                self.counters.accepted_draft_tokens += 1
                if row > len(by_position):
                    by_position.append(0)
                by_position[row - 1] += 1
            of_row = item.row(row)
            self._take(of_row, self._result(of_row, logits[row : row + 1]))

    def _catch_up(self, sequence: Sequence, lease: Lease) -> None:
        """Computes the last tokens of a request that ends in the middle of a draft, so that the state after them
        can become a checkpoint. A failure costs that checkpoint its last tokens."""
        fork = self._cache.fork_state(lease)
        if fork is None:
            return
        self._execute(together([self._cache.take_pending_plan(), fork]))
        behind = ScheduledSequence(sequence, lease, sequence.uncomputed(lease)[:-1], is_forked=True)
        try:
            self._runtime.forward(Batch([replace(behind.segment(), logits_to_keep=0)]))
        except PoolsLost:
            raise
        except Exception:
            log.exception("the last tokens of a request are not cached", extra=sequence.log_fields)
            return
        self.counters.computed_tokens += len(behind.tokens)
        self._cache.keep_fork(lease)
        self._execute(self._cache.commit(lease, behind.tokens))

    def _result(self, item: ScheduledSequence, logits: Logits) -> _Result:
        """Scores and samples one sequence. Its grammar takes the token while others are sampled."""
        sequence = item.sequence
        try:
            if not sequence.prompt_scored:
                self._score(sequence, item.lease.num_computed_tokens, logits)
            if not item.computes_last_token:
                return Incomplete()
            if sequence.max_tokens:
                return sequence.sampler.sample(logits[-1])
        except RootstockError as error:
            return error
        except Exception as error:
            log.exception(
                "request %s failed after its forward", sequence.request.id, extra=sequence.log_fields
            )
            return StepFailed(error)
        return PromptDone()

    def _take(self, item: ScheduledSequence, result: _Result) -> None:
        """Takes the result of one sequence: publishes, and emits events.

        Logits that are not finite come from K/V that are not finite. In this case, and after any other error, no
        computed token of the request is published.
        """
        sequence = item.sequence
        progress = sequence.sampler.progress
        if progress is not None and isinstance(result, SampledToken):
            try:
                progress.settle()
                result = replace(result, completes_answer=progress.is_complete)
            except RootstockError as error:
                result = error
        if isinstance(result, RootstockError):
            self._discard(sequence, item.lease, result)
            return
        # The plan is executed at once: the commit of another sequence may evict the checkpoint that the plan fills,
        # and reuse its row.
        if item.is_forked:
            self._cache.keep_fork(item.lease)
        if len(item.tokens):
            self._execute(self._cache.commit(item.lease, item.tokens))
        if isinstance(result, Incomplete):
            return
        try:
            self._continue(sequence, item.lease, result)
        except PoolsLost:
            raise
        except Exception as error:
            log.exception(
                "request %s failed after it was sampled", sequence.request.id, extra=sequence.log_fields
            )
            self._take_out(sequence)
            self._requests.fail(sequence, StepFailed(error))

    def _score(self, sequence: Sequence, past: int, logits: Logits) -> None:
        prompt, top = sequence.request.tokens, sequence.request.prompt_logprobs or 0
        following = prompt[past + 1 : past + 1 + len(logits)]
        sequence.prompt_scores.append(score_prompt(logits[: len(following)], following, top))

    def _continue(self, sequence: Sequence, lease: Lease, sampled: SampledToken | PromptDone) -> None:
        """Emits the next token of a sequence whose known tokens are all computed, or ends it."""
        if not sequence.prompt_scored:
            sequence.prompt_scored = True
            sequence.emit(PromptScored(sequence.request.id, Logprobs.joined(sequence.prompt_scores)))
            sequence.prompt_scores = []
        is_first = not sequence.generated
        if is_first:
            tokens = _prompt_tokens(sequence)
            self.counters.prompts.add(tokens)
            for act in self._hooks.prompt_computed:
                act(sequence, tokens)
        if isinstance(sampled, PromptDone):
            self._finish(sequence, lease, "length", text=sequence.rest_of_text())
            return
        self.counters.sampled_tokens += 1
        sequence.generated.append(sampled.token)
        sequence.state = Decoding(lease)
        if is_first:
            sequence.first_token_at = self._clock()
            for act in self._hooks.first_token:
                act(sequence, lease)
        if sampled.token in sequence.stop_tokens:
            self._finish(sequence, lease, "stop", sampled.token, text=sequence.rest_of_text())
            return
        delta = sequence.detokenizer.push(sampled.token)
        sequence.emit(
            TokenEvent(
                sequence.request.id,
                sampled.token,
                delta.text,
                sampled.logprob,
                sequence.cached_tokens or 0,
                sequence.diagnosis if is_first else None,
                sequence.hint_outcomes if is_first else (),
            )
        )
        if delta.stopped_by:
            self._finish(sequence, lease, "stop", delta.stopped_by)
        elif sampled.completes_answer:
            self._finish(sequence, lease, "stop", text=sequence.rest_of_text())
        elif len(sequence.generated) >= sequence.max_tokens:
            self._finish(sequence, lease, "length", text=sequence.rest_of_text())

    def _finish(
        self,
        sequence: Sequence,
        lease: Lease,
        reason: Literal["stop", "length"],
        stopped_by: str | int | None = None,
        text: str = "",
    ) -> None:
        if lease.slot != NO_SLOT and self._cache.reuse and len(sequence.uncomputed(lease)) > 1:
            self._catch_up(sequence, lease)
        self._scheduler.complete(sequence, lease)
        usage = sequence.usage(self._clock())
        finished = Finished(
            sequence.request.id,
            reason,
            usage,
            text,
            stopped_by,
            sequence.diagnosis,
            sequence.hint_outcomes,
        )
        self._requests.end(sequence, finished)

    # ----------------------------------------------------------------------------------- between steps

    def do_idle_work(self) -> None:
        """Does a piece of idle work. Call it when there is nothing else to do."""
        self._idle_work.step()
        self._execute(self._cache.take_pending_plan())

    def restart(self, error: Exception) -> None:
        """Fails every request and empties the cache, after an internal exception or the loss of the pools."""
        log.error("the engine failed; every open request fails, the cache is emptied", exc_info=error)
        self._scheduler.drain()
        for act in self._hooks.restart:
            act()
        self._cache.reset()
        self.fail_all(error if isinstance(error, PoolsLost) else EngineFault(error))


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Result of a sequence whose prompt goes on in a later step."""


@dataclass(frozen=True, slots=True)
class PromptDone:
    """Result of a sequence whose prompt is computed, and only scored or cached."""


_Result = SampledToken | Incomplete | PromptDone | RootstockError


def _prompt_tokens(sequence: Sequence) -> PromptTokens:
    """Returns the tokens of a prompt, all of which are computed."""
    cached, loaded = sequence.cached_tokens or 0, sequence.loaded_tokens
    from_host = sequence.loaded_from_host_tokens
    return PromptTokens(
        memory=cached - loaded,
        host=from_host,
        disk=loaded - from_host,
        computed=len(sequence.request.tokens) - cached,
    )
