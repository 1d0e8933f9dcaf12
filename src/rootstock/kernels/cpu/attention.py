"""CPU attention backend: compiled decodes that read K/V in place through the block table; prefills go to another
backend.

The compiled loops are in `decode_loops.py`. The code here lays out a step for them, once for all layers of a family:
the positions of a sequence that make an item of work, the rows that read the item, and the place of the partial
results.
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
from rootstock.kernels.api import Attention, Scores, StepAttention
from rootstock.kernels.cpu import decode_loops
from rootstock.kernels.cpu.amx_decode_loops import fit_matrix_units, matrix_loops, scratch_bytes
from rootstock.kernels.cpu.amx_tiles import TILE_ROWS, are_there
from rootstock.kernels.cpu.decode_loops import JOB, OF_CALL
from rootstock.kernels.cpu.pair_decode_loops import fit_pair_products, pair_loops_for, pair_scratch_bytes
from rootstock.kernels.cpu.threads import callable_at, run_on_threads
from rootstock.kernels.quantized_rows import PoolRows, RoundedRows
from rootstock.kernels.spans import EVERYTHING, Span, readings

Numbers = NDArray[np.int64]

# NumPy dtype by which Numba reads a pool's elements.
_SEEN_AS: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype(np.uint16),
    torch.float32: np.dtype(np.float32),
    torch.int8: np.dtype(np.int8),
}

# Largest number of new positions of a span that the compiled loops take. (Time relative to torch's flash attention,
# for contexts of 512 and 4096 and heads of 128, at 8 rows: 0.3 in bfloat16 with matrix units, 0.5 in float32, 0.4 in
# 8 bits, and 0.8 in bfloat16 with heads that do not fit matrix units. The last is slower from 12 rows on; the others
# break even at 24 to 32.)
FEW_ROWS = 8
LATENT_ROWS = 4  # the same limit for latents
# Largest number of query heads for latents in float32. In bfloat16 the other backend, on matrix units, is always
# faster.
LATENT_HEADS = 32
SERIAL_BYTES = 64 << 10  # bytes of K and V to read, below which threads cost more than they save
PAGE_BYTES = 4096
LEAST_ITEM = 128  # positions: short enough that two threads share a short context
# Most decodes that read an item together. More would leave too few items for threads.
MOST_READERS = 16


def has_loops_for(dtype: torch.dtype) -> bool:
    """Returns whether there are compiled loops for pools of this dtype."""
    return dtype in _SEEN_AS


def loops_for(dtype: torch.dtype) -> int:
    """Returns the address of the loops for pools of this dtype: compiled, or loaded, at the first call in a
    process."""
    return decode_loops.loops_for(_SEEN_AS[dtype])


def compile_loops(dtype: torch.dtype) -> None:
    """Compiles all loops that may be called for pools of this dtype, so that no request waits for a compilation."""
    loops_for(dtype)
    if dtype == torch.bfloat16 and are_there():
        matrix_loops()
    if dtype in (torch.bfloat16, torch.int8) and fit_pair_products(0, 0):
        pair_loops_for(_SEEN_AS[dtype])


class NumbaAttention:
    """Attention backend for pools on a CPU in bfloat16, float32, or quantized to int8. The backend `beside` attends
    the prefill chunks, and pools of other dtypes.

    Positions that several decodes have in common are read once for all of them. In float32 the sums equal, bit for
    bit, the sums of each decode alone, because the same items are added in the same order.

    `latents`: keys [slots, 1, rank] also serve as the values, and values [slots, 1, rope] hold the rotary part of the
    keys; a step returns [tokens, q_heads, rank].
    The backend keeps scratch memory between steps, so only one thread may use it.
    """

    def __init__(
        self,
        block_size: int,
        beside: Attention,
        *,
        latents: bool = False,
        few_rows: int | None = None,
        serial_bytes: int = SERIAL_BYTES,
        least_item: int = LEAST_ITEM,
    ) -> None:
        self._block_size = block_size
        self._least_item = least_item
        self._beside = beside
        self._few_rows = few_rows or (LATENT_ROWS if latents else FEW_ROWS)
        self._runner = _Runner(block_size, latents, serial_bytes)

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        few = [span for span in spans if span.new <= self._few_rows]
        chunks = [span for span in spans if span.new > self._few_rows]
        beside = _prepare_beside(self._beside, chunks, family) if chunks else None
        layout = _lay_out(few, family, self._block_size, self._least_item) if few else None

        def all_beside() -> StepAttention:
            return self._beside.prepare(spans, family)

        return _NumbaStep(self._runner, layout, beside, cache(all_beside))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Work of a step: the arrays that `decode_loops.JOB` describes."""

    tables: NDArray[np.int32]
    items: Numbers  # [items, 5]
    rows: Numbers  # [rows, 5]
    partial_rows: Numbers  # [partials]
    order: Numbers  # [partials]
    counters: Numbers  # [1 + rows + threads], initial values for a call
    most_readers: int
    longest: int  # positions of the longest item, counted from a multiple of 16
    positions: int  # read by all items together

    def fill_in(self, job: NDArray[np.void]) -> None:
        """Fills in the fields of a job that are the same for all layers. Done once, because NumPy takes a microsecond
        to return an address."""
        for name in ("tables", "items", "rows", "partial_rows", "order"):
            job[name] = getattr(self, name).ctypes.data
        job["item_count"] = len(self.items)
        job["row_count"] = len(self.rows)
        job["partial_count"] = len(self.partial_rows)
        job["most_readers"] = self.most_readers


def _item_positions(ends: Numbers, least: int) -> Numbers:
    """Returns the positions per item for each sequence. They depend only on its length, so that a sequence's sums do
    not depend on the batch.

    Partial results are about a hundredth of the bytes that are read.
    """
    return least * np.where(ends <= 2048, 1, np.where(ends <= 8192, 2, 4))


@dataclass(frozen=True, slots=True)
class _Shared:
    """Range of positions that several decodes read together."""

    spans: list[int]  # indices of the decodes' spans
    first: int
    end: int
    unit: int  # positions of an item


def _shared(spans: Sequence[Span], family: TokenFamily, block_size: int, units: Numbers) -> list[_Shared]:
    """Returns the whole items that several decodes have in common, in order of position for each decode."""
    found = []
    decodes = [number for number, span in enumerate(spans) if span.new == 1]
    for unit in sorted({int(units[number]) for number in decodes}):
        alike = [number for number in decodes if units[number] == unit]
        if len(alike) > 1:
            of_these = [spans[number] for number in alike]
            for rows, first, end in readings(of_these, family, block_size, _always, unit):
                if len(rows) > 1:
                    found.append(_Shared([alike[row] for row in rows], first, end, unit))
    return found


def _always(readers: int, positions: int) -> bool:
    return True


def _lay_out(spans: Sequence[Span], family: TokenFamily, block_size: int, least_item: int) -> _Layout:
    new = np.array([span.new for span in spans])
    ends = np.array([span.end for span in spans])
    firsts = np.array([family.first_visible(span.past) for span in spans])
    units = _item_positions(ends, least_item)
    lengths = np.array([len(span.blocks) for span in spans])
    table_starts = np.cumsum(lengths) - lengths
    row_starts = np.cumsum(new) - new
    # Shared items, each read by several rows.
    shared_items: list[tuple[int, int, int]] = []
    shared_rows: list[Numbers] = []
    own_from = firsts.copy()
    for shared in _shared(spans, family, block_size, units):
        own_from[shared.spans] = shared.end
        readers = row_starts[shared.spans]
        for some in np.array_split(readers, -(-len(readers) // MOST_READERS)):
            for end in range(
                shared.first // shared.unit * shared.unit + shared.unit, shared.end + 1, shared.unit
            ):
                first = max(shared.first, end - shared.unit)
                shared_items.append((int(table_starts[shared.spans[0]]), first, end))
                shared_rows.append(some)
    # Each span's own positions, cut at the multiples of its unit.
    lowest = own_from // units
    counts = (ends - 1) // units - lowest + 1
    owner = np.repeat(np.arange(len(spans)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + lowest[owner]
    items = np.empty((len(shared_items) + len(owner), 5), np.int64)
    if shared_items:  # first, because they are the longest
        items[: len(shared_items), :3] = shared_items
    own = items[len(shared_items) :]
    own[:, 0] = table_starts[owner]
    own[:, 1] = np.maximum(number * units[owner], own_from[owner])
    own[:, 2] = np.minimum((number + 1) * units[owner], ends[owner])
    readers = np.concatenate([np.array([len(rows) for rows in shared_rows], np.int64), new[owner]])
    items[:, 4] = np.cumsum(readers)
    items[:, 3] = items[:, 4] - readers
    # Each row of an item is a partial result. A row adds up its partial results in the order of their positions.
    total = int(new.sum())
    own_rows = np.repeat(row_starts[owner], new[owner])
    if total > len(spans):
        own_readers = new[owner]
        own_rows += np.arange(len(own_rows)) - np.repeat(np.cumsum(own_readers) - own_readers, own_readers)
    partial_rows = np.concatenate([*shared_rows, own_rows])
    order = np.lexsort((np.repeat(items[:, 1], readers), partial_rows))
    of_rows = np.bincount(partial_rows, minlength=total)
    rows = np.empty((total, 5), np.int64)
    if total == len(spans):
        rows[:, 0] = [span.row for span in spans]
        rows[:, 1] = firsts
        rows[:, 2] = ends
    else:
        places = [(span.row + i, span.past + i) for span in spans for i in range(span.new)]
        rows[:, 0] = [row for row, _ in places]
        rows[:, 1] = [family.first_visible(position) for _, position in places]
        rows[:, 2] = [position + 1 for _, position in places]
    rows[:, 4] = np.cumsum(of_rows)
    rows[:, 3] = rows[:, 4] - of_rows
    return _Layout(
        np.concatenate([span.blocks for span in spans]).astype(np.int32, copy=False),
        items,
        rows,
        partial_rows,
        order,
        np.concatenate([[0], of_rows, np.zeros(torch.get_num_threads(), np.int64)]),
        int(readers.max()),
        int((items[:, 2] - items[:, 1] // TILE_ROWS * TILE_ROWS).max()),
        int((items[:, 2] - items[:, 1]).sum()),
    )


class _Runner:
    """Runner of jobs: fills them in and starts the threads. Owns the memory of partial results."""

    def __init__(self, block_size: int, latents: bool, serial_bytes: int) -> None:
        self.latents = latents
        self._block_size = block_size
        self._serial_bytes = serial_bytes
        self._partials = np.empty(0, np.float32)
        self._counters = np.empty(0, np.int64)
        self._partials_at = 0
        self._filled_in: _Layout | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._job = np.zeros(1, JOB)
        self._job_at = self._job.ctypes.data
        self._job_bytes = memoryview(self._job.view(np.uint8))  # type: ignore[arg-type]
        self._job["block_size"] = block_size
        self._job["are_latents"] = latents

    def attends(self, query: Tensor, keys: PoolRows) -> bool:
        """Returns whether the compiled loops support these layers and are the faster way."""
        if self.latents and (keys.dtype != torch.float32 or query.shape[1] > LATENT_HEADS):
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
    ) -> None:
        """Writes the layout's rows of out [tokens, q_heads, value_dim]. query: [tokens, q_heads, key_dim]."""
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
        read = layout.positions * kv_heads * (key_dim + value_dim) * keys.element_size()
        most = len(layout.counters) - 1 - len(layout.rows)
        threads = 1 if read < self._serial_bytes else min(most, len(layout.items))
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
            threads,
            scores.scale,
            scores.softcap or 0.0,
        )
        loops = loops_for(keys.dtype)
        if layout.most_readers > 1 and self._has_matrix_units_for(query, keys, value_dim):
            loops = matrix_loops()
            self._provide_scratch(scratch_bytes(layout.most_readers, layout.longest, self._job[0]), threads)
        elif layout.most_readers > 1 and self._has_pair_products_for(query, keys, value_dim, scores):
            loops = pair_loops_for(_SEEN_AS[keys.dtype])
            self._provide_scratch(pair_scratch_bytes(layout.most_readers, self._job[0]), threads)
        if threads == 1:
            callable_at(loops)(self._job_at)
        else:
            run_on_threads(loops, self._job_at, threads)

    def _has_matrix_units_for(self, query: Tensor, keys: Tensor, value_dim: int) -> bool:
        return (
            keys.dtype == query.dtype == torch.bfloat16
            and not self.latents
            and fit_matrix_units(self._block_size, keys.shape[2], value_dim)
        )

    def _has_pair_products_for(self, query: Tensor, keys: Tensor, value_dim: int, scores: Scores) -> bool:
        return (
            query.dtype == torch.bfloat16
            and keys.dtype in (torch.bfloat16, torch.int8)
            and not self.latents
            and scores.softcap is None
            and fit_pair_products(keys.shape[2], value_dim)
        )

    def _provide_scratch(self, needed: int, threads: int) -> None:
        """Provides so many bytes for each thread."""
        job = self._job[0]
        size = -(-needed // PAGE_BYTES) * PAGE_BYTES
        if len(self._scratch) < threads * size:
            self._scratch = torch.zeros(threads * size, dtype=torch.uint8)
            job["scratch"] = self._scratch.data_ptr()
        job["scratch_bytes"] = size


class _NumbaStep:
    def __init__(
        self,
        runner: _Runner,
        layout: _Layout | None,
        beside: _Beside | None,
        all_beside: Callable[[], StepAttention],
    ) -> None:
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
        value_dim = keys.shape[2] if self._runner.latents else values.shape[2]
        out = torch.empty(tokens, q_heads, value_dim, dtype=query.dtype)
        self._runner.attend(self._layout, query, keys, values, scores, out)
        if self._beside is not None:
            self._beside.attend(query, key, value, keys, values, scores, out)
        return out


@dataclass(frozen=True, slots=True)
class _Beside:
    """Spans that the other backend attends, as a step of their own."""

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
