"""Compiled loops for Mamba-1 mixers: the convolution, and the selective scan with its gate, for a whole step.

The scan (Gu and Dao 2023, arXiv 2312.00752) keeps for each channel c a state S_c [state_dim]. A token with input x,
time steps Δ and vectors B and C changes it to

    S_c ← exp(Δ_c · A_c) · S_c + Δ_c · x_c · B        and gives        S_c · C + D_c · x_c

where Δ, B and C are linear functions of the convolved inputs. The loops are therefore two phases, with these linear
layers between them. Each token is computed after the one before it, also in a prefill, for the same reason as in
`gated_delta.py`: a row's bits depend neither on the chunks of its prompt nor on other sequences or threads.

A task is one sequence and some of its channels. In scratch memory the states of channels lie side by side, so that
vectors are of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from rootstock.kernels.cpu.compiler import (
    cgutils,
    compiled,
    compiled_exactly,
    fetch_add,
    intrinsic,
    narrow,
    nb,
    pointer_to,
    sigmoid,
    softplus,
    types,
    widen,
)
from rootstock.kernels.cpu.recurrent_loops import JOB_FIELDS, EntryPoints, RecurrentLoops, scratch_rows
from rootstock.kernels.cpu.short_convolution import (
    PIECE,
    begin_window,
    convolve_silu,
    fill_window,
    float_rows,
    keep_inputs,
    move_window,
    sum_of_squares,
)
from rootstock.kernels.cpu.vector_lanes import (
    F32,
    FLOATS,
    I64,
    LANES,
    add_product,
    exp,
    load,
    splat,
    store,
)

_CONVOLVED, _SCANNED = 16 * LANES, 4 * LANES  # channels of a task in each phase
_CONVOLUTION, _SCAN = range(2)  # phases

JOB = np.dtype(
    [
        *JOB_FIELDS,  # rows: inputs and gates; decay [state_dim, padded channels]; states [channels, state_dim]
        ("channels", "i8"),
        ("padded", "i8"),  # channels, up to a multiple of `LANES`
        ("state_dim", "i8"),
        ("convolved", "i8"),  # address of [row_count, channels]
        ("steps", "i8"),  # address of [row_count, channels], before their softplus
        (
            "parameters",
            "i8",
        ),  # address of [row_count, parameter_width], of which the last columns are B and C
        ("parameter_width", "i8"),
        ("direct", "i8"),  # addresses of float32: [channels]: D
        ("b_norm", "i8"),  # [state_dim]; 0: B is not normalised
        ("c_norm", "i8"),
        ("eps", "f4"),  # of these norms
    ]
)


# ---- one token and some channels


@intrinsic  # type: ignore[untyped-decorator]
def _scan_token(
    typing: Any,
    state: Any,
    decays: Any,
    steps: Any,
    shares: Any,
    b: Any,
    c: Any,
    out: Any,
    state_dim: Any,
    width: Any,
    padded: Any,
) -> Any:
    """Computes one token for some channels.

    state           address of [state_dim, width] float32, changed in place; `width` is a multiple of `LANES`
    decays          address of float32: A of the same channels, in rows of `padded`
    steps, shares   addresses of [width] float32: Δ, and Δ · x
    b, c            addresses of [state_dim] float32
    out             address of [width] float32: S · C
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        state, decays, steps, shares, b, c, out, state_dim, width, padded = given
        total = cgutils.alloca_once(builder, FLOATS)

        def number(address: Any, index: Any) -> Any:
            at = builder.add(address, builder.shl(index, I64(2)))
            return splat(builder, builder.load(builder.inttoptr(at, F32.as_pointer()), align=4))

        with cgutils.for_range(builder, builder.lshr(width, I64(4)), intp=I64) as vector:
            offset = builder.shl(vector.index, I64(6))
            step, share = (load(builder, builder.add(row, offset)) for row in (steps, shares))
            builder.store(ir.Constant(FLOATS, [0.0] * LANES), total)
            with cgutils.for_range(builder, state_dim, intp=I64) as row:
                n = row.index
                place = builder.add(builder.add(state, offset), builder.shl(builder.mul(n, width), I64(2)))
                rates = builder.add(builder.add(decays, offset), builder.shl(builder.mul(n, padded), I64(2)))
                decay = exp(builder, builder.fmul(step, load(builder, rates)))
                before = builder.fmul(load(builder, place), decay)
                after = add_product(builder, before, share, number(b, n))
                store(builder, after, place)
                builder.store(add_product(builder, builder.load(total), after, number(c, n)), total)
            store(builder, builder.load(total), builder.add(out, offset))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), generate


# ---- the two phases


@compiled_exactly
def _narrow_rows(given: Any, tokens: Any, out: Any, row: Any) -> None:
    for t in range(tokens):
        into = out[row + t]
        for i in range(into.shape[0]):
            into[i] = narrow(given[t, i], into)


@compiled
def _convolve_task(job: Any, sequence: Any, block: Any, thread: Any, element: Any) -> None:
    """Computes the convolution of one sequence and one block of channels."""
    channels, kernel = job.channels, job.kernel
    begin_channel = block * _CONVOLVED
    end_channel = min(begin_channel + _CONVOLVED, channels)
    own, before = end_channel - begin_channel, kernel - 1
    first_row, new, slot, has_state = sequence[0], sequence[1], sequence[2], sequence[3] != 0
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    convolved = nb.carray(pointer_to(job.convolved), (job.row_count, channels), element)
    conv = nb.carray(pointer_to(job.conv), (job.slots, channels, job.kept), element)[slot]
    state = conv[begin_channel:end_channel]
    weight = nb.carray(pointer_to(job.conv_weight), (kernel, channels), np.float32)
    weight = weight[:, begin_channel:end_channel]
    bias = nb.carray(pointer_to(job.conv_bias), (channels,), np.float32)[begin_channel:end_channel]

    at = job.scratch + 4 * thread * job.scratch_floats
    window = float_rows(at, 0, before + PIECE, own)
    mixed = float_rows(at, (before + PIECE) * own, PIECE, own)
    begin_window(state, has_state, window, before)
    for begin in range(0, new, PIECE):
        tokens, row = min(PIECE, new - begin), first_row + begin
        fill_window(rows, row, begin_channel, tokens, window, before)
        convolve_silu(window, weight, bias, tokens, mixed)
        _narrow_rows(mixed, tokens, convolved[:, begin_channel:end_channel], row)
        move_window(window, tokens, before)
    keep_inputs(rows, first_row, begin_channel, new, state, has_state)


@compiled
def _load_states(states: Any, has_state: Any, tile: Any) -> None:
    """Copies states [channels, state_dim] to a tile [state_dim, width], or fills it with zeros."""
    channels, state_dim = states.shape
    for n in range(state_dim):
        for i in range(tile.shape[1]):
            tile[n, i] = np.float32(0)
    if has_state:
        for i in range(channels):
            for n in range(state_dim):
                tile[n, i] = widen(states[i, n])


@compiled
def _store_states(tile: Any, states: Any) -> None:
    channels, state_dim = states.shape
    for i in range(channels):
        into = states[i]
        for n in range(state_dim):
            into[n] = narrow(tile[n, i], into)


@compiled_exactly
def _widen_steps(given: Any, inputs: Any, steps: Any, shares: Any) -> None:
    for i in range(given.shape[0]):
        steps[i] = softplus(widen(given[i]))
        shares[i] = steps[i] * widen(inputs[i])


@compiled_exactly
def _widen_vector(given: Any, scale: Any, weight: Any, vector: Any) -> None:
    for n in range(given.shape[0]):
        vector[n] = widen(given[n]) * scale * weight[n]


@compiled
def _vector(given: Any, norm: Any, eps: Any, vector: Any) -> None:
    """Widens B or C, and normalises it if there is a norm, the address of its weight."""
    for n in range(given.shape[0]):
        vector[n] = widen(given[n])
    if norm != 0:
        scale = np.float32(1) / np.sqrt(sum_of_squares(vector) / np.float32(given.shape[0]) + eps)
        weight = nb.carray(pointer_to(norm), (given.shape[0],), np.float32)
        _widen_vector(given, scale, weight, vector)


@compiled_exactly
def _gate(read: Any, direct: Any, inputs: Any, gate: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        z = widen(gate[i])
        out[i] = narrow((read[i] + direct[i] * widen(inputs[i])) * (z * sigmoid(z)), out)


@compiled
def _scan_task(job: Any, sequence: Any, block: Any, thread: Any, element: Any, state_element: Any) -> None:
    """Computes the scan of one sequence and one block of channels."""
    channels, state_dim = job.channels, job.state_dim
    begin = block * _SCANNED
    end = min(begin + _SCANNED, channels)
    width = (end - begin + LANES - 1) // LANES * LANES
    first_row, new, slot, has_state = sequence[0], sequence[1], sequence[2], sequence[3] != 0
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    inputs = nb.carray(pointer_to(job.convolved), (job.row_count, channels), element)
    given_steps = nb.carray(pointer_to(job.steps), (job.row_count, channels), element)
    parameters = nb.carray(pointer_to(job.parameters), (job.row_count, job.parameter_width), element)
    out = nb.carray(pointer_to(job.out), (job.row_count, channels), element)
    states = nb.carray(pointer_to(job.states), (job.slots, channels, state_dim), state_element)[slot]
    direct = nb.carray(pointer_to(job.direct), (channels,), np.float32)[begin:end]

    at = job.scratch + 4 * thread * job.scratch_floats
    tile = float_rows(at, 0, state_dim, width)
    channel_rows = float_rows(at, state_dim * width, 3, width)
    steps, shares, read = channel_rows[0], channel_rows[1], channel_rows[2]
    vectors = float_rows(at, (state_dim + 3) * width, 2, state_dim)
    b, c = vectors[0], vectors[1]
    _load_states(states[begin:end], has_state, tile)
    for i in range(end - begin, width):
        steps[i] = np.float32(0)
        shares[i] = np.float32(0)
    b_at = job.parameter_width - 2 * state_dim
    for row in range(first_row, first_row + new):
        x = inputs[row, begin:end]
        _widen_steps(given_steps[row, begin:end], x, steps, shares)
        _vector(parameters[row, b_at : b_at + state_dim], job.b_norm, job.eps, b)
        _vector(parameters[row, b_at + state_dim :], job.c_norm, job.eps, c)
        _scan_token(
            tile.ctypes.data,
            job.decay + 4 * begin,
            steps.ctypes.data,
            shares.ctypes.data,
            b.ctypes.data,
            c.ctypes.data,
            read.ctypes.data,
            state_dim,
            width,
            job.padded,
        )
        _gate(read, direct, x, rows[row, channels + begin : channels + end], out[row, begin:end])
    _store_states(tile, states[begin:end])


@compiled
def _work(job: Any, element: Any, state_element: Any) -> None:
    """Runs one thread's share of a phase: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    sequences = nb.carray(pointer_to(job.sequences), (job.sequence_count, 4), np.int64)
    at_once = _CONVOLVED if job.phase == _CONVOLUTION else _SCANNED
    blocks = (job.channels + at_once - 1) // at_once
    thread = fetch_add(claimed, 1, 1)
    while thread < job.threads:
        task = fetch_add(claimed, 0, 1)
        if task >= job.sequence_count * blocks:
            return
        if job.phase == _CONVOLUTION:
            _convolve_task(job, sequences[task // blocks], task % blocks, thread, element)
        else:
            _scan_task(job, sequences[task // blocks], task % blocks, thread, element, state_element)


def _float32_channels_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.float32)


def _bfloat16_channels_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.uint16)


def _float32_channels_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.float32)


def _bfloat16_channels_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.uint16)


_ENTRY_POINTS: EntryPoints = {
    (torch.float32, torch.float32): _float32_channels_of_float32,
    (torch.float32, torch.bfloat16): _bfloat16_channels_of_float32,
    (torch.bfloat16, torch.float32): _float32_channels_of_bfloat16,
    (torch.bfloat16, torch.bfloat16): _bfloat16_channels_of_bfloat16,
}


# ---- public interface


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScanWeights:
    """Weights between the linear layers, float32."""

    conv: Tensor  # [channels, kernel]
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [channels, state_dim]: A
    direct: Tensor  # [channels]: D
    norms: tuple[Tensor, Tensor] | None = None  # [state_dim] of B and of C
    eps: float = 0.0


ProjectSteps = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Linear layers between convolution and scan: convolved [rows, channels] → time steps before their softplus [rows,
channels], and parameters [rows, … + 2 · state_dim], of which the last columns are B and C. Both are contiguous."""


class SelectiveScanLoops(RecurrentLoops):
    """Loops of one mixer. States are [slots, channels, state_dim]. Rows have the inputs of all channels, then the
    gates."""

    def __init__(self, weights: SelectiveScanWeights, project: ProjectSteps) -> None:
        """Raises ValueError for a convolution that the loops do not serve."""
        channels, state_dim = weights.decay.shape
        of_convolution = (weights.conv.shape[1] - 1 + 2 * PIECE) * min(channels, _CONVOLVED)
        super().__init__(
            _ENTRY_POINTS,
            JOB,
            phases=2,
            tasks=-(-channels // _SCANNED),
            inner=channels,
            state=channels * state_dim,
            scratch=max(of_convolution, (state_dim + 3) * _SCANNED + 2 * state_dim),
            conv=weights.conv,
            conv_bias=weights.conv_bias,
        )
        self._project, self._state_dim = project, state_dim
        self._rows: list[Tensor] = []  # the job has the addresses of those of the step that runs
        padded = -(-channels // LANES) * LANES
        decay = torch.nn.functional.pad(weights.decay.float().t(), (0, padded - channels))
        self._set(channels=channels, padded=padded, state_dim=state_dim, eps=weights.eps)
        self._set(decay=self._keep(decay), direct=self._keep(weights.direct))
        if weights.norms is not None:
            b_norm, c_norm = map(self._keep, weights.norms)
            self._set(b_norm=b_norm, c_norm=c_norm)

    def _accepts(self, rows: Tensor, states: Tensor) -> bool:
        return rows.shape[1] == 2 * self.inner and states.shape[1:] == (self.inner, self._state_dim)

    def _prepare(self, phase: int, rows: Tensor) -> None:
        super()._prepare(phase, rows)
        if phase == _CONVOLUTION:
            self._rows = [scratch_rows("convolved", len(rows), self.inner, rows.dtype)]
            self._set(convolved=self._rows[0].data_ptr())
            return
        steps, parameters = self._project(self._rows[0])
        assert all(given.is_contiguous() and given.dtype == rows.dtype for given in (steps, parameters))
        assert steps.shape == (len(rows), self.inner)
        assert len(parameters) == len(rows)
        self._rows += [steps, parameters]
        self._set(steps=steps.data_ptr(), parameters=parameters.data_ptr())
        self._set(parameter_width=parameters.shape[1])
