"""Images in rendered prompts: a marker stands for each until the text is tokenized.

Templates, escapes, marks and boundaries work on text. A marker is text that no client can write, because it holds a
secret of this process, and that no template and no escape changes. It holds all that tokenization needs:
`with_images` puts the text of the model's processor in its place, with control tokens, and the ids of the image's
rows (`cache/image_tokens.py`) in place of the model's row token. Two images thereby differ as text, too: remembered
answers and tokenized pieces are found by text.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootstock.cache.image_tokens import ImageLayout, image_tokens
from rootstock.cache.types import Tokens
from rootstock.errors import SpecialTokenInText

IMAGE_MARK = f"image{secrets.token_hex(16)}x"  # begins each marker
_MARKER = re.compile(f"{IMAGE_MARK}([A-Z2-7]+)x")


@dataclass(frozen=True, slots=True)
class _Standing:
    digest: bytes
    row_token: int
    rows: int


def marker_of(layout: ImageLayout) -> str:
    """Returns the text that stands for an image in a message's content."""
    held = [layout.digest.hex(), layout.row_token, len(layout.offsets), layout.text]
    packed = zlib.compress(json.dumps(held).encode())
    return f"{IMAGE_MARK}{base64.b32encode(packed).decode().rstrip('=')}x"


def with_images(rendered: str, encode: Callable[[str], Tokens]) -> Tokens:
    """Tokenizes a rendered text with markers. `encode` tokenizes a text without. Raises SpecialTokenInText."""
    shown: list[_Standing] = []

    def replaced(marker: re.Match[str]) -> str:
        packed = base64.b32decode(marker[1] + "=" * (-len(marker[1]) % 8))
        digest, row_token, rows, text = json.loads(zlib.decompress(packed))
        shown.append(_Standing(bytes.fromhex(digest), row_token, rows))
        return str(text)

    tokens = encode(_MARKER.sub(replaced, rendered).replace(IMAGE_MARK, ""))
    if not shown:  # a marker that was cut
        return tokens
    rows = np.flatnonzero(tokens == shown[0].row_token)
    if len(rows) != sum(each.rows for each in shown):
        raise SpecialTokenInText("the token of images")
    tokens[rows] = np.concatenate([image_tokens(each.digest, each.rows) for each in shown])
    return tokens
