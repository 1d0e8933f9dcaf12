"""Reads of records from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock.tiers.base import Miss, MissKind
from rootstock.tiers.disk.files import Files, read_all
from rootstock.tiers.record import (
    PREFIX_BYTES,
    Head,
    head_of,
    sizes_in,
)
from rootstock.units import MIB

_CHUNK_BYTES = MIB
_SMALL_HEADER_BYTES = 1 << 16  # up to this size the header is read with its prefix, in one call


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Place of a record."""

    segment: int
    offset: int
    stored_bytes: int
    header_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.stored_bytes - PREFIX_BYTES - self.header_bytes


def read_head(files: Files, fd: int, place: RecordLocation) -> Head | Miss:
    """Reads the head of a record. Raises OSError."""
    if 0 <= place.header_bytes <= _SMALL_HEADER_BYTES:
        front = memoryview(bytearray(PREFIX_BYTES + place.header_bytes))
        if read_all(files, fd, [front], place.offset):
            return _other_record(front[:PREFIX_BYTES], place) or head_of(front, place.payload_bytes)
    # The row's header size may be wrong: memory is allocated only if the prefix agrees with it.
    prefix = memoryview(bytearray(PREFIX_BYTES))
    if not read_all(files, fd, [prefix], place.offset):
        return Miss(MissKind.MISSING_BYTES, "the file ends before the record")
    if (other := _other_record(prefix, place)) is not None:
        return other
    front = memoryview(bytearray(PREFIX_BYTES + place.header_bytes))
    if not read_all(files, fd, [front], place.offset):
        return Miss(MissKind.MISSING_BYTES, "the file ends within the header")
    return _other_record(front[:PREFIX_BYTES], place) or head_of(front, place.payload_bytes)


def _other_record(prefix: memoryview, place: RecordLocation) -> Miss | None:
    """Compares a prefix with the row of the record."""
    if sizes_in(prefix) != (place.header_bytes, place.payload_bytes):
        return Miss(MissKind.CHECKSUM, "no such record begins here")
    return None


def read_payload(
    files: Files, fd: int, place: RecordLocation, head: Head, views: Sequence[memoryview]
) -> Miss | None:
    """Fills `views`, whose total size is the payload's, and verifies the record. Raises OSError."""
    if not read_all(files, fd, views, place.offset + PREFIX_BYTES + place.header_bytes):
        return Miss(MissKind.MISSING_BYTES, "the file ends within the payload")
    h = head.begin_checksum()
    for view in views:
        h.update(view)
    return None if h.digest() == head.checksum else Miss(MissKind.CHECKSUM, "the payload is damaged")


def verify(files: Files, fd: int, place: RecordLocation) -> Head | Miss:
    """Verifies a whole record, reading it in pieces without keeping its payload. Raises OSError."""
    head = read_head(files, fd, place)
    if isinstance(head, Miss):
        return head
    h = head.begin_checksum()
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, place.payload_bytes)))
    offset = place.offset + PREFIX_BYTES + place.header_bytes
    end = place.offset + place.stored_bytes
    while offset < end:
        part = chunk[: end - offset]
        if not read_all(files, fd, [part], offset):
            return Miss(MissKind.MISSING_BYTES, "the file ends within the payload")
        h.update(part)
        offset += part.nbytes
    return head if h.digest() == head.checksum else Miss(MissKind.CHECKSUM, "the payload is damaged")
