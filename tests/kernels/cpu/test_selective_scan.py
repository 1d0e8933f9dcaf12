"""Loops of Mamba-1's scan: against the same computation in float64, and in other divisions of a step."""

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
from rootstock.kernels.cpu.selective_scan import SelectiveScanLoops, SelectiveScanWeights

# Of a row, relative root mean square: two roundings of a row, or float32's.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# channels, state_dim; among them odd sizes, sizes that are no multiple of a vector, and several tasks.
SIZES = [(16, 16), (7, 9), (70, 5), (300, 16)]


class SelectiveScan(RandomMixer):
    def __init__(self, channels: int, state_dim: int, kernel: int = 4, *, normed: bool = False) -> None:
        self.channels, self.width = channels, 2 * channels
        self.state_shape = (channels, state_dim)
        torch.manual_seed(channels)
        self.conv_weight = torch.randn(channels, kernel) * 0.5
        self.conv_bias = torch.randn(channels) * 0.5 if normed else None
        self.to_parameters = torch.randn(channels, 3 + 2 * state_dim) / channels**0.5
        self.to_steps = torch.randn(3, channels)
        self.weights = SelectiveScanWeights(
            conv=self.conv_weight,
            conv_bias=self.conv_bias,
            decay=-4 * torch.rand(channels, state_dim),
            direct=torch.randn(channels),
            norms=(torch.rand(state_dim) + 0.5, torch.rand(state_dim) + 0.5) if normed else None,
            eps=1e-5,
        )

    def loops(self) -> SelectiveScanLoops:
        return SelectiveScanLoops(self.weights, self.project)

    def project(self, convolved: Tensor) -> tuple[Tensor, Tensor]:
        """Computes row by row, so that a row does not depend on how many there are."""
        rows = [row.float() @ self.to_parameters for row in convolved]
        steps = [row[:3] @ self.to_steps for row in rows]
        return torch.stack(steps).to(convolved.dtype), torch.stack(rows).to(convolved.dtype)

    def in_float64(
        self, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, state_dim = self.weights, self.state_shape[1]
        inputs, gate = rows.double().chunk(2, -1)
        mixed, kept = self.convolved(inputs, conv, continues=continues)
        steps, parameters = (part.double() for part in self.project(mixed.to(rows.dtype)))
        x, steps = mixed.to(rows.dtype).double(), F.softplus(steps, threshold=50)
        b, c = parameters[:, -2 * state_dim : -state_dim], parameters[:, -state_dim:]
        if weights.norms is not None:
            b, c = (
                part * torch.rsqrt(part.square().mean(-1, keepdim=True) + weights.eps) * norm.double()
                for part, norm in zip((b, c), weights.norms, strict=True)
            )
        carried = state.double() if continues else torch.zeros_like(state, dtype=torch.float64)
        results = []
        for t in range(len(rows)):
            carried = carried * torch.exp(steps[t][:, None] * weights.decay.double())
            carried = carried + (steps[t] * x[t])[:, None] * b[t]
            results.append((carried * c[t]).sum(-1) + weights.direct.double() * x[t])
        return torch.stack(results) * F.silu(gate), kept, carried


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    sizes: tuple[int, int], normed: bool, dtype: torch.dtype, states: torch.dtype
) -> None:
    compute_sequences_of_any_length(SelectiveScan(*sizes, normed=normed), dtype, states, TOLERANCE)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_pieces_beside_mates(SelectiveScan(300, 16, normed=True), cuts, threads, monkeypatch)


@pytest.mark.parametrize("kernel", [1, 65])
def test_kernels_without_loops_are_refused(kernel: int) -> None:
    with pytest.raises(ValueError, match="no loops"):
        SelectiveScan(8, 4, kernel).loops()
