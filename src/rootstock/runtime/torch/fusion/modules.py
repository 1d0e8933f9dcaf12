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
from rootstock.kernels.torch.linear import Looped
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
        self._of_threads: dict[tuple[int, int], Tensor] = {}

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

    def of_threads(self, threads: int, floats: int) -> Tensor:
        """Returns scratch [threads, floats] float32, at the same address for these numbers."""
        memory = self._of_threads.get((threads, floats))
        if memory is None:
            memory = self._of_threads[threads, floats] = torch.empty(threads, floats)
        return memory


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


@dataclass(frozen=True, slots=True)
class Begun:
    """Mixed rows before a mixer's last projection, [rows, …]."""

    rows: Tensor
    output: Projection
    gates: Tensor | None = None  # of `rows`, among the rows that `RowLoops.gate_heads` reads

    def gate_into(self, out: Tensor, loops: FusedLoops) -> None:
        """Writes the rows times their gates to `out` [rows, …]."""
        assert self.gates is not None
        heads = len(out), -1, self.gates.shape[2]
        loops.rows.gate_heads(self.gates, self.rows.view(heads), out.view(heads))

    def end(self, loops: FusedLoops) -> Tensor:
        """Computes the gates and the last projection: [rows, hidden]."""
        if self.gates is None:
            return self.output.multiply(self.rows)
        gated = loops.scratch("gated heads", *self.rows.shape)
        self.gate_into(gated, loops)
        return self.output.multiply(gated)


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

    def begin(
        self, norm: FusedNorm, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, step: FusedStep
    ) -> Begun | None:
        """Computes the norm before the mixer, and the mixer up to its last projection, by recorded stages. None: they
        cannot be recorded, and nothing was computed."""
        return None


@dataclass(eq=False)
class FusedAttention(FusedMixer):
    """Fused attention: Q, K and V from one projection, normalised and rotated in one pass, attended, projected.

    If it is gated, each query head is followed by its gate, whose sigmoid is a factor of the attended head.
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
    openings: dict[tuple[int, int], RecordedOpening] = field(
        default_factory=dict
    )  # by rows and rotary dimensions

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
        query = self.loops.scratch("query", tokens, heads.queries * heads.dim)
        key = self.loops.scratch("key", tokens, heads.kv * heads.dim)
        query, key = query.view(tokens, heads.queries, heads.dim), key.view(tokens, heads.kv, heads.dim)
        pool = step.memory_of(self.index, projected.dtype)
        self.rotate(projected, rotation, query, key, pool)
        value = projected[:, -heads.kv :]
        attended = step.attend(self.index, query, key, value, self.scores, is_kept=pool is not None)
        return self._begun(attended, projected).end(self.loops)

    def rotate(
        self, projected: Tensor, rotation: Rotation | None, query: Tensor, key: Tensor, pool: Pool | None
    ) -> None:
        norms = self.query_norm, self.key_norm
        self.loops.rows.rotate(projected, *norms, self.eps, rotation, query, key, pool, gated=self.gated)

    def begin(
        self, norm: FusedNorm, rows: Tensor, rotation: Rotation | None, step: FusedStep
    ) -> Begun | None:
        alike = len(rows), 0 if rotation is None else rotation[0].shape[-1]
        opening = self.openings.get(alike)
        is_recorded = opening is not None and opening.serves(self)
        if not is_recorded and not can_be_recorded(self.inputs):
            return None
        pool = step.memory_of(self.index, rows.dtype)
        if pool is None:  # K and V are not stored as they are
            return None
        if opening is None or not is_recorded:
            opening = self.openings[alike] = RecordedOpening(norm, self, rows, rotation, pool)
        opening.run_with(rows, *(rotation or ()), *pool)
        query, key, value = opening.query, opening.key, opening.value
        attended = step.attend(self.index, query, key, value, self.scores, is_kept=True)
        return self._begun(attended, opening.projected)

    def _begun(self, attended: Tensor, projected: Tensor) -> Begun:
        rows = attended.reshape(len(attended), -1).contiguous()
        return Begun(rows, self.output, projected if self.gated else None)


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
# it; a recurrence is such a function itself (kernels/cpu/stages.py). A recording is for one number of rows. The
# addresses of tensors that change from call to call are written into its jobs before a run. Scratch rows have fixed
# addresses, and are shared by all layers, which run one after the other.

Rotation = tuple[Tensor, Tensor]  # cosines and sines of each row's position
Pool = tuple[Tensor, Tensor, Tensor]  # keys, values, and the rows' slots


def can_be_recorded(*projections: Projection) -> bool:
    """Returns whether the products of projections, as they are now, can be stages."""
    return all(isinstance(each.multiply, Looped) for each in projections) and can_run_stages()


def product_of(projection: Projection) -> Looped:
    """Returns the product of a projection that can be recorded."""
    assert isinstance(projection.multiply, Looped)
    return projection.multiply


class RecordedPart:
    """Closed stages, and the places of the addresses that change."""

    def __init__(self, *changing: Tensor) -> None:
        """Takes the tensors that will be others in each run. No two have the same memory."""
        self._changing = changing
        self.stages = Stages()

    def close(self) -> None:
        jobs = self.stages.close()
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
        self.stages.run()


class RecordedOpening(RecordedPart):
    """Norm before a layer's attention, its first projection, and the rotation, which writes K and V to the pool."""

    def __init__(
        self,
        norm: FusedNorm,
        attention: FusedAttention,
        rows: Tensor,
        rotation: Rotation | None,
        pool: Pool,
    ) -> None:
        heads, count, loops = attention.heads, len(rows), attention.loops
        self.product = product_of(attention.inputs)
        super().__init__(rows, *(rotation or ()), *pool)
        normed = loops.fixed("normed", count, rows.shape[1])
        projected = loops.fixed("projected", count, self.product.out_features)
        self.query = loops.fixed("query", count, heads.queries * heads.dim).view(
            count, heads.queries, heads.dim
        )
        self.key = loops.fixed("key", count, heads.kv * heads.dim).view(count, heads.kv, heads.dim)
        self.projected = projected.view(count, -1, heads.dim)
        self.value = self.projected[:, -heads.kv :]
        with loops.rows.recorded(self.stages):
            norm.into(rows, normed)
            self.product.record(self.stages, normed, projected)
            attention.rotate(self.projected, rotation, self.query, self.key, pool)
        self.close()

    def serves(self, attention: FusedAttention) -> bool:
        """Returns whether the projection is still the recorded one: adapters replace it."""
        return attention.inputs.multiply is self.product


class RecordedEnding(RecordedPart):
    """Everything after a layer's mixing: gates and projection of mixed rows, the residual sum with its norm, the MLP
    and its residual sum."""

    def __init__(
        self,
        loops: FusedLoops,
        norms: Norms,
        begun: Begun | None,
        mlp: FusedMLP | None,
        rows: Tensor,
        given: Tensor,
    ) -> None:
        """Records for rows [rows, hidden] and `given`: the rows of `begun`, or mixed rows [rows, hidden]."""
        count, hidden = rows.shape
        output = None if begun is None else begun.output
        projections = [
            *([] if output is None else [output]),
            *([] if mlp is None else [mlp.gate_up, mlp.down]),
        ]
        self._products = [(projection, projection.multiply) for projection in projections]
        total = torch.empty_like(rows)
        super().__init__(rows, given, total)
        self.normed = loops.fixed("normed", count, hidden)
        with loops.rows.recorded(self.stages):
            mixed = given
            if begun is not None:
                if begun.gates is not None:
                    given = loops.fixed("gated heads", *given.shape)
                    begun.gate_into(given, loops)
                mixed = loops.fixed("mixed", count, hidden)
                product_of(begun.output).record(self.stages, given, mixed)
            if norms.after_mixer is not None:
                norms.after_mixer.into(mixed, mixed)
            norm = norms.before_mlp
            loops.rows.add_rms_norm(rows, mixed, norm.weight, norm.eps, total, self.normed)
            if mlp is not None:
                gate_up = loops.fixed("gate_up", count, product_of(mlp.gate_up).out_features)
                gated, more = loops.fixed("gated", count, mlp.width), loops.fixed("more", count, hidden)
                product_of(mlp.gate_up).record(self.stages, self.normed, gate_up)
                mlp.gate(gate_up, gated)
                product_of(mlp.down).record(self.stages, gated, more)
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
        begun = self.mixer.begin(norms.before_mixer, rows, rotation, step) if is_few else None
        if begun is None:
            normed = self.loops.scratch("normed", *rows.shape)
            norms.before_mixer.into(rows, normed)
            given = self.mixer.rows(normed, rotation, step)
        else:
            given = begun.rows
        total = torch.empty_like(rows)
        ending = self._ending(rows, given, begun) if is_few else None
        if ending is not None:
            ending.run_with(rows, given, total)
            normed = ending.normed
            if isinstance(self.mlp, FusedMLP):
                return total
        else:
            normed = self.loops.scratch("normed", *rows.shape)
            mixed = given if begun is None else begun.end(self.loops)
            if norms.after_mixer is not None:
                norms.after_mixer.into(mixed, mixed)
            norm = norms.before_mlp
            loops.add_rms_norm(rows, mixed, norm.weight, norm.eps, total, normed)
        more = self._mlp(normed)
        if norms.after_mlp is not None:
            norms.after_mlp.into(more, more)
        loops.add(total, more, total)
        return total

    def _ending(self, rows: Tensor, given: Tensor, begun: Begun | None) -> RecordedEnding | None:
        """Returns the stages after the mixer for so many rows. None: they are no stages, or only one."""
        alike = len(rows), begun is not None
        ending = self.endings.get(alike)
        if not given.is_contiguous():
            return None
        if ending is None or not ending.serves():
            mlp = self.mlp if isinstance(self.mlp, FusedMLP) else None
            projections = [*([begun.output] if begun else []), *([mlp.gate_up, mlp.down] if mlp else [])]
            if not projections or not can_be_recorded(*projections):
                return None
            ending = self.endings[alike] = RecordedEnding(self.loops, self.norms, begun, mlp, rows, given)
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
