"""Lock of a directory for one process. The lock's file also marks the directory as Rootstock's own: files are deleted
only in such a directory."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootstock.tiers.base import Off
from rootstock.tiers.disk.files import Files

LOCK_NAME = "rootstock.lock"
_NOT_OURS = {"lost+found"}  # ignored: in the root of a file system


@dataclass(frozen=True, slots=True)
class DirectoryLock:
    """Lock that is held until it is released or the process ends, in whatever way."""

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
