"""Structure of mixers of the gated delta rule (kernels/cpu/gated_delta.py): Qwen3-Next and 3.5, OLMo-Hybrid.

Such a mixer is a short convolution of queries, keys and values, a decay and a strength for each value head, a gated
norm, and linear layers before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from rootstock.kernels.cpu.gated_delta import (
    Columns,
    DeltaNetColumns,
    DeltaNetHeads,
    DeltaNetWeights,
    GatedDeltaLoops,
)
from rootstock.runtime.torch.fusion.recurrences import RecurrentParts
from rootstock.runtime.torch.state_pool import TorchStateShape


def delta_nets(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    convs = [child for child in children.values() if type(child) is nn.Conv1d]
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    norms = [
        child for child in children.values() if [name for name, _ in child.named_parameters()] == ["weight"]
    ]
    norms = [norm for norm in norms if norm not in convs and norm not in linears.values()]
    own_names = {name for name, _ in mixer.named_parameters(recurse=False)}
    recurrent = [shape.shape for shape in shapes if shape.key.kind == "recurrent_states"]
    if len(convs) != 1 or len(norms) != 1 or len(recurrent) != 1 or own_names != {"A_log", "dt_bias"}:
        return
    conv, norm = convs[0], norms[0]
    eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)
    if len(recurrent[0]) != 3 or not isinstance(eps, float):
        return
    values, key_dim, value_dim = recurrent[0]
    keys, rest = divmod(conv.in_channels - values * value_dim, 2 * key_dim)
    if (
        rest
        or keys <= 0
        or values % keys
        or conv.groups != conv.in_channels
        or norm.weight.shape != (value_dim,)
    ):
        return
    heads = DeltaNetHeads(keys, values, key_dim, value_dim)
    arranged = _arranged(heads, linears)
    if arranged is None:
        return
    inputs, output, columns = arranged
    parameters = {name: parameter.detach() for name, parameter in mixer.named_parameters()}
    decay, time_bias = -parameters["A_log"].float().exp(), parameters["dt_bias"]
    if decay.shape != (values,) or time_bias.shape != (values,):
        return
    norm_weight = next(iter(norm.parameters())).detach()
    for strength in (1.0, 2.0):  # 2: negative eigenvalues are allowed
        weights = DeltaNetWeights(
            conv.weight.detach()[:, 0], conv.bias, decay, time_bias, norm_weight, eps, strength
        )
        try:
            made = GatedDeltaLoops(heads, columns, weights)
        except ValueError:
            return
        yield RecurrentParts(inputs, made, output)


def _arranged(
    heads: DeltaNetHeads, linears: dict[str, nn.Linear]
) -> tuple[list[nn.Linear], nn.Linear, DeltaNetColumns] | None:
    """Returns the linear layers before and after, and where their outputs are side by side. None: unknown names."""
    group = heads.values // heads.keys
    of_value = group * heads.value_dim
    all_keys, all_values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    match sorted(linears):
        case ["in_proj_ba", "in_proj_qkvz", "out_proj"]:  # by key heads
            step = 2 * heads.key_dim + 2 * of_value
            behind = heads.keys * step
            columns = DeltaNetColumns(
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
    width = 2 * all_keys + 2 * all_values + 2 * heads.values
    before = [linears[name] for name in inputs]
    if sum(linear.out_features for linear in before) != width or linears[output].in_features != all_values:
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
    return DeltaNetColumns(*columns)
