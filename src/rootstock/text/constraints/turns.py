"""Turns of compiles on the processors: few at once, and those first that have used least.

A compile that needs longer than its turn is stopped and continues later, so that hostile grammars hold up no ordinary
one. An ordinary grammar needs a part of one turn.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from rootstock.errors import CompilerBusy

TURN_S = 0.05
_CORES_PER_COMPILE = 4
_LONG_TURNS = 4  # a compile that takes more turns is long
_LONG_AT_ONCE = 4
_LONG_OF_TENANT = 2
_CHECK_S = 0.25

# Raises if the client has left for whom this thread compiles.
refuse_gone: ContextVar[Callable[[], None] | None] = ContextVar("refuse_gone", default=None)
# Lets other requests use the interpreter while this thread waits for a compile.
let_others_work: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "let_others_work", default=nullcontext
)


class CompileTurn:
    """A compile's place among all compiles. `used` counts the turns that it has had."""

    def __init__(self, tenant: str, chars: int, number: int) -> None:
        self.tenant = tenant
        self.used = 0
        self._chars = chars
        self._number = number

    def rank(self, of_tenant: int) -> tuple[int, int, int, int]:
        return self.used, of_tenant, self._chars, self._number


class CompileTurns:
    """The compiles of a process. Any thread may use it."""

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once or max(1, (os.cpu_count() or 1) // _CORES_PER_COMPILE)
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._open: set[CompileTurn] = set()
        self._waiting: set[CompileTurn] = set()
        self._running = 0

    @contextmanager
    def of(self, tenant: str, chars: int) -> Iterator[CompileTurn]:
        """Opens a compile, which waits for its turns by `wait`."""
        turn = CompileTurn(tenant, chars, next(self._numbers))
        with self._changed:
            self._open.add(turn)
        try:
            with let_others_work.get()():
                yield turn
        finally:
            with self._changed:
                self._open.remove(turn)
                self._changed.notify_all()

    @contextmanager
    def wait(self, turn: CompileTurn) -> Iterator[None]:
        """Waits for a turn, and holds it. Raises CompilerBusy if too many compiles are long."""
        check = refuse_gone.get()
        with self._changed:
            self._refuse_long(turn)
            self._waiting.add(turn)
        try:
            while not self._taken(turn):
                if check is not None:
                    check()
        except BaseException:
            with self._changed:
                self._waiting.discard(turn)
            raise
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                turn.used += 1
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Number of compiles that wait for a turn."""
        return len(self._waiting)

    def _taken(self, turn: CompileTurn) -> bool:
        """Takes the turn if it comes within a moment."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_next(turn), _CHECK_S):
                return False
            self._waiting.remove(turn)
            self._running += 1
            return True

    def _is_next(self, turn: CompileTurn) -> bool:
        if self._running >= self._at_once:
            return False
        of_tenants = Counter(each.tenant for each in self._open)
        return turn is min(self._waiting, key=lambda each: each.rank(of_tenants[each.tenant]))

    def _refuse_long(self, turn: CompileTurn) -> None:
        if turn.used != _LONG_TURNS:
            return
        others = [each.tenant for each in self._open if each.used >= _LONG_TURNS and each is not turn]
        if len(others) >= _LONG_AT_ONCE or others.count(turn.tenant) >= _LONG_OF_TENANT:
            raise CompilerBusy
