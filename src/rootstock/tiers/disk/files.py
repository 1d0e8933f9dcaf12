"""The seam to the file system. Tests put failing, short and crashing ones in its place."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_VIEWS = 512  # of one vectored call; POSIX promises 1,024 on the systems that we know
_OWNER_ONLY = 0o600  # what people have said is in there
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache


class Files:
    """The real one. Every method raises OSError."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY)

    def open_new(self, path: Path) -> int:
        """For writing; the file must not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Returns how many bytes, which may be fewer than given."""
        return os.pwritev(fd, views, offset)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fills the views in order; returns how many bytes, 0 at the end of the file."""
        return os.preadv(fd, views, offset)

    def sync(self, fd: int) -> None:
        if _FULL_SYNC is not None:
            fcntl.fcntl(fd, _FULL_SYNC)
        else:
            os.fsync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Makes the names in it durable: files that were created, renamed or removed."""
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
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
        )  # what SQLite adds to it gets the same mode
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def sizes(self, folder: Path) -> Iterator[tuple[Path, int]]:
        """Every file below `folder` with its bytes. Links count as themselves and are not followed."""
        with os.scandir(folder) as listing:
            for item in listing:
                if item.is_dir(follow_symlinks=False):
                    yield from self.sizes(Path(item.path))
                    continue
                try:
                    yield Path(item.path), item.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # went while we looked
                    continue


def write_all(files: Files, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Writes all of it and returns how many bytes that was."""
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
    """Fills all views; False if the file ends before."""
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
