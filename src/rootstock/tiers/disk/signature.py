"""Signature of an archive: HMAC-SHA256 over all bytes before it.

    archive | digest | magic

A checksum finds damage. A signature also finds a change that somebody made on purpose: K and V of a prefix cannot be
checked against its text, so that a reader must trust the writer.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from rootstock.errors import InvalidOption
from rootstock.tiers.disk.files import Files, read_all
from rootstock.units import KIB, MIB

_MAGIC = b"RtStkSig"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 16, 4 * KIB

SIGNATURE_BYTES = _DIGEST_BYTES + len(_MAGIC)
KEY_FILE = f"a file with a key of {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES:,} bytes, as `openssl rand -hex 32` makes it"


@dataclass(frozen=True, slots=True)
class BundleKey:
    """The secret key of signatures."""

    secret: bytes

    def __repr__(self) -> str:
        return "BundleKey(not shown)"

    @staticmethod
    def read(option: str, path: Path) -> BundleKey:
        """Reads a key without the white space around it. Raises InvalidOption."""
        try:
            with path.open("rb") as file:
                secret = file.read(_MOST_KEY_BYTES + 1)
        except OSError as error:
            raise InvalidOption(option, str(path), f"{KEY_FILE} ({error.strerror})") from error
        if len(secret) > _MOST_KEY_BYTES or len(secret.strip()) < _LEAST_KEY_BYTES:
            raise InvalidOption(option, str(path), KEY_FILE)
        return BundleKey(secret.strip())


class Signer:
    """Signer of the bytes that it is given."""

    def __init__(self, key: BundleKey) -> None:
        self._mac = hmac.new(key.secret, digestmod=hashlib.sha256)

    def update(self, part: bytes | memoryview) -> None:
        self._mac.update(part)

    @property
    def signature(self) -> bytes:
        return self._mac.digest() + _MAGIC


def signed_bytes(files: Files, fd: int, file_bytes: int) -> int:
    """Returns the bytes of the signature at the end of a file: 0 if there is none. Raises OSError."""
    end = bytearray(len(_MAGIC))
    if file_bytes < SIGNATURE_BYTES or not read_all(files, fd, [memoryview(end)], file_bytes - len(_MAGIC)):
        return 0
    return SIGNATURE_BYTES if end == _MAGIC else 0


def why_not_trusted(files: Files, fd: int, file_bytes: int, key: BundleKey) -> str | None:
    """Returns why an archive does not have a signature of this key; None: it has. Raises OSError."""
    if not signed_bytes(files, fd, file_bytes):
        return "it has no signature"
    found = bytearray(SIGNATURE_BYTES)
    content_bytes = file_bytes - SIGNATURE_BYTES
    if not read_all(files, fd, [memoryview(found)], content_bytes):
        return "it is truncated"
    if not hmac.compare_digest(bytes(found), signature_of(files, fd, content_bytes, key)):
        return "its signature is not of this key, or its bytes have changed"
    return None


def signature_of(files: Files, fd: int, content_bytes: int, key: BundleKey) -> bytes:
    """Returns the signature of a file's first bytes. Raises OSError."""
    signer, piece = Signer(key), memoryview(bytearray(MIB))
    for offset in range(0, content_bytes, MIB):
        part = piece[: content_bytes - offset]
        if not read_all(files, fd, [part], offset):
            raise OSError("the file became shorter")
        signer.update(part)
    return signer.signature


def sign(path: Path, key: BundleKey) -> None:
    """Signs an archive, in place of an earlier signature. Raises OSError."""
    files = Files()
    with path.open("r+b") as file:
        file_bytes = path.stat().st_size
        content_bytes = file_bytes - signed_bytes(files, file.fileno(), file_bytes)
        signature = signature_of(files, file.fileno(), content_bytes, key)
        file.truncate(content_bytes)
        file.seek(content_bytes)
        file.write(signature)
