"""File system interface of the disk tier. Tests replace it by one that fails, writes short or crashes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_VIEWS = 512  # of one vectored call; POSIX allows 1,024 on the systems that are supported
_OWNER_ONLY = 0o600  # files hold users' conversations
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache


class Files:
    """File system of the operating system. Every method raises OSError."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY)

    def open_new(self, path: Path) -> int:
        """Creates a file for writing. It must not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Writes views in order. Returns the number of bytes written, which may be less than given."""
        return os.pwritev(fd, views, offset)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fills the views in order. Returns the number of bytes read, 0 at the end of the file."""
        return os.preadv(fd, views, offset)

    def sync(self, fd: int) -> None:
        if _FULL_SYNC is not None:
            fcntl.fcntl(fd, _FULL_SYNC)
        else:
            os.fsync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Makes a folder's names durable: files that were created, renamed or removed."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, path: Path, length: int) -> None:
        os.truncate(path, length)

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: Path) -> None:
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def connect(self, path: Path) -> sqlite3.Connection:
        # SQLite gives the files that it adds the mode of the database, so the database is created first.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY))
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def sizes(self, folder: Path) -> Iterator[tuple[Path, int]]:
        """Yields every file below `folder` with its bytes. Links are counted themselves and not followed."""
        with os.scandir(folder) as listing:
            for item in listing:
                if item.is_dir(follow_symlinks=False):
                    yield from self.sizes(Path(item.path))
                    continue
                try:
                    yield Path(item.path), item.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # removed during the scan
                    continue


def write_all(files: Files, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Writes all views and returns the number of bytes."""
    left = [view for view in views if view.nbytes]
    total_bytes = 0
    while left:
        written_bytes = files.write(fd, left[:MAX_VIEWS], offset + total_bytes)
        if written_bytes == 0:
            raise OSError("a write made no progress")
        total_bytes += written_bytes
        left = _behind(left, written_bytes)
    return total_bytes


def read_all(files: Files, fd: int, views: Sequence[memoryview], offset: int) -> bool:
    """Fills all views. Returns False if the file ends before."""
    left = [view for view in views if view.nbytes]
    while left:
        got_bytes = files.read(fd, left[:MAX_VIEWS], offset)
        if got_bytes == 0:
            return False
        offset += got_bytes
        left = _behind(left, got_bytes)
    return True


def _behind(views: list[memoryview], done_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done_bytes < view.nbytes:
            return [view[done_bytes:], *views[index + 1 :]]
        done_bytes -= view.nbytes
    return []
