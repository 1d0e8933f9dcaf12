"""Signatures of thinking blocks.

Clients send a thinking block back with its signature, and every client requires one. Anthropic's API checks it. This
server does not: a client can write any history anyway, as text of the assistant, so that a check would protect from
nothing. The text is used as it is.

A signature has one task: where the request wants the thinking omitted, it holds the text. The next request brings it
back, and its prompt extends the cached one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_DIGEST, _TEXT = "rsd1.", "rst1."  # name the format, so that a later one can replace it


def signature_of(text: str) -> str:
    """Returns the signature of a block that shows its text."""
    return _DIGEST + base64.b64encode(hashlib.sha256(text.encode(errors="surrogatepass")).digest()).decode()


def holding(text: str) -> str:
    """Returns the signature of a block that omits its text."""
    return _TEXT + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def text_held(signature: str) -> str:
    """Returns the text that a signature holds; "" for any other signature."""
    if not signature.startswith(_TEXT):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
