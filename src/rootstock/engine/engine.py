"""The engine: methods that any thread may call, and the one thread that owns the cache and the runtime.

The thread runs the commands that other threads queued, then a step (`step.py`). Without work it sleeps.
Each accepted request gets exactly one terminal event (`request_table.py`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rootstock.cache.explain import Explanation
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.retention.hint_types import CacheHints, HintOutcome, RetainedLimits
from rootstock.cache.retention.pins import PinId, Pinned, PinRefused
from rootstock.cache.retention.working_set import SessionReport
from rootstock.cache.shared_budget import BudgetShare
from rootstock.cache.stats import PoolUsage
from rootstock.cache.tree_snapshot import NodeDetail, TreeWalk
from rootstock.cache.types import Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.config import EngineConfig
from rootstock.engine.activity import LiveRequest, live_request
from rootstock.engine.adapters import AdapterTable, NamedAdapter
from rootstock.engine.clearing import CacheClearer, Clearing, ModelNamespaces
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.engine_thread import DeviceTurns, EngineThread, NotStarted, OwnThread
from rootstock.engine.idle.prefills import IdlePrefill
from rootstock.engine.limits import RequestLimits
from rootstock.engine.memory_watch import MemoryWatch
from rootstock.engine.part_list import EngineParts
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    RequestId,
    Sink,
    StopParams,
)
from rootstock.engine.request_table import RequestTable
from rootstock.engine.sequence import Sequence, SequenceFactory
from rootstock.engine.speculation.proposer import Proposer
from rootstock.engine.stats import NEVER, Cleared, EngineStats, Health, why_not_alive
from rootstock.engine.step import StepRunner
from rootstock.engine.tiers.connector import TierConnector
from rootstock.errors import (
    AdapterNotLoaded,
    CacheMisuse,
    EngineStopped,
    IdleWorkOff,
)
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.base import Runtime
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.prompts.tenant_salt import is_chosen_by_client
from rootstock.text.tokenizer import ModelTokenizer

T = TypeVar("T")


class Engine:
    """The engine of one model. `with` starts and stops its thread; any thread may call its methods.

    The engine owns the cache. Without a tokenizer, token events have no text, and stop strings are refused. A test
    may drive an engine that was not started by calling `step`. `parts` and `steps` belong to the engine's thread:
    other threads use them by `call`.
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
        memory_watch: MemoryWatch | None = None,
    ) -> None:
        self._runtime = runtime
        self._cache = cache
        self._config = config = config or EngineConfig()
        self._clock = clock
        self._limits = RequestLimits.of(runtime.description, cache, config, tokenizer)
        self._namespace = runtime.description.namespace()
        self.parts = EngineParts.of(
            self, runtime, cache, config, clock, tier_connector, verify_hits, proposer, memory_watch
        )
        self.scheduler = self.parts.scheduler
        self._hooks = self.parts.hooks
        self._requests = RequestTable(config.max_batch, config.max_queue, self._hooks.ended)
        self.steps = StepRunner(runtime, cache, self._requests, self.parts, clock)
        self.adapters = AdapterTable()
        self._loading = threading.Lock()  # held while an adapter is loaded: one at a time
        self._has_nameless_adapters = False  # True: requests of unloaded adapters still run
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clearer = CacheClearer(self.call, cache, self.parts, tier_connector)
        self._thread: EngineThread = NotStarted(self._end)
        self._wake: Callable[[], None] = lambda: None
        self._finishing = threading.Lock()  # of _finished
        self._finished = False
        self._step_began = NEVER
        self._sequences = SequenceFactory(tokenizer, self._limits, config.seed)
        self._at_end = ExitStack()  # closes what is no part

        # Compiles the constraints of answers. None: without a tokenizer, tokens have no text.
        self.constraints: ConstraintCompiler | None = None
        if tokenizer is not None:
            eos = self._limits.eos_token_ids
            self.constraints = ConstraintCompiler(tokenizer, self._limits.vocab_size, eos)
            self._at_end.callback(self.constraints.close)
        self._at_end.callback(self.steps.close)
        self.tier_connector = tier_connector
        self.public_heads: PublicHeads | None = None  # set before the first request, if there are any
        self._idle = threading.Event()  # set while no request is in the engine
        self._idle.set()

    # --------------------------------------------------------------------------------------- lifetime

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, device: DeviceThread | None = None) -> None:
        """Starts the engine on a thread of its own, or on the thread of a device that serves several models."""
        assert isinstance(self._thread, NotStarted), "an engine is started once"
        thread: OwnThread | DeviceTurns
        if device is None:
            thread = OwnThread(self._run, wake=lambda: self._commands.put(lambda: None))
        else:
            self._wake = device.wake
            self.scheduler.share_device(lambda: device.others_decode(self))
            thread = DeviceTurns(device, self, self._end)
        self._thread = thread
        thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step. Requests in flight fail with EngineStopped. Idempotent."""
        self._requests.close()
        self._thread.stop()

    def _end(self) -> None:
        """Ends an engine that has no thread of its own."""
        self._finish(is_sound=True)

    # ---------------------------------------------------------------------------------- for any thread

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._limits.context_limit

    @property
    def budget_share(self) -> BudgetShare | None:
        """The cache's part in a budget of several models. None: the cache has a budget of its own."""
        return self._cache.share

    @property
    def reuses_prefixes(self) -> bool:
        """True if prefix caching is enabled."""
        return self._cache.reuse

    def namespace(self, salt: str = "", adapter: str = "") -> Namespace:
        """Returns the cache namespace of requests with this salt, and of a LoRA adapter by its fingerprint."""
        if not salt and not adapter:
            return self._namespace
        return replace(self._namespace, salt=salt, adapter=adapter)

    @property
    def namespaces(self) -> ModelNamespaces:
        """The namespaces of the base model, and of each adapter since the start."""
        return ModelNamespaces.known(self._namespace, self.adapters.known)

    def load_adapter(self, name: str, path: str | Path) -> NamedAdapter:
        """Loads a LoRA adapter, and checks it between two steps. Requests may name its fingerprint afterwards.

        Raises AdapterUnusable, AdapterExists, AdapterLimit or EngineStopped.
        """
        with self._loading:
            self.adapters.refuse_taken(name)
            source = read_adapter(name, path)  # on the caller's thread, because the disk may be slow

            def load() -> NamedAdapter:
                adapter = NamedAdapter(name, source.directory, self._runtime.load_adapter(source))
                self.adapters.add(adapter)
                return adapter

            return self.call(load)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter's name at once, and its weights when its last request has ended.

        Its cached prefixes stay until eviction. Raises AdapterNotLoaded.
        """
        self.adapters.remove(name)
        self.call(self._drop_nameless_adapters)

    def _drop_nameless_adapters(self) -> None:
        nameless = self.adapters.nameless
        in_use = {sequence.request.adapter for sequence in self._requests.live}
        for fingerprint in nameless - in_use:
            for act in self._hooks.drop_adapter:
                act(fingerprint)
            self.adapters.drop(fingerprint)
            self._runtime.unload_adapter(fingerprint)
        self._has_nameless_adapters = bool(nameless & in_use)

    def adapter_name(self, fingerprint: str) -> str:
        """Returns a name of a LoRA adapter, or its fingerprint if it has no name any more."""
        return self.adapters.name_of(fingerprint)

    def scope(self, tokens: Tokens, namespace: Namespace | None = None) -> Scope:
        """Returns the namespaces of a prompt; None: without a salt, of the base model.

        With a salt that a client chose, the whole prompt is private.
        """
        namespace = namespace or self._namespace
        if self.public_heads is None or is_chosen_by_client(namespace.salt):
            return Scope(namespace)
        return Scope(namespace, self.public_heads.longest(tokens))

    def scope_of(self, asked: Request | IdlePrefill) -> Scope:
        """Returns the namespaces of a request's prompt."""
        return self.scope(asked.tokens, self.namespace(asked.salt, asked.adapter))

    def submit(self, request: Request, sink: Sink) -> None:
        """Validates and queues a request. `sink` gets its events.

        Raises EmptyPrompt, PromptTooLong, CompletionTooLong, InvalidParameter, AdapterNotLoaded, QueueFull,
        SessionsFull or EngineStopped.
        """
        self._limits.refuse_impossible(request)
        self._refuse_unloaded(request)
        self._requests.check(request)  # before the work of making a sequence
        if self.parts.gate is not None and self.parts.gate.held:
            self.parts.gate.refuse_if_full(request, self._clock())
        sequence = self._sequences.make(request, sink, self.scope_of(request), self._clock())

        def begin() -> None:
            self.run_soon(lambda: self._begin(sequence))

        announce: Callable[[], None] = begin
        for prepare in self._hooks.prepare:
            announce = partial(prepare, sequence, announce)
        self._requests.add(sequence, announce)

    def _refuse_unloaded(self, request: Request) -> None:
        if request.adapter and not self.adapters.is_loaded(request.adapter):
            raise AdapterNotLoaded(request.adapter)

    def _begin(self, sequence: Sequence) -> None:
        """Schedules an accepted sequence, whose adapter may have been unloaded since it was submitted."""
        try:
            self._refuse_unloaded(sequence.request)
        except AdapterNotLoaded as error:
            if self._requests.holds(sequence):
                self._requests.fail(sequence, error)
            return
        self.steps.add(sequence)

    def prefill_in_idle_time(self, prefill: IdlePrefill) -> None:
        """Queues a prompt to be cached while no request is in the engine. `prefill.ended` gets its end.

        Raises EmptyPrompt, PromptTooLong, InvalidParameter, AdapterNotLoaded, IdleWorkOff, IdleWorkFull or
        EngineStopped.
        """
        if self.parts.idle_prefills is None:
            raise IdleWorkOff()
        stop = StopParams(max_tokens=0)
        request = Request(RequestId(""), prefill.tokens, stop=stop, adapter=prefill.adapter)
        self._limits.refuse_impossible(request)
        self._refuse_unloaded(request)
        self.parts.idle_prefills.submit(prefill)

    def cached_tokens(self, tokens: Tokens, namespace: Namespace | None = None) -> int:
        """Returns how many of the tokens are in memory now, for a prompt that begins with all of them."""
        scope = self.scope(tokens, namespace)
        longer = np.append(tokens, np.int32(0))  # a match leaves the last token of a prompt
        return self.call(
            lambda: self._cache.match(longer, scope.namespace, public_tokens=scope.public_tokens).length
        )

    def wait_until_idle(self, within_s: float) -> bool:
        """Waits until no request is in the engine. Returns False if the time passes before."""
        return self._idle.wait(within_s)

    def call_after_events(self, function: Callable[[], None]) -> None:
        """Registers a function that the engine's thread calls after each group of events, at least once a step.

        A sink that collects events uses it to pass them on all at once.
        """
        self._requests.call_after_events(function)

    def no_call_after_events(self, function: Callable[[], None]) -> None:
        self._requests.no_call_after_events(function)

    def end_turn(self, prompt: Tokens, salt: str = "", adapter: str = "") -> None:
        """Notes that the answer to a prompt calls no tool, so that a person has to continue. Does not wait."""
        scope = self.scope(prompt, self.namespace(salt, adapter))
        self.run_soon(
            lambda: self._cache.end_turn(prompt, scope.namespace, public_tokens=scope.public_tokens)
        )

    def abort(self, request: RequestId) -> None:
        """Ends a request with `Aborted`, unless it has ended. Idempotent. Does not wait."""
        if request in self._requests:
            self.run_soon(lambda: self.steps.abort(request))

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

    def explain(self, tokens: Tokens, namespace: Namespace | None = None) -> Explanation:
        """Explains which prefix a request with these tokens would hit now, and why no deeper one."""

        scope = self.scope(tokens, namespace)

        def explain() -> Explanation:
            match = self._cache.match(tokens, scope.namespace, public_tokens=scope.public_tokens)
            _, choice = self.scheduler.tiers.choose(match)
            return replace(self._cache.explain_hit(match), below=choice)

        return self.call(explain)

    def volatile_spans(self, salt: str | None = None) -> list[VolatileSpan]:
        """Returns the volatile spans of one salt's prompts, or of all prompts, the costliest first."""
        namespaces, volatile = self.namespaces.asked(salt), self._cache.volatile
        found = self.call(lambda: [span for each in namespaces for span in volatile.of(each)])
        return sorted(found, key=lambda span: -span.recomputed_tokens)

    def stats(self) -> EngineStats:
        for measure in self._hooks.measure:
            measure()

        def stats() -> EngineStats:
            of_parts = ChainMap(*(told() for told in self._hooks.stats))
            return EngineStats(
                self._cache.stats(),
                self.scheduler.running,
                self.scheduler.waiting,
                deepcopy(self.steps.counters),
                paced_tokens=self.scheduler.paced_tokens,
                phases=self.scheduler.phases(),
                adapters=self.adapters.stats(*self.scheduler.adapters()),
                pool_copies=self._runtime.pool_copies,
                **of_parts,
            )

        return self.call(stats)

    def pin(
        self, tokens: Tokens, tenant: str = "", namespace: Namespace | None = None
    ) -> Pinned | PinRefused:
        """Keeps the cached part of a prefix for a tenant until it is released."""
        scope = self.scope(tokens, namespace)
        return self.call(
            lambda: self._cache.pin(tokens, scope.namespace, tenant, public_tokens=scope.public_tokens)
        )

    def apply_hints(
        self, tokens: Tokens, hints: CacheHints, namespace: Namespace | None = None
    ) -> tuple[HintOutcome, ...]:
        """Applies hints to the cached part of a prompt, without a request."""
        scope = self.scope(tokens, namespace)

        def apply() -> tuple[HintOutcome, ...]:
            head = scope.public_tokens
            outcomes = self._cache.apply_hints(tokens, scope.namespace, hints, public_tokens=head)
            self.steps.settle()
            return outcomes

        return self.call(apply)

    def release_pin(self, pin: PinId, tenant: str | None = None) -> bool:
        """Releases a pinned prefix, of one tenant or of any. Returns False if there is no such pin."""
        return self.call(lambda: self._cache.release_pin(pin, tenant))

    def pins(self, tenant: str | None = None) -> list[Pinned]:
        """Returns the pinned prefixes of one tenant, or of all."""
        return self.call(lambda: self._cache.pins(tenant))

    def sessions(self, tenant: str | None, most: int) -> list[SessionReport]:
        """Describes the latest sessions of one tenant, or of all, those with held requests first."""
        gate = self.parts.gate

        def sessions() -> list[SessionReport]:
            held = Counter[tuple[str, str]]() if gate is None else gate.sessions(tenant)
            return self._cache.working_set.sessions(tenant, most, held)

        return self.call(sessions)

    def held_before(self, request: Request) -> int:
        """Returns how many requests of the same tenant are held for their session's place in memory; 0 for a request
        without a session. Does not wait."""
        gate = self.parts.gate
        return 0 if gate is None or not gate.held else gate.held_before(request)

    def usage(self) -> PoolUsage:
        """Reports the memory of the pools: O(1), unlike `stats`."""
        return self.call(self._cache.usage)

    def requests(self) -> list[LiveRequest]:
        """Describes the live requests, in order of arrival. Does not wait for the engine's thread."""
        now = self._clock()
        return [live_request(sequence, now) for sequence in self._requests.live]

    def now(self) -> float:
        """Returns the time by the clock of the engine's reports."""
        return self._clock()

    def walk_tree(self, numbers: Iterator[int], previous: TreeWalk | None = None) -> TreeWalk:
        """Begins a walk over the cache's tree. `continue_walk` continues it."""
        return self.call(lambda: TreeWalk(self._cache.tree, self._cache.pools, numbers, previous))

    def continue_walk(self, walk: TreeWalk, for_s: float) -> bool:
        """Continues a walk between two steps, for `for_s` of the thread's processor time.

        Returns whether nodes are left.
        """
        return self.call(lambda: walk.advance(for_s, time.thread_time))

    def node_detail(self, walk: TreeWalk, number: int) -> NodeDetail | None:
        """Describes a node of a walk as it is now; None if it is gone."""
        return self.call(lambda: walk.detail(number, self._clock()))

    def node_prefix(self, walk: TreeWalk, number: int) -> tuple[Namespace, Tokens] | None:
        """Returns the namespace of a node of a walk, and all tokens up to its end; None if it is gone."""
        return self.call(lambda: walk.prefix(number))

    def clear_cache(self, salt: str | None = None) -> Cleared:
        """Drops every cached prefix that no running request uses, in memory and in the tiers.

        With a salt, drops the prefixes of one tenant only. Raises the errors of `clear`.
        """
        return self.clear(Clearing(salt))

    def limit_retained(self, limits: RetainedLimits) -> None:
        """Sets how many bytes hints and pins of tenants may keep. Does not wait."""
        if self._thread.is_current:
            self._cache.limit_retained(limits)
        else:
            self.run_soon(lambda: self._cache.limit_retained(limits))

    def clear(self, clearing: Clearing) -> Cleared:
        """Drops cached prefixes that no running request uses.

        If a public head is dropped in memory, the private tails of all tenants below it are dropped as well.

        Raises ClearUnderWay, EngineStopped, and ClearFailed if records may remain on the disk.
        """
        return self._clearer.clear(clearing, clearing.namespaces(self.namespaces))

    def health(self) -> Health:
        """Reports whether the engine works. Runs on the caller's thread, so that it reports a hung engine too."""
        working_s = self._clock() - self._step_began
        reason = why_not_alive(self._requests.closed, self._thread.is_alive(), working_s, "a step")
        running = self.scheduler.running
        waiting = max(0, len(self._requests) - running)
        return Health(not reason, reason or "ok", running, waiting, self.steps.counters.steps)

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread between two steps, and returns its result."""
        if self._thread.is_current:
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
                if isinstance(error, AssertionError | CacheMisuse):  # internal state may be half changed
                    raise

        self.run_soon(run)
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
        try:
            while not self._requests.closed:
                if self.scheduler.has_work and not self.steps.is_stalled:
                    self.step()
                elif not self._commands.empty() or not self.work_idly():
                    self.step(self.next_command())
            is_sound = True
        finally:
            # Every request gets its terminal event, also after an exception that no handler can recover from.
            self._finish(is_sound)

    def _finish(self, is_sound: bool) -> None:
        """Ends every request, and closes the parts. Idempotent. Call it only while no step runs."""
        with self._finishing:
            if self._finished:
                return
            self._finished = True
            self._requests.close()
            try:
                self.steps.fail_all(EngineStopped())
                self._drain_commands()
                self._idle.set()  # threads that wait for it find the engine stopped
                self.parts.idle_work.pause()
            finally:
                self._at_end.close()
                for close in self._hooks.close:
                    close(is_sound=is_sound)

    def work_idly(self) -> bool:
        """Does a piece of work that can wait. Returns False if there is none. For the engine's thread."""
        idle = self.parts.idle_work
        if self.scheduler.has_work or not idle.has_work:
            return False
        self._step_began = self._clock()
        try:
            for act in self._hooks.before_idle:
                act()
            if idle.is_held():
                return False
            self.steps.do_idle_work()
        except Exception as error:
            self.steps.restart(error)
        finally:
            self._step_began = NEVER
        return True

    # ---------------------------------------------------------------------- turns on a device's thread

    @property
    def has_turn(self) -> bool:
        """True if there are commands, or a step can run."""
        if not self._commands.empty():
            return True
        if not self.scheduler.has_work or self.steps.is_blocked:
            return False
        return not self.steps.is_stalled or self.next_overdue_s == 0.0

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_blocked(self) -> bool:
        """True if the waiting requests need memory that a request of another model uses."""
        return self.scheduler.has_work and self.steps.is_blocked

    @property
    def decodes(self) -> bool:
        return self.scheduler.decodes

    @property
    def next_overdue_s(self) -> float | None:
        """Seconds until the engine needs a turn without a command; None: it needs none.

        Without requests, this is the time until idle work is due. If nothing can run before a load has ended, it is
        the time until a load is overdue.
        """
        if not self.scheduler.has_work:
            return self.parts.idle_work.next_turn_s
        return self.scheduler.tiers.next_overdue_s if self.steps.is_stalled else None

    def pause_idle_work(self) -> bool:
        """Releases the rows of idle work. Returns False if there were none."""
        return self.parts.idle_work.pause()

    def detach(self) -> None:
        """Keeps other models from evicting entries of this cache, because the engine gets no more turns."""
        if self._cache.share is not None:
            self._cache.share.close()

    def fail(self) -> None:
        """Ends the engine after an exception that no handler can recover from: memory may be half written."""
        self._finish(is_sound=False)

    def run_soon(self, command: Callable[[], None]) -> None:
        """Queues a command for the engine's thread."""
        self._commands.put(command)
        self._wake()

    def next_command(self) -> Callable[[], None] | None:
        """Waits for a command if nothing can run before one arrives or a load is overdue."""
        if self.scheduler.has_work and not self.steps.is_stalled:
            return None
        try:
            return self._commands.get(timeout=self.next_overdue_s)
        except queue.Empty:
            return None

    def step(self, command: Callable[[], None] | None = None) -> bool:
        """Runs the queued commands and one step. Returns False if there was nothing to do.

        Only the engine's thread calls it, or a test that has not started the engine.
        """
        self._step_began = self._clock()
        try:
            if command is not None:
                command()
            self._drain_commands()
            if self._requests.closed or not self.scheduler.has_work:
                return False
            self._idle.clear()
            self.steps.run()
        except Exception as error:
            self.steps.restart(error)
        finally:
            self._requests.notify()
            self._step_began = NEVER
            if not self.scheduler.has_work:
                self._idle.set()
            if self._has_nameless_adapters:
                self._drop_nameless_adapters()
        return True

    def _drain_commands(self) -> None:
        """Runs the commands queued up to now. Later ones wait: a flood of commands must not stop the steps."""
        for _ in range(self._commands.qsize()):
            self._commands.get_nowait()()  # only this thread takes from the queue
