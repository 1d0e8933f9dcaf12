"""Products of one to three bfloat16 rows with a weight in oneDNN's packed layout, which is read in place.

A decode step reads every weight for a few rows, and its limit is the memory. On two cores with AVX512-BF16, oneDNN
itself reads a weight at 16 to 33 GB/s for one or two rows, these loops at 27 to 45; from four rows on oneDNN is as
fast. Its layout suits the instruction for pairs of bfloat16 as it is: blocks of outputs, and in a block, for each
pair of inputs, the pairs of all outputs side by side. So a weight is packed once, and few rows go to these loops.

A task is one block of outputs, whose weights are one stream. The sums of a row depend neither on other rows nor on
threads.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from rootstock.kernels.cpu.pair_products import add_pairs, has_pair_products, splat_at
from rootstock.kernels.cpu.threads import run_on_threads
from rootstock.kernels.cpu.vector_lanes import I64, INTS, LANES, fetch, load, store

FEW_ROWS = _FEW_ROWS = 3  # more rows are as fast by oneDNN

_BLOCK = 64  # outputs
_VECTORS = _BLOCK // LANES
_AHEAD = 16 << 10  # bytes between the products and the weights that are fetched into the second cache

JOB = np.dtype(
    [
        ("claimed", "i8"),  # address of an int64: blocks that threads have begun
        ("blocks", "i8"),
        ("pairs", "i8"),  # of inputs
        ("rows", "i8"),
        ("outputs", "i8"),
        ("given", "i8"),  # address of [rows, 2 · pairs] bfloat16
        ("weight", "i8"),  # address of [blocks, pairs, 64, 2] bfloat16
        ("bias", "i8"),  # address of [64 · blocks] float32
        ("out", "i8"),  # address of [rows, outputs] bfloat16
    ]
)
_FIELDS = struct.Struct("=9q")


def _multiply(count: int) -> Any:
    def multiply(
        typing: Any, rows: Any, row_bytes: Any, weight: Any, pairs: Any, bias: Any, totals: Any
    ) -> Any:
        """Multiplies `count` rows with one block.

        rows    address of rows of pairs, `row_bytes` apart
        weight  address of [pairs, 64] pairs
        bias    address of [64] float32
        totals  address of [count, 64] float32, written
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            rows, row_bytes, weight, pairs, bias, totals = given
            begins = [load(builder, builder.add(bias, I64(64 * v))) for v in range(_VECTORS)]
            sums = [[cgutils.alloca_once_value(builder, begin) for begin in begins] for _ in range(count)]
            at_rows = [builder.add(rows, builder.mul(row_bytes, I64(r))) for r in range(count)]
            with cgutils.for_range(builder, pairs, intp=I64) as loop:
                at = builder.add(weight, builder.shl(loop.index, I64(8)))
                along = builder.shl(loop.index, I64(2))
                columns = [load(builder, builder.add(at, I64(64 * v)), INTS) for v in range(_VECTORS)]
                for v in range(_VECTORS):
                    fetch(builder, builder.add(at, I64(_AHEAD + 64 * v)), 2)
                for row, of_row in zip(at_rows, sums, strict=True):
                    pair = splat_at(builder, builder.add(row, along))
                    for total, column in zip(of_row, columns, strict=True):
                        builder.store(add_pairs(builder, builder.load(total), pair, column), total)
            for r, of_row in enumerate(sums):
                for v, total in enumerate(of_row):
                    store(builder, builder.load(total), builder.add(totals, I64(256 * r + 64 * v)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return intrinsic(multiply)


_multiply_1, _multiply_2, _multiply_3 = (_multiply(count) for count in range(1, FEW_ROWS + 1))


@compiled
def _block(job: Any, block: Any, totals: Any) -> None:
    """Multiplies all rows with a block of outputs. totals [rows, 64] float32, written"""
    row_bytes, into = 4 * job.pairs, totals.ctypes.data
    weight, bias = job.weight + 256 * block * job.pairs, job.bias + 256 * block
    if job.rows == 1:
        _multiply_1(job.given, row_bytes, weight, job.pairs, bias, into)
    elif job.rows == 2:
        _multiply_2(job.given, row_bytes, weight, job.pairs, bias, into)
    else:
        _multiply_3(job.given, row_bytes, weight, job.pairs, bias, into)


def _work(jobs: Any) -> None:
    """Runs one thread's share of a job: claims blocks until none is left."""
    job = nb.carray(jobs, (1,))[0]
    claimed = nb.carray(pointer_to(job.claimed), (1,), np.int64)
    out = nb.carray(pointer_to(job.out), (job.rows, job.outputs), np.uint16)
    totals = np.empty((_FEW_ROWS, 64), np.float32)
    while True:
        block = fetch_add(claimed, 0, 1)
        if block >= job.blocks:
            return
        _block(job, block, totals)
        begin = block * 64
        columns = min(64, job.outputs - begin)
        for r in range(job.rows):
            into, total = out[r, begin : begin + columns], totals[r]
            for i in range(columns):
                into[i] = narrow(total[i], into)


@cache
def _compiled() -> int:
    return c_function(_work, JOB)


class FewRows:
    """Product of up to `FEW_ROWS` rows with one packed weight. One thread at a time may use it."""

    def __init__(self, memory: int, shape: tuple[int, int], bias: Tensor | None) -> None:
        """Initialises a product with a packed weight of shape [out, in] at an address. The caller keeps it."""
        self.out_features, self.in_features = shape
        blocks = -(-self.out_features // _BLOCK)
        self._bias = torch.zeros(blocks * _BLOCK)
        if bias is not None:
            self._bias[: self.out_features] = bias.float()
        self._claimed = np.zeros(1, np.int64)
        job = np.zeros(1, JOB)
        self._job, self._job_at = memoryview(job.view(np.uint8)), job.ctypes.data  # type: ignore[arg-type]
        self._before = (self._claimed.ctypes.data, blocks, self.in_features // 2)
        self._weight, self._bias_at = memory, self._bias.data_ptr()
        self.most_numbers = FEW_ROWS * self.in_features
        self._function = _compiled()

    def __call__(self, x: Tensor) -> Tensor:
        """Computes x […, in] of up to `most_numbers` numbers → […, out], contiguous bfloat16."""
        rows = x.contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        count = rows.numel() // self.in_features
        addresses = rows.data_ptr(), self._weight, self._bias_at, out.data_ptr()
        _FIELDS.pack_into(self._job, 0, *self._before, count, self.out_features, *addresses)
        self._claimed[0] = 0
        run_on_threads(self._function, self._job_at, torch.get_num_threads())
        return out


def for_few_rows(packed: Tensor, weight: Tensor, bias: Tensor | None) -> FewRows | None:
    """Returns the product of few rows with oneDNN's packed form of a weight [out, in] of bfloat16. The caller keeps
    the packed form.

    None: the processor has no products of pairs, torch does not say where the form is, or it is not in the layout
    that the loops read. The two are compared number by number, because the layout is oneDNN's own affair.
    """
    outputs, inputs = weight.shape
    blocks = -(-outputs // _BLOCK)
    if not (
        has_pair_products() and hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")
    ):
        return None
    if inputs % 2 or torch.ops.mkldnn._nbytes(packed) != 2 * blocks * _BLOCK * inputs:
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_int16 * (blocks * _BLOCK * inputs)).from_address(address)
    stored = torch.frombuffer(memory, dtype=torch.int16).view(blocks, inputs // 2, _BLOCK, 2)
    whole = outputs // _BLOCK * _BLOCK
    numbers = weight.detach().contiguous().view(torch.int16)
    rest = torch.zeros(blocks * _BLOCK - whole, inputs, dtype=torch.int16)
    rest[: outputs - whole] = numbers[whole:]
    expected = (numbers[:whole], stored[: whole // _BLOCK]), (rest, stored[whole // _BLOCK :])
    for part, in_blocks in expected:
        if not torch.equal(part.view(-1, _BLOCK, inputs // 2, 2).transpose(1, 2), in_blocks):
            return None
    return FewRows(address, (outputs, inputs), bias)
