"""Sessions: the pauses that the cache learns, the retention that follows them, and the end of a session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, checkpoints, hit, ints, nodes, prefill, run
from cache.test_hints import Clock, fill, make, prompt
from rootstock.cache import KVCache
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.retention.hint_types import CacheHints, RetentionWish, Verdict
from rootstock.cache.retention.sessions import (
    FIRST_PAUSE_S,
    LEAST_SESSION_TTL_S,
    MAX_SESSION_TTL_S,
    MAX_SESSIONS,
    MAX_TENANTS,
    Pauses,
    SessionTable,
)
from rootstock.cache.types import Tokens
from rootstock.testing.fake_runtime import FULL, STATE


def of_session(name: str = "agent", *, ends: bool = False, tenant: str = "") -> CacheHints:
    return CacheHints(tenant, name, "session", ends)


def turn(number: int, upto: int) -> Tokens:
    """Returns the first `upto` tokens of a conversation."""
    return prompt(number, upto)


def converse(
    cache: KVCache, clock: Clock, number: int, name: str, ends: Sequence[int], pause_s: float
) -> None:
    """Runs the turns of a session, with a pause after each."""
    for upto in ends:
        run(cache, turn(number, upto), hints=of_session(name))
        clock.now += pause_s


@pytest.mark.behaviour(27)
def test_the_retention_of_a_session_follows_its_pauses() -> None:
    """A session whose tool takes ten minutes is kept for more than ten minutes, without a time to live."""
    clock = Clock()
    cache = make(clock)
    converse(cache, clock, 1, "agent", (8, 12, 16, 20), 600)
    fill(cache, clock, prompts=5)
    assert hit(cache, turn(1, 24)) == 20
    clock.now += 3600
    fill(cache, clock, 80)
    assert hit(cache, turn(1, 24)) == 0


@pytest.mark.behaviour(27)
def test_a_session_hint_has_an_outcome() -> None:
    cache = make(Clock())
    (only,) = run(cache, prompt(1), hints=of_session()).hint_outcomes
    assert (only.field, only.verdict) == ("session", Verdict.ACCEPTED)


@pytest.mark.behaviour(27)
def test_within_a_share_the_session_that_comes_back_soonest_is_kept() -> None:
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)  # room for one of them
    converse(cache, clock, 1, "slow", (8, 16, 24, 28), 600)
    converse(cache, clock, 2, "quick", (8, 16, 24, 28), 10)
    run(cache, turn(1, 28), hints=of_session("slow"))
    fill(cache, clock)
    assert hit(cache, turn(2, 29)) == 28
    assert hit(cache, turn(1, 29)) < 28


@pytest.mark.behaviour(27)
def test_the_end_of_a_session_demotes_what_only_the_session_has_used() -> None:
    clock = Clock()
    cache = make(clock, 24)
    system = prompt(9, 8)
    run(cache, np.concatenate((system, prompt(1, 8))), hints=of_session())
    run(cache, np.concatenate((system, prompt(2, 8))), hints=of_session("other"))
    run(cache, prompt(3, 16))  # older than the end of the session, and not used again
    clock.now += 1
    run(cache, np.concatenate((system, prompt(1, 12))), hints=of_session(ends=True))
    run(cache, prompt(4, 64))
    assert hit(cache, prompt(3, 16)) == 15
    assert hit(cache, np.concatenate((system, prompt(2, 9)))) == 16
    assert hit(cache, np.concatenate((system, prompt(1, 12)))) == 8
    assert cache.stats().sessions == 1


@pytest.mark.behaviour(27)
def test_a_retention_hint_of_the_last_request_outlives_its_session() -> None:
    clock = Clock()
    cache = make(clock)
    ending = CacheHints("", "agent", "session", True, (RetentionWish("field", 8, 300.0),))
    run(cache, prompt(1), hints=ending)
    fill(cache, clock)
    assert hit(cache, prompt(1)) == 8


@pytest.mark.behaviour(27)
def test_a_request_of_another_session_takes_a_demoted_prefix_up() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1), hints=of_session(ends=True))
    run(cache, prompt(1))
    assert all(node.grant is None for node in nodes(cache))


@pytest.mark.behaviour(27)
def test_equal_session_names_of_two_tenants_are_two_sessions() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1, 8), hints=of_session(tenant="a"))
    run(cache, prompt(1, 12), hints=of_session(tenant="b"))
    assert cache.stats().sessions == 2
    run(cache, prompt(1, 12), hints=of_session(tenant="b", ends=True))
    assert {(node.start, node.end): node.session for node in nodes(cache)}[0, 8] == 0
    fill(cache, clock)
    assert hit(cache, prompt(1, 12)) == 8


@pytest.mark.behaviour(27)
def test_a_running_request_of_the_session_keeps_its_prefix() -> None:
    clock = Clock()
    cache = make(clock)
    run(cache, prompt(1, 8), hints=of_session())
    lease, _ = admit(cache, prompt(1, 16), hints=of_session())
    run(cache, np.concatenate((prompt(1, 8), prompt(2, 4))), hints=of_session(ends=True))
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()


@pytest.mark.behaviour(27)
def test_the_end_of_a_session_demotes_its_checkpoints() -> None:
    clock = Clock()
    cache = make(clock, 24, FULL, STATE)
    run(cache, prompt(1), ints(range(700, 704)), hints=of_session(ends=True))
    assert checkpoints(cache)
    assert all(at.grant is not None and not at.grant.is_charged for at in checkpoints(cache).values())


@pytest.mark.behaviour(27)
def test_a_preemption_is_no_pause() -> None:
    clock = Clock()
    cache = make(clock)
    lease, _ = admit(cache, prompt(1), hints=of_session())
    cache.release(lease, ReleaseReason.PREEMPTED)
    clock.now += 5
    run(cache, prompt(1), hints=of_session())
    clock.now += 100
    lease, _ = admit(cache, prompt(1), hints=of_session())
    session = cache._sessions.find("", "agent")
    assert session is not None
    assert session.pauses.seconds.count == 1
    assert session.pauses.expected(0.0).mean_s == pytest.approx(100.0)
    assert session.id == lease.session
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(27)
def test_a_refused_admission_begins_no_session() -> None:
    cache = make(Clock(), 4)
    match = cache.match(prompt(1, 32), NAMESPACE)
    assert cache.admit(match, hints=of_session()).__class__.__name__ == "Deferred"
    assert cache.stats().sessions == 0


@pytest.mark.behaviour(27)
def test_pauses_are_estimated_by_mean_and_deviation() -> None:
    pauses = Pauses()
    assert pauses.expected(0.0).mean_s == pytest.approx(FIRST_PAUSE_S)
    for pause_s in (100.0, 200.0, 100.0, 200.0):
        pauses.learn(pause_s, 0.0)
    expected = pauses.expected(0.0)
    assert 100 < expected.mean_s < expected.near_s < 200
    assert 2 * expected.mean_s < expected.ttl_s < 8 * expected.mean_s
    pauses.learn(40_000.0, 0.0)  # one night does not count for all tool calls
    assert pauses.expected(0.0).mean_s < 600
    for _ in range(50):
        pauses.learn(1e9, 0.0)
    assert pauses.expected(0.0).ttl_s == MAX_SESSION_TTL_S
    for _ in range(500):
        pauses.learn(0.0, 0.0)
    assert pauses.expected(0.0).ttl_s == LEAST_SESSION_TTL_S


@pytest.mark.behaviour(27)
def test_a_pause_is_expected_as_a_part_of_the_time_to_live_that_the_client_asks_for() -> None:
    pauses = Pauses()
    assert pauses.expected(600.0).mean_s == pytest.approx(300.0)
    for ttl_s in (100.0, 1000.0, 400.0):
        pauses.learn(0.25 * ttl_s, ttl_s)
    assert pauses.expected(2000.0).mean_s == pytest.approx(500.0)
    assert pauses.expected(0.0).mean_s == pytest.approx((25 * 250 * 100) ** (1 / 3))
    pauses.learn(1e5, 5e-324)
    assert pauses.expected(100.0).mean_s < 1e4
    pauses.learn(0.0, 5e-324)


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("slow", [1, 2])
def test_of_two_sessions_the_one_with_the_longer_call_loses_its_place(slow: int) -> None:
    """Both sessions have had equal pauses. For its next call, one asks for a longer time to live than the other."""
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)  # room for one of them

    def ask(number: int, upto: int, ttl_s: float) -> None:
        kept = (RetentionWish("ttl", ttl_s=ttl_s),)
        hints = CacheHints("", f"agent {number}", "session", retentions=kept)
        run(cache, turn(number, upto), hints=hints)

    for upto in (8, 16, 24):
        ask(1, upto, 400.0)
        ask(2, upto, 400.0)
        clock.now += 200
    ask(1, 28, 2000.0 if slow == 1 else 200.0)
    ask(2, 28, 2000.0 if slow == 2 else 200.0)
    fill(cache, clock)
    assert hit(cache, turn(3 - slow, 29)) == 28
    assert hit(cache, turn(slow, 29)) < 28


@pytest.mark.behaviour(27)
def test_a_new_session_is_expected_to_pause_like_those_of_its_tenant() -> None:
    sessions = SessionTable()
    for now in (0.0, 300.0, 600.0):
        known = sessions.begin("a", "known", now)
        sessions.end(known.id, now, comes_back=False)
    new = sessions.begin("a", "new", 700.0)
    assert sessions.expected("a", new).mean_s == pytest.approx(300.0)
    foreign = sessions.begin("b", "new", 700.0)
    assert sessions.expected("b", foreign).mean_s == pytest.approx(FIRST_PAUSE_S)


@pytest.mark.behaviour(27)
def test_a_session_that_does_not_come_back_yields_to_one_that_does() -> None:
    """A session that ended without a word is not kept for as long as a running one, however short its pauses were."""
    clock = Clock()
    cache = make(clock, 20, retained_share=0.4)  # room for one of them
    converse(cache, clock, 1, "quick", (8, 16, 24, 28), 10)
    for upto in (8, 16, 24):
        clock.now += 60
        run(cache, turn(2, upto), hints=of_session("slow"))
    fill(cache, clock)
    assert hit(cache, turn(2, 25)) == 24
    assert hit(cache, turn(1, 29)) < 28


@pytest.mark.behaviour(27)
def test_the_rest_of_an_overdue_retention_is_kept() -> None:
    """A time to live that a client has asked for lasts, if nothing that is expected sooner needs the room."""
    clock = Clock()
    cache = make(clock)
    for upto in (8, 12, 16):
        hints = CacheHints("", "agent", "session", retentions=(RetentionWish("ttl", ttl_s=600.0),))
        run(cache, turn(1, upto), hints=hints)
        clock.now += 10
    clock.now += 400
    fill(cache, clock)
    assert hit(cache, turn(1, 20)) == 16
    clock.now += MAX_SESSION_TTL_S
    fill(cache, clock, first=80)
    assert hit(cache, turn(1, 20)) == 0


@pytest.mark.behaviour(27)
def test_a_late_session_of_a_tenant_that_tells_its_ends_has_not_ended() -> None:
    sessions = SessionTable()
    for name in ("first", "second"):
        sessions.begin("a", name, 0.0)
    late = sessions.find("a", "second")
    assert late is not None
    unsure = sessions.expected("a", late)
    assert unsure.near_s < unsure.ttl_s
    sessions.forget("a", "first")
    sure = sessions.expected("a", late)
    assert sure.near_s == sure.ttl_s == unsure.ttl_s


@pytest.mark.behaviour(27)
def test_the_number_of_sessions_is_bounded_for_each_tenant() -> None:
    sessions = SessionTable()
    first = sessions.begin("a", "0", 0.0)
    sessions.begin("b", "0", 0.0)
    for number in range(1, MAX_SESSIONS + 1):
        sessions.begin("a", str(number), 0.0)
    assert sessions.find("a", "0") is None
    assert sessions.find("b", "0") is not None
    assert len(sessions) == MAX_SESSIONS + 1
    sessions.end(first.id, 1.0, comes_back=False)  # dropped meanwhile
    for number in range(2 * MAX_TENANTS):
        sessions.begin(f"tenant {number}", "0", 0.0)
    assert len(sessions) == MAX_TENANTS


@pytest.mark.behaviour(27)
def test_the_number_of_all_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenants with the oldest requests lose sessions first, also one whose last session has ended."""
    monkeypatch.setattr("rootstock.cache.retention.sessions.MAX_ALL_SESSIONS", 6)
    sessions = SessionTable()
    sessions.begin("ended", "0", 0.0)
    sessions.forget("ended", "0")
    for tenant in ("old", "new"):
        for number in range(4):
            sessions.begin(tenant, str(number), 0.0)
    assert len(sessions) == 6
    assert [sessions.find("old", str(number)) is not None for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert all(sessions.find("new", str(number)) for number in range(4))


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("hinted", [True, False], ids=["with hints", "without"])
def test_a_conversation_whose_answer_calls_no_tool_is_evicted_before_one_that_goes_on(hinted: bool) -> None:
    clock = Clock()
    cache = make(clock, 20)
    for number, name in enumerate(("calls", "answers"), start=1):
        clock.now += 1
        run(cache, turn(number, 24), hints=of_session(name) if hinted else None)
    cache.end_turn(turn(2, 24), NAMESPACE)
    clock.now += 1
    run(cache, turn(9, 40))
    assert hit(cache, turn(1, 25)) > hit(cache, turn(2, 25))
    cache.check()


@pytest.mark.behaviour(27)
def test_a_conversation_that_goes_on_after_its_answer_is_an_ordinary_one() -> None:
    clock = Clock()
    cache = make(clock, 40)
    run(cache, turn(1, 24))
    cache.end_turn(turn(1, 24), NAMESPACE)
    assert [node.grant is not None for node in nodes(cache)] == [True]
    run(cache, turn(1, 28))
    assert not any(node.grant for node in nodes(cache))


@pytest.mark.behaviour(27)
def test_the_end_of_a_turn_changes_nothing_where_a_prompt_has_several_answers_or_is_gone() -> None:
    cache = make(Clock(), 40)
    for end in (1, 2):
        run(cache, np.append(turn(1, 16), [end, end]).astype(np.int32))
    cache.end_turn(turn(1, 16), NAMESPACE)
    cache.end_turn(turn(5, 16), NAMESPACE)
    assert not any(node.grant for node in nodes(cache))
