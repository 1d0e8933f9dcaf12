"""The thread that runs an engine's steps: none before the start, then one of its own or the thread of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rootstock.engine.device_thread import DeviceThread, SteppedEngine


class EngineThread(Protocol):
    """The thread of one engine, as other threads see it."""

    @property
    def is_current(self) -> bool: ...  # the caller may use what belongs to the engine's thread
    def is_alive(self) -> bool: ...
    def stop(self) -> None:
        """Ends the engine after its current step. It accepts no more requests. Idempotent."""
        ...


class NotStarted:
    """An engine without a thread: the thread that calls it runs it."""

    is_current = True

    def __init__(self, end: Callable[[], None]) -> None:
        self.stop = end

    def is_alive(self) -> bool:
        return True


class OwnThread(threading.Thread):
    """A thread that runs one engine. `run_engine` returns soon after the engine is closed and `wake` is called."""

    def __init__(self, run_engine: Callable[[], None], wake: Callable[[], None]) -> None:
        super().__init__(target=run_engine, name="rootstock-engine", daemon=True)
        self._wake = wake

    @property
    def is_current(self) -> bool:
        return self is threading.current_thread()

    def stop(self) -> None:
        self._wake()
        if not self.is_current:
            self.join()


class DeviceTurns:
    """The turns of one engine on the thread of a device, which runs several."""

    def __init__(self, device: DeviceThread, engine: SteppedEngine, end: Callable[[], None]) -> None:
        """`end` ends the engine, which has no more turns then."""
        self._device = device
        self._engine = engine
        self._end = end

    def start(self) -> None:
        self._device.add(self._engine)

    @property
    def is_current(self) -> bool:
        return self._device.thread is threading.current_thread()

    def is_alive(self) -> bool:
        return self._device.thread.is_alive()

    def stop(self) -> None:
        if self.is_current:  # maybe in the engine's own step
            self._device.run_soon(self._end_turns)
        else:
            self._end_turns()

    def _end_turns(self) -> None:
        self._device.remove(self._engine)
        self._end()
