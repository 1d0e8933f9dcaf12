"""Fused mixers of the gated delta rule (kernels/cpu/gated_delta.py), found by structure.

Such a mixer is a short convolution of queries, keys and values, a decay and a strength for each value head, a gated
norm, and linear layers before and after. The rule's own code rounds differently in narrow formats. A candidate is
therefore compared in a float32 copy of the mixer: a prompt, a longer piece and a token after it, results and states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.gated_delta import (
    Columns,
    DeltaNetColumns,
    DeltaNetHeads,
    DeltaNetWeights,
    GatedDeltaLoops,
)
from rootstock.runtime.torch.fusion.base import FusedStep, Projection
from rootstock.runtime.torch.fusion.modules import FusedLoops, FusedMixer, only_harmless
from rootstock.runtime.torch.module_parts import StepCache
from rootstock.runtime.torch.state_pool import LayerStates, StateCache, TorchStatePool, TorchStateShape

_TOLERANCE = 1e-4  # relative root mean square, of each row and each head's state
_PIECES = (9, 6, 1)  # tokens of each call of the comparison
_SCALES = (1.0, 16.0, 1 / 256)


@dataclass(eq=False)
class FusedDeltaNet(FusedMixer):
    """Fused mixer: one projection, the loops, and a projection of their result."""

    index: int  # number of the layer
    inputs: Projection
    output: Projection
    mixer: GatedDeltaLoops
    loops: FusedLoops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = next((given for given in kwargs.values() if isinstance(given, FusedStep)), None)
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if args[1:] or step is None or not (isinstance(hidden, Tensor) and only_harmless(kwargs)):
            return self.own(*args, **kwargs)
        if hidden.dtype != self.loops.dtype or hidden.shape[0] != 1 or not self.serves(step):
            return self.own(*args, **kwargs)
        return self.rows(hidden[0], None, step)[None]

    def serves(self, step: FusedStep) -> bool:
        return step.states_of(self.index, self.loops.dtype) is not None

    def rows(self, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep) -> Tensor:
        states = step.states_of(self.index, self.loops.dtype)
        assert states is not None, "`serves` was not asked"
        heads = self.mixer.heads
        mixed = self.loops.scratch("mixed", len(rows), heads.values * heads.value_dim)
        projected = self.inputs.multiply(rows)
        self.mixer(projected, states.sequences, states.conv, states.recurrent, mixed)
        return self.output.multiply(mixed)


def delta_nets(
    mixer: nn.Module, own: Any, index: int, shapes: Sequence[TorchStateShape], loops: FusedLoops
) -> Iterator[FusedDeltaNet]:
    """Yields the forms that a mixer may have. `shapes`: of the layer's states."""
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
    if len(recurrent[0]) != 3 or conv.bias is not None or not isinstance(eps, float):
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
        weights = DeltaNetWeights(conv.weight.detach()[:, 0], decay, time_bias, norm_weight, eps, strength)
        try:
            made = GatedDeltaLoops(heads, columns, weights)
        except ValueError:
            return
        yield FusedDeltaNet(own, index, Projection(inputs), Projection([output]), made, loops)


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


# ---- the comparison


def agreeing(
    mixer: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    index: int,
    shapes: Sequence[TorchStateShape],
    loops: FusedLoops,
) -> FusedDeltaNet | None:
    """Returns the form that computes what the mixer computes, or None. `call`: arguments of a recorded call.

    Allocates a float32 copy of the mixer while it compares.
    """
    own = mixer.forward
    forms = list(delta_nets(mixer, own, index, shapes, loops))
    args, kwargs = call
    cache_name = next((name for name, given in kwargs.items() if isinstance(given, StepCache)), None)
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if (
        not forms
        or cache_name is None
        or args[1:]
        or not isinstance(hidden, Tensor)
        or not only_harmless(kwargs)
    ):
        return None
    del mixer.forward  # of the instance: it refers to the mixer
    try:
        copied = copy.deepcopy(mixer).float()
    finally:
        mixer.forward = own
    wide = [
        TorchStateShape(shape.key, shape.shape, torch.float32, torch.float32, shape.conv_kernel)
        for shape in shapes
    ]
    given = hidden[0].float()
    rows = torch.cat([given, -given.flip(0), given.roll(1, -1), given.flip(-1)])
    rows = rows.repeat(-(-sum(_PIECES) // len(rows)), 1)[: sum(_PIECES)]
    in_float32 = delta_nets(copied, own, index, wide, FusedLoops(torch.float32))
    for form, same in zip(forms, in_float32, strict=True):
        try:
            if all(_agree(copied, same, cache_name, rows * times, wide) for times in _SCALES):
                return form
        except Exception:  # the mixer's own code, or a shape that does not fit: the form does not apply
            return None
    return None


def _agree(
    mixer: nn.Module, form: FusedDeltaNet, cache_name: str, rows: Tensor, shapes: Sequence[TorchStateShape]
) -> bool:
    device = torch.device("cpu")
    expected, ours = (TorchStatePool(shapes, 1, device) for _ in range(2))
    first = 0
    for tokens in _PIECES:
        piece = rows[first : first + tokens]
        cache = StateCache(expected, torch.zeros(1, dtype=torch.int64), continues=first > 0)
        result = mixer(piece[None], **{cache_name: cache})
        cache.keep()
        given = result[0] if isinstance(result, tuple) else result
        got = form.rows(piece, None, OneSequence(ours, tokens, continues=first > 0))
        if given.shape != (1, *got.shape) or not _alike(given[0], got):
            return False
        first += tokens
    return all(
        _alike(theirs.tensor.flatten(0, 1), own.tensor.flatten(0, 1))
        for theirs, own in zip(expected.memories, ours.memories, strict=True)
    )


def _alike(expected: Tensor, got: Tensor) -> bool:
    """Compares row by row, over the last axis or the last two."""
    exact = expected.double().flatten(1)
    error = (exact - got.double().flatten(1)).square().mean(-1).sqrt()
    return bool((error <= _TOLERANCE * exact.square().mean(-1).sqrt() + 1e-30).all())


class OneSequence(FusedStep):
    """Step of one sequence in slot 0 of a pool of states."""

    def __init__(self, pool: TorchStatePool, tokens: int, *, continues: bool) -> None:
        super().__init__()
        self._pool = pool
        self._sequences = torch.tensor([[0, tokens, 0, int(continues)]])

    def states_of(self, index: int, dtype: torch.dtype) -> LayerStates | None:
        return self._pool.of_mixer(index, dtype, self._sequences)
