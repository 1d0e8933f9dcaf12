"""Fused forms of a common decoder layer's parts, each with as few operations as it needs.

A decoder layer's own code spends most of a small step outside its linear layers: some thirty torch operations that
start, read and write a few rows, and the modules around them. Here a norm, an MLP's gate and the rotation of queries
and keys are one pass each (kernels/cpu/row_loops.py), linear layers that read the same rows are one product, and K
and V go straight to the pool, where attention reads them. Modules are found by structure and compared with the module
itself (fusion/find.py). A call without a packed step's cache (the self-check's reference), or with any unknown
argument, goes to the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rootstock.kernels.api import Scores
from rootstock.kernels.cpu.row_loops import RowLoops
from rootstock.runtime.torch.fusion.base import Fused, FusedStep, Projection
from rootstock.runtime.torch.hooks import HARMLESS

MOST_RECORDED_ROWS = 32  # rows of a recorded part (layers.py)


class FusedLoops:
    """Row-wise loops of a model's fused parts, and scratch rows between linear layers.

    Shared by all parts, which run one after the other.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows = RowLoops(dtype)
        self._memory: dict[tuple[str, int], Tensor] = {}

    def scratch(self, name: str, rows: int, width: int) -> Tensor:
        """Returns scratch [rows, width], valid until the next call with that name."""
        memory = self._memory.get((name, width))
        if memory is None or len(memory) < rows:
            memory = self._memory[name, width] = torch.empty(rows, width, dtype=self.dtype)
        return memory[:rows]

    def fixed(self, name: str, rows: int, width: int) -> Tensor:
        """Returns scratch [rows, width], at the same address for any number of rows up to
        `MOST_RECORDED_ROWS`."""
        return self.scratch(f"fixed {name}", MOST_RECORDED_ROWS, width)[:rows]


@dataclass(eq=False)
class FusedNorm(Fused):
    """Fused root mean square normalisation over the last axis, with any number of axes before it."""

    weight: Tensor  # [width] float32
    eps: float
    loops: FusedLoops

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden.dtype != self.loops.dtype:
            given: Tensor = self.own(hidden, *args, **kwargs)
            return given
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self.into(rows, out)
        return out.view(hidden.shape)

    def into(self, rows: Tensor, out: Tensor) -> None:
        self.loops.rows.rms_norm(rows, self.weight, self.eps, out)


# Computes the product of activated gate and up, which lie side by side, like `RowLoops.silu_and_mul`.
Gate = Callable[[Tensor, Tensor], None]


@dataclass(eq=False)
class FusedMLP(Fused):
    """Fused gated MLP: down(activation(gate(x)) · up(x))"""

    gate_up: Projection
    down: Projection
    gate: Gate
    width: int  # of the gate's output
    loops: FusedLoops

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden.dtype != self.loops.dtype:
            given: Tensor = self.own(hidden, *args, **kwargs)
            return given
        return self.rows(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def rows(self, rows: Tensor) -> Tensor:
        """Computes rows [rows, hidden] → [rows, hidden]."""
        gated = self.loops.scratch("gated", len(rows), self.width)
        self.gate(self.gate_up.multiply(rows), gated)
        return self.down.multiply(gated)


@dataclass(frozen=True, slots=True)
class ProjectionHeads:
    """Numbers of heads by which the rows of a layer's first projection divide."""

    queries: int
    kv: int
    dim: int


@dataclass(eq=False)
class FusedMixer(Fused):
    """Fused part that mixes the rows of a sequence: attention, or a recurrence."""

    def serves(self, step: FusedStep) -> bool:
        """Returns whether `rows` can compute this step; otherwise the module's own forward does."""
        return True

    def rotation(self, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Returns what `rows` needs of a layer's arguments: cosines and sines [tokens, rotary_dim], or nothing."""
        return None

    def rows(self, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep) -> Tensor:
        """Computes rows [tokens, hidden] → [tokens, hidden]."""
        raise NotImplementedError


@dataclass(eq=False)
class FusedAttention(FusedMixer):
    """Fused attention: Q, K and V from one projection, normalised and rotated in one pass, attended, projected.

    If it is gated, each query head is followed by its gate, whose sigmoid is a factor of the attended row.
    """

    index: int  # number of the layer
    inputs: Projection
    output: Projection
    heads: ProjectionHeads
    query_norm: Tensor | None  # [head_dim] float32
    key_norm: Tensor | None
    eps: float
    rotated: bool
    gated: bool
    loops: FusedLoops
    scores: Scores = field(default_factory=lambda: Scores(1.0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get("past_key_values")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        known = not args[1:] and isinstance(hidden, Tensor) and hidden.shape[0] == 1
        if not (isinstance(step, FusedStep) and known and only_harmless(kwargs)):
            return self.own(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        return self.rows(hidden[0], self.rotation(kwargs), step)[None], None

    def rotation(self, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        if not self.rotated:
            return None
        cos, sin = kwargs["position_embeddings"]
        return cos[0].contiguous(), sin[0].contiguous()

    def rows(self, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep) -> Tensor:
        tokens, heads = len(rows), self.heads
        projected = self.inputs.multiply(rows).view(tokens, -1, heads.dim)
        gate: Tensor | None = None
        if self.gated:
            queries, others = projected[:, : 2 * heads.queries], projected[:, 2 * heads.queries :]
            gate = queries[:, 1::2]
            projected = torch.cat([queries[:, ::2], others], 1)
        query = self.loops.scratch("query", tokens, heads.queries * heads.dim)
        key = self.loops.scratch("key", tokens, heads.kv * heads.dim)
        query, key = query.view(tokens, heads.queries, heads.dim), key.view(tokens, heads.kv, heads.dim)
        value = projected[:, heads.queries + heads.kv :]
        pool = step.memory_of(self.index, projected.dtype)
        self.loops.rows.rotate(
            projected, self.query_norm, self.key_norm, self.eps, rotation, query, key, pool
        )
        attended = step.attend(self.index, query, key, value, self.scores, is_kept=pool is not None)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.output.multiply(attended.reshape(tokens, -1))


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of a layer, in the order in which they run."""

    before_mixer: FusedNorm
    before_mlp: FusedNorm
    after_mixer: FusedNorm | None = None
    after_mlp: FusedNorm | None = None


def only_harmless(kwargs: dict[str, Any]) -> bool:
    """Returns whether no argument is given that could change the result of a layer."""
    return all(given is None or name in _KNOWN for name, given in kwargs.items())


_KNOWN = HARMLESS | {"hidden_states", "attention_mask", "past_key_values", "cache_params"}
