"""Rounded blocks: how near they come back, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from rootstock.tiers.int8 import NotFinite, can_encode, compressed_bytes, decode, encode

DTYPES = ["float32", "bfloat16", "float16"]
# The unit roundoff of each, and half its smallest positive number.
ROUNDING = {
    "float32": (2.0**-24, 2.0**-150),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float16": (2.0**-11, 2.0**-25),
}
MOST = {"float32": float(np.finfo(np.float32).max), "bfloat16": (2 - 2.0**-7) * 2.0**127, "float16": 65504.0}
FLUSHED = 127 * float(np.finfo(np.float32).tiny)  # vectors below become zeros


@dataclass(frozen=True)
class Of:
    dtype: str
    width: int


def bytes_of(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Rounded to the dtype; for bfloat16 by cutting bits off, which is good enough to make examples."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    return numbers.astype(dtype).view(np.uint8).reshape(-1)


def numbers_of(buffer: NDArray[np.uint8], of: Of) -> NDArray[np.float64]:
    """[vectors, width]"""
    if of.dtype == "bfloat16":
        numbers = (buffer.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = buffer.view(of.dtype)
    with np.errstate(invalid="ignore"):  # some NaN complain
        return numbers.astype(np.float64).reshape(-1, of.width)


def and_back(buffers: list[NDArray[np.uint8]], formats: list[Of]) -> list[NDArray[np.uint8]]:
    into = [np.full_like(buffer, 0xAA) for buffer in buffers]
    decode(encode(buffers, formats), formats, into)
    return into


def assert_near(buffer: NDArray[np.uint8], back: NDArray[np.uint8], of: Of) -> None:
    """Within half a scale, what float32 rounds while it computes, and the rounding of the dtype itself."""
    x, y = numbers_of(buffer, of), numbers_of(back, of)
    largest = np.abs(x).max(1, keepdims=True, initial=0)
    relative, absolute = ROUNDING[of.dtype]
    half_a_scale = largest / 127 / 2 * (1 + 2.0**-14)
    allowed = half_a_scale + relative * (np.abs(x) + half_a_scale) + absolute
    allowed[np.broadcast_to(largest, x.shape) <= FLUSHED] = FLUSHED
    assert (np.abs(x - y) <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 31, 32])
def test_every_number_comes_back_within_half_a_scale(dtype: str, tokens: int) -> None:
    random = np.random.default_rng(tokens)
    formats = [Of(dtype, 64), Of(dtype, 64), Of("float32", 20)]  # K, V, and an indexer in another dtype
    heads = [(4, 64), (4, 64), (1, 20)]
    buffers = [
        bytes_of(random.standard_normal((tokens, *shape)).astype(np.float32) * 3, of.dtype)
        for shape, of in zip(heads, formats, strict=True)
    ]
    for buffer, back, of in zip(buffers, and_back(buffers, formats), formats, strict=True):
        assert_near(buffer, back, of)


@pytest.mark.parametrize(
    ("dtype", "figure"), [("float32", 0.0059), ("bfloat16", 0.0061), ("float16", 0.0059)]
)
def test_gaussian_numbers_come_back_as_near_as_the_docstring_says(dtype: str, figure: float) -> None:
    of = Of(dtype, 64)
    buffer = bytes_of(np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32), dtype)
    x, y = numbers_of(buffer, of), numbers_of(and_back([buffer], [of])[0], of)
    error = np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2))
    assert error == pytest.approx(figure, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_come_back_as_zeros_beside_large_vectors(dtype: str) -> None:
    of = Of(dtype, 8)
    numbers = np.zeros((3, 8), np.float32)
    numbers[1] = 60_000
    numbers[2, 3] = -0.5
    back = numbers_of(and_back([bytes_of(numbers, dtype)], [of])[0], of)
    assert not back[0].any()
    np.testing.assert_allclose(back[1], 60_000, rtol=0.01)
    np.testing.assert_allclose(back[2], numbers[2], rtol=0.01)
    assert np.count_nonzero(back[2]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_too_small_for_a_scale_become_zeros(dtype: str) -> None:
    of = Of(dtype, 3)
    numbers = np.array([[1e-38, -2e-39, 1e-36], [2e-36, -2e-38, 1e-36]], np.float32)
    back = numbers_of(and_back([bytes_of(numbers, dtype)], [of])[0], of)
    assert not back[0].any()
    np.testing.assert_allclose(back[1], numbers[1], atol=2e-38)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_there_is_stays_finite(dtype: str) -> None:
    of = Of(dtype, 4)
    buffer = bytes_of(np.array([[MOST[dtype], -MOST[dtype], 0, 1]], np.float32), dtype)
    back = and_back([buffer], [of])[0]
    assert np.isfinite(numbers_of(back, of)).all()
    assert_near(buffer, back, of)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_with_a_number_that_is_not_finite_is_refused(dtype: str, bad: float) -> None:
    numbers = np.ones((5, 16), np.float32)
    good = bytes_of(numbers, dtype)
    numbers[3, 7] = bad
    with pytest.raises(NotFinite):
        encode([good, bytes_of(numbers, dtype)], [Of(dtype, 16)] * 2)


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    """With codes that are powers of two, a product is rounded as its scale would be."""
    of = Of("bfloat16", 4)
    compressed = np.empty(4 + 4, np.uint8)
    for scale in (1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8):
        compressed[:4] = np.array([scale], "<f4").view(np.uint8)
        compressed[4:] = np.array([1, 2, 64, -1], np.int8).view(np.uint8)
        into = np.zeros(8, np.uint8)
        decode([compressed], [of], [into])
        mantissa = np.abs(scale) * 2**7
        nearest = np.sign(scale) * np.rint(mantissa) / 2**7  # NumPy rounds ties to even as well
        np.testing.assert_array_equal(numbers_of(into, of)[0], nearest * np.array([1, 2, 64, -1]))


def test_sizes_are_known_before_anything_is_encoded() -> None:
    formats = [Of("bfloat16", 64), Of("float32", 20), Of("float16", 16)]
    buffers = [np.zeros(n, np.uint8) for n in (7 * 4 * 128, 7 * 80, 0)]
    sizes = compressed_bytes(buffers, formats)
    assert sizes == [28 * (4 + 64), 7 * (4 + 20), 0]
    assert [buffer.nbytes for buffer in encode(buffers, formats)] == sizes


def test_what_was_loaded_into_any_kind_of_buffer_can_be_decoded() -> None:
    of = Of("float32", 4)
    buffer = bytes_of(np.array([[1, -2, 3, 127]], np.float32), "float32")
    (compressed,) = encode([buffer], [of])
    for source in (compressed, memoryview(bytes(compressed)), memoryview(bytearray(compressed))):
        into = np.zeros_like(buffer)
        decode([source], [of], [into])
        assert bytes(into) == bytes(buffer)


def test_what_is_encoded_is_new_memory_and_the_source_stays() -> None:
    of = Of("float32", 4)
    buffer = bytes_of(np.array([[0.3, -0.2, 0.7, 0.1]], np.float32), "float32")
    before = bytes(buffer)
    (compressed,) = encode([buffer], [of])
    assert bytes(buffer) == before
    assert not np.shares_memory(compressed, buffer)
    kept = bytes(compressed)
    decode([compressed], [of], [np.zeros_like(buffer)])
    assert bytes(compressed) == kept


def test_sizes_that_do_not_fit_are_refused() -> None:
    of = Of("bfloat16", 8)
    buffer = np.zeros(64, np.uint8)
    (compressed,) = encode([buffer], [of])
    with pytest.raises(ValueError, match="no whole vectors"):
        encode([buffer[:40]], [of])
    with pytest.raises(ValueError, match="compressed bytes"):
        decode([compressed[:-1]], [of], [buffer])
    with pytest.raises(ValueError, match="compressed bytes"):
        decode([compressed], [of], [buffer[:48]])
    with pytest.raises(ValueError, match="argument"):
        encode([buffer, buffer], [of])


def test_other_dtypes_and_states_cannot_be_encoded() -> None:
    assert can_encode([Of("bfloat16", 64), Of("float32", 1)])
    assert not can_encode([Of("bfloat16", 64), Of("float8_e4m3fn", 64)])
    assert not can_encode([])
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        encode([np.zeros(64, np.uint8)], [Of("float8_e4m3fn", 64)])


@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_whatever_is_finite_comes_back_within_the_bound(
    data: st.DataObject, dtype: str, width: int, vectors: int
) -> None:
    of = Of(dtype, width)
    finite = st.floats(-MOST[dtype], MOST[dtype], width=32)
    numbers = data.draw(arrays.arrays(np.float32, (vectors, width), elements=finite))
    buffer = bytes_of(numbers, dtype)
    assert_near(buffer, and_back([buffer], [of])[0], of)


@given(arrays.arrays(np.uint8, st.integers(0, 12).map(lambda n: 24 * n)), st.sampled_from(DTYPES))
@settings(max_examples=200, deadline=None)
def test_any_bytes_come_back_near_or_are_refused(content: NDArray[np.uint8], dtype: str) -> None:
    of = Of(dtype, 3)
    if not np.isfinite(numbers_of(content, of)).all():
        with pytest.raises(NotFinite):
            encode([content], [of])
        return
    back = and_back([content], [of])[0]
    assert np.isfinite(numbers_of(back, of)).all()
    assert_near(content, back, of)


def test_a_second_time_around_nothing_moves_any_more_in_float32() -> None:
    """Blocks that go down and up again and again do not drift."""
    of = Of("float32", 16)
    buffer = bytes_of(np.random.default_rng(3).standard_normal((50, 16)).astype(np.float32), "float32")
    turns = list(itertools.accumulate(range(3), lambda seen, _: and_back([seen], [of])[0], initial=buffer))
    x, y, z = (numbers_of(turn, of) for turn in turns[1:])
    np.testing.assert_allclose(y, x, rtol=1e-6)
    np.testing.assert_allclose(z, x, rtol=1e-6)
