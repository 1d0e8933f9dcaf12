"""Waiting for threads and processes, however busy the machine is: a wait is given up only where something hangs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

HANG_S = 300.0


def wait_until(condition: Callable[[], object]) -> None:
    """Polls a condition that another thread makes true and that has no event of its own."""
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, f"hangs: not true after {HANG_S:.0f} s"
        time.sleep(0.002)


def wait_for(event: threading.Event) -> None:
    assert event.wait(HANG_S), f"hangs: not set after {HANG_S:.0f} s"


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), f"hangs: {thread.name} has not ended after {HANG_S:.0f} s"


def first_wait_on(condition: threading.Condition) -> threading.Event:
    """Is set when a thread waits on the condition from now on."""
    begun, wait = threading.Event(), condition.wait

    def noted(timeout: float | None = None) -> bool:
        begun.set()  # the lock is held: a notification can only come after the wait has begun
        return wait(timeout)

    condition.wait = noted  # type: ignore[method-assign]
    return begun


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """A port of this machine where nothing listens, nor will during the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
