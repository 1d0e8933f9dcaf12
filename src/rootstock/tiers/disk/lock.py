"""One process per directory. The lock's file also marks a directory as Rootstock's own: only there is anything
deleted."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootstock.tiers.base import Off
from rootstock.tiers.disk.files import Files

LOCK_NAME = "rootstock.lock"
_NOT_OURS = {"lost+found"}  # the root of a file system has it


@dataclass(frozen=True, slots=True)
class DirectoryLock:
    """Held until released, or until the process ends, however it ends."""

    files: Files
    fd: int

    def release(self) -> None:
        self.files.close(self.fd)


def lock_directory(files: Files, folder: Path) -> DirectoryLock | Off:
    """Refused at once if another process has it, or if the directory holds what is not ours. Raises OSError."""
    files.make_folder(folder)
    path = folder / LOCK_NAME
    strangers = sorted(item.name for item in folder.iterdir() if item.name not in _NOT_OURS)
    if strangers and not path.exists():
        return Off(
            f"{folder} is not empty ({strangers[0]!r} is there) and was not made by Rootstock, which deletes what "
            "it finds in its directory when space is short. Give --disk-dir an empty or a new directory."
        )
    fd = files.open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
        files.close(fd)
        return Off(
            f"{folder} is in use by another process (pid {holder}). Stop it, or give each process a --disk-dir of "
            "its own."
        )
    except OSError:
        files.close(fd)
        raise
    with suppress(OSError):  # it is held, even if a full disk doesn't let us say by whom
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return DirectoryLock(files, fd)
