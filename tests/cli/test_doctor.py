"""`rootstock doctor` on this machine, and on a disk and processors of other kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cli.running import Run
from rootstock.cli import doctor
from rootstock.runtime import select
from rootstock.runtime.base import DeviceMemory
from rootstock.units import GIB


@pytest.fixture(autouse=True)
def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_TEST_BYTES", doctor._PIECE_BYTES)


def test_it_tells_the_machine_the_kernels_and_the_disk(rootstock: Run, tmp_path: Path) -> None:
    done = rootstock("doctor", "--disk-dir", tmp_path, "--json")
    assert done.status == 0, done.err
    found = {each["name"]: each["value"] for each in json.loads(done.out)}
    assert {"rootstock", "torch", "processor", "free memory", "disk writes", "disk reads"} <= set(found)
    assert float(found["disk reads"].split()[0].replace(",", "")) > 0
    assert list(tmp_path.iterdir()) == []  # its file is gone
    plain = rootstock("doctor")
    assert "processor" in plain.out
    assert "disk" not in plain.out


def test_a_slow_disk_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_disk_speeds", lambda _: (50e6, 100e6))
    assert [bool(each.faster) for each in doctor._disk(tmp_path)] == [False, False, True]
    monkeypatch.setattr(doctor, "_disk_speeds", lambda _: (2e9, 3e9))
    assert not any(each.faster for each in doctor._disk(tmp_path))


@pytest.mark.parametrize(
    ("flags", "are_there", "said"),
    [
        ({"amx_bf16"}, False, "does not let processes use them"),
        ({"amx_bf16"}, True, ""),
    ],
)
def test_matrix_units_that_cannot_be_used_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], are_there: bool, said: str
) -> None:
    amx_tiles: Any = pytest.importorskip("rootstock.kernels.cpu.amx_tiles")
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(amx_tiles, "are_there", lambda: are_there)
    found = doctor._matrix_units()
    assert found.value == ("yes" if are_there else "no")
    assert said in found.faster
    assert bool(said) == bool(found.faster)


def test_a_directory_that_is_missing_is_one_line(rootstock: Run, tmp_path: Path) -> None:
    done = rootstock("doctor", "--disk-dir", tmp_path / "missing")
    assert (done.status, done.out) == (2, "")
    assert "cannot be measured" in done.err


def runtime_of(rootstock: Run, *options: str) -> doctor.Finding:
    done = rootstock("doctor", "--json", *options)
    assert done.status == 0, done.err
    [found] = [each for each in json.loads(done.out) if each["name"].startswith("runtime")]
    return doctor.Finding(**found)


def test_it_tells_the_runtime_and_the_reason(rootstock: Run) -> None:
    assert runtime_of(rootstock).value == "torch: MLX is for Apple Silicon"
    assert runtime_of(rootstock, "--runtime", "mlx") == doctor.Finding(
        "runtime (--runtime mlx)", "mlx: --runtime is mlx"
    )
    assert "auto | torch | mlx" in rootstock("doctor", "--runtime", "jax").err


def test_mlx_without_a_gpu_has_a_remedy() -> None:
    [device] = doctor._mlx_device()
    assert device.value == "CPU: MLX finds no GPU of Apple"
    assert "rootstock[torch]" in device.faster


def test_a_machine_without_torch_can_serve_by_mlx(rootstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_installed", lambda runtime: runtime == "mlx")
    assert runtime_of(rootstock).value == "mlx: torch is not installed"


@pytest.mark.parametrize(
    ("installed", "asked", "runtime", "has_graphs"),
    [
        (
            ("openvino",),
            "auto",
            "openvino: no other runtime is installed, and it serves its graphs only",
            True,
        ),
        (("openvino",), "openvino", "openvino: --runtime is openvino", True),
        (("torch", "openvino"), "auto", "torch: MLX is for Apple Silicon", True),
        (("torch", "openvino"), "torch", "torch: --runtime is torch", False),
        (("torch",), "auto", "torch: MLX is for Apple Silicon", False),
    ],
)
def test_openvino_is_told_with_the_models_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], asked: str, runtime: str, has_graphs: bool
) -> None:
    pytest.importorskip("openvino")
    for module in (select, doctor):
        monkeypatch.setattr(module, "is_installed", lambda runtime: runtime in installed)
    found = {each.name: each.value for each in doctor._runtime(asked)}
    assert found[f"runtime (--runtime {asked})"] == runtime
    assert ("on the CPU, in " in found.get("models with openvino_model.xml", "")) == has_graphs


def test_a_machine_without_a_runtime_is_told_the_command_that_installs_one(
    rootstock: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "is_installed", lambda runtime: False)
    found = runtime_of(rootstock)
    assert found.value == "none: it is not installed"
    assert "pip install 'rootstock[mlx]' on Apple Silicon" in found.faster


def test_apple_silicon_without_mlx_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (select, doctor):
        monkeypatch.setattr(module, "is_apple_silicon", lambda: True)
        monkeypatch.setattr(module, "is_installed", lambda runtime: runtime == "torch")
    [found, *_] = doctor._runtime("auto")
    assert found.value == "torch: MLX is not installed"
    assert "rootstock[mlx]" in found.faster


def test_the_gpu_of_a_mac_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"device_name": "Apple M4", "memory_size": 32 * GIB, "max_recommended_working_set_size": 22 * GIB}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: told)
    monkeypatch.setattr(doctor, "device_memory", lambda _: DeviceMemory("unified", 20 * GIB))
    assert [each.value for each in doctor._mlx_device()] == [
        "Apple M4, GPU",
        "20.0 GiB free; the GPU should use at most 22.0 GiB of 32.0 GiB",
    ]
