"""Compiled loops for mixers that are a short convolution between two gates (LFM2, Liquid AI 2025, arXiv 2511.23404).

A token's row has B, C and x of every channel. The convolution reads the last products B · x of its channel, and its
result is multiplied by C. The state of a sequence is the last products, in the rows' dtype: they are rounded to it
before they are read, so a row's bits do not depend on the chunks of its prompt.

A task is one sequence and some of its channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock.kernels.cpu.compiler import (
    compiled,
    compiled_exactly,
    fetch_add,
    narrow,
    nb,
    pointer_to,
    widen,
)
from rootstock.kernels.cpu.recurrent_loops import JOB_FIELDS, EntryPoints, RecurrentLoops
from rootstock.kernels.cpu.short_convolution import (
    PIECE,
    begin_window,
    convolve,
    float_rows,
    keep_inputs,
    move_window,
)

_CHANNELS = 256  # of a task

JOB = np.dtype([*JOB_FIELDS, ("channels", "i8")])  # rows: B, C and x of all channels


@compiled_exactly
def _multiply(b: Any, x: Any, window: Any, kept: Any) -> None:
    """Writes the products of a token to its row of the window, rounded as a state of kept's dtype is."""
    for c in range(window.shape[0]):
        kept[c] = narrow(widen(b[c]) * widen(x[c]), kept)
        window[c] = widen(kept[c])


@compiled_exactly
def _gate(mixed: Any, gate: Any, out: Any) -> None:
    for c in range(out.shape[0]):
        out[c] = narrow(mixed[c] * widen(gate[c]), out)


@compiled
def _task(job: Any, sequence: Any, block: Any, thread: Any, element: Any) -> None:
    """Computes one sequence and one block of channels."""
    channels, kernel = job.channels, job.kernel
    begin_channel = block * _CHANNELS
    end_channel = min(begin_channel + _CHANNELS, channels)
    own, before = end_channel - begin_channel, kernel - 1
    first_row, new, slot, has_state = sequence[0], sequence[1], sequence[2], sequence[3] != 0
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    out = nb.carray(pointer_to(job.out), (job.row_count, channels), element)
    conv = nb.carray(pointer_to(job.conv), (job.slots, channels, job.kept), element)[slot]
    state = conv[begin_channel:end_channel]
    weight = nb.carray(pointer_to(job.conv_weight), (kernel, channels), np.float32)
    weight = weight[:, begin_channel:end_channel]
    bias = nb.carray(pointer_to(job.conv_bias), (channels,), np.float32)[begin_channel:end_channel]

    at = job.scratch + 4 * thread * job.scratch_floats
    window = float_rows(at, 0, before + PIECE, own)
    mixed = float_rows(at, (before + PIECE) * own, PIECE, own)
    products = nb.carray(pointer_to(at + 4 * (before + 2 * PIECE) * own), (PIECE, own), element)
    begin_window(state, has_state, window, before)
    for begin in range(0, new, PIECE):
        tokens, row = min(PIECE, new - begin), first_row + begin
        for t in range(tokens):
            given = rows[row + t]
            b = given[begin_channel:end_channel]
            x = given[2 * channels + begin_channel : 2 * channels + end_channel]
            _multiply(b, x, window[before + t], products[t])
        convolve(window, weight, bias, tokens, mixed)
        for t in range(tokens):
            gate = rows[row + t, channels + begin_channel : channels + end_channel]
            _gate(mixed[t], gate, out[row + t, begin_channel:end_channel])
        keep_inputs(products, 0, 0, tokens, state, has_state or begin > 0)
        move_window(window, tokens, before)


@compiled
def _work(job: Any, element: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    sequences = nb.carray(pointer_to(job.sequences), (job.sequence_count, 4), np.int64)
    blocks = (job.channels + _CHANNELS - 1) // _CHANNELS
    thread = fetch_add(claimed, 1, 1)
    while thread < job.threads:
        task = fetch_add(claimed, 0, 1)
        if task >= job.sequence_count * blocks:
            return
        _task(job, sequences[task // blocks], task % blocks, thread, element)


def _gated_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32)


def _gated_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16)


_ENTRY_POINTS: EntryPoints = {
    (torch.float32, torch.float32): _gated_float32,
    (torch.bfloat16, torch.bfloat16): _gated_bfloat16,
}


# ---- public interface


class GatedConvolutionLoops(RecurrentLoops):
    """Loops of one mixer. Rows have B, C and x of all channels; the states are the convolution's alone."""

    def __init__(self, conv: Tensor, conv_bias: Tensor | None) -> None:
        """Initialises loops with weights conv [channels, kernel] and conv_bias [channels]. Raises ValueError for a
        convolution that the loops do not serve."""
        channels, kernel = conv.shape
        own = min(channels, _CHANNELS)
        super().__init__(
            _ENTRY_POINTS,
            JOB,
            tasks=-(-channels // _CHANNELS),
            inner=channels,
            state=channels * kernel,
            scratch=(kernel - 1 + 3 * PIECE) * own,
            conv=conv,
            conv_bias=conv_bias,
        )
        self._set(channels=channels)

    def _accepts(self, rows: Tensor, states: Tensor) -> bool:
        return rows.shape[1] == 3 * self.inner
