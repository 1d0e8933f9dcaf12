"""Acts of hints: demotion, release and pins, with a request and without one, within the prefixes of their tenant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, hit, prefill, run
from cache.test_hints import Clock, fill, kept, make, prompt
from rootstock.cache import KVCache, Namespace
from rootstock.cache.families import Family
from rootstock.cache.keys import Scope
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.retention.hint_types import (
    MAX_ACTS,
    MAX_TOLD,
    ActKind,
    CacheHints,
    PrefixAct,
    RetentionWish,
    Verdict,
)
from rootstock.cache.tier_index import StoredIndex
from rootstock.testing.fake_runtime import FULL, STATE, window

each_kind = pytest.mark.parametrize("kind", ActKind)
OTHER = Namespace("weights", "float32", salt="other")


def act(
    kind: ActKind,
    tenant: str = "",
    session: str | None = None,
    retentions: tuple[RetentionWish, ...] = (),
    **fields: object,
) -> CacheHints:
    acts = (PrefixAct("act", kind, **fields),)  # type: ignore[arg-type]
    return CacheHints(tenant, session, "session", retentions=retentions, acts=acts, may_pin=True)


def apply(cache: KVCache, number: int, hints: CacheHints, tokens: int = 16) -> tuple[Verdict, str]:
    found = cache.apply_hints(prompt(number, tokens), NAMESPACE, hints)
    cache.check()
    return found[-1].verdict, found[-1].reason


def demoted(cache: KVCache, number: int, tokens: int = 16) -> list[tuple[int, int]]:
    """Returns the demoted ranges of a prompt's path."""
    reached = cache.tree.find(prompt(number, tokens), Scope(NAMESPACE))
    assert reached is not None
    path = [node for node in reached[0].path() if node.grant is not None and not node.grant.is_charged]
    return [(node.start, node.end) for node in reversed(path)]


# ---- without a request


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE), (FULL, window(5)), (FULL, window(5), STATE)])
def test_a_demoted_prefix_goes_before_older_ones(families: tuple[Family, ...]) -> None:
    clock = Clock()
    cache = make(clock, 24, *families)
    run(cache, prompt(2))
    clock.now += 10
    run(cache, prompt(1))
    assert apply(cache, 1, act(ActKind.DEMOTE))[0] is Verdict.ACCEPTED
    clock.now += 10
    for number in range(50, 70):
        if hit(cache, prompt(1, 17)) < 15:
            break
        run(cache, prompt(number))
    assert hit(cache, prompt(1, 17)) < 15 <= hit(cache, prompt(2, 17))


@pytest.mark.behaviour(27)
def test_a_use_ends_a_demotion() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1))
    apply(cache, 1, act(ActKind.DEMOTE))
    assert demoted(cache, 1) == [(0, 16)]
    run(cache, prompt(1))
    assert demoted(cache, 1) == []


@pytest.mark.behaviour(27)
def test_a_demotion_goes_on_to_the_answer_or_ends_with_its_range() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1, 24))  # of which 16 tokens are the prompt
    assert apply(cache, 1, act(ActKind.DEMOTE, start=4, end=10), 16)[0] is Verdict.ACCEPTED
    assert demoted(cache, 1, 24) == [(4, 10)]
    assert apply(cache, 1, act(ActKind.DEMOTE), 16)[0] is Verdict.ACCEPTED
    assert demoted(cache, 1, 24)[0][0] == 0
    assert demoted(cache, 1, 24)[-1][1] == 24


@pytest.mark.behaviour(27)
def test_a_demoted_prefix_is_written_to_the_tier_first() -> None:
    families = (FULL,)
    cache = KVCache(families, 10**6, 4, stored=StoredIndex(families, 4))
    run(cache, prompt(1))
    assert not cache.take_pending_plan().stores
    apply(cache, 1, act(ActKind.DEMOTE))
    assert len(cache.take_pending_plan().stores) == 4


@pytest.mark.behaviour(27)
def test_a_prefix_is_retained_without_a_request_as_far_as_it_is_cached() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1))
    assert apply(cache, 1, kept(300.0)) == (Verdict.ACCEPTED, "")
    assert apply(cache, 1, kept(300.0), 20) == (Verdict.CLIPPED, "16 of 20 tokens are cached")
    assert apply(cache, 1, kept(300.0, end=8), 20)[0] is Verdict.ACCEPTED
    assert apply(cache, 9, kept(300.0)) == (Verdict.REFUSED, "none of the prefix is cached")
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 15
    clock.now += 301
    fill(cache, clock, 70)
    assert hit(cache, prompt(1)) == 0


@pytest.mark.behaviour(27)
def test_a_release_ends_retention_and_the_pin() -> None:
    clock = Clock()
    cache = make(clock, 40)
    run(cache, prompt(1, 24), hints=kept(300.0))
    assert apply(cache, 1, act(ActKind.PIN), 16) == (Verdict.ACCEPTED, "")
    assert [pin.tokens for pin in cache.pins()] == [16]
    assert apply(cache, 1, act(ActKind.RELEASE, end=8), 16) == (Verdict.ACCEPTED, "")
    assert cache.pins()
    assert cache.stats().retained_bytes == 16 * cache.tree.token_bytes
    assert apply(cache, 1, act(ActKind.RELEASE), 16) == (Verdict.ACCEPTED, "")
    assert not cache.pins()
    assert cache.stats().retained_bytes == 0
    assert apply(cache, 1, act(ActKind.RELEASE), 16) == (Verdict.ACCEPTED, "")  # a second one changes nothing


@pytest.mark.behaviour(27)
def test_a_pin_covers_what_is_cached_within_the_share_of_its_tenant() -> None:
    cache = make(Clock(), 40, pinned_share=0.25)
    run(cache, prompt(1, 16))
    assert apply(cache, 1, act(ActKind.PIN), 24) == (Verdict.CLIPPED, "16 of 24 tokens are pinned")
    run(cache, prompt(2, 40))
    verdict, reason = apply(cache, 2, act(ActKind.PIN), 40)
    assert (verdict, "this tenant can pin" in reason) == (Verdict.REFUSED, True)
    unknown = replace(act(ActKind.PIN, end=4), may_pin=False)
    assert apply(cache, 2, unknown)[0] is Verdict.REFUSED
    apply(cache, 1, replace(act(ActKind.RELEASE), may_pin=False))
    assert len(cache.pins()) == 1  # no pin is released by a client that can have none


# ---- with a request


@pytest.mark.behaviour(27)
def test_acts_are_done_when_their_request_has_finished() -> None:
    cache = make(Clock(), 40)
    lease, _ = admit(cache, prompt(1), hints=act(ActKind.DEMOTE))
    prefill(cache, lease)
    assert lease.hint_outcomes == lease.act_outcomes == ()
    cache.release(lease, ReleaseReason.FINISHED)
    assert [each.verdict for each in lease.act_outcomes] == [Verdict.ACCEPTED]
    assert demoted(cache, 1) == [(0, 16)]
    run(cache, prompt(1), hints=act(ActKind.PIN))
    assert [pin.tokens for pin in cache.pins()] == [16]
    run(cache, prompt(1), hints=kept(300.0))
    run(cache, prompt(1), hints=act(ActKind.RELEASE))
    assert not cache.pins()
    assert cache.stats().retained_bytes == 0
    cache.check()


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("reason", [each for each in ReleaseReason if each is not ReleaseReason.FINISHED])
@each_kind
def test_a_request_that_does_not_finish_does_no_act(kind: ActKind, reason: ReleaseReason) -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1), hints=kept(300.0))
    lease, _ = admit(cache, prompt(1), hints=act(kind))
    prefill(cache, lease)
    cache.release(lease, reason)
    assert not cache.pins()
    assert not demoted(cache, 1)
    assert cache.stats().retained_bytes > 0
    cache.check()


# ---- prefixes of others


@pytest.mark.behaviour(27)
def test_a_running_request_of_another_client_keeps_its_place() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    lease, _ = admit(cache, prompt(1, 17))
    assert apply(cache, 1, act(ActKind.DEMOTE))[0] is Verdict.REFUSED
    assert not demoted(cache, 1)
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("kind", [ActKind.DEMOTE, ActKind.RELEASE])
def test_the_retention_of_another_tenant_or_session_stays(kind: ActKind) -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1), hints=kept(300.0, tenant="ann"))
    assert apply(cache, 1, act(kind, "bob"))[0] in (Verdict.REFUSED, Verdict.CLIPPED)
    assert cache.tree.ledger.bytes_of("ann") == 16 * cache.tree.token_bytes
    session = replace(kept(300.0, tenant="ann"), session="s")
    run(cache, prompt(2), hints=session)
    assert apply(cache, 2, act(kind, "ann"))[0] in (Verdict.REFUSED, Verdict.CLIPPED)
    assert apply(cache, 2, act(kind, "ann", "other"))[0] in (Verdict.REFUSED, Verdict.CLIPPED)
    assert cache.tree.ledger.bytes_of("ann") == 32 * cache.tree.token_bytes
    assert apply(cache, 2, act(kind, "ann", "s")) == (Verdict.ACCEPTED, "")
    assert cache.tree.ledger.bytes_of("ann") == 16 * cache.tree.token_bytes


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("kind", [ActKind.DEMOTE, ActKind.RELEASE])
def test_a_prefix_that_two_tenants_retain_is_ended_by_neither(kind: ActKind) -> None:
    cache = make(Clock(), 40)
    for tenant, seconds in (("ann", 300.0), ("bob", 500.0), ("ann", 400.0), ("bob", 500.0)):
        run(cache, prompt(1), hints=kept(seconds, tenant=tenant))
    for tenant in ("ann", "bob"):
        assert apply(cache, 1, act(kind, tenant))[0] in (Verdict.REFUSED, Verdict.CLIPPED)
    assert cache.stats().retained_bytes == 16 * cache.tree.token_bytes


@pytest.mark.behaviour(27)
def test_only_the_part_behind_the_last_branch_is_demoted() -> None:
    cache = make(Clock(), 60)
    shared, mine = prompt(1, 8), prompt(2, 8)
    run(cache, np.concatenate((shared, prompt(3, 8))))
    whole = np.concatenate((shared, mine))
    run(cache, whole)
    [outcome] = cache.apply_hints(whole, NAMESPACE, act(ActKind.DEMOTE))
    assert (outcome.verdict, outcome.reason[:15]) == (Verdict.CLIPPED, "8 of 16 tokens:")
    [outcome] = cache.apply_hints(whole, NAMESPACE, act(ActKind.DEMOTE, end=8))
    assert outcome.verdict is Verdict.REFUSED
    cache.check()


@pytest.mark.behaviour(27)
def test_the_private_part_of_a_session_is_named_by_the_session() -> None:
    cache = make(Clock(), 60)
    head, of_session = prompt(1, 8), CacheHints("ann", "s", "session")
    run(cache, np.concatenate((head, prompt(3, 8))), hints=CacheHints("ann", "t", "session"))
    for tail in (4, 5):
        run(cache, np.concatenate((head, prompt(2, 4), prompt(tail, 4))), hints=of_session)
    named = act(ActKind.DEMOTE, "ann", session=None)
    named = replace(named, acts=(replace(named.acts[0], session="s"),) * 2)
    whole = np.concatenate((head, prompt(2, 4), prompt(4, 4)))
    for tenant, name, expected in (
        ("bob", "s", "refused"),
        ("ann", "x", "refused"),
        ("ann", "s", "accepted"),
    ):
        hints = replace(named, tenant=tenant, acts=tuple(replace(one, session=name) for one in named.acts))
        found = cache.apply_hints(whole, NAMESPACE, hints)
        assert [each.verdict.value for each in found] == [expected] * 2
    ended = [node for root in cache.tree.roots.values() for node in root.children.values()]
    assert [node.grant is None or node.grant.is_charged for node in ended] == [True]  # the shared head
    assert demoted_tokens(cache) == 12


def demoted_tokens(cache: KVCache) -> int:
    grants = [(node.grant, node.end - node.start) for node in cache.tree.nodes()]
    return sum(tokens for grant, tokens in grants if grant is not None and not grant.is_charged)


@pytest.mark.behaviour(27)
def test_another_salts_prefix_is_not_found() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1), hints=kept(300.0))
    for kind in ActKind:
        [outcome] = cache.apply_hints(prompt(1), OTHER, act(kind))
        assert outcome.verdict is Verdict.REFUSED
    assert cache.stats().retained_bytes > 0


@pytest.mark.behaviour(27)
def test_a_public_head_is_not_demoted() -> None:
    cache = make(Clock(), 60)
    whole = np.concatenate((prompt(1, 8), prompt(2, 8)))
    private = Namespace("weights", "float32", salt="ann")
    lease = admit_scoped(cache, whole, private, 8)
    cache.release(lease, ReleaseReason.FINISHED)
    [outcome] = cache.apply_hints(whole, private, act(ActKind.DEMOTE, "ann"), public_tokens=8)
    assert (outcome.verdict, outcome.reason[:15]) == (Verdict.CLIPPED, "8 of 16 tokens:")
    [outcome] = cache.apply_hints(whole[:8], private, act(ActKind.DEMOTE, "ann"), public_tokens=8)
    assert outcome.verdict is Verdict.REFUSED
    cache.check()


def admit_scoped(cache: KVCache, tokens: np.ndarray, namespace: Namespace, public: int):  # type: ignore[no-untyped-def]
    answer = cache.admit(cache.match(tokens, namespace, public_tokens=public))
    prefill(cache, answer.lease)  # type: ignore[union-attr]
    return answer.lease  # type: ignore[union-attr]


# ---- bounds


@pytest.mark.behaviour(27)
def test_acts_beyond_their_number_are_refused() -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    acts = tuple(PrefixAct(f"act{at}", ActKind.DEMOTE, at % 16) for at in range(2 * MAX_TOLD))
    found = cache.apply_hints(prompt(1), NAMESPACE, CacheHints(acts=acts))
    assert len(found) == MAX_TOLD
    assert {each.verdict for each in found[MAX_ACTS:]} == {Verdict.REFUSED}
    counters = cache.stats()
    assert counters.accepted_hints + counters.clipped_hints + counters.refused_hints == MAX_TOLD
    cache.check()


@pytest.mark.behaviour(27)
@each_kind
def test_a_range_without_a_token_is_refused(kind: ActKind) -> None:
    cache = make(Clock(), 40)
    run(cache, prompt(1))
    if kind is not ActKind.PIN:
        for fields in ({"start": 16}, {"start": None}, {"start": 2**31}):
            assert apply(cache, 1, act(kind, **fields))[0] is Verdict.REFUSED
    assert apply(cache, 9, act(kind))[0] is Verdict.REFUSED
    assert apply(make(Clock(), 40, FULL), 1, act(kind))[0] is Verdict.REFUSED
