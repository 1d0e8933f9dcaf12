"""Loops of the gated delta rule: against the same computation in float64, and in other divisions of a step."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.cpu.gated_delta import (
    Columns,
    DeltaNetColumns,
    DeltaNetHeads,
    DeltaNetWeights,
    GatedDeltaLoops,
)
from rootstock.kernels.cpu.short_convolution import scratch_at

SLOTS = 5
# Of a row, relative root mean square: one rounding of the result, and float32's of a state that 70 tokens change.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# keys, value heads of a key, key_dim, value_dim; among them odd sizes, and sizes that are no multiple of a vector.
HEADS = [(2, 1, 16, 16), (2, 2, 8, 24), (1, 3, 7, 40), (3, 2, 128, 128)]


@dataclass
class Mixer:
    """Random mixer: weights, a pool of states, and rows of projections."""

    heads: DeltaNetHeads
    columns: DeltaNetColumns
    weights: DeltaNetWeights
    width: int

    def rows(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.width, generator=generator).to(dtype)

    def pool(self, dtype: torch.dtype, states: torch.dtype, kept: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        heads = self.heads
        conv = torch.randn(SLOTS, heads.channels, kept, generator=generator).to(dtype)
        recurrent = torch.randn(SLOTS, heads.values, heads.key_dim, heads.value_dim, generator=generator)
        return conv, (0.3 * recurrent).to(states)


def mixer(
    keys: int, group: int, key_dim: int, value_dim: int, kernel: int = 4, *, by_heads: bool = True
) -> Mixer:
    heads = DeltaNetHeads(keys, keys * group, key_dim, value_dim)
    widths = (key_dim, key_dim, group * value_dim, group * value_dim, group, group)
    if by_heads:  # each key head's parts are side by side
        columns = [Columns(at, sum(widths)) for at in itertools.accumulate((0, *widths[:-1]))]
    else:
        at = itertools.accumulate((0, *(keys * width for width in widths[:-1])))
        columns = [Columns(first, width) for first, width in zip(at, widths, strict=True)]
    torch.manual_seed(keys + group + key_dim)
    weights = DeltaNetWeights(
        conv=torch.randn(heads.channels, kernel) * 0.5,
        conv_bias=torch.randn(heads.channels) * 0.5 if group == 2 else None,
        decay=-2 * torch.rand(heads.values),
        time_bias=torch.randn(heads.values),
        norm=torch.rand(value_dim) + 0.5,
        eps=1e-6,
        strength=2.0 if group == 3 else 1.0,
    )
    return Mixer(heads, DeltaNetColumns(*columns), weights, keys * sum(widths))


def in_float64(
    given: Mixer, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one sequence. Returns its rows, the inputs that its convolution keeps, and its state."""
    heads, weights, columns = given.heads, given.weights, given.columns
    group, new, kept = heads.values // heads.keys, len(rows), conv.shape[1]
    kernel = weights.conv.shape[1]

    def part(place: Columns, width: int) -> Tensor:
        shares = [
            rows[:, place.at + h * place.step : place.at + h * place.step + width] for h in range(heads.keys)
        ]
        return torch.cat(shares, -1).double()

    inputs = torch.cat(
        [
            part(columns.query, heads.key_dim),
            part(columns.key, heads.key_dim),
            part(columns.value, group * heads.value_dim),
        ],
        -1,
    )
    before = conv.double().T if continues else torch.zeros(kept, heads.channels, dtype=torch.float64)
    seen = torch.cat([before, inputs])
    windows = seen[len(seen) - new - kernel + 1 :].unfold(0, kernel, 1)  # [new, channels, kernel]
    bias = torch.zeros(heads.channels) if weights.conv_bias is None else weights.conv_bias
    mixed = F.silu((windows * weights.conv.double()).sum(-1) + bias.double())
    of_keys = heads.keys * heads.key_dim
    query, key, value = mixed.split([of_keys, of_keys, heads.values * heads.value_dim], -1)

    def unit(vectors: Tensor) -> Tensor:
        vectors = vectors.view(new, heads.keys, heads.key_dim)
        vectors = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
        return vectors.repeat_interleave(group, 1)

    query, key = unit(query) / heads.key_dim**0.5, unit(key)
    value = value.view(new, heads.values, heads.value_dim)
    decay = torch.exp(
        weights.decay.double() * F.softplus(part(columns.time_step, group) + weights.time_bias.double())
    )
    strength = weights.strength * torch.sigmoid(part(columns.strength, group))
    carried = state.double() if continues else torch.zeros_like(state, dtype=torch.float64)
    results = []
    for t in range(new):
        carried = carried * decay[t][:, None, None]
        expected = (carried * key[t][..., None]).sum(1)
        change = (value[t] - expected) * strength[t][:, None]
        carried = carried + key[t][..., None] * change[:, None]
        results.append((carried * query[t][..., None]).sum(1))
    read = torch.stack(results)
    read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
    gate = part(columns.gate, group * heads.value_dim).view_as(read)
    return (read * F.silu(gate)).flatten(1), seen[-kept:].T, carried


def relative(ours: Tensor, exact: Tensor) -> float:
    """Returns the largest relative root mean square error of a row."""
    exact = exact.flatten(1)
    error = (ours.double().flatten(1) - exact).square().mean(-1).sqrt()
    return float((error / exact.square().mean(-1).sqrt()).max())


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("by_heads", [True, False], ids=["by heads", "by parts"])
@pytest.mark.parametrize("heads", HEADS)
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    heads: tuple[int, int, int, int], by_heads: bool, dtype: torch.dtype, states: torch.dtype
) -> None:
    made = mixer(*heads, by_heads=by_heads)
    conv, recurrent = made.pool(dtype, states, kept=4)
    spans = [(1, 3, True), (70, 0, False), (33, 4, True), (2, 1, False)]  # new rows, slot, continues
    first = [0, *itertools.accumulate(new for new, _, _ in spans)]
    rows = made.rows(first[-1], dtype)
    exact = [
        in_float64(made, rows[row : row + new], conv[slot], recurrent[slot], continues=continues)
        for row, (new, slot, continues) in zip(first, spans, strict=False)
    ]
    untouched = conv[2].clone(), recurrent[2].clone()
    out = torch.empty(len(rows), made.heads.values * made.heads.value_dim, dtype=dtype)
    sequences = torch.tensor([(row, *span) for row, span in zip(first, spans, strict=False)])
    GatedDeltaLoops(made.heads, made.columns, made.weights)(rows, sequences, conv, recurrent, out)
    for row, (new, slot, _), (result, kept, state) in zip(first, spans, exact, strict=False):
        assert relative(out[row : row + new], result) <= TOLERANCE[dtype]
        assert torch.equal(conv[slot].double(), kept)
        assert relative(recurrent[slot], state) <= TOLERANCE[states]
    assert torch.equal(conv[2], untouched[0])
    assert torch.equal(recurrent[2], untouched[1])


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("kept", [3, 4, 6])
def test_a_state_keeps_the_inputs_that_a_short_piece_leaves(kernel: int, kept: int) -> None:
    made = mixer(2, 1, 8, 8, kernel)
    conv, recurrent = made.pool(torch.float32, torch.float32, kept)
    loops = GatedDeltaLoops(made.heads, made.columns, made.weights)
    before, state, continues = conv[0].clone(), recurrent[0].clone(), False
    for number, new in enumerate((1, 2, 1, 5)):
        rows = made.rows(new, torch.float32, seed=number)
        exact, kept_inputs, kept_state = in_float64(made, rows, before, state, continues=continues)
        out = torch.empty(new, made.heads.values * made.heads.value_dim)
        loops(rows, torch.tensor([(0, new, 0, int(continues))]), conv, recurrent, out)
        assert relative(out, exact) <= TOLERANCE[torch.float32]
        assert torch.equal(conv[0].double(), kept_inputs)
        before, state, continues = conv[0].clone(), kept_state, True


@pytest.mark.parametrize("cuts", [(1,) * 9, (64, 1, 32), (33, 31, 33), (5, 92)])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_mates_and_threads_change_no_bit(
    cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, total = mixer(3, 2, 64, 48), sum(cuts)
    conv, recurrent = made.pool(torch.float32, torch.float32, kept=4)
    rows, width = made.rows(total, torch.float32), made.heads.values * made.heads.value_dim
    loops = GatedDeltaLoops(made.heads, made.columns, made.weights)
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


@pytest.mark.parametrize(("values", "kernel"), [(5, 4), (4, 1), (4, 65)])
def test_sizes_without_loops_are_refused(values: int, kernel: int) -> None:
    made = mixer(2, 2, 8, 8)
    heads = DeltaNetHeads(2, values, 8, 8)
    weights = DeltaNetWeights(
        torch.zeros(heads.channels, kernel),
        None,
        torch.zeros(values),
        torch.zeros(values),
        torch.zeros(8),
        1e-6,
    )
    with pytest.raises(ValueError, match="no loops"):
        GatedDeltaLoops(heads, made.columns, weights)


def test_models_on_other_threads_have_scratch_memory_of_their_own() -> None:
    """One model may be checked while another one computes."""
    there: list[int] = []
    thread = threading.Thread(target=lambda: there.append(scratch_at(64)))
    here = scratch_at(64)
    thread.start()
    thread.join()
    assert there != [here]
    assert scratch_at(32) == here
