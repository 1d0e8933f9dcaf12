"""Fused decoder layers, and their recorded parts for few rows: two calls of torch's threads beside the attention.

A decode of a small model spends a quarter of its time between its compiled functions. The functions before a layer's
attention are therefore recorded as stages of one call, and so are those after it (kernels/cpu/stages.py). A recording
is for one number of rows. The addresses of tensors that change from call to call are written into its jobs before a
run. Scratch rows have fixed addresses, and are shared by all layers, which run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.cpu.stages import Stages, can_run_stages
from rootstock.kernels.torch.linear import Blocked
from rootstock.runtime.torch.fusion.base import Fused, FusedStep, Projection
from rootstock.runtime.torch.fusion.modules import (
    MOST_RECORDED_ROWS,
    FusedAttention,
    FusedLoops,
    FusedMixer,
    FusedMLP,
    Norms,
    only_harmless,
)

Rotation = tuple[Tensor, Tensor]  # cosines and sines of each row's position
Pool = tuple[Tensor, Tensor, Tensor]  # keys, values, and the rows' slots


def _can_be_recorded(*projections: Projection) -> bool:
    """Returns whether the products of projections, as they are now, can be stages."""
    return can_run_stages() and all(isinstance(each.multiply, Blocked) for each in projections)


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
        """Attends rows [tokens, hidden] → [tokens, q_heads · head_dim], by recorded stages. None: a projection is no
        stage, or K and V are not stored as they are."""
        pool = step.memory_of(attention.index, rows.dtype)
        if pool is None or not _can_be_recorded(attention.inputs, attention.output):
            return None
        alike = len(rows), 0 if rotation is None else rotation[0].shape[-1]
        opening = self.openings.get(alike)
        if opening is None or not opening.serves(attention):
            opening = self.openings[alike] = RecordedOpening(
                self.loops, self.norms, attention, rows, rotation, pool
            )
        opening.run_with(rows, *(rotation or ()), *pool)
        query, key, value = opening.query, opening.key, opening.value
        attended = step.attend(attention.index, query, key, value, attention.scores, is_kept=True)
        return attended.reshape(len(rows), -1)

    def _ending(self, rows: Tensor, given: Tensor, output: Projection | None) -> RecordedEnding | None:
        """Returns the stages after the mixer for so many rows. None: they are no stages, or only one."""
        mlp = self.mlp if isinstance(self.mlp, FusedMLP) else None
        if mlp is not None and not _can_be_recorded(mlp.gate_up, mlp.down):
            return None
        if not given.is_contiguous() or (mlp is None and output is None):
            return None
        alike = len(rows), output is not None
        ending = self.endings.get(alike)
        if ending is None or not ending.serves():
            ending = self.endings[alike] = RecordedEnding(self.loops, self.norms, output, mlp, rows, given)
        return ending

    def _mlp(self, rows: Tensor) -> Tensor:
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.rows(rows)
        given = self.mlp(rows[None])
        mixed: Tensor = given[0] if isinstance(given, tuple) else given
        return mixed.reshape(rows.shape).contiguous()
