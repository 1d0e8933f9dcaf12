"""Segments: append-only files. A record's bytes are written once and never changed; segments are removed as a
whole."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from rootstock.tiers.disk.files import Files, write_all
from rootstock.tiers.disk.record_reads import RecordLocation
from rootstock.tiers.record import FORMAT, Encoded

_NAME = re.compile(rf"v{FORMAT}-(\d{{8,}})\.segment")


def segment_number(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


class Segments:
    """Segments of one directory. Not thread-safe: there is one writer.

    `abandon` removes the bytes appended since the last `keep`. Only the process that created a segment appends to it,
    and never after a failure, because the segment's end is then unknown.
    """

    def __init__(self, files: Files, folder: Path, segment_bytes: int, next_number: int) -> None:
        self._files = files
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._next = next_number
        self._fd: int | None = None  # file descriptor of the open segment
        self._number = -1
        self._length = 0
        self._kept: dict[int, int] = {}  # segments appended to since the last `keep`, with their length then
        self._new_names = False  # files were created since the folder was synced
        self.written_bytes = 0

    @property
    def open_number(self) -> int | None:
        return None if self._fd is None else self._number

    def path(self, number: int) -> Path:
        return self._folder / f"v{FORMAT}-{number:08d}.segment"

    def append(self, record: Encoded) -> RecordLocation:
        """Appends a record. A record longer than a segment gets a segment for itself. Raises OSError; then `abandon`
        must be called."""
        stored_bytes = record.stored_bytes
        if self._fd is not None and self._length + stored_bytes > self._segment_bytes:
            self.seal()
        if self._fd is None:
            self._create()
        assert self._fd is not None
        place = RecordLocation(self._number, self._length, stored_bytes, record.header_bytes)
        self._kept.setdefault(self._number, self._length)
        self.written_bytes += write_all(self._files, self._fd, record.views, place.offset)
        self._length += stored_bytes
        return place

    def sync(self) -> None:
        """Makes appended bytes durable. Raises OSError."""
        if self._fd is not None:
            self._files.sync(self._fd)
        if self._new_names:
            self._files.sync_folder(self._folder)
            self._new_names = False

    def keep(self) -> None:
        self._kept.clear()

    def abandon(self) -> None:
        """Removes the bytes appended since `keep`, as far as the disk allows. No row refers to any that stay."""
        self.close()
        for number, kept_length in self._kept.items():
            with contextlib.suppress(OSError):
                if kept_length:
                    self._files.truncate(self.path(number), kept_length)
                else:
                    self._files.remove(self.path(number))
        self._kept.clear()

    def seal(self) -> None:
        """Syncs and closes the open segment, so that no more is appended to it. Raises OSError."""
        if self._fd is not None:
            self._files.sync(self._fd)
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def _create(self) -> None:
        number, self._next = self._next, self._next + 1
        self._fd = self._files.open_new(self.path(number))
        self._number, self._length = number, 0
        self._kept[number] = 0
        self._new_names = True
