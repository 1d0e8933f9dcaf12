"""Products of rows with weights of 8 or 4 bits on CUDA devices, in Triton. The codes stay in memory as they are.

A program widens a block of weights in registers: it looks the values of codes up, or computes them where they are on
a line or are floats of 8 bits, multiplies them by the scales of their groups and adds the minima, all in float32. The
result is rounded to the rows' dtype, as a weight would be that is unpacked to it, and goes to the matrix units, which
add in float32. The error is therefore that of a product with unpacked weights: half a unit in the last place for each
weight, and another half for the result.

Few rows are limited by the memory that the codes lie in, so their blocks have many inputs, and the inputs of wide
layers are divided among programs, whose sums are added in a fixed order. Many rows get large blocks, so that a code
is widened once for 128 rows. Rows of experts are sorted by expert; each program finds its expert and its rows from
the ends of the experts' rows, which stay on the device, so that a CUDA graph can be replayed with others.

If TRITON_INTERPRET=1 is in the environment before this module is imported, the same code runs on CPUs, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock.kernels.torch.coded_weight import CodedWeight

INTERPRETED = bool(triton.knobs.runtime.interpret)

_TABLE, _LINE, _FLOAT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how a code's value is found
_ONE, _SEVERAL, _ANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # groups of a block's inputs

_FEW, _SOME = 16, 64  # rows
_MOST_SPLITS, _LEAST_SPLIT = 8, 512  # inputs of a split
_MERGED = 1024  # numbers that a program merges


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x: tl.tensor, TYPE: tl.constexpr, WIDEN: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Rounds float32 to a dtype. The interpreter would cut the bits of bfloat16 off, so WIDEN rounds them before."""
    if WIDEN and TYPE == tl.bfloat16:  # noqa: SIM300 (TYPE is no constant of Python's)
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a: tl.tensor, b: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Multiplies matrices, float32 never by way of tf32. The interpreter would multiply bfloat16 as the integers that
    store it, so WIDEN converts to float32 first. Products of bfloat16 are exact in float32 either way."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _values(
    place: tl.tensor,  # uint8, codes without a sign
    values: tl.tensor,
    first_value: tl.tensor,
    step: tl.tensor,
    VALUES: tl.constexpr,  # noqa: N803
    MANTISSA: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Returns the values of codes in float32."""
    if VALUES == _LINE:
        return first_value + step * place.to(tl.float32)
    if (
        VALUES == _FLOAT
    ):  # of MANTISSA bits behind an exponent of the other seven; without one it is a small number
        least: tl.constexpr = 0.001953125 if MANTISSA == 3 else 0.0000152587890625
        bits = (place.to(tl.uint32) << (23 - MANTISSA)) + ((120 if MANTISSA == 3 else 112) << 23)
        small = place.to(tl.float32) * least
        return tl.where(place < (1 << MANTISSA), small, bits.to(tl.float32, bitcast=True))
    return tl.load(values + place.to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    own: tl.tensor,  # [weights' rows, groups]
    shared: tl.tensor,  # [weights' rows, shared_groups] or None
    row: tl.tensor,  # int64 [OUTPUTS] or [OUTPUTS, 1]
    group: tl.tensor,  # a number, or [1, …]
    groups: tl.tensor,
    shared_groups: tl.tensor,
    OF_SHARED: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Returns scales or minima of groups in float32. With MASKED, some groups may be beyond the last."""
    if MASKED:
        group = tl.minimum(group, groups - 1)  # of inputs that count as zeros
    numbers = tl.load(own + row * groups + group).to(tl.float32)
    if shared is not None:
        numbers *= tl.load(shared + row * shared_groups + group // OF_SHARED).to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,  # [rows, inputs]
    codes: tl.tensor,  # uint8 [experts, outputs, inputs] or [experts, outputs, inputs / 2]
    values: tl.tensor,  # float32 [16] or [128]
    scales: tl.tensor,  # [experts, outputs, groups]
    scales_shared: tl.tensor,  # float16 [experts, outputs, shared_groups] or None
    minima: tl.tensor,  # as scales, or None
    minima_shared: tl.tensor,
    biases: tl.tensor,  # [experts, outputs] or None
    ends: tl.tensor,  # int32 [experts]: where the rows of an expert end, with GROUPED; else None
    out: tl.tensor,  # [rows, outputs]; with SPLIT float32 [splits, rows, outputs]
    rows: tl.tensor,
    x_row: tl.tensor,  # stride, in elements
    outputs: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    shared_groups: tl.tensor,
    experts: tl.tensor,
    length: tl.tensor,  # inputs of a split, a multiple of INPUTS
    first_value: tl.tensor,  # with _LINE: a code's value is first_value + step · code
    step: tl.tensor,
    BITS: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803 (_TABLE, _LINE or _FLOAT)
    MANTISSA: tl.constexpr,  # noqa: N803 (bits, with _FLOAT)
    GROUP: tl.constexpr,  # noqa: N803 (inputs)
    GROUPS: tl.constexpr,  # noqa: N803 (_ONE: a block of inputs has one, _SEVERAL: whole ones, _ANY)
    OF_SHARED: tl.constexpr,  # noqa: N803
    IN_SCALES: tl.constexpr,  # noqa: N803
    GROUPED: tl.constexpr,  # noqa: N803
    EXPERTS_PAD: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803 (every split has whole blocks of inputs)
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Multiplies a tile of rows by a block of outputs. Grid: [tiles, blocks, splits]."""
    tile, split = tl.program_id(0), tl.program_id(2)
    begin = split * length
    end = tl.minimum(begin + length, inputs)
    if GROUPED:
        expert_axis = tl.arange(0, EXPERTS_PAD)
        known = expert_axis < experts
        ended = tl.load(ends + expert_axis, mask=known, other=0)
        began = tl.load(ends + expert_axis - 1, mask=known & (expert_axis > 0), other=0)
        tiles = tl.where(known, (ended - began + ROWS - 1) // ROWS, 0)
        upto = tl.cumsum(tiles, 0)
        expert = tl.sum((known & (upto <= tile)).to(tl.int32), 0)
        its = expert_axis == expert  # none for tiles behind the last: they have no rows and do nothing
        before = tl.sum(tl.where(its, upto - tiles, 0), 0)
        first_row = tl.sum(tl.where(its, began, 0), 0) + (tile - before) * ROWS
        last_row = tl.sum(tl.where(its, ended, 0), 0)
        end = tl.where(first_row < last_row, end, begin)
        expert = tl.minimum(expert, experts - 1).to(tl.int64)
    else:
        first_row, last_row, expert = tile * ROWS, rows, tl.zeros([], tl.int64)

    TYPE: tl.constexpr = x.dtype.element_ty  # noqa: N806
    row = first_row + tl.arange(0, ROWS)
    used = row < last_row
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_row = expert * outputs + tl.minimum(output, outputs - 1)
    row_bytes = inputs * BITS // 8
    input_axis, byte_axis = tl.arange(0, INPUTS), tl.arange(0, INPUTS * BITS // 8)
    x_at = x + row.to(tl.int64)[:, None] * x_row
    codes_at = codes + weight_row[:, None] * row_bytes
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(begin, end, INPUTS):
        there = start + input_axis < end
        byte = start * BITS // 8 + byte_axis
        if EVEN:
            given = tl.load(x_at + (start + input_axis)[None, :], mask=used[:, None], other=0.0)
            code = tl.load(codes_at + byte[None, :])
        else:
            given = tl.load(
                x_at + (start + input_axis)[None, :], mask=used[:, None] & there[None, :], other=0.0
            )
            code = tl.load(codes_at + byte[None, :], mask=(byte < row_bytes)[None, :], other=0)
        if BITS == 4:
            code = tl.interleave(code & 15, code >> 4)
        weight = _values(code & 127 if BITS == 8 else code, values, first_value, step, VALUES, MANTISSA)
        if BITS == 8:
            weight = tl.where(code >= 128, -weight, weight)

        if GROUPS == _ONE:
            at_row, group = weight_row[:, None], start // GROUP
        elif GROUPS == _SEVERAL:
            at_row, group = weight_row[:, None], (start // GROUP + tl.arange(0, INPUTS // GROUP))[None, :]
        else:
            at_row, group = weight_row[:, None], ((start + input_axis) // GROUP)[None, :]
        scale = _numbers(scales, scales_shared, at_row, group, groups, shared_groups, OF_SHARED, not EVEN)
        if GROUPS == _SEVERAL:
            weight = tl.reshape(weight, (OUTPUTS, INPUTS // GROUP, GROUP)) * scale[:, :, None]
        else:
            weight = weight * scale
        if minima is not None:
            minimum = _numbers(
                minima, minima_shared, at_row, group, groups, shared_groups, OF_SHARED, not EVEN
            )
            if IN_SCALES:
                minimum = minimum * scale
            if GROUPS == _SEVERAL:
                weight = weight + minimum[:, :, None]
            else:
                weight = weight + minimum
        if GROUPS == _SEVERAL:
            weight = tl.reshape(weight, (OUTPUTS, INPUTS))
        if not EVEN:
            weight = tl.where(there[None, :], weight, 0.0)
        total += _dot(given, tl.trans(_rounded(weight, TYPE, WIDEN)), WIDEN)

    written = used[:, None] & (output < outputs)[None, :]
    if SPLIT:
        row += split * rows
    elif biases is not None:
        total += tl.load(biases + weight_row).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, _rounded(total, out.dtype.element_ty, WIDEN), mask=written)


@triton.jit(do_not_specialize=["numbers"])  # type: ignore[untyped-decorator]
def _merge(
    parts: tl.tensor,  # float32 [SPLITS, rows, outputs]
    biases: tl.tensor,  # [outputs] or None
    out: tl.tensor,  # [rows, outputs]
    numbers: tl.tensor,  # of `out`
    outputs: tl.tensor,
    SPLITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Adds the splits of some numbers, the first split first. Grid: [⌈numbers / SIZE⌉]."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    used = at < numbers
    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * numbers.to(tl.int64) + at, mask=used, other=0.0)
    if biases is not None:
        total += tl.load(biases + at % outputs, mask=used, other=0.0).to(tl.float32)
    tl.store(out + at, _rounded(total, out.dtype.element_ty, WIDEN), mask=used)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a program's block."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int  # blocks of codes and rows in flight


def block_shape(rows: int, element_bytes: int) -> BlockShape:
    """Returns the shape for so many rows. Float32 is multiplied without matrix units, by numbers in registers: larger
    blocks would not fit them."""
    if element_bytes == 4:
        return BlockShape(16, 32, 32, 4, 2)
    if rows <= _FEW:
        return BlockShape(16, 64, 128, 4, 3)
    return BlockShape(64, 64, 64, 4, 3) if rows <= _SOME else BlockShape(128, 128, 64, 8, 3)


def splits_of(programs: int, inputs: int, processors: int) -> int:
    """Returns into how many splits, a power of two, the inputs are cut, for two programs on each processor."""
    wanted = min(2 * processors // programs, inputs // _LEAST_SPLIT, _MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True, slots=True)
class ValueRule:
    """How the kernel finds the value of a code."""

    kind: int
    first: float = 0.0
    step: float = 0.0
    mantissa: int = 0

    @staticmethod
    def of(values: Tensor) -> ValueRule:
        """Returns the rule of a table [16] or [128]."""
        values = values.cpu()
        first, step = float(values[0]), float(values[1] - values[0])
        if torch.equal(values, torch.arange(float(len(values))) * step + first):
            return ValueRule(_LINE.value, first, step)
        if len(values) == 128:
            for dtype, mantissa in ((torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)):
                floats = torch.arange(128, dtype=torch.uint8).view(dtype).float()
                # Checkpoints with codes of numbers that are not finite are refused.
                if torch.equal(values, floats.where(floats.isfinite(), torch.zeros(()))):
                    return ValueRule(_FLOAT.value, mantissa=mantissa)
        return ValueRule(_TABLE.value)


class TritonCodedLayers:
    """Linear layers of one shape with coded weights, in the order of rows: the experts of a mixture, or one layer."""

    def __init__(self, weight: CodedWeight, dtype: torch.dtype, biases: Tensor | None = None) -> None:
        """Initialises layers [experts, out, in] for rows of a dtype. biases: [experts, out]"""
        weight = weight.with_bytes()
        self.packed = weight.rebuilt(each.contiguous() for each in weight.tensors())
        experts, outputs, inputs = weight.shape
        self.shape = (experts, outputs, inputs)
        self.dtype = dtype
        self._biases = None if biases is None else biases.detach().contiguous()
        self.nbytes = weight.nbytes + (0 if biases is None else biases.nbytes)
        self._rule = ValueRule.of(weight.values)
        self._processors = _processors(weight.codes.device)

    @classmethod
    def joined(cls, layers: Sequence[TritonCodedLayers]) -> TritonCodedLayers:
        """Returns the outputs of layers that are coded alike, one behind the other, in new memory."""
        parts = zip(*(each.packed.tensors() for each in layers), strict=True)
        return cls(layers[0].packed.rebuilt(torch.cat(part, 1) for part in parts), layers[0].dtype)

    def coded(self, first: int, end: int) -> CodedWeight:
        """Returns the weights of some experts, [experts, out, in], in the same memory."""
        return self.packed.part(first, end)

    def unpacked(self) -> Tensor:
        """Returns the weights [experts, out, in] in new memory, rounded to the rows' dtype."""
        experts = range(self.shape[0])
        return torch.cat([self.coded(each, each + 1).widened().to(self.dtype) for each in experts])

    def linear(self, bias: Tensor | None) -> TritonCoded:
        """Returns the linear layer of layers [1, out, in]. bias: [out]"""
        biases = None if bias is None else bias[None]
        return TritonCoded(TritonCodedLayers(self.packed, self.dtype, biases))

    def multiply(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """Multiplies x [rows, in], whose inputs are in the order of the codes, by the first layer, or each row by the
        one that `experts` [rows] names."""
        if experts is None:
            return self._launch(x, None)
        by_expert = experts.argsort(stable=True)
        numbers = torch.arange(self.shape[0], device=x.device)
        ends = torch.searchsorted(experts[by_expert], numbers, right=True)
        product = torch.empty(len(x), self.shape[1], dtype=x.dtype, device=x.device)
        product[by_expert] = self._launch(x[by_expert], ends)
        return product

    def multiply_sorted(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiplies x [rows, in] by the experts in their order. ends: [experts], where each one's rows end. Rows
        behind the last end get undefined products."""
        return self._launch(x, ends)

    def _launch(self, x: Tensor, ends: Tensor | None) -> Tensor:
        weight, (experts, outputs, inputs) = self.packed, self.shape
        rows = len(x)
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        assert x.shape[1] == inputs
        x = x if x.stride(1) == 1 else x.contiguous()
        grouped = ends is not None
        shape = block_shape(-(-rows // experts) if grouped else rows, x.element_size())
        # An expert with few rows has a tile, too: there are at most so many.
        tiles = rows // shape.rows + min(rows, experts) if grouped else -(-rows // shape.rows)
        blocks = -(-outputs // shape.outputs)
        splits = 1 if grouped else splits_of(tiles * blocks, inputs, self._processors)
        length = -(-inputs // (splits * shape.inputs)) * shape.inputs
        target = x.new_empty(splits, rows, outputs, dtype=torch.float32) if splits > 1 else out
        scales, minima = weight.scales, weight.minima
        shared = next(
            (each for each in (scales, minima) if each is not None and each.shared is not None), scales
        )
        group, groups = _groups(weight.group, inputs, shape.inputs)
        # Floats that are read for each weight would fill the shared memory if they were in flight, too.
        reads_each = groups == _ANY.value or (weight.bits == 8 and self._rule.kind == _TABLE.value)
        _multiply[(tiles, blocks, splits)](
            x,
            weight.codes,
            weight.values,
            scales.own,
            scales.shared,
            None if minima is None else minima.own,
            None if minima is None else minima.shared,
            self._biases,
            None if ends is None else ends.to(torch.int32),
            target,
            rows,
            x.stride(0),
            outputs,
            inputs,
            scales.own.shape[-1],
            1 if shared.shared is None else shared.shared.shape[-1],
            experts,
            length,
            self._rule.first,
            self._rule.step,
            BITS=weight.bits,
            VALUES=self._rule.kind,
            MANTISSA=self._rule.mantissa,
            GROUP=group,
            GROUPS=groups,
            OF_SHARED=shared.of_shared,
            IN_SCALES=weight.in_scales,
            GROUPED=grouped,
            EXPERTS_PAD=int(triton.next_power_of_2(experts)) if grouped else 1,
            SPLIT=splits > 1,
            EVEN=inputs % shape.inputs == 0,
            ROWS=shape.rows,
            OUTPUTS=shape.outputs,
            INPUTS=shape.inputs,
            WIDEN=INTERPRETED,
            num_warps=shape.warps,
            num_stages=1 if reads_each else shape.stages,
        )
        if splits > 1:
            numbers = rows * outputs
            merge: Any = _merge[(-(-numbers // _MERGED),)]
            merge(target, self._biases, out, numbers, outputs, SPLITS=splits, SIZE=_MERGED, WIDEN=INTERPRETED)
        return out


def _groups(group: int, inputs: int, block: int) -> tuple[int, int]:
    """Returns the kernel's GROUP and GROUPS for blocks of so many inputs."""
    if group >= inputs:
        return max(group, -(-inputs // block) * block), _ONE.value
    if group % block == 0:
        return group, _ONE.value
    return group, _SEVERAL.value if block % group == 0 else _ANY.value


class TritonCoded:
    """Linear layer with a coded weight on a CUDA device."""

    def __init__(self, layers: TritonCodedLayers) -> None:
        """Initialises the layer by layers [1, out, in]."""
        self._layers = layers
        _, self.out_features, self.in_features = layers.shape
        self._order = layers.packed.order
        self.nbytes = layers.nbytes + (0 if self._order is None else self._order.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._order is not None:
            rows = rows.index_select(-1, self._order)
        return self._layers.multiply(rows).view(*x.shape[:-1], self.out_features)

    def product(self) -> Callable[[Tensor], Tensor]:
        return self

    def unpacked(self) -> Tensor:
        """Returns the weight [out, in] in a new tensor, rounded to the model's dtype."""
        return self._layers.unpacked()[0]
