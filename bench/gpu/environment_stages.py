"""The machine, imports of every module, and the repository's own tests of the kernels and graphs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from devices import Bench
from isolation import Row

import rootstock

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/runtime/torch/test_cuda_graphs.py",
    "tests/runtime/torch/test_compiled_kernel.py",
    "tests/kernels/test_triton_attention.py",
)
OPTIONAL = {"openai", "mlx", "mlx_lm"}  # of the demo, and the other runtime


def environment(bench: Bench) -> Iterator[Row]:
    """Imports every module of the package. A module that cannot be imported is a row that is not ok."""
    row: Row = {"device": "Triton's interpreter", "torch_cuda": torch.version.cuda}
    if not bench.interpreted:
        properties = torch.cuda.get_device_properties(bench.device)
        row |= {
            "device": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    yield row
    modules = [module.name for module in pkgutil.walk_packages(rootstock.__path__, "rootstock.")]
    failures = {}
    for name in modules:
        if name == "rootstock.__main__":
            continue
        try:
            importlib.import_module(name)
        except ImportError as failure:
            if failure.name not in OPTIONAL:
                failures[name] = str(failure)
    for name, failure in failures.items():
        yield {"module": name, "error": failure, "ok": False}
    yield {"modules": len(modules), "not_imported": len(failures)}


def tests(bench: Bench) -> Iterator[Row]:
    """Runs pytest on the device."""
    for path in TESTS:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = ran.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]
        row: Row = {
            "tests": path,
            "result": lines[-1] if lines else ran.stderr[-500:],
            "ok": ran.returncode == 0,
        }
        yield row | ({"failed": failed, "output": ran.stdout[-3000:]} if ran.returncode else {})
