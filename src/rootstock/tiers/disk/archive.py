"""Archive file of records, to move prefixes between machines.

    magic | records as in a segment | manifest | its offset, bytes and checksum | magic | signature, if signed

The manifest is JSON: the format, the place of each record, and in a *bundle* the one prefix that they belong to. It
comes last, so that a truncated archive is recognised, and so that an archive can be written as a stream. It has a
checksum of its own; each record has another, bound to its identity. `signature.py` has the signature.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rootstock.cache.types import Tokens
from rootstock.tiers.base import Miss, MissKind, Record
from rootstock.tiers.disk.files import Files, read_all, write_all
from rootstock.tiers.disk.record import FORMAT, PREFIX_BYTES, Encoded, Place, read_head, read_payload
from rootstock.tiers.disk.signature import signed_bytes

BUNDLE_TYPE = "application/vnd.rootstock.bundle"  # content type of the archive of one prefix
_MAGIC = b"RtStkArc"
_FOOTER = struct.Struct("<QQ16s8s")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Result: the file is not an archive of Rootstock, or not a complete one."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class BundledPrefix:
    """The prefix of a bundle. The salt is not in it: the importer names it."""

    tokens: Tokens  # [all positions of the records] int32
    positions: tuple[int, ...]  # at which the exporter could resume, in order
    public_tokens: int  # of a public head
    # The fields of `Namespace` but the salt.
    weights: str
    kv_dtype: str
    rope_regime: str
    adapter: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens": base64.b64encode(self.tokens.astype("<i4").tobytes()).decode()}

    @staticmethod
    def of_json(content: object) -> BundledPrefix:
        """Raises ValueError."""
        if not isinstance(content, dict):
            raise ValueError("the prefix is no object")
        names = {name: content.get(name) for name in ("weights", "kv_dtype", "rope_regime", "adapter")}
        if not all(isinstance(name, str) for name in names.values()):
            raise ValueError("the names of the prefix are no text")
        encoded = content.get("tokens")
        raw = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
        tokens = np.frombuffer(raw, "<i4").astype(np.int32)
        positions, public_tokens = content.get("positions"), content.get("public_tokens")
        if not isinstance(positions, list) or not all(map(_is_count, [*positions, public_tokens])):
            raise ValueError("the positions of the prefix are no numbers")
        if not positions:
            raise ValueError("the prefix has no position to resume from")
        if positions != sorted(set(positions)) or not positions[0] > 0:
            raise ValueError("the positions of the prefix are not in order")
        if max(positions[-1], public_tokens or 0) > len(tokens):
            raise ValueError("the prefix has positions beyond its tokens")
        return BundledPrefix(tokens, tuple(positions), public_tokens or 0, **names)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of an archive."""

    places: list[Place]
    prefix: BundledPrefix | None  # None: the records of several prefixes


class ArchiveStream:
    """An archive in the order of its bytes, without its signature."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self.written_bytes = 0

    def begin(self) -> memoryview:
        return self._counted([memoryview(_MAGIC)])[0]

    def record(self, record: Encoded) -> list[memoryview]:
        self._places.append(Place(0, self.written_bytes, record.stored_bytes, record.header_bytes))
        return self._counted(record.views)

    def end(self, prefix: BundledPrefix | None = None) -> list[memoryview]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "records": [asdict(place) for place in self._places],
        }
        if prefix is not None:
            content["prefix"] = prefix.as_json()
        manifest = json.dumps(content, separators=(",", ":")).encode()
        footer = _FOOTER.pack(self.written_bytes, len(manifest), xxhash.xxh3_128(manifest).digest(), _MAGIC)
        return self._counted([memoryview(manifest), memoryview(footer)])

    def _counted(self, views: list[memoryview]) -> list[memoryview]:
        self.written_bytes += sum(view.nbytes for view in views)
        return views


def write_archive(files: Files, path: Path, records: Iterable[Encoded]) -> int:
    """Writes an archive and returns its bytes. The file gets its name when it is complete and synced. Raises
    OSError."""
    temporary = path.with_name(path.name + ".part")
    with suppress(FileNotFoundError):
        files.remove(temporary)
    fd = files.open_new(temporary)
    stream = ArchiveStream()
    try:
        try:
            offset = write_all(files, fd, [stream.begin()], 0)
            for record in records:
                offset += write_all(files, fd, stream.record(record), offset)
            offset += write_all(files, fd, stream.end(), offset)
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
        manifest = read_manifest(files, fd, file_bytes)
    except OSError as error:
        return Unreadable(str(error))
    finally:
        files.close(fd)
    return manifest if isinstance(manifest, Unreadable) else manifest.places


def read_manifest(
    files: Files, fd: int, file_bytes: int, most_bytes: int | None = None
) -> Manifest | Unreadable:
    """Reads and checks the manifest, of at most `most_bytes`. Raises OSError."""
    file_bytes -= signed_bytes(files, fd, file_bytes)
    footer = bytearray(_FOOTER.size)
    cut_off = Unreadable("it is truncated, or not an archive of Rootstock")
    if file_bytes < len(_MAGIC) + len(footer):
        return cut_off
    first = bytearray(len(_MAGIC))
    if not read_all(files, fd, [memoryview(first)], 0) or first != _MAGIC:
        return cut_off
    if not read_all(files, fd, [memoryview(footer)], file_bytes - len(footer)):
        return cut_off
    offset, manifest_bytes, checksum, magic = _FOOTER.unpack(footer)
    if magic != _MAGIC or offset + manifest_bytes + len(footer) != file_bytes:
        return cut_off
    if most_bytes is not None and manifest_bytes > most_bytes:
        return Unreadable(f"its manifest has {manifest_bytes:,} bytes, and at most {most_bytes:,} are read")
    manifest = bytearray(manifest_bytes)
    if not read_all(files, fd, [memoryview(manifest)], offset):
        return cut_off
    if xxhash.xxh3_128(manifest).digest() != checksum:
        return Unreadable("its manifest is damaged")
    try:
        content = json.loads(manifest)
        if not isinstance(content, dict) or not isinstance(content.get("records"), list):
            raise ValueError("it is no list of records")
        if content.get("format") != FORMAT:
            return Unreadable(f"it has format {content.get('format')!r:.40}, and this version reads {FORMAT}")
        places = [_place_of(each) for each in content["records"]]
        prefix = None if "prefix" not in content else BundledPrefix.of_json(content["prefix"])
    except (ValueError, RecursionError) as error:
        return Unreadable(f"its manifest is wrong: {error}")
    # One after the other, so that reading all of them takes no more than the file's bytes.
    expected = len(_MAGIC)
    for place in places:
        if place.offset != expected:
            return Unreadable("its manifest names places outside of the archive")
        expected += place.stored_bytes
    if expected != offset:
        return Unreadable("its manifest names places outside of the archive")
    return Manifest(places, prefix)


def _place_of(content: object) -> Place:
    """Raises ValueError."""
    if not isinstance(content, Mapping) or set(content) != {
        "segment",
        "offset",
        "stored_bytes",
        "header_bytes",
    }:
        raise ValueError("a record has no place")
    if not all(map(_is_count, content.values())):
        raise ValueError("the place of a record is no number")
    place = Place(**content)
    if place.payload_bytes < 0 or place.stored_bytes < PREFIX_BYTES:
        raise ValueError("a record is shorter than its header")
    return place


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


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
