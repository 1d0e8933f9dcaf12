"""Rows of a forward by adapter, and the replacements of modules' forwards that change them.

The rows of a packed step lie segment by segment. A module that runs a part of the step (`PartByPart`) gets rows of
its own order, and the head gets the rows that need logits. `TorchAdapterRows` says which rows of the input that a
module has now belong to which adapter. An input whose rows are others (a routed expert's) cannot be attributed: it
raises `RowsUnknown`, and the check at load then gives the adapter forwards of its own, in which all rows are the
adapter's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rootstock.runtime.adapter_errors import RowsUnknown
from rootstock.runtime.base import Segment
from rootstock.runtime.torch.adapters.deltas import Delta, EmbeddingDelta, LinearDelta
from rootstock.runtime.torch.hooks import LayerUnsupported
from rootstock.runtime.torch.module_parts import StepPart


@dataclass(frozen=True, slots=True)
class _View:
    """Rows of a module's input."""

    rows: int  # 0: any number, all of one adapter
    adapters: Mapping[str, slice | Tensor]  # the rows of each


_BASE = _View(0, {})


class TorchAdapterRows:
    """Adapters of the rows of the forward in progress. Owned by one runtime; its modules read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: NDArray[np.int64] | None = (
            None  # [tokens] number of each row's adapter; None: all rows alike
        )
        self._names: list[str] = []
        self._view = self._kept = _BASE
        self._parts: dict[int, tuple[Tensor, _View]] = {}

    @property
    def view(self) -> _View:
        """Rows of the step, or of the part of it that runs."""
        return self._view

    @property
    def kept(self) -> _View:
        """Rows with logits."""
        return self._kept

    @contextlib.contextmanager
    def of(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Attributes the rows of a forward of these segments, until the context ends."""
        names = list(dict.fromkeys(segment.adapter for segment in segments))
        if names == [""]:
            yield
            return
        try:
            if len(names) == 1:
                self._view = self._kept = _View(0, {names[0]: slice(None)})
            else:
                of_segment = np.array([names.index(segment.adapter) for segment in segments])
                self._names = names
                self._numbers = np.repeat(of_segment, [len(segment.tokens) for segment in segments])
                self._view = self._viewed(self._numbers)
                self._kept = self._viewed(np.repeat(of_segment, [s.logits_to_keep for s in segments]))
            yield
        finally:
            self._view = self._kept = _BASE
            self._numbers = None
            self._parts = {}

    @contextlib.contextmanager
    def within(self, part: StepPart) -> Iterator[None]:
        """Attributes the rows of a part of the step, while a module runs it."""
        if self._numbers is None:
            yield
            return
        whole = self._view
        if id(part.rows) not in self._parts:  # the tensor is kept, so that its id stays its own
            numbers = self._numbers[part.rows.flatten().cpu().numpy()]
            self._parts[id(part.rows)] = part.rows, self._viewed(numbers)
        self._view = self._parts[id(part.rows)][1]
        try:
            yield
        finally:
            self._view = whole

    def _viewed(self, numbers: NDArray[np.int64]) -> _View:
        adapters: dict[str, slice | Tensor] = {}
        for number, name in enumerate(self._names):
            rows = np.flatnonzero(numbers == number)
            if not name or not len(rows):
                continue
            first, last = int(rows[0]), int(rows[-1]) + 1
            together = last - first == len(rows)
            adapters[name] = slice(first, last) if together else torch.from_numpy(rows).to(self._device)
        return _View(len(numbers), adapters)


class AdaptedModule:
    """Replacement of a module's forward: the module's own, then each adapter's change of its rows."""

    def __init__(self, module: nn.Module, rows: TorchAdapterRows, *, has_kept_rows: bool) -> None:
        """`has_kept_rows`: the module is the head, and gets only the rows with logits."""
        self.own: Callable[..., Any] = module.forward
        self.is_replaced = "forward" in vars(module)  # the module's own forward was replaced before
        self.deltas: dict[str, Delta] = {}
        self._module = module
        self._rows = rows
        self._has_kept_rows = has_kept_rows

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.own(input, *args, **kwargs)
        view = self._rows.kept if self._has_kept_rows else self._rows.view
        if view.adapters:
            if not isinstance(out, Tensor):
                raise LayerUnsupported("returns more than its product", module=type(self._module).__name__)
            _change(self._module, view, self.deltas, input, out)
        return out

    def current_weight(self) -> Tensor:
        """Returns the weight [out, in] for code that reads it itself: all rows must have one adapter."""
        weight: Tensor = self._module.weight  # type: ignore[assignment]
        view = self._rows.view
        if self.deltas.keys().isdisjoint(view.adapters):
            return weight
        if view.rows:
            raise _rows_unknown(self._module, weight.shape, view.rows)
        changed = self.deltas[next(iter(view.adapters))]
        assert isinstance(changed, LinearDelta), "an embedding has no such weight"
        return changed.of_weight(weight)


class AdaptedProjection:
    """Product of several linear layers of one input, then each adapter's change of its rows."""

    def __init__(
        self, own: Callable[[Tensor], Tensor], rows: TorchAdapterRows, members: Sequence[nn.Linear]
    ) -> None:
        self.own = own
        self._rows = rows
        self._members = members

    def __call__(self, rows: Tensor) -> Tensor:
        out = self.own(rows)
        view = self._rows.view
        if view.adapters:
            first = 0
            for member in self._members:
                adapted, end = member.forward, first + member.out_features
                if isinstance(adapted, AdaptedModule):
                    _change(member, view, adapted.deltas, rows, out[:, first:end])
                first = end
        return out


def _change(module: nn.Module, view: _View, deltas: Mapping[str, Delta], input: Tensor, out: Tensor) -> None:
    """Changes the rows of `out` in place: a product's output is new memory, or a part that only one caller gets."""
    if deltas.keys().isdisjoint(view.adapters):
        return
    ids = isinstance(next(iter(deltas.values())), EmbeddingDelta)
    leading = input.shape if ids else input.shape[:-1]
    count = view.rows or 1
    if view.rows and not _has_rows(leading, view.rows):
        raise _rows_unknown(module, input.shape, view.rows)
    x = input.reshape(count, -1, 1 if ids else input.shape[-1])
    y = out.view(count, -1, out.shape[-1])
    for name, rows in view.adapters.items():
        delta = deltas.get(name)
        if delta is None:
            continue
        if isinstance(rows, slice):
            delta.apply(x[rows], y[rows])
        else:
            changed = y[rows]
            delta.apply(x[rows], changed)
            y[rows] = changed


def _has_rows(leading: Sequence[int], rows: int) -> bool:
    """Returns whether the product of the leading sizes of a tensor, up to some size, is the number of rows."""
    product = 1
    for size in leading:
        product *= size
        if product == rows:
            return True
    return False


def _rows_unknown(module: nn.Module, shape: Sequence[int], rows: int) -> RowsUnknown:
    return RowsUnknown(
        f"a {type(module).__name__} gets an input of shape {list(shape)} in a step of {rows} rows"
    )
