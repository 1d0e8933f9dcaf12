"""Loops of Mamba-2's recurrence: against the same computation in float64, and in other divisions of a step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.cpu.state_space import StateSpaceHeads, StateSpaceLoops, StateSpaceWeights

SLOTS = 5
# Of a row, relative root mean square: one rounding of a row before its norm and one after, or float32's.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# heads, groups, head_dim, state_dim; among them odd sizes, and sizes that are no multiple of a vector.
HEADS = [(4, 1, 16, 16), (6, 2, 10, 24), (5, 1, 7, 9), (8, 2, 64, 128)]


@dataclass
class Mixer:
    """Random mixer: weights, a pool of states, and rows of projections."""

    heads: StateSpaceHeads
    weights: StateSpaceWeights

    def rows(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        width = self.heads.inner + self.heads.channels + self.heads.heads
        return torch.randn(count, width, generator=generator).to(dtype)

    def pool(self, dtype: torch.dtype, states: torch.dtype, kept: int = 4) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        heads = self.heads
        conv = torch.randn(SLOTS, heads.channels, kept, generator=generator).to(dtype)
        recurrent = torch.randn(SLOTS, heads.heads, heads.head_dim, heads.state_dim, generator=generator)
        return conv, recurrent.to(states)


def mixer(heads: int, groups: int, head_dim: int, state_dim: int, kernel: int = 4) -> Mixer:
    sizes = StateSpaceHeads(heads, groups, head_dim, state_dim)
    torch.manual_seed(heads + groups)
    weights = StateSpaceWeights(
        conv=torch.randn(sizes.channels, kernel) * 0.5,
        conv_bias=torch.randn(sizes.channels) * 0.5 if groups == 2 else None,
        decay=-2 * torch.rand(heads),
        time_bias=torch.randn(heads),
        direct=torch.randn(heads),
        norm=None if heads == 5 else torch.rand(sizes.inner) + 0.5,
        norm_width=sizes.inner // groups,
        eps=1e-5,
        gate_first=heads != 4,
        step_limits=(0.1, 0.9) if heads == 6 else (0.0, float("inf")),
    )
    return Mixer(sizes, weights)


def in_float64(
    given: Mixer, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one sequence. Returns its rows, the inputs that its convolution keeps, and its state."""
    heads, weights, new, kept = given.heads, given.weights, len(rows), conv.shape[1]
    kernel, shared = weights.conv.shape[1], heads.groups * heads.state_dim
    gate, inputs, steps = rows.double().split([heads.inner, heads.channels, heads.heads], -1)
    before = conv.double().T if continues else torch.zeros(kept, heads.channels, dtype=torch.float64)
    seen = torch.cat([before, inputs])
    windows = seen[len(seen) - new - kernel + 1 :].unfold(0, kernel, 1)  # [new, channels, kernel]
    bias = torch.zeros(heads.channels) if weights.conv_bias is None else weights.conv_bias
    mixed = F.silu((windows * weights.conv.double()).sum(-1) + bias.double())
    x, b, c = mixed.split([heads.inner, shared, shared], -1)
    x = x.view(new, heads.heads, heads.head_dim)
    b, c = (
        part.view(new, heads.groups, -1).repeat_interleave(heads.heads // heads.groups, 1) for part in (b, c)
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
    return result, seen[-kept:].T, carried


def relative(ours: Tensor, exact: Tensor) -> float:
    """Returns the largest relative root mean square error of a row."""
    exact = exact.flatten(1)
    error = (ours.double().flatten(1) - exact).square().mean(-1).sqrt()
    return float((error / exact.square().mean(-1).sqrt()).max())


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", HEADS)
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    heads: tuple[int, int, int, int], dtype: torch.dtype, states: torch.dtype
) -> None:
    made = mixer(*heads)
    conv, recurrent = made.pool(dtype, states)
    spans = [(1, 3, True), (70, 0, False), (33, 4, True), (2, 1, False)]  # new rows, slot, continues
    first = [0, *itertools.accumulate(new for new, _, _ in spans)]
    rows = made.rows(first[-1], dtype)
    exact = [
        in_float64(made, rows[row : row + new], conv[slot], recurrent[slot], continues=continues)
        for row, (new, slot, continues) in zip(first, spans, strict=False)
    ]
    untouched = conv[2].clone(), recurrent[2].clone()
    out = torch.empty(len(rows), made.heads.inner, dtype=dtype)
    sequences = torch.tensor([(row, *span) for row, span in zip(first, spans, strict=False)])
    StateSpaceLoops(made.heads, made.weights)(rows, sequences, conv, recurrent, out)
    for row, (new, slot, _), (result, kept, state) in zip(first, spans, exact, strict=False):
        assert relative(out[row : row + new], result) <= TOLERANCE[dtype]
        assert torch.equal(conv[slot].double(), kept)
        assert relative(recurrent[slot], state) <= TOLERANCE[states]
    assert torch.equal(conv[2], untouched[0])
    assert torch.equal(recurrent[2], untouched[1])


@pytest.mark.parametrize("cuts", [(1,) * 9, (64, 1, 32), (33, 31, 33), (5, 92)])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, total = mixer(8, 2, 32, 64), sum(cuts)
    conv, recurrent = made.pool(torch.float32, torch.float32)
    rows, width = made.rows(total, torch.float32), made.heads.inner
    loops = StateSpaceLoops(made.heads, made.weights)
    whole = torch.empty(total, width)
    loops(rows, torch.tensor([(0, total, 0, 0)]), conv, recurrent, whole)
    expected = conv[0].clone(), recurrent[0].clone()

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    first, parts = 0, []
    for tokens in cuts:
        mates = made.rows(
            7, torch.float32, seed=first
        )  # another sequence before it, with a state in another slot
        packed = torch.cat([mates, rows[first : first + tokens]])
        out = torch.empty(len(packed), width)
        loops(packed, torch.tensor([(0, 7, 3, 1), (7, tokens, 1, int(first > 0))]), conv, recurrent, out)
        parts.append(out[7:])
        first += tokens
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(conv[1], expected[0])
    assert torch.equal(recurrent[1], expected[1])


@pytest.mark.parametrize(("heads", "kernel", "norm_width"), [(5, 4, 8), (4, 1, 8), (4, 65, 8), (4, 4, 7)])
def test_sizes_without_loops_are_refused(heads: int, kernel: int, norm_width: int) -> None:
    sizes = StateSpaceHeads(heads, 2, 8, 8)
    given = (torch.zeros(heads) for _ in range(3))
    weights = StateSpaceWeights(
        torch.zeros(sizes.channels, kernel), None, *given, torch.zeros(sizes.inner), norm_width, 1e-6
    )
    with pytest.raises(ValueError, match="no loops"):
        StateSpaceLoops(sizes, weights)
