"""Linear layers with weights quantized to 8 and 4 bits and unquantized inputs. CPUs only.

Where a processor multiplies coded weights, they are coded (coded_linear.py). The layers below are for others, and for
float32.

torch's kernels for few rows do not use the matrix units, so their time grows with every row. From about a dozen rows
on it is faster to dequantize the weights into scratch memory, a tile at a time, and to multiply with that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.coded_products import has_coded_products
from rootstock.kernels.cpu.weight_quantization import (
    LANES,
    bits_of,
    from_4_bits,
    from_8_bits,
    round_to_4_bits,
    round_to_8_bits,
)
from rootstock.kernels.torch.coded_linear import Coded, CodedLayers, Rounding, coded
from rootstock.kernels.torch.linear import Linear, has_matrix_units, nbytes_of

FEW_ROWS = 12  # the most rows for torch's kernels for quantized weights
_GROUPS = (64, 32)  # inputs that share a scale in 4 bits: the first of these that divides the inputs
# torch's 8-bit kernel reads whole vectors, beyond the end of rows that are not a multiple of this
_INPUTS_OF = 32
_LEAST_OUTPUTS = 64  # fewer outputs gain nothing, and routers and gates depend on small differences
_TILE = 4 << 20  # weights that are dequantized at once


def not_rounded(weight: Tensor, rounding: Rounding) -> str:
    """Returns the reason why a weight [out, in] cannot be quantized; "" if it can."""
    outputs, inputs = weight.shape
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type} is not quantized"
    if outputs < _LEAST_OUTPUTS:
        return f"it has {outputs} outputs, and fewer than {_LEAST_OUTPUTS} are not quantized"
    if inputs % _INPUTS_OF:
        return f"the number of its inputs, {inputs}, is not a multiple of {_INPUTS_OF}"
    if rounding == "int4" and not is_coded(weight) and not _packs_lanes():
        return "torch packs 4 bits in a different order on this processor"
    return ""


def is_coded(weight: Tensor) -> bool:
    """Returns whether a weight is multiplied faster by its codes than by torch's kernels."""
    return weight.dtype == torch.bfloat16 and has_coded_products() and not has_matrix_units()


def rounded(weight: Tensor, bias: Tensor | None, rounding: Rounding, scratch: DequantizeScratch) -> Linear:
    """Quantizes weight [out, in], for which `not_rounded` returns "". The layer keeps no reference to `weight`."""
    if is_coded(weight):
        layers = CodedLayers.of(coded(weight[None], rounding), None if bias is None else bias.detach()[None])
        return Coded(layers)
    return Int8(weight, bias, scratch) if rounding == "int8" else Int4(weight, bias, scratch)


class DequantizeScratch:
    """Memory for dequantized tiles, shared by all linear layers of a model. Page faults of new memory
    would take longer than writing the tiles. One thread may use it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory [rows, columns], valid until the next call."""
        needed = rows * columns * dtype.itemsize
        if self._memory.nbytes < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        return self._memory[:needed].view(dtype).view(rows, columns)


class Int8:
    """Linear layer in 8 bits, with one scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: DequantizeScratch) -> None:

        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._scratch = scratch
        self._q = torch.empty(weight.shape, dtype=torch.int8)
        self._scales = torch.empty(self.out_features, dtype=weight.dtype)
        round_to_8_bits(bits_of(weight.detach().contiguous()), bits_of(self._scales), self._q.numpy())

    @property
    def nbytes(self) -> int:
        return nbytes_of(self._q, self._scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        if 0 < len(rows) <= FEW_ROWS:
            product = torch._weight_int8pack_mm(rows, self._q, self._scales)
        else:
            product = rows.new_empty(len(rows), self.out_features)
            tile = max(1, _TILE // self.in_features)
            for first in range(0, self.out_features, tile):
                end = min(first + tile, self.out_features)
                product[:, first:end] = nn.functional.linear(rows, self._widened(first, end))
        return _finished(product, self._bias, x)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        return self._widened(0, self.out_features).clone()

    def _widened(self, first: int, end: int) -> Tensor:
        """Dequantizes the outputs first … end - 1 to [end - first, in]."""

        weight = self._scratch.take(end - first, self.in_features, self._scales.dtype)
        from_8_bits(self._q[first:end].numpy(), bits_of(self._scales[first:end]), bits_of(weight))
        return weight


class Int4:
    """Linear layer in 4 bits, with a scale and a middle for each group of inputs of an output: about 4.5 bits a
    weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: DequantizeScratch) -> None:

        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._scratch = scratch
        self._group = next(group for group in _GROUPS if self.in_features % group == 0)
        padded = -(-self.out_features // LANES) * LANES
        self._packed = torch.empty(padded, self.in_features // 2, dtype=torch.uint8)
        # Zero scales and middles make the outputs that pad the last block 0.
        self._scales = torch.zeros(self.in_features // self._group, padded, 2, dtype=weight.dtype)
        tile = max(LANES, _TILE // self.in_features // LANES * LANES)
        for first in range(0, padded, tile):
            part = weight[first : first + tile].detach().contiguous()
            end = min(first + tile, padded)
            q = torch.zeros(end - first, self.in_features, dtype=torch.int32)
            scales = torch.empty(len(part), self.in_features // self._group, 2, dtype=weight.dtype)
            round_to_4_bits(bits_of(part), self._group, bits_of(scales), q[: len(part)].numpy())
            self._packed[first:end] = torch._convert_weight_to_int4pack_for_cpu(q, 2)
            self._scales[:, first : first + len(part)] = scales.transpose(0, 1)

    @property
    def nbytes(self) -> int:
        return nbytes_of(self._packed, self._scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        if 0 < len(rows) <= FEW_ROWS:
            product = torch._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._scales)
            product = product[:, : self.out_features].contiguous()
        else:
            product = rows.new_empty(len(rows), self.out_features)
            tile = max(LANES, _TILE // self.in_features // LANES * LANES)
            for first in range(0, self.out_features, tile):
                end = min(first + tile, self.out_features)
                product[:, first:end] = (rows @ self._widened(first, end))[:, : end - first]
        return _finished(product, self._bias, x)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        return self._widened(0, self.out_features)[:, : self.out_features].T.contiguous()

    def _widened(self, first: int, end: int) -> Tensor:
        """Dequantizes the outputs first … end - 1 to [in, end - first, padded to whole blocks]."""

        blocks = -(-(end - first) // LANES)
        packed = self._packed[first : first + blocks * LANES].view(blocks, self.in_features, LANES // 2)
        weight = self._scratch.take(self.in_features, blocks * LANES, self._scales.dtype)
        from_4_bits(packed.numpy(), self._group, bits_of(self._scales), first, bits_of(weight))
        return weight


@functools.cache
def _packs_lanes() -> bool:
    """Returns whether torch packs 4-bit weights in the order that `from_4_bits` reads. That depends on the
    processor's vector instructions."""

    outputs = torch.arange(2 * LANES, dtype=torch.int32)
    places = outputs % LANES
    parts = []
    for digit in (places % 16, places // 16):
        q = digit[:, None].expand(-1, 2).contiguous()
        parts.append(torch._convert_weight_to_int4pack_for_cpu(q, 2).view(2, 2, LANES // 2).int())
    low = (parts[0] & 15) + 16 * (parts[1] & 15)
    high = (parts[0] >> 4) + 16 * (parts[1] >> 4)
    first = torch.arange(LANES // 2)
    return bool((low == first).all() and (high == first + LANES // 2).all())


def _finished(product: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Adds the bias to product [rows, out], and reshapes it to […, out] by the shape of x."""
    if bias is not None:
        product = product + bias
    return product.reshape(*x.shape[:-1], product.shape[-1])
