"""Checkpoints that outlive a long tool loop in little memory: the user turn's, the system's and the newest."""

from __future__ import annotations

import numpy as np
import pytest

from engine.tool_loops import FAMILIES, SYSTEM_TOKENS, VOCAB, Conversation, Loop, World, budget_bytes, play

LOOPS = [
    *(Loop(family, 30, room) for family in ("states", "windows", "chunked", "mixed") for room in (2, 3, 8)),
    *(Loop(family, 10, 4, turns=4) for family in ("states", "windows", "mixed")),
    *(Loop(family, 12, 4, turns=2, drops=False) for family in ("states", "windows")),
    *(Loop(family, 30, 4, marks=True) for family in ("states", "windows")),
    *(Loop(family, 30, 4, tokens_per_s=20.0) for family in ("states", "windows")),
    *(Loop(family, 30, 4, repeats=count) for family in ("states", "windows", "mixed") for count in (0, 2, 6)),
]


@pytest.mark.behaviour(24, 26)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_a_tool_loop_keeps_the_checkpoints_that_later_requests_resume_at(loop: Loop) -> None:
    found = play(loop)
    assert found.ratio >= 0.95, found
    assert found.least_of_a_round >= 0.95, found
    if loop.room >= 3:
        assert found.next_turn >= 0.95 * found.best_next_turn, found
        assert found.new_session >= 0.95 * found.best_new_session, found


def conversation(name: str, salt: str) -> Conversation:
    system = np.random.default_rng(list(salt.encode())).integers(0, VOCAB, SYSTEM_TOKENS).tolist()
    return Conversation(name, system, salt=salt)


@pytest.mark.behaviour(26)
@pytest.mark.parametrize("family", ["states", "windows", "mixed"])
def test_a_busy_agent_does_not_evict_a_person_who_reads(family: str) -> None:
    """The agent's pauses are far shorter than the person's, and so is the patience that the policy learns."""
    families = FAMILIES[family]
    world = World(families, budget_bytes(families, 2400, 8))
    person, agent = conversation("person", "a"), conversation("agent", "b")
    world.ask(person, person.user_turn())
    world.ask(agent, agent.user_turn())
    for _ in range(30):
        world.wait(4.0)
        world.ask(agent, agent.tool_turn())
    world.cache.check()
    assert world.matched(person, person.next_user_turn()) >= person.user_end - 1
    assert world.matched(person, person.new_session()) == SYSTEM_TOKENS
    assert world.matched(agent, agent.next_user_turn()) >= agent.user_end - 1


@pytest.mark.behaviour(33)
@pytest.mark.parametrize("family", ["states", "windows", "mixed"])
def test_abandoned_conversations_go_before_the_live_one(family: str) -> None:
    families = FAMILIES[family]
    world = World(families, budget_bytes(families, 1400, 4))
    old = [conversation(f"old {number}", f"tenant {number}") for number in range(6)]
    for each in old:
        world.ask(each, each.user_turn())
        world.wait(30.0)
    live = conversation("live", "live")
    world.ask(live, live.user_turn())
    for _ in range(12):
        world.wait(1.0)
        world.ask(live, live.tool_turn())
    assert world.matched(live, live.next_user_turn()) >= live.user_end - 1
    assert world.matched(live, live.new_session()) == SYSTEM_TOKENS
    assert world.matched(old[0], old[0].new_session()) == 0
