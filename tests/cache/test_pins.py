"""Pinned prefixes: kept until they are released, within bounds that leave running requests room."""

from __future__ import annotations

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, hit, ints, prefill, refused, run
from cache.test_hints import Clock, fill, kept, make, prompt
from rootstock.cache import KVCache, Namespace
from rootstock.cache.families import Family
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.retention.pins import MAX_PINS, Pinned, PinRefused
from rootstock.testing.fake_runtime import FULL, STATE, window

OTHER = Namespace("weights", "float32", salt="other")


def pinned(cache: KVCache, number: int, tokens: int = 16, tenant: str = "") -> Pinned:
    found = cache.pin(prompt(number, tokens), NAMESPACE, tenant)
    assert isinstance(found, Pinned), found
    cache.check()
    return found


def refusal(cache: KVCache, number: int, tokens: int = 16, tenant: str = "") -> str:
    found = cache.pin(prompt(number, tokens), NAMESPACE, tenant)
    assert isinstance(found, PinRefused), found
    cache.check()
    return found.reason


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE), (FULL, window(5)), (FULL, window(5), STATE)])
def test_a_pinned_prefix_is_not_evicted_before_it_is_released(families: tuple[Family, ...]) -> None:
    clock = Clock()
    cache = make(clock, 24, *families)
    run(cache, prompt(1), boundaries={15: "mark"})
    pin = pinned(cache, 1)
    assert pin.tokens == 16 - (cache.pools.states is not None)
    for first in (50, 60, 70):
        fill(cache, clock, first, 8)
    assert hit(cache, np.append(prompt(1), np.int32(7))) == pin.tokens
    assert cache.release_pin(pin.id)
    assert not cache.release_pin(pin.id)
    cache.check()
    cache.clear()
    assert cache.pool.free_blocks == cache.pool.total_blocks


@pytest.mark.behaviour(27)
def test_available_rows_are_still_free_and_cached_rows_exactly() -> None:
    cache = make(Clock(), 20)
    run(cache, prompt(1))
    pin = pinned(cache, 1)
    assert cache.pool.free_blocks + cache.pool.cached_blocks == 16
    refused(cache, prompt(2, 68))
    lease, _ = admit(cache, prompt(2, 64))
    cache.release(lease, ReleaseReason.ABORTED)
    cache.release_pin(pin.id)
    lease, _ = admit(cache, prompt(2, 80))
    cache.release(lease, ReleaseReason.ABORTED)
    cache.check()


@pytest.mark.behaviour(27)
def test_a_prefix_that_ends_inside_a_block_is_pinned_to_its_token() -> None:
    clock = Clock()
    cache = make(clock, 24)
    run(cache, prompt(1, 16))
    pin = pinned(cache, 1, 10)
    run(cache, np.concatenate((prompt(1, 10), prompt(2, 10))))
    fill(cache, clock, prompts=12)
    assert hit(cache, prompt(1, 16)) == 10
    cache.release_pin(pin.id)
    cache.check()


@pytest.mark.behaviour(27)
def test_as_much_as_is_cached_is_pinned() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1, 16))
    pin = pinned(cache, 1, 24)
    assert (pin.tokens, pin.asked_tokens) == (16, 24)


@pytest.mark.behaviour(27)
def test_a_hybrid_pins_the_deepest_position_that_it_can_resume_at() -> None:
    cache = make(Clock(), 40, FULL, STATE)
    run(cache, prompt(1, 16), boundaries={9: "mark"})
    assert pinned(cache, 1, 12).tokens == 9


@pytest.mark.behaviour(27)
def test_a_prefix_that_is_not_cached_is_refused() -> None:
    assert "warm it" in refusal(make(Clock()), 1)
    assert "switched off" in refusal(KVCache((FULL,), 4096, 4, reuse=False), 1)


@pytest.mark.behaviour(27)
def test_pinning_a_prefix_again_gives_the_same_pin() -> None:
    cache = make(Clock())
    run(cache, prompt(1))
    first = pinned(cache, 1)
    assert pinned(cache, 1) is first
    assert cache.stats().pins == 1
    assert cache.stats().pinned_bytes == 16


@pytest.mark.behaviour(27)
def test_the_pins_of_a_tenant_are_bounded() -> None:
    cache = make(Clock(), 20)  # 20 tokens can be pinned
    run(cache, prompt(1))
    run(cache, prompt(2))
    pin = pinned(cache, 1)
    assert "can pin 20, of which 16 are in use" in refusal(cache, 2)
    cache.release_pin(pin.id)
    pinned(cache, 2)


@pytest.mark.behaviour(27)
def test_active_tenants_divide_what_can_be_pinned() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1), hints=kept(1.0, tenant="a"))
    run(cache, prompt(2), hints=kept(1.0, tenant="b"), namespace=OTHER)
    pinned(cache, 1, tenant="a")
    run(cache, prompt(3), hints=kept(1.0, tenant="a"))
    assert "can pin 20" in refusal(cache, 3, tenant="a")


@pytest.mark.behaviour(27)
def test_all_pins_together_are_bounded_and_the_reason_tells_nothing_of_others() -> None:
    cache = make(Clock(), 20)
    run(cache, prompt(1))
    run(cache, prompt(2))
    pinned(cache, 1, tenant="a")
    reason = refusal(cache, 2, tenant="b")
    assert "16" not in reason


@pytest.mark.behaviour(27)
def test_the_number_of_pins_is_bounded() -> None:
    cache = make(Clock(), 2 * MAX_PINS * MAX_PINS, pinned_share=1.0)
    tokens = ints(range(MAX_PINS + 2))
    run(cache, tokens)
    for end in range(1, MAX_PINS + 1):
        assert isinstance(cache.pin(tokens[:end], NAMESPACE), Pinned)
    assert isinstance(cache.pin(tokens, NAMESPACE), PinRefused)
    cache.clear()
    cache.check()


@pytest.mark.behaviour(27)
def test_a_tenant_releases_and_lists_its_own_pins_only() -> None:
    cache = make(Clock(), 80)
    run(cache, prompt(1))
    pin = pinned(cache, 1, tenant="a")
    assert cache.pins("b") == []
    assert not cache.release_pin(pin.id, "b")
    assert cache.pins("a") == cache.pins() == [pin]
    assert cache.release_pin(pin.id, "a")


@pytest.mark.behaviour(27)
def test_a_pin_is_no_use_and_no_hit() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    before = cache.stats()
    pinned(cache, 1)
    after = cache.stats()
    assert (after.admissions, after.hit_tokens, after.leases) == (before.admissions, before.hit_tokens, 0)


@pytest.mark.behaviour(27)
def test_clearing_a_namespace_ends_its_pins_and_no_others() -> None:
    cache = make(Clock(), 80)
    run(cache, prompt(1))
    run(cache, prompt(2), namespace=OTHER)
    pinned(cache, 1)
    there = cache.pin(prompt(2), OTHER, "b")
    assert isinstance(there, Pinned)
    cache.clear(NAMESPACE)
    cache.check()
    assert cache.pins() == [there]
    cache.clear()
    cache.check()
    assert cache.pins() == []
    assert cache.pool.free_blocks == cache.pool.total_blocks


@pytest.mark.behaviour(27)
def test_a_prefix_found_to_be_wrong_loses_its_pin() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    pinned(cache, 1)
    cache.forget(prompt(1), NAMESPACE, 4)
    cache.check()
    assert cache.pins() == []
    assert hit(cache, prompt(1)) == 0


@pytest.mark.behaviour(27)
def test_a_reset_drops_all_pins() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    pin = pinned(cache, 1)
    cache.reset()
    assert cache.pins() == []
    assert not cache.release_pin(pin.id)


@pytest.mark.behaviour(27)
def test_explain_tells_that_a_prefix_is_pinned() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    pinned(cache, 1)
    found = cache.explain(prompt(1), NAMESPACE).retention
    assert found is not None
    assert found.is_pinned


@pytest.mark.behaviour(27)
def test_a_request_can_be_computed_on_a_pinned_prefix() -> None:
    cache = make(Clock(), 40, FULL, STATE)
    run(cache, prompt(1))
    pin = pinned(cache, 1)
    lease, _ = admit(cache, np.concatenate((prompt(1), prompt(2, 5))))
    assert lease.hit_tokens == 15
    cache.release_pin(pin.id)
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
