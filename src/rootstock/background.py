"""Work that is begun in a thread of its own, and waited for where its result is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Begins `work` in a daemon thread, which no exit of the process waits for."""
    made: Future[Result] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as failure:
            made.set_exception(failure)

    threading.Thread(target=run, name=f"rootstock-{name}", daemon=True).start()
    return made
