"""Faults of a shared server, a few of each kind. `make show ID=L3` runs a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.shared_faults import FAULTS, run
from shared_store import SharedStore


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_changes_no_answer(kind: str, tmp_path: Path) -> None:
    loaded = 0
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with SharedStore(folder) as store:
            case = run(kind, seed, folder, store)
        assert not case.wrong, case.remarks
        assert not case.failed, case.remarks
        loaded += case.loaded_tokens
    assert loaded == 0 or kind not in ("other weights", "other secret")
