"""Byte format of a record in a file: prefix | header | payload.

    prefix    magic, header bytes, payload bytes, checksum
    header    bytes of the identity, the identity, number of buffers, the bytes of each
    payload   the buffers

The checksum is xxh3-128 over everything but the magic and itself, so that a payload cannot be loaded under another
identity. The identity ends in a checksum of its own, because the index keeps a copy of it.
All numbers are little-endian. Any change here needs a new `FORMAT`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock.cache.keys import Identity, RecordKind
from rootstock.cache.retention.hint_types import Keep
from rootstock.tiers.base import Miss, MissKind, Record

FORMAT = 1
_MAGIC = b"RtStkRec"
_PREFIX = struct.Struct("<8sIQ16s")
_SIZES = struct.Struct("<IQ")
_IDENTITY = struct.Struct("<16s16s16sBIQIHH")
_MOST_START = 1 << 48  # position

PREFIX_BYTES = _PREFIX.size


def encode_identity(identity: Identity) -> bytes:
    family, dtype = identity.family.encode(), identity.dtype.encode()
    raw = b"".join(
        (
            _IDENTITY.pack(
                identity.namespace,
                identity.parent,
                identity.own,
                identity.kind,
                identity.layers,
                identity.start,
                len(identity.tokens),
                len(family),
                len(dtype),
            ),
            family,
            dtype,
            identity.tokens.astype("<i4", copy=False).tobytes(),
        )
    )
    return raw + xxhash.xxh3_64(raw).digest()


def decode_identity(raw: bytes | memoryview) -> Identity | None:
    """Decodes an identity. Returns None if the bytes are not an identity or are damaged."""
    body, check = raw[:-8], raw[-8:]
    if len(body) < _IDENTITY.size or xxhash.xxh3_64(body).digest() != check:
        return None
    namespace, parent, own, kind, layers, start, tokens, family, dtype = _IDENTITY.unpack_from(body)
    # The checksum proves no origin: a copied directory may come from an attacker.
    if (
        len(body) != _IDENTITY.size + family + dtype + 4 * tokens
        or not layers
        or kind not in tuple(RecordKind)
    ):
        return None
    if (RecordKind(kind) is RecordKind.BLOCKS and not tokens) or start > _MOST_START:
        return None
    names = bytes(body[_IDENTITY.size : _IDENTITY.size + family + dtype])
    run = np.frombuffer(body, "<i4", count=tokens, offset=_IDENTITY.size + family + dtype)
    try:
        family_name, dtype_name = names[:family].decode(), names[family:].decode()
    except UnicodeDecodeError:
        return None
    return Identity(
        namespace,
        family_name,
        layers,
        dtype_name,
        RecordKind(kind),
        start,
        run.astype(np.int32),
        parent,
        own,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoded record: `views` are written in order, without joining them."""

    identity: Identity
    identity_raw: bytes
    header_bytes: int
    views: list[memoryview]
    keep: Keep | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


def encode_header(identity: bytes, payload: Sequence[memoryview]) -> bytes:
    """Encodes the header of a record from its encoded identity and its buffers."""
    sizes = struct.pack(f"<I{len(payload)}Q", len(payload), *(view.nbytes for view in payload))
    return b"".join((struct.pack("<I", len(identity)), identity, sizes))


def decode_header(header: memoryview, payload_bytes: int) -> tuple[Identity, tuple[int, ...]] | None:
    """Decodes the header of a record whose payload has so many bytes. Returns its identity and the bytes of each
    buffer, or None if it is damaged."""
    if header.nbytes < 8:
        return None
    (identity_bytes,) = struct.unpack_from("<I", header)
    if header.nbytes < identity_bytes + 8:
        return None
    identity = decode_identity(header[4 : 4 + identity_bytes])
    (count,) = struct.unpack_from("<I", header, 4 + identity_bytes)
    if identity is None or header.nbytes != 8 + identity_bytes + 8 * count:
        return None
    buffer_bytes = struct.unpack_from(f"<{count}Q", header, 8 + identity_bytes)
    return (identity, buffer_bytes) if sum(buffer_bytes) == payload_bytes else None


def encode(record: Record) -> Encoded:
    payload = record.views()
    identity = encode_identity(record.identity)
    header = encode_header(identity, payload)
    payload_bytes = sum(view.nbytes for view in payload)
    h = xxhash.xxh3_128(_SIZES.pack(len(header), payload_bytes))
    h.update(header)
    for view in payload:
        h.update(view)
    prefix = _PREFIX.pack(_MAGIC, len(header), payload_bytes, h.digest())
    views = [memoryview(prefix + header), *payload]
    return Encoded(record.identity, identity, len(header), views, record.keep)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Head of a record: prefix and header. They are not verified before the payload has been read."""

    identity: Identity
    buffer_bytes: tuple[int, ...]
    checksum: bytes
    header: memoryview
    payload_bytes: int

    def begin_checksum(self) -> xxhash.xxh3_128:
        """Begins the checksum, to which the payload has to be added."""
        h = xxhash.xxh3_128(_SIZES.pack(self.header.nbytes, self.payload_bytes))
        h.update(self.header)
        return h


def sizes_in(prefix: memoryview) -> tuple[int, int] | None:
    """Returns the bytes of header and payload that a prefix names; None: no record begins with it."""
    magic, header_bytes, payload_bytes, _ = _PREFIX.unpack(prefix)
    return (header_bytes, payload_bytes) if magic == _MAGIC else None


def head_of(front: memoryview, payload_bytes: int) -> Head | Miss:
    """Decodes prefix and header, of a record whose payload has so many bytes."""
    *_, checksum = _PREFIX.unpack(front[:PREFIX_BYTES])
    header = front[PREFIX_BYTES:]
    decoded = decode_header(header, payload_bytes)
    if decoded is None:
        return Miss(MissKind.CHECKSUM, "the header is damaged")
    return Head(*decoded, checksum, header, payload_bytes)


def difference(asked: Identity, found: Identity) -> MissKind | None:
    """Returns the first respect in which `found` differs from `asked`; None if both name the same memory."""
    if asked.namespace != found.namespace:
        return MissKind.OTHER_NAMESPACE
    if (asked.family, asked.layers, asked.kind) != (found.family, found.layers, found.kind):
        return MissKind.OTHER_LAYERS
    if asked.dtype != found.dtype:
        return MissKind.OTHER_DTYPE
    if asked.end != found.end or (asked.kind is RecordKind.BLOCKS and asked.start != found.start):
        return MissKind.OTHER_POSITION
    # A state may have been stored with another start: then the tokens that both have are compared.
    both = min(len(asked.tokens), len(found.tokens))
    asked_tokens, found_tokens = (run.tokens[len(run.tokens) - both :] for run in (asked, found))
    same_tokens = asked_tokens.tobytes() == found_tokens.tobytes()  # a tenth of array_equal's time
    same_parent = asked.start != found.start or asked.parent == found.parent
    if asked.own != found.own or not same_parent or not same_tokens:
        return MissKind.OTHER_TOKENS
    return None
