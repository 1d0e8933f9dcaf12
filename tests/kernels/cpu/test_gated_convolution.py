"""Loops of gated short convolutions: against the same computation in float64, and in other divisions of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.recurrent_cases import (
    CUTS,
    RandomMixer,
    compute_in_pieces_beside_mates,
    compute_sequences_of_any_length,
)
from rootstock.kernels.cpu.gated_convolution import GatedConvolutionLoops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


class GatedConvolution(RandomMixer):
    def __init__(self, channels: int, kernel: int, *, with_bias: bool) -> None:
        self.channels, self.width = channels, 3 * channels
        self.state_shape = (1, 1, 1)
        torch.manual_seed(channels)
        self.conv_weight = torch.randn(channels, kernel)
        self.conv_bias = torch.randn(channels) if with_bias else None

    def pool(self, dtype: torch.dtype, states: torch.dtype, kept: int = 4) -> tuple[Tensor, Tensor]:
        """Returns the memory of the convolution, and one that the loops do not use."""
        conv, recurrent = super().pool(dtype, states, kept)
        return conv, torch.ones_like(recurrent)

    def loops(self) -> GatedConvolutionLoops:
        return GatedConvolutionLoops(self.conv_weight, self.conv_bias)

    def in_float64(
        self, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, c, x = rows.float().split(self.channels, -1)
        products = (b * x).to(rows.dtype).double()
        mixed, kept = self.convolved(products, conv, continues=continues, silu=False)
        return c.double() * mixed, kept, state.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("channels", "kernel"), [(16, 3), (300, 4), (7, 2), (513, 3)])
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    channels: int, kernel: int, dtype: torch.dtype
) -> None:
    mixer = GatedConvolution(channels, kernel, with_bias=kernel == 4)
    compute_sequences_of_any_length(mixer, dtype, dtype, TOLERANCE)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_pieces_beside_mates(GatedConvolution(600, 3, with_bias=False), cuts, threads, monkeypatch)


@pytest.mark.parametrize("kernel", [1, 65])
def test_kernels_without_loops_are_refused(kernel: int) -> None:
    with pytest.raises(ValueError, match="no loops"):
        GatedConvolutionLoops(torch.zeros(8, kernel), None)
