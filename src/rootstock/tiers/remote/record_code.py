"""Codes of records: proofs that a record was written by a server that has the secret."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from rootstock.errors import InvalidOption

CODE_BYTES = 32
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 32, 4096


class RecordCodes:
    """Maker of codes: HMAC-SHA-256 (RFC 2104) over a whole record, which names its identity."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Servers with different secrets have different keys in the store, and do not delete each other's records.
        self.name = hashlib.blake2b(key, digest_size=8, person=b"record-code").hexdigest()

    @classmethod
    def of_file(cls, path: Path) -> RecordCodes:
        """Reads the secret. Raises InvalidOption."""
        try:
            with path.open("rb") as file:
                key = file.read(_MOST_KEY_BYTES + 1).strip()
        except OSError as error:
            raise InvalidOption(
                "--remote-key-file", str(path), f"a file that can be read ({error})"
            ) from error
        if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
            raise InvalidOption("--remote-key-file", str(path), "a file of 32 to 4,096 bytes")
        return cls(key)

    def derived(self, purpose: bytes) -> bytes:
        """Returns 32 bytes for another purpose, of at most 16 bytes, from which the secret cannot be found."""
        return hashlib.blake2b(self._key, digest_size=32, person=purpose).digest()

    def of(self, views: Iterable[memoryview]) -> bytes:
        code = hmac.new(self._key, digestmod="sha256")
        for view in views:
            code.update(view)
        return code.digest()

    def is_right(self, code: bytes, views: Iterable[memoryview]) -> bool:
        return hmac.compare_digest(code, self.of(views))
