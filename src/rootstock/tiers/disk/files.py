"""File system of the disk tier, and the lock of its directory.

Tests replace `Files` by a file system that fails, writes short or crashes. The lock's file also marks the directory
as Rootstock's own: files are deleted only in such a directory.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootstock.tiers.base import Off

LOCK_NAME = "rootstock.lock"
_NOT_OURS = {"lost+found"}  # ignored: in the root of a file system
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


@dataclass(frozen=True, slots=True)
class DirectoryLock:
    """Lock that is held until it is released or the process ends."""

    files: Files
    fd: int

    def release(self) -> None:
        self.files.close(self.fd)


def lock_directory(files: Files, folder: Path) -> DirectoryLock | Off:
    """Locks a directory. Returns `Off` at once if another process holds it or if it has foreign files. Raises
    OSError."""
    files.make_folder(folder)
    path = folder / LOCK_NAME
    strangers = sorted(item.name for item in folder.iterdir() if item.name not in _NOT_OURS)
    if strangers and not path.exists():
        return Off(
            f"{folder} is not empty ({strangers[0]!r} is there) and was not made by Rootstock, which deletes files "
            "in its directory when space is short. Give --disk-dir an empty or a new directory."
        )
    fd = files.open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
        files.close(fd)
        return Off(
            f"{folder} is in use by another process (pid {holder}). Stop it, or give each process its own "
            "--disk-dir."
        )
    except OSError:
        files.close(fd)
        raise
    with suppress(OSError):  # the lock is held even if a full disk prevents writing the pid
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return DirectoryLock(files, fd)
