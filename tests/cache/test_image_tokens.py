"""Ids that say which image stands at a position, and chunks that do not cut rows that see each other."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.cache.image_tokens import (
    FIRST_IMAGE_TOKEN,
    SURE_ROWS,
    ImageLayout,
    PlacedImage,
    SmallImages,
    chunk_end,
    image_tokens,
    placed_images,
)

ROW = 7


def layout(name: str, offsets: list[int], *, both: bool = False) -> ImageLayout:
    digest = hashlib.sha256(name.encode()).digest()
    return ImageLayout(digest, "", ROW, np.array(offsets, np.int32), sees_both_directions=both)


def prompt(*parts: int | ImageLayout) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A prompt of numbers of text tokens and images."""
    found = []
    for part in parts:
        if isinstance(part, int):
            found.append(np.zeros(part, np.int32))
        else:
            tokens = np.zeros(part.span, np.int32)
            tokens[part.offsets] = part.tokens()
            found.append(tokens)
    return np.concatenate(found)


def test_ids_are_beyond_every_vocabulary_and_differ_by_image() -> None:
    one, other = (image_tokens(hashlib.sha256(name).digest(), 40) for name in (b"a", b"b"))
    assert one.dtype == np.int32
    assert one.min() >= FIRST_IMAGE_TOKEN
    assert not (one[:8] == other[:8]).any()
    assert (one[:8] == one[8:16]).all()


def test_images_are_found_at_their_places() -> None:
    a, b = layout("a", [0, 1, 2]), layout("b", [0, 1, 4, 5])
    found = placed_images(prompt(5, a, 3, b, a, 2), [(a, b"A"), (b, b"B"), (a, b"A")])
    assert [(image.start, image.end, image.data) for image in found] == [
        (5, 8, b"A"), (11, 17, b"B"), (17, 20, b"A"),
    ]  # fmt: skip


def test_an_image_that_the_template_drops_is_left_out() -> None:
    a, b = layout("a", [0, 1]), layout("b", [0])
    (found,) = placed_images(prompt(1, b, 1), [(a, b"A"), (b, b"B")])
    assert found.data == b"B"


@pytest.mark.parametrize("sent", [[], [("b", b"B"), ("a", b"A")], [("a", b"A")]])
def test_images_in_another_order_are_an_error(sent: list[tuple[str, bytes]]) -> None:
    known = {name: layout(name, [0, 1]) for name in "ab"}
    with pytest.raises(ValueError, match="twice, or images in another order"):
        placed_images(prompt(known["a"], 1, known["b"]), [(known[name], data) for name, data in sent])


def test_rows_elsewhere_than_in_the_layout_are_an_error() -> None:
    a = layout("a", [0, 1])
    with pytest.raises(ValueError, match="not where its layout has them"):
        placed_images(prompt(layout("a", [0, 3])), [(a, b"A")])


def test_small_images_with_the_same_ids_get_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    few = lambda digest, rows: np.frombuffer(digest[:1] * 4 * rows, np.int32) & 3  # noqa: E731
    monkeypatch.setattr("rootstock.cache.image_tokens.image_tokens", few)
    small = SmallImages()
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
    found = [small.unique(digest, 1) for digest in digests]
    assert len({few(digest, 1).tobytes() for digest in found}) == len(digests)
    assert [small.unique(digest, 1) for digest in digests] == found
    assert small.unique(digests[0], SURE_ROWS) == digests[0]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=4),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_no_chunk_ends_inside_rows_that_see_each_other(
    parts: list[tuple[int, int, bool]], past: int, new: int
) -> None:
    images, position = [], 0
    for number, (gap, rows, both) in enumerate(parts):
        offsets = [*range(rows), *range(rows + 2, 2 * rows + 2)]
        image = PlacedImage(layout(str(number), offsets, both=both), b"", position + gap)
        images.append(image)
        position = image.end
    end = chunk_end(images, past, past + new)
    inside = [
        (image.start + first, image.start + last)
        for image in images
        if image.layout.sees_both_directions
        for first, last in image.layout.runs()
    ]
    assert end > past
    assert not any(first < end < last for first, last in inside)
    if not any(first < past + new < last for first, last in inside):
        assert end == past + new
