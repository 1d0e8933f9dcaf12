"""CUDA attention backend in Triton, which reads K and V in place through the block tables.

One program attends some rows of one sequence, with all query heads of a group, to one part of the positions that
these rows see. The query heads are rows of one small matrix, so K and V are read once for the group. A decode has few
rows and a long context: the context is split over programs, and their results are merged by log-sum-exp
(flash-decoding, Dao et al. 2023). A prefill chunk has enough rows to fill the device. Softmax is computed slice by
slice, as in FlashAttention-2 (arXiv 2307.08691).

Block tables, rows and positions, on which a launch depends besides shapes, are tensors on the device. They are
uploaded once for a step and a family, so a CUDA graph can be replayed with other contents.

If TRITON_INTERPRET=1 is in the environment before this module is imported, the same code runs on CPUs, in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rootstock.cache.families import ChunkedAttention, FullAttention, SlidingWindow, TokenFamily
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows
from rootstock.kernels.spans import EVERYTHING, Span

INTERPRETED = bool(triton.knobs.runtime.interpret)

_FULL, _WINDOW, _CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TILE = tl.constexpr(5)  # columns of a tile's record: see `Tiles`

_LEAST_DIM = 16  # smallest dimension of a matrix that tl.dot takes
_MOST_SPLITS = 32
_SLICE_BYTES = 32 << 10  # bytes of K and V that a program holds in shared memory at once, twice for overlap
# A program's shared memory on devices that multiply 128 rows by one instruction.
_LARGE_SHARED_BYTES = 200 << 10


@triton.jit  # type: ignore[untyped-decorator]
def _first_seen(position: tl.tensor, KIND: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Returns the first visible position: `TokenFamily.first_visible`."""
    if KIND == _WINDOW:
        return tl.maximum(position - SIZE + 1, 0)
    if KIND == _CHUNKED:
        return position - position % SIZE
    return position * 0


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a: tl.tensor, b: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Multiplies matrices, float32 never by way of tf32. The interpreter would multiply bfloat16 as the integers that
    store it, so WIDEN converts to float32 first. Products of bfloat16 are exact in float32 either way."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _attend_slices(
    q: tl.tensor,  # [ROWS, KEY_PAD]
    keys: tl.tensor,  # of the head: [slots, KEY_DIM]
    values: tl.tensor,  # of the head: [slots, VALUE_DIM]
    table: tl.tensor,  # int32 [width], the sequence's blocks
    highest: tl.tensor,  # float32 [ROWS], the highest score so far
    total: tl.tensor,  # float32 [ROWS], the sum of the weights so far
    weighted: tl.tensor,  # float32 [ROWS, VALUE_PAD], the weighted sum of V so far
    own: tl.tensor,  # int32 [ROWS], each row's position
    first: tl.tensor,  # int32 [ROWS], the first position that each row sees
    scale: tl.tensor,
    softcap: tl.tensor,
    key_slot: tl.tensor,  # strides, in elements
    value_slot: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    KEY_PAD: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    SOFTCAP: tl.constexpr,  # noqa: N803
    SLICE: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attends the rows to the positions from `begin` to `end`, slice by slice. Returns the new sums so far. Without
    MASKED, the positions are whole slices that all rows see."""
    key_axis, value_axis = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    for start in range(begin, end, SLICE):
        position = start + tl.arange(0, SLICE)
        key_used, value_used = (key_axis < KEY_DIM)[:, None], (value_axis < VALUE_DIM)[None, :]
        if MASKED:
            there = position < end
            block = tl.load(table + position // BLOCK_SIZE, mask=there, other=0)
            key_used, value_used = key_used & there[None, :], value_used & there[:, None]
        else:
            block = tl.load(table + position // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        at = keys + slot[None, :] * key_slot + key_axis[:, None]
        if MASKED or KEY_DIM < KEY_PAD:
            k = tl.load(at, mask=key_used, other=0.0)
        else:
            k = tl.load(at)
        score = _dot(q, k, WIDEN) * scale
        if SOFTCAP:  # tanh(x) = 2 / (1 + exp(-2x)) - 1
            score = softcap * (2.0 / (1.0 + tl.exp(score * (-2.0 / softcap))) - 1.0)
        if MASKED:
            seen = (
                there[None, :] & (position[None, :] >= first[:, None]) & (position[None, :] <= own[:, None])
            )
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # 0 for rows that have seen no position yet
        else:
            base = higher
        weights = tl.exp(score - base[:, None])
        shrink = tl.exp(highest - base)
        at = values + slot[:, None] * value_slot + value_axis[None, :]
        if MASKED or VALUE_DIM < VALUE_PAD:
            v = tl.load(at, mask=value_used, other=0.0)
        else:
            v = tl.load(at)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + _dot(weights.to(v.dtype), v, WIDEN)
        highest = higher
    return highest, total, weighted


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query: tl.tensor,  # [tokens, q_heads, KEY_DIM]
    keys: tl.tensor,  # [slots, kv_heads, KEY_DIM]
    values: tl.tensor,  # [slots, kv_heads, VALUE_DIM]
    sinks: tl.tensor,  # [q_heads] or None
    tiles: tl.tensor,  # int32 [tiles, 5]
    tables: tl.tensor,  # int32 [sequences, width]
    out: tl.tensor,  # [tokens, q_heads, VALUE_DIM]; with SPLIT float32 [rows, q_heads, splits, VALUE_DIM]
    sums: tl.tensor,  # float32 [rows, q_heads, splits] log-sum-exps, with SPLIT
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row: tl.tensor,  # strides, in elements
    query_head: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,  # smallest number of positions of a split
    GROUP: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    KEY_PAD: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    SOFTCAP: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    SLICE: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Attends one tile to one split of its context. Grid: [tiles, kv_heads, splits]."""
    head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    q_heads = tl.num_programs(1) * GROUP
    record = tiles + tl.program_id(0) * _TILE
    table = tables + tl.load(record).to(tl.int64) * width
    first_row, first_own = tl.load(record + 1).to(tl.int64), tl.load(record + 2)
    tokens, at = tl.load(record + 3), tl.load(record + 4).to(tl.int64)

    matrix_row = tl.arange(0, ROWS)
    token, q_head = matrix_row // GROUP, head * GROUP + matrix_row % GROUP
    used = token < tokens
    own = first_own + token
    first = _first_seen(own, KIND, SIZE)
    key_axis, value_axis = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    key_used, value_used = key_axis < KEY_DIM, value_axis < VALUE_DIM
    q = tl.load(
        query + (first_row + token)[:, None] * query_row + q_head[:, None] * query_head + key_axis[None, :],
        mask=used[:, None] & key_used[None, :],
        other=0.0,
    )

    # A sink is an extra score that adds nothing to the weighted sum. The first split begins with it.
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # noqa: SIM102 (the outer test is decided at compile time, the inner at run time)
        if split == 0:
            highest = tl.load(sinks + q_head, mask=used, other=0.0).to(tl.float32)
            total += 1.0
    weighted = tl.zeros([ROWS, VALUE_PAD], tl.float32)

    seen_from, seen_to = _first_seen(first_own, KIND, SIZE), first_own + tokens
    length = tl.maximum((seen_to - seen_from + splits - 1) // splits, least)
    begin = seen_from + split * length
    end = tl.minimum(begin + length, seen_to)
    # All rows of the tile see the positions from `all_from` to `all_to`, which are whole slices: no mask is needed.
    all_from = tl.minimum(tl.maximum(_first_seen(seen_to - 1, KIND, SIZE), begin), end)
    all_to = all_from + tl.maximum(tl.minimum(first_own + 1, end) - all_from, 0) // SLICE * SLICE
    for part in tl.static_range(1 if KIND == _FULL else 0, 3):  # in full attention the first part is empty
        highest, total, weighted = _attend_slices(
            q,
            keys + head * key_head,
            values + head * value_head,
            table,
            highest,
            total,
            weighted,
            own,
            first,
            scale,
            softcap,
            key_slot,
            value_slot,
            begin if part == 0 else (all_from if part == 1 else all_to),
            all_from if part == 0 else (all_to if part == 1 else end),
            KEY_DIM,
            VALUE_DIM,
            KEY_PAD,
            VALUE_PAD,
            BLOCK_SIZE,
            SOFTCAP,
            SLICE,
            part != 1,
            WIDEN,
        )

    some = total > 0.0
    weighted = weighted / tl.where(some, total, 1.0)[:, None]
    if SPLIT:
        place = ((at + token) * q_heads + q_head) * splits + split
        log_sum = tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(sums + place, log_sum, mask=used)
        written = (used & some)[:, None] & value_used[None, :]
    else:
        place = (first_row + token) * q_heads + q_head
        written = used[:, None] & value_used[None, :]
    tl.store(
        out + place[:, None] * VALUE_DIM + value_axis[None, :],
        weighted.to(out.dtype.element_ty),
        mask=written,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    parts: tl.tensor,  # float32 [rows, q_heads, SPLITS, VALUE_DIM]; undefined where a split sees no position
    sums: tl.tensor,  # float32 [rows, q_heads, SPLITS], -inf where a split sees no position
    rows: tl.tensor,  # int32 [rows]: the rows of the step
    out: tl.tensor,  # [tokens, q_heads, VALUE_DIM]
    SPLITS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
) -> None:
    """Merges the splits of one row and head. Grid: [rows, q_heads]."""
    number, head, q_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = (number.to(tl.int64) * q_heads + head) * SPLITS + tl.arange(0, SPLITS)
    log_sum = tl.load(sums + place)
    highest = tl.max(log_sum, 0)
    weights = tl.exp(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    axis = tl.arange(0, VALUE_PAD)
    part = tl.load(
        parts + place[:, None] * VALUE_DIM + axis[None, :],
        mask=(log_sum > float("-inf"))[:, None] & (axis < VALUE_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    row = tl.load(rows + number).to(tl.int64)
    tl.store(
        out + (row * q_heads + head) * VALUE_DIM + axis,
        merged.to(out.dtype.element_ty),
        mask=axis < VALUE_DIM,
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one launch: each is a number of consecutive rows of one sequence."""

    # int32 [tiles, 5]: the sequence, the tile's first row in the step, that row's position, the number of rows, and
    # the number of rows of the launch before the tile
    records: Tensor
    rows: Tensor  # int32 [rows]: the rows of the step

    @staticmethod
    def of(spans: Sequence[tuple[int, Span]], tokens: int, device: torch.device) -> Tiles:
        """Builds tiles of at most `tokens` tokens. `spans`: each span with the row of its block table."""
        records, rows = tile_records(spans, tokens)
        return Tiles(torch.from_numpy(records).to(device), torch.from_numpy(rows).to(device))


def tile_records(
    spans: Sequence[tuple[int, Span]], tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Builds `Tiles.records` and `Tiles.rows` on the host."""
    records, before = [], 0
    for number, span in spans:
        for begin in range(0, span.new, tokens):
            some = min(tokens, span.new - begin)
            records.append((number, span.row + begin, span.past + begin, some, before))
            before += some
    rows = np.concatenate([np.arange(s.row, s.row + s.new, dtype=np.int32) for _, s in spans])
    return np.array(records, np.int32), rows


def table_rows(spans: Sequence[Span], block_size: int) -> NDArray[np.int32]:
    """Returns the block tables int32 [spans, width], padded with zeros. The width is a multiple of 16, so that Triton
    compiles for only one kind of width."""
    needed = [-(-span.end // block_size) for span in spans]
    tables = np.zeros((len(spans), -(-max(needed) // 16) * 16), np.int32)
    for table, span, blocks in zip(tables, spans, needed, strict=True):
        table[:blocks] = span.blocks[:blocks]
    return tables


class TritonAttention:
    """Attention backend for K and V of any dimensions, with softcap and sinks.

    `least_split`: the smallest number of positions of a split. It does not change the compiled code, so a short test
    can use a small number to reach all of the code.
    """

    def __init__(self, block_size: int, device: torch.device, least_split: int) -> None:
        self._block_size = block_size
        self._device = device
        self._least_split = least_split
        self._processors, self.shared_bytes = 2, 99 << 10
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._processors = properties.multi_processor_count
            self.shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        tables = torch.from_numpy(table_rows(spans, self._block_size)).to(self._device)
        numbered = list(enumerate(spans))
        decodes = [(number, span) for number, span in numbered if span.new == 1]
        chunks = [(number, span) for number, span in numbered if span.new > 1]
        tiles = Tiles.of(decodes, 1, self._device) if decodes else None
        return TritonStep(self, family, tables, max(span.end for span in spans), tiles, chunks)

    def decodes(
        self, tables: Tensor, records: Tensor, rows: Tensor, longest: int, family: TokenFamily
    ) -> StepAttention:
        """Prepares decodes of one row for each table, for the contents of the tensors when the step is called.
        `Tiles` describes `records` and `rows`. `longest`: the most positions that a sequence may have then."""
        return TritonStep(self, family, tables, longest, Tiles(records, rows))

    def splits(self, programs: int, longest: int) -> int:
        """Computes into how many splits, a power of two, contexts of at most `longest` positions are cut. For a
        launch of `programs` programs that is enough for two waves of the device's processors."""
        wanted = min(2 * self._processors // programs, -(-longest // self._least_split), _MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)

    def launch(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Scores,
        family: TokenFamily,
        tables: Tensor,
        longest: int,
        tiles: Tiles,
        shape: LaunchShape,
        out: Tensor,
    ) -> None:
        """Attends the rows of the tiles. out [tokens, q_heads, value_dim], contiguous;
        the other arguments as in `StepAttention`."""
        q_heads, key_dim = query.shape[1:]
        kv_heads, value_dim = values.shape[1:]
        key_pad, value_pad = padded(key_dim), padded(value_dim)
        splits = self.splits(len(tiles.records) * kv_heads, longest)
        parts, sums = out, None
        if splits > 1:
            places = (len(tiles.rows), q_heads, splits)
            parts = torch.empty(*places, value_dim, dtype=torch.float32, device=out.device)
            sums = torch.empty(places, dtype=torch.float32, device=out.device)
        kind, size = _kind(family)
        _attend[(len(tiles.records), kv_heads, splits)](
            query,
            keys,
            values,
            scores.sinks,
            tiles.records,
            tables,
            parts,
            sums,
            float(scores.scale),
            float(scores.softcap or 1.0),
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            tables.shape[1],
            self._least_split,
            GROUP=q_heads // kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PAD=key_pad,
            VALUE_PAD=value_pad,
            BLOCK_SIZE=self._block_size,
            KIND=kind,
            SIZE=size,
            SOFTCAP=scores.softcap is not None,
            SPLIT=splits > 1,
            ROWS=shape.rows,
            SLICE=shape.positions,
            WIDEN=INTERPRETED,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if splits > 1:
            _merge[(len(tiles.rows), q_heads)](
                parts, sums, tiles.rows, out, SPLITS=splits, VALUE_DIM=value_dim, VALUE_PAD=value_pad
            )


class TritonStep:
    """Attention of one step. `decodes`: tiles of one token each. `chunks`: spans, each with the row of its block
    table; their tiles depend on the number of the layer's heads."""

    def __init__(
        self,
        attention: TritonAttention,
        family: TokenFamily,
        tables: Tensor,
        longest: int,
        decodes: Tiles | None,
        chunks: Sequence[tuple[int, Span]] = (),
    ) -> None:
        self._attention = attention
        self._family = family
        self._tables = tables
        self._longest = longest
        self._decodes = decodes
        self._chunks = chunks
        self._chunk_tiles: dict[int, Tiles] = {}  # by tokens of a tile

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        assert isinstance(keys, Tensor), "quantized rows are for CPUs"
        assert isinstance(values, Tensor)
        assert keys.stride(-1) == values.stride(-1) == 1
        query = query if query.stride(-1) == 1 else query.contiguous()
        tokens, q_heads, _ = query.shape
        kv_heads, value_dim = values.shape[1:]
        group = q_heads // kv_heads
        out = query.new_empty(tokens, q_heads, value_dim)
        given = query, keys, values, scores, self._family, self._tables, self._longest
        element_bytes = keys.element_size()
        position_bytes = (padded(keys.shape[-1]) + padded(value_dim)) * element_bytes
        if self._decodes is not None:
            self._attention.launch(*given, self._decodes, decode_shape(group, position_bytes), out)
        if self._chunks:
            dim = max(keys.shape[-1], value_dim)
            shape = chunk_shape(group, dim, element_bytes, position_bytes, self._attention.shared_bytes)
            self._attention.launch(*given, self._tiles(shape.rows // group), shape, out)
        return out

    def _tiles(self, tokens: int) -> Tiles:
        tiles = self._chunk_tiles.get(tokens)
        if tiles is None:
            tiles = self._chunk_tiles[tokens] = Tiles.of(self._chunks, tokens, self._tables.device)
        return tiles


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Sizes of a launch's programs."""

    rows: int  # of a tile's matrix: tokens × the group's query heads
    positions: int  # whose K and V are read at once
    warps: int
    stages: int  # slices of positions in flight


def decode_shape(group: int, position_bytes: int) -> LaunchShape:
    rows = max(_LEAST_DIM, int(triton.next_power_of_2(group)))
    return LaunchShape(rows, slice_positions(position_bytes), 4, 2)


def chunk_shape(
    group: int, dim: int, element_bytes: int, position_bytes: int, shared_bytes: int
) -> LaunchShape:
    """Returns the shape for chunks; a group is never cut.

    The results stay in registers while K and V are read, so wide dimensions get fewer rows: 64 rows of 128 in
    bfloat16, and half of it in float32, by the registers that compilers use. Devices since compute capability 9.0
    multiply 128 rows at once: on an H100 that takes .59 × the time for 512 rows behind 16k positions, .86 to 1.1 × in
    other shapes.
    """
    positions = slice_positions(position_bytes)
    fit = 16384 // (int(triton.next_power_of_2(dim)) * element_bytes)
    if fit >= 64 and element_bytes == 2 and shared_bytes >= _LARGE_SHARED_BYTES:
        return LaunchShape(max(128, int(triton.next_power_of_2(group))), positions, 4, 3)
    rows = min(max(_LEAST_DIM, fit), 128 // element_bytes)
    return LaunchShape(max(rows, int(triton.next_power_of_2(group))), positions, 4, 2)


def padded(dim: int) -> int:
    return max(_LEAST_DIM, int(triton.next_power_of_2(dim)))


def slice_positions(position_bytes: int) -> int:
    """Returns the positions to read at once, a power of two, if K and V of a position take `position_bytes`."""
    return min(64, max(_LEAST_DIM, 1 << ((_SLICE_BYTES // position_bytes).bit_length() - 1)))


def _kind(family: TokenFamily) -> tuple[int, int]:
    """Returns the kernel's KIND and SIZE for a family."""
    match family:
        case FullAttention():
            return _FULL.value, 0
        case SlidingWindow(window=window):
            return _WINDOW.value, window
        case ChunkedAttention(chunk=chunk):
            return _CHUNKED.value, chunk
        case _:
            assert_never(family)
