"""Output of commands: progress bars, tables, counts and times."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"


class LoadProgress:
    """Progress of loading a model: a bar on a terminal, else a line for each stage."""

    STAGES: ClassVar = {
        "download": "Fetching the model",
        "load": "Loading the weights",
        "hash": "Hashing the weights",
        "compile": "Compiling attention for this CPU, once",
        "check": "Checking the paged forward against the model's own",
        "pack": "Packing the weights",
    }

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            if threading.current_thread() is threading.main_thread():
                # A bar hides the cursor: a signal that ends the process here must show it again.
                ending = (signal.SIGINT, signal.SIGTERM)
                self._handlers = {number: signal.signal(number, self._end) for number in ending}
            self._bar.start()
        return self

    def _end(self, number: int, _frame: FrameType | None) -> None:
        os.write(self._console.file.fileno(), _CLEAR_LINE_SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def __call__(self, stage: str, done: float) -> None:
        """Report the fraction of `stage` that is done, from 0 to 1."""
        words = self.STAGES.get(stage, stage)
        if self._bar is None:
            if stage not in self._told:
                self._told.add(stage)
                print(f"rootstock: {words}", file=sys.stderr, flush=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(words, total=1.0)
        self._bar.update(self._tasks[stage], completed=done)
