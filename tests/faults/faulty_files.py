"""A file system whose calls fail as a test tells, and copies of it as a power cut would leave it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from rootstock.tiers.disk.files import Files

Boundary = Callable[[str], None]


class FaultyFiles(Files):
    """`boundary` is called before each call that changes something, and after each commit, with the call's name.

    `fail` returns the errno with which a call of that name fails, 0 if the call works. `free_bytes` can still be
    written. One write or read moves `chunk_bytes` at most.
    """

    def __init__(self) -> None:
        self.boundary: Boundary = lambda name: None
        self.fail: Callable[[str], int] = lambda name: 0
        self.free_bytes = 2**60
        self.chunk_bytes = 2**60
        self.synced: dict[Path, int] = {}  # how much of each segment would survive
        self.named: set[Path] = set()  # whose name would survive
        self._paths: dict[int, Path] = {}
        self.calls: list[str] = []

    def step(self, name: str) -> None:
        self.calls.append(name)
        self.boundary(name)
        number = self.fail(name)
        if number:
            raise OSError(number, os.strerror(number))

    def open_new(self, path: Path) -> int:
        self.step("open_new")
        fd = super().open_new(path)
        self._paths[fd] = path
        self.synced[path] = 0
        return fd

    def open_read(self, path: Path) -> int:
        self.step("open_read")
        return super().open_read(path)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.step("write")
        room = min(self.free_bytes, self.chunk_bytes)
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        cut: list[memoryview] = []
        for view in views:
            cut.append(view[:room])
            room -= cut[-1].nbytes
            if room == 0:
                break
        written_bytes = super().write(fd, cut, offset)
        self.free_bytes -= written_bytes
        return written_bytes

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.step("read")
        return super().read(fd, [views[0][: self.chunk_bytes]], offset)

    def sync(self, fd: int) -> None:
        self.step("sync")
        self.synced[self._paths[fd]] = os.fstat(fd).st_size

    def sync_folder(self, folder: Path) -> None:
        self.step("sync_folder")
        self.named = {path for path in self.synced if path.exists()}

    def truncate(self, path: Path, length: int) -> None:
        self.step("truncate")
        super().truncate(path, length)
        self.synced[path] = min(self.synced.get(path, length), length)

    def remove(self, path: Path) -> None:
        self.step("remove")
        super().remove(path)

    def connect(self, path: Path) -> sqlite3.Connection:
        files = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
                name = "commit" if sql == "COMMIT" else "write_back" if "wal_checkpoint" in sql else ""
                if not name:
                    return super().execute(sql, *arguments)  # type: ignore[arg-type]
                try:
                    files.step(name)
                except OSError as error:
                    failure = sqlite3.OperationalError("database or disk is full")
                    failure.sqlite_errorcode = sqlite3.SQLITE_FULL
                    raise failure from error
                cursor = super().execute(sql, *arguments)  # type: ignore[arg-type]
                files.boundary(name + " done")
                return cursor

        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Connection)

    def power_cut(self, folder: Path, image: Path, keep: random.Random | None) -> None:
        """Copies `folder` as a crash might leave it: the synced bytes of each segment and, with `keep`, a random part
        of the others. SQLite syncs its own files: they are copied as they are."""
        shutil.copytree(folder, image)
        for path, synced_bytes in self.synced.items():
            copy = image / path.name
            if not copy.exists():
                continue
            if path not in self.named and (keep is None or keep.random() < 0.5):
                copy.unlink()
                continue
            length = copy.stat().st_size
            if length > synced_bytes:
                os.truncate(copy, synced_bytes if keep is None else keep.randint(synced_bytes, length))
