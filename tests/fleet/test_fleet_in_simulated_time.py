"""The routing policy beside others in simulated time, in the mean over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

import pytest

from fleet.simulation import Load, Ours, PowerOfTwo, PrefixAffinity, RouterKind, SessionAffinity, simulate

SEEDS = range(3)


@dataclass
class Means:
    hit_rate: float
    p50_s: float
    p95_s: float


def means(kind: RouterKind, load: Load) -> Means:
    runs = [simulate(kind, seed, load) for seed in SEEDS]
    return Means(
        mean(run.hit_rate for run in runs),
        mean(run.ttft_p50_s for run in runs),
        mean(run.ttft_p95_s for run in runs),
    )


def test_teams_that_fit_evenly_hit_as_often_as_by_their_prefix_alone() -> None:
    """Two teams for each replica: prefix affinity cannot be bettered, and half of the rest hit by chance."""
    load = Load()
    ours, prefix = means(Ours, load), means(PrefixAffinity, load)
    assert ours.hit_rate >= prefix.hit_rate - 0.005
    assert ours.p50_s <= prefix.p50_s * 1.02
    assert ours.p95_s <= prefix.p95_s * 1.02
    for other in (PowerOfTwo, SessionAffinity):
        beside = means(other, load)
        assert ours.hit_rate >= beside.hit_rate + 0.3
        assert ours.p95_s <= beside.p95_s * 0.6


@pytest.mark.parametrize(
    ("load", "share"),
    [
        (Load(teams=1, sessions=30), 0.95),  # all have one system prompt: more than a replica computes
        (Load(teams=2, sessions=15), 0.75),  # fewer than replicas
        (Load(teams=30, sessions=1), 0.7),
    ],
    ids=["one team", "two teams", "no teams"],
)
def test_uneven_loads_begin_sooner_than_by_their_prefix_alone(load: Load, share: float) -> None:
    ours, prefix = means(Ours, load), means(PrefixAffinity, load)
    assert ours.hit_rate >= prefix.hit_rate
    assert ours.p95_s <= share * prefix.p95_s
