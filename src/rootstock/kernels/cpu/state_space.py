"""Compiled loops for Mamba-2 mixers: convolution, state-space recurrence and gated norm in one call for a step.

The recurrence (Dao and Gu 2024, arXiv 2405.21060) keeps for each head a state S [head_dim, state_dim]. A token with
input x, time step Δ and vectors B and C of its group changes it to

    S ← exp(Δ · A) · S + Δ · x Bᵀ        and gives        S C + D · x

Each token is computed after the one before it, also in a prefill, for the same reason as in `gated_delta.py`: a row's
bits depend neither on the chunks of its prompt nor on other sequences or threads.

The recurrence's tasks are one sequence and a few heads of one group. When all of them have ended, the rows are gated
and normalised, and the convolutions' last inputs are written to the pool, from which the tasks had to read.
"""

from __future__ import annotations

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
    types,
    widen,
)
from rootstock.kernels.cpu.recurrent_loops import JOB_FIELDS, EntryPoints, RecurrentLoops
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
    load,
    splat,
    store,
    sum_of_lanes,
)

_ROWS = 4  # of a state that are computed together
_MOST_HEADS = 4  # of a task
_NORM_ROWS = 4  # that a thread claims
_RECURRENCE, _NORM = range(2)  # phases

JOB = np.dtype(
    [
        *JOB_FIELDS,  # rows: gates, inputs, B, C, time steps; states [heads, head_dim, state_dim]
        ("groups", "i8"),
        ("heads", "i8"),  # a multiple of `groups`
        ("heads_at_once", "i8"),  # of a task; divides the heads of a group
        ("head_dim", "i8"),
        ("state_dim", "i8"),
        ("norm_width", "i8"),  # columns that are normalised together; 0: none
        ("gate_first", "i8"),  # whether rows are gated before they are normalised, or after
        ("direct", "i8"),  # address of [heads] float32: D
        ("least_step", "f4"),  # limits of a time step
        ("most_step", "f4"),
        ("eps", "f4"),  # of the norm
    ]
)


# ---- one token and a head's state


@intrinsic  # type: ignore[untyped-decorator]
def _scan_step(
    typing: Any, state: Any, inputs: Any, b: Any, c: Any, out: Any, decay: Any, rows: Any, width: Any
) -> Any:
    """Computes one token for a head's state.

    state           address of [rows, width] float32, changed in place; multiples of `_ROWS` and `LANES`
    inputs, out     addresses of [rows] float32: Δ · x, and S C
    b, c            addresses of [width] float32
    decay           float32
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        state, inputs, b, c, out, decay, rows, width = given
        row_bytes = builder.shl(width, I64(2))
        kept = splat(builder, decay)
        totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(_ROWS)]
        with cgutils.for_range(builder, builder.lshr(rows, I64(2)), intp=I64) as block:
            first = builder.shl(block.index, I64(2))
            shares, places = [], []
            for r in range(_ROWS):
                row = builder.add(first, I64(r))
                at = builder.add(inputs, builder.shl(row, I64(2)))
                shares.append(splat(builder, builder.load(builder.inttoptr(at, F32.as_pointer()), align=4)))
                places.append(builder.add(state, builder.mul(row, row_bytes)))
                builder.store(ir.Constant(FLOATS, [0.0] * LANES), totals[r])
            with cgutils.for_range(builder, builder.lshr(width, I64(4)), intp=I64) as column:
                offset = builder.shl(column.index, I64(6))
                of_b, of_c = (load(builder, builder.add(vector, offset)) for vector in (b, c))
                for r in range(_ROWS):
                    place = builder.add(places[r], offset)
                    before = builder.fmul(load(builder, place), kept)
                    after = add_product(builder, before, of_b, shares[r])
                    store(builder, after, place)
                    builder.store(add_product(builder, builder.load(totals[r]), after, of_c), totals[r])
            for r in range(_ROWS):
                at = builder.add(out, builder.shl(builder.add(first, I64(r)), I64(2)))
                total = sum_of_lanes(builder, builder.load(totals[r]))
                builder.store(total, builder.inttoptr(at, F32.as_pointer()), align=4)
        return context.get_dummy_value()

    arguments = (*(types.int64,) * 5, types.float32, types.int64, types.int64)
    return types.void(*arguments), generate


# ---- the recurrence


@compiled
def _load_state(state: Any, has_state: Any, into: Any) -> None:
    """Copies state [head_dim, state_dim] into padded rows, or fills these with zeros."""
    head_dim, state_dim = state.shape
    for p in range(into.shape[0]):
        row = into[p]
        for n in range(row.shape[0]):
            row[n] = np.float32(0)
        if has_state and p < head_dim:
            for n in range(state_dim):
                row[n] = widen(state[p, n])


@compiled
def _store_state(given: Any, state: Any) -> None:
    head_dim, state_dim = state.shape
    for p in range(head_dim):
        row, into = given[p], state[p]
        for n in range(state_dim):
            into[n] = narrow(row[n], into)


@compiled
def _task(job: Any, sequence: Any, block: Any, thread: Any, element: Any, state_element: Any) -> None:
    """Computes one sequence and the heads of one block."""
    head_dim, state_dim, kernel, heads = job.head_dim, job.state_dim, job.kernel, job.heads_at_once
    before, inner, of_groups = kernel - 1, job.heads * job.head_dim, job.groups * job.state_dim
    channels = inner + 2 * of_groups
    padded, columns = (head_dim + _ROWS - 1) // _ROWS * _ROWS, (state_dim + LANES - 1) // LANES * LANES
    own = heads * head_dim
    first_head = block * heads
    group = first_head // (job.heads // job.groups)

    first_row, new, slot, has_state = sequence[0], sequence[1], sequence[2], sequence[3] != 0
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    out = nb.carray(pointer_to(job.out), (job.row_count, inner), element)
    conv = nb.carray(pointer_to(job.conv), (job.slots, channels, job.kept), element)[slot]
    shape = (job.slots, job.heads, head_dim, state_dim)
    states = nb.carray(pointer_to(job.states), shape, state_element)[slot]
    weight = nb.carray(pointer_to(job.conv_weight), (kernel, channels), np.float32)
    bias = nb.carray(pointer_to(job.conv_bias), (channels,), np.float32)
    decays = nb.carray(pointer_to(job.decay), (job.heads,), np.float32)
    time_bias = nb.carray(pointer_to(job.time_bias), (job.heads,), np.float32)
    direct = nb.carray(pointer_to(job.direct), (job.heads,), np.float32)

    x_channel = first_head * head_dim
    b_channel = inner + group * state_dim
    c_channel = inner + of_groups + group * state_dim
    x_end, b_end, c_end = x_channel + own, b_channel + state_dim, c_channel + state_dim

    at = job.scratch + 4 * thread * job.scratch_floats
    window_rows = before + PIECE
    x_window = float_rows(at, 0, window_rows, own)
    used = window_rows * own
    b_window = float_rows(at, used, window_rows, state_dim)
    used += window_rows * state_dim
    c_window = float_rows(at, used, window_rows, state_dim)
    used += window_rows * state_dim
    x = float_rows(at, used, PIECE, own)
    used += PIECE * own
    b = float_rows(at, used, PIECE, columns)
    used += PIECE * columns
    c = float_rows(at, used, PIECE, columns)
    used += PIECE * columns
    share = float_rows(at, used, 1, padded)[0]
    used += padded
    result = float_rows(at, used, 1, padded)[0]
    used += padded
    kept = nb.carray(pointer_to(at + 4 * used), (heads, padded, columns), np.float32)

    begin_window(conv[x_channel:x_end], has_state, x_window, before)
    begin_window(conv[b_channel:b_end], has_state, b_window, before)
    begin_window(conv[c_channel:c_end], has_state, c_window, before)
    for h in range(heads):
        _load_state(states[first_head + h], has_state, kept[h])
    for t in range(PIECE):
        for n in range(state_dim, columns):
            b[t, n] = np.float32(0)
            c[t, n] = np.float32(0)
    for p in range(head_dim, padded):
        share[p] = np.float32(0)

    for begin in range(0, new, PIECE):
        tokens, row = min(PIECE, new - begin), first_row + begin
        fill_window(rows, row, inner + x_channel, tokens, x_window, before)
        fill_window(rows, row, inner + b_channel, tokens, b_window, before)
        fill_window(rows, row, inner + c_channel, tokens, c_window, before)
        convolve_silu(x_window, weight[:, x_channel:x_end], bias[x_channel:x_end], tokens, x)
        convolve_silu(b_window, weight[:, b_channel:b_end], bias[b_channel:b_end], tokens, b)
        convolve_silu(c_window, weight[:, c_channel:c_end], bias[c_channel:c_end], tokens, c)
        for h in range(heads):
            head = first_head + h
            for t in range(tokens):
                step = np.float64(widen(rows[row + t, inner + channels + head])) + np.float64(time_bias[head])
                soft = np.float32(step if step > 20.0 else np.log1p(np.exp(step)))
                soft = min(max(soft, job.least_step), job.most_step)
                decay = np.float32(np.exp(np.float64(decays[head]) * np.float64(soft)))
                own_x = x[t, h * head_dim : (h + 1) * head_dim]
                for p in range(head_dim):
                    share[p] = soft * own_x[p]
                _scan_step(
                    kept[h].ctypes.data,
                    share.ctypes.data,
                    b[t].ctypes.data,
                    c[t].ctypes.data,
                    result.ctypes.data,
                    decay,
                    padded,
                    columns,
                )
                into = out[row + t, head * head_dim : (head + 1) * head_dim]
                for p in range(head_dim):
                    into[p] = narrow(result[p] + direct[head] * own_x[p], into)
        move_window(x_window, tokens, before)
        move_window(b_window, tokens, before)
        move_window(c_window, tokens, before)

    for h in range(heads):
        _store_state(kept[h], states[first_head + h])


# ---- after the recurrence


@compiled_exactly
def _widen_row(given: Any, row: Any) -> None:
    for i in range(row.shape[0]):
        row[i] = widen(given[i])


@compiled_exactly
def _gate(row: Any, gate: Any) -> None:
    for i in range(row.shape[0]):
        z = widen(gate[i])
        row[i] *= z * sigmoid(z)


@compiled_exactly
def _scale(row: Any, scale: Any, weight: Any) -> None:
    for i in range(row.shape[0]):
        row[i] *= scale * weight[i]


@compiled_exactly
def _narrow_row(row: Any, out: Any) -> None:
    for i in range(row.shape[0]):
        out[i] = narrow(row[i], out)


@compiled
def _norm_rows(job: Any, first: Any, end: Any, thread: Any, element: Any) -> None:
    """Gates rows and normalises them in place, `norm_width` columns at a time."""
    inner = job.heads * job.head_dim
    width = job.norm_width if job.norm_width > 0 else inner
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    out = nb.carray(pointer_to(job.out), (job.row_count, inner), element)
    weight = nb.carray(pointer_to(job.norm_weight), (inner,), np.float32)
    row = float_rows(job.scratch + 4 * thread * job.scratch_floats, 0, 1, width)[0]
    for r in range(first, end):
        for begin in range(0, inner, width):
            part, gate = out[r, begin : begin + width], rows[r, begin : begin + width]
            _widen_row(part, row)
            if job.gate_first != 0:
                _gate(row, gate)
            if job.norm_width > 0:
                mean = sum_of_squares(row) / np.float32(width)
                _scale(row, np.float32(1) / np.sqrt(mean + job.eps), weight[begin : begin + width])
            if job.gate_first == 0:
                _gate(row, gate)
            _narrow_row(row, part)


@compiled
def _keep_all(job: Any, sequence: Any, element: Any) -> None:
    inner = job.heads * job.head_dim
    channels = inner + 2 * job.groups * job.state_dim
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    conv = nb.carray(pointer_to(job.conv), (job.slots, channels, job.kept), element)
    keep_inputs(rows, sequence[0], inner, sequence[1], conv[sequence[2]], sequence[3] != 0)


@compiled
def _work(job: Any, element: Any, state_element: Any) -> None:
    """Runs one thread's share of a phase: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    sequences = nb.carray(pointer_to(job.sequences), (job.sequence_count, 4), np.int64)
    thread = fetch_add(claimed, 1, 1)
    blocks = job.heads // job.heads_at_once
    while thread < job.threads:
        task = fetch_add(claimed, 0, 1)
        if job.phase == _RECURRENCE:
            if task >= job.sequence_count * blocks:
                return
            _task(job, sequences[task // blocks], task % blocks, thread, element, state_element)
        elif task < job.sequence_count:
            _keep_all(job, sequences[task], element)
        else:
            first = (task - job.sequence_count) * _NORM_ROWS
            if first >= job.row_count:
                return
            _norm_rows(job, first, min(first + _NORM_ROWS, job.row_count), thread, element)


def _float32_scan_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.float32)


def _bfloat16_scan_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.uint16)


def _float32_scan_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.float32)


def _bfloat16_scan_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.uint16)


_ENTRY_POINTS: EntryPoints = {
    (torch.float32, torch.float32): _float32_scan_of_float32,
    (torch.float32, torch.bfloat16): _bfloat16_scan_of_float32,
    (torch.bfloat16, torch.float32): _float32_scan_of_bfloat16,
    (torch.bfloat16, torch.bfloat16): _bfloat16_scan_of_bfloat16,
}


# ---- public interface


@dataclass(frozen=True, slots=True)
class StateSpaceHeads:
    """Numbers of heads and groups, and their dimensions."""

    heads: int  # a multiple of `groups`
    groups: int
    head_dim: int
    state_dim: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Returns the channels of the convolution: inputs, B, C."""
        return self.inner + 2 * self.groups * self.state_dim


@dataclass(frozen=True, slots=True, eq=False)
class StateSpaceWeights:
    """Weights between the linear layers, float32."""

    conv: Tensor  # [channels, kernel]
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [heads]: A
    time_bias: Tensor  # [heads]
    direct: Tensor  # [heads]: D
    norm: Tensor | None  # [heads · head_dim]; None: rows are only gated
    norm_width: int = 0  # columns that are normalised together
    eps: float = 0.0
    gate_first: bool = True  # rows are gated before they are normalised
    step_limits: tuple[float, float] = (0.0, float("inf"))


class StateSpaceLoops(RecurrentLoops):
    """Loops of one mixer. States are [slots, heads, head_dim, state_dim], results heads · head_dim.

    Rows have the gates, inputs, B, C and time steps of all heads, in this order.
    """

    def __init__(self, heads: StateSpaceHeads, weights: StateSpaceWeights) -> None:
        """Raises ValueError for sizes that the loops do not serve."""
        of_group, rest = divmod(heads.heads, heads.groups)
        norm_width = 0 if weights.norm is None else weights.norm_width
        if rest or (norm_width and heads.inner % norm_width):
            raise ValueError(f"no loops for {heads}, normalised by {norm_width} columns")
        at_once = _heads_at_once(of_group)
        super().__init__(
            _ENTRY_POINTS,
            JOB,
            phases=2,
            tasks=heads.heads // at_once,
            inner=heads.inner,
            state=heads.inner * heads.state_dim,
            scratch=_scratch_floats(heads, at_once, weights.conv.shape[1]),
            conv=weights.conv,
            conv_bias=weights.conv_bias,
        )
        self._heads = heads
        self._set(groups=heads.groups, heads=heads.heads, heads_at_once=at_once)
        self._set(head_dim=heads.head_dim, state_dim=heads.state_dim)
        self._set(norm_width=norm_width, eps=weights.eps, gate_first=weights.gate_first)
        self._set(decay=self._keep(weights.decay), time_bias=self._keep(weights.time_bias))
        self._set(direct=self._keep(weights.direct))
        if weights.norm is not None:
            self._set(norm_weight=self._keep(weights.norm))
        least, most = weights.step_limits
        self._set(least_step=least, most_step=most)

    def _accepts(self, rows: Tensor, states: Tensor) -> bool:
        heads = self._heads
        width = heads.inner + heads.channels + heads.heads
        return rows.shape[1] == width and states.shape[1:] == (heads.heads, heads.head_dim, heads.state_dim)


def _heads_at_once(of_group: int) -> int:
    """Returns the heads of a task: more share the convolution of B and C, fewer give threads more tasks."""
    return max(n for n in range(1, _MOST_HEADS + 1) if of_group % n == 0)


def _scratch_floats(heads: StateSpaceHeads, at_once: int, kernel: int) -> int:
    """Returns the scratch memory of one thread, as `_task` and `_norm_rows` divide it."""
    padded, columns = -(-heads.head_dim // _ROWS) * _ROWS, -(-heads.state_dim // LANES) * LANES
    own = at_once * heads.head_dim
    windows = (kernel - 1 + PIECE) * (own + 2 * heads.state_dim)
    piece = PIECE * (own + 2 * columns) + 2 * padded
    return max(windows + piece + at_once * padded * columns, heads.inner)
