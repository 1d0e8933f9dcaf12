"""Self-checks that a large model has passed on this machine, so that it need not pass them at each start.

A check compares one code with another on the same processor, with the same weights: its result does not change while
none of these does. They are the name under which it is remembered: the content of the weights and the configuration,
Rootstock's own code, the versions of the libraries, the processor and what it offers, the number of threads, and all
that the check was called with. A remembered check holds how the model ran when it passed. A file that is damaged or
of another form is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch
import xxhash

from rootstock.runtime.base import ExecutionMode
from rootstock.runtime.model_files import user_cache_folder
from rootstock.runtime.torch.attention_backends import Compiled

LEAST_PARAMETERS = 100_000_000  # of a model whose check takes more than a moment
_FILES = 64  # the latest ones stay
_LIBRARIES = ("torch", "transformers", "numba", "llvmlite", "triton", "numpy")
_SETTINGS = ("NUMBA_", "ONEDNN_", "DNNL_", "ATEN_", "MKL_", "TORCH_", "TRITON_", "CUBLAS_", "NVIDIA_")


@dataclass(frozen=True, slots=True)
class PassedCheck:
    """The attempt with which a model passed, the forms of its fused parts, and what the check remarked."""

    mode: ExecutionMode
    compiled: Compiled | None
    fuses: bool
    reason: str  # why no better mode is used, and remarks
    # The form of each fused part, by the module's name.
    parts: Mapping[str, str] = field(default_factory=dict)


class PassedChecks:
    """The remembered check of one model. Files that cannot be read or written cost a check, and nothing else."""

    def __init__(self, *identity: object, folder: Path | None = None) -> None:
        """`identity`: all that the check depends on, beside this machine and the installed code."""
        self._folder = folder or user_cache_folder() / "checks"
        digest = xxhash.xxh3_128(json.dumps([_of_code(), _of_machine(), *map(repr, identity)]).encode())
        self._file = self._folder / f"{digest.hexdigest()}.json"

    def passed(self) -> PassedCheck | None:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
            known = PassedCheck(**found)
            told = [known.reason, *known.parts.keys(), *known.parts.values()]
            is_valid = (
                known.mode in get_args(ExecutionMode)
                and known.compiled in (None, *get_args(Compiled))
                and isinstance(known.fuses, bool)
                and all(isinstance(each, str) for each in told)
            )
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return known if is_valid else None

    def remember(self, check: PassedCheck) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".new", delete=False) as file:
                json.dump(asdict(check), file)
            os.replace(file.name, self._file)
            written = sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime_ns)
            for old in written[:-_FILES]:
                old.unlink(missing_ok=True)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _of_code() -> list[object]:
    """Identifies the code that checks and that is checked, by the sizes and times of its files."""
    package = Path(__file__).resolve().parents[2]
    stamps = [
        (str(file.relative_to(package)), file.stat().st_size, file.stat().st_mtime_ns)
        for part in ("runtime", "kernels", "cache")
        for file in sorted((package / part).rglob("*.py"))
    ]
    return [sys.version, *[(name, _version(name)) for name in _LIBRARIES], stamps]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _of_machine() -> list[object]:
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    settings.pop("NUMBA_CACHE_DIR", None)
    devices = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return [
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        sorted(settings.items()),
        devices,
    ]


def _processor() -> str:
    try:
        from llvmlite import binding
    except ImportError:
        return ""
    return f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
