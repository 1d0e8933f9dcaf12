"""Attention on CPUs, slice by slice: each slice of a context fits the processor's cache, results merge.

torch's flash attention for CPUs takes grouped heads and strides and returns each row's log-sum-exp, so softmax over
a context in slices is the slices' softmaxes, weighted (Rabe and Staats 2021, arXiv 2112.05682). Hence:

- A decode's context is cut into slices that are staged: copied, or gathered where their blocks do not adjoin, into
  one small scratch memory that stays in the processor's cache. Flash attention reads K and V head by head, with a
  stride; done straight from main memory that took 1.3 to 2.4 times as long as staging it, from 512 positions on.
- A prefix that several decoding sequences share is read once, with all their queries.
- A prefill chunk is its new positions, causally, and its past, without a mask.
- The query heads of a group become rows of one problem, 2 to 3 times faster than a call per query head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.families import FullAttention, TokenFamily
from rootstock.kernels.scores import Scores, StepAttention
from rootstock.kernels.spans import EVERYTHING, Slots, Span, common_blocks, slots_of

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measured with 8 KV heads of 128 and 5 of 64, in bfloat16 and float32, contexts of 512 to 16k positions."""

    slice_bytes: int = 1 << 20  # of K, for a few rows; half and twice as much are within 10 %
    chunk_slice_bytes: int = 16 << 20  # for many rows, which use what they read more than once
    many_rows: int = 16  # new positions from which a chunk counts as that
    share_from: int = (
        192  # positions not read again; to save fewer, each decode reads a common prefix for itself
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    """Positions that are staged together and attended in one call, by all rows alike."""

    rows: tuple[int, ...]  # which decodes read it; a chunk's slices have none
    tokens: int
    first_slot: int  # if they adjoin
    slots: Tensor | None  # [tokens] int64, if they do not


@dataclass(frozen=True, slots=True)
class _Level:
    """At most one slice of every decode: their results stand side by side."""

    slices: tuple[_Slice, ...]
    rows: Tensor | None  # [results] the decode of each result; None: all decodes in order


@dataclass(frozen=True, slots=True)
class _Chunk:
    span: Span
    past: tuple[_Slice, ...]


class PagedAttention:
    """For K and V of equal dimensions on a CPU, without softcap.

    `position_bytes` is K's size per position in the widest layer: it tells how many positions make a slice.
    """

    def __init__(self, block_size: int, position_bytes: int, tuning: Tuning | None = None) -> None:
        self._block_size = block_size
        self._tuning = tuning or Tuning()
        self._slice_tokens = max(1, self._tuning.slice_bytes // position_bytes)
        self._chunk_slice_tokens = max(1, self._tuning.chunk_slice_bytes // position_bytes)
        self._scratch: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        assert isinstance(family, FullAttention)
        decodes = [span for span in spans if span.new == 1]
        chunks = [self._chunk(span) for span in spans if span.new > 1]
        return _PagedStep([span.row for span in decodes], self._levels(decodes), chunks, self._stage)

    def _stage(self, keys: Tensor, values: Tensor, part: _Slice) -> tuple[Tensor, Tensor]:
        """keys and values [slots, kv_heads, head_dim] → [1, kv_heads, tokens, head_dim] of the slice.

        Valid until the next call: the memory is reused, which is the point of it.
        """
        heads, dim = keys.shape[1:]
        of_this_shape = (heads, dim, keys.dtype)
        scratch = self._scratch.get(of_this_shape)
        if scratch is None or len(scratch[0]) < part.tokens:
            scratch = self._scratch[of_this_shape] = (
                keys.new_empty(part.tokens, heads, dim),
                keys.new_empty(part.tokens, heads, dim),
            )
        return self._stage_one(keys, part, scratch[0]), self._stage_one(values, part, scratch[1])

    @staticmethod
    def _stage_one(source: Tensor, part: _Slice, scratch: Tensor) -> Tensor:
        staged = scratch[: part.tokens]
        if part.slots is None:
            staged.copy_(source[part.first_slot : part.first_slot + part.tokens])
        else:
            torch.index_select(source, 0, part.slots, out=staged)
        return staged.transpose(0, 1).unsqueeze(0)

    def _chunk(self, span: Span) -> _Chunk:
        few = span.new < self._tuning.many_rows
        tokens = self._slice_tokens if few else self._chunk_slice_tokens
        return _Chunk(span, tuple(self._slices((), span, 0, span.past, tokens)))

    def _slices(self, rows: tuple[int, ...], span: Span, first: int, end: int, tokens: int) -> list[_Slice]:
        """The positions first … end - 1 in equal slices of about so many."""
        if first >= end:
            return []
        slots = slots_of(span.blocks, first, end, self._block_size)
        return [_slice(rows, part) for part in np.array_split(slots, max(1, round(len(slots) / tokens)))]

    def _levels(self, decodes: Sequence[Span]) -> list[_Level]:
        # Only blocks before the one that a decode writes to can be shared, so each keeps a slice of its own.
        tables = [span.blocks[: (span.end - 1) // self._block_size] for span in decodes]
        depth = [0] * len(decodes)  # slices of each decode so far
        levels: list[list[_Slice]] = []

        def emit(rows: list[int], first: int, end: int) -> None:
            for part in self._slices(tuple(rows), decodes[rows[0]], first, end, self._slice_tokens):
                level = depth[rows[0]]
                if level == len(levels):
                    levels.append([])
                levels[level].append(part)
                for row in rows:
                    depth[row] = level + 1

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
                saved = (len(group) - 1) * (until - begin) * self._block_size
                if saved >= self._tuning.share_from:
                    emit(group, begin * self._block_size, until * self._block_size)
                    descend(group, until, until)
                else:
                    descend(group, begin, until)

        if decodes:
            descend(list(range(len(decodes))), 0, 0)
        return [_level(tuple(slices), len(decodes)) for slices in levels]


def _slice(rows: tuple[int, ...], slots: Slots) -> _Slice:
    first, tokens = int(slots[0]), len(slots)
    # Cheap to refute: only slots whose ends are as far apart as a run's are looked at in full.
    adjoin = int(slots[-1]) - first == tokens - 1 and bool((slots[1:] - slots[:-1] == 1).all())
    return _Slice(rows, tokens, first, None if adjoin else torch.from_numpy(slots))


def _level(slices: tuple[_Slice, ...], decodes: int) -> _Level:
    rows = [row for part in slices for row in part.rows]
    return _Level(slices, None if rows == list(range(decodes)) else torch.tensor(rows))


Stage = Callable[[Tensor, Tensor, _Slice], tuple[Tensor, Tensor]]


class _PagedStep:
    def __init__(
        self, decode_rows: list[int], levels: list[_Level], chunks: list[_Chunk], stage: Stage
    ) -> None:
        self._decodes = len(decode_rows)
        first = decode_rows[0] if decode_rows else 0
        adjoin = decode_rows == list(range(first, first + len(decode_rows)))
        # Decodes are usually neighbours, and then their rows are a view.
        self._rows = slice(first, first + len(decode_rows)) if adjoin else torch.tensor(decode_rows)
        self._levels = levels
        self._chunks = chunks
        self._stage = stage

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scores: Scores
    ) -> Tensor:
        context = _Context(keys, values, scores, self._stage)
        if not self._chunks:
            return self._decode(query, context)  # decodes alone are all rows, in order
        out = torch.empty_like(query, memory_format=torch.contiguous_format)  # [tokens, q_heads, head_dim]
        if self._decodes:
            out[self._rows] = self._decode(query[self._rows], context)
        for chunk in self._chunks:
            rows = slice(chunk.span.row, chunk.span.row + chunk.span.new)
            out[rows] = self._prefill(chunk, query[rows], key[rows], value[rows], context)
        return out

    def _decode(self, query: Tensor, context: _Context) -> Tensor:
        """query [decodes, q_heads, head_dim] → the same shape."""
        decodes, q_heads, head_dim = query.shape
        kv_heads = context.keys.shape[1]
        grouped = query.view(decodes, kv_heads, q_heads // kv_heads, head_dim)
        out, lse = self._decode_level(self._levels[0], grouped, context)
        for level in self._levels[1:]:
            out, lse = _merge(out, lse, *self._decode_level(level, grouped, context))
        if context.scores.sinks is not None:
            out = _weigh_against_sinks(out, lse, context.scores.sinks.view(1, kv_heads, -1))
        return out.reshape(decodes, q_heads, head_dim).to(query.dtype)

    @staticmethod
    def _decode_level(level: _Level, query: Tensor, context: _Context) -> tuple[Tensor, Tensor]:
        """query [decodes, kv_heads, group, head_dim] → the same shape, and its log-sum-exp [decodes, kv_heads, group]

        A decode without a slice at this level gets zeros and a log-sum-exp of -inf: it weighs nothing in a merge.
        """
        kv_heads, group, head_dim = query.shape[1:]
        singles = query.unsqueeze(1).unbind(0)  # [1, kv_heads, group, head_dim] each
        outs, lses = [], []
        for part in level.slices:
            readers = len(part.rows)
            if readers == 1:
                out, lse = context.attend(part, singles[part.rows[0]])
            else:
                # [readers, kv_heads, group, head_dim] → one problem with readers · group rows, and back
                rows = query if readers == len(query) else query[list(part.rows)]
                stacked = rows.transpose(0, 1).reshape(1, kv_heads, readers * group, head_dim)
                out, lse = context.attend(part, stacked)
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
    def _prefill(chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor, context: _Context) -> Tensor:
        """query [new, q_heads, head_dim], key and value [new, kv_heads, head_dim] → as the query"""
        new, q_heads, head_dim = query.shape
        kv_heads = key.shape[1]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))  # [1, heads, new, head_dim]
        out, lse = _flash(q, k, v, 0.0, True, scale=context.scores.scale)
        if chunk.past:
            # Without a mask, all heads of a group and all rows are alike: one problem per KV head.
            group = q_heads // kv_heads
            folded = q.reshape(1, kv_heads, group * new, head_dim)
            out, lse = out.view(1, kv_heads, group, new, head_dim), lse.view(1, kv_heads, group, new)
            for part in chunk.past:
                more, more_lse = context.attend(part, folded)
                out, lse = _merge(out, lse, more.view(out.shape), more_lse.view(lse.shape))
            out, lse = out.flatten(1, 2), lse.flatten(1, 2)
        if context.scores.sinks is not None:
            out = _weigh_against_sinks(out, lse, context.scores.sinks.view(1, q_heads, 1))
        merged: Tensor = out[0].transpose(0, 1)
        return merged


@dataclass(frozen=True, slots=True)
class _Context:
    """One layer's K and V by slot, [slots, kv_heads, head_dim], and how to attend to slices of them."""

    keys: Tensor
    values: Tensor
    scores: Scores
    stage: Stage

    def attend(self, part: _Slice, query: Tensor) -> tuple[Tensor, Tensor]:
        """query [1, kv_heads, rows, head_dim] → the same shape, and its log-sum-exp [1, kv_heads, rows] float32"""
        keys, values = self.stage(self.keys, self.values, part)
        out, lse = _flash(query, keys, values, scale=self.scores.scale)
        return out, lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of positions from attention over each. out [… , head_dim], lse [ … ]; in float32."""
    weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)
    return torch.lerp(out.float(), more.float(), weight), torch.logaddexp(lse, more_lse)


def _weigh_against_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink is one more score in the softmax's sum, with nothing to add to the result. out […, head_dim]"""
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1)
