"""Requests that run until the test releases them."""

from __future__ import annotations

import threading

from rootstock.engine.engine import Engine
from rootstock.runtime.base import Batch
from waiting import wait_until


class Held:
    """A fault that lets some forwards pass and then holds each until the engine gets a command, such as an abort."""

    def __init__(self, free_forwards: int = 0) -> None:
        self.engine: Engine | None = None
        self._free_forwards = free_forwards
        self._let_go = threading.Event()

    def let_go(self) -> None:
        self._let_go.set()

    def hold(self) -> None:
        self._let_go.clear()

    def __call__(self, _batch: Batch) -> None:
        if self._free_forwards > 0:
            self._free_forwards -= 1
            return
        wait_until(lambda: self._let_go.is_set() or self._is_asked)

    @property
    def _is_asked(self) -> bool:
        assert self.engine is not None
        return not self.engine._commands.empty()
