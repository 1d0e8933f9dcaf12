"""`rootstock doctor`: this machine's abilities, and changes that would make a server on it faster."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from rootstock._version import __version__
from rootstock.cli import options
from rootstock.cli.machine import this_machine
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption, StartupError
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.runtime.select import (
    choose_runtime,
    device_memory,
    is_apple_silicon,
    is_installed,
)
from rootstock.units import MIB, in_units

DISK_TEST_BYTES = 256 * MIB
_PIECE_BYTES = 8 * MIB
_SLOW_DISK_BYTES_S = 500e6  # recomputing a prefix of a small model is about as fast
_VECTORS = (
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of the machine."""

    name: str
    value: str
    faster: str = ""  # a faster choice


def doctor(
    disk_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for --disk-dir of a server: its disk is measured."),
    ] = None,
    runtime: Annotated[str, options.parameter("runtime")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show this machine's abilities, the runtime and kernels that a server uses, and faster choices."""
    ModelConfig("", runtime=runtime)  # refuses an invalid name
    found = [*_software(), *_processor(), *_memory(), *_runtime(runtime)]
    if disk_dir is not None:
        found += _disk(disk_dir)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
        return
    width = max(len(each.name) for each in found)
    for each in found:
        print(f"{each.name:<{width}}  {each.value}")
    faster = [each.faster for each in found if each.faster]
    if faster:
        print("\nFaster:")
        for remedy in faster:
            print(f"- {remedy}")


def _software() -> Iterator[Finding]:
    yield Finding("rootstock", __version__)
    yield Finding("python", platform.python_version())
    for package in ("mlx", "mlx-lm", "torch", "transformers", "numba", "triton", "openvino"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield Finding(package, importlib.metadata.version(package))


def _processor() -> Iterator[Finding]:
    machine = this_machine()
    total = os.cpu_count() or 1
    cores = f"{machine.cores} of {total}" if machine.cores < total else f"{machine.cores}"
    yield Finding("processor", f"{machine.cpu}, {cores} cores for this process")
    features = _cpu_flags()
    if features is not None:
        usable = [name for name in _VECTORS if name in features]
        yield Finding("vector units", ", ".join(usable) or "none that kernels use")


def _cpu_flags() -> frozenset[str] | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    return None


def _memory() -> Iterator[Finding]:
    free = free_host_bytes()
    yield Finding("free memory", f"{in_units(free)} of {this_machine().ram_gib} GiB")


def _runtime(asked: str) -> Iterator[Finding]:
    """Yields the runtime that a server chooses, the reason, and its device on this machine."""
    name = f"runtime (--runtime {asked})"
    try:
        chosen = choose_runtime(asked)
    except InvalidOption as error:
        yield Finding(name, "none: it is not installed", f"No model can be served without {error.allowed}.")
        return
    remedy = ""
    if is_apple_silicon() and not is_installed("mlx"):
        remedy = "Install MLX, the runtime for Apple Silicon: pip install 'rootstock[mlx]'."
    yield Finding(name, f"{chosen.runtime}: {chosen.reason}", remedy)
    if chosen.runtime == "mlx":
        yield from _mlx_device()
    elif chosen.runtime == "torch":
        yield from _torch_device()
        yield from _torch_kernels()
    if asked in ("auto", "openvino") and is_installed("openvino"):
        from rootstock.runtime.openvino.load import native_dtype

        graphs = f"served by OpenVINO on the CPU, in {native_dtype()} (--dtype auto)"
        yield Finding("models with openvino_model.xml", graphs)


def _mlx_device() -> Iterator[Finding]:
    try:
        import mlx.core as mx
    except ImportError as error:  # its library for this system is a package of its own
        yield Finding("device", f"none: {error}", "Install all of MLX: pip install 'rootstock[mlx]'.")
        return
    if not mx.metal.is_available():
        yield Finding(
            "device",
            "CPU: MLX finds no GPU of Apple",
            "MLX computes slowly here. Install torch: pip install 'rootstock[torch]'.",
        )
        return
    told = mx.device_info()
    total, most = int(told["memory_size"]), int(told["max_recommended_working_set_size"])
    free = device_memory(ModelConfig("", runtime="mlx")).free_bytes
    yield Finding("device", f"{told['device_name']}, GPU")
    about = f"{in_units(free)} free; the GPU should use at most {in_units(most)} of {in_units(total)}"
    yield Finding("memory for models", about)


def _torch_device() -> Iterator[Finding]:
    import torch

    from rootstock.runtime.torch.runner import resolve_device, resolve_dtype

    device = resolve_device("auto")
    dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        about = f"{torch.cuda.get_device_name(device)}, {in_units(free)} of {in_units(total)} free"
    elif device.type == "mps":
        about = "Apple GPU"
    else:
        about = "CPU: torch finds no GPU"
    yield Finding("device (--device auto)", about)
    slow = device.type == "cpu" and dtype == "float32"
    yield Finding(
        "dtype (--dtype auto)",
        dtype,
        "This CPU computes bfloat16 by emulation. --quantize int8 halves the weights' memory and reads."
        if slow
        else "",
    )


def _torch_kernels() -> Iterator[Finding]:
    from rootstock.runtime.torch.attention_backends import compiled_for
    from rootstock.runtime.torch.runner import resolve_device

    device = resolve_device("auto")
    compiled = compiled_for(device)
    if device.type == "cpu":
        remedy = "" if compiled else "Install numba: decodes read K and V by compiled loops."
        yield Finding("compiled decodes (Numba)", "yes" if compiled else "no", remedy)
        if compiled:
            yield _matrix_units()
    if device.type == "cuda":
        value = "Triton, reads K and V in place" if compiled else "gathers K and V before each forward"
        remedy = (
            "" if compiled else "Install triton, if the GPU supports it: attention reads K and V in place."
        )
        yield Finding("attention", value, remedy)
        yield Finding("CUDA graphs", "for decodes, but with --eager")


def _matrix_units() -> Finding:
    from rootstock.kernels.cpu import amx_tiles

    has_units = amx_tiles.are_there()
    remedy = ""
    if not has_units and "amx_bf16" in (_cpu_flags() or ()):
        remedy = "The processor has matrix units (AMX), and this system or container does not let processes use them."
    elif not has_units and platform.machine() == "x86_64":
        remedy = "A processor with AMX reads shared prefixes of bfloat16 models by its matrix units."
    return Finding("matrix units (AMX)", "yes" if has_units else "no", remedy)


def _disk(folder: Path) -> Iterator[Finding]:
    """Measures a directory's disk with a file of its own, which is removed."""
    try:
        free = os.statvfs(folder)
        written, read = _disk_speeds(folder)
    except OSError as error:
        raise StartupError(f"--disk-dir {folder} cannot be measured: {error.strerror or error}") from error
    yield Finding("free disk", in_units(free.f_bavail * free.f_frsize))
    yield Finding("disk writes", f"{written / 1e6:,.0f} MB/s")
    remedy = ""
    if read < _SLOW_DISK_BYTES_S:
        remedy = (
            "Put --disk-dir on a faster disk: a prefix is loaded only where that is faster than computing it."
        )
    yield Finding("disk reads", f"{read / 1e6:,.0f} MB/s", remedy)


def _disk_speeds(folder: Path) -> tuple[float, float]:
    """Returns the speeds of writing and of reading, in bytes a second. Reads skip the system's cache if they can."""
    piece = os.urandom(_PIECE_BYTES)
    pieces = DISK_TEST_BYTES // _PIECE_BYTES
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(pieces):
            file.write(piece)
        os.fsync(file.fileno())
        written = DISK_TEST_BYTES / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(_PIECE_BYTES):
            pass
        return written, DISK_TEST_BYTES / (time.perf_counter() - began)
