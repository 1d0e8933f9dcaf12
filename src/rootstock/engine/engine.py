"""The engine: the public face, callable from any thread, and the one thread that owns the cache and the runtime.

The thread runs the commands that other threads queued, then a step (`step.py`). Without work it sleeps.
Each accepted request gets exactly one terminal event (`request_table.py`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.explain import Explanation
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.stats import PoolUsage
from rootstock.cache.tree_walk import NodeDetail, TreeWalk
from rootstock.cache.types import Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.config import EngineConfig
from rootstock.engine.activity import Activity, LiveRequest, live_request
from rootstock.engine.constraints.compiler import ConstraintCompiler
from rootstock.engine.constraints.masks import MaskWorker
from rootstock.engine.constraints.progress import AnswerProgress
from rootstock.engine.detokenizer import Detokenizer
from rootstock.engine.limits import RequestLimits
from rootstock.engine.pacing import Pacing
from rootstock.engine.prompts.salt import is_chosen_by_client
from rootstock.engine.request import Aborted, Event, Failed, Finished, Request, RequestId, Sink
from rootstock.engine.request_table import RequestTable
from rootstock.engine.sampling import Sampler
from rootstock.engine.scheduler import Scheduler
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.proposer import NgramProposer, Proposer, why_not
from rootstock.engine.stats import Cleared, EngineStats, Health
from rootstock.engine.step import PlanExecutor, StepRunner
from rootstock.engine.tiers.connector import UNMEASURED, TierConnector
from rootstock.engine.tiers.hit_verifier import HitVerifier
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import ClearUnderWay, EngineStopped
from rootstock.runtime.base import ModelDescription, Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")

# Float32 logits of one step's scored prompts: 262 rows of 32,000 tokens. Computing them takes as long as the rest of
# a small model's forward.
SCORED_LOGITS_BYTES = 32 * 1024**2
HUNG_AFTER_S = 300.0  # a step that takes longer is reported as not alive


def _idle_chunks(described: ModelDescription) -> int:
    """Returns how many chunks a step may take while nothing decodes.

    A model that runs one sequence per forward uses its own attention, with the scores of the whole chunk in memory at
    once: a larger chunk takes more memory and saves no time.
    """
    return 1 if described.execution_mode == "one sequence per forward" else 4


class Engine:
    """The engine of one model. `with` starts and stops its thread; any thread may call its methods.

    The engine owns the cache. Without a tokenizer, token events have no text, and stop strings are refused. A test
    may drive an engine that was not started by calling `step`. `scheduler`, `tier_connector`, `proposer`,
    `hit_verifier` and `steps` belong to the engine's thread: other threads use them by `call`.
    """

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        config: EngineConfig | None = None,
        tokenizer: ModelTokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        tier_connector: TierConnector | None = None,
        verify_hits: float = 0.0,
        proposer: Proposer | None = None,
    ) -> None:
        self._cache = cache
        self._config = config = config or EngineConfig()
        self._tokenizer = tokenizer
        self._clock = clock
        self._limits = _limits(runtime.description, cache, config, tokenizer)
        self._namespace = runtime.description.namespace()
        self.activity = Activity(clock)
        self._requests = RequestTable(config.max_batch, config.max_queue, self.activity.ended)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._seeds = np.random.default_rng(config.seed)
        self._lock = threading.Lock()  # of _seeds and _after_events
        self._clearing = threading.Lock()  # held while one tenant's records in the tiers are cleared
        self._after_events: tuple[Callable[[], None], ...] = ()
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None

        # Compiles what a request's answer must follow. None: without a tokenizer, tokens have no text.
        self.constraints: ConstraintCompiler | None = None
        if tokenizer is not None:
            eos = self._limits.eos_token_ids
            self.constraints = ConstraintCompiler(tokenizer, self._limits.vocab_size, eos)
        self._masks = MaskWorker()

        # Reason why drafts are off. None: they are on.
        self.why_no_drafts = why_not(runtime.description, config.draft_tokens)
        self.proposer: Proposer | None = None
        if self.why_no_drafts is None:
            self.proposer = proposer or NgramProposer(cache, config.draft_tokens)
        pacing = None if config.itl_target_s is None else Pacing(config.itl_target_s)
        self.tier_connector = tier_connector
        self.public_heads = PublicHeads()  # replaced before the first request, if there are any
        self.scheduler = Scheduler(
            cache,
            config.max_batch,
            config.chunk_tokens,
            (lambda match: (None, None)) if tier_connector is None else (lambda m: tier_connector.choose(m)),
            pacing,
            self.proposer,
            config.idle_chunk_tokens or config.chunk_tokens * _idle_chunks(runtime.description),
            max(1, SCORED_LOGITS_BYTES // (4 * runtime.description.vocab_size)),
        )
        executor = PlanExecutor(runtime, tier_connector)
        self.hit_verifier: HitVerifier | None = None
        if verify_hits:
            self.hit_verifier = HitVerifier(
                runtime, cache, verify_hits, config.chunk_tokens, executor.apply, self._distrust, config.seed
            )
        self.steps = StepRunner(
            runtime,
            cache,
            self.scheduler,
            self._requests,
            executor,
            self.hit_verifier,
            tier_connector,
            self.proposer,
            self._masks,
            pacing,
            clock,
            self._commands.put,
            self._notify,
            self.activity.prompt_computed,
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
        """Ends the thread after the current step. Requests in flight fail with EngineStopped. Idempotent."""
        self._requests.close()
        if self._thread is None:
            self.steps.fail_all(EngineStopped())
            self._masks.close()
            self._close_tiers()
            return
        self._commands.put(lambda: None)  # wakes the thread if it sleeps
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---------------------------------------------------------------------------------- for any thread

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._limits.context_limit

    @property
    def reuses_prefixes(self) -> bool:
        """Whether prefix caching is enabled."""
        return self._cache.reuse

    def namespace(self, salt: str = "") -> Namespace:
        """Returns the cache namespace of requests with this salt."""
        return replace(self._namespace, salt=salt)

    def scope(self, tokens: Tokens, salt: str = "") -> Scope:
        """Returns the namespaces of a prompt: with a salt that a client chose, all of it is private."""
        public_tokens = 0 if is_chosen_by_client(salt) else self.public_heads.longest(tokens)
        return Scope(self.namespace(salt), public_tokens)

    def submit(self, request: Request, sink: Sink) -> None:
        """Validates and queues a request. `sink` gets its events.

        Raises EmptyPrompt, PromptTooLong, CompletionTooLong, InvalidParameter, QueueFull or EngineStopped.
        """
        self._limits.refuse_impossible(request)
        self._requests.check(request)  # before the work of making a sequence
        sequence = self._sequence(request, sink)
        self._requests.add(sequence, lambda: self._commands.put(lambda: self.steps.add(sequence)))

    def _sequence(self, request: Request, sink: Sink) -> Sequence:
        ends = self._limits.end_tokens(request)
        seed = request.sampling.seed
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(
                self._tokenizer,
                request.stop.stop_strings,
                context=request.tokens,
                visible=request.visible_tokens,
            )
        return Sequence(
            request=request,
            sink=sink,
            scope=self.scope(request.tokens, request.salt),
            max_tokens=self._limits.max_tokens(request),
            sampler=Sampler(
                request.sampling,
                request.tokens,
                self._limits.vocab_size,
                self._next_seed() if seed is None else seed,
                ends,
                request.stop.min_tokens,
                progress=None if request.constraint is None else AnswerProgress(request.constraint),
            ),
            detokenizer=detokenizer,
            stop_tokens=frozenset(ends),
            submitted_at=self._clock(),
        )

    def _next_seed(self) -> int:
        with self._lock:
            return int(self._seeds.integers(2**63))

    def call_after_events(self, function: Callable[[], None]) -> None:
        """Registers a function that the engine's thread calls after each group of events, at least once a step.

        A sink that collects events uses it to pass them on all at once.
        """
        with self._lock:
            self._after_events += (function,)

    def no_call_after_events(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._after_events = tuple(other for other in self._after_events if other != function)

    def abort(self, request: RequestId) -> None:
        """Ends a request with `Aborted`, unless it has ended. Idempotent. Does not wait."""
        if request in self._requests:
            self._commands.put(lambda: self.steps.abort(request))

    def generate(self, request: Request) -> Iterator[Event]:
        """Submits a request and yields its events. Closing the iterator aborts the request."""
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
        """Explains which prefix a request with these tokens would hit now, and why no deeper one."""

        scope = self.scope(tokens, salt)

        def explain() -> Explanation:
            match = self._cache.match(tokens, scope.namespace, public_tokens=scope.public_tokens)
            explanation = self._cache.explain_hit(match)
            if self.tier_connector is None:
                return explanation
            _, choice = self.tier_connector.choose(match)
            return explanation if choice is None else replace(explanation, below=choice)

        return self.call(explain)

    def volatile_spans(self, salt: str | None = None) -> list[VolatileSpan]:
        """Returns the volatile spans of one salt's prompts, or of all, the costliest first."""
        namespace = None if salt is None else self.namespace(salt)
        return self.call(lambda: self._cache.volatile.of(namespace))

    def stats(self) -> EngineStats:
        space = UNMEASURED if self.tier_connector is None else self.tier_connector.measure()
        return self.call(
            lambda: EngineStats(
                self._cache.stats(),
                self.scheduler.running,
                self.scheduler.waiting,
                replace(self.steps.counters),
                None if self.tier_connector is None else self.tier_connector.stats(space),
                {} if self.hit_verifier is None else dict(self.hit_verifier.counts),
                self.scheduler.paced_tokens,
            )
        )

    def usage(self) -> PoolUsage:
        """Reports the memory of the pools: O(1), unlike `stats`."""
        return self.call(self._cache.usage)

    def requests(self) -> list[LiveRequest]:
        """Describes the live requests, in order of arrival. Does not wait for the engine's thread."""
        now = self._clock()
        return [live_request(sequence, now) for sequence in self._requests.live()]

    def now(self) -> float:
        """Returns the time by the clock of the engine's reports."""
        return self._clock()

    def walk_tree(self, previous: TreeWalk | None = None) -> TreeWalk:
        """Begins a walk over the cache's tree, which `continue_walk` goes on with."""
        return self.call(lambda: TreeWalk(self._cache.tree, self._cache.pools, previous))

    def continue_walk(self, walk: TreeWalk, for_s: float) -> bool:
        """Walks on for some time between two steps. Returns whether nodes are left."""

        def walk_on() -> bool:
            return walk.advance(time.perf_counter() + for_s, time.perf_counter)

        return self.call(walk_on)

    def node_detail(self, walk: TreeWalk, number: int) -> NodeDetail | None:
        """Describes a node of a walk as it is now; None if it is gone."""
        return self.call(lambda: walk.detail(number, self._clock()))

    def node_prefix(self, walk: TreeWalk, number: int) -> tuple[Namespace, Tokens] | None:
        """Returns the namespace of a node of a walk, and all tokens up to its end; None if it is gone."""
        return self.call(lambda: walk.prefix(number))

    def clear_cache(self, salt: str | None = None) -> Cleared:
        """Drops every cached prefix that no running request uses, in memory and in the tiers.

        With a salt, drops those of one tenant only. Raises ClearUnderWay.
        """
        return self._clear(None if salt is None else self.namespace(salt))

    def clear_public_heads(self) -> Cleared:
        """Drops the public heads that no running request uses. In memory, the tails of all tenants behind them go, too.

        Raises ClearUnderWay.
        """
        return self._clear(Scope(self._namespace).public)

    def _clear(self, namespace: Namespace | None) -> Cleared:

        def clear() -> Cleared:
            if self.hit_verifier is not None:
                self.hit_verifier.pause()  # its leases protect cached rows
            before = self._cache.pools.owned_bytes
            blocks = self._cache.clear(namespace)
            if self.proposer is not None:
                self.proposer.forget(namespace)
            later = False
            if self.tier_connector is not None and namespace is not None:
                self.tier_connector.forget(namespace)
            elif self.tier_connector is not None:
                later = not self.tier_connector.clear()
            return Cleared(blocks, before - self._cache.pools.owned_bytes, later)

        if self.tier_connector is None or namespace is None:
            return self.call(clear)
        if not self._clearing.acquire(blocking=False):
            raise ClearUnderWay()
        try:
            cleared = self.call(clear)
            # On the caller's thread: the disk must not delay other tenants' requests.
            self.tier_connector.clear_below(namespace)
            # Stores that ended in between have added records to the index.
            self.call(clear)
        finally:
            self._clearing.release()
        return cleared

    def health(self) -> Health:
        """Reports whether the engine works. Runs on the caller's thread, so that it reports a hung engine too."""
        thread, began = self._thread, self._step_began
        alive, detail = True, "ok"
        if self._requests.closed:
            alive, detail = False, "stopped"
        elif thread is not None and not thread.is_alive():
            alive, detail = False, "the engine's thread has died"
        elif began is not None and self._clock() - began > HUNG_AFTER_S:
            alive, detail = False, f"a step has been running for {self._clock() - began:.0f} s"
        running = self.scheduler.running
        return Health(
            alive, detail, running, max(0, len(self._requests) - running), self.steps.counters.steps
        )

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread between two steps, and returns its result."""
        if self._thread is None or self._thread is threading.current_thread():
            return function()
        if self._requests.closed or not self._thread.is_alive():
            raise EngineStopped()
        future: Future[T] = Future()

        def run() -> None:
            if self._requests.closed:
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

    # -------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        is_sound = False  # stays False after an exception: memory may be half written
        verifier = self.hit_verifier
        try:
            while not self._requests.closed:
                is_idle = not self.scheduler.has_work and self._commands.empty()
                if verifier is not None and is_idle and verifier.has_work:
                    self.verify_hits()
                else:
                    self.step(self.next_command())
            is_sound = True
        finally:
            # Also after an exception that no handler can recover from: every request gets its terminal event.
            self._requests.close()
            try:
                self.steps.fail_all(EngineStopped())
                self._drain_commands()
            finally:
                self._masks.close()
                self._close_tiers(flush=is_sound)

    def next_command(self) -> Callable[[], None] | None:
        """Waits for a command if nothing can run before one arrives or a load is overdue."""
        if not self.scheduler.has_work:
            return self._commands.get()
        if not self.steps.is_stalled or self.tier_connector is None:
            return None
        try:
            return self._commands.get(timeout=self.tier_connector.next_overdue_s)
        except queue.Empty:
            return None

    def step(self, command: Callable[[], None] | None = None) -> bool:
        """Runs the queued commands and one step. Returns False if there was nothing to do.

        For the engine's thread, or a test that did not start it.
        """
        self._step_began = self._clock()
        try:
            if command is not None:
                command()
            self._drain_commands()
            if self._requests.closed or not self.scheduler.has_work:
                return False
            self.steps.run()
        except Exception as error:
            self.steps.restart(error)
        finally:
            self._notify()
            self._step_began = None
        return True

    def verify_hits(self) -> None:
        """Verifies a piece of a sampled hit. For the engine's thread, while there is nothing else to do."""
        self._step_began = self._clock()
        try:
            self.steps.verify_hits()
        except Exception as error:
            self.steps.restart(error)
        finally:
            self._step_began = None

    def _drain_commands(self) -> None:
        """Runs the commands queued up to now. Later ones wait: a flood of commands must not stop the steps."""
        for _ in range(self._commands.qsize()):
            self._commands.get_nowait()()  # only this thread takes from the queue

    def _notify(self) -> None:
        for function in self._after_events:
            try:
                function()
            except Exception:
                log.exception("a function to be called after events raised")

    def _distrust(self, tokens: Tokens, scope: Scope, first: int) -> None:
        self._cache.forget(tokens, scope.namespace, first, public_tokens=scope.public_tokens)
        if self.tier_connector is not None:
            self.tier_connector.follow()

    def _close_tiers(self, flush: bool = True) -> None:
        """Writes rows that only memory has to the tiers, and ends their threads."""
        if self.tier_connector is None:
            return
        try:
            self.tier_connector.settle()
            if flush:
                self.tier_connector.flush()
        except Exception:
            log.exception("the cache could not be written to the tiers")
        finally:
            self.tier_connector.close()


def _limits(
    described: ModelDescription, cache: KVCache, config: EngineConfig, tokenizer: ModelTokenizer | None
) -> RequestLimits:
    limits = [described.context_limit, cache.capacity_tokens]
    if config.context_limit is not None:
        limits.append(config.context_limit)
    # The tokenizer of a fine-tuned model often has an end of turn that the model's configuration does not name.
    of_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
    return RequestLimits(
        min(limits),
        described.vocab_size,
        tuple(dict.fromkeys((*described.eos_token_ids, *of_tokenizer))),
        makes_text=tokenizer is not None,
    )
