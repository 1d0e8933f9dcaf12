"""Cold blocks at about half their bytes: 8-bit integers, and one scale for each vector of a head. Lossy.

Every vector of `width` numbers (one head's K or V at one position, or a latent) is stored as its largest absolute
value / 127 in float32, and for each number the nearest multiple of that: a signed byte. A number comes back within
half a scale, rounded to its own dtype; a vector of zeros comes back as zeros.

The root mean square error, relative to that of gaussian numbers, and the bytes left, both measured:

    width     float32         bfloat16        float16
       64     0.59 %  0.27    0.61 %  0.53    0.59 %  0.53
      128     0.65 %  0.26    0.66 %  0.52    0.65 %  0.52
      256     0.70 %  0.25    0.71 %  0.51    0.70 %  0.51

A block of 12 layers of bfloat16 (K and V of 32 positions in 4 heads of 64, 384 KiB) takes 0.6 ms to encode and 0.4 ms
to decode on one core: not for the thread that serves.

A block that holds an infinity or a NaN is refused: no scale could bring the rest of the vector back. Vectors whose
numbers are all smaller than 1.5e-36 become zeros, because a scale for them would be no normal float32.

What was rounded is not what was computed: whoever stores it must give it an identity of its own (another dtype).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.plan import HostBytes
from rootstock.tiers.base import Buffer, as_bytes

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16] | NDArray[np.uint32]

_MOST = 127
_SCALE_BYTES = 4
_LEAST_SCALE = np.finfo(np.float32).tiny
# 127 times this is still finite, however the division was rounded.
_MOST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / _MOST), np.float32(0))


class Format(Protocol):
    """Vectors of `width` numbers."""

    @property
    def dtype(self) -> str: ...

    @property
    def width(self) -> int: ...


class NotFinite(ValueError):
    """A buffer holds an infinity or a NaN: it can only be stored as it is."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A dtype's bits: as unsigned integers, absolute values compare as the numbers do."""

    bits: np.dtype[Any]
    magnitude: int  # without the sign
    infinity: int  # from here on nothing is finite


_LAYOUTS = {
    "float32": _Layout(np.dtype(np.uint32), 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": _Layout(np.dtype(np.uint16), 0x7FFF, 0x7F80),
    "float16": _Layout(np.dtype(np.uint16), 0x7FFF, 0x7C00),
}


def can_encode(formats: Sequence[Format]) -> bool:
    """Whether every buffer holds numbers of a kind that is known here. Nothing can be said of no buffers."""
    return bool(formats) and all(form.dtype in _LAYOUTS and form.width > 0 for form in formats)


def compressed_bytes(buffers: Sequence[Buffer], formats: Sequence[Format]) -> list[int]:
    """What `encode` makes of buffers of these sizes. Raises ValueError if one is not made of whole vectors."""
    sizes = []
    for buffer, form in zip(buffers, formats, strict=True):
        vectors = _vectors(buffer, form)
        sizes.append(vectors * (_SCALE_BYTES + form.width))
    return sizes


def encode(buffers: Sequence[HostBytes], formats: Sequence[Format]) -> list[HostBytes]:
    """One new buffer for each, of the sizes of `compressed_bytes`: the vectors' scales, then their codes.

    Raises NotFinite, and ValueError if a buffer is not made of whole vectors or its dtype is unknown.
    """
    compressed = []
    for buffer, form, size in zip(buffers, formats, compressed_bytes(buffers, formats), strict=True):
        out = np.empty(size, np.uint8)
        scales, codes = _divided(out, form.width)
        _encode(buffer, form, scales, codes)
        compressed.append(out)
    return compressed


def decode(compressed: Sequence[Buffer], formats: Sequence[Format], into: Sequence[HostBytes]) -> None:
    """Writes the numbers that `encode` was given, as near as they were kept, into buffers of the sizes they had.

    Raises ValueError if the sizes do not fit each other; then what `into` holds is void.
    """
    sizes = compressed_bytes(into, formats)
    for source, form, size, target in zip(compressed, formats, sizes, into, strict=True):
        if source.nbytes != size:
            raise ValueError(f"{source.nbytes:,} compressed bytes are not the {size:,} of {target.nbytes:,}")
        scales, codes = _divided(np.frombuffer(as_bytes(source), np.uint8), form.width)
        numbers = codes * scales[:, None]  # [vectors, width] float32
        target.view(_LAYOUTS[form.dtype].bits)[:] = _narrowed(numbers, form.dtype).reshape(-1)


def _encode(buffer: HostBytes, form: Format, scales: Floats, codes: NDArray[np.int8]) -> None:
    """scales [vectors] and codes [vectors, width] are written."""
    layout = _LAYOUTS[form.dtype]
    bits: NDArray[Any] = buffer.view(layout.bits).reshape(-1, form.width)
    largest = (bits & layout.magnitude).max(1, keepdims=True, initial=0)
    if largest.size and int(largest.max()) >= layout.infinity:
        raise NotFinite("the block holds numbers that are not finite")
    of_vectors = np.minimum(_widened(largest, form.dtype) / np.float32(_MOST), _MOST_SCALE)  # [vectors, 1]
    of_vectors[of_vectors < _LEAST_SCALE] = 0
    scales[:] = of_vectors[:, 0]
    steps = _widened(bits, form.dtype) / np.where(of_vectors == 0, np.float32(np.inf), of_vectors)
    codes[:] = np.rint(steps, out=steps)


def _vectors(buffer: Buffer, form: Format) -> int:
    if form.dtype not in _LAYOUTS:
        raise ValueError(f"{form.dtype} can't be compressed: only {', '.join(_LAYOUTS)} can")
    vector_bytes = form.width * _LAYOUTS[form.dtype].bits.itemsize
    vectors, rest = divmod(buffer.nbytes, vector_bytes)
    if rest:
        raise ValueError(f"{buffer.nbytes:,} bytes are no whole vectors of {form.width} {form.dtype}")
    return vectors


def _divided(compressed: HostBytes, width: int) -> tuple[Floats, NDArray[np.int8]]:
    """Views: scales [vectors] and codes [vectors, width]."""
    vectors = compressed.nbytes // (_SCALE_BYTES + width)
    scales, codes = np.split(compressed, [_SCALE_BYTES * vectors])
    return scales.view("<f4"), codes.view(np.int8).reshape(vectors, width)


def _widened(bits: Bits, dtype: str) -> Floats:
    """The numbers with these bits, of any shape; new memory but for float32."""
    match dtype:
        case "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        case "float16":
            return bits.view(np.float16).astype(np.float32)
        case _:
            return bits.view(np.float32)


def _narrowed(numbers: Floats, dtype: str) -> Bits:
    """Finite numbers, rounded to the nearest of the dtype, ties to even, as its bits. `numbers` are void then."""
    match dtype:
        case "bfloat16":
            bits = numbers.view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            return (bits >> 16).astype(np.uint16)
        case "float16":
            return numbers.astype(np.float16).view(np.uint16)
        case _:
            return numbers.view(np.uint32)
