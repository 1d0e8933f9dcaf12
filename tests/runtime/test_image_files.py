"""Image files are decoded in a process of its own, which bounds them and may die."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from rootstock.runtime import image_files
from rootstock.runtime.image_files import ImageDecoder, UndecodableImage, decoded


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder(most_pixels=100_000)
    yield made
    made.close()


def file(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    written = io.BytesIO()
    image.save(written, format, **options)
    return written.getvalue()


def gradient(mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[:30, :40]
    return Image.fromarray(np.stack([x * 6, y * 8, x + y], -1).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "LA"])
def test_pixels_are_those_of_the_file(decoder: ImageDecoder, mode: str) -> None:
    image = gradient(mode)
    found = decoder.decode(file(image))
    assert found.shape == (30, 40, 3)
    assert (found == np.asarray(image.convert("RGB"))).all()
    assert found.flags.writeable


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF"])
def test_other_formats_are_decoded(decoder: ImageDecoder, format: str) -> None:
    found = decoder.decode(file(gradient(), format))
    assert np.abs(found.astype(int) - np.asarray(gradient())).mean() < 20


def test_a_picture_is_turned_as_its_camera_says(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    assert decoder.decode(file(gradient(), "JPEG", exif=exif)).shape == (40, 30, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is no PNG, JPEG, WEBP or GIF file"),
        (b"x" * 100, "is no PNG, JPEG, WEBP or GIF file"),
        (file(gradient(), "TIFF"), "is no PNG, JPEG, WEBP or GIF file"),
        (file(gradient())[:-80], "is broken"),
        (file(Image.new("1", (1_000, 101))), "has 1,000 × 101 pixels, more than 100,000"),
    ],
)
def test_other_files_are_refused_with_a_reason(decoder: ImageDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(UndecodableImage, match=reason):
        decoder.decode(data)
    assert decoder.decode(file(gradient())).shape == (30, 40, 3)


def test_a_file_that_ends_the_process_costs_its_own_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ImageDecoder()
    decoder.decode(file(gradient()))
    process = decoder._process
    assert process is not None
    process.kill()
    process.wait()
    assert decoder.decode(file(gradient())).shape == (30, 40, 3)
    monkeypatch.setattr(image_files, "_START", "import sys; sys.stdin.buffer.read(8); sys.exit(11)")
    decoder.close()
    with pytest.raises(UndecodableImage, match="makes the decoder fail"):
        decoder.decode(file(gradient()))
    monkeypatch.undo()
    assert decoder.decode(file(gradient())).shape == (30, 40, 3)
    decoder.close()


def test_a_file_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(image_files, "_START", "import time; time.sleep(600)")
    decoder = ImageDecoder()
    with pytest.raises(UndecodableImage, match="takes too long to decode"):
        decoder.decode(file(gradient()))
    decoder.close()


def test_threads_share_a_decoder(decoder: ImageDecoder) -> None:
    pictures = [Image.new("RGB", (10 + number, 5), (number, 0, 0)) for number in range(8)]
    found: dict[int, tuple[int, ...]] = {}

    def decode(number: int) -> None:
        pixels = decoder.decode(file(pictures[number]))
        found[number] = (pixels.shape[1], int(pixels[0, 0, 0]))

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: (10 + number, number) for number in range(8)}


def test_the_reason_of_a_failure_is_one_line() -> None:
    found = decoded(file(gradient())[:60], 100_000)
    assert isinstance(found, str)
    assert "\n" not in found
