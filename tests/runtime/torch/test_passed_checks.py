"""Self-checks that are remembered: of which loads, and what becomes of a file that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import save
from rootstock.config import ModelConfig
from rootstock.runtime.base import Logits
from rootstock.runtime.torch import fallback, passed_checks, runner
from rootstock.runtime.torch.passed_checks import PassedCheck, PassedChecks
from rootstock.runtime.torch.runner import TorchRuntime, load_model
from rootstock.runtime.torch.self_check import trial_logits

KINDS = ("llama", "gemma3_text", "qwen3_next", "mamba2", "bloom")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "LEAST_PARAMETERS", 0)
    return tmp_path / "cache" / "rootstock" / "checks"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the self-checks of a test."""
    checks: list[str] = []
    own = fallback.self_check

    def self_check(*args: Any) -> Any:
        checks.append(args[2].name)
        return own(*args)

    monkeypatch.setattr(fallback, "self_check", self_check)
    return checks


def load(directory: Path, **options: Any) -> TorchRuntime:
    return load_model(ModelConfig(str(directory), device="cpu", **({"dtype": "float32"} | options)))


def answers(runtime: TorchRuntime) -> dict[str, Logits]:
    return trial_logits(
        runtime.description, lambda tuning: TorchRuntime(runtime._model, runtime._served, tuning)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_passed_runs_as_before_without_a_check(
    kind: str, tmp_path: Path, counted: list[str]
) -> None:
    directory = save(tmp_path / "model", kind)
    first = load(directory)
    checks = len(counted)
    assert checks >= 1
    second = load(directory)
    assert len(counted) == checks
    assert second.description == first.description
    assert second._served.compiled == first._served.compiled
    assert dict(second._served.fusion.forms) == dict(first._served.fusion.forms)
    assert second._served.fusion.parts.keys() == first._served.fusion.parts.keys()
    before = answers(first)
    for rows, logits in answers(second).items():
        assert np.array_equal(logits, before[rows])


@pytest.mark.parametrize(
    "change",
    [
        {"recheck": True},
        {"dtype": "bfloat16"},
        {"attention": "torch"},
        {"quantize": "int8"},
        {"trust_remote_code": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_option_is_checked(change: dict[str, Any], tmp_path: Path, counted: list[str]) -> None:
    directory = save(tmp_path / "model", "llama")
    load(directory)
    checks = len(counted)
    load(directory, **change)
    assert len(counted) > checks


def test_other_weights_code_and_settings_are_checked(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "model", "llama")
    load(directory)
    file = next(directory.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    expected = len(counted)

    def is_checked() -> bool:
        nonlocal expected
        load(directory)
        known, expected = expected, len(counted)
        return len(counted) > known

    assert is_checked()
    assert not is_checked()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert is_checked()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert not is_checked()
    monkeypatch.setattr(passed_checks, "_of_code", lambda: ["another version"])
    assert is_checked()


def test_the_number_of_threads_is_part_of_the_name(tmp_path: Path) -> None:
    PassedChecks("model", folder=tmp_path).remember(PassedCheck("packed", None, False, ""))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert PassedChecks("model", folder=tmp_path).passed() is None
    finally:
        torch.set_num_threads(threads)
    assert PassedChecks("model", folder=tmp_path).passed() is not None
    assert PassedChecks("another", folder=tmp_path).passed() is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"mode": "packed"}',
        '{"mode": "packed", "compiled": null, "fuses": true, "reason": 1, "parts": {}}',
        '{"mode": "packed", "compiled": null, "fuses": true, "reason": "", "parts": []}',
        '{"mode": "packed", "compiled": null, "fuses": true, "reason": "", "parts": {"a": 1}}',
        '{"mode": "unknown", "compiled": null, "fuses": true, "reason": "", "parts": {}}',
        '{"mode": "packed", "compiled": "numba", "fuses": true, "reason": "", "parts": {"other": "FusedNorm 0"}}',
        "\x00\xff",
    ],
)
def test_a_file_that_does_not_fit_costs_a_check(
    content: str, tmp_path: Path, folder: Path, counted: list[str]
) -> None:
    directory = save(tmp_path / "model", "llama")
    first = load(directory)
    (file,) = folder.iterdir()
    known = json.loads(file.read_text())
    file.write_text(content)
    checks = len(counted)
    second = load(directory)
    assert len(counted) > checks
    assert second.description == first.description
    assert json.loads(file.read_text()) == known, "it is remembered again"
    load(directory)
    assert len(counted) == 2 * checks


def test_a_folder_that_cannot_be_written_costs_a_check(
    tmp_path: Path, folder: Path, counted: list[str]
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    directory = save(tmp_path / "model", "llama")
    load(directory)
    checks = len(counted)
    load(directory)
    assert len(counted) == 2 * checks


def test_the_latest_checks_are_kept(tmp_path: Path) -> None:
    for number in range(passed_checks._FILES + 3):
        PassedChecks(number, folder=tmp_path).remember(PassedCheck("packed", None, False, str(number)))
    assert len(list(tmp_path.iterdir())) == passed_checks._FILES
    assert PassedChecks(0, folder=tmp_path).passed() is None
    last = PassedChecks(passed_checks._FILES + 2, folder=tmp_path).passed()
    assert last is not None
    assert last.reason == str(passed_checks._FILES + 2)


def test_small_models_are_checked_at_each_load(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST_PARAMETERS", passed_checks.LEAST_PARAMETERS)
    directory = save(tmp_path / "model", "llama")
    load(directory)
    checks = len(counted)
    load(directory)
    assert len(counted) == 2 * checks
