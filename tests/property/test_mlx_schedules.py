"""A few random schedules on the MLX runtime: outputs equal those of mlx-lm's own cache, and no row is lost.

`make show ID=I6` plays hundreds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import mlx.core as mx
import pytest

from property.mlx_schedules import KINDS, run_mlx_schedule
from property.schedules import play

SCHEDULES_OF_A_KIND = 400 if os.environ.get("ROOTSTOCK_SOAK") else 6
# Too rare for so few schedules.
RARE = (
    "refused",
    "idle_evicted_tokens",
    "evicted_retained_tokens",
    "displaced_grants",
    "loads_missed",
    "loads_cancelled",
)


@pytest.fixture(autouse=True)
def _without_compiled_functions() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.behaviour(15, 23, 48)
def test_random_schedules_give_the_tokens_of_mlx_lms_own_cache_and_lose_no_block() -> None:
    play(run_mlx_schedule, range(SCHEDULES_OF_A_KIND * len(KINDS)), RARE)
