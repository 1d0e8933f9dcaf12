"""Cases that the loops of every recurrent mixer pass: against float64, and in other divisions of a step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.cpu.recurrent_loops import RecurrentLoops

SLOTS = 5
CUTS = [(1,) * 9, (64, 1, 32), (33, 31, 33), (5, 92)]  # tokens of the pieces of a prompt


class RandomMixer(ABC):
    """Random mixer: weights, a pool of states, and rows of projections."""

    channels: int
    state_shape: tuple[int, ...]
    width: int
    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    states_scale = 1.0

    @abstractmethod
    def loops(self) -> RecurrentLoops: ...

    @abstractmethod
    def in_float64(
        self, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes one sequence. Returns its rows, the inputs that its convolution keeps, and its state."""

    def rows(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.width, generator=generator).to(dtype)

    def pool(self, dtype: torch.dtype, states: torch.dtype, kept: int = 4) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        conv = torch.randn(SLOTS, self.channels, kept, generator=generator).to(dtype)
        recurrent = torch.randn(SLOTS, *self.state_shape, generator=generator)
        return conv, (self.states_scale * recurrent).to(states)

    def convolved(
        self, inputs: Tensor, conv: Tensor, *, continues: bool, silu: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Computes the convolution of inputs [new, channels] in float64. Returns its kept inputs as well."""
        new, kept, kernel = len(inputs), conv.shape[1], self.conv_weight.shape[1]
        before = conv.double().T if continues else torch.zeros(kept, self.channels, dtype=torch.float64)
        seen = torch.cat([before, inputs])
        windows = seen[len(seen) - new - kernel + 1 :].unfold(0, kernel, 1)  # [new, channels, kernel]
        bias = torch.zeros(self.channels) if self.conv_bias is None else self.conv_bias
        mixed = (windows * self.conv_weight.double()).sum(-1) + bias.double()
        return F.silu(mixed) if silu else mixed, seen[-kept:].T


def relative(ours: Tensor, exact: Tensor) -> float:
    """Returns the largest relative root mean square error of a row."""
    exact = exact.flatten(1)
    error = (ours.double().flatten(1) - exact).square().mean(-1).sqrt()
    return float((error / exact.square().mean(-1).sqrt()).max())


def compute_sequences_of_any_length(
    mixer: RandomMixer, dtype: torch.dtype, states: torch.dtype, tolerance: dict[torch.dtype, float]
) -> None:
    """Compares a step of new and continued sequences with float64: results, kept inputs, states, other slots."""
    conv, recurrent = mixer.pool(dtype, states)
    spans = [(1, 3, True), (70, 0, False), (33, 4, True), (2, 1, False)]  # new rows, slot, continues
    first = [0, *itertools.accumulate(new for new, _, _ in spans)]
    rows = mixer.rows(first[-1], dtype)
    exact = [
        mixer.in_float64(rows[row : row + new], conv[slot], recurrent[slot], continues=continues)
        for row, (new, slot, continues) in zip(first, spans, strict=False)
    ]
    untouched = conv[2].clone(), recurrent[2].clone()
    loops = mixer.loops()
    out = torch.empty(len(rows), loops.inner, dtype=dtype)
    sequences = torch.tensor([(row, *span) for row, span in zip(first, spans, strict=False)])
    loops(rows, sequences, conv, recurrent, out)
    for row, (new, slot, _), (result, kept, state) in zip(first, spans, exact, strict=False):
        assert relative(out[row : row + new], result) <= tolerance[dtype]
        assert torch.equal(conv[slot].double(), kept)
        assert relative(recurrent[slot], state) <= tolerance[states]
    assert torch.equal(conv[2], untouched[0])
    assert torch.equal(recurrent[2], untouched[1])


def compute_in_pieces_beside_mates(
    mixer: RandomMixer, cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the bits of a prompt in pieces, beside another sequence, with the whole prompt alone."""
    total = sum(cuts)
    conv, recurrent = mixer.pool(torch.float32, torch.float32)
    rows, loops = mixer.rows(total, torch.float32), mixer.loops()
    whole = torch.empty(total, loops.inner)
    loops(rows, torch.tensor([(0, total, 0, 0)]), conv, recurrent, whole)
    expected = conv[0].clone(), recurrent[0].clone()

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    first, parts = 0, []
    for tokens in cuts:
        mates = mixer.rows(7, torch.float32, seed=first)  # stand before it, and have a state in another slot
        packed = torch.cat([mates, rows[first : first + tokens]])
        out = torch.empty(len(packed), loops.inner)
        loops(packed, torch.tensor([(0, 7, 3, 1), (7, tokens, 1, int(first > 0))]), conv, recurrent, out)
        parts.append(out[7:])
        first += tokens
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(conv[1], expected[0])
    assert torch.equal(recurrent[1], expected[1])
