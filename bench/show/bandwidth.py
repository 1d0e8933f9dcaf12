"""Bandwidth at which this machine reads main memory, with torch's number of threads."""

from __future__ import annotations

import time

import torch

BYTES = 1 << 30  # far beyond the caches


class ReadBandwidth:
    """Read bandwidth, measured many times during a script, because other users of the machine change it.

    The best counts: a limit must not be surpassed.
    """

    def __init__(self) -> None:
        self._memory = torch.ones(BYTES // 4, dtype=torch.float32)
        self._memory.sum()
        self.gb_per_s: list[float] = []

    def measure(self) -> float:
        """Measures, keeps and returns the current GB/s."""
        began = time.perf_counter()
        self._memory.sum()
        self.gb_per_s.append(BYTES / 1e9 / (time.perf_counter() - began))
        return self.gb_per_s[-1]

    @property
    def best_gb_per_s(self) -> float:
        return max(self.gb_per_s)
