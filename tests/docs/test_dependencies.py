"""Distributions that pyproject.toml installs on each system: a Mac gets MLX and no torch, other systems torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

MAC = {"sys_platform": "darwin", "platform_machine": "arm64"}
INTEL_MAC = {"sys_platform": "darwin", "platform_machine": "x86_64"}
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64"}
LINUX_ON_ARM = {"sys_platform": "linux", "platform_machine": "aarch64"}
WINDOWS = {"sys_platform": "win32", "platform_machine": "AMD64"}

OF_TORCH, OF_MLX = {"torch", "numba"}, {"mlx", "mlx-lm"}


def installed(system: dict[str, str], *extras: str) -> dict[str, Requirement]:
    """Returns the requirements of Rootstock with `extras` on a system, by name."""
    texts = PROJECT["dependencies"] + [text for extra in extras for text in EXTRAS[extra]]
    wanted = [Requirement(text) for text in texts]
    return {each.name: each for each in wanted if each.marker is None or each.marker.evaluate(system)}


@pytest.mark.parametrize(
    ("system", "extras", "present", "absent"),
    [
        (MAC, (), OF_MLX, OF_TORCH),
        (MAC, ("mlx",), OF_MLX, OF_TORCH),
        (MAC, ("torch",), OF_MLX | OF_TORCH, set()),
        (MAC, ("dev",), OF_MLX | OF_TORCH, set()),
        (LINUX, (), OF_TORCH, OF_MLX),
        (LINUX, ("mlx",), OF_MLX | OF_TORCH, set()),
        (LINUX, ("torch",), OF_TORCH, OF_MLX),
        (LINUX_ON_ARM, (), OF_TORCH, OF_MLX),
        (INTEL_MAC, (), OF_TORCH, OF_MLX),
        (WINDOWS, (), OF_TORCH, OF_MLX),
    ],
)
def test_a_system_gets_the_runtime_that_it_can_use(
    system: dict[str, str], extras: tuple[str, ...], present: set[str], absent: set[str]
) -> None:
    found = installed(system, *extras)
    assert present <= set(found)
    assert not absent & set(found)
    assert {"numpy", "transformers", "llguidance", "fastapi"} <= set(found)


def test_mlx_computes_on_the_cpu_on_linux_only() -> None:
    assert installed(LINUX, "mlx")["mlx"].extras == {"cpu"}
    assert installed(MAC, "mlx")["mlx"].extras == set()


def test_every_place_names_the_same_versions() -> None:
    texts = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    for name in OF_TORCH | OF_MLX:
        versions = {str(each.specifier) for each in map(Requirement, texts) if each.name == name}
        assert len(versions) == 1, (name, versions)
