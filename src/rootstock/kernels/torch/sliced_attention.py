"""Attention on CPUs in slices of the context, each of which fits the processor's cache.

torch's flash attention for CPUs takes grouped heads and strides, and returns each row's log-sum-exp. The softmax over
a context in slices is therefore the weighted sum of the slices' softmaxes (Rabe and Staats 2021, arXiv 2112.05682).
Consequences:

- A decode's context is divided into slices. Each is staged in one small scratch memory that stays in the processor's
  cache: copied, or gathered where its blocks do not adjoin. Flash attention reads K and V head by head, with a
  stride. From 512 positions on, reading them from main memory took 1.3 to 2.4 times as long as staging them.
- A prefix that several decoding sequences share is read once, with all their queries.
- A prefill chunk attends to its new positions causally, and to its past without a mask. If the first visible position
  differs among its rows, the chunk is divided into bands of rows. A band reads the positions that all its rows see
  without a mask, and the positions at its edge with one.
- The query heads of a group become rows of one problem, 2 to 3 times faster than a call per query head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from rootstock.cache.families import ChunkedAttention, FullAttention, SlidingWindow, TokenFamily
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows
from rootstock.kernels.spans import EVERYTHING, Slots, Span, readings, slots_of

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuning parameters. Measured with 8 KV heads of 128 and 5 of 64, in bfloat16 and float32, contexts of 512 to
    16k."""

    slice_bytes: int = 1 << 20  # of K, for a few rows; half and twice as much are within 10 %
    chunk_slice_bytes: int = 16 << 20  # for many rows, which use a slice more than once
    many_rows: int = 16  # new positions from which `chunk_slice_bytes` applies
    # Least number of reads of positions that sharing saves; below it, each decode reads a common prefix for itself.
    share_from: int = 192
    # Least and most rows of a band of a sliding window; between these limits, as many as the window is wide. Most
    # rows of a wider band would not see most of its edge.
    band_rows: tuple[int, int] = (64, 256)
    # On CUDA devices: the fewest positions of a context that one program attends to.
    split_positions: int = 256


@dataclass(frozen=True, slots=True)
class Slice:
    """Range of positions that are staged together and attended in one call."""

    rows: tuple[int, ...]  # numbers of the decodes that read it; none for a chunk
    tokens: int
    first_slot: int  # if the slots adjoin
    slots: Tensor | None  # [tokens] int64, if they do not


@dataclass(frozen=True, slots=True)
class _Level:
    """At most one slice of every decode: their results stand side by side."""

    slices: tuple[Slice, ...]
    rows: Tensor | None  # [results] the decode of each result; None: all decodes in order


@dataclass(frozen=True, slots=True)
class _Edge:
    """Positions that some rows of a band see and others do not. Every row sees at least one of them, because flash
    attention has no log-sum-exp for a row that sees no position."""

    part: Slice
    mask: Tensor  # [rows, part.tokens] float32, 0 where a row sees a position and -inf where not


@dataclass(frozen=True, slots=True)
class _Band:
    """Band: consecutive rows of a chunk that are attended together."""

    rows: slice  # of the step
    common: tuple[Slice, ...]  # positions before the band that all its rows see
    edge: _Edge | None
    causal: bool  # true: the rows see each other causally; false: the edge holds the band's own positions too


Stage = Callable[[PoolRows, PoolRows, Slice], tuple[Tensor, Tensor]]


class SlicedAttention:
    """Attention backend for CPUs, for K and V of equal dimensions, without softcap.

    `position_bytes`: bytes of K per position in the widest layer, which determine the positions of a slice.
    `stage`: copies a slice of a layer's pool to the memory in which it is attended, see `Scratch.stage`.
    """

    def __init__(
        self, block_size: int, position_bytes: int, tuning: Tuning | None = None, stage: Stage | None = None
    ) -> None:
        self._block_size = block_size
        self._tuning = tuning or Tuning()
        self._slice_tokens = max(1, self._tuning.slice_bytes // position_bytes)
        self._chunk_slice_tokens = max(1, self._tuning.chunk_slice_bytes // position_bytes)
        self._stage = stage or Scratch().stage

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        decodes = [span for span in spans if span.new == 1]
        bands = [band for span in spans if span.new > 1 for band in self._bands(span, family)]
        return _SlicedStep([span.row for span in decodes], self._levels(decodes, family), bands, self._stage)

    def _is_worth_sharing(self, readers: int, positions: int) -> bool:
        return (readers - 1) * positions >= self._tuning.share_from

    def _bands(self, span: Span, family: TokenFamily) -> list[_Band]:
        cuts = [span.past, *self._cuts(span, family), span.end]
        return [self._band(span, family, begin, end) for begin, end in pairwise(cuts)]

    def _cuts(self, span: Span, family: TokenFamily) -> list[int]:
        """Returns the positions at which the rows of a chunk are cut into bands."""
        match family:
            case FullAttention():
                return []
            case ChunkedAttention(chunk=chunk):
                return list(range(span.past + chunk - span.past % chunk, span.end, chunk))
            case SlidingWindow(window=window):
                moves = max(span.past, window)  # before it, all rows see from 0 on
                least, most = self._tuning.band_rows
                cuts = range(moves, span.end, max(least, min(window, most)))
                return [cut for cut in cuts if cut > span.past]
            case _:
                assert_never(family)

    def _band(self, span: Span, family: TokenFamily, begin: int, end: int) -> _Band:
        """Builds the band of the positions begin … end - 1."""
        first, last_first = family.first_visible(begin), family.first_visible(end - 1)
        rows = slice(span.row + begin - span.past, span.row + end - span.past)
        few = end - begin < self._tuning.many_rows
        tokens = self._slice_tokens if few else self._chunk_slice_tokens
        if last_first == first:
            return _Band(rows, tuple(self._slices((), span, first, begin, tokens)), None, True)
        if last_first >= begin:  # a window narrower than the band: nothing before the band is common
            return _Band(rows, (), self._edge(span, family, range(begin, end), end), False)
        # The edge includes the first position that all rows see, so that every row sees a position there.
        edge = self._edge(span, family, range(begin, end), last_first + 1)
        return _Band(rows, tuple(self._slices((), span, last_first + 1, begin, tokens)), edge, True)

    def _edge(self, span: Span, family: TokenFamily, rows: range, until: int) -> _Edge:
        """Builds the edge: the positions before `until` that the rows see, with a mask."""
        starts = [family.first_visible(position) for position in rows]
        seen = torch.arange(starts[0], until)
        hidden = (seen < torch.tensor(starts)[:, None]) | (seen > torch.tensor(rows)[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _Edge(_slice((), slots_of(span.blocks, starts[0], until, self._block_size)), mask)

    def _slices(self, rows: tuple[int, ...], span: Span, first: int, end: int, tokens: int) -> list[Slice]:
        """Cuts the positions first … end - 1 into equal slices of about `tokens` positions."""
        if first >= end:
            return []
        slots = slots_of(span.blocks, first, end, self._block_size)
        return [_slice(rows, part) for part in np.array_split(slots, max(1, round(len(slots) / tokens)))]

    def _levels(self, decodes: Sequence[Span], family: TokenFamily = EVERYTHING) -> list[_Level]:
        depth = [0] * len(decodes)  # slices of each decode so far
        levels: list[list[Slice]] = []
        for rows, first, end in readings(decodes, family, self._block_size, self._is_worth_sharing):
            for part in self._slices(tuple(rows), decodes[rows[0]], first, end, self._slice_tokens):
                level = depth[rows[0]]
                if level == len(levels):
                    levels.append([])
                levels[level].append(part)
                for row in rows:
                    depth[row] = level + 1
        return [_level(tuple(slices), len(decodes)) for slices in levels]


def _slice(rows: tuple[int, ...], slots: Slots) -> Slice:
    first, tokens = int(slots[0]), len(slots)
    # A cheap test first: slots are compared in full only if their ends are as far apart as the ends of a run.
    adjoin = int(slots[-1]) - first == tokens - 1 and bool((slots[1:] - slots[:-1] == 1).all())
    return Slice(rows, tokens, first, None if adjoin else torch.from_numpy(slots))


def _level(slices: tuple[Slice, ...], decodes: int) -> _Level:
    rows = [row for part in slices for row in part.rows]
    return _Level(slices, None if rows == list(range(decodes)) else torch.tensor(rows))


class Scratch:
    """Memory in which slices are staged: for each shape of layers, as large as the longest slice until now."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def stage(self, keys: PoolRows, values: PoolRows, part: Slice) -> tuple[Tensor, Tensor]:
        """Copies a slice of keys and values [slots, kv_heads, head_dim]. Returns [1, kv_heads, tokens, head_dim]
        each.

        The result is valid until the next call, because the memory is reused.
        """
        heads, dim = keys.shape[1:]
        dtype = keys.dtype if isinstance(keys, Tensor) else keys.read_as
        of_this_shape = (heads, dim, dtype)
        scratch = self._scratch.get(of_this_shape)
        if scratch is None or len(scratch[0]) < part.tokens:
            scratch = self._scratch[of_this_shape] = (
                torch.empty(part.tokens, heads, dim, dtype=dtype),
                torch.empty(part.tokens, heads, dim, dtype=dtype),
            )
        staged_keys, staged_values = (
            stage_into(source, part, memory[: part.tokens])
            for source, memory in zip((keys, values), scratch, strict=True)
        )
        return staged_keys.transpose(0, 1)[None], staged_values.transpose(0, 1)[None]


def stage_into(source: PoolRows, part: Slice, staged: Tensor) -> Tensor:
    """Copies the slice of source [slots, kv_heads, dim] to `staged` [tokens, kv_heads, dim]."""
    if not isinstance(source, Tensor):
        adjoining = slice(part.first_slot, part.first_slot + part.tokens)
        return source.read(adjoining if part.slots is None else part.slots, staged)
    if part.slots is None:
        return staged.copy_(source[part.first_slot : part.first_slot + part.tokens])
    return torch.index_select(source, 0, part.slots, out=staged)


class _SlicedStep:
    def __init__(
        self, decode_rows: list[int], levels: list[_Level], bands: list[_Band], stage: Stage
    ) -> None:
        self._decodes = len(decode_rows)
        first = decode_rows[0] if decode_rows else 0
        adjoin = decode_rows == list(range(first, first + len(decode_rows)))
        # Decodes are usually neighbours, and then their rows are a view.
        self._rows = slice(first, first + len(decode_rows)) if adjoin else torch.tensor(decode_rows)
        self._levels = levels
        self._bands = bands
        self._stage = stage

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        assert scores.softcap is None
        context = _Context(keys, values, scores, self._stage)
        if not self._bands:
            return self._decode(query, context)  # decodes alone are all rows, in order
        out = torch.empty_like(query, memory_format=torch.contiguous_format)  # [tokens, q_heads, head_dim]
        if self._decodes:
            out[self._rows] = self._decode(query[self._rows], context)
        for band in self._bands:
            out[band.rows] = self._prefill(band, query[band.rows], key[band.rows], value[band.rows], context)
        return out

    def _decode(self, query: Tensor, context: _Context) -> Tensor:
        """Attends decodes: query [decodes, q_heads, head_dim] → the same shape."""
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
        """Attends a level: query [decodes, kv_heads, group, head_dim] → the same shape, and its log-sum-exp [decodes,
        kv_heads, group].

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
    def _prefill(band: _Band, query: Tensor, key: Tensor, value: Tensor, context: _Context) -> Tensor:
        """Attends a band. query [new, q_heads, head_dim], key and value [new, kv_heads, head_dim]. Returns the
        query's shape."""
        new, q_heads, head_dim = query.shape
        kv_heads = key.shape[1]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))  # [1, heads, new, head_dim]
        pieces = _SlicedStep._pieces(band, q, k, v, context)
        out, lse = next(pieces)
        by_group = (1, kv_heads, q_heads // kv_heads, new)
        for more, more_lse in pieces:
            out, lse = _merge(
                out.view(*by_group, head_dim),
                lse.view(by_group),
                more.view(*by_group, head_dim),
                more_lse.view(by_group),
            )
        if out.ndim == 5:
            out, lse = out.flatten(1, 2), lse.flatten(1, 2)
        if context.scores.sinks is not None:
            out = _weigh_against_sinks(out, lse, context.scores.sinks.view(1, q_heads, 1))
        merged: Tensor = out[0].transpose(0, 1)
        return merged

    @staticmethod
    def _pieces(
        band: _Band, query: Tensor, key: Tensor, value: Tensor, context: _Context
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Attends a band [1, heads, new, head_dim] to each piece of its visible positions. Yields outputs and
        log-sum-exps.

        Their heads are [q_heads], or [kv_heads] with the rows of a group side by side.
        """
        if band.causal:
            yield _flash(query, key, value, 0.0, True, scale=context.scores.scale)
        if band.edge is not None:
            yield context.attend_edge(band.edge, query)
        if band.common:
            # Without a mask, all heads of a group and all rows are alike: one problem per KV head.
            kv_heads, head_dim = key.shape[1], key.shape[-1]
            folded = query.reshape(1, kv_heads, -1, head_dim)
            for part in band.common:
                yield context.attend(part, folded)


@dataclass(frozen=True, slots=True)
class _Context:
    """K and V of one layer by slot, [slots, kv_heads, head_dim], and the functions that attend to slices of them."""

    keys: PoolRows
    values: PoolRows
    scores: Scores
    stage: Stage

    def attend(self, part: Slice, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attends query [1, kv_heads, rows, head_dim] to a slice. Returns the same shape, and the log-sum-exp [1,
        kv_heads, rows] float32."""
        keys, values = self.stage(self.keys, self.values, part)
        out, lse = _flash(query, keys, values, scale=self.scores.scale)
        return out, lse

    def attend_edge(self, edge: _Edge, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attends query [1, q_heads, rows of the band, head_dim] to an edge. Returns an output and a log-sum-exp like
        `attend`."""
        keys, values = self.stage(self.keys, self.values, edge.part)
        out, lse = _flash(query, keys, values, attn_mask=edge.mask, scale=self.scores.scale)
        return out, lse


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two sets of positions. out […, head_dim], lse […]; in float32."""
    weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)
    return torch.lerp(out.float(), more.float(), weight), torch.logaddexp(lse, more_lse)


def _weigh_against_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Applies sinks: extra scores in the softmax's sum that add nothing to the result. out […, head_dim]"""
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1)
