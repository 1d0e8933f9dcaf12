"""Compiled loops for mixers of the gated delta rule: convolution, recurrence and gated norm in one call for a step.

The rule (Yang et al. 2024, arXiv 2412.06464) keeps for each value head a state S [key_dim, value_dim]. A token with
key k, query q, value v, decay a and strength b changes it to

    S ← a · S + k (b · (v - a · Sᵀk))ᵀ        and gives        Sᵀq

Kimi's delta rule (arXiv 2510.26692) has a decay for each key channel: a · S is then diag(a) S.

Each token is computed after the one before it, also in a prefill: 32 columns of a state stay in the processor's first
cache while all tokens of a piece pass over them, which takes a fraction of the time of the linear layers around. A
row's bits therefore depend neither on the chunks of its prompt nor on other sequences or threads. Forms that multiply
matrices by chunks (as in flash-linear-attention) depend on the chunks.

A task is one sequence and one key head with its value heads. Threads claim tasks. A task reads states from their
slots in the pool and writes them there.
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
    exp,
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
from rootstock.kernels.cpu.vector_lanes import F32, FLOATS, I64, LANES, add_product, load, splat, store

_COLUMNS = 2 * LANES  # of a state that are computed together

JOB = np.dtype(
    [
        *JOB_FIELDS,  # out has key_heads · group · value_dim columns, states [key_heads · group, key_dim, value_dim]
        ("key_heads", "i8"),
        ("group", "i8"),  # value heads of a key head
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        # First column of a key head's share of the rows, and the distance to the next key head's, for each part:
        *((f"{part}_{place}", "i8") for part in "qkvzba" for place in ("at", "step")),
        ("gates", "i8"),  # address of [row_count, gate_width] for part z
        ("gate_width", "i8"),
        ("time_steps", "i8"),  # address of [row_count, time_step_width] for part a
        ("time_step_width", "i8"),
        ("by_channel", "i8"),  # whether each key channel has a decay
        ("sigmoid_gate", "i8"),  # the gate is sigmoid(z), else silu(z)
        ("least_decay", "f4"),  # logarithm of the least decay; 0: there is none
        ("strength", "f4"),  # factor of b
        ("eps", "f4"),  # of the norm
    ]
)


# ---- one token and 32 columns of a state


@intrinsic  # type: ignore[untyped-decorator]
def _delta_step(
    typing: Any,
    tile: Any,
    key: Any,
    query: Any,
    decay: Any,
    decayed: Any,
    value: Any,
    out: Any,
    strength: Any,
    dim: Any,
) -> Any:
    """Computes one token for 32 columns of a state.

    tile            address of [dim, 32] float32, changed in place; `dim` is even
    key, query      addresses of [dim] float32
    decay, decayed  addresses of [dim] float32: a, and a · k
    value, out      addresses of [32] float32
    strength        float32
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        tile, key, query, decay, decayed, value, out, strength, dim = given
        half = builder.lshr(dim, I64(1))
        zero = ir.Constant(FLOATS, [0.0] * LANES)

        def number(address: Any, index: Any) -> Any:
            at = builder.add(address, builder.shl(index, I64(2)))
            return splat(builder, builder.load(builder.inttoptr(at, F32.as_pointer()), align=4))

        def place(row: Any, vector: int) -> Any:
            return builder.add(tile, builder.add(builder.shl(row, I64(7)), I64(vector * 4 * LANES)))

        def totals() -> list[Any]:
            # Even and odd rows have sums of their own: a chain of dependent additions is half as long.
            made = [cgutils.alloca_once(builder, FLOATS) for _ in range(4)]
            for one in made:
                builder.store(zero, one)
            return made

        def sum_of(parts: list[Any], vector: int) -> Any:
            return builder.fadd(builder.load(parts[vector]), builder.load(parts[2 + vector]))

        strengths = splat(builder, strength)
        seen = totals()
        with cgutils.for_range(builder, half, intp=I64) as loop:
            for odd in range(2):
                row = builder.add(builder.shl(loop.index, I64(1)), I64(odd))
                k = number(decayed, row)
                for vector in range(2):
                    total = seen[2 * odd + vector]
                    state = load(builder, place(row, vector))
                    builder.store(add_product(builder, builder.load(total), state, k), total)
        deltas = []
        for vector in range(2):
            own = load(builder, builder.add(value, I64(vector * 4 * LANES)))
            deltas.append(builder.fmul(builder.fsub(own, sum_of(seen, vector)), strengths))
        read = totals()
        with cgutils.for_range(builder, half, intp=I64) as loop:
            for odd in range(2):
                row = builder.add(builder.shl(loop.index, I64(1)), I64(odd))
                k, q, a = (number(vector, row) for vector in (key, query, decay))
                for vector in range(2):
                    total = read[2 * odd + vector]
                    kept = builder.fmul(load(builder, place(row, vector)), a)
                    state = add_product(builder, kept, k, deltas[vector])
                    store(builder, state, place(row, vector))
                    builder.store(add_product(builder, builder.load(total), state, q), total)
        for vector in range(2):
            store(builder, sum_of(read, vector), builder.add(out, I64(vector * 4 * LANES)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7, types.float32, types.int64), generate


# ---- parts of a task


@compiled_exactly
def _scale(row: Any, factor: Any) -> None:
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled_exactly
def _norm_and_gate(row: Any, scale: Any, weight: Any, gate: Any, is_sigmoid: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        z = widen(gate[i])
        out[i] = narrow(row[i] * scale * weight[i] * ((np.float32(1) if is_sigmoid else z) * sigmoid(z)), out)


@compiled_exactly
def _decay_channels(steps: Any, bias: Any, rate: Any, least: Any, decay: Any) -> None:
    """Computes decays exp(rate · softplus(step)), or between e^least and 1: exp(least · sigmoid(-rate · step))."""
    if least < 0:
        for i in range(bias.shape[0]):
            decay[i] = exp(least * sigmoid(-rate * (widen(steps[i]) + bias[i])))
    else:
        for i in range(bias.shape[0]):
            decay[i] = exp(rate * softplus(widen(steps[i]) + bias[i]))


@compiled_exactly
def _multiply(a: Any, b: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = a[i] * b[i]


@compiled
def _load_state(state: Any, has_state: Any, tiles: Any) -> None:
    """Copies state [key_dim, value_dim] to tiles [n, even key_dim, 32], or fills these with zeros."""
    key_dim, value_dim = state.shape
    for n in range(tiles.shape[0]):
        first = n * _COLUMNS
        columns = min(_COLUMNS, value_dim - first)
        for i in range(tiles.shape[1]):
            into = tiles[n, i]
            if has_state and i < key_dim:
                given = state[i, first:]
                for j in range(columns):
                    into[j] = widen(given[j])
                for j in range(columns, _COLUMNS):
                    into[j] = np.float32(0)
            else:
                for j in range(_COLUMNS):
                    into[j] = np.float32(0)


@compiled
def _store_state(tiles: Any, state: Any) -> None:
    key_dim, value_dim = state.shape
    for n in range(tiles.shape[0]):
        first = n * _COLUMNS
        columns = min(_COLUMNS, value_dim - first)
        for i in range(key_dim):
            given = tiles[n, i]
            into = state[i, first:]
            for j in range(columns):
                into[j] = narrow(given[j], into)


@compiled
def _task(job: Any, sequence: Any, head: Any, thread: Any, element: Any, state_element: Any) -> None:
    """Computes one sequence and one key head with its value heads."""
    key_dim, value_dim, group, kernel = job.key_dim, job.value_dim, job.group, job.kernel
    value_heads, before = job.key_heads * group, kernel - 1
    channels = 2 * job.key_heads * key_dim + value_heads * value_dim
    even, parts = (key_dim + 1) // 2 * 2, (value_dim + _COLUMNS - 1) // _COLUMNS
    padded = parts * _COLUMNS

    first_row, new, slot, has_state = sequence[0], sequence[1], sequence[2], sequence[3] != 0
    rows = nb.carray(pointer_to(job.rows), (job.row_count, job.width), element)
    out = nb.carray(pointer_to(job.out), (job.row_count, value_heads * value_dim), element)
    conv = nb.carray(pointer_to(job.conv), (job.slots, channels, job.kept), element)[slot]
    states = nb.carray(pointer_to(job.states), (job.slots, value_heads, key_dim, value_dim), state_element)[
        slot
    ]
    weight = nb.carray(pointer_to(job.conv_weight), (kernel, channels), np.float32)
    bias = nb.carray(pointer_to(job.conv_bias), (channels,), np.float32)
    decays = nb.carray(pointer_to(job.decay), (value_heads,), np.float32)
    of_step = key_dim if job.by_channel != 0 else 1
    time_bias = nb.carray(pointer_to(job.time_bias), (value_heads, of_step), np.float32)
    gates = nb.carray(pointer_to(job.gates), (job.row_count, job.gate_width), element)
    time_steps = nb.carray(pointer_to(job.time_steps), (job.row_count, job.time_step_width), element)
    norm_weight = nb.carray(pointer_to(job.norm_weight), (value_dim,), np.float32)

    q_channel = head * key_dim
    k_channel = job.key_heads * key_dim + head * key_dim
    v_channel = 2 * job.key_heads * key_dim + head * group * value_dim
    q_end, k_end, v_end = q_channel + key_dim, k_channel + key_dim, v_channel + group * value_dim
    q_column, k_column = job.q_at + head * job.q_step, job.k_at + head * job.k_step
    v_column, z_column = job.v_at + head * job.v_step, job.z_at + head * job.z_step
    b_column, a_column = job.b_at + head * job.b_step, job.a_at + head * job.a_step

    at = job.scratch + 4 * thread * job.scratch_floats
    window_rows = before + PIECE
    query_window = float_rows(at, 0, window_rows, key_dim)
    used = window_rows * key_dim
    key_window = float_rows(at, used, window_rows, key_dim)
    used += window_rows * key_dim
    value_window = float_rows(at, used, window_rows, group * value_dim)
    used += window_rows * group * value_dim
    query = float_rows(at, used, PIECE, even)
    used += PIECE * even
    key = float_rows(at, used, PIECE, even)
    used += PIECE * even
    convolved = float_rows(at, used, PIECE, group * value_dim)
    used += PIECE * group * value_dim
    value = float_rows(at, used, PIECE, padded)
    used += PIECE * padded
    result = float_rows(at, used, PIECE, padded)
    used += PIECE * padded
    decay = float_rows(at, used, PIECE, even)
    used += PIECE * even
    decayed = float_rows(at, used, PIECE, even)
    used += PIECE * even
    tiles = nb.carray(pointer_to(at + 4 * used), (group, parts, even, _COLUMNS), np.float32)

    begin_window(conv[q_channel:q_end], has_state, query_window, before)
    begin_window(conv[k_channel:k_end], has_state, key_window, before)
    begin_window(conv[v_channel:v_end], has_state, value_window, before)
    for h in range(group):
        _load_state(states[head * group + h], has_state, tiles[h])
    for i in range(key_dim, even):
        for t in range(PIECE):
            query[t, i] = np.float32(0)
            key[t, i] = np.float32(0)
            decay[t, i] = np.float32(0)
    for i in range(value_dim, padded):
        for t in range(PIECE):
            value[t, i] = np.float32(0)

    for begin in range(0, new, PIECE):
        tokens, row = min(PIECE, new - begin), first_row + begin
        fill_window(rows, row, q_column, tokens, query_window, before)
        fill_window(rows, row, k_column, tokens, key_window, before)
        fill_window(rows, row, v_column, tokens, value_window, before)
        convolve_silu(query_window, weight[:, q_channel:q_end], bias[q_channel:q_end], tokens, query)
        convolve_silu(key_window, weight[:, k_channel:k_end], bias[k_channel:k_end], tokens, key)
        convolve_silu(value_window, weight[:, v_channel:v_end], bias[v_channel:v_end], tokens, convolved)
        for t in range(tokens):
            own = query[t, :key_dim]
            query_scale = np.float32(1) / np.sqrt(sum_of_squares(own) + np.float32(1e-6))
            _scale(own, query_scale / np.sqrt(np.float32(key_dim)))
            own = key[t, :key_dim]
            _scale(own, np.float32(1) / np.sqrt(sum_of_squares(own) + np.float32(1e-6)))
        for h in range(group):
            number = head * group + h
            for t in range(tokens):
                if job.by_channel != 0:
                    steps = time_steps[row + t, a_column + h * key_dim : a_column + (h + 1) * key_dim]
                    _decay_channels(steps, time_bias[number], decays[number], job.least_decay, decay[t])
                else:
                    step = np.float64(widen(time_steps[row + t, a_column + h])) + np.float64(
                        time_bias[number, 0]
                    )
                    soft = step if step > 20.0 else np.log1p(np.exp(step))
                    decay[t, :key_dim] = np.float32(np.exp(np.float64(decays[number]) * soft))
                _multiply(decay[t], key[t], decayed[t])
                own, given = value[t], convolved[t, h * value_dim : (h + 1) * value_dim]
                for i in range(value_dim):
                    own[i] = given[i]
            for n in range(parts):
                tile = tiles[h, n].ctypes.data
                for t in range(tokens):
                    given_strength = np.float64(widen(rows[row + t, b_column + h]))
                    strength = np.float32(1.0 / (1.0 + np.exp(-given_strength))) * job.strength
                    _delta_step(
                        tile,
                        key[t].ctypes.data,
                        query[t].ctypes.data,
                        decay[t].ctypes.data,
                        decayed[t].ctypes.data,
                        value[t].ctypes.data + 4 * n * _COLUMNS,
                        result[t].ctypes.data + 4 * n * _COLUMNS,
                        strength,
                        even,
                    )
            for t in range(tokens):
                own = result[t, :value_dim]
                mean = sum_of_squares(own) / np.float32(value_dim)
                gate = gates[row + t, z_column + h * value_dim : z_column + (h + 1) * value_dim]
                into = out[row + t, number * value_dim : (number + 1) * value_dim]
                scale = np.float32(1) / np.sqrt(mean + job.eps)
                _norm_and_gate(own, scale, norm_weight, gate, job.sigmoid_gate != 0, into)
        move_window(query_window, tokens, before)
        move_window(key_window, tokens, before)
        move_window(value_window, tokens, before)

    keep_inputs(rows, first_row, q_column, new, conv[q_channel:q_end], has_state)
    keep_inputs(rows, first_row, k_column, new, conv[k_channel:k_end], has_state)
    keep_inputs(rows, first_row, v_column, new, conv[v_channel:v_end], has_state)
    for h in range(group):
        _store_state(tiles[h], states[head * group + h])


@compiled
def _work(job: Any, element: Any, state_element: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    sequences = nb.carray(pointer_to(job.sequences), (job.sequence_count, 4), np.int64)
    thread = fetch_add(claimed, 1, 1)
    while thread < job.threads:
        task = fetch_add(claimed, 0, 1)
        if task >= job.sequence_count * job.key_heads:
            return
        _task(job, sequences[task // job.key_heads], task % job.key_heads, thread, element, state_element)


def _float32_states_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.float32)


def _bfloat16_states_of_float32(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.float32, np.uint16)


def _float32_states_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.float32)


def _bfloat16_states_of_bfloat16(jobs: Any) -> None:
    _work(nb.carray(jobs, (1,))[0], np.uint16, np.uint16)


_ENTRY_POINTS: EntryPoints = {
    (torch.float32, torch.float32): _float32_states_of_float32,
    (torch.float32, torch.bfloat16): _bfloat16_states_of_float32,
    (torch.bfloat16, torch.float32): _float32_states_of_bfloat16,
    (torch.bfloat16, torch.bfloat16): _bfloat16_states_of_bfloat16,
}


# ---- public interface


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a part of the projected rows: key head h's share begins at `at` + h · `step`."""

    at: int
    step: int


@dataclass(frozen=True, slots=True)
class DeltaNetColumns:
    """Columns of all parts. Value heads of one key head lie side by side."""

    width: int  # of the rows
    query: Columns
    key: Columns
    value: Columns
    gate: Columns
    strength: Columns
    time_step: Columns


@dataclass(frozen=True, slots=True)
class DeltaNetHeads:
    """Numbers of heads and their dimensions."""

    keys: int
    values: int  # a multiple of `keys`
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Returns the channels of the convolution: queries, keys, values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """Weights between the linear layers, float32."""

    conv: Tensor  # [channels, kernel]
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [value heads]: a = exp(decay · softplus(time step + time_bias))
    time_bias: Tensor  # [value heads], or [value heads, key_dim] if each key channel has a time step
    norm: Tensor  # [value_dim]
    eps: float
    strength: float = 1.0  # b = strength · sigmoid(…)
    least_decay: float = 0.0  # if not 0, a = exp(least_decay · sigmoid(-decay · (time step + time_bias)))
    sigmoid_gate: bool = False  # instead of silu


ProjectGates = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Linear layers behind the first projection: rows → rows of time steps, and rows of gates, both contiguous."""


class GatedDeltaLoops(RecurrentLoops):
    """Loops of one mixer. States are [slots, value heads, key_dim, value_dim], results value heads · value_dim."""

    def __init__(
        self,
        heads: DeltaNetHeads,
        columns: DeltaNetColumns,
        weights: DeltaNetWeights,
        project: ProjectGates = lambda rows: (rows, rows),
    ) -> None:
        """Raises ValueError for sizes that the loops do not serve."""
        group, rest = divmod(heads.values, heads.keys)
        if rest:
            raise ValueError(f"no loops for {heads}")
        super().__init__(
            _ENTRY_POINTS,
            JOB,
            tasks=heads.keys,
            inner=heads.values * heads.value_dim,
            state=heads.values * heads.key_dim * heads.value_dim,
            scratch=_scratch_floats(heads, group, weights.conv.shape[1]),
            conv=weights.conv,
            conv_bias=weights.conv_bias,
        )
        self._heads, self._width, self._project = heads, columns.width, project
        self._gates: tuple[Tensor, Tensor] | None = (
            None  # the job has the addresses of those of the step that runs
        )
        self._set(key_heads=heads.keys, group=group, key_dim=heads.key_dim, value_dim=heads.value_dim)
        self._set(decay=self._keep(weights.decay), time_bias=self._keep(weights.time_bias))
        self._set(norm_weight=self._keep(weights.norm), eps=weights.eps, strength=weights.strength)
        self._set(by_channel=weights.time_bias.dim() == 2, least_decay=weights.least_decay)
        self._set(sigmoid_gate=weights.sigmoid_gate)
        parts = columns.query, columns.key, columns.value, columns.gate, columns.strength, columns.time_step
        for name, part in zip("qkvzba", parts, strict=True):
            self._set(**{f"{name}_at": part.at, f"{name}_step": part.step})

    def _accepts(self, rows: Tensor, states: Tensor) -> bool:
        heads = self._heads
        return rows.shape[1] == self._width and states.shape[1:] == (
            heads.values,
            heads.key_dim,
            heads.value_dim,
        )

    def _prepare(self, phase: int, rows: Tensor) -> None:
        super()._prepare(phase, rows)
        steps, gates = self._gates = self._project(rows)
        assert all(given.is_contiguous() and given.dtype == rows.dtype for given in self._gates)
        assert len(steps) == len(gates) == len(rows)
        self._set(time_steps=steps.data_ptr(), time_step_width=steps.shape[1])
        self._set(gates=gates.data_ptr(), gate_width=gates.shape[1])


def _scratch_floats(heads: DeltaNetHeads, group: int, kernel: int) -> int:
    """Returns the scratch memory of one thread, as `_task` divides it."""
    even = (heads.key_dim + 1) // 2 * 2
    parts = -(-heads.value_dim // _COLUMNS)
    width = 2 * heads.key_dim + group * heads.value_dim
    windows = (kernel - 1 + PIECE) * width
    piece = PIECE * (4 * even + group * heads.value_dim + 2 * parts * _COLUMNS)
    return windows + piece + group * parts * even * _COLUMNS
