"""Products of bfloat16 rows with weights of 8 or 4 bits, exactly as the codes stand: no number is rounded before the
products of a row are added up.

A weight is scale · value(code) + minimum, with a scale, and where a format has them a minimum, for each group of
inputs of an output. A code of 4 bits is a place in a table of 16 values; a code of 8 bits is a sign and a place in a
table of 128. Values are numbers of bfloat16, so the processor's instruction for pairs multiplies them (AVX512-BF16).
A group's products are added up in float32, and the sum is multiplied by the scale. A minimum is multiplied by the sum
of the group's inputs. Scales and minima may be numbers of 8 bits times a number that several groups share.

Up to `_DIRECT` rows are multiplied with values that stay in registers. For more rows, values of some pairs of inputs
are written to scratch memory first, and all rows of a task pass over them while the next codes are fetched. Both add
in the same order: the sums of a row depend neither on other rows nor on threads.

Measured on two cores (Zen 4) against the loops for bfloat16: for one row .51 to .58 of their time (8 bits) and .28 to
.4 (4 bits), for eight .8 to .9, for 16 to 2,048 1.0 to 1.07.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from rootstock.kernels.cpu.code_values import NEAR, SHIFTS, tables_at, values_at, write_values
from rootstock.kernels.cpu.compiler import (
    c_function,
    cgutils,
    compiled,
    fetch_add,
    has_features,
    intrinsic,
    nb,
    pointer_to,
    types,
    widen,
)
from rootstock.kernels.cpu.packed_products import (
    BLOCK,
    JOB,
    PackedProducts,
    next_task,
    place_of,
    plan_tasks,
    write_block,
)
from rootstock.kernels.cpu.pair_products import AT_ONCE, add_pairs, splat_at
from rootstock.kernels.cpu.vector_lanes import (
    FLOATS,
    I64,
    LANES,
    add_product,
    fetch,
    floats,
    load,
    store,
    switch,
)
from rootstock.kernels.torch.coded_weight import CodedWeight

_SEGMENT = 64  # the most pairs of inputs whose products are added up before they are scaled
_PIECE, _TURN = 256, 2048  # pairs whose values are in scratch memory: 64 KB for some rows, 512 KB for many
_DIRECT, _FEW, _SOME = 4, 16, 47  # rows
_PART = 192  # rows of one task
_MINIMA = 16  # groups whose minima are widened together
_VECTORS = BLOCK // LANES
_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)  # of scales and minima
_F32, _BF16, _F16, _U8, _I8 = range(5)

CODED_JOB = np.dtype(
    [
        *JOB.descr,  # `weights` are codes: [experts, blocks, pairs, 64 or 128 bytes]
        ("bits", "i8"),
        ("table", "i8"),  # address of 64 bytes (4 bits) or 256 bytes (8 bits), see `table_of`
        ("group", "i8"),  # pairs of inputs
        ("segment", "i8"),  # pairs of inputs: a divisor of `group`, or a part of it
        ("scales", "i8"),  # address of [experts, blocks, groups, 64]
        ("scale_kind", "i8"),
        ("scale_shared", "i8"),  # address of [experts, blocks, groups / of_shared, 64] float16; 0: none
        ("minima", "i8"),  # the same; 0: there are none
        ("minimum_kind", "i8"),
        ("minimum_shared", "i8"),
        ("of_shared", "i8"),  # groups
        ("in_scales", "i8"),  # 1: minima are multiples of the scales
    ]
)
# ---- products


@intrinsic  # type: ignore[untyped-decorator]
def _add_coded(
    typing: Any,
    way: Any,
    rows: Any,
    along: Any,
    weight: Any,
    pairs: Any,
    group: Any,
    scales: Any,
    table: Any,
    totals: Any,
    fetched: Any,
    stride: Any,
) -> Any:
    """Adds scale · products of one to six rows and a block to totals, group by group.

    way     16 · bits + rows; bits 16: the weights are values
    rows    address of [count] int64: the addresses of rows
    along   bytes from the address of a row to its first pair
    weight  address of codes, or of values
    pairs   of inputs; the last group may have fewer than `group`
    scales  address of [groups, 64] float32
    totals  address of [count, 64] float32
    fetched address of memory that is fetched into the second cache meanwhile, `stride` bytes for each pair
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        way, *others = given
        cases: dict[int, Callable[[], None]] = {}
        for bits in (4, 8, 16):
            for count in range(1, (AT_ONCE if bits == 16 else _DIRECT) + 1):
                cases[16 * bits + count] = partial(_add, builder, bits, count, *others)
        switch(builder, way, cases)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _add(builder: ir.IRBuilder, bits: int, count: int, *given: Any) -> None:
    rows, along, weight, pairs, group, scales, table, totals, fetched, stride = given
    addresses = builder.inttoptr(rows, I64.as_pointer())
    at_rows = [builder.add(builder.load(builder.gep(addresses, [I64(r)])), along) for r in range(count)]
    tables, shift = tables_at(builder, bits, table), SHIFTS[bits]
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(_VECTORS)] for _ in range(count)]
    places = [builder.add(totals, I64(256 * r + 64 * v)) for r in range(count) for v in range(_VECTORS)]
    begun = [cgutils.alloca_once_value(builder, load(builder, place)) for place in places]
    added = [begun[_VECTORS * r : _VECTORS * (r + 1)] for r in range(count)]
    groups = builder.udiv(builder.sub(builder.add(pairs, group), I64(1)), group)
    with cgutils.for_range(builder, groups, intp=I64) as of_group:
        begin = builder.mul(of_group.index, group)
        left = builder.sub(pairs, begin)
        here = builder.select(builder.icmp_signed("<", left, group), left, group)
        for of_row in sums:
            for total in of_row:
                builder.store(floats(0.0), total)
        with cgutils.for_range(builder, here, intp=I64) as loop:
            pair = builder.add(begin, loop.index)
            at = builder.add(weight, builder.shl(pair, I64(shift)))
            if bits == 16:
                ahead, lines = builder.add(fetched, builder.mul(stride, pair)), 2
            else:
                ahead, lines = builder.add(at, I64(NEAR)), bits // 4
            for line in range(lines):
                fetch(builder, builder.add(ahead, I64(64 * line)), 2)
            columns = values_at(builder, bits, tables, at)
            place = builder.shl(pair, I64(2))
            for row, of_row in zip(at_rows, sums, strict=True):
                inputs = splat_at(builder, builder.add(row, place))
                for total, column in zip(of_row, columns, strict=True):
                    builder.store(add_pairs(builder, builder.load(total), inputs, column), total)
        of_scales = builder.add(scales, builder.shl(of_group.index, I64(8)))
        for v in range(_VECTORS):
            scale = load(builder, builder.add(of_scales, I64(64 * v)))
            for of_row, of_totals in zip(sums, added, strict=True):
                total = builder.load(of_totals[v])
                builder.store(add_product(builder, total, builder.load(of_row[v]), scale), of_totals[v])
    for place, one in zip(places, [one for of_row in added for one in of_row], strict=True):
        store(builder, builder.load(one), place)


@intrinsic  # type: ignore[untyped-decorator]
def _add_minima(typing: Any, sums: Any, minima: Any, groups: Any, total: Any) -> Any:
    """Adds sums [groups] · minima [groups, 64] to total [64]. sums, minima, total: addresses of float32"""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        sums, minima, groups, total = given
        places = [builder.add(total, I64(64 * v)) for v in range(_VECTORS)]
        added = [cgutils.alloca_once_value(builder, load(builder, place)) for place in places]
        with cgutils.for_range(builder, groups, intp=I64) as loop:
            at = builder.add(minima, builder.shl(loop.index, I64(8)))
            number = splat_at(builder, builder.add(sums, builder.shl(loop.index, I64(2))))
            factor = builder.bitcast(number, FLOATS)
            for v, one in enumerate(added):
                minimum = load(builder, builder.add(at, I64(64 * v)))
                builder.store(add_product(builder, builder.load(one), factor, minimum), one)
        for place, one in zip(places, added, strict=True):
            store(builder, builder.load(one), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


# ---- scales


@intrinsic  # type: ignore[untyped-decorator]
def _from_half(typing: Any, bits: Any) -> Any:
    """Converts a float16, as uint16, to float32."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fpext(builder.bitcast(given[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@compiled
def _widen(
    at: Any, kind: Any, shared: Any, of_shared: Any, block: Any, groups: Any, group: Any, into: Any
) -> None:
    """Writes the scales, or minima, of a group to into [64] float32.

    at      address of the numbers of all blocks
    shared  address of the factors that `of_shared` groups share; 0: there are none
    groups  of a block
    """
    begin = BLOCK * (groups * block + group)
    if kind == _F32:
        wide = nb.carray(pointer_to(at + 4 * begin), (BLOCK,), np.float32)
        for i in range(BLOCK):
            into[i] = wide[i]
    elif kind == _U8:
        small = nb.carray(pointer_to(at + begin), (BLOCK,), np.uint8)
        for i in range(BLOCK):
            into[i] = np.float32(small[i])
    elif kind == _I8:
        signed = nb.carray(pointer_to(at + begin), (BLOCK,), np.int8)
        for i in range(BLOCK):
            into[i] = np.float32(signed[i])
    else:
        halves = nb.carray(pointer_to(at + 2 * begin), (BLOCK,), np.uint16)
        if kind == _BF16:
            for i in range(BLOCK):
                into[i] = widen(halves[i])
        else:
            for i in range(BLOCK):
                into[i] = _from_half(halves[i])
    if shared != 0:
        place = (groups + of_shared - 1) // of_shared * block + group // of_shared
        factors = nb.carray(pointer_to(shared + 2 * BLOCK * place), (BLOCK,), np.uint16)
        for i in range(BLOCK):
            into[i] *= _from_half(factors[i])


@compiled
def _widen_scales(job: Any, block: Any, first: Any, pairs: Any, groups: Any, into: Any) -> None:
    """Widens the scales of the segments of `pairs` pairs from `first` on."""
    for segment in range((pairs + job.segment - 1) // job.segment):
        group = (first + segment * job.segment) // job.group
        _widen(
            job.scales,
            job.scale_kind,
            job.scale_shared,
            job.of_shared,
            block,
            groups,
            group,
            into[segment],
        )


@compiled
def _widen_minima(job: Any, block: Any, first: Any, count: Any, groups: Any, into: Any) -> None:
    """Widens the minima of `count` groups from `first` on. into [> count, 64]: the last row is scratch memory"""
    scale = into[count]
    for g in range(count):
        kind, shared, group = job.minimum_kind, job.minimum_shared, first + g
        _widen(job.minima, kind, shared, job.of_shared, block, groups, group, into[g])
        if job.in_scales != 0:
            _widen(job.scales, job.scale_kind, job.scale_shared, job.of_shared, block, groups, group, scale)
            for i in range(BLOCK):
                into[g, i] *= scale[i]


@compiled
def _sum_groups(row: Any, group: Any, sums: Any) -> None:
    """Adds up the inputs of each group. row [inputs] bfloat16, sums [groups] float32; group: inputs"""
    for g in range(len(sums)):
        total = np.float32(0)
        for i in range(g * group, min((g + 1) * group, len(row))):
            total += widen(row[i])
        sums[g] = total


def _work(jobs: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    job = nb.carray(jobs, (1,))[0]
    claims = nb.carray(pointer_to(job.claims), (8 * (1 + job.threads),), np.int64)
    out = nb.carray(pointer_to(job.out), (job.products, job.outputs), np.uint16)
    begins, order = np.empty(job.experts + 2, np.int64), np.empty(job.products, np.int64)
    tasks = np.empty(job.experts + 1, np.int64)
    plan_tasks(job.chosen, job.blocks, _PART, begins, order, tasks, out)
    rows, totals = np.empty(_PART, np.int64), np.empty((_PART, BLOCK), np.float32)
    groups = (job.pairs + job.group - 1) // job.group
    segments = (min(_TURN, job.pairs) + job.segment - 1) // job.segment
    scales, minima = np.empty((segments, BLOCK), np.float32), np.empty((_MINIMA + 1, BLOCK), np.float32)
    held_pairs = 0 if job.products <= _DIRECT else _PIECE if job.products <= _SOME else _TURN
    values = np.empty((min(held_pairs, job.pairs), BLOCK), np.uint32)
    held = -1  # the block whose values and scales of all inputs are in scratch memory
    sums = np.empty((job.products if job.minima != 0 else 0, groups), np.float32)
    summed = np.zeros(job.products + 1, np.uint8)  # by the place of a part's first product
    thread = fetch_add(claims, 0, 1)
    while True:
        task = next_task(claims, thread, job.threads, tasks[job.experts])
        if task < 0:
            return
        expert, block, part = place_of(task, tasks, job.blocks)
        number = job.blocks * expert + block
        begin = begins[expert] + _PART * part
        count = min(_PART, begins[expert + 1] - begin)
        for r in range(count):
            rows[r] = job.given + 4 * job.pairs * (order[begin + r] // job.choices)
        if job.minima != 0 and summed[begin] == 0:
            for r in range(count):
                row = nb.carray(pointer_to(rows[r]), (2 * job.pairs,), np.uint16)
                _sum_groups(row, 2 * job.group, sums[begin + r])
            summed[begin] = 1
        bias = nb.carray(pointer_to(job.biases + 4 * BLOCK * number), (BLOCK,), np.float32)
        totals[:count] = bias
        if job.minima != 0:
            for first in range(0, groups, _MINIMA):
                here = min(_MINIMA, groups - first)
                _widen_minima(job, number, first, here, groups, minima)
                for r in range(count):
                    at = sums[begin + r, first:].ctypes.data
                    _add_minima(at, minima.ctypes.data, here, totals[r:].ctypes.data)
        at_once = _TURN if count > _SOME else _PIECE
        at_once = at_once // job.segment * job.segment
        first = 0  # pair
        while first < job.pairs:
            pairs = min(at_once, job.pairs - first)
            if job.group % job.segment != 0:
                pairs = min(pairs, job.segment, job.group - first % job.group)
            codes = job.weights + 16 * job.bits * (job.pairs * number + first)
            if held != number or pairs < job.pairs:
                held = number if count > _DIRECT and pairs == job.pairs else -1
                _widen_scales(job, number, first, pairs, groups, scales)
                if count > _DIRECT:
                    write_values(job.bits, codes, pairs, job.table, values.ctypes.data)
            after = codes + (16 * job.bits * pairs if count > _DIRECT else NEAR)
            step = _DIRECT if count <= _DIRECT or count > _FEW else AT_ONCE
            for r in range(0, count, step):
                _add_coded(
                    16 * (16 if count > _DIRECT else job.bits) + min(step, count - r),
                    rows[r:].ctypes.data,
                    4 * first,
                    values.ctypes.data if count > _DIRECT else codes,
                    pairs,
                    job.segment,
                    scales.ctypes.data,
                    job.table,
                    totals[r:].ctypes.data,
                    after if r == 0 else values.ctypes.data,
                    16 * job.bits if r == 0 else 0,
                )
            first += pairs
        for r in range(count):
            write_block(totals[r], out[order[begin + r], BLOCK * block : BLOCK * (block + 1)])


@cache
def _compiled() -> int:
    return c_function(_work, CODED_JOB)


# ---- public interface


@cache
def has_coded_products() -> bool:
    """Returns whether the processor has the instructions that look values up and multiply them, and Numba may use
    them."""
    return has_features("avx512bf16", "avx512bw", "avx512vbmi")


def pack_scales(scales: Tensor) -> Tensor:
    """Packs scales, or minima, [experts, out, groups] → [experts, blocks, groups, 64], zeros for outputs that fill up
    the last block."""
    experts, outputs, groups = scales.shape
    blocks = -(-outputs // BLOCK)
    whole = torch.nn.functional.pad(scales, (0, 0, 0, BLOCK * blocks - outputs)).contiguous()
    return whole.view(experts, blocks, BLOCK, groups).transpose(2, 3).contiguous()


def unpack_scales(packed: Tensor, outputs: int) -> Tensor:
    """Returns the scales, or minima, [experts, out, groups] that `pack_scales` packed."""
    return packed.transpose(2, 3).flatten(1, 2)[:, :outputs].contiguous()


class CodedProducts(PackedProducts):
    """Products with coded weights. One thread at a time may use it."""

    def __init__(
        self, weight: CodedWeight, table: Tensor, shape: tuple[int, int, int], biases: Tensor | None
    ) -> None:
        """Initialises products with weights of shape [experts, out, in], an even number of inputs.

        weight  codes by `pack_codes`, the numbers of groups by `pack_scales`; kept
        table   by `table_of`; kept
        biases  [experts, out]
        """
        super().__init__(weight.codes.data_ptr(), shape, biases, CODED_JOB, _compiled())
        assert weight.group % 2 == 0
        assert weight.scales.own.shape[2] == -(-self.in_features // weight.group)
        self._kept = weight, table
        job: Any = self._job[0]
        job["bits"], job["table"], job["group"] = weight.bits, table.data_ptr(), weight.group // 2
        job["segment"] = _segment_of(weight.group // 2)
        job["of_shared"], job["in_scales"] = weight.scales.of_shared, weight.in_scales
        for field, kind, shared, numbers in (
            ("scales", "scale_kind", "scale_shared", weight.scales),
            ("minima", "minimum_kind", "minimum_shared", weight.minima),
        ):
            if numbers is None:
                continue
            assert numbers.of_shared == weight.scales.of_shared
            job[field], job[kind] = numbers.own.data_ptr(), _KINDS.index(numbers.own.dtype)
            if numbers.shared is not None:
                assert numbers.shared.dtype == torch.float16
                job[shared] = numbers.shared.data_ptr()


def _segment_of(group: int) -> int:
    """Returns the pairs of a segment for groups of so many pairs."""
    fits = (size for size in range(min(group, _SEGMENT), 15, -1) if group % size == 0)
    return group if group < 16 else next(fits, _SEGMENT)
