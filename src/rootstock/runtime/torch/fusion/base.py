"""What stands in the `forward` of a module that has a fused form, and what such a form needs of a step.

Apart from the forms themselves (modules.py), which need Numba: a model can be without any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.api import Scores
from rootstock.runtime.torch.module_parts import StepCache


class FusedStep(StepCache):
    """The cache of a packed step, for attention that was given apart into rows already."""

    def memory_of(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where K and V of layer `index` are to be written: keys and values [slots, kv_heads, …] and the rows' slots
        [tokens] int64. None: they are not kept in this dtype as they are, and `attend` keeps them."""
        return None

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores, *, is_kept: bool
    ) -> Tensor:
        """Attention of layer `index`, after it has kept K and V unless somebody did.

        query        [tokens, q_heads, head_dim], rotated
        key, value   [tokens, kv_heads, …], the keys rotated
        → [tokens, q_heads, value_dim]
        """
        raise NotImplementedError


@dataclass(eq=False)
class Fused:
    """In place of `forward`, on the instance."""

    own: Callable[..., Any]  # the module's own forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Projection:
    """Linear layers that read the same rows, as one: [rows, in] → [rows, the sum of their widths]

    Side by side until somebody packs them: see `use`.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self._packed: Callable[[Tensor], Tensor] | None = None

    def use(self, packed: Callable[[Tensor], Tensor]) -> None:
        """From now on this computes them all: contiguous rows of the widths side by side."""
        self._packed = packed

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(rows)
        if len(self.linears) == 1:
            alone: Tensor = self.linears[0](rows)
            return alone
        return torch.cat([linear(rows) for linear in self.linears], -1)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What of a model was fused."""

    parts: dict[str, Fused]  # by the module's name
    projections: tuple[Projection, ...]  # all their linear layers, in groups that are computed together


NOTHING_FUSED = Fusion({}, ())


def undo_fusion(model: nn.Module) -> None:
    """Every module as its file says."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """The model as its file says, for as long as this lasts."""
    fused = [(module, module.forward) for module in model.modules() if is_fused(module)]
    undo_fusion(model)
    try:
        yield
    finally:
        for module, forward in fused:
            module.forward = forward


def is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Fused)
