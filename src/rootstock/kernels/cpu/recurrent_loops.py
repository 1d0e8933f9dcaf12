"""Base of the compiled loops of recurrent mixers: the job that they read, and the threads that share it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock.kernels.cpu.compiler import c_function
from rootstock.kernels.cpu.short_convolution import LONGEST_KERNEL
from rootstock.kernels.cpu.stages import Stages
from rootstock.kernels.cpu.threads import run_on_threads

_PARALLEL_FROM = 1 << 15  # elements of states that pass by; fewer are computed by the calling thread

JOB_FIELDS = [
    ("phase", "i8"),
    ("claimed", "i8"),  # address of two int64: tasks that threads have begun, and threads that have begun
    ("scratch", "i8"),  # address of `scratch_floats` float32 for each thread
    ("scratch_floats", "i8"),
    ("threads", "i8"),  # that `scratch` is for; further ones return
    ("sequences", "i8"),  # address of [sequence_count, 4] int64: first row, new rows, slot, has a state
    ("sequence_count", "i8"),
    ("rows", "i8"),  # address of [row_count, width]
    ("row_count", "i8"),
    ("width", "i8"),
    ("out", "i8"),  # address of [row_count, inner]
    ("conv", "i8"),  # address of [slots, channels, kept] of the rows' dtype
    ("states", "i8"),  # address of [slots, …]
    ("slots", "i8"),
    ("kernel", "i8"),  # positions that the convolution reads
    ("kept", "i8"),  # positions that a convolution's state has, the last one last
    ("conv_weight", "i8"),  # addresses of float32: [kernel, channels]
    ("conv_bias", "i8"),  # [channels]
    ("decay", "i8"),  # [heads]
    ("time_bias", "i8"),  # [heads]
    ("norm_weight", "i8"),
]

EntryPoints = Mapping[tuple[torch.dtype, torch.dtype], Callable[[Any], None]]
"""Functions of a pointer to a job, to be compiled, by the dtypes of rows and of recurrent states."""


class RecurrentLoops(ABC):
    """Loops between a mixer's linear layers, for rows in float32 or bfloat16 on a CPU. One thread at a time may use
    them.
    """

    def __init__(
        self,
        entry_points: EntryPoints,
        job: np.dtype[Any],
        *,
        phases: int = 1,
        tasks: int,
        inner: int,
        state: int,
        scratch: int,
        conv: Tensor,
        conv_bias: Tensor | None,
    ) -> None:
        """Initialises a job.

        job         dtype that begins with `JOB_FIELDS`
        phases      each begins when all tasks of the one before have ended
        tasks       of one sequence in the first phase
        inner       columns of the result
        state       elements of a sequence's recurrent state
        scratch     float32 of a thread's scratch memory
        conv        [channels, kernel] weights of the convolution
        conv_bias   [channels]

        Raises ValueError for a convolution that the loops do not serve.
        """
        channels, kernel = conv.shape
        if not 1 < kernel <= LONGEST_KERNEL:
            raise ValueError(f"no loops for a convolution over {kernel} positions")
        self.inner = inner
        self._entry_points = entry_points
        self.scratch_floats = scratch  # of a thread
        self._phases, self._tasks, self._state = phases, tasks, state
        self._channels, self._kernel = channels, kernel
        self._weights: list[Tensor] = []  # the job has their addresses
        self._claimed = np.zeros(2, np.int64)
        self._jobs = np.zeros(1, job)
        bias = torch.zeros(channels) if conv_bias is None else conv_bias
        self._set(claimed=self._claimed.ctypes.data, scratch_floats=scratch, kernel=kernel)
        self._set(conv_weight=self._keep(conv.t()), conv_bias=self._keep(bias))

    def _set(self, **fields: float) -> None:
        """Sets fields of the job."""
        for name, value in fields.items():
            self._jobs[name] = value

    def _keep(self, weight: Tensor) -> int:
        """Keeps a weight in float32. Returns its address."""
        kept = weight.detach().float().contiguous()
        self._weights.append(kept)
        return kept.data_ptr()

    @abstractmethod
    def _accepts(self, rows: Tensor, states: Tensor) -> bool:
        """Returns whether the shapes are those that the loops were made for."""

    def _prepare(self, phase: int, rows: Tensor) -> None:
        """Prepares the job for a phase. Loops with linear layers inside compute these here."""
        self._set(phase=phase)

    def __call__(self, rows: Tensor, sequences: Tensor, conv: Tensor, states: Tensor, out: Tensor) -> None:
        """Computes the new rows of all sequences of a step, and changes their states in place.

        rows        [rows, …] output of the linear layers
        sequences   [sequences, 4] int64: first row, number of rows, slot, and whether the slot has a state
        conv        [slots, channels, n] inputs of the convolution before the new rows, in the rows' dtype
        states      [slots, …] recurrent states, float32 or bfloat16
        out         [rows, inner] in the rows' dtype

        All are contiguous.
        """
        threads = 1
        if len(rows) * self._state >= _PARALLEL_FROM:
            threads = min(torch.get_num_threads(), len(sequences) * self._tasks)
        self._set(scratch=scratch_at(threads * self.scratch_floats), threads=threads)
        self._set_tensors(rows, sequences, conv, states, out)
        function = _compiled(self._entry_points[rows.dtype, states.dtype], self._jobs.dtype)
        for phase in range(self._phases):
            self._prepare(phase, rows)
            self._claimed[:] = 0
            run_on_threads(function, self._jobs.ctypes.data, threads)

    def record(
        self,
        stages: Stages,
        rows: Tensor,
        sequences: Tensor,
        conv: Tensor,
        states: Tensor,
        out: Tensor,
        scratch: Tensor,
    ) -> None:
        """Records the loops, which have no linear layers inside, with the arguments of a call.

        scratch     [threads, at least `scratch_floats`] float32
        """
        self._set(scratch=scratch.data_ptr(), threads=len(scratch))
        self._set_tensors(rows, sequences, conv, states, out)
        function = _compiled(self._entry_points[rows.dtype, states.dtype], self._jobs.dtype)
        for phase in range(self._phases):
            self._prepare(phase, rows)
            stages.add(function, self._jobs, "claimed", 2)

    def _set_tensors(
        self, rows: Tensor, sequences: Tensor, conv: Tensor, states: Tensor, out: Tensor
    ) -> None:
        assert all(tensor.is_contiguous() for tensor in (rows, sequences, conv, states, out))
        assert rows.dtype == conv.dtype == out.dtype
        assert conv.shape[1] == self._channels
        assert conv.shape[2] >= self._kernel - 1
        assert out.shape == (len(rows), self.inner)
        assert self._accepts(rows, states)
        job: Any = self._jobs[0]
        job["sequences"], job["sequence_count"] = sequences.data_ptr(), len(sequences)
        job["rows"], job["row_count"], job["width"] = rows.data_ptr(), *rows.shape
        job["conv"], job["kept"] = conv.data_ptr(), conv.shape[2]
        job["states"], job["slots"], job["out"] = states.data_ptr(), len(states), out.data_ptr()


@cache
def _compiled(function: Callable[[Any], None], job: np.dtype[Any]) -> int:
    """Returns the address of a C function void (job *): compiled, or loaded, at the first call in a process."""
    return c_function(function, job)


_scratch = threading.local()


def scratch_at(floats: int) -> int:
    """Returns the address of scratch memory of so many float32, valid until the calling thread's next call."""
    return _scratch_memory("of threads", floats).data_ptr()


def scratch_rows(name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns scratch [rows, width], valid until the calling thread's next call with that name."""
    memory = _scratch_memory(name, -(-rows * width * dtype.itemsize // 4))
    return memory.view(dtype)[: rows * width].view(rows, width)


def _scratch_memory(name: str, floats: int) -> Tensor:
    """Returns memory of at least so many float32. The mixers of a model run one after the other and share it. Another
    model may run on another thread."""
    memory: Tensor | None = getattr(_scratch, name, None)
    if memory is None or len(memory) < floats:
        memory = torch.empty(floats, dtype=torch.float32)
        setattr(_scratch, name, memory)
    return memory
