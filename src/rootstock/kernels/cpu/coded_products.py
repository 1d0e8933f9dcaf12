"""Products of bfloat16 rows with weights of 8, 6 or 4 bits, exactly as the codes stand: no number is rounded before
the products of a row are added up.

A weight is scale · value(code) + minimum, with a scale, and where a format has them a minimum, for each group of
inputs of an output. A code of 4 or 6 bits is a place in a table of 16 or 64 values; a code of 8 bits is a sign and a
place in a table of 128. Values are numbers of bfloat16, so the processor's instruction for pairs multiplies them
(AVX512-BF16). A group's products are added up in float32, and the sum is multiplied by the scale. A minimum is
multiplied by the sum of the group's inputs. Scales and minima may be numbers of 8 bits times a number that several
groups share.

A task's rows are multiplied batch by batch (coded_batches.py) with the pairs of inputs of a turn, whose codes stay in
the first cache. All batches add in the same order: the sums of a row depend neither on other rows nor on threads.

Measured on one core (Zen 4), in cache, against the loops for bfloat16, with 1, 8, 16 and 512 rows: .61, .97, .96 and
1.02 of their time for 4 bits in groups of 128; .65, 1.02, 1.01, 1.04 in groups of 32, with minima and small scales
.76, 1.12, 1.11, 1.14; for 8 bits in groups of 128 .88, 1.05, 1.02, 1.03; for 6 bits in groups of 16 .89, 1.21, 1.17,
1.12. A group of 32 inputs costs one more instruction for each 16 products, and a minimum as many again. Up to four
rows wait for memory in a model, where fewer bytes count for more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock.kernels.cpu.code_values import AT_ONCE
from rootstock.kernels.cpu.coded_batches import KEPT, KINDS, MOST, VALUES, WHOLE, add_batch, widen_numbers
from rootstock.kernels.cpu.compiler import (
    c_function,
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
    round_block,
    write_block,
)
from rootstock.kernels.cpu.vector_lanes import I64, fetch
from rootstock.kernels.torch.coded_weight import CodedWeight

_SEGMENT = 64  # the most pairs of inputs whose products are added up before they are scaled
_TURN = 256  # pairs of inputs
_PART = 192  # rows of one task
_ROWS_AHEAD = 6  # between the outputs that are written and those that are fetched
_NEAR = 4 << 10  # bytes between the codes that few rows read and the codes that are fetched

CODED_JOB = np.dtype(
    [
        *JOB.descr,  # `weights` are codes: [experts, blocks, pairs, 64, 96 or 128 bytes]
        ("bits", "i8"),
        ("table", "i8"),  # address of 64 bytes (4 bits), 128 (6) or 256 (8), see `table_of`
        ("group", "i8"),  # pairs of inputs
        ("segment", "i8"),  # pairs of inputs: a divisor of `group`, or a part of it
        ("scales", "i8"),  # address of [experts, blocks, groups, 64]
        ("scale_kind", "i8"),
        ("scale_bytes", "i8"),  # of one number
        ("scale_shared", "i8"),  # address of [experts, blocks, groups / of_shared, 64] float16; 0: none
        ("minima", "i8"),  # the same; 0: there are none
        ("minimum_kind", "i8"),
        ("minimum_bytes", "i8"),
        ("minimum_shared", "i8"),
        ("of_shared", "i8"),  # groups
        ("in_scales", "i8"),  # 1: minima are multiples of the scales
    ]
)


@compiled
def _segment_at(job: Any, pair: Any) -> Any:
    """Returns the number of the segment in which a pair lies."""
    return (
        pair // job.group * ((job.group + job.segment - 1) // job.segment) + pair % job.group // job.segment
    )


@compiled
def _sum_segments(row: Any, group: Any, segment: Any, of_group: Any, sums: Any) -> None:
    """Adds up the inputs of each segment. row [inputs] bfloat16, sums [segments] float32; group, segment: inputs"""
    for s in range(len(sums)):
        begin = s // of_group * group + s % of_group * segment
        total = np.float32(0)
        for i in range(begin, min(begin + segment, s // of_group * group + group, len(row))):
            total += widen(row[i])
        sums[s] = total


@compiled
def _widen_segments(
    job: Any, block: Any, first: Any, count: Any, of_group: Any, scales: Any, minima: Any
) -> None:
    """Widens the scales and minima of `count` segments of a block to [count, 64] float32 at two addresses."""
    groups = (job.pairs + job.group - 1) // job.group
    place, of_shared = BLOCK * groups * block, job.of_shared
    place_of_shared = 2 * BLOCK * ((groups + of_shared - 1) // of_shared) * block
    at, shared = job.scales + job.scale_bytes * place, job.scale_shared
    shared += place_of_shared if shared != 0 else 0
    widen_numbers(job.scale_kind, at, shared, of_shared, first, count, of_group, 0, scales)
    if job.minima != 0:
        at, shared = job.minima + job.minimum_bytes * place, job.minimum_shared
        shared += place_of_shared if shared != 0 else 0
        factors = scales if job.in_scales != 0 else 0
        widen_numbers(job.minimum_kind, at, shared, of_shared, first, count, of_group, factors, minima)


@compiled
def _pairs_of_turn(job: Any, first: Any) -> Any:
    """Returns the pairs that are multiplied by all rows before the next ones: whole segments."""
    left = job.pairs - first
    if job.group % job.segment != 0:
        return min(left, job.segment, job.group - first % job.group)
    return min(left, max(1, _TURN // job.segment) * job.segment)


@compiled
def _multiply_rows(
    job: Any,
    codes: Any,
    first: Any,
    pairs: Any,
    rows: Any,
    begins: Any,
    totals: Any,
    scales: Any,
    minima: Any,
    sums: Any,
    stride_of_sums: Any,
    values: Any,
) -> None:
    """Adds the products of pairs of inputs from `first` on to totals, batch by batch.

    codes   address of the codes of the pairs
    rows    [count] int64: addresses
    begins  address of [64] float32: the biases, with which totals begin where `first` is zero
    totals  [≥ count, 64] float32
    others  addresses, see `add_batch`; `sums` of the first row's segments
    """
    count = len(rows)
    batches = (count + MOST - 1) // MOST
    source = KEPT + job.bits if batches > 1 and job.bits > 4 else job.bits
    # Few rows wait for their codes; a batch of more reads them twice, and fetches those of the next turn meanwhile.
    stride = 16 * job.bits if count <= WHOLE else 8 * job.bits
    fetched = codes + (_NEAR if count <= WHOLE else 16 * job.bits * pairs)
    r = 0
    for batch in range(batches):
        here = (count - r + batches - batch - 1) // (batches - batch)
        add_batch(
            8 * source + here,
            rows[r:].ctypes.data,
            4 * first,
            values if source == VALUES else codes,
            pairs,
            job.segment,
            scales,
            minima,
            sums + stride_of_sums * r,
            stride_of_sums,
            job.table,
            begins if first == 0 else totals[r:].ctypes.data,
            0 if first == 0 else 4 * BLOCK,
            totals[r:].ctypes.data,
            values,
            fetched,
            stride,
        )
        r += here
        source, fetched, stride = VALUES if source > VALUES else source, codes, 0


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_to_write(typing: Any, address: Any) -> Any:
    """Fetches a block of a row's outputs, two lines, which will be written."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        for line in range(2 * BLOCK // 64):
            fetch(builder, builder.add(given[0], I64(64 * line)), 1, writes=True)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled
def _write_rows(job: Any, totals: Any, order: Any, block: Any, out: Any) -> None:
    """Rounds totals [≥ count, 64] float32 to a block of outputs of the products order [count]."""
    begin = BLOCK * block
    for r in range(len(order)):
        if begin + BLOCK <= job.outputs:
            ahead = order[min(r + _ROWS_AHEAD, len(order) - 1)]
            _fetch_to_write(job.out + 2 * (job.outputs * ahead + begin))
            # A slice of an array would be counted as in use, which takes as long as the rounding.
            round_block(totals.ctypes.data + 4 * BLOCK * r, job.out + 2 * (job.outputs * order[r] + begin))
        else:
            write_block(totals[r], out[order[r], begin:])


def _work(jobs: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    job = nb.carray(jobs, (1,))[0]
    claims = nb.carray(pointer_to(job.claims), (8 * (1 + job.threads),), np.int64)
    out = nb.carray(pointer_to(job.out), (job.products, job.outputs), np.uint16)
    begins, order = np.empty(job.experts + 2, np.int64), np.empty(job.products, np.int64)
    tasks = np.empty(job.experts + 1, np.int64)
    plan_tasks(job.chosen, job.blocks, _PART, begins, order, tasks, out)
    rows, totals = np.empty(job.products, np.int64), np.empty((_PART, BLOCK), np.float32)
    for place in range(job.products):
        rows[place] = job.given + 4 * job.pairs * (order[place] // job.choices)
    of_group = (job.group + job.segment - 1) // job.segment
    segments = _segment_at(job, job.pairs + job.segment - 1)
    at_once = min(segments, max(1, _TURN // job.segment))
    scales, minima = np.empty((at_once, BLOCK), np.float32), np.empty((at_once, BLOCK), np.float32)
    keeps = job.bits > 4 and job.products > MOST
    values = np.empty((min(_TURN, job.pairs) if keeps else 0, BLOCK), np.uint32)
    sums = np.empty((job.products if job.minima != 0 else 0, segments), np.float32)
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
        if job.minima != 0 and summed[begin] == 0:
            for r in range(count):
                row = nb.carray(pointer_to(rows[begin + r]), (2 * job.pairs,), np.uint16)
                _sum_segments(row, 2 * job.group, 2 * job.segment, of_group, sums[begin + r])
            summed[begin] = 1
        first = 0  # pair
        while first < job.pairs:
            pairs, segment = _pairs_of_turn(job, first), _segment_at(job, first)
            here = (pairs + job.segment - 1) // job.segment
            # An array whose address is taken is freed after the last line that names it, so this is in the loop.
            minima_at = minima.ctypes.data if job.minima != 0 else 0
            _widen_segments(job, number, segment, here, of_group, scales.ctypes.data, minima_at)
            _multiply_rows(
                job,
                job.weights + 16 * job.bits * (job.pairs * number + first),
                first,
                pairs,
                rows[begin : begin + count],
                job.biases + 4 * BLOCK * number,
                totals,
                scales.ctypes.data,
                minima_at,
                sums.ctypes.data + 4 * (segments * begin + segment),
                4 * segments,
                values.ctypes.data,
            )
            first += pairs
        _write_rows(job, totals, order[begin : begin + count], block, out)


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
        """Initialises products with weights of shape [experts, out, in], an even number of inputs, for 6
        bits a multiple of four.

        weight  codes by `pack_codes`, the numbers of groups by `pack_scales`; kept
        table   by `table_of`; kept
        biases  [experts, out]
        """
        super().__init__(weight.codes.data_ptr(), shape, biases, CODED_JOB, _compiled())
        assert self.in_features % (2 * AT_ONCE[weight.bits]) == 0
        assert weight.scales.own.shape[2] == -(-self.in_features // weight.group)
        self._kept = weight, table
        job: Any = self._job[0]
        job["bits"], job["table"], job["group"] = weight.bits, table.data_ptr(), weight.group // 2
        job["segment"] = _segment_of(weight.group // 2, AT_ONCE[weight.bits])
        job["of_shared"], job["in_scales"] = weight.scales.of_shared, weight.in_scales
        for field, name, numbers in (
            ("scales", "scale", weight.scales),
            ("minima", "minimum", weight.minima),
        ):
            if numbers is None:
                continue
            assert numbers.of_shared == weight.scales.of_shared
            job[field], job[f"{name}_kind"] = numbers.own.data_ptr(), KINDS.index(numbers.own.dtype)
            job[f"{name}_bytes"] = numbers.own.itemsize
            if numbers.shared is not None:
                assert numbers.shared.dtype == torch.float16
                job[f"{name}_shared"] = numbers.shared.data_ptr()


def _segment_of(group: int, at_once: int) -> int:
    """Returns the pairs of a segment, a multiple of `at_once`, for groups of so many pairs."""
    assert group % at_once == 0
    sizes = (
        size for size in range(min(group, _SEGMENT), 15, -1) if size % at_once == 0 and group % size == 0
    )
    return group if group < 16 else next(sizes, _SEGMENT)
