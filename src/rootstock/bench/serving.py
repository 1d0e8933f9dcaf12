"""Server in a process of its own, for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import IO

from rootstock.errors import StartupError

READY = re.compile(r"\bat (https?://\S+)/v1\b")  # of the line that `rootstock serve` prints when it listens
ENDS_WITHIN_S = 15.0
LAST_LINES = 12


class ServerProcess:
    """Running server: `with ServerProcess(["MODEL", "--port", "0"]) as server:`, then `server.url`.

    The process is ended on every way out of the block, by its handle. Raises StartupError if it does not get ready,
    with the last lines that it wrote. Only its options configure it, not the environment's ROOTSTOCK_PORT and others.
    """

    def __init__(self, options: Sequence[str], ready_within_s: float = 120.0) -> None:
        self._command = [sys.executable, "-m", "rootstock", "serve", *options]
        self._ready_within_s = ready_within_s
        self._ready = threading.Event()
        self._url: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    @property
    def url(self) -> str:
        assert self._url is not None, "the server is not ready"
        return self._url

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        # A file rather than a pipe: a server that writes many warnings cannot block.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={name: value for name, value in os.environ.items() if not name.startswith("ROOTSTOCK_")},
            text=True,
            errors="replace",
        )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        threading.Thread(target=self._read_output, args=(process,), daemon=True).start()
        deadline = time.monotonic() + self._ready_within_s
        while not self._ready.wait(0.05):
            status = process.poll()
            if status is not None:
                raise StartupError(
                    f"The server ended with status {status} before it was ready.{self._last_lines()}"
                )
            if time.monotonic() > deadline:
                raise StartupError(
                    f"The server was not ready after {self._ready_within_s:.0f} s.{self._last_lines()}"
                )

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        """Reads the output to its end, so that the server never waits for a reader."""
        assert process.stdout is not None
        for line in process.stdout:
            if self._url is None and (found := READY.search(line)):
                self._url = found[1]
                self._ready.set()

    def _last_lines(self) -> str:
        if self._errors is None:
            return ""
        self._errors.flush()
        self._errors.seek(0)
        lines = deque((line.rstrip() for line in self._errors), maxlen=LAST_LINES)
        return "".join(f"\n  {line}" for line in lines)

    def _end(self) -> None:
        process, errors = self._process, self._errors
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if errors is not None:
            errors.close()


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Makes SIGTERM and a closed terminal unwind the stack, like Ctrl-C, to end a server as well."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.signal(getattr(signal, name), leave) for name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
