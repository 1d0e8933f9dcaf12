"""Products of rows with the weights of one or several linear layers, packed once for the device that computes them.

`prepare` chooses the way. Measured on two cores with matrix units (AMX), hidden sizes of 640 to 4096:

- bfloat16 on a CPU: oneDNN multiplies with weights in blocks of its own. From a plain weight `F.linear` reaches 40 to
  50 % of the memory's bandwidth at one row, from a packed one 70 to 85 %: 0.54 to 0.73 of its time at 1 to 32 rows,
  0.7 to 0.9 at 128, 0.85 to 1.0 at 512 and 2,048. Packed with few rows in mind (oneDNN's hint) it loses up to a third
  at 513 rows, packed with many nothing at one, so many are named. Weights of few outputs (640) take 1.2 to 1.5 at 400
  to 600 rows then, and 0.8 to 1.1 (1.25 at 513) if one row is named, which costs them a tenth at one row: they get
  that.
- float32: oneDNN's and MKL's packed weights win at 8 rows (0.6 to 0.8) and lose at one (1.1 to 1.9): left to
  `F.linear`, as is every other dtype and device. Weights of several layers lie in one tensor then.

Weights rounded to fewer bits are quantized_linear.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

_ROWS_HINT, _FEW_OUTPUTS = 512, 1024


class Linear(Protocol):
    """x […, in_features] → x · weightᵀ + bias […, out_features], contiguous"""

    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Of what it keeps."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


def stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Several layers of one input as one: weights [out, in] below each other, and biases, zeros where there is none.
    One layer's are given back as they are."""
    assert len(weights) == len(biases) > 0
    if len(weights) == 1:
        return weights[0], biases[0]
    weight = torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return weight, None
    pairs = zip(weights, biases, strict=True)
    return weight, torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in pairs])


def packs_bfloat16(device: torch.device) -> bool:
    """Whether this processor multiplies bfloat16 natively. Elsewhere it is emulated, and packing is no gain."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    )


def is_packed(weight: Tensor) -> bool:
    """Whether `prepare` gives something better for this weight than what it is."""
    return weight.dtype == torch.bfloat16 and packs_bfloat16(weight.device)


def prepare(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest way known for weight [out, in] as it is. What is packed holds nothing of `weight`."""
    if is_packed(weight):
        return Prepacked(weight, bias)
    return Plain(weight, bias)


class Plain:
    """`F.linear`, on the weight as it lies."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self._bias)


class Prepacked:
    """Weights in oneDNN's layout. Results are those of `F.linear`: the same products, summed in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        rows = 1 if self.out_features < _FEW_OUTPUTS else _ROWS_HINT
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self._bias = None if bias is None else bias.detach()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def nbytes(self) -> int:
        return self.out_features * self.in_features * self._packed.element_size() + nbytes_of(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product

    def unpacked(self) -> Tensor:
        """[out, in] the weight again, bit by bit, as a tensor of its own."""
        return self._packed.to_dense()


def nbytes_of(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
