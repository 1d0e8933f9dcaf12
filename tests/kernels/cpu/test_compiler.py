"""Compiler of the loops: processor features, and code cached before its sources changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rootstock.kernels.cpu.amx_tiles import are_there
from rootstock.kernels.cpu.compiler import compiles_for, forget_older_code, nb


def test_matrix_units_hidden_by_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code compiled for missing units would end the process."""
    for told in ("", "+avx512bw", "+amx-tile,-amx-bf16,+avx512bw"):
        monkeypatch.setattr(nb.config, "CPU_FEATURES", told)
        assert not compiles_for("amx-tile", "amx-bf16")
        assert not are_there.__wrapped__()
    for told in (None, "+avx512bw,+amx-bf16,+amx-tile"):
        monkeypatch.setattr(nb.config, "CPU_FEATURES", told)
        assert compiles_for("amx-tile", "amx-bf16")


def test_code_compiled_before_any_source_changed_is_compiled_again(tmp_path: Path) -> None:
    kept = tmp_path / "__pycache__"
    kept.mkdir()
    times = {
        tmp_path / "caller.py": 100,
        tmp_path / "called.py": 200,  # changed after its caller was compiled
        kept / "caller.work-1.py311.nbi": 150,
        kept / "called.help-1.py311.nbi": 250,
        kept / "called.cpython-311.pyc": 1,
    }
    for path, time in times.items():
        path.touch()
        os.utime(path, (time, time))
    forget_older_code(tmp_path)
    assert sorted(path.name for path in kept.iterdir()) == [
        "called.cpython-311.pyc",
        "called.help-1.py311.nbi",
    ]
    forget_older_code(tmp_path / "nowhere")
