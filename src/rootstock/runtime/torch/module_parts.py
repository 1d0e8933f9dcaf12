"""Modules that do not support a packed step: recurrent mixers, and attention of unusual kinds.

The rest of the model stays packed. `PartByPart` replaces such a module's `forward` on the instance. It cuts the rows
of the step's sequences out of the module's inputs, runs the module on them, and puts the results back. A mixer gets
sequences with equally many new tokens together, [n, new, …]. Attention that cannot be packed gets one sequence at a
time. The step is found through the cache that the model passes along, so there is no ambient state. A call without
such a cache (the self-check's reference) is passed on unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rootstock.runtime.torch.hooks import HookedCache
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern


class PartCache(HookedCache):
    """Cache of a part's sequences, for one call of one module, or for one forward of the model."""

    def keep(self) -> None:
        """Stores the states that the call left behind."""


@dataclass(frozen=True, slots=True)
class StepPart:
    rows: Tensor  # [sequences, new] int64, rows of the packed step
    cache: PartCache
    past: int  # of a single sequence; unused if there are several


class StepCache(HookedCache):
    """Cache of a packed step, which knows the step's sequences."""

    def groups(self) -> Iterator[StepPart]:
        """Yields sequences with equally many new tokens together. Each part is run before the next is made."""
        raise NotImplementedError

    def sequences(self) -> Iterator[StepPart]:
        """Yields one sequence at a time, each with a cache that returns all of its K and V."""
        raise NotImplementedError

    def within(self, part: StepPart) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a module runs a part of the step."""
        return contextlib.nullcontext()


class PartByPart:
    """Replacement of a module's forward that runs it by parts of the step. `alone`: one sequence at a time, with
    masks."""

    def __init__(self, module: nn.Module, *, alone: bool) -> None:
        self._forward: Callable[..., Any] = module.forward
        self.alone = alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = next((x for x in (*args, *kwargs.values()) if isinstance(x, StepCache)), None)
        if step is None:
            return self._forward(*args, **kwargs)
        tokens = _tokens(args, kwargs)
        given: Any = None
        rows: list[Tensor] = []
        shares: list[tuple[Any, ...]] = []  # the module's outputs for each part
        for part in step.sequences() if self.alone else step.groups():
            cut = _Cut(part, tokens, self.alone)
            with step.within(part):
                given = self._forward(*tree_map(cut, args), **tree_map(cut, kwargs))
            part.cache.keep()
            rows.append(part.rows)
            shares.append(given if isinstance(given, tuple) else (given,))
        assert shares, "a step has sequences"
        joined = tuple(_joined(outputs, rows, tokens) for outputs in zip(*shares, strict=True))
        return joined if isinstance(given, tuple) else joined[0]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Function that cuts a part's share out of one argument of a module."""

    part: StepPart
    tokens: int  # of the step
    alone: bool

    def __call__(self, given: Any) -> Any:
        rows = self.part.rows
        if isinstance(given, StepCache):
            return self.part.cache
        if isinstance(given, Tensor) and given.dim() > 1 and given.shape[:2] == (1, self.tokens):
            return given[0, rows]
        if isinstance(given, MaskPattern) and self.alone:
            return given.between(self.part.past, self.part.past + rows.shape[1], rows.device)
        return given


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of rows of the packed step: the length of the first tensor, the hidden states [1, tokens,
    …]."""
    hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
    return hidden.shape[1]


def _joined(outputs: Sequence[Any], rows: Sequence[Tensor], tokens: int) -> Tensor | None:
    """Puts the parts of one output back in their rows. Returns None for an output that is not by rows (attention
    weights) and that no caller uses."""
    for output, places in zip(outputs, rows, strict=True):
        if not isinstance(output, Tensor) or output.shape[:2] != places.shape:
            return None
    if len({output.shape[2:] for output in outputs}) > 1:
        if any(output.dim() != 3 or output.is_floating_point() for output in outputs):
            return None
        outputs = _widened(outputs)
    whole: Tensor = outputs[0].new_empty(1, tokens, *outputs[0].shape[2:])
    for output, places in zip(outputs, rows, strict=True):
        whole[0, places.flatten()] = output.flatten(0, 1)
    return whole


def _widened(chosen: Sequence[Tensor]) -> list[Tensor]:
    """Pads positions that an indexer chose, [sequences, new, chosen], to the same width; short sequences have fewer.
    Later layers may use them again. Padding repeats the last position, and choosing a position twice changes
    nothing."""
    widest = max(positions.shape[-1] for positions in chosen)
    return [torch.cat([p, p[..., -1:].expand(*p.shape[:-1], widest - p.shape[-1])], -1) for p in chosen]
