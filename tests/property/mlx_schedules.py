"""Random schedules on the MLX runtime: tiny models of every family, with and without tiers and public heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from mlx_faults import is_injected
from mlx_oracle import KINDS, MlxOracle, tiny_model
from property.schedules import (
    EOS,
    VOCAB,
    Injected,
    Judged,
    ScopedTierOutcome,
    Subject,
    run_schedule,
    run_scoped_schedule,
    run_tiered_schedule,
)
from property.simulated_tier import RecordCheck
from rootstock.cache.families import Family
from rootstock.cache.keys import RecordKey
from rootstock.runtime.base import Batch
from rootstock.tiers.base import Record

# Another division into chunks or batches changes the last bits of float32.
_TOLERANCE = 1e-3


def run_mlx_schedule(seed: int) -> ScopedTierOutcome:
    """Plays the schedule of a seed, which chooses the model, and whether there are tiers and public heads."""
    number, kind = divmod(seed, len(KINDS))
    subject, outcome = subject_of(list(KINDS)[kind]), ScopedTierOutcome()
    match number % 4:
        case 0:
            run_schedule(seed, drafts=number % 8 < 4, subject=subject, outcome=outcome)
        case 1:
            run_tiered_schedule(seed, drafts=number % 8 < 4, subject=subject, outcome=outcome)
        case 2:
            run_scoped_schedule(seed, tiered=False, subject=subject, outcome=outcome)
        case 3:
            run_scoped_schedule(seed, tiered=True, subject=subject, outcome=outcome)
    return outcome


@functools.cache
def subject_of(kind: str) -> Subject:
    tiny = tiny_model(kind, VOCAB)

    def make(families: tuple[Family, ...], fault: Callable[[Batch], None]) -> MlxOracle:
        return MlxOracle(tiny, eos_token_ids=(EOS,), fault=fault)

    return Subject(
        make,
        tiny.families,
        takes_adapters=False,
        log_probability_error=_TOLERANCE,
        record_check=_record_check,
        is_injected=lambda cause: isinstance(cause, Injected) or is_injected(cause),
        end=_no_pool_was_copied,
    )


def _no_pool_was_copied(runtime: Judged) -> None:
    assert isinstance(runtime, MlxOracle)
    assert runtime.pool_copies == 0


def _record_check() -> RecordCheck:
    """Returns a check that records of the same identity have the same content in all lives of a schedule."""
    seen: dict[RecordKey, np.ndarray] = {}

    def check(record: Record) -> None:
        content = np.concatenate([np.frombuffer(bytes(view), np.float32) for view in record.views()])
        earlier = seen.setdefault(record.identity.key, content)
        scale = float(np.abs(earlier).max())
        assert np.allclose(content, earlier, rtol=0, atol=_TOLERANCE * scale), (
            f"{record.identity.kind} of positions {record.identity.start} to {record.identity.end} has other content"
        )

    return check
