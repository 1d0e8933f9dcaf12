"""Images in token sequences: ids that say which image stands at a position.

A model has one token for every image's embeddings, so that two images of one size would be the same prefix. In a
prompt, each of these positions therefore has an id beyond every vocabulary, made of a digest of the image's file.
Whatever compares, hashes or stores tokens (the tree, records of the tiers, KV events) thereby tells images apart, and
needs to know nothing of them. The runtime puts the model's own token back.

An id holds 30 bits of a SHA-256 of the file and of the processor's settings, and successive positions hold successive
parts of it. An image with fewer positions than `SURE_ROWS` is compared with the others that a process has seen
(`SmallImages`): a collision changes its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.types import Tokens

FIRST_IMAGE_TOKEN = 1 << 30  # ids from here on stand for images
SURE_ROWS = 6  # 180 bits
MOST_SMALL = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class ImageLayout:
    """Layout of an image in a prompt of one model. Small: it is kept after the image."""

    digest: bytes  # [32] that its ids are made of, and that it alone has
    text: str  # that stands for it in a rendered prompt, with the names of control tokens
    row_token: int  # the model's token at each position that gets an embedding
    offsets: NDArray[np.int32]  # [rows] of these positions from the first one; ascending
    # [axes, span] positions for rotary embeddings, from the first row's on; None: they count like a text's.
    positions: NDArray[np.int32] | None = None
    advance: int = 0  # of the position after it from the first row's; of no use without `positions`
    sees_both_directions: bool = False  # adjoining rows attend to each other, also to later ones
    pixels: int = 0  # of the file
    is_slow: bool = False  # its file takes long to decode
    # The owner of the memory that is kept of it, and the salt of its prompts: nothing of it is kept for others.
    owner: str = ""
    salt: str = ""

    @property
    def key(self) -> tuple[str, bytes]:
        """The key of what is kept of the image."""
        return self.salt, self.digest

    @property
    def span(self) -> int:
        """Tokens from the first row to the last."""
        return int(self.offsets[-1]) + 1

    @property
    def nbytes(self) -> int:
        return len(self.text) + self.offsets.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def tokens(self) -> Tokens:
        """Returns the ids [rows] of its rows."""
        return image_tokens(self.digest, len(self.offsets))

    def runs(self) -> list[tuple[int, int]]:
        """Returns the ranges (first, end) of adjoining rows, from the first row on."""
        breaks = np.flatnonzero(np.diff(self.offsets) > 1) + 1
        ends = [*breaks.tolist(), len(self.offsets)]
        return [
            (int(self.offsets[first]), int(self.offsets[end - 1]) + 1)
            for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image at its place in a prompt."""

    layout: ImageLayout
    data: bytes  # the file
    start: int  # position of the first row

    @property
    def end(self) -> int:
        return self.start + self.layout.span


class SmallImages:
    """The ids of images that have too few positions for a digest, and the digests that they stand for.

    Not thread-safe. The oldest of `MOST_SMALL` are forgotten.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, bytes] = {}  # of files, by the ids

    def unique(self, digest: bytes, rows: int) -> bytes:
        """Returns the digest for an image of so many rows, or another one if another image has its ids."""
        if rows >= SURE_ROWS:
            return digest
        found = digest
        while self._digests.setdefault(ids := image_tokens(found, rows).tobytes(), digest) != digest:
            found = hashlib.sha256(found + digest).digest()
        if len(self._digests) > MOST_SMALL:
            del self._digests[next(each for each in self._digests if each != ids)]
        return found


def image_tokens(digest: bytes, rows: int) -> Tokens:
    """Returns the ids [rows] of the rows of an image."""
    parts = np.frombuffer(digest, ">u4").astype(np.int64) & (FIRST_IMAGE_TOKEN - 1)
    return np.resize(parts + FIRST_IMAGE_TOKEN, rows).astype(np.int32)


def placed_images(tokens: Tokens, sent: Sequence[tuple[ImageLayout, bytes]]) -> tuple[PlacedImage, ...]:
    """Returns the images of a prompt at their places. `sent` has them in the order of the conversation, with the ones
    that the chat template has left out. Raises ValueError if the template writes an image twice or in another order.
    """
    rows = np.flatnonzero(tokens >= FIRST_IMAGE_TOKEN)
    placed: list[PlacedImage] = []
    done = 0
    for layout, data in sent:
        its = rows[done : done + len(layout.offsets)]
        if not np.array_equal(tokens[its], layout.tokens()):
            continue
        if not np.array_equal(its - its[0], layout.offsets):
            raise ValueError("the rows of an image are not where its layout has them")
        placed.append(PlacedImage(layout, data, int(its[0])))
        done += len(its)
    if done != len(rows):
        raise ValueError("the chat template writes an image twice, or images in another order")
    return tuple(placed)


def chunk_end(images: Sequence[PlacedImage], past: int, end: int) -> int:
    """Returns the end of a chunk that begins at `past` and was to end at `end`: never inside rows that attend to each
    other. It is earlier, or later if the chunk begins in these rows."""
    for image in images:
        if not image.layout.sees_both_directions or not image.start < end < image.end:
            continue
        for first, last in image.layout.runs():
            if image.start + first < end < image.start + last:
                return image.start + first if image.start + first > past else image.start + last
    return end
