"""Seals of reasoning: `encrypted_content`, which a client keeps and sends back instead of a stored response.

The text is compressed and authenticated, not hidden: the answer shows it as `reasoning_text` beside the seal. A seal
is bound to its tenant: the server does not open one tenant's seal in a request of another.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import zlib

_PREFIX = "rs1."  # names the format, so that a later one can replace it
_TAG_BYTES = 32


class Sealer:
    """Sealer of one tenant's reasoning, with a key of the server's."""

    def __init__(self, key: bytes, tenant: str) -> None:
        self._key = hmac.digest(key, tenant.encode(errors="surrogatepass"), "sha256")

    def seal(self, text: str) -> str:
        payload = zlib.compress(text.encode(errors="surrogatepass"))
        return _PREFIX + base64.b64encode(self._tag(payload) + payload).decode()

    def open(self, sealed: str) -> str | None:
        """Returns the text, or None for a seal of another key, of another tenant or of another server."""
        if not sealed.startswith(_PREFIX):
            return None
        try:
            raw = base64.b64decode(sealed.removeprefix(_PREFIX).encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            return None
        tag, payload = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(payload)):
            return None
        # The server made it, and bounded it then.
        return zlib.decompress(payload).decode(errors="surrogatepass")

    def _tag(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")
