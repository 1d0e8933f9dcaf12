"""Loops of Mamba-2's recurrence: against the same computation in float64, and in other divisions of a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from kernels.recurrent_cases import (
    CUTS,
    RandomMixer,
    compute_in_pieces_beside_mates,
    compute_sequences_of_any_length,
)
from rootstock.kernels.cpu.state_space import StateSpaceHeads, StateSpaceLoops, StateSpaceWeights

# Of a row, relative root mean square: one rounding of a row before its norm and one after, or float32's.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# heads, groups, head_dim, state_dim; among them odd sizes, and sizes that are no multiple of a vector.
HEADS = [(4, 1, 16, 16), (6, 2, 10, 24), (5, 1, 7, 9), (8, 2, 64, 128)]


class StateSpace(RandomMixer):
    def __init__(self, heads: int, groups: int, head_dim: int, state_dim: int, kernel: int = 4) -> None:
        self.heads = sizes = StateSpaceHeads(heads, groups, head_dim, state_dim)
        self.channels, self.state_shape = sizes.channels, (heads, head_dim, state_dim)
        self.width = sizes.inner + sizes.channels + heads
        torch.manual_seed(heads + groups)
        self.conv_weight = torch.randn(sizes.channels, kernel) * 0.5
        self.conv_bias = torch.randn(sizes.channels) * 0.5 if groups == 2 else None
        self.weights = StateSpaceWeights(
            conv=self.conv_weight,
            conv_bias=self.conv_bias,
            decay=-2 * torch.rand(heads),
            time_bias=torch.randn(heads),
            direct=torch.randn(heads),
            norm=None if heads == 5 else torch.rand(sizes.inner) + 0.5,
            norm_width=sizes.inner // groups,
            eps=1e-5,
            gate_first=heads != 4,
            step_limits=(0.1, 0.9) if heads == 6 else (0.0, float("inf")),
        )

    def loops(self) -> StateSpaceLoops:
        return StateSpaceLoops(self.heads, self.weights)

    def in_float64(
        self, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, weights, new = self.heads, self.weights, len(rows)
        shared = heads.groups * heads.state_dim
        gate, inputs, steps = rows.double().split([heads.inner, heads.channels, heads.heads], -1)
        mixed, kept = self.convolved(inputs, conv, continues=continues)
        x, b, c = mixed.split([heads.inner, shared, shared], -1)
        x = x.view(new, heads.heads, heads.head_dim)
        b, c = (
            part.view(new, heads.groups, -1).repeat_interleave(heads.heads // heads.groups, 1)
            for part in (b, c)
        )
        steps = F.softplus(steps + weights.time_bias.double()).clamp(*weights.step_limits)
        carried = state.double() if continues else torch.zeros_like(state, dtype=torch.float64)
        results = []
        for t in range(new):
            decay = torch.exp(steps[t] * weights.decay.double())[:, None, None]
            carried = carried * decay + (steps[t][:, None] * x[t])[..., None] * b[t][:, None]
            results.append((carried * c[t][:, None]).sum(-1) + weights.direct.double()[:, None] * x[t])
        result = torch.stack(results).flatten(1)
        if weights.gate_first:
            result = result * F.silu(gate)
        if weights.norm is not None:
            parts = result.view(new, -1, weights.norm_width)
            parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + weights.eps)
            result = parts.flatten(1) * weights.norm.double()
        if not weights.gate_first:
            result = result * F.silu(gate)
        return result, kept, carried


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", HEADS)
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    heads: tuple[int, int, int, int], dtype: torch.dtype, states: torch.dtype
) -> None:
    compute_sequences_of_any_length(StateSpace(*heads), dtype, states, TOLERANCE)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_pieces_beside_mates(StateSpace(8, 2, 32, 64), cuts, threads, monkeypatch)


@pytest.mark.parametrize(("heads", "kernel", "norm_width"), [(5, 4, 8), (4, 1, 8), (4, 65, 8), (4, 4, 7)])
def test_sizes_without_loops_are_refused(heads: int, kernel: int, norm_width: int) -> None:
    sizes = StateSpaceHeads(heads, 2, 8, 8)
    given = (torch.zeros(heads) for _ in range(3))
    weights = StateSpaceWeights(
        torch.zeros(sizes.channels, kernel), None, *given, torch.zeros(sizes.inner), norm_width, 1e-6
    )
    with pytest.raises(ValueError, match="no loops"):
        StateSpaceLoops(sizes, weights)
