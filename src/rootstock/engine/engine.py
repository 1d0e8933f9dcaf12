"""The engine: one thread that owns the cache and the runtime, and a face that any thread may call.

A step: run what other threads asked for → schedule → execute the plans → one packed forward → publish what was
computed → sample → tell. Every request that was accepted gets exactly one terminal event, whatever happens: a
forward that raises fails the requests of that step, and a bug of our own fails everything and starts the cache
anew rather than trusting it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.explain import Explanation
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Lease, ReleaseReason
from rootstock.cache.plan import NOTHING, Plan, Tokens, together
from rootstock.config import EngineConfig
from rootstock.engine.pacing import Pacing
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Logprobs,
    PromptScored,
    Request,
    RequestId,
    Sink,
    TokenEvent,
)
from rootstock.engine.sampling import SampledToken, Sampler, leaves_no_token, score_prompt
from rootstock.engine.scheduler import Scheduler, Work
from rootstock.engine.sequence import Decoding, Loading, Sequence
from rootstock.engine.speculation.proposer import NgramProposer, Proposer, why_not
from rootstock.engine.stats import Cleared, EngineStats, Health, StepCounters
from rootstock.engine.tiers.connector import UNMEASURED, TierConnector, UnderWay
from rootstock.engine.tiers.hit_verifier import HitVerifier
from rootstock.engine.tokenizer import Detokenizer, ModelTokenizer
from rootstock.errors import (
    ClearUnderWay,
    CompletionTooLong,
    EmptyPrompt,
    EngineFault,
    EngineStopped,
    InvalidParameter,
    PromptTooLong,
    QueueFull,
    RootstockError,
    StepFailed,
)
from rootstock.runtime.base import Batch, Logits, ModelDescription, Runtime, Segment
from rootstock.tiers.reader import LoadEnded

log = logging.getLogger(__name__)

T = TypeVar("T")

# Float32 logits of one step's prompts that are scored: 262 rows of 32,000 tokens. Computing them takes as long as the
# rest of a small model's forward.
SCORED_LOGITS_BYTES = 32 * 1024**2
HUNG_AFTER_S = 300.0  # a single step that takes longer is reported as not alive


def _idle_chunks(described: ModelDescription) -> int:
    """How many a step may take while nobody decodes. Who runs one sequence per forward attends as the model's file
    says, with scores of the whole chunk in memory at once: nothing is gained there, and memory is lost."""
    return 1 if described.rung == "one sequence per forward" else 4


class Engine:
    """`with Engine(...) as engine:` starts and stops the thread. Methods may be called from any thread.

    The cache belongs to the engine from here on. Without `codec` no text is made: token events have none, and
    stop strings are refused. A test may drive an engine that was not started by calling `step` itself.
    """

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        config: EngineConfig | None = None,
        codec: ModelTokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        tiering: TierConnector | None = None,
        verify_hits: float = 0.0,
        drafter: Proposer | None = None,
    ) -> None:
        self._tiering = tiering
        self._stalled = False  # nothing can run before a load has ended
        self._runtime = runtime
        self._cache = cache
        self._config = config or EngineConfig()
        self._codec = codec
        self._clock = clock
        reach = (lambda sequence, match: None) if tiering is None else tiering.worth_loading
        target_s = self._config.itl_target_s
        self._pacing = None if target_s is None else Pacing(target_s)
        # None: there may be some.
        self.why_no_drafts = why_not(runtime.description, self._config.draft_tokens)
        self._drafter: Proposer | None = None
        if self.why_no_drafts is None:
            self._drafter = drafter or NgramProposer(cache, self._config.draft_tokens)
        self._scheduler = Scheduler(
            cache,
            self._config.max_batch,
            self._config.chunk_tokens,
            reach,
            self._pacing,
            self._drafter,
            self._config.idle_chunk_tokens or self._config.chunk_tokens * _idle_chunks(runtime.description),
            max(1, SCORED_LOGITS_BYTES // (4 * runtime.description.vocab_size)),
        )
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[RequestId, Sequence] = {}  # accepted and not ended
        self._lock = threading.Lock()  # of _live, _arrivals and _closed
        self._arrivals = 0
        self._closed = False
        self._clearing = threading.Lock()  # of one tenant's records, below memory
        self._seeds = np.random.default_rng(self._config.seed)
        # A fine-tune's tokenizer often knows an end of turn that its configuration does not name.
        of_codec = () if codec is None else codec.eos_token_ids
        self._eos_token_ids = tuple(dict.fromkeys((*runtime.description.eos_token_ids, *of_codec)))
        self._after_events: tuple[Callable[[], None], ...] = ()
        self._thread: threading.Thread | None = None
        self._counters = StepCounters()
        self._step_began: float | None = None
        self._verifier = HitVerifier(
            runtime,
            cache,
            verify_hits,
            self._config.chunk_tokens,
            self._apply,
            self._distrust,
            self._config.seed,
        )

    # --------------------------------------------------------------------------------------- lifetime

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        assert self._thread is None, "an engine is started once"
        self._thread = threading.Thread(target=self._run, name="rootstock-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What still runs fails with EngineStopped; the thread ends after the current step. Idempotent."""
        with self._lock:
            self._closed = True
        if self._thread is None:
            self._fail_everything(EngineStopped())
            self._close_tiers()
            return
        self._commands.put(lambda: None)  # wakes the thread if it sleeps
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        is_sound = False  # if it died, what memory holds may be half written
        try:
            while not self._closed:
                if self._verifier.has_work and not self._scheduler.has_work and self._commands.empty():
                    self._verify()
                    continue
                # With nothing to do, sleep until somebody asks for something.
                self.step(self._next_command())
            is_sound = True
        finally:
            # Also when the thread dies of something that no handler can mend: nobody is left waiting.
            with self._lock:
                self._closed = True
            try:
                self._fail_everything(EngineStopped())
                self._drain_commands()
            finally:
                self._close_tiers(flush=is_sound)

    def _next_command(self) -> Callable[[], None] | None:
        """Waits for one if there is nothing to do before it comes."""
        if not self._scheduler.has_work:
            return self._commands.get()
        if not self._stalled or self._tiering is None:
            return None
        try:
            return self._commands.get(timeout=self._tiering.next_overdue_s)
        except queue.Empty:
            return None

    def _close_tiers(self, flush: bool = True) -> None:
        """What only memory has is written down; then the tier's threads end."""
        if self._tiering is None:
            return
        try:
            self._tiering.settle()
            if flush:
                self._tiering.flush()
        except Exception:
            log.exception("the cache could not be written to the tier below")
        finally:
            self._tiering.close()

    # ---------------------------------------------------------------------------------- for any thread

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        limits = [self._runtime.description.context_limit, self._cache.capacity_tokens]
        if self._config.context_limit is not None:
            limits.append(self._config.context_limit)
        return min(limits)

    def submit(self, request: Request, sink: Sink) -> None:
        """Checks and queues. Whatever becomes of it afterwards is told by events.

        Raises EmptyPrompt, PromptTooLong, CompletionTooLong, InvalidParameter, QueueFull or EngineStopped.
        """
        self._refuse_impossible(request)
        self._refuse_unless_open(request)  # before work is put into it
        sequence = self._sequence(request, sink)
        with self._lock:
            self._refuse_unless_open(request)
            sequence.arrival = self._arrivals
            self._arrivals += 1
            self._live[request.id] = sequence
            # Within the lock, so that whoever can see the request comes after it in the queue of commands.
            self._commands.put(lambda: self._add(sequence))

    def _sequence(self, request: Request, sink: Sink) -> Sequence:
        ends = self._ends(request)
        seed = request.sampling.seed
        return Sequence(
            request,
            sink,
            namespace=self._namespace(request.salt),
            max_tokens=self._max_tokens(request),
            sampler=Sampler(
                request.sampling,
                request.tokens,
                self._runtime.description.vocab_size,
                self._next_seed() if seed is None else seed,
                ends,
                request.stop.min_tokens,
            ),
            stream=self._text_stream(request),
            stop_tokens=frozenset(ends),
            now=self._clock(),
        )

    def _ends(self, request: Request) -> tuple[int, ...]:
        """Tokens that end the answer."""
        return (*(() if request.stop.ignore_eos else self._eos_token_ids), *request.stop.stop_tokens)

    def call_after_events(self, function: Callable[[], None]) -> None:
        """From now on it is called, on the engine's thread, whenever sinks may have been given events and no more
        follow at once: after each step. So a sink may collect them and pass them on together."""
        with self._lock:
            self._after_events += (function,)

    def no_call_after_events(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._after_events = tuple(other for other in self._after_events if other != function)

    def abort(self, request: RequestId) -> None:
        """The request ends with `Aborted`, unless it has ended. Idempotent, does not wait."""
        if request in self._live:
            self._commands.put(lambda: self._abort(request))

    def generate(self, request: Request) -> Iterator[Event]:
        """Submits, and yields the events up to the terminal one. Closing the iterator aborts the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(request, events.put)
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = isinstance(event, Finished | Failed | Aborted)
                yield event
        finally:
            if not ended:
                self.abort(request.id)

    def explain(self, tokens: Tokens, salt: str = "") -> Explanation:
        """Why a request with these tokens would hit what it would hit now."""

        def explain() -> Explanation:
            namespace = self._namespace(salt)
            explanation = self._cache.explain(tokens, namespace)
            if self._tiering is None:
                return explanation
            _, choice = self._tiering.choose(self._cache.match(tokens, namespace))
            return explanation if choice is None else replace(explanation, below=choice)

        return self.call(explain)

    def stats(self) -> EngineStats:
        space = UNMEASURED if self._tiering is None else self._tiering.measure()
        return self.call(
            lambda: EngineStats(
                self._cache.stats(),
                self._scheduler.running,
                self._scheduler.waiting,
                replace(self._counters),
                None if self._tiering is None else self._tiering.stats(space),
                dict(self._verifier.counts),
                self._scheduler.paced_tokens,
            )
        )

    def clear_cache(self, salt: str | None = None) -> Cleared:
        """Drops every cached prefix that no running request uses, in memory and below: of all tenants, or of the one
        with this salt."""
        namespace = None if salt is None else self._namespace(salt)

        def clear() -> Cleared:
            self._verifier.pause()  # its leases would hold what is to go
            before = self._cache.pools.owned_bytes
            blocks = self._cache.clear(namespace)
            if self._drafter is not None:
                self._drafter.forget(namespace)
            later = False
            if self._tiering is not None and namespace is not None:
                self._tiering.forget(namespace)
            elif self._tiering is not None:
                later = not self._tiering.clear()
            return Cleared(blocks, before - self._cache.pools.owned_bytes, later)

        if self._tiering is None or namespace is None:
            return self.call(clear)
        if not self._clearing.acquire(blocking=False):
            raise ClearUnderWay()
        try:
            cleared = self.call(clear)
            # On the caller's thread: any tenant may ask for this, and no other request may wait for the disk.
            self._tiering.clear_below(namespace)
            # Stores that ended meanwhile have told the index of their records.
            self.call(clear)
        finally:
            self._clearing.release()
        return cleared

    def health(self) -> Health:
        """Answered by the calling thread, so that a dead or hung engine cannot hide."""
        thread, began = self._thread, self._step_began
        alive, detail = True, "ok"
        if self._closed:
            alive, detail = False, "stopped"
        elif thread is not None and not thread.is_alive():
            alive, detail = False, "the engine's thread has died"
        elif began is not None and self._clock() - began > HUNG_AFTER_S:
            alive, detail = False, f"a step has been running for {self._clock() - began:.0f} s"
        running = self._scheduler.running
        return Health(alive, detail, running, max(0, len(self._live) - running), self._counters.steps)

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns, run on the engine's thread between two steps."""
        if self._thread is None or self._thread is threading.current_thread():
            return function()
        if self._closed or not self._thread.is_alive():
            raise EngineStopped()
        future: Future[T] = Future()

        def run() -> None:
            if self._closed:
                future.set_exception(EngineStopped())
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, AssertionError):  # our own structures may be half changed
                    raise

        self._commands.put(run)
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if future.done():  # just now, or the function itself raised TimeoutError
                    return future.result()
                if not self._thread.is_alive():
                    raise EngineStopped() from None

    # --------------------------------------------------------------------------------------- a request

    def _refuse_unless_open(self, request: Request) -> None:
        if self._closed:
            raise EngineStopped()
        if len(self._live) >= self._config.max_batch + self._config.max_queue:
            raise QueueFull(self._config.max_batch, self._config.max_queue)
        if request.id in self._live:
            raise InvalidParameter("request_id", request.id, "different from that of every open request")

    def _next_seed(self) -> int:
        with self._lock:
            return int(self._seeds.integers(2**63))

    def _add(self, sequence: Sequence) -> None:
        if self._live.get(sequence.request.id) is sequence:  # else it was failed before it was begun
            self._scheduler.add(sequence)

    def _refuse_impossible(self, request: Request) -> None:
        """What can never work is refused at submission, with the numbers."""
        prompt, limit, stop = len(request.tokens), self.context_limit, request.stop
        if prompt == 0:
            raise EmptyPrompt()
        vocab_size = self._runtime.description.vocab_size
        lowest, highest = int(request.tokens.min()), int(request.tokens.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidParameter("prompt", wrong, f"token ids from 0 to {vocab_size - 1}")
        if prompt + (stop.max_tokens != 0) > limit:
            raise PromptTooLong(prompt, limit)
        if stop.max_tokens is not None:
            if stop.max_tokens < 0:
                raise InvalidParameter("max_tokens", stop.max_tokens, "0 or more")
            if prompt + stop.max_tokens > limit:
                raise CompletionTooLong(prompt, stop.max_tokens, limit)
        max_tokens = self._max_tokens(request)
        if stop.min_tokens > max_tokens:
            allowed = f"at most {max_tokens:,}, which is what the answer may have here"
            raise InvalidParameter("min_tokens", stop.min_tokens, allowed)
        if max_tokens > 0 and leaves_no_token(
            request.sampling, vocab_size, self._ends(request), stop.min_tokens
        ):
            raise InvalidParameter(
                "logit_bias" if request.sampling.logit_bias else "min_tokens",
                dict(request.sampling.logit_bias) or stop.min_tokens,
                "such that some token may be chosen: bans, and end tokens before 'min_tokens', leave none",
            )
        if stop.stop_strings and self._codec is None:
            raise InvalidParameter("stop", stop.stop_strings, "empty: this engine has no tokenizer")

    def _text_stream(self, request: Request) -> Detokenizer | None:
        if self._codec is None:
            return None
        return Detokenizer(self._codec, request.stop.stop_strings, context=request.tokens)

    def _max_tokens(self, request: Request) -> int:
        room = self.context_limit - len(request.tokens)
        return room if request.stop.max_tokens is None else request.stop.max_tokens

    def _namespace(self, salt: str) -> Namespace:
        described = self._runtime.description
        return Namespace(
            weights=described.weights_fingerprint + (f"/{described.layout}" if described.layout else ""),
            # What is kept depends on what it was computed in as well: float32 kept of bfloat16 is another thing.
            kv_dtype=f"{described.dtype}:{described.kv_dtype}",
            rope_regime=described.rope_regime,
            salt=salt,
        )

    def _abort(self, request: RequestId) -> None:
        sequence = self._live.get(request)
        if sequence is not None:
            self._take_out(sequence)
            self._forget(sequence)
            sequence.abort(self._clock())

    def _take_out(self, sequence: Sequence) -> None:
        if self._tiering is not None and isinstance(sequence.state, Loading):
            self._tiering.give_up(sequence)
        self._scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, error: RootstockError) -> None:
        self._take_out(sequence)
        self._forget(sequence)
        sequence.fail(error)

    def _discard(self, sequence: Sequence, lease: Lease, error: RootstockError) -> None:
        self._scheduler.discard(sequence, lease)
        self._forget(sequence)
        sequence.fail(error)

    def _forget(self, sequence: Sequence) -> None:
        with self._lock:
            self._live.pop(sequence.request.id, None)

    # ------------------------------------------------------------------------------------------ a step

    def step(self, command: Callable[[], None] | None = None) -> bool:
        """One turn of the loop; False if there was nothing to do. For the engine's thread, or a test's."""
        self._step_began = self._clock()
        try:
            if command is not None:
                command()
            self._drain_commands()
            if self._closed or not self._scheduler.has_work:
                return False
            self._schedule_and_run()
        except Exception as error:
            self._start_anew(error)
        finally:
            self._events_are_told()
            self._step_began = None
        return True

    def _events_are_told(self) -> None:
        for function in self._after_events:
            try:
                function()
            except Exception:
                log.exception("what was to be called after events raised")

    def _start_anew(self, error: Exception) -> None:
        """Ours to mend, and the cache cannot be trusted any more: nothing of it is kept."""
        log.exception("the engine failed between forwards; every open request fails, the cache is emptied")
        self._scheduler.drain()
        if self._tiering is not None:
            self._tiering.settle()  # nobody writes to rows that are given out anew
        self._verifier.forget()
        self._cache.reset()
        self._fail_everything(EngineFault(error))

    def _schedule_and_run(self) -> None:
        began = self._scheduler.now = self._clock()
        self._verifier.pause()
        if self._tiering is not None:
            self._prepare_loads(self._tiering)
        work, given_up = self._scheduler.schedule()
        for sequence in self._scheduler.take_to_load():
            self._begin_load(sequence)
        for sequence, error in given_up:
            self._forget(sequence)
            sequence.fail(error)
        if not work:
            loading = 0 if self._tiering is None else self._tiering.loading
            assert given_up or loading or not self._scheduler.has_work, "requests wait and nothing runs"
            self._stalled = bool(loading)
            self._apply(self._cache.make_way())
            return
        self._stalled = False
        self._events_are_told()  # of those that ended before this forward
        shares = [item.share for item in work] if self._pacing is not None else []
        try:
            logits = self._forward(work)
        except Exception as error:
            log.exception("a forward failed; its %d requests fail, others go on", len(work))
            self._counters.failed_steps += 1
            for item in work:
                self._scheduler.fail(item.sequence, item.lease)
                self._forget(item.sequence)
                item.sequence.fail(StepFailed(error))
            return
        row = 0
        for item in work:
            rows = self._rows_wanted(item)
            if item.drafts:
                self._take_verified(item, logits[row : row + rows])
            else:
                self._take(item, logits[row : row + rows])
            row += rows
        self._apply(self._cache.make_way())
        if self._tiering is not None:
            self._tiering.follow()
        if self._pacing is not None and not any(item.drafts for item in work):
            self._pacing.observe(shares, self._clock() - began)

    def _apply(self, plan: Plan) -> None:
        """Stores first: what follows may write to their rows."""
        if plan.stores and self._tiering is not None:
            self._tiering.store(plan.stores)
        if plan:
            self._runtime.apply(plan)

    def _forward(self, work: list[Work]) -> Logits:
        self._apply(together([self._cache.make_way(), *(item.sequence.plan for item in work)]))
        for item in work:
            item.sequence.plan = NOTHING
        batch = Batch(
            [
                Segment(
                    item.tokens,
                    item.lease.computed,
                    item.lease.tables,
                    self._rows_wanted(item),
                    item.lease.slot,
                )
                for item in work
            ]
        )
        began = self._clock()
        logits = self._runtime.forward(batch)
        took = self._clock() - began
        self._counters.forward_s += took
        if all(isinstance(item.sequence.state, Decoding) for item in work):
            if self._drafter is not None:
                drafts = sum(item.drafts for item in work)
                self._drafter.observe(len(work), drafts, sum(s.past for s in batch.segments), took)
        elif self._tiering is not None:
            self._tiering.observe(batch.segments, took)
        self._counters.steps += 1
        self._counters.computed_tokens += batch.new_tokens
        return logits

    @staticmethod
    def _rows_wanted(item: Work) -> int:
        if not item.sequence.prompt_scored:
            return len(item.tokens)
        return 1 + item.drafts if item.completes_prompt and item.sequence.max_tokens > 0 else 0

    def _take_verified(self, item: Work, logits: Logits) -> None:
        """Row by row, as if each had been a step of its own, for as long as what is sampled is what was drafted.

        What lies in the pools beyond the last row that was taken is void: the next step writes over it.
        """
        sequence, lease, accepted = item.sequence, item.lease, 0
        sequence.draft_tokens += item.drafts
        self._counters.draft_tokens += item.drafts
        self._take(Work(sequence, lease, item.tokens[:1]), logits[:1])
        for row in range(1, 1 + item.drafts):
            # A sequence that has ended has no lease.
            if sequence.lease is not lease or sequence.generated[-1] != item.tokens[row]:
                break
            accepted += 1
            sequence.accepted_draft_tokens += 1
            self._counters.accepted_draft_tokens += 1
            self._take(Work(sequence, lease, item.tokens[row : row + 1]), logits[row : row + 1])
        sequence.acceptance.verified(item.drafts, accepted, cut_short=sequence.lease is not lease)

    def _take(self, item: Work, logits: Logits) -> None:
        """One sequence's share of a forward's result: score, sample, publish, keep its state, tell.

        Logits that are not finite come of K/V that are not: nothing that such a request computed is published.
        """
        sequence, completes = item.sequence, item.completes_prompt
        try:
            if not sequence.prompt_scored:
                self._score(sequence, item.lease.computed, logits)
            sampled = sequence.sampler.sample(logits[-1]) if completes and sequence.max_tokens else None
        except RootstockError as error:
            self._discard(sequence, item.lease, error)
            return
        except Exception as error:
            log.exception("request %s failed after its forward", sequence.request.id)
            self._discard(sequence, item.lease, StepFailed(error))
            return
        # At once: another sequence's commit may take the rows that a snapshot is kept in.
        self._apply(self._cache.commit(item.lease, item.tokens))
        if not completes:
            return
        try:
            self._continue(sequence, item, sampled)
        except Exception as error:
            log.exception("request %s failed after it was sampled", sequence.request.id)
            self._fail(sequence, StepFailed(error))

    def _score(self, sequence: Sequence, past: int, logits: Logits) -> None:
        prompt, top = sequence.request.tokens, sequence.request.prompt_logprobs
        assert top is not None
        following = prompt[past + 1 : past + 1 + len(logits)]
        sequence.prompt_scores.append(score_prompt(logits[: len(following)], following, top))

    def _continue(self, sequence: Sequence, item: Work, sampled: SampledToken | None) -> None:
        """Every known token is computed: tell the next one, or end."""
        if not sequence.prompt_scored:
            sequence.prompt_scored = True
            sequence.emit(PromptScored(sequence.request.id, Logprobs.joined(sequence.prompt_scores)))
            sequence.prompt_scores = []
        if sampled is None:  # a prompt to be scored or cached, and no more
            self._finish(sequence, item, "length")
            return
        self._counters.sampled_tokens += 1
        sequence.generated.append(sampled.token)
        sequence.state = Decoding(item.lease)
        if sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
            if self._tiering is not None:
                self._tiering.count(sequence.load_choice)
            self._verifier.consider(sequence.request.tokens, item.lease.hit_tokens, sequence.namespace)
        if sampled.token in sequence.stop_tokens:
            self._finish(sequence, item, "stop", stopped_by=sampled.token)
            return
        text, stopped_by = "", None
        if sequence.stream is not None:
            delta = sequence.stream.push(sampled.token)
            text, stopped_by = delta.text, delta.stopped_by
        sequence.emit(
            TokenEvent(sequence.request.id, sampled.token, text, sampled.logprob, sequence.cached_tokens or 0)
        )
        if stopped_by is not None:
            self._finish(sequence, item, "stop", stopped_by=stopped_by, flush=False)
        elif len(sequence.generated) >= sequence.max_tokens:
            self._finish(sequence, item, "length")

    def _finish(
        self,
        sequence: Sequence,
        item: Work,
        reason: Literal["stop", "length"],
        stopped_by: str | int | None = None,
        flush: bool = True,
    ) -> None:
        text = sequence.stream.finish() if flush and sequence.stream is not None else ""
        self._scheduler.complete(sequence, item.lease)
        self._forget(sequence)
        usage = sequence.usage(self._clock())
        sequence.finish(Finished(sequence.request.id, reason, usage, text, stopped_by))

    # --------------------------------------------------------------------------------------- verifying

    def _verify(self) -> None:
        """Nothing else is to be done: a piece of what `--verify-hits` asks for."""
        self._step_began = self._clock()
        try:
            self._verifier.step()
            self._apply(self._cache.make_way())
        except Exception as error:
            self._start_anew(error)
        finally:
            self._step_began = None

    def _distrust(self, tokens: Tokens, namespace: Namespace, first: int) -> None:
        self._cache.forget(tokens, namespace, first)
        if self._tiering is not None:
            self._tiering.follow()

    # ----------------------------------------------------------------------------------------- loading

    def _prepare_loads(self, tiering: TierConnector) -> None:
        tiering.follow()
        for sequence in tiering.overdue():
            tiering.give_up(sequence)
            sequence.may_load = False
            sequence.did_not_load()
            self._scheduler.requeue(sequence)
        self._scheduler.loading = tiering.loading

    def _begin_load(self, sequence: Sequence) -> None:
        assert self._tiering is not None
        assert isinstance(sequence.state, Loading)
        lease, position, loads = sequence.state.lease, sequence.state.position, sequence.state.loads
        self._apply(together([self._cache.make_way(), sequence.plan]))
        sequence.plan = NOTHING
        self._tiering.begin(
            sequence,
            lease,
            position,
            loads,
            lambda load, ended: self._commands.put(lambda: self._end_load(load, ended)),
        )

    def _end_load(self, load: UnderWay, ended: LoadEnded) -> None:
        """The request goes on from what was loaded, or is admitted anew if some of it could not be. What was loaded
        for a request that is gone stays in the cache."""
        assert self._tiering is not None
        if not self._tiering.is_under_way(load):
            return  # the cache was started anew meanwhile
        if not self._tiering.end(load, ended):
            self._cache.release(load.lease, ReleaseReason.UNUSED)
            if load.sequence is not None:
                self._scheduler.requeue(load.sequence)
            return
        self._apply(self._cache.loaded(load.lease, load.position))
        if load.sequence is None:
            self._cache.release(load.lease, ReleaseReason.FINISHED)
        else:
            self._scheduler.loaded(load.sequence, load.lease)
        self._apply(self._cache.make_way())

    # ---------------------------------------------------------------------------------------- the rest

    def _drain_commands(self) -> None:
        """What has come up to now, and not what comes meanwhile: a flood of commands must not stop the steps."""
        for _ in range(self._commands.qsize()):
            self._commands.get_nowait()()  # nobody else takes from the queue

    def _fail_everything(self, error: RootstockError) -> None:
        for sequence in list(self._scheduler.sequences()):
            self._take_out(sequence)
        with self._lock:
            left, self._live = list(self._live.values()), {}
        for sequence in left:
            sequence.fail(error)
        self._events_are_told()
