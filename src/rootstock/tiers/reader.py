"""Reader of tiers: a thread that loads records, so that requests do not wait for a disk.

A job is a sequence of records in which each is useful only together with those before it. It stops at its first miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.plan import HostBytes
from rootstock.tiers.base import Buffer, LoadResult, Miss, MissKind

_log = logging.getLogger(__name__)

LoadFrom = Callable[[Identity, Sequence[Buffer] | None, Identity | None], LoadResult]
"""Loads a record into buffers. The last argument is the record that is loaded next, if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTask:
    """Task to load one record. The buffers belong to the job until it has ended."""

    identity: Identity
    into: Sequence[HostBytes]

    @property
    def payload_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.into)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """End of a job: all tasks are loaded, or one missed, or the job was cancelled. Exactly one of these holds."""

    loaded: int  # number of tasks loaded, from the first on; the buffers of the others are undefined
    miss: Miss | None  # the miss that ended the job early
    missed: RecordKey | None  # the record of that miss
    payload_bytes: int  # of the loaded tasks
    seconds: float  # time to load these, without waiting in the queue
    cancelled: bool  # tasks were skipped because the job was cancelled
    host_bytes: int = 0  # of payload_bytes: from memory of the host


Ended = Callable[[LoadEnded], None]
"""Called once for each job, by the reader's thread, when the job no longer uses any of its buffers. It may submit and
cancel jobs, but must not wait for the reader."""


class LoadJob:
    """Handle of a job from `TierReader.submit`. It keeps none of the job's buffers alive."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """Skips the remaining tasks: the job ends as soon as the current task has ended. It may have ended
        already."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class _PendingLoad:
    job: LoadJob
    tasks: Sequence[LoadTask]
    done: Ended
    left_bytes: int
    loaded: int = 0  # tasks
    loaded_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    miss: Miss | None = None

    @property
    def is_over(self) -> bool:
        return self.job.cancelled or self.miss is not None or self.loaded == len(self.tasks)

    @property
    def waiting_bytes(self) -> int:
        return 0 if self.is_over else self.left_bytes

    @property
    def ended(self) -> LoadEnded:
        return LoadEnded(
            self.loaded,
            self.miss,
            self.tasks[self.loaded].identity.key if self.miss is not None and self.tasks else None,
            self.loaded_bytes,
            self.seconds,
            cancelled=self.miss is None and self.loaded < len(self.tasks),
            host_bytes=self.host_bytes,
        )


class TierReader:
    """Reader with its own thread. The caller owns the source of loads, which outlives the reader. Thread-safe."""

    def __init__(self, load: LoadFrom, clock: Callable[[], float] = time.perf_counter) -> None:
        self._load = load
        self._clock = clock
        self._pending: list[_PendingLoad] = []  # the first job is being loaded
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rootstock-reader", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Returns the bytes of payloads that are still to be loaded, including the current one."""
        with self._changed:
            return sum(pending.waiting_bytes for pending in self._pending)

    def submit(self, tasks: Sequence[LoadTask], done: Ended) -> LoadJob:
        """Queues a job without blocking. Jobs run in order of submission. After `close`, `done` is called at once."""
        pending = _PendingLoad(LoadJob(), tuple(tasks), done, sum(task.payload_bytes for task in tasks))
        with self._changed:
            accepted = not self._closing
            if accepted:
                self._pending.append(pending)
                self._changed.notify_all()
        if not accepted:
            pending.miss = Miss(MissKind.UNAVAILABLE, "closed")
            _tell(pending)
        return pending.job

    def drain(self) -> None:
        """Waits until no job is queued or running, and every `Ended` has been called."""
        self._assert_another_thread()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or not self._thread.is_alive())

    def close(self) -> None:
        """Cancels all jobs, and ends the thread when the current task has ended."""
        self._assert_another_thread()
        with self._changed:
            self._closing = True
            for pending in self._pending:
                pending.job.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _assert_another_thread(self) -> None:
        assert threading.current_thread() is not self._thread, "the reader would wait for itself"

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Ends any job that is over, or otherwise loads one record. Returns False when the reader is closed and idle.

        A function of its own, so that no local variable refers to a job's buffers while the thread waits for work.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            if not self._pending:
                return False
            over = next((pending for pending in self._pending if pending.is_over), None)
            first = self._pending[0]
        if over is None:
            self._load_next(first)
            return True
        _tell(over)
        with self._changed:
            self._pending.remove(over)
            self._changed.notify_all()
        return True

    def _load_next(self, pending: _PendingLoad) -> None:
        task, *later = pending.tasks[pending.loaded : pending.loaded + 2]
        then = later[0].identity if later else None
        began_s = self._clock()
        try:
            result = self._load(task.identity, task.into, then)
        except Exception as error:  # a bug in the tier: this record is missed, later ones may be loaded
            _log.exception("Loading failed. The request continues without this record.")
            result = Miss(MissKind.IO_ERROR, str(error))
        took_s = self._clock() - began_s
        with self._changed:
            if isinstance(result, Miss):
                pending.miss = result
                return
            pending.loaded += 1
            pending.left_bytes -= task.payload_bytes
            pending.loaded_bytes += task.payload_bytes
            if result.source == "host":
                pending.host_bytes += task.payload_bytes
            pending.seconds += took_s


def _tell(pending: _PendingLoad) -> None:
    try:
        pending.done(pending.ended)
    except Exception:
        _log.exception("The callback of a load failed. The reader continues.")
