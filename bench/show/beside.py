"""Threads that run beside a measurement, and a poll of /health or another probe."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(*calls: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs each call on a thread of its own. The event that it gets is set when the block ends."""
    over = threading.Event()
    threads = [threading.Thread(target=call, args=(over,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Health:
    """Poll of a probe on one connection: `with beside(Health(connection, pause_s).run):`."""

    def __init__(self, connection: http.client.HTTPConnection, pause_s: float, path: str = "/health") -> None:
        self._connection = connection
        self._pause_s = pause_s
        self._path = path
        self._times_s: list[float] = []

    def run(self, over: threading.Event) -> None:
        while not over.wait(self._pause_s):
            began = time.perf_counter()
            self._connection.request("GET", self._path)
            self._connection.getresponse().read()
            self._times_s.append(time.perf_counter() - began)
        self._connection.close()

    @property
    def longest_ms(self) -> float:
        return max(self._times_s) * 1e3
