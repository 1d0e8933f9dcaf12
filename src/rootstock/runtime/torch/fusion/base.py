"""Base classes of fused replacements of a module's `forward`, and the interface of a step that they need.

They are separate from the replacements (modules.py), which need Numba, because a model may run without any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.api import Scores
from rootstock.runtime.torch.module_parts import PartByPart, StepCache
from rootstock.runtime.torch.state_pool import LayerStates


class FusedStep(StepCache):
    """Cache of a packed step, for fused parts: attention whose Q, K and V are separate rows, and mixers."""

    def memory_of(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns the memory for K and V of layer `index`: keys and values [slots, kv_heads, …] and the rows' slots
        [tokens] int64. None: they are not stored unchanged in this dtype, and `attend` writes them."""
        return None

    def states_of(self, index: int, dtype: torch.dtype) -> LayerStates | None:
        """Returns the states of layer `index`, if they are one convolution's in this dtype and one recurrent state in
        float32 or bfloat16. None: the mixer's own forward handles them."""
        return None

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores, *, is_kept: bool
    ) -> Tensor:
        """Attends layer `index`. Writes K and V to the pool before, unless `is_kept`.

        query        [tokens, q_heads, head_dim], rotated
        key, value   [tokens, kv_heads, …], the keys rotated
        returns      [tokens, q_heads, value_dim]
        """
        raise NotImplementedError


@dataclass(eq=False)
class Fused:
    """Fused replacement of a module's `forward`, on the instance."""

    own: Callable[..., Any]  # the module's own forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Product of linear layers that are called one by one."""

    linears: Sequence[nn.Linear]

    def __call__(self, rows: Tensor) -> Tensor:
        if len(self.linears) == 1:
            alone: Tensor = self.linears[0](rows)
            return alone
        return torch.cat([linear(rows) for linear in self.linears], -1)


class Projection:
    """Projection by linear layers that read the same rows: [rows, in] → [rows, the sum of their widths]

    The layers are called one by one until they are packed together: see `use`.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.multiply: Callable[[Tensor], Tensor] = OneByOne(self.linears)

    def use(self, packed: Callable[[Tensor], Tensor]) -> None:
        """Replaces the layers by `packed`, which computes all of them: contiguous rows, outputs side by side."""
        self.multiply = packed

    def use_linears(self) -> None:
        """Lets the layers be called one by one again."""
        self.multiply = OneByOne(self.linears)

    @property
    def is_packed(self) -> bool:
        """True if one product computes all layers."""
        return not isinstance(self.multiply, OneByOne)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Fused parts of a model."""

    parts: dict[str, Fused]  # by the module's name
    projections: tuple[Projection, ...]  # linear layers of all parts, in groups that are computed together
    forms: Mapping[str, str] = field(
        default_factory=dict
    )  # of parts that are found by comparing, by their names


NOTHING_FUSED = Fusion({}, ())


def undo_fusion(model: nn.Module) -> None:
    """Restores the forward that every module had before: its own, or the one that runs it part by part."""
    for module in model.modules():
        form = vars(module).get("forward")
        if isinstance(form, Fused):
            del module.forward
            if isinstance(form.own, PartByPart):
                module.forward = form.own


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Runs the model without fused parts inside the context."""
    fused = [(module, module.forward) for module in model.modules() if is_fused(module)]
    undo_fusion(model)
    try:
        yield
    finally:
        for module, forward in fused:
            module.forward = forward


def is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Fused)
