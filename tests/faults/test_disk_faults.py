"""Every kind of fault of a disk, a few times: the cases of disk_faults.py. `make soak` runs hundreds of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.disk_faults import KINDS, run

SEEDS = 6


@pytest.mark.behaviour(39, 40, 42, 44)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_counted_by_kind_and_no_request_fails_or_gets_wrong_tokens(
    tmp_path: Path, kind: str
) -> None:
    for seed in range(SEEDS):
        case = run(kind, seed, tmp_path / str(seed))
        assert not case.wrong, seed
        assert not case.failed, seed
        assert not case.remarks, (seed, case.remarks)
        assert case.loaded_tokens or kind not in ("enospc", "eio", "slow_reads"), seed
