"""Products of bfloat16 rows with packed weights, by the processor's instruction for pairs (AVX512-BF16): of linear
layers, and of the experts of a mixture.

A weight lies in blocks of 64 outputs, and in a block, for each pair of inputs, the pairs of all outputs side by side.
A task is one block for a part of the rows. Up to six rows are multiplied at once; further rows find the block in the
second cache, and while they do, the next block is fetched, so that reading and computing overlap. Inputs of more than
`_PAIRS` pairs are taken in turns, because their block would not fit in that cache.

A mixture's products are sorted by expert, by every thread for itself, and each expert that was chosen is read once.

Measured on two cores (Zen 4) against oneDNN with weights packed for it: .6 to .85 of its time for 1 to 24 rows, and
.94 to 1.0 for 32 to 2,048. Up to five rows read a weight at the memory's rate (33 or 52 GB/s, as neighbours let it),
eight at 27 to 38 GB/s. Against torch's grouped product of experts: .25 to .55 for up to 64 rows, .75 to .9 for 2,048.

The sums of a row depend neither on other rows nor on threads: a token's product is the same in a prompt, in a chunk
of it and in a batch.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor, nn

from rootstock.kernels.cpu.compiler import (
    c_function,
    cgutils,
    compiled,
    fetch_add,
    intrinsic,
    narrow,
    nb,
    pointer_to,
    types,
)
from rootstock.kernels.cpu.pair_products import AT_ONCE, add_pairs, rounded, splat_at
from rootstock.kernels.cpu.stages import Stages
from rootstock.kernels.cpu.threads import run_on_threads
from rootstock.kernels.cpu.vector_lanes import I64, INTS, LANES, fetch, load, store, switch

BLOCK = 64  # outputs
_PART = 96  # rows of one task
_PAIRS = 2048  # of inputs at a time: 512 KB of a block
_VECTORS = BLOCK // LANES
# Bytes between the products of the first rows and the weights that are fetched. Few rows keep up with the processor's
# own fetching, which needs help near by only; with six rows, products take longer than reading.
_NEAR, _FAR = 2 << 10, 16 << 10

JOB = np.dtype(
    [
        (
            "claims",
            "i8",
        ),  # address of [8 · (1 + threads)] int64: threads that have begun, claims of `next_task`
        ("threads", "i8"),
        ("experts", "i8"),
        ("blocks", "i8"),  # of one expert
        ("pairs", "i8"),  # of inputs
        ("outputs", "i8"),
        ("weights", "i8"),  # address of [experts, blocks, pairs, 64, 2] bfloat16
        ("biases", "i8"),  # address of [experts, 64 · blocks] float32
        ("products", "i8"),
        ("choices", "i8"),  # products of one row
        ("chosen", "i8"),  # address of [products] int64; 0: all of expert 0
        ("given", "i8"),  # address of [products / choices, 2 · pairs] bfloat16
        ("out", "i8"),  # address of [products, outputs] bfloat16
    ]
)
_FIELDS = struct.Struct("=13q")


@intrinsic  # type: ignore[untyped-decorator]
def _add_products(
    typing: Any,
    count: Any,
    rows: Any,
    along: Any,
    weight: Any,
    pairs: Any,
    begins: Any,
    stride: Any,
    totals: Any,
    ahead: Any,
) -> Any:
    """Computes totals = begins + rows · weight for one to six rows and a block of outputs, in the same order for any
    count.

    rows            address of [count] int64: the addresses of rows
    along           bytes from the address of a row to its pairs
    weight          address of [pairs, 64] pairs
    begins, totals  addresses of [count, 64] float32, those of `begins` `stride` bytes apart
    ahead           bytes from the weights to the memory that is fetched into the second cache
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        counts = range(1, AT_ONCE + 1)
        switch(builder, given[0], {n: partial(_multiply, builder, n, *given[1:]) for n in counts})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _multiply(
    builder: ir.IRBuilder, count: int, rows: Any, along: Any, weight: Any, pairs: Any, *places: Any
) -> None:
    """Generates the products of `count` rows, whose sums stay in registers. See `_add_products`."""
    begins, stride, totals, ahead = places
    table = builder.inttoptr(rows, I64.as_pointer())
    at_rows = [builder.add(builder.load(builder.gep(table, [I64(r)])), along) for r in range(count)]
    sums = []
    for r in range(count):
        at = builder.add(begins, builder.mul(stride, I64(r)))
        begun = [load(builder, builder.add(at, I64(64 * v))) for v in range(_VECTORS)]
        sums.append([cgutils.alloca_once_value(builder, begin) for begin in begun])
    with cgutils.for_range(builder, pairs, intp=I64) as loop:
        at = builder.add(weight, builder.shl(loop.index, I64(8)))
        place = builder.shl(loop.index, I64(2))
        columns = [load(builder, builder.add(at, I64(64 * v)), INTS) for v in range(_VECTORS)]
        for v in range(_VECTORS):
            fetch(builder, builder.add(builder.add(at, ahead), I64(64 * v)), 2)
        for row, of_row in zip(at_rows, sums, strict=True):
            pair = splat_at(builder, builder.add(row, place))
            for total, column in zip(of_row, columns, strict=True):
                builder.store(add_pairs(builder, builder.load(total), pair, column), total)
    for r, of_row in enumerate(sums):
        for v, total in enumerate(of_row):
            store(builder, builder.load(total), builder.add(totals, I64(256 * r + 64 * v)))


@intrinsic  # type: ignore[untyped-decorator]
def round_block(typing: Any, totals: Any, to: Any) -> Any:
    """Rounds [64] float32 to bfloat16. totals, to: addresses"""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        totals, to = given
        for half in range(_VECTORS // 2):
            low, high = (load(builder, builder.add(totals, I64(128 * half + 64 * v))) for v in range(2))
            store(builder, rounded(builder, low, high), builder.add(to, I64(64 * half)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled
def write_block(total: Any, into: Any) -> None:
    """Rounds the first numbers of total [64] float32 to a row's outputs of a block, into [≤ 64] bfloat16."""
    if len(into) == BLOCK:
        round_block(total.ctypes.data, into.ctypes.data)
    else:
        for i in range(len(into)):
            into[i] = narrow(total[i], into)


@compiled
def _place(expert: Any, experts: Any) -> Any:
    return expert if 0 <= expert < experts else experts


@compiled
def _sort(chosen: Any, begins: Any, order: Any) -> None:
    """Sorts products by expert.

    chosen  [products] int64; a number of no expert comes after all others
    begins  [experts + 2] int64, written: where each expert's products begin in `order`, and where they end
    order   [products] int64, written
    """
    experts = len(begins) - 2
    begins[:] = 0
    for expert in chosen:
        begins[_place(expert, experts) + 1] += 1
    for expert in range(experts + 1):
        begins[expert + 1] += begins[expert]
    for product, expert in enumerate(chosen):
        place = _place(expert, experts)
        order[begins[place]] = product
        begins[place] += 1
    for expert in range(experts + 1, 0, -1):
        begins[expert] = begins[expert - 1]
    begins[0] = 0


@compiled
def next_task(claims: Any, thread: Any, threads: Any, tasks: Any) -> Any:
    """Claims a task: the next one of a thread's own range, or one of another thread's where its own are done.
    Returns -1 if none is left. Ranges are contiguous, so that a thread reads memory in order.

    claims  [8 · (1 + threads)] int64: claimed tasks of each range, in cache lines of their own
    """
    for step in range(threads):
        owner = (thread + step) % threads
        begin, end = owner * tasks // threads, (owner + 1) * tasks // threads
        if begin + claims[8 * (1 + owner)] < end:
            task = begin + fetch_add(claims, 8 * (1 + owner), 1)
            if task < end:
                return task
    return -1


@compiled
def plan_tasks(chosen: Any, blocks: Any, part: Any, begins: Any, order: Any, tasks: Any, out: Any) -> None:
    """Sorts products by expert, and counts tasks. Writes zeros for a number of no expert.

    chosen          address of [products] int64; 0: all of expert 0
    blocks          of an expert
    part            rows of a task
    begins, order   see `_sort`
    tasks           [experts + 1] int64, written: tasks of the experts before each
    out             [products, outputs]
    """
    experts, products = len(tasks) - 1, len(order)
    if chosen != 0:
        _sort(nb.carray(pointer_to(chosen), (products,), np.int64), begins, order)
        for place in range(begins[experts], products):
            out[order[place]] = 0
    else:
        begins[:] = products
        begins[0] = 0
        for product in range(products):
            order[product] = product
    tasks[0] = 0
    for expert in range(experts):
        parts = (begins[expert + 1] - begins[expert] + part - 1) // part
        tasks[expert + 1] = tasks[expert] + parts * blocks


@compiled
def place_of(task: Any, tasks: Any, blocks: Any) -> Any:
    """Returns the expert of a task, its block and its part. Parts of a block follow each other.

    tasks   see `plan_tasks`
    """
    expert = np.searchsorted(tasks, task, "right") - 1
    parts = (tasks[expert + 1] - tasks[expert]) // blocks
    return expert, (task - tasks[expert]) // parts, (task - tasks[expert]) % parts


def _work(jobs: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    job = nb.carray(jobs, (1,))[0]
    claims = nb.carray(pointer_to(job.claims), (8 * (1 + job.threads),), np.int64)
    out = nb.carray(pointer_to(job.out), (job.products, job.outputs), np.uint16)
    begins, order = np.empty(job.experts + 2, np.int64), np.empty(job.products, np.int64)
    tasks = np.empty(job.experts + 1, np.int64)
    plan_tasks(job.chosen, job.blocks, _PART, begins, order, tasks, out)
    rows, totals = np.empty(_PART, np.int64), np.empty((_PART, BLOCK), np.float32)
    thread = fetch_add(claims, 0, 1)
    while True:
        task = next_task(claims, thread, job.threads, tasks[job.experts])
        if task < 0:
            return
        expert, block, part = place_of(task, tasks, job.blocks)
        number = job.blocks * expert + block
        weight, begun, stride = job.weights + 256 * job.pairs * number, job.biases + 256 * number, 0
        begin = begins[expert] + _PART * part
        count = min(_PART, begins[expert + 1] - begin)
        for r in range(count):
            rows[r] = job.given + 4 * job.pairs * (order[begin + r] // job.choices)
        for pair in range(0, job.pairs, _PAIRS):
            pairs = min(_PAIRS, job.pairs - pair)
            for r in range(0, count, AT_ONCE):
                at = totals[r:].ctypes.data
                _add_products(
                    min(AT_ONCE, count - r),
                    rows[r:].ctypes.data,
                    4 * pair,
                    weight + 256 * pair,
                    pairs,
                    begun if stride == 0 else at,
                    stride,
                    at,
                    256 * pairs if r > 0 else _FAR if count >= AT_ONCE else _NEAR,
                )
            stride = 256
        for r in range(count):
            write_block(totals[r], out[order[begin + r], BLOCK * block : BLOCK * (block + 1)])


@cache
def _compiled() -> int:
    return c_function(_work, JOB)


class PackedProducts:
    """Products with packed weights. One thread at a time may use it."""

    def __init__(
        self,
        memory: int,
        shape: tuple[int, int, int],
        biases: Tensor | None,
        job: np.dtype[Any] = JOB,
        function: int | None = None,
    ) -> None:
        """Initialises products with weights of shape [experts, out, in] that lie packed at an address, which the
        caller keeps. biases: [experts, out]. `function` is compiled for `job`, which begins like `JOB`."""
        self.experts, self.out_features, self.in_features = shape
        blocks = -(-self.out_features // BLOCK)
        self._biases = torch.zeros(self.experts, blocks * BLOCK)
        if biases is not None:
            self._biases[:, : self.out_features] = biases
        self._most_threads = os.cpu_count() or 1
        self._claims = np.zeros(8 * (1 + self._most_threads), np.int64)
        self._claims_at = self._claims.ctypes.data
        self._job = np.zeros(1, job)
        self._job_at = self._job.ctypes.data
        self._job_bytes = memoryview(self._job.view(np.uint8))  # type: ignore[arg-type]
        sizes = self.experts, blocks, self.in_features // 2, self.out_features
        self._weights = *sizes, memory, self._biases.data_ptr()
        self._function = _compiled() if function is None else function

    def __call__(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Multiplies each row by the weights of the experts that were chosen for it.

        x       [rows, in] bfloat16
        chosen  [rows · choices] int64, contiguous: experts' numbers, all choices of a row one after the other. None:
                expert 0 for each row
        Returns [rows · choices, out] bfloat16: zeros for a number that no expert has, as some routers use.
        """
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] == self.in_features
        rows = x.contiguous()
        count = rows.numel() // self.in_features
        products = count if chosen is None else len(chosen)
        out = rows.new_empty(products, self.out_features)
        if not products:
            return out
        threads = min(torch.get_num_threads(), self._most_threads)
        self._claims[: 8 * (1 + threads)] = 0
        choices, chosen_at = (1, 0) if chosen is None else (products // count, chosen.data_ptr())
        assert choices * count == products
        addresses = chosen_at, rows.data_ptr(), out.data_ptr()
        _FIELDS.pack_into(
            self._job_bytes, 0, self._claims_at, threads, *self._weights, products, choices, *addresses
        )
        run_on_threads(self._function, self._job_at, threads)
        return out

    def record(self, stages: Stages, x: Tensor, out: Tensor) -> None:
        """Records the product of x [rows, in] by expert 0 into out [rows, out], both contiguous."""
        threads = min(torch.get_num_threads(), self._most_threads)
        addresses = 0, x.data_ptr(), out.data_ptr()
        _FIELDS.pack_into(self._job_bytes, 0, 0, threads, *self._weights, len(x), 1, *addresses)
        stages.add(self._function, self._job, "claims", 8 * (1 + threads))


class PackedLayers:
    """Linear layers of one shape with packed weights: the experts of a mixture, or a single layer."""

    def __init__(self, weights: Tensor, biases: Tensor | None) -> None:
        """Packs weights [experts, out, in] of bfloat16 with an even number of inputs. biases: [experts, out]"""
        experts, self._outputs, inputs = weights.shape
        self._packed = _pack(weights)
        self.nbytes = self._packed.nbytes + (0 if biases is None else biases.nbytes)
        self.multiply = PackedProducts(self._packed.data_ptr(), (experts, self._outputs, inputs), biases)

    def unpacked(self) -> Tensor:
        """Returns the weights [experts, out, in] in new memory, equal bit by bit."""
        return self._packed.transpose(2, 3).flatten(3).flatten(1, 2)[:, : self._outputs].contiguous()


def _pack(weights: Tensor) -> Tensor:
    """Packs weights [experts, out, in] → [experts, blocks, in / 2, 64, 2]. Outputs that fill up the last block are
    zeros."""
    experts, outputs, inputs = weights.shape
    blocks, pairs = -(-outputs // BLOCK), inputs // 2
    packed = torch.empty(experts, blocks, pairs, BLOCK, 2, dtype=torch.bfloat16)
    for weight, into in zip(weights, packed, strict=True):
        rest = BLOCK * blocks - outputs
        whole = nn.functional.pad(weight, (0, 0, 0, rest)) if rest else weight.contiguous()
        into.copy_(whole.view(blocks, BLOCK, pairs, 2).transpose(1, 2))
    return packed


def over_onednn(packed: Tensor, weight: Tensor, bias: Tensor | None) -> PackedProducts | None:
    """Returns products with oneDNN's packed form of a weight [out, in], which is read in place. The caller keeps the
    packed form.

    None: torch does not say where the form is, or it is not in the layout that the loops read. The two are compared
    number by number, because the layout is oneDNN's own affair.
    """
    outputs, inputs = weight.shape
    if not (hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")) or inputs % 2:
        return None
    expected = _pack(weight[None])
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_int16 * expected.numel()).from_address(address)
    if not torch.equal(torch.frombuffer(memory, dtype=torch.int16), expected.view(torch.int16).flatten()):
        return None
    return PackedProducts(address, (1, outputs, inputs), None if bias is None else bias[None])
