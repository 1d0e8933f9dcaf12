"""Structure of Mamba-2 mixers (kernels/cpu/state_space.py): Mamba-2, Bamba, Granite 4, Nemotron-H,
Zamba2, Falcon-H1.

Such a mixer is one projection to gates, inputs, B, C and time steps, a short convolution of inputs, B and C, a decay
and a direct path for each head, a gated norm, and a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rootstock.kernels.cpu.state_space import StateSpaceHeads, StateSpaceLoops, StateSpaceWeights
from rootstock.runtime.torch.fusion.recurrences import RecurrentParts
from rootstock.runtime.torch.mamba_time_steps import limits_of
from rootstock.runtime.torch.state_pool import TorchStateShape


def state_spaces(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    conv, before, after, norm = (children.get(name) for name in ("conv1d", "in_proj", "out_proj", "norm"))
    parameters = {name: parameter.detach() for name, parameter in mixer.named_parameters(recurse=False)}
    recurrent = [shape.shape for shape in shapes if shape.key.kind == "recurrent_states"]
    if type(conv) is not nn.Conv1d or type(before) is not nn.Linear or type(after) is not nn.Linear:
        return
    if set(parameters) != {"A_log", "D", "dt_bias"} or norm is None or len(recurrent) != 1:
        return
    if len(recurrent[0]) != 3 or conv.groups != conv.in_channels:
        return
    count, head_dim, state_dim = recurrent[0]
    inner = count * head_dim
    groups, rest = divmod(conv.in_channels - inner, 2 * state_dim)
    if rest or groups <= 0 or count % groups or after.in_features != inner:
        return
    if before.out_features != inner + conv.in_channels + count:
        return
    if any(each.shape != (count,) for each in parameters.values()):
        return
    heads = StateSpaceHeads(count, groups, head_dim, state_dim)
    factor = _factor(mixer, before)
    for gated_norm in _gated_norms(norm, inner, groups):
        weights = StateSpaceWeights(
            conv.weight.detach()[:, 0],
            conv.bias,
            -parameters["A_log"].float().exp(),
            parameters["dt_bias"],
            parameters["D"],
            **gated_norm,
            step_limits=limits_of(mixer),
        )
        try:
            loops = StateSpaceLoops(heads, weights)
        except ValueError:
            return
        yield RecurrentParts([before], loops, after, factor)


def _gated_norms(norm: nn.Module, inner: int, groups: int) -> Iterator[dict[str, Any]]:
    """Yields what a gated norm may compute, as fields of `StateSpaceWeights`."""
    if isinstance(norm, nn.Identity):
        yield {"norm": None}
        return
    eps, weights = getattr(norm, "variance_epsilon", None), dict(norm.named_parameters())
    if not isinstance(eps, float) or set(weights) != {"weight"} or weights["weight"].shape != (inner,):
        return
    for norm_width in dict.fromkeys((inner // groups, inner)):
        for gate_first in (True, False):
            fields = {"norm_width": norm_width, "eps": eps, "gate_first": gate_first}
            yield {"norm": weights["weight"].detach(), **fields}


def _factor(mixer: nn.Module, before: nn.Linear) -> Tensor | None:
    """Returns the factor of a Falcon-H1's projection, whose input has one as well."""
    of_columns, of_input = getattr(mixer, "mup_vector", None), getattr(mixer, "ssm_in_multiplier", 1.0)
    if not isinstance(of_columns, Tensor) or not isinstance(of_input, (int, float)):
        return None
    if "bias" in dict(before.named_parameters()):
        return None
    return of_columns.detach().float().flatten() * of_input
