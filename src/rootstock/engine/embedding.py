"""The engine of an embedding model: the inputs of all requests share forwards, on the thread of a device.

A forward takes inputs of similar lengths, and no more tokens than a step of a generation model, unless one input has
more by itself. Between two forwards the other engines of the device have their turns, and those that decode also in
the middle of a longer forward. Requests take turns as well: each forward begins with an input of another request, and
a small request does not wait for the end of a large one.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.stats import NEVER, Health, why_not_alive
from rootstock.errors import EmbeddingsFull, EngineStopped, QueueFull, RootstockError, StepFailed
from rootstock.runtime.base import Embedder
from rootstock.units import MIB

log = logging.getLogger(__name__)

_IDLE_CHUNKS = 4  # that a forward may take while no other model decodes
_LONE_TOKENS = 8_192  # of a forward while the device has no other model
_MOST_ROWS = 64  # of a forward
_MOST_BYTES = 512 * MIB  # of the embeddings of all requests, from submission until nothing holds them
_SHORT_TOKENS = 64  # inputs of at most so many tokens share a forward, even if their lengths differ


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embeddings of a request's inputs."""

    rows: NDArray[np.float32]  # [inputs, dimensions]
    queued_s: float  # submission → first forward
    total_s: float


@dataclass(slots=True)
class EmbeddingStats:
    running: int = 0  # requests of which a forward has computed an input, or will next
    waiting: int = 0
    steps: int = 0
    failed_steps: int = 0
    forward_s: float = 0.0
    computed_tokens: int = 0


class EmbeddingJob:
    """The inputs of one request, until it has ended. Cancelling `done` drops those that were not computed."""

    def __init__(self, inputs: Sequence[Tokens], submitted_at: float) -> None:
        self.done: Future[Embedded] = Future()
        self._inputs: Sequence[Tokens] = inputs
        self._count = len(inputs)
        self._submitted_at = submitted_at
        self._began_at: float | None = None
        # The inputs that are left and their lengths, the shortest first.
        self._left = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        self._lengths = [len(inputs[index]) for index in self._left]
        self.rows: NDArray[np.float32] | None = None  # of the computed inputs
        self._missing = len(inputs)  # inputs whose rows are not known

    def drop_inputs(self) -> None:
        """Frees the memory of the inputs. No more of them can be taken."""
        self._inputs = ()

    @property
    def longest(self) -> int:
        """The length of the longest input that is left."""
        return self._lengths[-1]

    def longest_within(self, most: int) -> int:
        """Returns the length of the longest input that is left of at most `most` tokens; 0: there is none."""
        place = bisect_right(self._lengths, most)
        return self._lengths[place - 1] if place else 0

    @property
    def has_ended(self) -> bool:
        return self.done.done() or not self._missing

    def take(self, most: int, least: int) -> tuple[int, Tokens] | None:
        """Takes the longest input that is left of `least` to `most` tokens. Returns its index and tokens."""
        inputs = self._inputs  # another thread may drop them at any time
        place = bisect_right(self._lengths, most) - 1
        if not inputs or place < 0 or self._lengths[place] < least:
            return None
        del self._lengths[place]
        index = self._left.pop(place)
        return index, inputs[index]

    def begin(self, now: float) -> None:
        """Notes the first forward."""
        if self._began_at is None:
            self._began_at = now

    def computed(self, index: int, row: NDArray[np.float32]) -> None:
        """Keeps the embedding of an input, unless the request has ended."""
        if self.done.done():
            return
        if self.rows is None:
            self.rows = np.empty((self._count, len(row)), np.float32)
        self.rows[index] = row
        self._missing -= 1

    def finish(self, now: float) -> None:
        """Answers the request, unless it has ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            assert self.rows is not None, "all inputs were computed"
            assert self._began_at is not None, "a forward has begun"
            queued_s = self._began_at - self._submitted_at
            self.done.set_result(Embedded(self.rows, queued_s, now - self._submitted_at))

    def fail(self, error: RootstockError) -> None:
        """Fails the request, unless it has ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class _OthersTurns:
    """Interruptions of a long forward.

    Engines that decode have a turn after each part of it that is as long as a chunk.
    """

    def __init__(
        self,
        device: DeviceThread | None,
        engine: EmbeddingEngine,
        tokens: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.taken_s = 0.0
        self._device = device
        self._engine = engine
        self._chunk_share = chunk_tokens / tokens  # of the forward
        self._due = self._chunk_share
        self._clock = clock

    def between_layers(self, done: float) -> None:
        """Gives way if a chunk's share has been computed since the last time."""
        if self._device is None or done < self._due:
            return
        self._due = done + self._chunk_share
        began = self._clock()
        self._device.give_way(self._engine)
        self.taken_s += self._clock() - began


class EmbeddingEngine:
    """The engine of one embedding model. The thread of a device gives it turns; any thread may submit.

    A test may drive an engine that was not started by calling `step`.
    """

    def __init__(
        self,
        embedder: Embedder,
        config: EngineConfig | None = None,
        context_limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context_limit` lowers the number of tokens of an input."""
        self.embedder = embedder
        self._config = config = config or EngineConfig()
        described = embedder.description
        self.most_tokens = min(described.most_tokens, context_limit or described.most_tokens)
        self._clock = clock
        self._lock = threading.Lock()  # of the next four
        self._waiting: OrderedDict[EmbeddingJob, None] = OrderedDict()  # that have not ended, in order
        self._open = 0  # jobs that have not ended
        self._held_bytes = 0  # of the embeddings of all requests, with `_freed_bytes`
        self._closed = False
        # Sizes of embeddings that nothing holds any more. The interpreter may free an array in any thread, even in
        # one that holds the lock.
        self._freed_bytes: deque[int] = deque()
        self._running: deque[EmbeddingJob] = deque()  # the next one to begin a forward at the front
        self._counts = EmbeddingStats()
        self._step_began = NEVER
        self._device: DeviceThread | None = None
        self._owns_device = False

    # ---------------------------------------------------------------------------------- for any thread

    def start(self, device: DeviceThread | None = None) -> None:
        """Starts the engine on the thread of a device which serves several models, or on one of its own."""
        assert self._device is None, "an engine is started once"
        self._owns_device = device is None
        self._device = device or DeviceThread()
        if self._owns_device:
            self._device.thread.start()
        self._device.add(self)

    def stop(self) -> None:
        """Ends the engine after the current forward. Its requests fail with EngineStopped. Idempotent."""
        with self._lock:
            self._closed = True
        if self._device is not None:
            self._device.remove(self)
            if self._owns_device:
                self._device.stop()
        self._fail_all(EngineStopped())

    def submit(self, inputs: Sequence[Tokens]) -> EmbeddingJob:
        """Queues inputs of 1 to `most_tokens` tokens each, at least one.

        Embeddings count as memory from here on until nothing holds them: a client may read its answer slowly. Raises
        QueueFull, EmbeddingsFull or EngineStopped.
        """
        assert inputs, "a request has an input"
        assert all(1 <= len(tokens) <= self.most_tokens for tokens in inputs)
        job = EmbeddingJob(inputs, self._clock())
        held_bytes = 4 * len(inputs) * self.embedder.description.dimensions
        with self._lock:
            if self._closed:
                raise EngineStopped()
            config = self._config
            if self._open >= config.max_batch + config.max_queue:
                raise QueueFull(config.max_batch, config.max_queue)
            while self._freed_bytes:
                self._held_bytes -= self._freed_bytes.popleft()
            if self._held_bytes and self._held_bytes + held_bytes > _MOST_BYTES:
                raise EmbeddingsFull(_MOST_BYTES)
            self._open += 1
            self._held_bytes += held_bytes
            self._waiting[job] = None
            # A future keeps its callbacks. With a strong reference, job and future would be a cycle, and embeddings
            # would wait for the garbage collector.
            job.done.add_done_callback(partial(self._ended, weakref.ref(job), held_bytes))
        if self._device is not None:
            self._device.wake()
        return job

    def _ended(self, of: weakref.ref[EmbeddingJob], held_bytes: int, _done: Future[Embedded]) -> None:
        """Makes room for other requests, on the thread that ends one or cancels it."""
        job = of()
        rows = None if job is None else job.rows
        if rows is None:
            self._freed_bytes.append(held_bytes)
        else:
            weakref.finalize(rows, self._freed_bytes.append, held_bytes).atexit = False
        with self._lock:
            self._open -= 1
            if job is not None:
                job.drop_inputs()
                self._waiting.pop(job, None)

    def stats(self) -> EmbeddingStats:
        """Counts requests and forwards. Does not wait for the engine's thread."""
        counts = self._counts
        return EmbeddingStats(
            len(self._running),
            len(self._waiting),
            counts.steps,
            counts.failed_steps,
            counts.forward_s,
            counts.computed_tokens,
        )

    def health(self) -> Health:
        """Reports whether the engine works. Does not wait for the engine's thread."""
        has_thread = self._device is None or self._device.thread.is_alive()
        working_s = self._clock() - self._step_began
        reason = why_not_alive(self._closed, has_thread, working_s, "a forward")
        running, waiting = len(self._running), len(self._waiting)
        return Health(not reason, reason or "ok", running, waiting, self._counts.steps)

    # ---------------------------------------------------------------------- for the thread of the device

    @property
    def has_turn(self) -> bool:
        return self.has_requests

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_blocked(self) -> bool:
        return False  # it takes no memory of a cache

    @property
    def decodes(self) -> bool:
        return False

    @property
    def next_overdue_s(self) -> float | None:
        return None

    def work_idly(self) -> bool:
        """Has no idle work."""
        return False

    def pause_idle_work(self) -> bool:
        """Has no idle work."""
        return False

    def detach(self) -> None:
        """Holds nothing of the device."""

    def fail(self) -> None:
        """Ends the engine after an exception outside of a forward."""
        with self._lock:
            self._closed = True
        self._fail_all(EngineStopped())

    def step(self) -> bool:
        """Computes one forward. Returns False if there was nothing to do."""
        self._admit()
        if not self._running:
            return False
        self._step_began = began = self._clock()
        batch = self._next_batch()
        if not batch:  # the requests have been cancelled just now
            self._step_began = NEVER
            return True
        inputs = [tokens for _, _, tokens in batch]
        for job, _, _ in batch:
            job.begin(began)
        turns = _OthersTurns(
            self._device, self, max(map(len, inputs)) * len(inputs), self._config.chunk_tokens
        )
        try:
            rows = self.embedder.embed(inputs, turns.between_layers)
        except Exception as error:
            log.exception("a forward of embeddings failed; other requests go on")
            self._counts.failed_steps += 1
            for job, _, _ in batch:
                job.fail(StepFailed(error))
        else:
            self._counts.steps += 1
            self._counts.forward_s += self._clock() - began - turns.taken_s
            self._counts.computed_tokens += sum(map(len, inputs))
            self._take_rows(batch, rows)
        finally:
            self._step_began = NEVER
            self._running.rotate(-1)
            self._drop_ended()
        return True

    def _take_rows(
        self, batch: Sequence[tuple[EmbeddingJob, int, Tokens]], rows: NDArray[np.float32]
    ) -> None:
        """Keeps the rows of a forward. A request fails if a row of its own is not finite; others go on."""
        for (job, index, _), row in zip(batch, rows, strict=True):
            if np.isfinite(row).all():
                job.computed(index, row)
            else:
                log.error("an embedding is not finite; its request fails, others go on")
                job.fail(StepFailed(FloatingPointError("an embedding is not finite")))
        now = self._clock()
        for job in dict.fromkeys(job for job, _, _ in batch):
            if job.has_ended:
                job.finish(now)

    def _admit(self) -> None:
        """Begins waiting requests while there is room."""
        self._drop_ended()
        with self._lock:
            while self._waiting and len(self._running) < self._config.max_batch:
                self._running.append(self._waiting.popitem(last=False)[0])

    def _drop_ended(self) -> None:
        ended = [job for job in self._running if job.has_ended]
        for job in ended:
            self._running.remove(job)
            job.rows = None  # now the answer alone holds them

    def _next_batch(self) -> list[tuple[EmbeddingJob, int, Tokens]]:
        """Takes the inputs of the next forward: one of the first request, and others that need little padding.

        It is empty if these requests have been cancelled just now.
        """
        first, step_tokens = self._running[0].longest, self._most_step_tokens()
        # Longer inputs of other requests join, as long as the first one needs no more padding than itself.
        widest = min(max(_SHORT_TOKENS, 2 * first), step_tokens // 2)
        width = max([first, *(job.longest_within(widest) for job in self._running)])
        least = 1 if width <= _SHORT_TOKENS else (width + 1) // 2
        most_rows = max(1, min(_MOST_ROWS, step_tokens // width))
        batch: list[tuple[EmbeddingJob, int, Tokens]] = []
        takers = deque(self._running)
        while takers and len(batch) < most_rows:
            job = takers.popleft()
            taken = job.take(width, least)
            if taken is not None:
                batch.append((job, *taken))
                takers.append(job)
        return batch

    def _most_step_tokens(self) -> int:
        """Returns how many tokens a forward may have, padding included."""
        config, device = self._config, self._device
        if device is not None and device.others_decode(self):
            return config.chunk_tokens
        idle = config.idle_chunk_tokens or config.chunk_tokens * _IDLE_CHUNKS
        return idle if device is not None and device.has_others(self) else max(idle, _LONE_TOKENS)

    def _fail_all(self, error: RootstockError) -> None:
        with self._lock:
            jobs = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            job.fail(error)
