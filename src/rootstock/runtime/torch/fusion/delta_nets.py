"""Structure of mixers of the gated delta rule (kernels/cpu/gated_delta.py): Qwen3-Next and 3.5, OLMo-Hybrid; and of
Kimi's delta rule: Kimi Linear, Bailing Hybrid.

Such a mixer is a short convolution of queries, keys and values, a decay and a strength for each value head, a gated
norm, and linear layers before and after. By Kimi's rule each key channel has a decay, and time steps and gates may
come from two linear layers each, of which the first has few outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rootstock.kernels.cpu.gated_delta import (
    Columns,
    DeltaNetColumns,
    DeltaNetHeads,
    DeltaNetWeights,
    GatedDeltaLoops,
)
from rootstock.runtime.torch.fusion.base import Projection
from rootstock.runtime.torch.fusion.recurrences import RecurrentParts
from rootstock.runtime.torch.state_pool import TorchStateShape


def delta_nets(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    own_names = {name for name, _ in mixer.named_parameters(recurse=False)}
    shared = _shared(mixer, shapes)
    if shared is None or own_names != {"A_log", "dt_bias"}:
        return
    heads, conv, norm_weight, eps = shared
    arranged = _arranged(heads, linears)
    if arranged is None:
        return
    inputs, output, columns = arranged
    parameters = {name: parameter.detach() for name, parameter in mixer.named_parameters()}
    decay, time_bias = -parameters["A_log"].float().exp(), parameters["dt_bias"]
    if decay.shape != (heads.values,) or time_bias.shape != (heads.values,):
        return
    # A strength of up to 2 allows negative eigenvalues.
    for strength, sigmoid_gate in ((1.0, False), (2.0, False), (1.0, True)):
        weights = DeltaNetWeights(
            conv.weight.detach()[:, 0],
            conv.bias,
            decay,
            time_bias,
            norm_weight,
            eps,
            strength,
            sigmoid_gate=sigmoid_gate,
        )
        try:
            made = GatedDeltaLoops(heads, columns, weights)
        except ValueError:
            return
        yield RecurrentParts(inputs, made, output)


def channel_delta_nets(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer of Kimi's delta rule may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    shared, forget = _shared(mixer, shapes), children.get("forget_gate")
    if shared is None or forget is None or any(True for _ in mixer.parameters(recurse=False)):
        return
    heads, conv, norm_weight, eps = shared
    of_forget = dict(forget.named_parameters(recurse=False))
    layers = {
        name: child
        for name, child in (*children.items(), *forget.named_children())
        if type(child) is nn.Linear
    }
    direct = ["q_proj", "k_proj", "v_proj", "b_proj"]
    steps, gates = (_stacked(layers, name) for name in "fg")
    after = layers.get("o_proj")
    if steps is None or gates is None or after is None or set(of_forget) != {"A_log", "dt_bias"}:
        return
    if heads.keys != heads.values or set(layers) != {*direct, "o_proj", *steps, *gates}:
        return
    rates, bias = of_forget["A_log"].detach().float().exp().flatten(), of_forget["dt_bias"].detach()
    channels, inner = heads.values * heads.key_dim, heads.values * heads.value_dim
    if rates.shape != (heads.values,) or bias.shape != (channels,) or after.in_features != inner:
        return
    before = [layers[name] for name in (*direct, steps[0], gates[0])]
    widths = [linear.out_features for linear in before]
    if widths[:4] != [channels, channels, inner, heads.values]:
        return
    if layers[steps[-1]].out_features != channels or layers[gates[-1]].out_features != inner:
        return
    to_steps, to_gates = (
        Projection([layers[names[1]]]) if len(names) == 2 else None for names in (steps, gates)
    )
    inside = [layer for layer in (to_steps, to_gates) if layer is not None]
    steps_at, gates_at = sum(widths[:4]), sum(widths[:5])
    project = _GateProjection((steps_at, widths[4]), (gates_at, widths[5]), to_steps, to_gates)
    columns = DeltaNetColumns(
        sum(widths),
        query=Columns(0, heads.key_dim),
        key=Columns(channels, heads.key_dim),
        value=Columns(2 * channels, heads.value_dim),
        gate=Columns(0 if to_gates else gates_at, heads.value_dim),
        strength=Columns(2 * channels + inner, 1),
        time_step=Columns(0 if to_steps else steps_at, heads.key_dim),
    )
    bounds = [value for value in vars(forget).values() if isinstance(value, (int, float)) and value < 0]
    for least in (0.0, *bounds):
        weights = DeltaNetWeights(
            conv.weight.detach()[:, 0],
            conv.bias,
            -rates,
            bias.view(heads.values, heads.key_dim),
            norm_weight,
            eps,
            least_decay=least,
            sigmoid_gate=True,
        )
        try:
            loops = GatedDeltaLoops(heads, columns, weights, project)
        except ValueError:
            return
        yield RecurrentParts(before, loops, after, inside=inside)


def _stacked(layers: dict[str, nn.Linear], letter: str) -> list[str] | None:
    """Returns the names of the one or two linear layers that make time steps (f) or gates (g)."""
    for names in ([f"{letter}_proj"], [f"{letter}_a_proj", f"{letter}_b_proj"]):
        if all(name in layers for name in names):
            return names
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _GateProjection:
    """Second linear layers of time steps and gates, as `ProjectGates` has them. None: there is only the first."""

    step_columns: tuple[int, int]  # first column of the rows, and the number of columns
    gate_columns: tuple[int, int]
    to_steps: Projection | None
    to_gates: Projection | None

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        steps, gates = (
            rows if layer is None else layer.multiply(rows.narrow(1, *columns).contiguous())
            for columns, layer in ((self.step_columns, self.to_steps), (self.gate_columns, self.to_gates))
        )
        return steps, gates


def _shared(
    mixer: nn.Module, shapes: Sequence[TorchStateShape]
) -> tuple[DeltaNetHeads, nn.Conv1d, Tensor, float] | None:
    """Returns the parts that both rules have: heads, the convolution, and the norm's weight and epsilon."""
    children = [child for child in mixer.children() if type(child) is not nn.Linear]
    convs = [child for child in children if type(child) is nn.Conv1d]
    norms = [child for child in children if [name for name, _ in child.named_parameters()] == ["weight"]]
    norms = [norm for norm in norms if norm not in convs]
    recurrent = [shape.shape for shape in shapes if shape.key.kind == "recurrent_states"]
    if len(convs) != 1 or len(norms) != 1 or len(recurrent) != 1 or len(recurrent[0]) != 3:
        return None
    conv, norm = convs[0], norms[0]
    eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)
    values, key_dim, value_dim = recurrent[0]
    keys, rest = divmod(conv.in_channels - values * value_dim, 2 * key_dim)
    weight = next(norm.parameters()).detach()
    if not isinstance(eps, float) or rest or keys <= 0 or values % keys:
        return None
    if conv.groups != conv.in_channels or weight.shape != (value_dim,):
        return None
    return DeltaNetHeads(keys, values, key_dim, value_dim), conv, weight, eps


def _arranged(
    heads: DeltaNetHeads, linears: dict[str, nn.Linear]
) -> tuple[list[nn.Linear], nn.Linear, DeltaNetColumns] | None:
    """Returns the linear layers before and after, and where their outputs are side by side. None: unknown names."""
    group = heads.values // heads.keys
    of_value = group * heads.value_dim
    all_values = heads.values * heads.value_dim
    match sorted(linears):
        case ["in_proj_ba", "in_proj_qkvz", "out_proj"]:  # by key heads
            step = 2 * heads.key_dim + 2 * of_value
            behind = heads.keys * step
            columns = DeltaNetColumns(
                width=behind + 2 * heads.values,
                query=Columns(0, step),
                key=Columns(heads.key_dim, step),
                value=Columns(2 * heads.key_dim, step),
                gate=Columns(2 * heads.key_dim + of_value, step),
                strength=Columns(behind, 2 * group),
                time_step=Columns(behind + group, 2 * group),
            )
            inputs, output = ["in_proj_qkvz", "in_proj_ba"], "out_proj"
        case ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]:
            inputs, output = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], "out_proj"
            columns = _by_parts(heads)
        case ["a_proj", "b_proj", "g_proj", "k_proj", "o_proj", "q_proj", "v_proj"]:
            inputs, output = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"], "o_proj"
            columns = _by_parts(heads)
        case _:
            return None
    before = [linears[name] for name in inputs]
    if (
        sum(linear.out_features for linear in before) != columns.width
        or linears[output].in_features != all_values
    ):
        return None
    return before, linears[output], columns


def _by_parts(heads: DeltaNetHeads) -> DeltaNetColumns:
    """Returns the columns of queries, keys, values, gates, strengths and time steps, one part after the other."""
    group = heads.values // heads.keys
    widths = (
        heads.key_dim,
        heads.key_dim,
        group * heads.value_dim,
        group * heads.value_dim,
        group,
        group,
    )
    at, columns = 0, []
    for width in widths:
        columns.append(Columns(at, width))
        at += heads.keys * width
    return DeltaNetColumns(at, *columns)
