"""Archive file of records, to move prefixes between machines.

    magic | records as in a segment | manifest | its offset, bytes and checksum | magic

The manifest is JSON: the format and the place of each record. It comes last, so that a truncated archive is
recognised. It has a checksum of its own; each record has another, bound to its identity.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from rootstock.tiers.base import Miss, MissKind, Record
from rootstock.tiers.disk.files import Files, read_all, write_all
from rootstock.tiers.disk.record import FORMAT, Encoded, Place, read_head, read_payload

_MAGIC = b"RtStkArc"
_FOOTER = struct.Struct("<QQ16s8s")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Result: the file is not an archive of Rootstock, or not a complete one."""

    reason: str


def write_archive(files: Files, path: Path, records: Iterable[Encoded]) -> int:
    """Writes an archive and returns its bytes. The file gets its name when it is complete and synced. Raises
    OSError."""
    temporary = path.with_name(path.name + ".part")
    with suppress(FileNotFoundError):
        files.remove(temporary)
    fd = files.open_new(temporary)
    try:
        try:
            offset = write_all(files, fd, [memoryview(_MAGIC)], 0)
            places = []
            for record in records:
                places.append(Place(0, offset, record.stored_bytes, record.header_bytes))
                offset += write_all(files, fd, record.views, offset)
            content = {"format": FORMAT, "records": [asdict(place) for place in places]}
            manifest = json.dumps(content).encode()
            footer = _FOOTER.pack(offset, len(manifest), xxhash.xxh3_128(manifest).digest(), _MAGIC)
            offset += write_all(files, fd, [memoryview(manifest), memoryview(footer)], offset)
            files.sync(fd)
        finally:
            files.close(fd)
        files.rename(temporary, path)
        files.sync_folder(path.parent)
    except BaseException:  # also on an interrupt, so that no partial file of gigabytes stays
        with suppress(OSError):
            files.remove(temporary)
        raise
    return offset


def read_places(files: Files, path: Path) -> list[Place] | Unreadable:
    """Reads an archive's manifest: the places of its records."""
    try:
        file_bytes = path.stat().st_size
        fd = files.open_read(path)
    except OSError as error:
        return Unreadable(str(error))
    try:
        return _read_manifest(files, fd, file_bytes)
    except OSError as error:
        return Unreadable(str(error))
    finally:
        files.close(fd)


def _read_manifest(files: Files, fd: int, file_bytes: int) -> list[Place] | Unreadable:
    """Reads and checks the manifest. Raises OSError."""
    footer = bytearray(_FOOTER.size)
    cut_off = Unreadable("it is truncated, or not an archive of Rootstock")
    if file_bytes < len(_MAGIC) + len(footer):
        return cut_off
    if not read_all(files, fd, [memoryview(footer)], file_bytes - len(footer)):
        return cut_off
    offset, manifest_bytes, checksum, magic = _FOOTER.unpack(footer)
    if magic != _MAGIC or offset + manifest_bytes + len(footer) != file_bytes:
        return cut_off
    manifest = bytearray(manifest_bytes)
    if not read_all(files, fd, [memoryview(manifest)], offset):
        return cut_off
    if xxhash.xxh3_128(manifest).digest() != checksum:
        return Unreadable("its manifest is damaged")
    content = json.loads(manifest)
    if content["format"] != FORMAT:
        return Unreadable(f"it has format {content['format']}, and this version reads {FORMAT}")
    places = [Place(**place) for place in content["records"]]
    if any(place.offset < len(_MAGIC) or place.offset + place.stored_bytes > offset for place in places):
        return Unreadable("its manifest names places outside of the archive")
    return places


def read_records(files: Files, fd: int, places: Iterable[Place]) -> Iterator[Record | Miss]:
    """Yields each record verified, or a miss that says why it is not."""
    for place in places:
        try:
            yield _read_record(files, fd, place)
        except OSError as error:
            yield Miss(MissKind.IO_ERROR, str(error))


def _read_record(files: Files, fd: int, place: Place) -> Record | Miss:
    """Reads and verifies a record. Raises OSError."""
    head = read_head(files, fd, place)
    if isinstance(head, Miss):
        return head
    payload = [memoryview(bytearray(length)) for length in head.buffer_bytes]
    damage = read_payload(files, fd, place, head, payload)
    return damage or Record(head.identity, payload)
