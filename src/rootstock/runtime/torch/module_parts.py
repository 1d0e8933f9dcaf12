"""Modules that cannot take a packed step as it is: recurrent mixers, and attention of their own kind.

All the rest of the model stays packed. `PartByPart` stands in such a module's `forward`, on the instance: it cuts
the rows of the step's sequences out of what the module is given, runs it on them, and puts the results back. Mixers
get sequences with equally many new tokens together, [n, new, …]; attention that is unlike any other gets one at a
time. The step is found through the cache that the model passes along, so there is no ambient state, and a call
without a cache of ours (the self-check's reference) goes straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rootstock.runtime.torch.hooks import HookedCache
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern


class PartCache(HookedCache):
    """What a part's sequences keep, for one call of one module, or for one forward of the model."""

    def keep(self) -> None:
        """Stores what the call left behind."""


@dataclass(frozen=True, slots=True)
class Part:
    rows: Tensor  # [sequences, new] int64, of the packed step
    cache: PartCache
    past: int  # of the one sequence; of several it is never asked


class StepCache(HookedCache):
    """The cache of a packed step, which knows its sequences."""

    def groups(self) -> Iterator[Part]:
        """Sequences with equally many new tokens, together. Each part is run before the next is made."""
        raise NotImplementedError

    def sequences(self) -> Iterator[Part]:
        """One at a time, each with a cache that gives out all K and V."""
        raise NotImplementedError


class PartByPart:
    """A module's forward, by parts of the step. `alone`: one sequence at a time, with real masks."""

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
        shares: list[tuple[Any, ...]] = []  # of each part: what the module returned for it
        for part in step.sequences() if self.alone else step.groups():
            cut = _Cut(part, tokens, self.alone)
            given = self._forward(*tree_map(cut, args), **tree_map(cut, kwargs))
            part.cache.keep()
            rows.append(part.rows)
            shares.append(given if isinstance(given, tuple) else (given,))
        assert shares, "a step has sequences"
        joined = tuple(_joined(outputs, rows, tokens) for outputs in zip(*shares, strict=True))
        return joined if isinstance(given, tuple) else joined[0]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Of whatever a module is given, a part's share."""

    part: Part
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
    """How many rows the packed step has: the length of the first tensor, which is the hidden states [1, tokens, …]"""
    hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
    return hidden.shape[1]


def _joined(outputs: Sequence[Any], rows: Sequence[Tensor], tokens: int) -> Tensor | None:
    """One output's shares, back in their rows. What is not by rows (attention weights) is not wanted by anybody."""
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
    """Positions that an indexer chose, [sequences, new, chosen], fewer of a short sequence; later layers may use
    them again. To choose one twice is to choose it once."""
    widest = max(positions.shape[-1] for positions in chosen)
    return [torch.cat([p, p[..., -1:].expand(*p.shape[:-1], widest - p.shape[-1])], -1) for p in chosen]
