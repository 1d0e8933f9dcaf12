"""Linear layers whose weights are packed once for the device that multiplies them. Several layers may form one
product.

`prepare` chooses the format:

- bfloat16 on a CPU with AVX512-BF16 and without matrix units: Rootstock's own loops over packed weights
  (kernels/cpu/packed_products.py). On two cores they take .6 to .85 of oneDNN's time for 1 to 24 rows and .94 to 1.0
  for 32 to 2,048, and a row's product does not depend on the rows beside it.
- bfloat16 on a CPU with matrix units (AMX): oneDNN with weights in a blocked layout of its own. On two cores, for
  hidden sizes of 640 to 4096, `F.linear` with a plain weight reaches 40 to 50 % of the memory's bandwidth at one row;
  with a packed weight 70 to 85 %. With a packed weight the time is 0.54 to 0.73 of the time with a plain one at 1 to
  32 rows, 0.7 to 0.9 at 128, and 0.85 to 1.0 at 512 and 2,048. oneDNN's packing takes a hint of the number of rows.
  Packed for few rows, it loses up to a third at 513 rows. Packed for many rows, it loses nothing at one row, so the
  hint is many. The exception is weights of few outputs (640): packed for many rows they take 1.2 to 1.5 of the time
  at 400 to 600 rows; packed for one row 0.8 to 1.1 (1.25 at 513), and a tenth more at one row. Their hint is one row.
  Up to three rows go to Rootstock's loops, which read oneDNN's layout in place.
- float32: packed weights of oneDNN and MKL win at 8 rows (0.6 to 0.8) and lose at one (1.1 to 1.9). `F.linear`
  multiplies float32 weights, and every other dtype and device. The weights of several layers then lie in one tensor.

Quantized weights are in quantized_linear.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # this module imports Numba, which may be missing
    from rootstock.kernels.cpu.packed_products import PackedProducts

_ROWS_HINT, _FEW_OUTPUTS = 512, 1024
_FEW_ROWS = 3  # more rows are as fast by matrix units


class Linear(Protocol):
    """Linear layer: x […, in_features] → x · weightᵀ + bias […, out_features], contiguous."""

    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Returns the bytes of its tensors."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def product(self) -> Callable[[Tensor], Tensor]:
        """Returns the function that a call of the layer is, with as little around it as possible."""
        ...

    def unpacked(self) -> Tensor:
        """Returns the weight [out, in] that it multiplies with."""
        ...


def stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Stacks several layers of one input into one: weights [out, in] below each other, and biases, zeros for layers
    without a bias. Returns a single layer's tensors unchanged."""
    assert len(weights) == len(biases) > 0
    if len(weights) == 1:
        return weights[0], biases[0]
    weight = torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return weight, None
    pairs = zip(weights, biases, strict=True)
    return weight, torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in pairs])


def packs_bfloat16(device: torch.device) -> bool:
    """Returns whether this processor multiplies bfloat16 natively. Otherwise it is emulated, and packing gains
    nothing."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    )


def is_packed(weight: Tensor) -> bool:
    """Returns whether `prepare` packs this weight."""
    return weight.dtype == torch.bfloat16 and packs_bfloat16(weight.device)


def has_pair_loops() -> bool:
    """Returns whether Rootstock's loops multiply packed bfloat16 weights here: for few rows where the processor has
    matrix units, else for any number of rows."""
    try:
        from rootstock.kernels.cpu.pair_products import has_pair_products
    except ImportError:  # Numba is missing
        return False
    return has_pair_products()


def has_coded_loops() -> bool:
    """Returns whether Rootstock's loops multiply coded weights here."""
    try:
        from rootstock.kernels.cpu.coded_products import has_coded_products
    except ImportError:  # Numba is missing
        return False
    return has_coded_products()


def has_matrix_units() -> bool:
    return torch.cpu._is_amx_tile_supported()


def prepare(weight: Tensor, bias: Tensor | None) -> Linear:
    """Prepares weight [out, in] in the fastest format known for it. A packed layer keeps no reference to `weight`."""
    if not is_packed(weight):
        return Plain(weight, bias)
    if weight.shape[1] % 2 == 0 and has_pair_loops() and not has_matrix_units():
        return Blocked(weight, bias)
    return Prepacked(weight, bias)


class Plain:
    """Linear layer by `F.linear` with the unpacked weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias
        self._multiply = functools.partial(nn.functional.linear, weight=weight, bias=bias)
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self._multiply

    def unpacked(self) -> Tensor:
        return self.weight


class Looped:
    """Linear layer whose product is one of Rootstock's loops, and can be a recorded stage."""

    def __init__(self, multiply: PackedProducts) -> None:
        self.out_features, self.in_features = multiply.out_features, multiply.in_features
        self._multiply = multiply
        self.record = multiply.record

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x).view(*x.shape[:-1], self.out_features)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self


class Blocked(Looped):
    """Linear layer with a bfloat16 weight in Rootstock's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from rootstock.kernels.cpu.packed_products import PackedLayers

        self._bias = None if bias is None else bias.detach()
        self._layers = PackedLayers(weight.detach()[None], None if bias is None else bias.detach()[None])
        super().__init__(self._layers.multiply)

    @property
    def nbytes(self) -> int:
        return 2 * self.out_features * self.in_features + nbytes_of(self._bias)

    def unpacked(self) -> Tensor:
        """Returns the weight [out, in] in a new tensor, equal bit by bit."""
        return self._layers.unpacked()[0]


def _for_few_rows(packed: Tensor, weight: Tensor, bias: Tensor | None) -> PackedProducts | None:
    if not has_pair_loops():
        return None
    from rootstock.kernels.cpu.packed_products import over_onednn

    return over_onednn(packed, weight.detach(), None if bias is None else bias.detach())


class Prepacked:
    """Linear layer with a bfloat16 weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        rows = 1 if self.out_features < _FEW_OUTPUTS else _ROWS_HINT
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self._bias = None if bias is None else bias.detach()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._few_rows = _for_few_rows(self._packed, weight, bias)
        self._few_numbers = 0 if self._few_rows is None else _FEW_ROWS * self.in_features

    @property
    def nbytes(self) -> int:
        return self.out_features * self.in_features * self._packed.element_size() + nbytes_of(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self._few_rows is not None and x.numel() <= self._few_numbers:
            return self._few_rows(x).view(*x.shape[:-1], self.out_features)
        product: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        """Returns the weight [out, in] in a new tensor, equal bit by bit."""
        return self._packed.to_dense()


def nbytes_of(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
