"""Structure of Mamba-1 mixers (kernels/cpu/selective_scan.py): Mamba, Falcon-Mamba, Jamba.

Such a mixer is one projection to inputs and gates, a short convolution, a projection of its result to B, C and a few
columns from which another one makes the time steps, norms of these in some families, a scan, and a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.row_loops import RowLoops
from rootstock.kernels.cpu.selective_scan import SelectiveScanLoops, SelectiveScanWeights
from rootstock.runtime.torch.fusion.base import Projection
from rootstock.runtime.torch.fusion.recurrences import RecurrentParts
from rootstock.runtime.torch.state_pool import TorchStateShape


def selective_scans(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    parameters = {name: parameter.detach() for name, parameter in mixer.named_parameters(recurse=False)}
    conv = children.get("conv1d")
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    recurrent = [shape.shape for shape in shapes if shape.key.kind == "recurrent_states"]
    if set(linears) != {"in_proj", "x_proj", "dt_proj", "out_proj"} or set(parameters) != {"A_log", "D"}:
        return
    if type(conv) is not nn.Conv1d or conv.groups != conv.in_channels or len(recurrent) != 1:
        return
    channels, rank, state_dim = conv.in_channels, linears["dt_proj"].in_features, recurrent[0][-1]
    widths = {
        "in_proj": (linears["in_proj"].in_features, 2 * channels),
        "x_proj": (channels, rank + 2 * state_dim),
        "dt_proj": (rank, channels),
        "out_proj": (channels, linears["out_proj"].out_features),
    }
    if any((linear.in_features, linear.out_features) != widths[name] for name, linear in linears.items()):
        return
    shape = (channels, state_dim)
    if recurrent[0] != shape or parameters["A_log"].shape != shape or parameters["D"].shape != (channels,):
        return
    norms = [children.get(f"{name}_layernorm") for name in ("dt", "b", "c")]
    eps, (steps, *of_vectors) = _eps(norms), _weights(norms, (rank, state_dim, state_dim))
    weights = SelectiveScanWeights(
        conv.weight.detach()[:, 0],
        conv.bias,
        -parameters["A_log"].float().exp(),
        parameters["D"],
        None if eps is None else (of_vectors[0], of_vectors[1]),
        eps or 0.0,
    )
    dtype = linears["x_proj"].weight.dtype
    inside = Projection([linears["x_proj"]])
    norm = None if eps is None else steps
    project = _StepProjection(inside, linears["dt_proj"], rank, norm, eps or 0.0, RowLoops(dtype))
    try:
        loops = SelectiveScanLoops(weights, project)
    except ValueError:
        return
    yield RecurrentParts([linears["in_proj"]], loops, linears["out_proj"], inside=[inside])


@dataclass(frozen=True, slots=True, eq=False)
class _StepProjection:
    """Linear layers between convolution and scan, as `ProjectSteps` has them."""

    parameters: Projection
    steps: nn.Linear  # its weight is read, as mixers themselves do, so that it is not packed
    rank: int  # columns of the parameters from which the time steps are made
    norm: Tensor | None  # of these columns, [rank] float32
    eps: float
    loops: RowLoops

    def __call__(self, convolved: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self.parameters.multiply(convolved)
        columns = parameters[:, : self.rank].contiguous()
        if self.norm is not None:
            self.loops.rms_norm(columns, self.norm, self.eps, columns)
        return nn.functional.linear(columns, self.steps.weight, self.steps.bias), parameters


def _eps(norms: Sequence[nn.Module | None]) -> float | None:
    """Returns the epsilon that all norms have. None: there is none."""
    found = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    eps = found.pop()
    return eps if isinstance(eps, float) and not found else None


def _weights(norms: Sequence[nn.Module | None], widths: Sequence[int]) -> list[Tensor]:
    """Returns the weights of norms, float32. A norm without parameters of its width has ones."""
    weights = []
    for norm, width in zip(norms, widths, strict=True):
        own = [] if norm is None else [each.detach().float() for each in norm.parameters()]
        weights.append(own[0] if len(own) == 1 and own[0].shape == (width,) else torch.ones(width))
    return weights
