"""`rootstock doctor` on this machine, and on a disk and processors of other kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.running import Run
from rootstock.cli import doctor


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
