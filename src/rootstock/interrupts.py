"""Handling of Ctrl-C: the system ends the process (`AT_ONCE`), or Python raises KeyboardInterrupt (`UNWINDING`).

KeyboardInterrupt shows a traceback during imports, and can be lost in a callback or a destructor. SIGTERM ends a
process at once unless a server handles it. A shell shows statuses 130 and 143.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = signal.SIG_DFL
UNWINDING = signal.default_int_handler


@contextmanager
def ctrl_c(handler: signal._HANDLER) -> Iterator[None]:
    """Handle SIGINT with `handler` in the block, unless the process ignores it (nohup) or handles it otherwise."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (AT_ONCE, UNWINDING) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) == handler:  # otherwise the block has installed a handler to stay
            signal.signal(signal.SIGINT, before)
