"""Fused recurrent mixers: a projection, compiled loops over all sequences of a step, and a projection.

Mixers are found by structure (delta_nets.py, state_spaces.py, selective_scans.py, gated_convolutions.py). A
recurrence's own code rounds differently in narrow formats. A candidate is therefore compared in a float32 copy of the
mixer: a prompt, a piece and a token after it, in results and in states. Some mixers ignore their state when they get
several tokens. If the results differ, the mixer gets the tokens of the piece one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.recurrent_loops import RecurrentLoops
from rootstock.runtime.torch.fusion.base import FusedStep, Projection
from rootstock.runtime.torch.fusion.modules import (
    Begun,
    FusedLoops,
    FusedMixer,
    FusedNorm,
    RecordedPart,
    can_be_recorded,
    only_harmless,
    product_of,
)
from rootstock.runtime.torch.module_parts import StepCache
from rootstock.runtime.torch.state_pool import LayerStates, StateCache, TorchStatePool, TorchStateShape

_TOLERANCE = 1e-4  # relative root mean square, of each row and each head's state
_ROUNDING = 1e-2  # of the tolerance, for rows that are small beside the others
_PIECES = (9, 6, 1)  # tokens of each call of the comparison
_SCALES = (1.0, 16.0, 1 / 256)


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """Parts of a mixer of a known structure."""

    before: Sequence[nn.Linear]  # their outputs side by side
    loops: RecurrentLoops
    after: nn.Linear
    factor: Tensor | None = None  # of the outputs, [their width]
    inside: Sequence[Projection] = ()  # that the loops call


FindParts = Callable[[nn.Module, Sequence[TorchStateShape]], Iterator[RecurrentParts]]
"""Yields the parts that a mixer may have. Shapes are of its layer's states."""


@dataclass(eq=False)
class FusedRecurrence(FusedMixer):
    """Fused mixer: one projection, the loops, and a projection of their result."""

    index: int  # number of the layer
    inputs: Projection
    output: Projection
    mixer: RecurrentLoops
    factor: Tensor | None  # of the rows of `inputs`, in their dtype
    loops: FusedLoops
    inside: Sequence[Projection] = ()  # that `mixer` calls
    openings: dict[Any, RecordedRecurrence] = field(
        default_factory=dict
    )  # by the numbers that they depend on

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
        mixed = self.loops.scratch("mixed", len(rows), self.mixer.inner)
        projected = self.inputs.multiply(rows)
        if self.factor is not None:
            projected = projected * self.factor
        self.mixer(projected, states.sequences, states.conv, states.recurrent, mixed)
        return self.output.multiply(mixed)

    def begin(
        self, norm: FusedNorm, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep
    ) -> Begun | None:
        if self.inside or self.factor is not None or not can_be_recorded(self.inputs):
            return None
        states = step.states_of(self.index, rows.dtype)
        assert states is not None, "`serves` was not asked"
        pool = states.recurrent
        alike = len(rows), len(states.sequences), len(pool), pool.dtype, torch.get_num_threads()
        opening = self.openings.get(alike)
        if opening is None or not opening.serves(self):
            opening = self.openings[alike] = RecordedRecurrence(norm, self, rows, states)
        opening.run_with(rows, *_changing(states))
        return Begun(opening.mixed, self.output)


class RecordedRecurrence(RecordedPart):
    """Norm before a recurrent mixer, its first projection, and its loops."""

    def __init__(self, norm: FusedNorm, mixer: FusedRecurrence, rows: Tensor, states: LayerStates) -> None:
        loops, count = mixer.loops, len(rows)
        self._product = product_of(mixer.inputs)
        super().__init__(rows, *_changing(states))
        normed = loops.fixed("normed", count, rows.shape[1])
        projected = loops.fixed("projected", count, self._product.out_features)
        self.mixed = loops.fixed("mixed heads", count, mixer.mixer.inner)
        scratch = loops.of_threads(torch.get_num_threads(), mixer.mixer.scratch_floats)
        with loops.rows.recorded(self.stages):
            norm.into(rows, normed)
        self._product.record(self.stages, normed, projected)
        conv, recurrent, sequences = states.conv, states.recurrent, states.sequences
        mixer.mixer.record(self.stages, projected, sequences, conv, recurrent, self.mixed, scratch)
        self.close()

    def serves(self, mixer: FusedRecurrence) -> bool:
        """Returns whether the projection is still the recorded one: adapters replace it."""
        return mixer.inputs.multiply is self._product


def _changing(states: LayerStates) -> list[Tensor]:
    """Returns the tensors of a step's states whose addresses may be others in the next step."""
    distinct = {each.data_ptr(): each for each in (states.sequences, states.conv, states.recurrent)}
    return list(distinct.values())


def agreeing(
    find: FindParts,
    mixer: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    index: int,
    shapes: Sequence[TorchStateShape],
    loops: FusedLoops,
) -> FusedRecurrence | None:
    """Returns the form that computes what the mixer computes, or None. `call`: arguments of a recorded call.

    Allocates a float32 copy of the mixer while it compares.
    """
    own = mixer.forward
    forms = _forms(find, mixer, own, index, shapes, loops)
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
    except Exception:  # of the mixer's own classes
        return None
    finally:
        mixer.forward = own
    wide = [replace(shape, dtype=torch.float32, stored=torch.float32) for shape in shapes]
    given = hidden[0].float()
    rows = torch.cat([given, -given.flip(0), given.roll(1, -1), given.flip(-1)])
    rows = rows.repeat(-(-sum(_PIECES) // len(rows)), 1)[: sum(_PIECES)]
    in_float32 = _forms(find, copied, own, index, wide, FusedLoops(torch.float32))
    for form, same in zip(forms, in_float32, strict=True):
        try:
            for token_wise in (False, True):
                if all(_agree(copied, same, cache_name, rows * times, wide, token_wise) for times in _SCALES):
                    return form
        except Exception:  # the mixer's own code, or a shape that does not fit: the form does not apply
            return None
    return None


def _forms(
    find: FindParts,
    mixer: nn.Module,
    own: Any,
    index: int,
    shapes: Sequence[TorchStateShape],
    loops: FusedLoops,
) -> list[FusedRecurrence]:
    forms = []
    for parts in find(mixer, shapes):
        factor = None if parts.factor is None else parts.factor.to(loops.dtype)
        inputs, output = Projection(parts.before), Projection([parts.after])
        forms.append(FusedRecurrence(own, index, inputs, output, parts.loops, factor, loops, parts.inside))
    return forms


def _agree(
    mixer: nn.Module,
    form: FusedRecurrence,
    cache_name: str,
    rows: Tensor,
    shapes: Sequence[TorchStateShape],
    token_wise: bool,
) -> bool:
    device = torch.device("cpu")
    expected, ours = (TorchStatePool(shapes, 1, device) for _ in range(2))
    first = 0
    for tokens in _PIECES:
        piece = rows[first : first + tokens]
        given = []
        for part in torch.split(piece, 1 if token_wise and first else tokens):
            cache = StateCache(expected, torch.zeros(1, dtype=torch.int64), continues=first > 0)
            result = mixer(part[None], **{cache_name: cache})
            cache.keep()
            given.append(result[0] if isinstance(result, tuple) else result)
        exact = torch.cat(given, 1)
        got = form.rows(piece, None, OneSequence(ours, tokens, continues=first > 0))
        if exact.shape != (1, *got.shape) or not _alike(exact[0], got):
            return False
        first += tokens
    return all(
        _alike(theirs.tensor.flatten(0, 1), own.tensor.flatten(0, 1))
        for theirs, own in zip(expected.memories, ours.memories, strict=True)
    )


def _alike(expected: Tensor, got: Tensor) -> bool:
    """Compares row by row, over the last axis or the last two. A row that is small beside the others, like the state
    of a single channel whose inputs cancel, has their rounding."""
    exact = expected.double().flatten(1)
    error = (exact - got.double().flatten(1)).square().mean(-1).sqrt()
    scale = exact.square().mean(-1).sqrt()
    return bool((error <= _TOLERANCE * (scale + _ROUNDING * scale.mean()) + 1e-30).all())


class OneSequence(FusedStep):
    """Step of one sequence in slot 0 of a pool of states."""

    def __init__(self, pool: TorchStatePool, tokens: int, *, continues: bool) -> None:
        super().__init__()
        self._pool = pool
        self._sequences = torch.tensor([[0, tokens, 0, int(continues)]])

    def states_of(self, index: int, dtype: torch.dtype) -> LayerStates | None:
        return self._pool.of_mixer(index, dtype, self._sequences)
