"""Output of commands: progress bars, tables, counts and times."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from rootstock.logs import announce

WIDE_COLUMNS = 130

T = TypeVar("T")

_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"


class LoadProgress:
    """Progress of loading a model: a bar on a terminal, else a line for each stage."""

    STAGES: ClassVar = {
        "download": "Fetching the model",
        "load": "Loading the weights",
        "hash": "Hashing the weights",
        "compile": "Compiling attention for this CPU, once",
        "check": "Comparing the model on the pools with the model alone",
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
        signal.signal(number, signal.SIG_DFL)
        # Last of all: the bar's own thread may draw it again meanwhile. It does not hide the cursor again.
        os.write(self._console.file.fileno(), _CLEAR_LINE_SHOW_CURSOR)
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
                announce(words)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(words, total=1.0)
        self._bar.update(self._tasks[stage], completed=done)


@contextmanager
def progress_bar(words: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, of unknown length without `total`. Yields the function that advances it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=total)
        yield lambda done: bar.advance(task, done)


def counting(items: Iterable[T], progress: Callable[[int], None]) -> Iterator[T]:
    """Yields the items, and counts each when the next one is asked for."""
    for item in items:
        yield item
        progress(1)


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table: `title` on a terminal, `field` in tab-separated lines. `shown` formats a value for a
    terminal."""

    title: str
    field: str
    value: Callable[[T], Any]
    shown: Callable[[Any], str] = str
    numeric: bool = False
    wraps: bool = False
    wide: bool = False  # only on terminals of at least WIDE_COLUMNS columns


def print_table(columns: Sequence[Column[T]], rows: Sequence[T]) -> None:
    """Print a table on a terminal, else tab-separated lines, the names of the fields first."""
    if not sys.stdout.isatty():
        print("\t".join(column.field for column in columns))
        for row in rows:
            print("\t".join(str(column.value(row)) for column in columns))
        return
    console = Console()
    fitting = [column for column in columns if not column.wide or console.width >= WIDE_COLUMNS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in fitting:
        table.add_column(
            column.title, justify="right" if column.numeric else "left", no_wrap=not column.wraps
        )
    for row in rows:
        table.add_row(*(Text(column.shown(column.value(row))) for column in fitting))
    if rows:
        console.print(table)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def iso_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(time_s: float, now_s: float) -> str:
    passed_s = max(0, int(now_s - time_s))
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if passed_s >= unit_s:
            return f"{counted(passed_s // unit_s, unit)} ago"
    return f"{counted(passed_s, 'second')} ago"


def announce_drain(running: int) -> None:
    """Tell that the server waits for requests before it stops."""
    requests = counted(running, "request")
    announce(f"waiting for {requests} to finish (--drain-timeout; a second signal: stop at once)")
