"""The parts of a common decoder layer, each as few calls as it needs: what stands in such a module's `forward`.

A decoder layer's file spends most of a small step outside its linear layers: some thirty operations of torch that
start, read and write a few rows, and the modules around them. Here a norm, the gate of an MLP and the rotation of
queries and keys are one pass each (kernels/numba_rows.py), linear layers that read the same rows are one, and K and V
go to the pool and attention reads them without a detour. What stands here was found by structure and compared with
the module itself (torch_fusing.py). A call without a packed step's cache (the self-check's reference) and one with
anything that is not known goes to the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rootstock.kernels import numba_rows
from rootstock.kernels.numba_rows import Rows, bits_of
from rootstock.kernels.scores import Scores
from rootstock.runtime.torch_hooks import HARMLESS
from rootstock.runtime.torch_standins import Fused, FusedStep, Projection

Gate = Callable[[Rows, Rows], None]  # gate and up side by side → their product, as `numba_rows.silu_and_mul`


class Scratch:
    """Rows that live from one linear layer to the next: shared by all parts of a model, which run in turn."""

    _MOST_VIEWS = 64

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int, int], tuple[Tensor, Rows]] = {}

    def rows(self, name: str, rows: int, width: int) -> tuple[Tensor, Rows]:
        """[rows, width] as a tensor and as an array of the same memory, valid until the next call with that name."""
        views = self._views.get((name, rows, width))
        if views is None:
            views = self._views[name, rows, width] = self._make(name, rows, width)
        return views

    def _make(self, name: str, rows: int, width: int) -> tuple[Tensor, Rows]:
        memory = self._memory.get((name, width))
        if memory is None or len(memory) < rows:
            memory = self._memory[name, width] = torch.empty(rows, width, dtype=self.dtype)
            self._views = {key: views for key, views in self._views.items() if key[::2] != (name, width)}
        elif len(self._views) >= self._MOST_VIEWS:
            self._views.clear()
        return memory[:rows], bits_of(memory[:rows])


@dataclass(eq=False)
class FusedNorm(Fused):
    """Root mean square normalisation over the last axis, any number of axes before it."""

    weight: Rows  # [width] float32
    eps: np.float32
    dtype: torch.dtype

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden.dtype != self.dtype:
            given: Tensor = self.own(hidden, *args, **kwargs)
            return given
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = torch.empty_like(flat)
        self.into(bits_of(flat), bits_of(out))
        return out.view(hidden.shape)

    def into(self, rows: Rows, out: Rows) -> None:
        numba_rows.rms_norm(rows, self.weight, self.eps, out)


@dataclass(eq=False)
class FusedMLP(Fused):
    """down(activation(gate(x)) · up(x))"""

    gate_up: Projection
    down: Projection
    gate: Gate
    width: int  # of what the gate is for
    scratch: Scratch

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden.dtype != self.scratch.dtype:
            given: Tensor = self.own(hidden, *args, **kwargs)
            return given
        return self.rows(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def rows(self, rows: Tensor) -> Tensor:
        """[rows, hidden] → so as well"""
        gated, gated_bits = self.scratch.rows("gated", len(rows), self.width)
        self.gate(bits_of(self.gate_up(rows)), gated_bits)
        return self.down(gated)


@dataclass(eq=False)
class FusedAttention(Fused):
    """Queries, keys and values from one linear layer, normalised and rotated in one pass, attended, projected."""

    index: int  # the layer's
    inputs: Projection
    output: Projection
    q_heads: int
    kv_heads: int
    head_dim: int
    query_norm: Rows  # [head_dim] float32, or [0] for none
    key_norm: Rows
    eps: np.float32
    rotated: bool
    scratch: Scratch
    scores: Scores = field(default_factory=lambda: Scores(1.0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get("past_key_values")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        known = not args[1:] and isinstance(hidden, Tensor) and hidden.shape[0] == 1
        if not (isinstance(step, FusedStep) and known and only_harmless(kwargs)):
            return self.own(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        return self.rows(hidden[0], kwargs.get("position_embeddings"), step)[None], None

    def rows(self, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep) -> Tensor:
        """rows [tokens, hidden], rotation: cosines and sines [1, tokens, rotary_dim] → [tokens, hidden]"""
        tokens, dim = len(rows), self.head_dim
        heads = self.q_heads + 2 * self.kv_heads
        projected = self.inputs(rows).view(tokens, heads, dim)
        query, query_bits = self.scratch.rows("query", tokens, self.q_heads * dim)
        key, key_bits = self.scratch.rows("key", tokens, self.kv_heads * dim)
        if self.rotated:
            assert rotation is not None
            cos, sin = (bits_of(part[0]) for part in rotation)
        else:
            cos = sin = bits_of(rows[:, :0])
        numba_rows.rotate(
            bits_of(projected),
            self.query_norm,
            self.key_norm,
            self.eps,
            cos,
            sin,
            query_bits.reshape(tokens, self.q_heads, dim),
            key_bits.reshape(tokens, self.kv_heads, dim),
        )
        attended = step.attend(
            self.index,
            query.view(tokens, self.q_heads, dim),
            key.view(tokens, self.kv_heads, dim),
            projected[:, self.q_heads + self.kv_heads :],
            self.scores,
        )
        return self.output(attended.reshape(tokens, -1))


@dataclass(frozen=True, slots=True)
class Norms:
    """Of a layer, in the order in which they come."""

    before_attention: FusedNorm
    before_mlp: FusedNorm
    after_attention: FusedNorm | None = None
    after_mlp: FusedNorm | None = None


@dataclass(eq=False)
class FusedLayer(Fused):
    """x + attention(norm(x)), then x + MLP(norm(x)); with a norm of what is added, where a layer has those."""

    attention: FusedAttention
    mlp: nn.Module | FusedMLP
    norms: Norms
    gives_tuple: bool
    scratch: Scratch

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get("past_key_values")
        if (
            args
            or not isinstance(step, FusedStep)
            or hidden_states.shape[0] != 1
            or not only_harmless(kwargs)
        ):
            return self.own(hidden_states, *args, **kwargs)
        out = self.rows(hidden_states[0], kwargs.get("position_embeddings"), step)[None]
        return (out,) if self.gives_tuple else out

    def rows(self, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep) -> Tensor:
        """rows [tokens, hidden] → so as well, in memory of its own"""
        normed, normed_bits = self.scratch.rows("normed", *rows.shape)
        norms, given = self.norms, bits_of(rows)
        norms.before_attention.into(given, normed_bits)
        attended = bits_of(self.attention.rows(normed, rotation, step))
        if norms.after_attention is not None:
            norms.after_attention.into(attended, attended)
        total = torch.empty_like(rows)
        total_bits, norm = bits_of(total), norms.before_mlp
        numba_rows.add_rms_norm(given, attended, norm.weight, norm.eps, total_bits, normed_bits)
        more = bits_of(self._mlp(normed))
        if norms.after_mlp is not None:
            norms.after_mlp.into(more, more)
        numba_rows.add(total_bits, more, total_bits)
        return total

    def _mlp(self, rows: Tensor) -> Tensor:
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.rows(rows)
        given = self.mlp(rows[None])
        mixed: Tensor = given[0] if isinstance(given, tuple) else given
        return mixed.reshape(rows.shape)


def only_harmless(kwargs: dict[str, Any]) -> bool:
    """Whether nothing is given that could change what a layer computes."""
    return all(given is None or name in _KNOWN for name, given in kwargs.items())


_KNOWN = HARMLESS | {"hidden_states", "attention_mask", "past_key_values"}
