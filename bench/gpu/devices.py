"""The device that a stage runs on: its clock, its memory bandwidth, and sizes that fit it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Bench:
    """Device and folder of a stage. On a CPU Triton's interpreter runs the kernels, at tiny sizes."""

    device: torch.device
    folder: Path  # temporary, shared by the stages of a run

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu"

    @property
    def model(self) -> Path:
        """Returns the folder to which the stage `model` writes."""
        return self.folder / "model"

    @property
    def dtype(self) -> str:
        """Returns the dtype of the model in stages that serve it."""
        return "float32" if self.interpreted else "bfloat16"

    def release_memory(self) -> None:
        """Gives memory that nothing refers to back to the device."""
        gc.collect()
        if not self.interpreted:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        if self.interpreted:
            return _GIB
        return int(torch.cuda.mem_get_info(self.device)[0])


def seconds(bench: Bench, call: Callable[[], object]) -> float:
    """Returns the seconds on the device from the call's first kernel to its last."""
    if bench.interpreted:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth(bench: Bench) -> float:
    """Returns bytes read and written per second by a device-to-device copy: the best of ten."""
    size = (1 << 22) if bench.interpreted else 4 * _GIB
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / min(seconds(bench, lambda: target.copy_(source)) for _ in range(10))


def read_bandwidth(bench: Bench) -> float:
    """Returns bytes read per second by a sum: the best of ten."""
    size = (1 << 22) if bench.interpreted else 4 * _GIB
    memory = torch.ones(size // 4, device=bench.device)
    memory.sum()
    return size / min(seconds(bench, memory.sum) for _ in range(10))


def as_graph(bench: Bench, call: Callable[[], object]) -> Callable[[], object]:
    """Records the call as a CUDA graph, so that Python is not timed. Without a device, returns the call itself."""
    if bench.interpreted:
        return call
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # compiles kernels, and lets libraries allocate their workspaces
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(keep: Callable[[], object] = call) -> None:  # a graph does not keep the tensors that it reads
        graph.replay()

    return replay
