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
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.stats import HUNG_AFTER_S, Health
from rootstock.errors import EngineStopped, QueueFull, RootstockError, StepFailed
from rootstock.runtime.base import Embedder
from rootstock.units import MIB

log = logging.getLogger(__name__)

_IDLE_CHUNKS = 4  # that a forward may take while no other model decodes
_LONE_TOKENS = 8_192  # of a forward while the device has no other model
_MOST_ROWS = 64  # of a forward
_MOST_HELD_BYTES = 256 * MIB  # of the embeddings of requests that run
_SHORT_TOKENS = 64  # inputs of at most so many tokens share a forward, whatever their lengths


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
    """The inputs of one request. Cancelling `done` drops those that were not computed."""

    def __init__(self, inputs: Sequence[Tokens], submitted_at: float) -> None:
        self.inputs = inputs
        self.done: Future[Embedded] = Future()
        self._submitted_at = submitted_at
        self._began_at: float | None = None
        # The inputs that are left and their lengths, the shortest first.
        self._left = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        self._lengths = [len(inputs[index]) for index in self._left]
        self._rows: NDArray[np.float32] | None = None  # of the computed inputs
        self._missing = len(inputs)  # inputs whose rows are not known

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

    def take(self, most: int, least: int) -> int | None:
        """Takes the longest input that is left of `least` to `most` tokens. Returns its index."""
        place = bisect_right(self._lengths, most) - 1
        if place < 0 or self._lengths[place] < least:
            return None
        del self._lengths[place]
        return self._left.pop(place)

    def begin(self, now: float) -> None:
        """Notes the first forward."""
        if self._began_at is None:
            self._began_at = now

    def computed(self, index: int, row: NDArray[np.float32]) -> None:
        """Keeps the embedding of an input."""
        if self._rows is None:
            self._rows = np.empty((len(self.inputs), len(row)), np.float32)
        self._rows[index] = row
        self._missing -= 1

    def finish(self, now: float) -> None:
        """Answers the request, unless it was cancelled."""
        assert self._rows is not None, "an input was computed"
        assert self._began_at is not None, "a forward has begun"
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            queued_s = self._began_at - self._submitted_at
            self.done.set_result(Embedded(self._rows, queued_s, now - self._submitted_at))

    def fail(self, error: RootstockError) -> None:
        """Fails the request, unless it has ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class _OthersTurns:
    """Turns of engines that decode, within a forward of more tokens than a chunk: one after each chunk's share."""

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
        self._lock = threading.Lock()  # of _waiting and _closed
        self._waiting: deque[EmbeddingJob] = deque()
        self._closed = False
        self._running: deque[EmbeddingJob] = deque()  # the next one to begin a forward at the front
        self._counts = EmbeddingStats()
        self._step_began: float | None = None
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
        """Queues inputs of 1 to `most_tokens` tokens each, at least one. Raises QueueFull or EngineStopped."""
        assert inputs, "a request has an input"
        assert all(1 <= len(tokens) <= self.most_tokens for tokens in inputs)
        job = EmbeddingJob(inputs, self._clock())
        with self._lock:
            if self._closed:
                raise EngineStopped()
            config = self._config
            if len(self._running) + len(self._waiting) >= config.max_batch + config.max_queue:
                raise QueueFull(config.max_batch, config.max_queue)
            self._waiting.append(job)
        if self._device is not None:
            self._device.wake()
        return job

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
        device, began = self._device, self._step_began
        alive, detail = True, "ok"
        if self._closed:
            alive, detail = False, "stopped"
        elif device is not None and not device.thread.is_alive():
            alive, detail = False, "the engine's thread has died"
        elif began is not None and self._clock() - began > HUNG_AFTER_S:
            alive, detail = False, f"a forward has been running for {self._clock() - began:.0f} s"
        return Health(alive, detail, len(self._running), len(self._waiting), self._counts.steps)

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
        inputs = [job.inputs[index] for job, index in batch]
        for job, _ in batch:
            job.begin(began)
        turns = _OthersTurns(
            self._device, self, max(map(len, inputs)) * len(inputs), self._config.chunk_tokens
        )
        try:
            rows = self.embedder.embed(inputs, turns.between_layers)
            if not np.isfinite(rows).all():
                raise FloatingPointError("an embedding is not finite")
        except Exception as error:
            log.exception("a forward of embeddings failed; other requests go on")
            self._counts.failed_steps += 1
            for job, _ in batch:
                job.fail(StepFailed(error))
        else:
            self._take_rows(batch, rows)
        finally:
            self._counts.steps += 1
            self._counts.forward_s += self._clock() - began - turns.taken_s
            self._counts.computed_tokens += sum(map(len, inputs))
            self._step_began = None
            self._running.rotate(-1)
            self._drop_ended()
        return True

    def _take_rows(self, batch: Sequence[tuple[EmbeddingJob, int]], rows: NDArray[np.float32]) -> None:
        for (job, index), row in zip(batch, rows, strict=True):
            job.computed(index, row)
        now = self._clock()
        for job in {id(job): job for job, _ in batch}.values():
            if job.has_ended:
                job.finish(now)

    def _admit(self) -> None:
        """Begins waiting requests while there is room, without those that were cancelled."""
        self._drop_ended()
        most_rows = _MOST_HELD_BYTES // (4 * self.embedder.description.dimensions)
        rows = sum(len(job.inputs) for job in self._running)
        with self._lock:
            while self._waiting and len(self._running) < self._config.max_batch:
                if self._running and rows + len(self._waiting[0].inputs) > most_rows:
                    break
                job = self._waiting.popleft()
                if not job.has_ended:
                    self._running.append(job)
                    rows += len(job.inputs)

    def _drop_ended(self) -> None:
        ended = [job for job in self._running if job.has_ended]
        for job in ended:
            self._running.remove(job)

    def _next_batch(self) -> list[tuple[EmbeddingJob, int]]:
        """Takes the inputs of the next forward: one of the first request, and others that need little padding."""
        first, step_tokens = self._running[0].longest, self._most_step_tokens()
        # Longer inputs of other requests join, as long as the first one needs no more padding than itself.
        widest = min(max(_SHORT_TOKENS, 2 * first), step_tokens // 2)
        width = max([first, *(job.longest_within(widest) for job in self._running)])
        least = 1 if width <= _SHORT_TOKENS else (width + 1) // 2
        most_rows = max(1, min(_MOST_ROWS, step_tokens // width))
        batch: list[tuple[EmbeddingJob, int]] = []
        takers = deque(self._running)
        while takers and len(batch) < most_rows:
            job = takers.popleft()
            index = job.take(width, least)
            if index is not None:
                batch.append((job, index))
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
