"""Attention in place on CPUs: contiguous runs are views of the pool, their results merge by log-sum-exp.

torch's flash attention for CPUs takes strided views and grouped heads and returns each row's log-sum-exp, so that
softmax over a context in several pieces is the pieces' softmaxes, weighted (Rabe and Staats 2021). Hence:

- a sequence in one run is attended where it lies, nothing is copied;
- many short runs are gathered into one piece of scratch memory first, because a call costs more than a copy;
- a prefix that several decoding sequences share is read once, with all their queries;
- a prefill chunk is its new positions, causally, and its past, without a mask.

The query heads of a group become rows of one attention problem: 2 to 3 × faster than a call per query head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rootstock.kernels.scores import Scores, StepAttention
from rootstock.kernels.spans import Run, Slots, Span, common_blocks, runs_of

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where one way gets faster than another; measured, see the figures in docs/adr."""

    in_place_from: int = 128  # tokens: a shorter run among several is gathered
    share_from: int = 64  # tokens: a shorter common prefix is read by each sequence for itself
    runs_in_place: int = 3  # of one sequence; more would cost more merging than copying


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions that are attended in one call, by all rows alike."""

    rows: tuple[int, ...]  # which decodes read it; a chunk's pieces have none
    first: int  # slot in the pool, or row of the scratch memory
    tokens: int
    gathered: bool


@dataclass(slots=True)
class _Gather:
    """What a step copies into scratch memory, the same slots in every layer."""

    slots: list[Slots] = field(default_factory=list)
    tokens: int = 0

    def add(self, runs: Sequence[Run]) -> tuple[int, int]:
        """(first row of the scratch memory, tokens)"""
        first = self.tokens
        for run in runs:
            self.slots.append(np.arange(run.first_slot, run.first_slot + run.tokens))
            self.tokens += run.tokens
        return first, self.tokens - first


@dataclass(frozen=True, slots=True)
class _Level:
    """At most one piece of every decode: their results stand side by side."""

    pieces: tuple[_Piece, ...]
    rows: Tensor | None  # [results] the decode of each result; None: all decodes in order


@dataclass(frozen=True, slots=True)
class _Chunk:
    span: Span
    past: tuple[_Piece, ...]


class PagedAttention:
    """For K and V of equal dimensions on a CPU, without softcap."""

    def __init__(self, block_size: int, tuning: Tuning | None = None) -> None:
        self._block_size = block_size
        self._tuning = tuning or Tuning()
        self._scratch: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def prepare(self, spans: Sequence[Span]) -> StepAttention:
        gather = _Gather()
        decodes = [span for span in spans if span.new == 1]
        levels = self._levels(decodes, gather)
        chunks = [
            _Chunk(span, tuple(self._pieces((), span, 0, span.past, gather)))
            for span in spans
            if span.new > 1
        ]
        slots = torch.from_numpy(np.concatenate(gather.slots)) if gather.tokens else None
        return _PagedStep([span.row for span in decodes], levels, chunks, slots, self.scratch)

    def scratch(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two [tokens, kv_heads, head_dim] to gather K and V into. Kept: fresh memory costs page faults."""
        key = (like.shape[1], like.shape[2], like.dtype)
        held = self._scratch.get(key)
        if held is None or len(held[0]) < tokens:
            shape = (max(tokens, 2 * len(held[0]) if held else 0), *like.shape[1:])
            held = self._scratch[key] = like.new_empty(shape), like.new_empty(shape)
        return held[0][:tokens], held[1][:tokens]

    def _pieces(
        self, rows: tuple[int, ...], span: Span, first: int, end: int, gather: _Gather
    ) -> list[_Piece]:
        """The positions first … end - 1, long runs in place and the others gathered."""
        runs = runs_of(span.blocks, first, end, self._block_size)
        if len(runs) > 1:
            by_length = sorted(runs, key=lambda run: -run.tokens)
            in_place = [
                r for r in by_length[: self._tuning.runs_in_place] if r.tokens >= self._tuning.in_place_from
            ]
            others = by_length[len(in_place) :]
        else:
            in_place, others = runs, []
        pieces = [_Piece(rows, run.first_slot, run.tokens, gathered=False) for run in in_place]
        if others:
            pieces.append(_Piece(rows, *gather.add(others), gathered=True))
        return pieces

    def _levels(self, decodes: Sequence[Span], gather: _Gather) -> list[_Level]:
        read: list[list[_Piece]] = [[] for _ in decodes]  # of each decode, in the order of its levels
        # Only blocks before the one that a decode writes to can be shared, so each keeps a piece of its own.
        tables = [span.blocks[: (span.end - 1) // self._block_size] for span in decodes]
        levels: list[list[_Piece]] = []

        def emit(rows: list[int], first: int, end: int) -> None:
            for piece in self._pieces(tuple(rows), decodes[rows[0]], first, end, gather):
                level = len(read[rows[0]])
                if level == len(levels):
                    levels.append([])
                levels[level].append(piece)
                for row in rows:
                    read[row].append(piece)

        def descend(rows: list[int], begin: int, at: int) -> None:
            """These decodes have read the blocks before `begin`, and have all blocks before `at` in common."""
            together: dict[int, list[int]] = {}
            for row in rows:
                block = int(tables[row][at]) if at < len(tables[row]) else -1 - row
                together.setdefault(block, []).append(row)
            for group in together.values():
                if len(group) == 1:
                    emit(group, begin * self._block_size, decodes[group[0]].end)
                    continue
                until = at + common_blocks([tables[row] for row in group], at)
                if (until - begin) * self._block_size >= self._tuning.share_from:
                    emit(group, begin * self._block_size, until * self._block_size)
                    descend(group, until, until)
                else:
                    descend(group, begin, until)

        if decodes:
            descend(list(range(len(decodes))), 0, 0)
        return [self._level(tuple(pieces), len(decodes)) for pieces in levels]

    @staticmethod
    def _level(pieces: tuple[_Piece, ...], decodes: int) -> _Level:
        rows = [row for piece in pieces for row in piece.rows]
        return _Level(pieces, None if rows == list(range(decodes)) else torch.tensor(rows))


class _PagedStep:
    def __init__(
        self,
        decode_rows: list[int],
        levels: list[_Level],
        chunks: list[_Chunk],
        gather_slots: Tensor | None,
        scratch: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self._decodes = len(decode_rows)
        first = decode_rows[0] if decode_rows else 0
        # Decodes are usually neighbours, and then their rows are a view.
        self._decode_rows = (
            slice(first, first + len(decode_rows))
            if decode_rows == list(range(first, first + len(decode_rows)))
            else torch.tensor(decode_rows)
        )
        self._levels = levels
        self._chunks = chunks
        self._gather_slots = gather_slots
        self._scratch = scratch

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> Tensor:
        context = self._context(keys, values)
        if not self._chunks:
            return self._decode(query, context, scores)  # decodes alone are all rows, in order
        out = torch.empty_like(query, memory_format=torch.contiguous_format)  # [tokens, q_heads, head_dim]
        if self._decodes:
            out[self._decode_rows] = self._decode(query[self._decode_rows], context, scores)
        for chunk in self._chunks:
            rows = slice(chunk.span.row, chunk.span.row + chunk.span.new)
            out[rows] = self._prefill(chunk, query[rows], key[rows], value[rows], context, scores)
        return out

    def _context(self, keys: Tensor, values: Tensor) -> _Context:
        if self._gather_slots is None:
            return _Context(keys, values, keys, values)
        gathered_keys, gathered_values = self._scratch(len(self._gather_slots), keys)
        torch.index_select(keys, 0, self._gather_slots, out=gathered_keys)
        torch.index_select(values, 0, self._gather_slots, out=gathered_values)
        return _Context(keys, values, gathered_keys, gathered_values)

    def _decode(self, query: Tensor, context: _Context, scores: Scores) -> Tensor:
        """query [decodes, q_heads, head_dim] → the same shape."""
        decodes, q_heads, head_dim = query.shape
        kv_heads = context.keys.shape[1]
        grouped = query.view(decodes, kv_heads, q_heads // kv_heads, head_dim)
        out, lse = self._decode_level(self._levels[0], grouped, context, scores)
        for level in self._levels[1:]:
            out, lse = _merge(out, lse, *self._decode_level(level, grouped, context, scores))
        if scores.sinks is not None:
            out = out * torch.sigmoid(lse - scores.sinks.view(1, kv_heads, -1)).unsqueeze(-1)
        return out.reshape(decodes, q_heads, head_dim).to(query.dtype)

    @staticmethod
    def _decode_level(
        level: _Level, query: Tensor, context: _Context, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """query [decodes, kv_heads, group, head_dim] → the same shape, and its log-sum-exp [decodes, kv_heads, group]

        A decode without a piece at this level gets zeros and a log-sum-exp of -inf: it weighs nothing in a merge.
        """
        kv_heads, group, head_dim = query.shape[1:]
        singles = query.unsqueeze(1).unbind(0)  # [1, kv_heads, group, head_dim] each
        outs, lses = [], []
        for piece in level.pieces:
            if len(piece.rows) == 1:
                out, lse = context.attend(piece, singles[piece.rows[0]], scores)
            else:
                # [readers, kv_heads, group, head_dim] → one problem with readers · group rows, and back
                readers = len(piece.rows)
                rows = query if readers == len(query) else query[list(piece.rows)]
                out, lse = context.attend(
                    piece, rows.transpose(0, 1).reshape(1, kv_heads, readers * group, head_dim), scores
                )
                out = out.view(kv_heads, readers, group, head_dim).transpose(0, 1)
                lse = lse.view(kv_heads, readers, group).transpose(0, 1)
            outs.append(out)
            lses.append(lse)
        out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))
        if level.rows is None:
            return out, lse
        return (
            torch.zeros_like(query).index_copy_(0, level.rows, out),
            lse.new_full(query.shape[:3], float("-inf")).index_copy_(0, level.rows, lse),
        )

    @staticmethod
    def _prefill(
        chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor, context: _Context, scores: Scores
    ) -> Tensor:
        """query [new, q_heads, head_dim], key and value [new, kv_heads, head_dim] → as the query"""
        new, q_heads, head_dim = query.shape
        kv_heads = key.shape[1]
        q = query.transpose(0, 1)  # [q_heads, new, head_dim]
        out, lse = _flash(
            q[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0.0, True, scale=scores.scale
        )
        if chunk.past:
            # Without a mask, all heads of a group and all rows are alike: one problem per KV head.
            folded = q.reshape(1, kv_heads, q_heads // kv_heads * new, head_dim)
            for piece in chunk.past:
                part, part_lse = context.attend(piece, folded, scores)
                out, lse = _merge(
                    out, lse, part.reshape(1, q_heads, new, head_dim), part_lse.reshape(1, q_heads, new)
                )
        if scores.sinks is not None:
            out = out * torch.sigmoid(lse - scores.sinks.view(1, q_heads, 1)).unsqueeze(-1)
        merged: Tensor = out[0].transpose(0, 1)
        return merged


@dataclass(frozen=True, slots=True)
class _Context:
    """One layer's K and V, by slot, and what was gathered from them: [·, kv_heads, head_dim] contiguous."""

    keys: Tensor
    values: Tensor
    gathered_keys: Tensor
    gathered_values: Tensor

    def attend(self, piece: _Piece, query: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """query [1, kv_heads, rows, head_dim] → the same shape, and its log-sum-exp [1, kv_heads, rows] float32"""
        keys, values = (
            (self.gathered_keys, self.gathered_values) if piece.gathered else (self.keys, self.values)
        )
        _, heads, dim = keys.shape
        shape, strides = (1, heads, piece.tokens, dim), (0, dim, heads * dim, 1)
        offset = piece.first * heads * dim
        # as_strided is one call where narrow and transpose are three, and this runs per layer and sequence.
        out, lse = _flash(
            query,
            keys.as_strided(shape, strides, offset),
            values.as_strided(shape, strides, offset),
            scale=scores.scale,
        )
        return out, lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of positions from attention over each. out [… , head_dim], lse [ … ]; in float32."""
    weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)
    return torch.lerp(out.float(), more.float(), weight), torch.logaddexp(lse, more_lse)
