"""Hundreds of random schedules on the oracle runtime: outputs equal a run alone, and no row is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from property.schedules import play, run_schedule, run_scoped_schedule, run_tiered_schedule

# So many that they reach every line and branch of the cache and the engine that thousands reach.
SCHEDULES = 20_000 if os.environ.get("ROOTSTOCK_SOAK") else 420
TIERED_SCHEDULES = SCHEDULES // 4
SHARDS = 4
TIERED_SHARDS = 1  # a shard must be large enough that each event occurs in it


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_give_the_tokens_of_a_run_alone_and_lose_no_block(shard: int) -> None:
    play(lambda seed: run_schedule(seed, drafts=seed // 8 % 2 == 1), range(shard, SCHEDULES, SHARDS))


@pytest.mark.parametrize("shard", range(TIERED_SHARDS))
def test_a_tier_that_fails_at_random_never_changes_the_tokens_of_a_request(shard: int) -> None:
    seeds = range(shard, TIERED_SCHEDULES, TIERED_SHARDS)
    play(lambda seed: run_tiered_schedule(seed, drafts=seed // 2 % 2 == 1), seeds)


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("shard", range(TIERED_SHARDS))
def test_tenants_share_public_heads_and_nothing_behind_them(shard: int) -> None:
    seeds = range(shard, TIERED_SCHEDULES, TIERED_SHARDS)
    play(lambda seed: run_scoped_schedule(seed, tiered=False), seeds)


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("shard", range(TIERED_SHARDS))
def test_tenants_share_public_heads_and_nothing_behind_them_in_a_tier(shard: int) -> None:
    seeds = range(shard, TIERED_SCHEDULES, TIERED_SHARDS)
    play(lambda seed: run_scoped_schedule(seed, tiered=True), seeds)


def test_a_request_with_a_loaded_prefix_can_release_its_path_to_get_memory() -> None:
    """Plays a schedule that failed for want of a block that the path's replaced tail held."""
    run_tiered_schedule(900_672, lost_share=0.0)


@pytest.mark.behaviour(38)
def test_schedules_are_the_same_in_every_process() -> None:
    """The order of a set of strings differs from process to process."""
    script = (
        "from property.schedules import run_schedule\nfor seed in range(500, 540): print(run_schedule(seed))"
    )
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]

    def outcomes(hashes: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert outcomes("0").count("Outcome") == 40
    assert outcomes("0") == outcomes("1")
