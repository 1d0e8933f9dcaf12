"""Short causal convolutions before a recurrence, in compiled loops, and what such mixers share.

A mixer's task computes some channels of one sequence in pieces of `PIECE` tokens. Its window has the last inputs
before a piece and the piece itself, in float32. The state of a convolution in the pool is its last inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rootstock.kernels.cpu.compiler import compiled, compiled_exactly, narrow, nb, pointer_to, sigmoid, widen

PIECE = 32  # tokens whose inputs are prepared together
LONGEST_KERNEL = 64


@compiled_exactly
def convolve(window: Any, weight: Any, bias: Any, tokens: Any, out: Any) -> None:
    """Computes the causal convolution of `tokens` rows.

    window [kernel - 1 + tokens, channels], weight [kernel, channels], bias [channels], out [tokens, …]
    """
    kernel, channels = weight.shape
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = bias[c] + window[t, c] * weight[0, c]
        for j in range(1, kernel):
            for c in range(channels):
                row[c] += window[t + j, c] * weight[j, c]


@compiled_exactly
def convolve_silu(window: Any, weight: Any, bias: Any, tokens: Any, out: Any) -> None:
    """Computes silu(causal convolution) like `convolve`."""
    convolve(window, weight, bias, tokens, out)
    for t in range(tokens):
        row = out[t]
        for c in range(weight.shape[1]):
            row[c] *= sigmoid(row[c])


@compiled
def sum_of_squares(row: Any) -> Any:
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    return total


@compiled
def begin_window(state: Any, has_state: Any, window: Any, before: Any) -> None:
    """Fills the first rows of a window with the last inputs before the new ones. state [channels, kept]"""
    channels, kept = state.shape
    for j in range(before):
        for c in range(channels):
            window[j, c] = widen(state[c, kept - before + j]) if has_state else np.float32(0)


@compiled
def fill_window(rows: Any, row: Any, column: Any, tokens: Any, window: Any, before: Any) -> None:
    for t in range(tokens):
        given = rows[row + t]
        into = window[before + t]
        for c in range(into.shape[0]):
            into[c] = widen(given[column + c])


@compiled
def keep_inputs(rows: Any, row: Any, column: Any, new: Any, state: Any, has_state: Any) -> None:
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
def move_window(window: Any, tokens: Any, before: Any) -> None:
    """Moves the last rows of a window to its beginning, before the next piece."""
    for j in range(before):
        for c in range(window.shape[1]):
            window[j, c] = window[tokens + j, c]


@compiled
def float_rows(at: Any, first: Any, rows: Any, columns: Any) -> Any:
    return nb.carray(pointer_to(at + 4 * first), (rows, columns), np.float32)
