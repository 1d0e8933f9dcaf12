"""How fast this machine reads main memory, with as many threads as torch takes."""

from __future__ import annotations

import time

import torch

BYTES = 1 << 30  # far beyond the caches


class ReadBandwidth:
    """Measured again and again while a show runs, because other users of the machine change it. The best counts: a
    limit that was surpassed would be none."""

    def __init__(self) -> None:
        self._memory = torch.ones(BYTES // 4, dtype=torch.float32)
        self._memory.sum()
        self.gb_per_s: list[float] = []

    def measure(self) -> float:
        """GB/s of this moment, which is remembered."""
        began = time.perf_counter()
        self._memory.sum()
        self.gb_per_s.append(BYTES / 1e9 / (time.perf_counter() - began))
        return self.gb_per_s[-1]

    @property
    def best_gb_per_s(self) -> float:
        return max(self.gb_per_s)
