"""CPU attention backend of prompts in bfloat16: the loops of `prefill_loops.py`, and another backend for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.api import Attention, Scores, StepAttention
from rootstock.kernels.cpu import amx_tiles
from rootstock.kernels.cpu.pair_products import has_pair_products
from rootstock.kernels.cpu.prefill_loops import (
    BLOCK_ROWS,
    JOB,
    MULTIPLE,
    prefill_loops_for,
    prefill_scratch_bytes,
)
from rootstock.kernels.cpu.threads import run_on_threads
from rootstock.kernels.quantized_rows import PoolRows, RoundedRows
from rootstock.kernels.spans import EVERYTHING, Span

_ALIGNED = 64  # bytes: a line of the processor's cache


def with_prefill_loops(block_size: int, otherwise: Attention) -> Attention:
    """Returns a backend with the loops where they are the faster way, or else `otherwise` itself."""
    return PrefillAttention(block_size, otherwise) if _are_faster() else otherwise


def compile_prefill_loops(pool: torch.dtype) -> None:
    """Compiles the loops that may be called for pools of this dtype."""
    if pool in (torch.bfloat16, torch.int8) and _are_faster():
        prefill_loops_for(pool)


def _are_faster() -> bool:
    """Returns whether the loops are faster than torch's flash attention, which uses matrix units where they are."""
    return has_pair_products() and not amx_tiles.are_there()


class PrefillAttention:
    """Attention backend for queries in bfloat16, on processors that multiply pairs of it.

    The backend `otherwise` attends layers of other dtypes, dimensions that are no multiples of 32, and scores with a
    softcap. Scratch memory is kept between steps, so only one thread may use it.
    """

    def __init__(self, block_size: int, otherwise: Attention) -> None:
        self._block_size = block_size
        self._otherwise = otherwise
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        def otherwise() -> StepAttention:
            return self._otherwise.prepare(spans, family)

        return _PrefillStep(spans, family, self._block_size, self._scratch_at, cache(otherwise))

    def _scratch_at(self, size: int) -> int:
        """Returns the aligned address of so many bytes, which the next call uses again."""
        if len(self._scratch) < size + _ALIGNED:
            self._scratch = torch.empty(size + _ALIGNED, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // _ALIGNED) * _ALIGNED


class _PrefillStep:
    def __init__(
        self,
        spans: Sequence[Span],
        family: TokenFamily,
        block_size: int,
        scratch_at: Callable[[int], int],
        otherwise: Callable[[], StepAttention],
    ) -> None:
        self._spans, self._scratch_at, self._otherwise = spans, scratch_at, otherwise
        lengths = [len(span.blocks) for span in spans]
        self._starts = np.cumsum([0, *lengths[:-1]]).tolist()
        self._tables = np.concatenate([span.blocks for span in spans]).astype(np.int32, copy=False)
        visible = (family.first_visible(p) for span in spans for p in range(span.past, span.end))
        self._first_visible = np.fromiter(visible, np.int64)
        self._tasks: dict[int, NDArray[np.int64]] = {}  # by the tokens of a block
        self._claimed = np.zeros(2, np.int64)
        self._jobs = np.zeros(1, JOB)
        job: Any = self._jobs[0]
        job["claimed"] = self._claimed.ctypes.data
        job["first_visible"] = self._first_visible.ctypes.data
        job["tables"], job["block_size"] = self._tables.ctypes.data, block_size

    def _tasks_of(self, tokens: int) -> NDArray[np.int64]:
        """Returns the tasks [tasks, 5] of blocks of so many tokens, the longest first."""
        tasks = self._tasks.get(tokens)
        if tasks is None:
            found = [
                (span.row + begin, min(tokens, span.new - begin), span.past + begin, start, span.end)
                for span, start in zip(self._spans, self._starts, strict=True)
                for begin in range(0, span.new, tokens)
            ]
            found.sort(key=lambda task: -task[2])
            tasks = self._tasks[tokens] = np.array(found, np.int64)
        return tasks

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        if not _serves(query, keys, values, scores):
            attended: Tensor = self._otherwise()(query, key, value, keys, values, scores)
            return attended
        tokens, q_heads, key_dim = query.shape
        kv_heads, value_dim = values.shape[1:]
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty(tokens, q_heads, value_dim, dtype=query.dtype)
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        group = q_heads // kv_heads
        block = max(1, BLOCK_ROWS // group)
        tasks = self._tasks_of(block)
        threads = min(torch.get_num_threads(), len(tasks) * kv_heads)
        size = -(-prefill_scratch_bytes(group, key_dim, value_dim, block) // _ALIGNED) * _ALIGNED
        job: Any = self._jobs[0]
        job["key_scales"] = job["value_scales"] = 0
        if isinstance(keys, RoundedRows):
            assert isinstance(values, RoundedRows)
            job["key_scales"], job["value_scales"] = keys.scales.data_ptr(), values.scales.data_ptr()
            keys, values = keys.codes, values.codes
        assert isinstance(values, Tensor)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        job["scratch"], job["scratch_bytes"] = self._scratch_at(threads * size), size
        job["tasks"], job["task_count"] = tasks.ctypes.data, len(tasks)
        job["query"], job["query_row"], job["query_head"] = query.data_ptr(), query.stride(0), query.stride(1)
        job["out"], job["keys"], job["values"] = out.data_ptr(), keys.data_ptr(), values.data_ptr()
        job["kv_heads"], job["group"], job["key_dim"], job["value_dim"] = kv_heads, group, key_dim, value_dim
        job["sinks"], job["scale"] = 0 if sinks is None else sinks.data_ptr(), scores.scale
        self._claimed[:] = 0
        run_on_threads(prefill_loops_for(keys.dtype), self._jobs.ctypes.data, threads)
        return out


def _serves(query: Tensor, keys: PoolRows, values: PoolRows, scores: Scores) -> bool:
    read_as = keys.read_as if isinstance(keys, RoundedRows) else keys.dtype
    key_dim, value_dim = keys.shape[2], values.shape[2]
    return (
        query.dtype == read_as == torch.bfloat16
        and query.shape[2] == key_dim
        and key_dim % MULTIPLE == value_dim % MULTIPLE == 0
        and scores.softcap is None
    )
