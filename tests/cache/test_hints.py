"""Retention by hints: time to live, priority, bounds for each tenant, and the outcomes that clients get."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, checkpoints, hit, ints, nodes, prefill, run
from rootstock.cache import FullAttention, KVCache, Namespace, RecurrentState
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.retention.hint_types import (
    MAX_RETENTIONS,
    MAX_TOLD,
    MAX_TTL_S,
    CacheHints,
    RetentionWish,
    Verdict,
)
from rootstock.testing.fake_runtime import FULL, STATE, window

OTHER = Namespace("weights", "float32", salt="other")
LARGE_STATE = RecurrentState(1, 64)  # that no checkpoint saves so many times that it stays as a foothold


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make(
    clock: Clock, blocks: int = 20, *families: Family, retained_share: float = 0.9, pinned_share: float = 0.25
) -> KVCache:
    families = families or (FullAttention(1, 1),)
    budget = blocks * sum(row_bytes(family, 4) for family in families)
    return KVCache(families, budget, 4, clock=clock, retained_share=retained_share, pinned_share=pinned_share)


def kept(
    ttl_s: float | None = None, end: int | None = None, priority: int = 0, tenant: str = ""
) -> CacheHints:
    return CacheHints(tenant, retentions=(RetentionWish("field", end, ttl_s, priority),))


def prompt(number: int, tokens: int = 16) -> np.ndarray:
    """Returns a prompt that shares no token with those of other numbers."""
    return ints(range(1000 * number, 1000 * number + tokens))


def fill(cache: KVCache, clock: Clock, first: int = 50, prompts: int = 6) -> None:
    """Runs new prompts without hints, one a second, which together take the whole cache."""
    for number in range(first, first + prompts):
        clock.now += 1
        run(cache, prompt(number))


@pytest.mark.behaviour(27)
def test_a_prefix_within_its_time_to_live_is_evicted_after_all_others() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0))
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15
    assert hit(cache, prompt(50)) == 0


@pytest.mark.behaviour(27)
def test_without_a_hint_it_would_have_been_evicted() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1))
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 0


@pytest.mark.behaviour(27)
def test_after_its_time_to_live_it_has_its_ordinary_rank() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0))
    clock.now += 301
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 0
    assert cache.stats().expired_grants == 1
    assert cache.stats().retained_bytes == 0


@pytest.mark.behaviour(27)
def test_each_use_starts_the_time_to_live_anew_also_one_without_hints() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0))
    for _ in range(4):
        clock.now += 200
        run(cache, prompt(1))
    clock.now += 200
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15


@pytest.mark.behaviour(27)
def test_a_long_answer_does_not_use_up_the_time_to_live() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0))
    lease, _ = admit(cache, prompt(1))
    clock.now += 1000
    fill(cache, clock, prompts=4)
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    clock.now += 200
    fill(cache, clock, 70)
    assert hit(cache, prompt(1)) == 15


@pytest.mark.behaviour(27)
def test_only_the_marked_prefix_is_retained() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0, end=10))
    assert [(node.start, node.end, node.grant is not None) for node in nodes(cache)] == [
        (0, 10, True),
        (10, 16, False),
    ]
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 10


@pytest.mark.behaviour(27)
def test_without_an_end_the_answer_is_retained_as_well() -> None:
    clock = Clock()
    cache = make(clock)
    answer = ints(range(5000, 5008))
    run(cache, prompt(1), answer, hints=kept(300.0))
    fill(cache, clock)
    assert hit(cache, np.concatenate((prompt(1), answer, ints(1)))) == 24


@pytest.mark.behaviour(27)
def test_of_retained_prefixes_the_lower_priority_goes_first() -> None:
    clock = Clock()
    cache = make(clock, 10)
    run(cache, prompt(1), hints=kept(300.0, priority=5))
    clock.now += 1
    run(cache, prompt(2), hints=kept(300.0, priority=-5))
    clock.now += 1
    run(cache, prompt(3, 20))
    assert hit(cache, prompt(1)) == 15
    assert hit(cache, prompt(2)) < 15


@pytest.mark.behaviour(27)
def test_priorities_order_prefixes_without_a_time_to_live() -> None:
    clock = Clock()
    cache = make(clock, 12)
    run(cache, prompt(1), hints=kept(priority=1))
    run(cache, prompt(2))
    clock.now += 10
    run(cache, prompt(3), hints=kept(priority=-1))
    run(cache, prompt(4))
    assert [hit(cache, prompt(number)) for number in (1, 2, 3)] == [15, 15, 0]


@pytest.mark.behaviour(27)
def test_a_request_without_hints_ends_a_priority_below_the_ordinary_one() -> None:
    clock = Clock()
    cache = make(clock, 12)
    run(cache, prompt(1), hints=kept(priority=-1))
    clock.now += 1
    run(cache, prompt(1))
    assert nodes(cache)[0].grant is None


@pytest.mark.behaviour(27)
def test_a_later_hint_never_shortens_a_promise() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(3600.0))
    run(cache, prompt(1), hints=kept(10.0))
    clock.now += 3000
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15


@pytest.mark.behaviour(27)
def test_a_hit_of_a_retained_prefix_that_runs_out_of_memory_is_still_evictable() -> None:
    """A retained prefix is a wish: running requests get its memory if nothing else is left."""
    clock = Clock()
    cache = make(clock, 10)
    run(cache, prompt(1, 32), hints=kept(300.0))
    lease, _ = admit(cache, prompt(2, 40))
    assert hit(cache, prompt(1, 32)) == 0
    assert cache.stats().evicted_retained_tokens == 32
    explained = cache.explain(prompt(1, 32), NAMESPACE)
    assert explained.cap == "evicted"
    assert explained.lost_although_retained
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(27)
def test_explain_tells_the_retention_of_a_found_prefix_and_its_loss() -> None:
    clock = Clock()
    cache = make(clock, 12)
    run(cache, prompt(1, 8))
    run(cache, np.concatenate((prompt(1, 8), prompt(2, 24))), hints=kept(300.0, priority=3))
    clock.now += 100
    found = cache.explain(np.concatenate((prompt(1, 8), prompt(2, 24))), NAMESPACE).retention
    assert found is not None
    assert (found.lasts_s, found.priority, found.is_pinned) == (200.0, 3, False)
    lease, _ = admit(cache, prompt(3, 32))
    explained = cache.explain(np.concatenate((prompt(1, 8), prompt(2, 24))), NAMESPACE)
    assert explained.cap == "evicted"
    assert explained.lost_although_retained
    assert "A hint retained them" in explained.message
    assert explained.of_the_prompt().retention is None
    assert not explained.of_the_prompt().lost_although_retained
    cache.release(lease, ReleaseReason.ABORTED)


# ------------------------------------------------------------------------------------------- outcomes


def outcome(cache: KVCache, hints: CacheHints, tokens: int = 16) -> tuple[Verdict, str]:
    lease = run(cache, prompt(1, tokens), hints=hints)
    (only,) = lease.hint_outcomes
    return only.verdict, only.reason


@pytest.mark.behaviour(27)
def test_a_hint_that_fits_is_accepted() -> None:
    assert outcome(make(Clock()), kept(300.0)) == (Verdict.ACCEPTED, "")


@pytest.mark.behaviour(27)
@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        (kept(MAX_TTL_S + 1), "24 hours"),
        (kept(300.0, priority=101), "priorities go from"),
        (kept(300.0, end=17), "the prompt has 16 tokens"),
    ],
)
def test_a_hint_beyond_a_limit_is_clipped_to_it(hints: CacheHints, reason: str) -> None:
    verdict, why = outcome(make(Clock()), hints)
    assert verdict is Verdict.CLIPPED
    assert reason in why


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("hints", [kept(0.0), kept(-1.0), kept(math.nan), kept(300.0, end=0)])
def test_a_hint_without_a_meaning_is_refused(hints: CacheHints) -> None:
    cache = make(Clock())
    verdict, why = outcome(cache, hints)
    assert verdict is Verdict.REFUSED
    assert why
    assert cache.stats().retained_bytes == 0


@pytest.mark.behaviour(27)
def test_an_endless_time_to_live_is_clipped() -> None:
    clock = Clock()
    cache = make(clock)
    assert outcome(cache, kept(math.inf))[0] is Verdict.CLIPPED
    clock.now += MAX_TTL_S + 1
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 0


@pytest.mark.behaviour(27)
def test_hints_beyond_their_number_are_refused() -> None:
    cache = make(Clock())
    many = CacheHints(retentions=tuple(RetentionWish(f"field{i}", 4, 300.0) for i in range(2 * MAX_TOLD)))
    lease = run(cache, prompt(1), hints=many)
    verdicts = [each.verdict for each in lease.hint_outcomes]
    assert verdicts == [Verdict.ACCEPTED] * MAX_RETENTIONS + [Verdict.REFUSED] * (MAX_TOLD - MAX_RETENTIONS)


@pytest.mark.behaviour(27)
def test_without_a_prefix_cache_every_hint_is_refused() -> None:
    cache = KVCache([FullAttention(1, 1)], 80, 4, reuse=False)
    assert outcome(cache, kept(300.0))[0] is Verdict.REFUSED


# -------------------------------------------------------------------------------------------- tenants


@pytest.mark.behaviour(27)
def test_a_prefix_beyond_the_share_of_its_tenant_is_clipped_to_it() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.5)  # 40 tokens
    lease = run(cache, prompt(1, 60), hints=kept(300.0))
    (only,) = lease.hint_outcomes
    assert only.verdict is Verdict.CLIPPED
    assert "40 of 60 tokens" in only.reason
    assert cache.stats().retained_bytes == 40
    fill(cache, clock)
    assert hit(cache, prompt(1, 60)) == 40


@pytest.mark.behaviour(27)
def test_a_share_that_is_full_refuses_more_until_something_is_overdue() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)  # 32 tokens
    run(cache, prompt(1, 32), hints=kept(300.0))
    lease = run(cache, prompt(2, 16), hints=kept(300.0))
    assert [each.verdict for each in lease.hint_outcomes] == [Verdict.REFUSED]
    clock.now += 200
    lease = run(cache, prompt(3, 16), hints=kept(300.0))
    assert [each.verdict for each in lease.hint_outcomes] == [Verdict.ACCEPTED]
    assert cache.stats().displaced_grants == 1


@pytest.mark.behaviour(27)
def test_a_higher_priority_takes_the_place_of_a_lower_one_in_the_share() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)
    run(cache, prompt(1, 32), hints=kept(300.0))
    lease = run(cache, prompt(2, 16), hints=kept(300.0, priority=1))
    assert [each.verdict for each in lease.hint_outcomes] == [Verdict.ACCEPTED]
    fill(cache, clock)
    assert hit(cache, prompt(2)) == 15


@pytest.mark.behaviour(27)
def test_active_tenants_divide_the_share() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.8)  # 64 tokens
    other = Namespace("weights", "float32", salt="other")
    run(cache, prompt(1, 8), namespace=other, hints=kept(300.0, tenant="other"))
    lease = run(cache, prompt(2, 48), hints=kept(300.0, tenant="greedy"))
    assert "32 of 48 tokens" in lease.hint_outcomes[0].reason
    clock.now += 3601  # the other tenant is not active any more
    lease = run(cache, prompt(3, 48), hints=kept(300.0, tenant="greedy"))
    assert lease.hint_outcomes[0].verdict is Verdict.ACCEPTED


@pytest.mark.behaviour(27)
def test_requests_without_hints_count_as_one_more_tenant() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.8)
    run(cache, prompt(1, 8), namespace=Namespace("weights", "float32", salt="other"))
    lease = run(cache, prompt(2, 48), hints=kept(300.0, tenant="greedy"))
    assert "32 of 48 tokens" in lease.hint_outcomes[0].reason


@pytest.mark.behaviour(27)
def test_the_rest_of_a_tenant_whose_share_is_full_goes_before_the_prefixes_of_others() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)  # 16 tokens each
    other = Namespace("weights", "float32", salt="other")
    run(cache, prompt(1, 16), namespace=other)
    for number in range(2, 12):
        clock.now += 1
        run(cache, prompt(number, 16), hints=kept(300.0, priority=100, tenant="greedy"))
    assert hit(cache, prompt(1, 16), other) == 15
    assert cache.stats().retained_bytes == 16


@pytest.mark.behaviour(27)
def test_running_requests_of_a_tenant_are_promised_no_more_than_its_share() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)
    leases = [admit(cache, prompt(number, 16), hints=kept(300.0))[0] for number in (1, 2, 3)]
    verdicts = [lease.hint_outcomes[0].verdict for lease in leases]
    assert verdicts == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.REFUSED]
    for lease in leases:
        prefill(cache, lease)
        cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    assert cache.stats().retained_bytes == 32


@pytest.mark.behaviour(27)
def test_a_prefix_that_two_tenants_retain_is_paid_for_once() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=kept(300.0, tenant="a"))
    run(cache, prompt(1), hints=kept(3600.0, tenant="b"))
    assert cache.stats().retained_bytes == 16
    clock.now += 1000
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15


# -------------------------------------------------------------------------------------------- families


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("families", [(FULL, STATE), (FULL, window(5)), (FULL, window(5), STATE)])
def test_a_retained_prefix_can_be_resumed_in_every_family(families: tuple[Family, ...]) -> None:
    clock = Clock()
    cache = make(clock, 24, *families)
    run(cache, prompt(1), hints=kept(300.0, end=8), boundaries={8: "mark"})
    for number in range(50, 70):
        clock.now += 1
        run(cache, prompt(number, 12))
    assert hit(cache, prompt(1)) == 8
    assert checkpoints(cache)[8].is_retained


@pytest.mark.behaviour(27)
def test_a_checkpoint_that_its_conversation_has_passed_is_not_retained() -> None:
    clock = Clock()
    cache = make(clock, 60, FULL, LARGE_STATE)
    first = run(cache, prompt(1), ints(range(500, 508)), hints=kept(300.0))
    assert checkpoints(cache)[24].is_retained
    run(cache, np.concatenate((first.tokens, prompt(2))), ints(range(600, 608)), hints=kept(300.0))
    held = checkpoints(cache)
    assert held[max(held)].is_retained
    assert not held[24].is_retained


# -------------------------------------------------------------------------------- the tree's operations


@pytest.mark.behaviour(27)
def test_the_accounts_follow_splits_and_evictions() -> None:
    clock = Clock()
    cache = make(clock, 20)
    run(cache, prompt(1, 16), hints=kept(300.0))
    run(cache, np.concatenate((prompt(1, 9), prompt(2, 8))), hints=kept(300.0))
    assert cache.stats().retained_bytes == 24
    cache.forget(prompt(1, 16), NAMESPACE, 9)
    cache.check()
    assert cache.stats().retained_bytes == 17
    cache.clear()
    cache.check()
    assert cache.stats().retained_bytes == 0


@pytest.mark.behaviour(27)
def test_a_discarded_lease_retains_nothing() -> None:
    cache = make(Clock())
    lease, _ = admit(cache, prompt(1), hints=kept(300.0))
    prefill(cache, lease)
    cache.discard(lease)
    cache.check()
    assert cache.stats().retained_bytes == 0


@pytest.mark.behaviour(27)
def test_a_reset_forgets_all_retention() -> None:
    cache = make(Clock())
    run(cache, prompt(1), hints=kept(300.0))
    admit(cache, prompt(2), hints=kept(300.0))
    cache.reset()
    cache.check()
    assert cache.stats().retained_bytes == 0


@pytest.mark.behaviour(27)
def test_a_preempted_request_keeps_its_prefix() -> None:
    clock = Clock()
    cache = make(clock)
    lease, _ = admit(cache, prompt(1), hints=kept(300.0))
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.PREEMPTED)
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15


@pytest.mark.behaviour(27)
def test_the_heaps_of_the_ledger_drop_stale_entries() -> None:
    clock = Clock()
    cache = make(clock)
    for _ in range(2000):
        clock.now += 1
        run(cache, prompt(1), hints=kept(300.0))
    assert len(cache.tree.ledger.expiry._heap) < 200
    assert all(len(account.heap) < 200 for account in cache.tree.ledger._accounts.values())


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("rivals", [1, 4])
@pytest.mark.parametrize("priority", [0, 100, 2**31 - 1])
@pytest.mark.parametrize("ttl_s", [None, 3600.0, MAX_TTL_S, math.inf])
def test_tenants_whose_every_request_has_hints_do_not_starve_one_without(
    ttl_s: float | None, priority: int, rivals: int
) -> None:
    """The prefix of a tenant that asks for nothing is found, however much the others want to keep."""
    clock = Clock()
    cache = make(clock, 60, retained_share=0.8)
    run(cache, prompt(1), namespace=OTHER)
    for number in range(80):  # they fill the cache five times
        clock.now += 1
        tenant = f"tenant {number % rivals}"
        namespace = Namespace("weights", "float32", salt=tenant)
        hints = CacheHints(tenant, retentions=(RetentionWish("field", None, ttl_s, priority),))
        run(cache, prompt(10 + number), hints=hints, namespace=namespace)
        if number % 2 == 1:
            run(cache, prompt(1), namespace=OTHER)
            assert hit(cache, prompt(1), namespace=OTHER) == 15, number
    cache.check()


@pytest.mark.behaviour(26)
@pytest.mark.parametrize("kind", ["mark", "user", "tool"])
@pytest.mark.parametrize("families", [(FULL, LARGE_STATE), (FULL, window(8))], ids=["state", "window"])
def test_a_conversation_that_goes_on_retains_no_spent_checkpoints(
    families: tuple[Family, ...], kind: str
) -> None:
    """Retained ones go after all others, and their bytes take the place of newer ones in the tenant's share."""
    cache = make(Clock(), 400, *families)
    history = list(range(40))
    for number in range(5):
        boundaries = {20: "system", 40: "user"} | ({len(history): kind} if number else {})
        answer = range(100 * number + 100, 100 * number + 108)
        run(cache, ints(history), ints(answer), boundaries=boundaries, hints=kept(3000.0))
        history = [*history, *answer, *range(100 * number + 120, 100 * number + 132)]
    told = {at: (each.is_spent, each.is_retained) for at, each in checkpoints(cache).items()}
    assert {at for at, (is_spent, _) in told.items() if is_spent} >= {48, 68, 88, 108}
    assert {retained for _, retained in told.values()} == {True, False}
    assert not [at for at, each in told.items() if all(each)]
    cache.check()
