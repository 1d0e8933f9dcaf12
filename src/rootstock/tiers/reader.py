"""One thread that loads, so that nobody who serves requests waits for a disk.

A job is a row of records that are of use only from the first one on: it stops at its first miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock.cache.plan import HostBytes
from rootstock.cache.record_identity import Identity, RecordKey
from rootstock.tiers.base import Buffer, LoadResult, Miss, MissKind

_log = logging.getLogger(__name__)

LoadFrom = Callable[[Identity, Sequence[Buffer] | None], LoadResult]


@dataclass(frozen=True, slots=True, eq=False)
class LoadTask:
    """One record. The buffers belong to the job until it has ended."""

    identity: Identity
    into: Sequence[HostBytes]

    @property
    def payload_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.into)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """All tasks are loaded, or there is a miss, or the job was cancelled: never two of these."""

    loaded: int  # tasks, from the first on: their buffers hold what was asked for, the others' are void
    miss: Miss | None  # what ended the job early
    missed: RecordKey | None  # whose miss it was
    payload_bytes: int  # of the tasks that are loaded
    seconds: float  # that loading these took, without waiting in line
    cancelled: bool  # tasks were skipped because nobody wants them any more


Ended = Callable[[LoadEnded], None]
"""Called once for each job, by the loader's thread, when the job touches none of its buffers any more. It may submit
and cancel, but waits for nothing of the loader's."""


class LoadJob:
    """What `TierReader.submit` gives back. It keeps nothing of the job alive."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """The rest is skipped: the job ends as soon as no task of it is under way. It may have ended already."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class _Pending:
    job: LoadJob
    tasks: Sequence[LoadTask]
    done: Ended
    left_bytes: int
    loaded: int = 0  # tasks
    loaded_bytes: int = 0
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
        )


class TierReader:
    """Owns its thread; what it loads from belongs to the caller, and outlives it. Thread-safe."""

    def __init__(self, load: LoadFrom, clock: Callable[[], float] = time.perf_counter) -> None:
        self._load = load
        self._clock = clock
        self._pending: list[_Pending] = []  # the first one is under way
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rootstock-loader", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Of payloads that are still to be loaded, the one under way among them."""
        with self._changed:
            return sum(pending.waiting_bytes for pending in self._pending)

    def submit(self, tasks: Sequence[LoadTask], done: Ended) -> LoadJob:
        """Never blocks. Jobs are loaded in the order in which they come. After `close`, `done` is called at once."""
        pending = _Pending(LoadJob(), tuple(tasks), done, sum(task.payload_bytes for task in tasks))
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
        """Returns when no job is queued or under way, and everybody has been told."""
        self._assert_another_thread()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or not self._thread.is_alive())

    def close(self) -> None:
        """Cancels all jobs, and ends the thread when the task under way has ended."""
        self._assert_another_thread()
        with self._changed:
            self._closing = True
            for pending in self._pending:
                pending.job.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _assert_another_thread(self) -> None:
        assert threading.current_thread() is not self._thread, "the loader would wait for itself"

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Ends a job that is over, whichever it is, or else loads one record. False: nothing is left, nor will come.

        A function of its own, so that nothing refers to a job's buffers while the thread waits for work.
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

    def _load_next(self, pending: _Pending) -> None:
        task = pending.tasks[pending.loaded]
        began_s = self._clock()
        try:
            result = self._load(task.identity, task.into)
        except Exception as error:  # a bug of ours: this record cannot be had, the next ones perhaps can
            _log.exception("Loading failed. The request goes on without this record.")
            result = Miss(MissKind.IO_ERROR, str(error))
        took_s = self._clock() - began_s
        with self._changed:
            if isinstance(result, Miss):
                pending.miss = result
                return
            pending.loaded += 1
            pending.left_bytes -= task.payload_bytes
            pending.loaded_bytes += task.payload_bytes
            pending.seconds += took_s


def _tell(pending: _Pending) -> None:
    try:
        pending.done(pending.ended)
    except Exception:
        _log.exception("Whoever waited for a load failed. The loader goes on.")
