"""The choice of a runtime on machines of each kind, and transformers without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.runtime import select
from rootstock.runtime.select import RuntimeChoice, choose_runtime, leave_out_torch, load_embedder

Machine = Callable[..., None]
BOTH = ("torch", "mlx")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine one with the given runtimes installed."""

    def of(*installed: str, apple: bool = False) -> None:
        monkeypatch.setattr(select, "is_installed", lambda runtime: runtime in installed)
        monkeypatch.setattr(select, "is_apple_silicon", lambda: apple)

    return of


@pytest.mark.parametrize(
    ("installed", "apple", "device", "chosen"),
    [
        (BOTH, True, "auto", RuntimeChoice("mlx", "this is Apple Silicon, and MLX is installed")),
        (BOTH, True, "cpu", RuntimeChoice("mlx", "this is Apple Silicon, and MLX is installed")),
        (BOTH, True, "mps", RuntimeChoice("torch", "--device mps is a device of torch")),
        (("mlx",), True, "auto", RuntimeChoice("mlx", "torch is not installed")),
        (("torch",), True, "auto", RuntimeChoice("torch", "MLX is not installed")),
        (BOTH, False, "auto", RuntimeChoice("torch", "MLX is for Apple Silicon")),
        (("torch",), False, "auto", RuntimeChoice("torch", "MLX is for Apple Silicon")),
        (("mlx",), False, "auto", RuntimeChoice("mlx", "torch is not installed")),
        (
            ("openvino",),
            False,
            "auto",
            RuntimeChoice("openvino", "no other runtime is installed, and it serves its graphs only"),
        ),
        (
            ("openvino",),
            False,
            "cuda",
            RuntimeChoice("openvino", "no other runtime is installed, and it serves its graphs only"),
        ),
    ],
)
def test_auto_is_mlx_on_apple_silicon_and_torch_elsewhere(
    machine: Machine, installed: tuple[str, ...], apple: bool, device: str, chosen: RuntimeChoice
) -> None:
    machine(*installed, apple=apple)
    assert choose_runtime("auto", device) == chosen


@pytest.mark.parametrize("asked", BOTH)
def test_a_runtime_that_is_asked_for_is_taken_on_any_machine(machine: Machine, asked: str) -> None:
    for apple in (False, True):
        machine(*BOTH, apple=apple)
        assert choose_runtime(asked) == RuntimeChoice(asked, f"--runtime is {asked}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("installed", "asked", "remedy"),
    [
        (("mlx",), "torch", "pip install 'rootstock[torch]'"),
        (("torch",), "mlx", "pip install 'rootstock[mlx]'"),
        ((), "auto", "pip install 'rootstock[mlx]' on Apple Silicon, and 'rootstock[torch]' elsewhere"),
    ],
)
def test_a_runtime_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    machine: Machine, installed: tuple[str, ...], asked: str, remedy: str
) -> None:
    machine(*installed)
    with pytest.raises(InvalidOption) as refused:
        choose_runtime(asked)
    assert refused.value.option == "--runtime"
    assert refused.value.message.endswith(f"{remedy}.")


def test_mlx_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On Linux, `mlx` without its extra `cpu` lacks the library that computes."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(InvalidOption, match=r"install all of MLX: pip install 'rootstock\[mlx\]'"):
        select.load_model(ModelConfig(str(tmp_path), runtime="mlx"))


def test_embedding_models_need_torch(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="auto or torch, which computes embedding models"):
        load_embedder(ModelConfig(str(tmp_path), runtime="mlx"), tmp_path)
    machine("mlx", apple=True)
    with pytest.raises(InvalidOption, match=r"pip install 'rootstock\[torch\]'"):
        load_embedder(ModelConfig(str(tmp_path)), tmp_path)


def test_transformers_finds_no_torch_where_all_models_run_on_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process torch is imported, or transformers with it: both stay as they are."""
    before = dict(sys.modules)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    leave_out_torch([ModelConfig("a", runtime="mlx"), ModelConfig("b", runtime="mlx")])
    leave_out_torch([ModelConfig("a", runtime="mlx"), ModelConfig("b", runtime="torch")])
    assert {name: module for name, module in sys.modules.items() if name in before} == before
    assert sys.modules.get("torch", sys) is not None
