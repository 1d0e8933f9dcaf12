"""Attention on CPUs whose decodes run compiled, in place through the block table; prefill goes another way.

What is compiled is in `numba_decode.py`. Here a step is laid out for it once, for all layers of a family: which
positions of which sequence make an item of work, which rows read it, and where the partial results lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels import numba_decode
from rootstock.kernels.numba_decode import JOB, OF_CALL
from rootstock.kernels.rounded_rows import PoolRows, RoundedRows
from rootstock.kernels.scores import Attention, Scores, StepAttention
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch_paged import PagedAttention, Slice
from rootstock.kernels.torch_threads import run_on_threads

Numbers = NDArray[np.int64]

# As what Numba sees the elements of a pool.
_SEEN_AS: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype(np.uint16),
    torch.float32: np.dtype(np.float32),
    torch.int8: np.dtype(np.int8),
}

FEW_ROWS = 4  # new positions up to which a span is attended here; with more, matrix units win in bfloat16
LATENT_HEADS = (
    32  # query heads up to which latents are, in float32; in bfloat16 matrix units are always faster
)
SERIAL_BYTES = 64 << 10  # of K and V that are read, below which threads cost more than they bring
# Attending a common prefix together, by the matrix units, takes about as long as 3.3 decodes take to read it one by
# one, however many they are, for it is staged first; and as long as 700 positions for the calls. (Measured with 8 KV
# heads of 128, bfloat16 and float32, one thread, 2 to 8 decodes that share 128 to 2048 positions.)
SHARING_COSTS_READERS = 3.3
SHARE_FROM = 700


def has_loops_for(dtype: torch.dtype) -> bool:
    """Whether there are loops for pools of this dtype at all."""
    return dtype in _SEEN_AS


def loops_for(dtype: torch.dtype) -> int:
    """The address of the loops for pools of this dtype: compiled, or loaded, at the first call in a process."""
    return numba_decode.loops_for(_SEEN_AS[dtype])


class NumbaAttention:
    """For pools in bfloat16, float32 and rounded to int8, on a CPU. `beside` attends the chunks, and pools of other
    dtypes.

    `latents`: keys [slots, 1, rank] are the values too, and values [slots, 1, rope] the keys' other part; a step
    returns [tokens, q_heads, rank].
    It keeps scratch memory from step to step, so one thread uses it.
    """

    def __init__(
        self,
        block_size: int,
        beside: Attention,
        *,
        latents: bool = False,
        few_rows: int = FEW_ROWS,
        serial_bytes: int = SERIAL_BYTES,
        share_from: int = SHARE_FROM,
        sharing_costs_readers: float = SHARING_COSTS_READERS,
    ) -> None:
        self._block_size = block_size
        self._share_from = share_from
        self._sharing_costs_readers = sharing_costs_readers
        self._together = beside if isinstance(beside, PagedAttention) else None
        self._beside = beside
        self._few_rows = few_rows
        self._runner = _Runner(block_size, latents, serial_bytes)

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        few = [span for span in spans if span.new <= self._few_rows]
        chunks = [span for span in spans if span.new > self._few_rows]
        beside = _prepare_beside(self._beside, chunks, family) if chunks else None
        shared = self._shared(few, family)
        layout = _lay_out(few, family, self._block_size, shared) if few else None

        def all_beside() -> StepAttention:
            return self._beside.prepare(spans, family)

        return _NumbaStep(self._runner, layout, beside, self._together, cache(all_beside))

    def _shared(self, few: Sequence[Span], family: TokenFamily) -> list[_Shared]:
        """What several decodes read together, in order for each of them."""
        decodes = [number for number, span in enumerate(few) if span.new == 1]
        if self._together is None or len(decodes) < 2:
            return []
        spans = [few[number] for number in decodes]
        return [
            _Shared(
                tuple(decodes[row] for row in rows),
                torch.tensor([spans[row].row for row in rows]),
                end,
                self._together.shared_slices(spans[rows[0]], first, end),
            )
            for rows, first, end in self._together.readings(spans, family, self._is_worth_sharing)
            if len(rows) > 1
        ]

    def _is_worth_sharing(self, readers: int, positions: int) -> bool:
        return (readers - self._sharing_costs_readers) * positions >= self._share_from


@dataclass(frozen=True, slots=True)
class _Shared:
    """Positions that several decodes attend together, by the matrix units: their queries are rows of one problem."""

    spans: tuple[int, ...]  # numbers of the decodes' spans
    rows: Tensor  # [readers] int64, of the step
    end: int  # the readers' own positions begin here
    slices: list[Slice]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The work of a step, as `numba_decode.JOB` describes its arrays."""

    tables: NDArray[np.int32]
    items: Numbers  # [items, 5]
    rows: Numbers  # [rows, 5]
    partial_rows: Numbers  # [partials]
    order: Numbers  # [partials]
    counters: Numbers  # [1 + rows] as they are before a call
    most_readers: int
    positions: int  # that are read
    shared: list[tuple[_Shared, int]]  # and its first partial result: slice by slice, reader by reader

    def fill_in(self, job: NDArray[np.void]) -> None:
        """What a job says of a layout, alike for all layers: NumPy takes a microsecond to tell an address."""
        for name in ("tables", "items", "rows", "partial_rows", "order"):
            job[name] = getattr(self, name).ctypes.data
        job["item_count"] = len(self.items)
        job["most_readers"] = self.most_readers


def _chunk_of(ends: Numbers) -> Numbers:
    """How many positions make an item, from a sequence's length alone: so batch mates do not change its sums.

    Short enough that two threads share a short context; so long that partial results are a hundredth of what is read.
    """
    return np.where(ends <= 2048, 128, np.where(ends <= 8192, 256, 512))


def _lay_out(
    spans: Sequence[Span], family: TokenFamily, block_size: int, shared: Sequence[_Shared] = ()
) -> _Layout:
    new = np.array([span.new for span in spans])
    ends = np.array([span.end for span in spans])
    firsts = np.array([family.tail_start(span.past) for span in spans])
    for together in shared:
        firsts[list(together.spans)] = together.end
    lengths = np.array([len(span.blocks) for span in spans])
    table_starts = np.cumsum(lengths) - lengths
    # Items: each span's positions, cut at the multiples of its chunk.
    chunk = _chunk_of(ends)
    lowest = firsts // chunk
    counts = (ends - 1) // chunk - lowest + 1
    owner = np.repeat(np.arange(len(spans)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + lowest[owner]
    readers = new[owner]
    partial_ends = np.cumsum(readers)
    items = np.empty((len(owner), 5), np.int64)
    items[:, 0] = table_starts[owner]
    items[:, 1] = np.maximum(number * chunk[owner], firsts[owner])
    items[:, 2] = np.minimum((number + 1) * chunk[owner], ends[owner])
    items[:, 3] = partial_ends - readers
    items[:, 4] = partial_ends
    # Rows: each reads all items of its span.
    total = int(new.sum())
    row_starts = np.cumsum(new) - new
    rows = np.empty((total, 5), np.int64)
    if total == len(spans):
        rows[:, 0] = [span.row for span in spans]
        rows[:, 1] = firsts
        rows[:, 2] = ends
        of_rows = counts
        partial_rows = owner
        order = np.arange(len(owner))
    else:
        places = [(span.row + i, span.past + i) for span in spans for i in range(span.new)]
        rows[:, 0] = [row for row, _ in places]
        rows[:, 1] = [family.tail_start(position) for _, position in places]
        rows[:, 2] = [position + 1 for _, position in places]
        of_rows = np.repeat(counts, new)
        within = np.arange(int(partial_ends[-1])) - np.repeat(items[:, 3], readers)
        partial_rows = np.repeat(row_starts[owner], readers) + within
        order = np.argsort(partial_rows, kind="stable")
    counters = np.concatenate([[0], of_rows])
    placed: list[tuple[_Shared, int]] = []
    for together in shared:
        placed.append((together, len(partial_rows)))
        readers_of_slices = np.tile(row_starts[list(together.spans)], len(together.slices))
        partial_rows = np.concatenate([partial_rows, readers_of_slices])
    if shared:
        order = np.argsort(partial_rows, kind="stable")
        of_rows = np.bincount(partial_rows, minlength=total)
    rows[:, 4] = np.cumsum(of_rows)
    rows[:, 3] = rows[:, 4] - of_rows
    tables = np.concatenate([span.blocks for span in spans]).astype(np.int32, copy=False)
    return _Layout(
        tables,
        items,
        rows,
        partial_rows,
        order,
        counters,
        int(new.max()),
        int((items[:, 2] - items[:, 1]).sum()),
        placed,
    )


class _Runner:
    """Fills in jobs and has them run. Owns the memory of partial results."""

    def __init__(self, block_size: int, latents: bool, serial_bytes: int) -> None:
        self._latents = latents
        self._serial_bytes = serial_bytes
        self._partials = np.empty(0, np.float32)
        self._counters = np.empty(0, np.int64)
        self._partials_at = 0
        self._filled_in: _Layout | None = None
        self._job = np.zeros(1, JOB)
        self._job_at = self._job.ctypes.data
        self._job_bytes = memoryview(self._job.view(np.uint8))  # type: ignore[arg-type]
        self._job["block_size"] = block_size
        self._job["are_latents"] = latents

    def attends(self, query: Tensor, keys: PoolRows) -> bool:
        """Whether this is the faster way for such layers, if it is one at all."""
        if self._latents and (keys.dtype != torch.float32 or query.shape[1] > LATENT_HEADS):
            return False
        return has_loops_for(keys.dtype) and has_loops_for(query.dtype)

    def attend(
        self,
        layout: _Layout,
        query: Tensor,
        keys: PoolRows,
        values: PoolRows,
        scores: Scores,
        out: Tensor,
        together: PagedAttention | None,
    ) -> None:
        """Writes the layout's rows of out [tokens, q_heads, value_dim]; query [tokens, q_heads, key_dim]."""
        _, q_heads, key_dim = query.shape
        value_dim = out.shape[2]
        if query.stride(2) != 1:
            query = query.contiguous()
        assert query.dtype == out.dtype
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        partials = len(layout.partial_rows) * q_heads
        if len(self._partials) < partials * (value_dim + 2):
            self._partials = np.empty(partials * (value_dim + 2), np.float32)
            self._partials_at = self._partials.ctypes.data
        if len(self._counters) < len(layout.counters):
            self._counters = np.empty(len(layout.counters), np.int64)
            self._job["counters"] = self._counters.ctypes.data
        self._counters[: len(layout.counters)] = layout.counters
        for shared, first in layout.shared:
            assert together is not None
            self._attend_together(shared, first, partials, query, keys, values, scores, value_dim, together)
        key_scales = value_scales = 0
        if isinstance(keys, RoundedRows):
            assert isinstance(values, RoundedRows)
            key_scales, value_scales = keys.scales.data_ptr(), values.scales.data_ptr()
            keys, values = keys.codes, values.codes
        assert isinstance(values, Tensor)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        if self._filled_in is not layout:
            layout.fill_in(self._job[0])
            self._filled_in = layout
        memory, kv_heads = self._partials_at, keys.shape[1]
        OF_CALL.pack_into(
            self._job_bytes,
            0,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            query.dtype == torch.bfloat16,
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            key_scales,
            value_scales,
            q_heads,
            kv_heads,
            key_dim,
            value_dim,
            0 if sinks is None else sinks.data_ptr(),
            memory,
            memory + 4 * partials,
            memory + 8 * partials,
            scores.scale,
            scores.softcap or 0.0,
        )
        read = layout.positions * kv_heads * (key_dim + value_dim) * keys.element_size()
        threads = 1 if read < self._serial_bytes else min(torch.get_num_threads(), len(layout.items))
        run_on_threads(loops_for(keys.dtype), self._job_at, threads)

    def _attend_together(
        self,
        shared: _Shared,
        first: int,
        partials: int,
        query: Tensor,
        keys: PoolRows,
        values: PoolRows,
        scores: Scores,
        value_dim: int,
        together: PagedAttention,
    ) -> None:
        """Writes partial results from number `first` on: the log-sum-exp stands for the largest score, and so the sum
        of weights is 1. `partials`: of all heads."""
        readers, (q_heads, key_dim), kv_heads = len(shared.rows), query.shape[1:], keys.shape[1]
        memory = torch.from_numpy(self._partials)
        largest = memory[:partials].view(-1, q_heads)
        total = memory[partials : 2 * partials].view(-1, q_heads)
        weighted = memory[2 * partials : (2 + value_dim) * partials].view(-1, q_heads, value_dim)
        stacked = query[shared.rows].view(readers, kv_heads, -1, key_dim).transpose(0, 1)
        stacked = stacked.reshape(1, kv_heads, -1, key_dim)
        total[first : first + readers * len(shared.slices)] = 1
        for part in shared.slices:
            out, lse = together.attend_slice(part, stacked, keys, values, scores)
            mine = slice(first, first + readers)
            by_reader = out.view(kv_heads, readers, -1, out.shape[-1])[..., :value_dim].transpose(0, 1)
            weighted[mine].view(readers, kv_heads, -1, value_dim).copy_(by_reader)
            largest[mine].view(readers, kv_heads, -1).copy_(lse.view(kv_heads, readers, -1).transpose(0, 1))
            first += readers


class _NumbaStep:
    def __init__(
        self,
        runner: _Runner,
        layout: _Layout | None,
        beside: _Beside | None,
        together: PagedAttention | None,
        all_beside: Callable[[], StepAttention],
    ) -> None:
        self._together = together
        self._runner = runner
        self._layout = layout
        self._beside = beside
        self._all_beside = all_beside

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        if self._layout is None or not self._runner.attends(query, keys):
            attended: Tensor = self._all_beside()(query, key, value, keys, values, scores)
            return attended
        tokens, q_heads, _ = query.shape
        value_dim = keys.shape[2] if self._runner._latents else values.shape[2]
        out = torch.empty(tokens, q_heads, value_dim, dtype=query.dtype)
        self._runner.attend(self._layout, query, keys, values, scores, out, self._together)
        if self._beside is not None:
            self._beside.attend(query, key, value, keys, values, scores, out)
        return out


@dataclass(frozen=True, slots=True)
class _Beside:
    """The spans that are attended another way, as a step of their own."""

    rows: slice | Tensor  # of the whole step
    step: StepAttention

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: PoolRows,
        values: PoolRows,
        scores: Scores,
        out: Tensor,
    ) -> None:
        """Writes its rows of out [tokens, q_heads, value_dim]."""
        rows = self.rows
        attended = self.step(query[rows], key[rows], value[rows], keys, values, scores)
        out[rows] = attended[..., : out.shape[2]]


def _prepare_beside(attention: Attention, spans: Sequence[Span], family: TokenFamily) -> _Beside:
    row, moved = 0, []
    for span in spans:
        moved.append(Span(row, span.new, span.past, span.blocks))
        row += span.new
    adjoin = all(before.row + before.new == after.row for before, after in pairwise(spans))
    rows: slice | Tensor = slice(spans[0].row, spans[0].row + row)
    if not adjoin:
        rows = torch.from_numpy(np.concatenate([np.arange(s.row, s.row + s.new) for s in spans]))
    return _Beside(rows, attention.prepare(moved, family))
