"""Recovery of the disk tier's directory at a start, after a crash, a damaged index or changes by others."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path

from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.index import INDEX_NAMES, Index, is_damage
from rootstock.tiers.disk.segments import Segments, segment_number
from rootstock.tiers.disk.space import DiskUsage
from rootstock.units import in_units

_log = logging.getLogger(__name__)


def opened_or_new(files: Files, folder: Path, wal_bytes: int, total_bytes: int) -> tuple[Index, bool]:
    """Opens the index. In the place of a damaged one, makes an empty one: without its rows, no record can be found.

    `total_bytes` are in the directory. Returns the index, and whether an earlier one was lost. Raises OSError and
    sqlite3.Error.
    """
    try:
        return Index.open(files, folder, wal_bytes), False
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        _log.warning(
            "The index of %s is unreadable (%s): the disk tier starts empty, without the %s there.",
            folder,
            error,
            in_units(total_bytes),
        )
    for name in INDEX_NAMES:
        with suppress(FileNotFoundError):
            files.remove(folder / name)
    return Index.open(files, folder, wal_bytes), True


def drop_unmatched(files: Files, index: Index, segments: Segments, usage: DiskUsage) -> int:
    """Removes rows without bytes and bytes without rows. Returns the number of the rows.

    Raises OSError and sqlite3.Error.
    """
    count = 0
    for number, end in index.ends().items():
        length = usage.segments.get(number, 0)
        if end > length:
            short = index.beyond(number, length)
            index.delete(short)
            count += len(short)
        elif end < length:
            files.truncate(segments.path(number), end)
    return count


def next_segment(files: Files, folder: Path, index: Index) -> int:
    """Returns the number of a new segment. Rows count too: a segment's file may be missing, and its row must never
    find another segment's bytes."""
    numbers = [n for path, _ in files.sizes(folder) if (n := segment_number(path)) is not None]
    return 1 + max([0, *numbers, *index.live_bytes()])
