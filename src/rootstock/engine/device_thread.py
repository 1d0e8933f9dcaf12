"""One thread for the engines of one device: they take turns, a step each.

Two models never compute at once, so that neither waits for the other's threads in the middle of a forward, and one
thread uses all caches of a shared budget. Between two tokens, a request waits for at most one step of each other
model.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

BLOCKED_RETRY_S = (
    0.05  # an engine that waits for another model's memory tries again after this time at the latest
)


class SteppedEngine(Protocol):
    """An engine as the thread sees it. Only the thread calls these methods."""

    @property
    def has_turn(self) -> bool: ...  # there are commands, or a step can run
    @property
    def has_requests(self) -> bool: ...
    @property
    def is_blocked(self) -> bool: ...  # it waits for memory that another engine uses
    @property
    def decodes(self) -> bool: ...
    @property
    def next_overdue_s(self) -> float | None: ...
    def step(self) -> bool: ...
    def work_idly(self) -> bool:
        """Does a piece of work that can wait. Returns False if there is none."""
        ...

    def pause_idle_work(self) -> bool:
        """Releases the rows of idle work. Returns False if there were none."""
        ...

    def detach(self) -> None:
        """Is called when the thread gives the engine no more turns."""
        ...

    def fail(self) -> None:
        """Ends the engine after an exception that it cannot recover from. It has no more turns."""
        ...


class DeviceThread:
    """The thread of one device. `with` starts and stops it; its engines are stopped before."""

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engines: list[SteppedEngine] = []
        self._ends = False
        self.thread = threading.Thread(target=self._run, name="rootstock-engine", daemon=True)

    def __enter__(self) -> DeviceThread:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ends = True
        self.wake()
        if self.thread is not threading.current_thread() and self.thread.ident is not None:
            self.thread.join()

    def wake(self) -> None:
        """Makes the thread look for turns. From any thread."""
        self._wakes.put(None)

    def run_soon(self, command: Callable[[], None]) -> None:
        """Calls a function on the thread, between two turns. From any thread."""
        self._commands.put(command)
        self.wake()

    def add(self, engine: SteppedEngine) -> None:
        """Gives an engine turns from now on. From any thread."""
        self.run_soon(lambda: self._engines.append(engine))

    def remove(self, engine: SteppedEngine) -> None:
        """Ends the turns of an engine, and waits for the end of its step. Idempotent, from any thread."""
        if self.thread is threading.current_thread() or not self.thread.is_alive():
            self._remove(engine)
            return
        removed = threading.Event()

        def remove() -> None:
            self._remove(engine)
            removed.set()

        self.run_soon(remove)
        while not removed.wait(1.0):
            if not self.thread.is_alive():
                self._remove(engine)
                return

    def others_decode(self, engine: SteppedEngine) -> bool:
        """Returns whether another engine decodes, so that a long step would delay its tokens."""
        return any(other.decodes for other in self._engines if other is not engine)

    def has_others(self, engine: SteppedEngine) -> bool:
        """Returns whether the device has another engine."""
        return any(other is not engine for other in self._engines)

    def give_way(self, engine: SteppedEngine) -> None:
        """Gives each other engine that decodes a turn in the middle of a step of this one, on the thread."""
        for other in list(self._engines):
            if other is not engine and other.decodes and other.has_turn:
                self._guarded(other, other.step)

    def _remove(self, engine: SteppedEngine) -> None:
        if engine in self._engines:
            self._engines.remove(engine)
            engine.detach()

    def _run(self) -> None:
        while True:
            self._forget_wakes()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()
            if self._ends:
                return
            if not self._turns() and not self._idle_work():
                self._wait()

    def _turns(self) -> bool:
        """Gives each engine a turn that has something to do. Returns False if none has."""
        moved = self._has_requests and self._pause_idle_work()
        for engine in list(self._engines):
            if engine.has_turn:
                self._guarded(engine, engine.step)
                moved = True
            elif moved and engine.is_blocked:
                self._guarded(engine, engine.step)
        return moved

    @property
    def _has_requests(self) -> bool:
        return any(engine.has_requests for engine in self._engines)

    def _pause_idle_work(self) -> bool:
        """Makes the idle work of every engine leave its memory to requests. Returns False if none held any."""
        held = [self._guarded(engine, engine.pause_idle_work) for engine in list(self._engines)]
        return any(held)

    def _idle_work(self) -> bool:
        """Does a piece of idle work while no engine has a request."""
        if self._has_requests:
            return False
        return any(self._guarded(engine, engine.work_idly) for engine in list(self._engines))

    def _guarded(self, engine: SteppedEngine, function: Callable[[], bool]) -> bool:
        """Ends an engine that raises, so that the others go on."""
        try:
            return function()
        except Exception:
            log.exception("an engine failed and ends; those of other models go on")
            self._remove(engine)
            engine.fail()
            return True

    def _wait(self) -> None:
        # While there are requests, no idle work is due.
        awaited = [engine for engine in self._engines if engine.has_requests] or self._engines
        times = [one for engine in awaited if (one := engine.next_overdue_s) is not None]
        times += [BLOCKED_RETRY_S for engine in self._engines if engine.is_blocked]
        try:
            self._wakes.get(timeout=min(times, default=None))
        except queue.Empty:
            for engine in list(self._engines):  # a load is overdue, or memory may be free
                self._guarded(engine, engine.step)

    def _forget_wakes(self) -> None:
        for _ in range(self._wakes.qsize()):
            self._wakes.get_nowait()
