"""Exported graphs of small models: bench/show/openvino_exports.py wrote them, and `tar cJf` packed each."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

EXPORTS = Path(__file__).parent / "exports"

Unpack = Callable[[str], Path]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """Returns the directory of an architecture's export. Tests do not write to it."""
    pytest.importorskip("openvino")
    unpacked: dict[str, Path] = {}

    def unpack(architecture: str) -> Path:
        if architecture not in unpacked:
            folder = tmp_path_factory.mktemp("exports")
            with tarfile.open(EXPORTS / f"{architecture}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            unpacked[architecture] = folder / architecture
        return unpacked[architecture]

    return unpack
