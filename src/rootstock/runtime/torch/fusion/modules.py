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
from torch import Tensor, nn

from rootstock.kernels.api import Scores
from rootstock.kernels.cpu.row_loops import RowLoops
from rootstock.kernels.cpu.stages import Stages, can_run_stages
from rootstock.kernels.torch.linear import Blocked
from rootstock.runtime.torch.fusion.base import Fused, FusedStep, Projection
from rootstock.runtime.torch.hooks import HARMLESS

MOST_RECORDED_ROWS = 32  # rows of a recorded part


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


# ------------------------------------------------------------------------------------------------- whole layers

# A decode of a small model spends a quarter of its time between its compiled functions. For few rows, the functions
# before a layer's attention are therefore recorded as stages of one call of torch's threads, and so are those after
# it (kernels/cpu/stages.py). A recording is for one number of rows. The addresses of tensors that change from call to
# call are written into its jobs before a run. Scratch rows have fixed addresses, and are shared by all layers, which
# run one after the other.

Rotation = tuple[Tensor, Tensor]  # cosines and sines of each row's position
Pool = tuple[Tensor, Tensor, Tensor]  # keys, values, and the rows' slots


def _can_be_recorded(*projections: Projection) -> bool:
    """Returns whether the products of projections, as they are now, can be stages."""
    return all(isinstance(each.multiply, Blocked) for each in projections) and can_run_stages()


def _product(projection: Projection) -> Blocked:
    assert isinstance(projection.multiply, Blocked)
    return projection.multiply


class _RecordedPart:
    """Closed stages, and the places of the addresses that change."""

    def __init__(self, *changing: Tensor) -> None:
        """Takes the tensors that will be others in each run. No two have the same memory."""
        self._changing = changing
        self._stages = Stages()

    def close(self) -> None:
        jobs = self._stages.close()
        addresses = [tensor.data_ptr() for tensor in self._changing]
        assert len(set(addresses)) == len(addresses)
        self._places = [
            [(job, number) for job in jobs for number, value in enumerate(job) if value == address]
            for address in addresses
        ]
        self._changing = ()

    def run_with(self, *tensors: Tensor) -> None:
        """Runs the stages with other tensors of the same shapes and strides."""
        for tensor, places in zip(tensors, self._places, strict=True):
            address = tensor.data_ptr()
            for job, number in places:
                job[number] = address
        self._stages.run()


class RecordedOpening(_RecordedPart):
    """Norm before a layer's attention, its first projection, and the rotation, which writes K and V to the pool."""

    def __init__(
        self,
        loops: FusedLoops,
        norms: Norms,
        attention: FusedAttention,
        rows: Tensor,
        rotation: Rotation | None,
        pool: Pool,
    ) -> None:
        heads, count = attention.heads, len(rows)
        self.product = _product(attention.inputs)
        super().__init__(rows, *(rotation or ()), *pool)
        normed = loops.fixed("normed", count, rows.shape[1])
        projected = loops.fixed("projected", count, self.product.out_features)
        self.query = loops.fixed("query", count, heads.queries * heads.dim).view(
            count, heads.queries, heads.dim
        )
        self.key = loops.fixed("key", count, heads.kv * heads.dim).view(count, heads.kv, heads.dim)
        of_heads = projected.view(count, -1, heads.dim)
        self.value = of_heads[:, heads.queries + heads.kv :]
        norm, query_norm, key_norm = norms.before_mixer, attention.query_norm, attention.key_norm
        with loops.rows.recorded(self._stages):
            norm.into(rows, normed)
            self.product.record(self._stages, normed, projected)
            loops.rows.rotate(
                of_heads, query_norm, key_norm, attention.eps, rotation, self.query, self.key, pool
            )
        self.close()

    def serves(self, attention: FusedAttention) -> bool:
        """Returns whether the projection is still the recorded one: adapters replace it."""
        return attention.inputs.multiply is self.product


class RecordedEnding(_RecordedPart):
    """Everything after a layer's mixer: the projection of attended rows, the residual sum with its norm, the MLP
    and its residual sum."""

    def __init__(
        self,
        loops: FusedLoops,
        norms: Norms,
        output: Projection | None,
        mlp: FusedMLP | None,
        rows: Tensor,
        given: Tensor,
    ) -> None:
        """Records for rows [rows, hidden] and `given`: rows for `output`, or mixed rows [rows, hidden]."""
        count, hidden = rows.shape
        projections = [
            *([] if output is None else [output]),
            *([] if mlp is None else [mlp.gate_up, mlp.down]),
        ]
        self._products = [(projection, projection.multiply) for projection in projections]
        total = torch.empty_like(rows)
        super().__init__(rows, given, total)
        self.normed = loops.fixed("normed", count, hidden)
        with loops.rows.recorded(self._stages):
            mixed = given
            if output is not None:
                mixed = loops.fixed("mixed", count, hidden)
                _product(output).record(self._stages, given, mixed)
            if norms.after_mixer is not None:
                norms.after_mixer.into(mixed, mixed)
            norm = norms.before_mlp
            loops.rows.add_rms_norm(rows, mixed, norm.weight, norm.eps, total, self.normed)
            if mlp is not None:
                gate_up = loops.fixed("gate_up", count, _product(mlp.gate_up).out_features)
                gated, more = loops.fixed("gated", count, mlp.width), loops.fixed("more", count, hidden)
                _product(mlp.gate_up).record(self._stages, self.normed, gate_up)
                mlp.gate(gate_up, gated)
                _product(mlp.down).record(self._stages, gated, more)
                if norms.after_mlp is not None:
                    norms.after_mlp.into(more, more)
                loops.rows.add(total, more, total)
        self.close()

    def serves(self) -> bool:
        """Returns whether the projections are still the recorded ones: adapters replace them."""
        return all(projection.multiply is product for projection, product in self._products)


@dataclass(eq=False)
class FusedLayer(Fused):
    """Fused layer: x + mixer(norm(x)), then x + MLP(norm(x)), with norms of both summands where a layer has
    them."""

    mixer: FusedMixer
    mlp: nn.Module | FusedMLP
    norms: Norms
    outputs: (
        int  # 0: the rows alone; else a tuple of this length, of the rows and of None (weights of attention)
    )
    loops: FusedLoops
    openings: dict[tuple[int, int], RecordedOpening] = field(
        default_factory=dict
    )  # by rows and rotary dimensions
    endings: dict[tuple[int, bool], RecordedEnding] = field(default_factory=dict)  # by rows, projected or not

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get("past_key_values")
        if (
            args
            or not isinstance(step, FusedStep)
            or hidden_states.shape[0] != 1
            or not only_harmless(kwargs)
            or not self.mixer.serves(step)
        ):
            return self.own(hidden_states, *args, **kwargs)
        rows = hidden_states[0].contiguous()
        out = self.rows(rows, self.mixer.rotation(kwargs), step)[None]
        return (out, *[None] * (self.outputs - 1)) if self.outputs else out

    def rows(self, rows: Tensor, rotation: Rotation | None, step: FusedStep) -> Tensor:
        """Computes rows [tokens, hidden] → [tokens, hidden] in new memory, because a model may keep a layer's
        output."""
        norms, loops = self.norms, self.loops.rows
        is_few = len(rows) <= MOST_RECORDED_ROWS and rows.dtype == self.loops.dtype
        attention = self.mixer if isinstance(self.mixer, FusedAttention) and not self.mixer.gated else None
        attended = self._attended(attention, rows, rotation, step) if is_few and attention else None
        if attended is None:
            normed, output = self.loops.scratch("normed", *rows.shape), None
            norms.before_mixer.into(rows, normed)
            given = self.mixer.rows(normed, rotation, step)
        else:
            assert attention is not None
            given, output = attended, attention.output
        total = torch.empty_like(rows)
        ending = self._ending(rows, given, output) if is_few else None
        if ending is not None:
            ending.run_with(rows, given, total)
            normed = ending.normed
            if isinstance(self.mlp, FusedMLP):
                return total
        else:
            normed = self.loops.scratch("normed", *rows.shape)
            mixed = given if output is None else output.multiply(given)
            if norms.after_mixer is not None:
                norms.after_mixer.into(mixed, mixed)
            norm = norms.before_mlp
            loops.add_rms_norm(rows, mixed, norm.weight, norm.eps, total, normed)
        more = self._mlp(normed)
        if norms.after_mlp is not None:
            norms.after_mlp.into(more, more)
        loops.add(total, more, total)
        return total

    def _attended(
        self,
        attention: FusedAttention,
        rows: Tensor,
        rotation: Rotation | None,
        step: FusedStep,
    ) -> Tensor | None:
        """Attends rows [tokens, hidden] → [tokens, q_heads · head_dim], by recorded stages. None: the projection is
        no stage, or K and V are not stored as they are."""
        alike = len(rows), 0 if rotation is None else rotation[0].shape[-1]
        opening = self.openings.get(alike)
        is_recorded = opening is not None and opening.serves(attention)
        if not is_recorded and not _can_be_recorded(attention.inputs):
            return None
        pool = step.memory_of(attention.index, rows.dtype)
        if pool is None:
            return None
        if opening is None or not is_recorded:
            opening = self.openings[alike] = RecordedOpening(
                self.loops, self.norms, attention, rows, rotation, pool
            )
        opening.run_with(rows, *(rotation or ()), *pool)
        query, key, value = opening.query, opening.key, opening.value
        attended = step.attend(attention.index, query, key, value, attention.scores, is_kept=True)
        return attended.reshape(len(rows), -1)

    def _ending(self, rows: Tensor, given: Tensor, output: Projection | None) -> RecordedEnding | None:
        """Returns the stages after the mixer for so many rows. None: they are no stages, or only one."""
        alike = len(rows), output is not None
        ending = self.endings.get(alike)
        if not given.is_contiguous():
            return None
        if ending is None or not ending.serves():
            mlp = self.mlp if isinstance(self.mlp, FusedMLP) else None
            projections = [*([output] if output else []), *([mlp.gate_up, mlp.down] if mlp else [])]
            if not projections or not _can_be_recorded(*projections):
                return None
            ending = self.endings[alike] = RecordedEnding(self.loops, self.norms, output, mlp, rows, given)
        return ending

    def _mlp(self, rows: Tensor) -> Tensor:
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.rows(rows)
        given = self.mlp(rows[None])
        mixed: Tensor = given[0] if isinstance(given, tuple) else given
        return mixed.reshape(rows.shape).contiguous()


def only_harmless(kwargs: dict[str, Any]) -> bool:
    """Returns whether no argument is given that could change the result of a layer."""
    return all(given is None or name in _KNOWN for name, given in kwargs.items())


_KNOWN = HARMLESS | {"hidden_states", "attention_mask", "past_key_values", "cache_params"}
