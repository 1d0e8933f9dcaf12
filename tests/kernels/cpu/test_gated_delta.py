"""Loops of the gated delta rule: against the same computation in float64, and in other divisions of a step."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from kernels.recurrent_cases import (
    CUTS,
    RandomMixer,
    compute_in_pieces_beside_mates,
    compute_sequences_of_any_length,
    relative,
)
from rootstock.kernels.cpu.gated_delta import (
    Columns,
    DeltaNetColumns,
    DeltaNetHeads,
    DeltaNetWeights,
    GatedDeltaLoops,
)
from rootstock.kernels.cpu.recurrent_loops import scratch_at

# Of a row, relative root mean square: one rounding of the result, and float32's of a state that 70 tokens change.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# keys, value heads of a key, key_dim, value_dim; among them odd sizes, and sizes that are no multiple of a vector.
HEADS = [(2, 1, 16, 16), (2, 2, 8, 24), (1, 3, 7, 40), (3, 2, 128, 128)]


class DeltaNet(RandomMixer):
    states_scale = 0.3

    def __init__(
        self,
        keys: int,
        group: int,
        key_dim: int,
        value_dim: int,
        kernel: int = 4,
        *,
        by_heads: bool = True,
        by_channel: bool = False,
        least_decay: float = 0.0,
    ) -> None:
        self.heads = heads = DeltaNetHeads(keys, keys * group, key_dim, value_dim)
        of_steps = group * key_dim if by_channel else group
        widths = (key_dim, key_dim, group * value_dim, group * value_dim, group, of_steps)
        if by_heads:  # each key head's parts are side by side
            columns = [Columns(at, sum(widths)) for at in itertools.accumulate((0, *widths[:-1]))]
        else:
            at = itertools.accumulate((0, *(keys * width for width in widths[:-1])))
            columns = [Columns(first, width) for first, width in zip(at, widths, strict=True)]
        self.columns, self.width = DeltaNetColumns(keys * sum(widths), *columns), keys * sum(widths)
        self.channels, self.state_shape = heads.channels, (heads.values, key_dim, value_dim)
        torch.manual_seed(keys + group + key_dim)
        self.conv_weight = torch.randn(heads.channels, kernel) * 0.5
        self.conv_bias = torch.randn(heads.channels) * 0.5 if group == 2 else None
        self.weights = DeltaNetWeights(
            conv=self.conv_weight,
            conv_bias=self.conv_bias,
            decay=-2 * torch.rand(heads.values),
            time_bias=torch.randn(heads.values, key_dim) if by_channel else torch.randn(heads.values),
            norm=torch.rand(value_dim) + 0.5,
            eps=1e-6,
            strength=2.0 if group == 3 else 1.0,
            least_decay=least_decay,
            sigmoid_gate=by_channel,
        )

    def loops(self) -> GatedDeltaLoops:
        return GatedDeltaLoops(self.heads, self.columns, self.weights)

    def in_float64(
        self, rows: Tensor, conv: Tensor, state: Tensor, *, continues: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, weights, columns = self.heads, self.weights, self.columns
        group, new = heads.values // heads.keys, len(rows)

        def part(place: Columns, width: int) -> Tensor:
            shares = [
                rows[:, place.at + h * place.step : place.at + h * place.step + width]
                for h in range(heads.keys)
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
        mixed, kept = self.convolved(inputs, conv, continues=continues)
        of_keys = heads.keys * heads.key_dim
        query, key, value = mixed.split([of_keys, of_keys, heads.values * heads.value_dim], -1)

        def unit(vectors: Tensor) -> Tensor:
            vectors = vectors.view(new, heads.keys, heads.key_dim)
            vectors = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
            return vectors.repeat_interleave(group, 1)

        query, key = unit(query) / heads.key_dim**0.5, unit(key)
        value = value.view(new, heads.values, heads.value_dim)
        bias = weights.time_bias.double().view(heads.values, -1)
        steps = part(columns.time_step, group * bias.shape[1]).view(new, heads.values, -1) + bias
        rates = weights.decay.double()[:, None]
        if weights.least_decay:
            decay = torch.exp(weights.least_decay * torch.sigmoid(-rates * steps))
        else:
            decay = torch.exp(rates * F.softplus(steps, threshold=50))
        strength = weights.strength * torch.sigmoid(part(columns.strength, group))
        carried = state.double() if continues else torch.zeros_like(state, dtype=torch.float64)
        results = []
        for t in range(new):
            carried = carried * decay[t][..., None]
            expected = (carried * key[t][..., None]).sum(1)
            change = (value[t] - expected) * strength[t][:, None]
            carried = carried + key[t][..., None] * change[:, None]
            results.append((carried * query[t][..., None]).sum(1))
        read = torch.stack(results)
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
        gate = part(columns.gate, group * heads.value_dim).view_as(read)
        gate = torch.sigmoid(gate) if weights.sigmoid_gate else F.silu(gate)
        return (read * gate).flatten(1), kept, carried


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("by_heads", [True, False], ids=["by heads", "by parts"])
@pytest.mark.parametrize("heads", HEADS)
def test_sequences_of_any_length_are_computed_and_their_states_kept(
    heads: tuple[int, int, int, int], by_heads: bool, dtype: torch.dtype, states: torch.dtype
) -> None:
    compute_sequences_of_any_length(DeltaNet(*heads, by_heads=by_heads), dtype, states, TOLERANCE)


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("least_decay", [0.0, -5.0])
@pytest.mark.parametrize("heads", HEADS)
def test_each_key_channel_may_have_a_decay(
    heads: tuple[int, int, int, int], least_decay: float, dtype: torch.dtype, states: torch.dtype
) -> None:
    mixer = DeltaNet(*heads, by_channel=True, least_decay=least_decay)
    compute_sequences_of_any_length(mixer, dtype, states, TOLERANCE)


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("kept", [3, 4, 6])
def test_a_state_keeps_the_inputs_that_a_short_piece_leaves(kernel: int, kept: int) -> None:
    made = DeltaNet(2, 1, 8, 8, kernel)
    conv, recurrent = made.pool(torch.float32, torch.float32, kept)
    loops = made.loops()
    before, state, continues = conv[0].clone(), recurrent[0].clone(), False
    for number, new in enumerate((1, 2, 1, 5)):
        rows = made.rows(new, torch.float32, seed=number)
        exact, kept_inputs, kept_state = made.in_float64(rows, before, state, continues=continues)
        out = torch.empty(new, loops.inner)
        loops(rows, torch.tensor([(0, new, 0, int(continues))]), conv, recurrent, out)
        assert relative(out, exact) <= TOLERANCE[torch.float32]
        assert torch.equal(conv[0].double(), kept_inputs)
        before, state, continues = conv[0].clone(), kept_state, True


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by_channel", [False, True])
def test_chunks_mates_and_threads_change_no_bit(
    by_channel: bool, cuts: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer = DeltaNet(3, 2, 64, 48, by_channel=by_channel)
    compute_in_pieces_beside_mates(mixer, cuts, threads, monkeypatch)


@pytest.mark.parametrize(("values", "kernel"), [(5, 4), (4, 1), (4, 65)])
def test_sizes_without_loops_are_refused(values: int, kernel: int) -> None:
    made = DeltaNet(2, 2, 8, 8)
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
