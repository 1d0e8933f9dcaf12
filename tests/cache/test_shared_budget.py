"""Several caches on one budget: never beyond it, and the least valuable entry of all goes first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.helpers import NAMESPACE, admit, clock, hit, ints, prefill, refused, run
from cache.test_hints import Clock, kept
from rootstock.cache import FullAttention, KVCache
from rootstock.cache.families import Family, RecurrentState, SlidingWindow
from rootstock.cache.lease import Admitted, Deferred, Lease, ReleaseReason
from rootstock.cache.retention.hint_types import HintOutcome, RetainedLimits, Verdict
from rootstock.cache.retention.pins import Pinned, PinRefused
from rootstock.cache.shared_budget import SharedBudget
from rootstock.errors import BudgetTooSmall

SIZE = 4
MODELS: list[tuple[Family, ...]] = [
    (FullAttention(1, 2),),
    (FullAttention(1, 5),),
    (FullAttention(1, 2), RecurrentState(1, 5)),
    (FullAttention(1, 2), SlidingWindow(1, 1, 6)),
    (RecurrentState(1, 7),),
]


def cache_of(
    budget: SharedBudget,
    *families: Family,
    now: Callable[[], float],
    price: float = 1.0,
    retained_share: float = 0.9,
) -> KVCache:
    share = budget.join()
    share.price = price
    return KVCache(families, budget.budget_bytes, SIZE, clock=now, share=share, retained_share=retained_share)


def pair(blocks: int, prices: tuple[float, float] = (1.0, 1.0)) -> tuple[SharedBudget, KVCache, KVCache]:
    """Two caches of equal models on one budget of so many blocks."""
    budget, now = SharedBudget(blocks * SIZE), clock()
    first, second = (cache_of(budget, FullAttention(1, 1), now=now, price=price) for price in prices)
    return budget, first, second


def prompt(first: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return ints(range(first, first + blocks * SIZE))


def test_memory_moves_to_the_model_that_is_used() -> None:
    budget, one, other = pair(8)
    run(one, prompt(0, 8))
    run(other, prompt(0, 6))
    assert hit(other, prompt(0, 7)) == 6 * SIZE
    assert hit(one, prompt(0, 9)) == 2 * SIZE, "its older blocks were worth less"
    assert budget.owned_bytes == budget.budget_bytes
    assert budget.moved_bytes == 6 * SIZE
    run(one, prompt(0, 8))
    assert hit(other, prompt(0, 7)) == 0


def test_what_saves_more_time_per_byte_stays_longer() -> None:
    """The second model's tokens are a hundred times as expensive: its older blocks outlive the first one's newer."""
    _, cheap, dear = pair(8, prices=(1.0, 100.0))
    run(dear, prompt(0, 4))
    run(cheap, prompt(0, 4))
    run(cheap, prompt(100, 4))
    assert hit(dear, prompt(0, 5)) == 4 * SIZE
    assert hit(cheap, prompt(0, 5)) == 0


@pytest.mark.parametrize("price", [1.0, 10.0])
def test_a_flood_of_new_prompts_to_one_model_leaves_another_its_prefixes(price: float) -> None:
    """The budget pays for the conversations and for a few prompts besides, of which many more come between two
    turns."""
    now = Clock()
    budget = SharedBudget(24 * SIZE)
    used, flooded = (cache_of(budget, FullAttention(1, 1), now=now, price=each) for each in (1.0, price))
    found = []
    for turn in range(400):
        for new in range(3):
            now.now += 1
            run(flooded, prompt(10_000 + 100 * (3 * turn + new), 4))
        found.append(hit(used, prompt(100 * (turn % 4), 5)) // SIZE)
        run(used, prompt(100 * (turn % 4), 4))
    assert sum(found[200:]) >= 0.95 * 200 * 4
    for cache in (used, flooded):
        cache.check()


def test_a_model_whose_prompts_are_asked_for_again_gets_memory_again() -> None:
    """It had only new prompts before. Evicted prefixes that are asked for count as those that are found."""
    now = Clock()
    budget = SharedBudget(24 * SIZE)
    one, other = (cache_of(budget, FullAttention(1, 1), now=now) for _ in range(2))
    for turn in range(200):
        now.now += 1
        run(one, prompt(10_000 + 100 * turn, 4))
        run(other, prompt(100 * (turn % 5), 4))
    assert hit(one, prompt(10_000 + 100 * 198, 5)) == 0
    for turn in range(200):
        now.now += 1
        run(one, prompt(100 * (turn % 2), 4))
        run(other, prompt(100 * (turn % 5), 4))
    assert hit(one, prompt(100, 5)) == hit(one, prompt(0, 5)) == 4 * SIZE


def test_the_chance_of_reuse_counts_tokens_and_not_prompts() -> None:
    """Many short new prompts leave a model whose long prompts are asked for again its value."""
    budget = SharedBudget(64 * SIZE)
    cache = cache_of(budget, FullAttention(1, 1), now=Clock())
    for turn in range(200):
        run(cache, prompt(0, 40))
        run(cache, prompt(10_000 + 10 * turn, 1))
    assert cache.share is not None
    assert cache.share.reuse > 0.9


def test_a_request_that_comes_back_after_a_preemption_is_no_reuse() -> None:
    budget = SharedBudget(16 * SIZE)
    cache = cache_of(budget, FullAttention(1, 1), now=Clock())
    assert cache.share is not None
    before = cache.share.reuse
    tokens = prompt(0, 4)
    run(cache, tokens)
    new = cache.share.reuse
    assert new < before
    admitted = cache.admit(cache.match(tokens, NAMESPACE), comes_back=True)
    assert isinstance(admitted, Admitted)
    assert cache.share.reuse == new
    cache.release(admitted.lease, ReleaseReason.FINISHED)


def test_rows_of_running_requests_stay_and_a_refused_admission_changes_nothing() -> None:
    _, one, other = pair(8)
    lease, _ = admit(one, prompt(0, 6))
    assert other.others_have_requests
    assert refused(other, prompt(0, 3)).available_bytes == 2 * SIZE
    run(other, prompt(0, 2))
    prefill(one, lease)
    one.release(lease, ReleaseReason.FINISHED)
    run(other, prompt(50, 3))
    assert not other.others_have_requests


def test_pins_of_all_models_together_stay_within_the_share() -> None:
    budget, now = SharedBudget(32 * SIZE), clock()
    caches = [cache_of(budget, FullAttention(1, 1), now=now) for _ in range(3)]
    for cache in caches:
        run(cache, prompt(0, 8))
    assert isinstance(caches[0].pin(prompt(0, 4), NAMESPACE, "a"), Pinned)
    caches[2].limit_retained(RetainedLimits({"a": 5 * SIZE}))
    assert isinstance(caches[2].pin(prompt(0, 2), NAMESPACE, "a"), PinRefused), (
        "a limit counts for all models"
    )
    assert isinstance(caches[1].pin(prompt(0, 4), NAMESPACE, "a"), Pinned)
    assert isinstance(caches[2].pin(prompt(0, 1), NAMESPACE, "b"), PinRefused)
    assert caches[2].drop_pin(), "a request of any model comes before a pin"
    assert isinstance(caches[2].pin(prompt(0, 1), NAMESPACE, "b"), Pinned)


# ------------------------------------------------------------------------------------------------ hints


def hinted(now: Clock, *prices: float) -> list[KVCache]:
    """Caches of equal models on a budget of 80 tokens, of which hints can retain 72."""
    budget = SharedBudget(20 * SIZE)
    return [cache_of(budget, FullAttention(1, 1), now=now, price=price) for price in prices or (1.0, 1.0)]


def retained(caches: list[KVCache]) -> list[int]:
    for cache in caches:
        cache.check()
    return [cache.stats().retained_bytes for cache in caches]


def only(lease: Lease) -> HintOutcome:
    (outcome,) = lease.hint_outcomes
    return outcome


@pytest.mark.behaviour(27)
def test_retained_prefixes_of_all_models_together_stay_within_the_share() -> None:
    caches = hinted(Clock())
    assert only(run(caches[0], prompt(0, 12), hints=kept(300.0))).verdict is Verdict.ACCEPTED
    outcome = only(run(caches[1], prompt(0, 8), hints=kept(300.0)))
    assert outcome.verdict is Verdict.CLIPPED
    assert "24 of 32 tokens" in outcome.reason
    assert retained(caches) == [48, 24]
    assert only(run(caches[1], prompt(500, 2), hints=kept(300.0))).verdict is Verdict.REFUSED


@pytest.mark.behaviour(27)
def test_the_limit_of_a_tenant_counts_for_all_models() -> None:
    caches = hinted(Clock())
    for cache in caches:
        cache.limit_retained(RetainedLimits({"a": 24}))
    run(caches[0], prompt(0, 4), hints=kept(300.0, tenant="a"))
    assert "8 of 16 tokens" in only(run(caches[1], prompt(0, 4), hints=kept(300.0, tenant="a"))).reason
    assert retained(caches) == [16, 8]


@pytest.mark.behaviour(27)
def test_running_requests_of_all_models_are_promised_no_more_than_the_share() -> None:
    caches = hinted(Clock())
    leases = [(cache, admit(cache, prompt(0, 9), hints=kept(300.0))[0]) for cache in caches]
    third, _ = admit(caches[0], prompt(500, 2), hints=kept(300.0))
    assert [only(lease).verdict for _, lease in leases] == [Verdict.ACCEPTED, Verdict.ACCEPTED]
    assert only(third).verdict is Verdict.REFUSED
    for cache, lease in [*leases, (caches[0], third)]:
        prefill(cache, lease)
        cache.release(lease, ReleaseReason.FINISHED)
    assert retained(caches) == [36, 36]


@pytest.mark.behaviour(27)
def test_the_tenants_of_all_models_divide_the_share() -> None:
    now = Clock()
    caches = hinted(now)
    run(caches[0], prompt(0, 1), hints=kept(300.0, tenant="other"))
    assert "36 of 48 tokens" in only(run(caches[1], prompt(0, 12), hints=kept(300.0, tenant="a"))).reason
    assert isinstance(caches[1].pin(prompt(0, 4), NAMESPACE, "a"), PinRefused), "of 20 tokens it has a half"
    now.now += 3601
    assert only(run(caches[1], prompt(500, 12), hints=kept(300.0, tenant="a"))).verdict is Verdict.ACCEPTED


@pytest.mark.behaviour(27)
def test_a_lower_priority_in_another_model_yields() -> None:
    caches = hinted(Clock())
    run(caches[0], prompt(0, 10), hints=kept(300.0))
    run(caches[1], prompt(0, 8), hints=kept(300.0, priority=2))
    assert only(run(caches[1], prompt(500, 8), hints=kept(300.0, priority=1))).verdict is Verdict.ACCEPTED
    assert retained(caches) == [0, 64]
    assert caches[0].stats().displaced_grants == 1


@pytest.mark.behaviour(27)
def test_of_the_entries_that_yield_the_one_that_saves_the_least_per_byte_goes_first() -> None:
    """The cheap model's entry was used later than the dear one's, and goes all the same."""
    now = Clock()
    caches = hinted(now, 100.0, 1.0, 1.0)
    for cache in caches[:2]:
        run(cache, prompt(0, 9), hints=kept(300.0))
        now.now += 1
    assert only(run(caches[2], prompt(0, 9), hints=kept(300.0, priority=1))).verdict is Verdict.ACCEPTED
    assert retained(caches) == [36, 0, 36]


@pytest.mark.behaviour(27)
def test_a_prefix_of_a_model_that_is_not_used_any_more_yields_and_expires() -> None:
    now = Clock()
    caches = hinted(now)
    run(caches[0], prompt(0, 18), hints=kept(300.0))
    assert only(run(caches[1], prompt(0, 2), hints=kept(300.0))).verdict is Verdict.REFUSED
    now.now += 200  # it is overdue: no request came within half of its time
    assert only(run(caches[1], prompt(500, 9), hints=kept(600.0))).verdict is Verdict.ACCEPTED
    assert retained(caches) == [0, 36]
    run(caches[0], prompt(0, 9), hints=kept(300.0))
    now.now += 301
    run(caches[1], prompt(500, 9), hints=kept(600.0))
    assert retained(caches) == [0, 36]
    assert caches[0].stats().expired_grants > 0, "a request to another model ends its time"


@pytest.mark.behaviour(27)
def test_the_tenant_with_the_most_gives_some_up_in_whichever_model_it_is() -> None:
    now = Clock()
    caches = hinted(now)
    run(caches[0], prompt(0, 18), hints=kept(300.0, tenant="a"))
    run(caches[1], prompt(0, 4), hints=kept(300.0, tenant="b"))
    assert retained(caches) == [0, 16], "the node is one: it goes as a whole"
    assert only(run(caches[1], prompt(500, 5), hints=kept(300.0, tenant="b"))).verdict is Verdict.ACCEPTED


@pytest.mark.behaviour(27)
def test_a_model_that_is_unloaded_retains_nothing() -> None:
    caches = hinted(Clock())
    one, other = caches
    run(one, prompt(0, 18), hints=kept(300.0))
    assert one.share is not None
    one.share.close()
    one.share.budget.leave(one.share)
    assert only(run(other, prompt(0, 18), hints=kept(300.0))).verdict is Verdict.ACCEPTED


@pytest.mark.behaviour(27)
def test_a_reset_cache_retains_nothing() -> None:
    caches = hinted(Clock())
    run(caches[0], prompt(0, 18), hints=kept(300.0))
    caches[0].reset()
    assert only(run(caches[1], prompt(0, 18), hints=kept(300.0))).verdict is Verdict.ACCEPTED
    assert retained(caches) == [0, 72]


# ------------------------------------------------------------------------------------------ memory


def test_a_protected_prefix_of_another_model_goes_last() -> None:
    _, one, other = pair(8)
    run(one, prompt(0, 4))
    protection = one.protect(one.match(prompt(0, 5), NAMESPACE))
    run(other, prompt(0, 4))
    run(other, prompt(100, 4))
    assert hit(one, prompt(0, 5)) == 4 * SIZE
    one.unprotect(protection)
    run(other, prompt(200, 4))
    assert hit(one, prompt(0, 5)) == 0


def test_a_closed_share_still_counts_and_gives_nothing() -> None:
    budget, one, other = pair(8)
    run(one, prompt(0, 6))
    assert one.share is not None
    one.share.close()
    assert refused(other, prompt(0, 3)).available_bytes == 2 * SIZE
    budget.leave(one.share)
    run(other, prompt(0, 8))
    assert hit(other, prompt(0, 9)) == 8 * SIZE


def test_free_rows_give_memory_back_when_another_cache_takes_it() -> None:
    budget, one, other = pair(8)
    settled: list[int] = []
    assert one.share is not None
    assert other.share is not None
    one.share.settle = lambda: settled.append(
        sum(len(part.rows) for part in one.take_pending_plan().returned)
    )
    run(one, prompt(0, 8))
    run(other, prompt(0, 5))
    assert budget.backed_bytes == 13 * SIZE
    assert not other.take_pending_plan().returned, "it has no free rows itself"
    other.share.settle_others()
    assert settled == [5]
    assert budget.backed_bytes == budget.budget_bytes


def test_a_budget_below_one_request_is_refused() -> None:
    budget = SharedBudget(7)
    with pytest.raises(BudgetTooSmall):
        cache_of(budget, FullAttention(1, 1), now=clock())


def test_a_reset_cache_has_a_share_again() -> None:
    budget, one, other = pair(8)
    run(one, prompt(0, 8))
    one.reset()
    assert budget.owned_bytes == 0
    run(one, prompt(0, 5))
    run(other, prompt(0, 8))
    assert hit(one, prompt(0, 6)) == 0
    assert budget.owned_bytes == budget.budget_bytes


@settings(max_examples=60, deadline=None)
@given(
    models=st.lists(st.sampled_from(MODELS), min_size=2, max_size=3),
    blocks=st.integers(8, 40),
    prices=st.lists(st.sampled_from([0.01, 0.5, 1.0, 30.0]), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_budget_holds_and_the_least_valuable_entry_of_all_goes_first(
    models: list[tuple[Family, ...]], blocks: int, prices: list[float], seed: int
) -> None:
    random, time = np.random.default_rng(seed), [0.0]
    budget = SharedBudget(blocks * 30)
    caches = [
        cache_of(budget, *families, now=lambda: time[0], price=price, retained_share=0.3)
        for families, price in zip(models, prices, strict=False)
    ]
    evictions = [0]

    def watch(cache: KVCache) -> None:
        evict = cache.tree.evict_least

        def watched(missing_bytes: int) -> None:
            evictions[0] += 1
            assert cache.share is not None
            least = cache.share.least_value()
            assert least is not None
            others = [each.share.least_value() for each in caches if each.share is not None]
            assert least == min(value for value in others if value is not None)
            evict(missing_bytes)

        cache.tree.evict_least = watched  # type: ignore[method-assign]

    for cache in caches:
        watch(cache)
    running: list[tuple[KVCache, Lease]] = []
    for _ in range(60):
        time[0] += float(random.exponential(5.0))
        cache = caches[random.integers(len(caches))]
        if running and random.random() < 0.4:
            held, lease = running.pop(random.integers(len(running)))
            held.release(lease, ReleaseReason.FINISHED)
        else:
            start = int(random.integers(4)) * 100
            tokens = ints(range(start, start + int(random.integers(1, 40))))
            hints = None
            if random.random() < 0.5:
                tenant = str(random.integers(3))
                hints = kept(
                    float(random.exponential(100.0)), priority=int(random.integers(3)), tenant=tenant
                )
            answer = cache.admit(cache.match(tokens, NAMESPACE), hints=hints)
            if isinstance(answer, Admitted):
                lease, done = answer.lease, True
                while done and lease.num_computed_tokens < lease.num_tokens:
                    end = min(lease.num_tokens, lease.next_checkpoint_position or lease.num_tokens)
                    done = not isinstance(cache.extend(lease, end - lease.num_computed_tokens), Deferred)
                    if done:
                        cache.commit(lease, lease.tokens[lease.num_computed_tokens : end].copy())
                running.append((cache, lease))
        for each in caches:
            each.check()
        assert budget.owned_bytes <= budget.budget_bytes
        assert sum(each.stats().retained_bytes for each in caches) <= 0.3 * budget.budget_bytes
    for held, lease in running:
        held.release(lease, ReleaseReason.FINISHED)
    for each in caches:
        each.check()
        assert not each.others_have_requests
