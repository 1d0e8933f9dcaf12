"""Compiled loops for mixers of the gated delta rule: convolution, recurrence and gated norm in one call for a step.

The rule (Yang et al. 2024, arXiv 2412.06464) keeps for each value head a state S [key_dim, value_dim]. A token with
key k, query q, value v, decay a and strength b changes it to

    S ← a · S + k (b · (v - a · Sᵀk))ᵀ        and gives        Sᵀq

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
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from rootstock.kernels.cpu.compiler import (
    c_function,
    cgutils,
    compiled,
    compiled_exactly,
    exp,
    fetch_add,
    intrinsic,
    narrow,
    nb,
    pointer_to,
    types,
    widen,
)
from rootstock.kernels.cpu.threads import callable_at, run_on_threads
from rootstock.kernels.cpu.vector_lanes import F32, FLOATS, I64, LANES, add_product, load, splat, store

_COLUMNS = 2 * LANES  # of a state that are computed together
_PIECE = 32  # tokens whose queries, keys and values are prepared together
_PARALLEL_FROM = 1 << 15  # elements of states that pass by; fewer are computed by the calling thread
_LONGEST_KERNEL = 64

JOB = np.dtype(
    [
        ("claimed", "i8"),  # address of two int64: tasks that threads have begun, and threads that have begun
        ("scratch", "i8"),  # address of `scratch_floats` float32 for each thread
        ("scratch_floats", "i8"),
        ("sequences", "i8"),  # address of [sequence_count, 4] int64: first row, new rows, slot, has a state
        ("sequence_count", "i8"),
        ("rows", "i8"),  # address of [row_count, width]
        ("row_count", "i8"),
        ("width", "i8"),
        ("out", "i8"),  # address of [row_count, key_heads · group · value_dim]
        ("conv", "i8"),  # address of [slots, channels, kept] of the rows' dtype
        ("states", "i8"),  # address of [slots, key_heads · group, key_dim, value_dim]
        ("slots", "i8"),
        ("key_heads", "i8"),
        ("group", "i8"),  # value heads of a key head
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        ("kernel", "i8"),  # positions that the convolution reads
        ("kept", "i8"),  # positions that a convolution's state has, the last one last
        ("conv_weight", "i8"),  # addresses of float32: [kernel, channels]
        ("decay", "i8"),  # [value heads]
        ("time_bias", "i8"),  # [value heads]
        ("norm_weight", "i8"),  # [value_dim]
        # First column of a key head's share of the rows, and the distance to the next key head's, for each part:
        *((f"{part}_{place}", "i8") for part in "qkvzba" for place in ("at", "step")),
        ("strength", "f4"),  # factor of b
        ("eps", "f4"),  # of the norm
    ]
)


# ---- one token and 32 columns of a state


@intrinsic  # type: ignore[untyped-decorator]
def _delta_step(
    typing: Any, tile: Any, key: Any, query: Any, value: Any, out: Any, numbers: Any, dim: Any
) -> Any:
    """Computes one token for 32 columns of a state.

    tile            address of [dim, 32] float32, changed in place; `dim` is even
    key, query      addresses of [dim] float32
    value, out      addresses of [32] float32
    numbers         address of the decay and the strength, float32
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        tile, key, query, value, out, numbers, dim = given
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

        decay, strength = number(numbers, I64(0)), number(numbers, I64(1))
        seen = totals()
        with cgutils.for_range(builder, half, intp=I64) as loop:
            for odd in range(2):
                row = builder.add(builder.shl(loop.index, I64(1)), I64(odd))
                k = number(key, row)
                for vector in range(2):
                    total = seen[2 * odd + vector]
                    state = load(builder, place(row, vector))
                    builder.store(add_product(builder, builder.load(total), state, k), total)
        deltas = []
        for vector in range(2):
            own = load(builder, builder.add(value, I64(vector * 4 * LANES)))
            expected = builder.fmul(sum_of(seen, vector), decay)
            deltas.append(builder.fmul(builder.fsub(own, expected), strength))
        read = totals()
        with cgutils.for_range(builder, half, intp=I64) as loop:
            for odd in range(2):
                row = builder.add(builder.shl(loop.index, I64(1)), I64(odd))
                k, q = number(key, row), number(query, row)
                for vector in range(2):
                    total = read[2 * odd + vector]
                    kept = builder.fmul(load(builder, place(row, vector)), decay)
                    state = add_product(builder, kept, k, deltas[vector])
                    store(builder, state, place(row, vector))
                    builder.store(add_product(builder, builder.load(total), state, q), total)
        for vector in range(2):
            store(builder, sum_of(read, vector), builder.add(out, I64(vector * 4 * LANES)))
        return context.get_dummy_value()

    addresses = (types.int64,) * 7
    return types.void(*addresses), generate


# ---- parts of a task


@compiled_exactly
def _convolve(window: Any, weight: Any, tokens: Any, out: Any) -> None:
    """Computes silu(causal convolution). window [kernel - 1 + tokens, channels], weight [kernel, channels]"""
    kernel, channels = weight.shape
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = window[t, c] * weight[0, c]
        for j in range(1, kernel):
            for c in range(channels):
                row[c] += window[t + j, c] * weight[j, c]
        for c in range(channels):
            small = exp(-abs(row[c]))
            row[c] *= (np.float32(1) if row[c] >= 0 else small) / (np.float32(1) + small)


@compiled
def _sum_of_squares(row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    return total


@compiled_exactly
def _scale(row: Any, factor: Any) -> None:
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled_exactly
def _norm_and_gate(row: Any, scale: Any, weight: Any, gate: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        z = widen(gate[i])
        small = exp(-abs(z))
        sigmoid = (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
        out[i] = narrow(row[i] * scale * weight[i] * (z * sigmoid), out)


@compiled
def _begin_window(state: Any, has_state: Any, window: Any, before: Any) -> None:
    """Fills the first rows of a window with the last inputs before the new ones. state [channels, kept]"""
    channels, kept = state.shape
    for j in range(before):
        for c in range(channels):
            window[j, c] = widen(state[c, kept - before + j]) if has_state else np.float32(0)


@compiled
def _fill_window(rows: Any, row: Any, column: Any, tokens: Any, window: Any, before: Any) -> None:
    for t in range(tokens):
        given = rows[row + t]
        into = window[before + t]
        for c in range(into.shape[0]):
            into[c] = widen(given[column + c])


@compiled
def _keep_inputs(rows: Any, row: Any, column: Any, new: Any, state: Any, has_state: Any) -> None:
    """Writes the last `kept` inputs of a sequence with `new` rows to its state [channels, kept]."""
    channels, kept = state.shape
    moved = max(0, kept - new)
    for c in range(channels):
        for j in range(moved):
            if has_state:
                state[c, j] = state[c, j + new]
            else:
                state[c, j] = narrow(np.float32(0), state)
        for j in range(moved, kept):
            state[c, j] = rows[row + new - kept + j, column + c]


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
def _floats(at: Any, first: Any, rows: Any, columns: Any) -> Any:
    return nb.carray(pointer_to(at + 4 * first), (rows, columns), np.float32)


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
    decays = nb.carray(pointer_to(job.decay), (value_heads,), np.float32)
    time_bias = nb.carray(pointer_to(job.time_bias), (value_heads,), np.float32)
    norm_weight = nb.carray(pointer_to(job.norm_weight), (value_dim,), np.float32)

    q_channel = head * key_dim
    k_channel = job.key_heads * key_dim + head * key_dim
    v_channel = 2 * job.key_heads * key_dim + head * group * value_dim
    q_column, k_column = job.q_at + head * job.q_step, job.k_at + head * job.k_step
    v_column, z_column = job.v_at + head * job.v_step, job.z_at + head * job.z_step
    b_column, a_column = job.b_at + head * job.b_step, job.a_at + head * job.a_step

    at = job.scratch + 4 * thread * job.scratch_floats
    window_rows = before + _PIECE
    query_window = _floats(at, 0, window_rows, key_dim)
    used = window_rows * key_dim
    key_window = _floats(at, used, window_rows, key_dim)
    used += window_rows * key_dim
    value_window = _floats(at, used, window_rows, group * value_dim)
    used += window_rows * group * value_dim
    query = _floats(at, used, _PIECE, even)
    used += _PIECE * even
    key = _floats(at, used, _PIECE, even)
    used += _PIECE * even
    convolved = _floats(at, used, _PIECE, group * value_dim)
    used += _PIECE * group * value_dim
    value = _floats(at, used, _PIECE, padded)
    used += _PIECE * padded
    result = _floats(at, used, _PIECE, padded)
    used += _PIECE * padded
    numbers = _floats(at, used, _PIECE, 2)
    used += _PIECE * 2
    tiles = nb.carray(pointer_to(at + 4 * used), (group, parts, even, _COLUMNS), np.float32)

    _begin_window(conv[q_channel : q_channel + key_dim], has_state, query_window, before)
    _begin_window(conv[k_channel : k_channel + key_dim], has_state, key_window, before)
    _begin_window(conv[v_channel : v_channel + group * value_dim], has_state, value_window, before)
    for h in range(group):
        _load_state(states[head * group + h], has_state, tiles[h])
    for i in range(key_dim, even):
        for t in range(_PIECE):
            query[t, i] = np.float32(0)
            key[t, i] = np.float32(0)
    for i in range(value_dim, padded):
        for t in range(_PIECE):
            value[t, i] = np.float32(0)

    for begin in range(0, new, _PIECE):
        tokens, row = min(_PIECE, new - begin), first_row + begin
        _fill_window(rows, row, q_column, tokens, query_window, before)
        _fill_window(rows, row, k_column, tokens, key_window, before)
        _fill_window(rows, row, v_column, tokens, value_window, before)
        _convolve(query_window, weight[:, q_channel : q_channel + key_dim], tokens, query)
        _convolve(key_window, weight[:, k_channel : k_channel + key_dim], tokens, key)
        _convolve(value_window, weight[:, v_channel : v_channel + group * value_dim], tokens, convolved)
        for t in range(tokens):
            own = query[t, :key_dim]
            of_query = np.float32(1) / np.sqrt(_sum_of_squares(own) + np.float32(1e-6))
            _scale(own, of_query / np.sqrt(np.float32(key_dim)))
            own = key[t, :key_dim]
            _scale(own, np.float32(1) / np.sqrt(_sum_of_squares(own) + np.float32(1e-6)))
        for h in range(group):
            number = head * group + h
            for t in range(tokens):
                step = np.float64(widen(rows[row + t, a_column + h])) + np.float64(time_bias[number])
                soft = step if step > 20.0 else np.log1p(np.exp(step))
                numbers[t, 0] = np.float32(np.exp(np.float64(decays[number]) * soft))
                strength = 1.0 / (1.0 + np.exp(-np.float64(widen(rows[row + t, b_column + h]))))
                numbers[t, 1] = np.float32(strength) * job.strength
                own, given = value[t], convolved[t, h * value_dim : (h + 1) * value_dim]
                for i in range(value_dim):
                    own[i] = given[i]
            for n in range(parts):
                tile = tiles[h, n].ctypes.data
                for t in range(tokens):
                    _delta_step(
                        tile,
                        key[t].ctypes.data,
                        query[t].ctypes.data,
                        value[t].ctypes.data + 4 * n * _COLUMNS,
                        result[t].ctypes.data + 4 * n * _COLUMNS,
                        numbers[t].ctypes.data,
                        even,
                    )
            for t in range(tokens):
                own = result[t, :value_dim]
                mean = _sum_of_squares(own) / np.float32(value_dim)
                gate = rows[row + t, z_column + h * value_dim : z_column + (h + 1) * value_dim]
                into = out[row + t, number * value_dim : (number + 1) * value_dim]
                _norm_and_gate(own, np.float32(1) / np.sqrt(mean + job.eps), norm_weight, gate, into)
        for j in range(before):
            for c in range(key_dim):
                query_window[j, c] = query_window[tokens + j, c]
                key_window[j, c] = key_window[tokens + j, c]
            for c in range(group * value_dim):
                value_window[j, c] = value_window[tokens + j, c]

    _keep_inputs(rows, first_row, q_column, new, conv[q_channel : q_channel + key_dim], has_state)
    _keep_inputs(rows, first_row, k_column, new, conv[k_channel : k_channel + key_dim], has_state)
    _keep_inputs(rows, first_row, v_column, new, conv[v_channel : v_channel + group * value_dim], has_state)
    for h in range(group):
        _store_state(tiles[h], states[head * group + h])


@compiled
def _work(job: Any, element: Any, state_element: Any) -> None:
    """Runs one thread's share of a job: claims tasks until none is left."""
    claimed = nb.carray(pointer_to(job.claimed), (2,), np.int64)
    sequences = nb.carray(pointer_to(job.sequences), (job.sequence_count, 4), np.int64)
    thread = fetch_add(claimed, 1, 1)
    while True:
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


_FUNCTIONS: dict[tuple[torch.dtype, torch.dtype], Callable[[Any], None]] = {
    (torch.float32, torch.float32): _float32_states_of_float32,
    (torch.float32, torch.bfloat16): _bfloat16_states_of_float32,
    (torch.bfloat16, torch.float32): _float32_states_of_bfloat16,
    (torch.bfloat16, torch.bfloat16): _bfloat16_states_of_bfloat16,
}


@cache
def _compiled_for(rows: torch.dtype, states: torch.dtype) -> int:
    """Returns the address of a C function void (JOB *): compiled, or loaded, at the first call in a process."""
    return c_function(_FUNCTIONS[rows, states], JOB)


# ---- public interface


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a part of the projected rows: key head h's share begins at `at` + h · `step`."""

    at: int
    step: int


@dataclass(frozen=True, slots=True)
class DeltaNetColumns:
    """Columns of all parts. Value heads of one key head lie side by side."""

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
    decay: Tensor  # [value heads]: a = exp(decay · softplus(time step + time_bias))
    time_bias: Tensor  # [value heads]
    norm: Tensor  # [value_dim]
    eps: float
    strength: float = 1.0  # b = strength · sigmoid(…)


class GatedDeltaLoops:
    """Loops of one mixer, for rows in float32 or bfloat16 on a CPU. One thread at a time may use them."""

    def __init__(self, heads: DeltaNetHeads, columns: DeltaNetColumns, weights: DeltaNetWeights) -> None:
        """Raises ValueError for sizes that the loops do not serve."""
        group, rest = divmod(heads.values, heads.keys)
        kernel = weights.conv.shape[1]
        if rest or not 1 < kernel <= _LONGEST_KERNEL:
            raise ValueError(f"no loops for {heads} and a convolution over {kernel} positions")
        self.heads = heads
        self._kept: list[Tensor] = []  # the job has their addresses
        self._claimed = np.zeros(2, np.int64)
        self._jobs = np.zeros(1, JOB)
        self._scratch_floats = _scratch_floats(heads, group, kernel)
        job: Any = self._jobs[0]
        job["claimed"] = self._claimed.ctypes.data
        job["scratch_floats"] = self._scratch_floats
        job["key_heads"], job["group"] = heads.keys, group
        job["key_dim"], job["value_dim"], job["kernel"] = heads.key_dim, heads.value_dim, kernel
        job["conv_weight"] = self._keep(weights.conv.t())
        job["decay"], job["time_bias"] = self._keep(weights.decay), self._keep(weights.time_bias)
        job["norm_weight"] = self._keep(weights.norm)
        job["strength"], job["eps"] = weights.strength, weights.eps
        parts = columns.query, columns.key, columns.value, columns.gate, columns.strength, columns.time_step
        for name, part in zip("qkvzba", parts, strict=True):
            job[f"{name}_at"], job[f"{name}_step"] = part.at, part.step

    def _keep(self, weight: Tensor) -> int:
        kept = weight.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def __call__(self, rows: Tensor, sequences: Tensor, conv: Tensor, states: Tensor, out: Tensor) -> None:
        """Computes the new rows of all sequences of a step, and changes their states in place.

        rows        [rows, …] what the linear layers give, contiguous
        sequences   [sequences, 4] int64: first row, number of rows, slot, and whether the slot has a state
        conv        [slots, channels, n] inputs of the convolution before the new rows, in the rows' dtype
        states      [slots, value heads, key_dim, value_dim] float32 or bfloat16
        out         [rows, value heads · value_dim] in the rows' dtype
        """
        heads = self.heads
        tensors = rows, sequences, conv, states, out
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert rows.dtype == conv.dtype == out.dtype
        assert conv.shape[1] == heads.channels
        assert conv.shape[2] >= self._jobs["kernel"][0] - 1
        threads = 1
        if len(rows) * heads.values * heads.key_dim * heads.value_dim >= _PARALLEL_FROM:
            threads = min(torch.get_num_threads(), len(sequences) * heads.keys)
        job: Any = self._jobs[0]
        job["scratch"] = _scratch(threads * self._scratch_floats)
        job["sequences"], job["sequence_count"] = sequences.data_ptr(), len(sequences)
        job["rows"], job["row_count"], job["width"] = rows.data_ptr(), *rows.shape
        job["conv"], job["kept"] = conv.data_ptr(), conv.shape[2]
        job["states"], job["slots"], job["out"] = states.data_ptr(), len(states), out.data_ptr()
        self._claimed[:] = 0
        function = _compiled_for(rows.dtype, states.dtype)
        if threads == 1:
            callable_at(function)(self._jobs.ctypes.data)
        else:
            run_on_threads(function, self._jobs.ctypes.data, threads)


def _scratch_floats(heads: DeltaNetHeads, group: int, kernel: int) -> int:
    """Returns the scratch memory of one thread, as `_task` divides it."""
    even = (heads.key_dim + 1) // 2 * 2
    parts = -(-heads.value_dim // _COLUMNS)
    width = 2 * heads.key_dim + group * heads.value_dim
    windows = (kernel - 1 + _PIECE) * width
    piece = _PIECE * (2 * even + group * heads.value_dim + 2 * parts * _COLUMNS + 2)
    return windows + piece + group * parts * even * _COLUMNS


_scratch_memory = torch.empty(0, dtype=torch.float32)


def _scratch(floats: int) -> int:
    """Returns the address of scratch memory, valid until the next call. All mixers share it: they run one after the
    other."""
    global _scratch_memory
    if len(_scratch_memory) < floats:
        _scratch_memory = torch.empty(floats, dtype=torch.float32)
    return _scratch_memory.data_ptr()
