"""Records on their way to and from a shared server: prefix | header | payload | proof.

    prefix    magic, header bytes, payload bytes
    header    as on a disk (`tiers/record.py`)
    payload   the buffers
    proof     of all bytes before it: xxh3-128, or with a secret a code

The proof comes last, and a record is sent and read in pieces, so that a piece is hashed while the system moves the
next ones. Any change here needs another `RECORD_KIND`, by which replicas of before and after it do not see each
other's records.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rootstock.cache.keys import Identity
from rootstock.tiers.base import Buffer, Loaded, LoadResult, Miss, MissKind, Record, views_of
from rootstock.tiers.record import decode_header, difference, encode_header, encode_identity
from rootstock.tiers.remote.connection import StoreConnection
from rootstock.units import MIB

RECORD_KIND = b"r2:"  # in the server's keys
PIECE_BYTES = MIB  # half as much is sent in hardly more time than it takes to wake the server
_MAGIC = b"RtStkRm2"
PREFIX = struct.Struct("<8sIQ")
_MOST_RECORD_BYTES = 512 * MIB  # the server's own limit
_MOST_HEADER_BYTES = MIB  # an identity, and a number for each buffer of a model's layers


class Proof(Protocol):
    """Hash of the bytes of a record."""

    @property
    def digest_size(self) -> int: ...

    def update(self, more: bytes | bytearray | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True, eq=False)
class OutgoingRecord:
    """Record to send."""

    front: bytes
    payload: Sequence[memoryview]
    proof: Proof
    stored_bytes: int

    def pieces(self) -> Iterator[list[memoryview]]:
        """Yields all bytes, once. A piece is hashed when the next one is asked for: the server reads it meanwhile."""
        self.proof.update(self.front)
        yield [memoryview(self.front)]
        for piece in _pieces(self.payload):
            yield piece
            for view in piece:
                self.proof.update(view)
        yield [memoryview(self.proof.digest())]


def outgoing(record: Record, proof: Proof) -> OutgoingRecord:
    payload = record.views()
    header = encode_header(encode_identity(record.identity), payload)
    payload_bytes = record.payload_bytes
    front = PREFIX.pack(_MAGIC, len(header), payload_bytes) + header
    return OutgoingRecord(front, payload, proof, len(front) + payload_bytes + proof.digest_size)


def read_record(
    connection: StoreConnection, size: int, proof: Proof, asked: Identity, into: Sequence[Buffer] | None
) -> LoadResult:
    """Reads a record of `size` bytes, its payload straight into its buffers, and verifies it.

    Sizes are bounded before anything is allocated. After a miss a part of the record may be unread.
    """
    prefix = memoryview(bytearray(PREFIX.size))
    if size < prefix.nbytes + proof.digest_size:
        return Miss(MissKind.MISSING_BYTES, f"no record has {size:,} bytes")
    _fill(connection, [prefix], proof)
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != _MAGIC:
        return Miss(MissKind.CHECKSUM, "no such record begins here")
    too_large = size > _MOST_RECORD_BYTES or header_bytes > _MOST_HEADER_BYTES
    if too_large or prefix.nbytes + header_bytes + payload_bytes + proof.digest_size != size:
        return Miss(MissKind.MISSING_BYTES, f"the record has {size:,} bytes")
    header = memoryview(bytearray(header_bytes))
    _fill(connection, [header], proof)
    decoded = decode_header(header, payload_bytes)
    if decoded is None:
        return Miss(MissKind.CHECKSUM, "the header is damaged")
    identity, buffer_bytes = decoded
    views = [memoryview(bytearray(n)) for n in buffer_bytes] if into is None else views_of(into)
    if sum(view.nbytes for view in views) != payload_bytes:
        return Miss(MissKind.OTHER_SIZE, f"the payload has {payload_bytes:,} bytes")
    _fill(connection, views, proof)
    sent_proof = memoryview(bytearray(proof.digest_size))
    connection.fill([sent_proof])
    connection.end_value()
    if not hmac.compare_digest(sent_proof, proof.digest()):
        return Miss(MissKind.CHECKSUM, "it is damaged, or its code was made with another --remote-key-file")
    kind = difference(asked, identity)
    return Loaded(tuple(views), "remote") if kind is None else Miss(kind, "the key leads to another record")


def _fill(connection: StoreConnection, views: Iterable[memoryview], proof: Proof) -> None:
    for piece in _pieces(views):
        connection.fill(piece)
        for view in piece:
            proof.update(view)


def _pieces(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Divides buffers into groups of some size, which may begin and end within a buffer."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for view in views:
        while view.nbytes >= room:
            yield [*piece, view[:room]]
            view = view[room:]
            piece, room = [], PIECE_BYTES
        if view.nbytes:
            piece.append(view)
            room -= view.nbytes
    if piece:
        yield piece
