"""K and V of attention layers by pool slot, as MLX arrays that are written in place.

MLX's arrays are values: an assignment writes in place only if nothing else holds the array's buffer. Otherwise it
copies the whole pool, a thousand times the cost of the write. Three rules follow, and a counter shows whether they
hold (`KVPool.count_copies`):

- No slice of a pool outlives the call that made it, and no gather of it stays unevaluated (`stand_ins.py`).
- A read and a write of a pool are never part of one graph unless the write comes first.
- Every evaluation is followed by a synchronization, because Metal holds a command's inputs a little longer than its
  results are awaited.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from rootstock.cache.plan import BlockCopy, HostBytes
from rootstock.runtime.mlx.rows import SPARE_SLOTS
from rootstock.runtime.mlx.survey import CachePath, MlxLayerShape


class EvaluationFailed(Exception):
    """Error: MLX could not evaluate arrays. Nothing tells which of them were written."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def evaluate(arrays: Iterable[Any]) -> None:
    """Evaluates arrays and lists of them, and waits until the device holds none of their inputs. Raises
    EvaluationFailed."""
    try:
        mx.eval(*arrays)
        mx.synchronize()
    except Exception as error:  # of any operation, or of the device
        # Later operations may still be under way, and the next evaluation would raise their errors.
        with contextlib.suppress(Exception):
            mx.synchronize()
        raise EvaluationFailed(error) from error


def begin_evaluation(arrays: Iterable[mx.array]) -> None:
    """Makes the device evaluate arrays, and does not wait for them. `evaluate` raises what goes wrong later. Raises
    EvaluationFailed."""
    try:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
    except Exception as error:
        with contextlib.suppress(Exception):
            mx.synchronize()
        raise EvaluationFailed(error) from error


Slots = mx.array | tuple[int, int]
"""Slots of a pool [slots], or the run [first, end)."""

_CODES = 127  # largest code of int8


def _taken(array: mx.array, slots: Slots) -> mx.array:
    if isinstance(slots, tuple):
        return array[slots[0] : slots[1]]
    return mx.take(array, slots, axis=0)


def _quantized(rows: mx.array) -> tuple[mx.array, mx.array]:
    """Quantizes rows [rows, heads, dim] to codes of int8. Returns them and the scales [rows, heads]."""
    exact = rows.astype(mx.float32)
    scales = mx.max(mx.abs(exact), axis=-1) / _CODES
    codes = mx.round(exact / mx.where(scales == 0, 1.0, scales)[..., None])
    return codes.astype(mx.int8), scales


class LayerPool:
    """Rows of one layer, by slot: K [slots, heads, key_dim], and V [slots, heads, value_dim] unless V is K.

    The slots of all blocks are followed by one that stays zero and one to which padding is written. Quantized rows
    are int8, with a float32 scale of each head and position in further arrays [slots, heads].
    """

    __slots__ = ("_arrays", "shape")

    def __init__(self, shape: MlxLayerShape, slots: int) -> None:
        self.shape = shape
        self._arrays = [mx.zeros((slots + SPARE_SLOTS, *kept), dtype) for kept, dtype in shape.tensors]

    @property
    def arrays(self) -> Sequence[mx.array]:
        """Returns the pool's own arrays. A caller drops them before the next write."""
        return self._arrays

    @property
    def keys(self) -> mx.array:
        """Returns K as the pool holds it."""
        return self._arrays[0]

    @property
    def values(self) -> mx.array:
        """Returns V as the pool holds it."""
        return self._arrays[0 if self.shape.shares_values else 1]

    @property
    def scales(self) -> tuple[mx.array, mx.array] | None:
        """Returns the scales of K and of V, [slots, heads] each; None: the rows are not quantized."""
        kept = self._arrays[len(self._arrays) // 2 :]
        return (kept[0], kept[-1]) if self.shape.is_quantized else None

    def keys_at(self, slots: Slots) -> mx.array:
        """Returns K [slots, heads, key_dim] in the model's dtype: a view of a run of slots, a gather of others."""
        return self._at(0, slots)

    def values_at(self, slots: Slots) -> mx.array:
        """Returns V [slots, heads, value_dim] in the model's dtype: a view of a run of slots, a gather of others."""
        if self.shape.value_dim == 0:
            return mx.zeros((*self.keys_at(slots).shape[:-1], 0), self.shape.dtype)
        return self._at(0 if self.shape.shares_values else 1, slots)

    def _at(self, number: int, slots: Slots) -> mx.array:
        rows = _taken(self._arrays[number], slots)
        if not self.shape.is_quantized:
            return rows
        scales = _taken(self._arrays[number + len(self._arrays) // 2], slots)
        return (rows.astype(mx.float32) * scales[..., None]).astype(self.shape.dtype)

    def write(self, slots: Slots, keys: mx.array, values: mx.array) -> None:
        """Writes K and V [sequences, heads, new, dim] to slots [sequences · new], row by row."""
        kept = len(self._arrays) // 2 if self.shape.is_quantized else len(self._arrays)
        at = slice(*slots) if isinstance(slots, tuple) else slots
        for number, given in enumerate((keys, values)[:kept]):
            array = self._arrays[number]
            rows = given.transpose(0, 2, 1, 3).reshape(-1, *array.shape[1:])
            if self.shape.is_quantized:
                rows, scales = _quantized(rows)
                self._arrays[number + kept][at] = scales
            array[at] = rows.astype(array.dtype)

    def renew(self) -> None:
        """Recreates all arrays. The old ones are dropped first, because memory may be short."""
        for number, array in enumerate(self._arrays):
            self._arrays[number] = mx.zeros(array.shape, array.dtype)


class KVPool:
    """Pools of all layers. Owned by one thread."""

    def __init__(
        self, layers: Mapping[CachePath, MlxLayerShape], blocks: Sequence[int], block_size: int
    ) -> None:
        """`blocks`: rows of each token family."""
        self.block_size = block_size
        self.blocks = list(blocks)
        self.layers = {
            path: LayerPool(shape, blocks[shape.family] * block_size) for path, shape in layers.items()
        }
        evaluate(self.arrays)
        self._copies_seen = 0
        self._addresses = [address_of(array) for array in self.arrays]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers.values() for array in layer.arrays]

    @property
    def copies_seen(self) -> int | None:
        """Returns how many arrays writes have copied. None: this device does not tell addresses."""
        return None if any(address is None for address in self._addresses) else self._copies_seen

    def count_copies(self) -> None:
        """Counts the arrays that have moved since the last call: a write copied each of them."""
        addresses = [address_of(array) for array in self.arrays]
        self._copies_seen += sum(a != b for a, b in zip(addresses, self._addresses, strict=True))
        self._addresses = addresses

    def renew(self) -> None:
        """Recreates all arrays after a failed evaluation. Raises EvaluationFailed."""
        for layer in self.layers.values():
            layer.renew()
        evaluate(self.arrays)
        self._addresses = [address_of(array) for array in self.arrays]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies parts of blocks, with the result of copying in sequence."""
        together: list[BlockCopy] = []
        for copy in copies:
            # MLX leaves open which of two writes to a slot is the last one.
            if any(
                copy.family == earlier.family and earlier.target in (copy.source, copy.target)
                for earlier in together
            ):
                self._copy_at_once(together)
                together = []
            together.append(copy)
        if together:
            self._copy_at_once(together)

    def _copy_at_once(self, copies: Sequence[BlockCopy]) -> None:
        slots = {
            family: (
                self._slots(family, ((c.source, c.tokens) for c in copies if c.family == family)),
                self._slots(family, ((c.target, c.tokens) for c in copies if c.family == family)),
            )
            for family in {copy.family for copy in copies}
        }
        layers = [layer for layer in self.layers.values() if layer.shape.family in slots]
        rows = [
            [mx.take(array, slots[layer.shape.family][0], axis=0) for array in layer.arrays]
            for layer in layers
        ]
        evaluate(rows)  # before the writes, which would copy the pools while a read is pending
        for layer, its in zip(layers, rows, strict=True):
            for array, part in zip(layer.arrays, its, strict=True):
                array[slots[layer.shape.family][1]] = part
        evaluate(self.arrays)

    def _slots(self, family: int, parts: Iterable[tuple[int, int]]) -> mx.array:
        """Returns the slots of the first positions of blocks, from (block, positions)."""
        runs = [np.arange(n) + self._first_slot(family, block, n) for block, n in parts]
        return mx.array(np.concatenate(runs).astype(np.int32))

    def read(self, family: int, block: int, tokens: int) -> list[HostBytes]:
        """Copies the first positions of a block to the host, layer by layer."""
        first = self._first_slot(family, block, tokens)
        return to_host([array[first : first + tokens] for array in self._of(family)])

    def buffer_bytes(self, family: int, tokens: int) -> list[int]:
        """Returns the sizes of the buffers of `read`."""
        return [tokens * array.nbytes // array.shape[0] for array in self._of(family)]

    def place(self, family: int, block: int, tokens: int, buffers: Sequence[HostBytes]) -> None:
        """Writes filled buffers to the first positions of a block."""
        first = self._first_slot(family, block, tokens)
        for array, buffer in zip(self._of(family), buffers, strict=True):
            array[first : first + tokens] = from_host(buffer, array.dtype, (tokens, *array.shape[1:]))
        evaluate(self.arrays)

    def dtypes(self, family: int) -> list[mx.Dtype]:
        return [array.dtype for array in self._of(family)]

    def _of(self, family: int) -> list[mx.array]:
        return [
            array for layer in self.layers.values() if layer.shape.family == family for array in layer.arrays
        ]

    def _first_slot(self, family: int, block: int, tokens: int) -> int:
        assert 0 <= block < self.blocks[family], "the pool has no such row"
        assert 0 < tokens <= self.block_size
        return block * self.block_size


def to_host(arrays: Sequence[mx.array]) -> list[HostBytes]:
    """Copies arrays to the host as bytes, in one transfer, of which the results are views."""
    joined = mx.concatenate([array.reshape(-1).view(mx.uint8) for array in arrays])
    evaluate([joined])
    ends = np.cumsum([array.nbytes for array in arrays])
    return np.split(np.array(joined), ends[:-1])


def from_host(buffer: HostBytes, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    return mx.array(buffer).view(dtype).reshape(shape)


# The address is read through DLPack, the one interface of MLX that tells it. The C structure DLTensor begins with it.
_capsule_pointer: Callable[[object, bytes], int] = ctypes.pythonapi.PyCapsule_GetPointer
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def address_of(array: mx.array) -> int | None:
    """Returns the address of an evaluated array's buffer, or None if it is unknown."""
    try:
        capsule = array.__dlpack__()
    except Exception:  # a device without DLPack; counting is no reason to fail
        return None
    return ctypes.c_void_p.from_address(_capsule_pointer(capsule, b"dltensor")).value
