"""The routing policy by its properties, in given states and at random ones."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock.fleet import policy as policy_module
from rootstock.fleet.policy import Candidate, ReplicaReport, RoutingPolicy
from rootstock.fleet.prefix_index import Keys, PrefixIndex

BLOCK = 32
SPEED = 4000.0
NO_KEYS: Keys = np.empty(0, np.uint64)


class Fleet:
    """A policy over some replicas, and an index that a test fills."""

    def __init__(self, replicas: int, names: str = "replica") -> None:
        self.index = PrefixIndex()
        self.policy = RoutingPolicy(self.index, BLOCK)
        self.slots = [self.index.join() for _ in range(replicas)]
        for slot in self.slots:
            self.policy.add(slot, f"{names} {slot}", SPEED)

    def ranked(self, keys: Keys, tokens: int, now_s: float) -> list[Candidate]:
        return self.policy.ranked(keys, tokens, self.slots, now_s)

    def send(self, keys: Keys, tokens: int, now_s: float) -> int:
        best = self.ranked(keys, tokens, now_s)[0]
        self.policy.assigned(best, keys, now_s)
        return best.slot


def prompt(seed: int, blocks: int = 40) -> Keys:
    return np.random.default_rng(seed).integers(1, 2**64, blocks, np.uint64)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    for seed in range(20):
        fleet = Fleet(5)
        keys = prompt(seed)
        fleet.index.stored(seed % 5, keys[:30])
        best = fleet.ranked(keys, 40 * BLOCK, 0.0)[0]
        assert (best.slot, best.cached_tokens) == (seed % 5, 30 * BLOCK)
        assert best.prefill_s == 10 * BLOCK / SPEED


def test_it_goes_elsewhere_when_the_backlog_is_larger_than_the_gain() -> None:
    fleet = Fleet(2)
    keys = prompt(1)
    fleet.index.stored(0, keys)
    for seed in range(2, 12):  # seconds of other prompts for the first replica
        other = fleet.policy.ranked(prompt(seed), 40 * BLOCK, [0], 0.0)[0]
        fleet.policy.assigned(other, prompt(seed), 0.0)
    assert fleet.ranked(keys, 40 * BLOCK, 0.0)[0].slot == 1
    assert fleet.ranked(keys, 40 * BLOCK, 60.0)[0].slot == 0  # the backlog is done


def test_sessions_that_begin_at_once_meet_where_the_first_one_went() -> None:
    for seed in range(10):
        fleet, now_s = Fleet(3), 0.0
        system, firsts = prompt(seed, 40), list[int]()
        for number in range(30):
            keys = np.concatenate((system, prompt(1000 + 30 * seed + number, 1)))
            best = fleet.ranked(keys, 41 * BLOCK, now_s)[0]
            if (
                not best.cached_tokens
            ):  # it is computed once more: the backlog elsewhere is larger than the gain
                firsts.append(number)
                backlogs = {each.slot: each.backlog_s for each in fleet.ranked(keys, 41 * BLOCK, now_s)}
                assert number == 0 or max(backlogs.values()) > 40 * BLOCK / SPEED
            fleet.policy.assigned(best, keys, now_s)
            now_s += 1e-3
        assert firsts[0] == 0
        assert len(firsts) == 1 or firsts[1] > 3


def test_claims_end() -> None:
    fleet = Fleet(3)
    keys = prompt(1)
    first = fleet.send(keys, 40 * BLOCK, 0.0)
    cached = {each.slot: each.cached_tokens for each in fleet.ranked(keys, 40 * BLOCK, 0.1)}
    assert cached == {slot: 40 * BLOCK * (slot == first) for slot in fleet.slots}
    assert all(each.cached_tokens == 0 for each in fleet.ranked(keys, 40 * BLOCK, 60.0))


def test_claims_that_have_ended_are_forgotten() -> None:
    fleet = Fleet(1)
    for seed in range(50):
        fleet.send(prompt(seed), 40 * BLOCK, 100.0 * seed)
    assert len(fleet.policy._replicas[0].claims) <= 80


def test_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MOST_CLAIMED_BLOCKS", 100)
    fleet = Fleet(1)
    for seed in range(50):
        fleet.send(prompt(seed), 40 * BLOCK, 0.0)
    claims = fleet.policy._replicas[0].claims
    assert len(claims) == 100
    newest = fleet.ranked(prompt(49), 40 * BLOCK, 0.0)[0]
    assert newest.cached_tokens == 40 * BLOCK
    cut = fleet.ranked(prompt(47), 40 * BLOCK, 0.0)[0]  # its last blocks were forgotten first
    assert cut.cached_tokens == 20 * BLOCK


def test_idle_replicas_get_equal_beginnings_and_different_ones_are_spread() -> None:
    first, second = Fleet(8), Fleet(8)  # routers that do not know each other
    of = [
        [fleet.ranked(prompt(seed), 40 * BLOCK, 0.0)[0].slot for seed in range(400)]
        for fleet in (first, second)
    ]
    assert of[0] == of[1]
    assert set(Counter(of[0]).values()) <= set(range(25, 80))


def test_a_replica_that_leaves_moves_only_its_own_prompts() -> None:
    fleet = Fleet(5)
    before = [fleet.ranked(prompt(seed), 40 * BLOCK, 0.0)[0].slot for seed in range(100)]
    fleet.policy.remove(2)
    fleet.slots.remove(2)
    after = [fleet.ranked(prompt(seed), 40 * BLOCK, 0.0)[0].slot for seed in range(100)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 2)


@pytest.mark.parametrize("keys", [NO_KEYS, prompt(7)], ids=["unknown", "the same"])
def test_no_replica_starves(keys: Keys) -> None:
    """Whether prompts are unknown or all the same, under load each replica gets its share."""
    fleet, now_s, counts = Fleet(4), 0.0, Counter[int]()
    for _ in range(2000):
        counts[fleet.send(keys, 3000, now_s)] += 1
        now_s += 0.05
    if len(keys):  # each of them is nearly all cached where the first one went
        assert len(counts) >= 2
    else:
        assert min(counts.values()) > 400


def test_unknown_prompts_take_turns_at_idle_replicas() -> None:
    fleet = Fleet(4)
    assert {fleet.send(NO_KEYS, 10, 100.0 * n) for n in range(4)} == set(fleet.slots)


def test_new_prompts_go_where_fewer_new_tokens_went() -> None:
    """Idle replicas get equally many prompts that none has: each of them evicts others."""
    fleet = Fleet(3)
    slots = [fleet.send(prompt(seed), 40 * BLOCK, 5.0 * seed) for seed in range(60)]
    assert min(Counter(slots).values()) >= 17


def test_a_report_corrects_the_backlog() -> None:
    fleet = Fleet(2)
    for seed in range(20):
        fleet.send(prompt(seed), 40 * BLOCK, 0.0)

    def backlogs(now_s: float) -> dict[int, float]:
        return {each.slot: each.backlog_s for each in fleet.ranked(NO_KEYS, 0, now_s)}

    before = backlogs(1.0)
    fleet.policy.report(0, ReplicaReport(0, 4, 0, 2 * SPEED), 1.0)  # it was faster
    fleet.policy.report(1, ReplicaReport(30, 1, 30, 0.0), 1.0)  # it is slower
    after = backlogs(1.0)
    assert after[0] == 0.0
    assert after[1] > before[1] > 0
    assert {each.slot: each.prefill_s for each in fleet.ranked(NO_KEYS, 4000, 1.0)} == {0: 0.5, 1: 0.5}


def test_replicas_of_about_one_speed_are_equally_fast() -> None:
    fleet = Fleet(4)
    for slot, speed in enumerate((3000.0, 4000.0, 5000.0, 0.0)):
        fleet.policy.report(slot, ReplicaReport(0, 0, 0, speed), 1.0)
    assert {each.prefill_s for each in fleet.ranked(NO_KEYS, 4000, 1.0)} == {1.0}
    fleet.policy.report(2, ReplicaReport(0, 0, 0, 40_000.0), 2.0)  # another kind of device
    found = {each.slot: each.prefill_s for each in fleet.ranked(NO_KEYS, 4000, 2.0)}
    assert found == {0: 1.0, 1: 1.0, 2: 0.1, 3: 1.0}


def test_a_report_does_not_count_what_is_on_the_way() -> None:
    fleet = Fleet(1)
    fleet.send(prompt(1), 40 * BLOCK, 1.0)
    fleet.policy.report(0, ReplicaReport(0, 0, 0, SPEED), 1.1)
    assert fleet.ranked(NO_KEYS, 0, 1.1)[0].backlog_s == pytest.approx(40 * BLOCK / SPEED - 0.1, abs=0.11)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_decisions_are_a_function_of_the_state(seed: int) -> None:
    """Two policies that see the same decide the same: all candidates, one of the cheapest first."""
    rng = random.Random(seed)
    pair, now_s = (Fleet(4), Fleet(4)), 0.0
    for _ in range(60):
        now_s += rng.choice([0.0, 0.01, 0.3, 10.0])
        number, blocks = rng.randrange(6), rng.randrange(41)
        keys, tokens = prompt(number)[:blocks], blocks * BLOCK + rng.randrange(BLOCK)
        act, slot = rng.random(), rng.randrange(4)
        report = ReplicaReport(*(rng.randrange(4) for _ in range(3)), rng.choice([0.0, 1000.0, 9000.0]))
        ranks = []
        for fleet in pair:
            if act < 0.2:
                fleet.index.stored(slot, keys)
            elif act < 0.3:
                fleet.index.cleared(slot)
            elif act < 0.5:
                fleet.policy.report(slot, report, now_s)
            ranked = fleet.ranked(keys, tokens, now_s)
            fleet.policy.assigned(ranked[0], keys, now_s)
            ranks.append(ranked)
        assert ranks[0] == ranks[1]
        (ranked, _) = ranks
        assert sorted(each.slot for each in ranked) == fleet.slots
        least = min(each.cost_s for each in ranked)
        assert ranked[0].cost_s <= least + policy_module.NEAR_S
        for each in ranked:
            assert 0 <= each.cached_tokens <= tokens
            assert each.backlog_s >= 0
            assert each.prefill_s >= 0


def test_no_replica_is_no_candidate() -> None:
    assert Fleet(0).ranked(prompt(1), 100, 0.0) == []
