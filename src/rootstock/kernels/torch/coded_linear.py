"""Linear layers and experts with coded weights (coded_weight.py).

On a CPU with AVX512-BF16 and AVX512-VBMI loops multiply the numbers as they are, and round nothing before a row's sum
(kernels/cpu/coded_products.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.code_values import AT_ONCE, pack_codes, table_of, unpack_codes
from rootstock.kernels.cpu.coded_products import (
    CodedProducts,
    has_coded_products,
    pack_scales,
    unpack_scales,
)
from rootstock.kernels.cpu.packed_products import BLOCK
from rootstock.kernels.cpu.weight_quantization import bits_of, round_to_8_bits, round_to_table
from rootstock.kernels.torch.coded_weight import INTEGERS, NORMAL, CodedWeight, Numbers, nibbles, signed_codes
from rootstock.kernels.torch.linear import Looped, nbytes_of

Rounding = Literal["int8", "int4"]

_AT_ONCE = 1 << 22  # weights that are unpacked for a product
# Inputs of a group where weights are quantized here: the first that divides them.
_GROUPS = {"int8": (128, 64, 32), "int4": (64, 32)}


class CodedLayers:
    """Linear layers of one shape with coded weights: the experts of a mixture, or a single layer."""

    def __init__(
        self, packed: CodedWeight, shape: tuple[int, int, int], biases: Tensor | None = None
    ) -> None:
        """Initialises layers of shape [experts, out, in]. packed: in the loops' order; biases: [experts, out]"""
        self.shape = shape
        self.packed = packed
        self.nbytes = packed.nbytes + nbytes_of(biases)
        self.multiply = CodedProducts(packed, table_of(packed.values), shape, biases)

    @classmethod
    def of(cls, weight: CodedWeight, biases: Tensor | None = None) -> CodedLayers:
        """Packs weights [experts, out, in] with an even number of inputs, for 6 bits a multiple of four.

        biases  [experts, out]
        """
        codes = pack_codes(weight.places(), weight.bits)
        _, *numbers = weight.tensors()
        experts, outputs, inputs = weight.shape
        packed = weight.rebuilt(iter([codes, *map(pack_scales, numbers)]))
        return cls(packed, (experts, outputs, inputs), biases)

    @classmethod
    def joined(cls, layers: Sequence[CodedLayers]) -> CodedLayers | None:
        """Returns the outputs of layers that are coded alike, one behind the other, in new memory. None: an output's
        place in its block would change."""
        if any(each.shape[1] % BLOCK for each in layers[:-1]):
            return None
        first = layers[0]
        outputs = sum(each.shape[1] for each in layers)
        parts = zip(*(each.packed.tensors() for each in layers), strict=True)
        return cls(
            first.packed.rebuilt(torch.cat(part, 1) for part in parts),
            (first.shape[0], outputs, first.shape[2]),
        )

    def multiply_sorted(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiplies x [rows, in] by the experts in their order. ends: [experts], where each one's rows end."""
        return self.multiply(x, torch.searchsorted(ends.long(), torch.arange(len(x)), right=True))

    def with_biases(self, biases: Tensor | None) -> CodedLayers:
        """Returns the same layers, in the same memory, with biases [experts, out]."""
        return self if biases is None else CodedLayers(self.packed, self.shape, biases)

    def coded(self, first: int, end: int) -> CodedWeight:
        """Returns the weights of some experts, [experts, out, in], in new memory."""
        packed, *numbers = self.packed.part(first, end).tensors()
        codes = unpack_codes(packed, self.packed.bits, self.shape[1])
        codes = nibbles(codes) if self.packed.bits == 4 else codes
        return self.packed.rebuilt(iter([codes, *(unpack_scales(each, self.shape[1]) for each in numbers)]))

    def unpacked(self) -> Tensor:
        """Returns the weights [experts, out, in] in new memory, rounded to bfloat16."""
        weights = (
            self.coded(number, number + 1).widened().to(torch.bfloat16) for number in range(self.shape[0])
        )
        return torch.cat(list(weights))


class Coded(Looped):
    """Linear layer with a coded weight."""

    def __init__(self, layers: CodedLayers) -> None:
        """Initialises the layer by layers [1, out, in], whose inputs are in order."""
        self._layers = layers
        super().__init__(layers.multiply)

    @property
    def nbytes(self) -> int:
        return self._layers.nbytes

    def unpacked(self) -> Tensor:
        """Returns the weight [out, in] in a new tensor, rounded to bfloat16."""
        return self._layers.unpacked()[0]


class Reordered:
    """Linear layer whose coded weight has its inputs in another order."""

    def __init__(self, linear: Coded, order: Tensor) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._linear, self._order = linear, order
        self.nbytes = linear.nbytes + order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.index_select(-1, self._order))

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        return self._linear.unpacked()  # its layers know the order


class Widened:
    """Linear layer that unpacks its coded weight for each product, some outputs at a time.

    It multiplies in float32, with the exact weights: processors for which no loop is compiled emulate bfloat16.
    """

    def __init__(self, weight: CodedWeight, dtype: torch.dtype, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._dtype = weight, dtype
        self._bias = None if bias is None else bias.detach()
        self.nbytes = weight.nbytes + nbytes_of(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        at_once = max(1, _AT_ONCE // self.in_features)
        wide = x.float()
        parts = [
            nn.functional.linear(wide, self._rows(first, first + at_once))
            for first in range(0, self.out_features, at_once)
        ]
        product = torch.cat(parts, -1)
        return (product if self._bias is None else product + self._bias).to(self._dtype)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        return self._rows(0, self.out_features).to(self._dtype)

    def _rows(self, first: int, end: int) -> Tensor:
        rows = (each[first:end] for each in self._weight.tensors())
        return self._weight.rebuilt(rows).widened()


def looped(weight: CodedWeight, dtype: torch.dtype) -> CodedLayers | None:
    """Returns the layers of a coded weight [experts, out, in] or [out, in], for rows of a dtype. None: no loop
    multiplies such a weight."""
    at_once = 2 * AT_ONCE[weight.bits]  # inputs
    has_pairs = weight.shape[-1] % at_once == 0 and weight.group % at_once == 0
    if dtype != torch.bfloat16 or not has_pairs or not has_coded_products():
        return None
    return CodedLayers.of(
        weight if len(weight.shape) == 3 else weight.rebuilt(each[None] for each in weight.tensors())
    )


def coded_linear(
    weight: CodedWeight | CodedLayers, dtype: torch.dtype, bias: Tensor | None
) -> Coded | Reordered | Widened:
    """Returns the linear layer of a coded weight [out, in] or of layers [1, out, in], for rows of a dtype."""
    layers = weight if isinstance(weight, CodedLayers) else looped(weight, dtype)
    if layers is None:
        assert isinstance(weight, CodedWeight)
        return Widened(weight, dtype, bias)
    linear = Coded(layers.with_biases(None if bias is None else bias.detach()[None]))
    order = layers.packed.order
    return linear if order is None else Reordered(linear, order)


def coded(weights: Tensor, rounding: Rounding) -> CodedWeight:
    """Quantizes weights [experts, out, in] of bfloat16, whose inputs are a multiple of 32."""
    experts, outputs, inputs = weights.shape
    group = next(group for group in _GROUPS[rounding] if inputs % group == 0)
    given = bits_of(weights.detach().contiguous().view(-1, inputs))
    scales = torch.empty(experts, outputs, inputs // group, dtype=weights.dtype)
    if rounding == "int8":
        q = torch.empty(experts * outputs * inputs // group, group, dtype=torch.int8)
        round_to_8_bits(given.reshape(-1, group), bits_of(scales.view(-1)), q.numpy())
        codes = signed_codes(q)
        return CodedWeight(codes.view(experts, outputs, inputs), INTEGERS, Numbers(scales), None, group)
    places = torch.empty(experts * outputs, inputs, dtype=torch.uint8)
    round_to_table(given, group, NORMAL.numpy(), bits_of(scales.view(-1)), places.numpy())
    codes = nibbles(places).view(experts, outputs, inputs // 2)
    return CodedWeight(codes, NORMAL, Numbers(scales), None, group)
