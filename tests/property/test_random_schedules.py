"""Thousands of random schedules on the oracle runtime: outputs equal a run alone, and no row is lost."""

from __future__ import annotations

import os

import pytest

from property.schedules import Outcome, TierOutcome, run_schedule, run_tiered_schedule

SCHEDULES = 20_000 if os.environ.get("ROOTSTOCK_SOAK") else 1_000
TIERED_SCHEDULES = SCHEDULES // 5
SHARDS = 8
TIERED_SHARDS = 2


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_give_the_tokens_of_a_run_alone_and_lose_no_block(shard: int) -> None:
    total = Outcome()
    for seed in range(shard, SCHEDULES, SHARDS):
        try:
            total.add(run_schedule(seed, drafts=seed // SHARDS % 2 == 1))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    # Without any of these events the schedules would prove less than they say.
    for name in total.__dataclass_fields__:
        assert getattr(total, name) > 0, f"no schedule had any {name}"


@pytest.mark.parametrize("shard", range(TIERED_SHARDS))
def test_a_tier_that_fails_at_random_never_changes_the_tokens_of_a_request(shard: int) -> None:
    total = TierOutcome()
    for seed in range(shard, TIERED_SCHEDULES, TIERED_SHARDS):
        try:
            total.add(run_tiered_schedule(seed, drafts=seed // TIERED_SHARDS % 2 == 1))
        except BaseException as error:
            error.add_note(f"tiered schedule {seed}")
            raise
    for name in total.__dataclass_fields__:
        assert getattr(total, name) > 0, f"no schedule had any {name}"


def test_a_request_with_a_loaded_prefix_can_release_its_path_to_get_memory() -> None:
    """Plays a schedule that failed for want of a block that the path's replaced tail held."""
    run_tiered_schedule(900_672)
