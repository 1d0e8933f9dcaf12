"""Machine and source of a measurement, without host names and paths, since rows are published."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    ram_gib: float
    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    commit: str | None  # None: this is not a checkout
    changed: bool  # files of the package differ from the commit


def this_machine(device: str = "cpu") -> Machine:
    return Machine(_cpu_name(), _cores(), _ram_gib(), _accelerator(device))


def this_source() -> Source:
    package = Path(__file__).resolve().parents[1]
    if not _git(package, "ls-files", "__init__.py"):  # perhaps installed below another project's checkout
        return Source(None, changed=False)
    return Source(
        _git(package, "rev-parse", "--short=12", "HEAD") or None,
        changed=bool(_git(package, "status", "--porcelain", "--", ".")),
    )


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        try:
            name = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
            return name.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram_gib() -> float:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1)
    except (AttributeError, OSError, ValueError):  # not on every system
        return 0.0


def _accelerator(device: str) -> str | None:
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return "Metal" if device in ("mps", "gpu") else None  # torch's name of it, and MLX's
