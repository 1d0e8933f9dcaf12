"""Admission by session: who is held, for how long, and who goes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.helpers import GREEDY, Client, numbers
from rootstock.cache import KVCache
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.retention.hint_types import CacheHints
from rootstock.config import EngineConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Event, Failed, Finished
from rootstock.engine.sequence import Phase
from rootstock.engine.stats import SessionStats
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.errors import EngineFault, SessionsFull
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime

BLOCK = 4
PROMPT = 40  # tokens of a session's first prompt
MOST_WAIT_S = 100.0


class Agents:
    """An engine with memory for `sessions` prompts, whose clock a test moves."""

    def __init__(
        self,
        sessions: float,
        *,
        families: tuple[Family, ...] = (FULL,),
        wait_s: float = MOST_WAIT_S,
        held: int = 9,
        disk: Path | None = None,
        queue_bytes: int = 1 << 24,
        step_s: float = 0.0,
    ) -> None:
        self.now, self._step_s = 0.0, step_s
        self.fails = False
        runtime = FakeRuntime(97, families=families, eos_token_ids=(), fault=self._forward)
        size = sum(row_bytes(family, BLOCK) for family in families) * PROMPT / BLOCK
        tier = TierConfig() if disk is None else TierConfig(disk, 1 << 24, queue_bytes=queue_bytes)
        stored = stored_index(runtime, tier, BLOCK)
        budget = int(sessions * size / 0.9)
        self.cache = KVCache(families, budget, BLOCK, clock=lambda: self.now, stored=stored)
        runtime.allocate(self.cache.rows, BLOCK)
        config = EngineConfig(max_session_wait_s=wait_s, max_held=held, idle_work=False, seed=1)
        connector = open_below(runtime, self.cache, tier, config.chunk_tokens, lambda: self.now)
        self.engine = Engine(runtime, self.cache, config, clock=lambda: self.now, tier_connector=connector)
        self.history: dict[str, list[int]] = {}

    def _forward(self, _batch: Batch) -> None:
        self.now += self._step_s
        if self.fails:
            raise EngineFault(RuntimeError("on purpose"))

    def ask(
        self,
        session: str | None,
        answer: int = 2,
        tenant: str = "",
        ends: bool = False,
        parent: str | None = None,
        prompt: int = PROMPT,
    ) -> Client:
        """Sends the next turn of a session."""
        name = f"{tenant}/{session}"
        seed = sum(map(ord, name))
        before = self.history.setdefault(name, [])
        before += numbers(seed + len(before), 2) if before else numbers(seed, prompt)
        hints = None if session is None else CacheHints(tenant, session, "session", ends, parent=parent)
        client = Client(before, answer, sampling=GREEDY, hints=hints, salt=tenant)

        def sink(event: Event) -> None:
            client.events.append(event)
            if isinstance(event, Finished):
                before.extend(client.tokens)

        self.engine.submit(client.request, sink)
        return client

    def answer(self, session: str | None, tenant: str = "", ends: bool = False) -> Client:
        client = self.ask(session, tenant=tenant, ends=ends)
        self.run(client)
        return client

    def run(self, *clients: Client) -> None:
        """Runs steps until these requests have ended, and checks the invariants after each."""
        for _ in range(10_000):
            if all(client.events and isinstance(client.events[-1], Finished) for client in clients):
                return
            self.step()
        raise AssertionError("a request does not end")

    def step(self) -> None:
        is_stalled = self.engine.steps.is_stalled and self.engine.scheduler.has_work
        self.engine.step(self.engine.next_command() if is_stalled else None)
        self.engine.scheduler.check()
        self.cache.check()

    @property
    def stats(self) -> SessionStats:
        found = self.engine.stats().sessions
        assert found is not None
        return found

    def is_held(self, client: Client) -> bool:
        return any(
            sequence.request is client.request and sequence.phase is Phase.HELD
            for sequence in self.engine.scheduler.sequences()
        )


def full(agents: Agents, *sessions: str) -> Client:
    """Fills the memory with sessions that are expected back, while another request runs. Returns that one."""
    for session in sessions:
        agents.answer(session)
    running = agents.ask(sessions[0], answer=30)
    agents.step()
    return running


@pytest.mark.behaviour(51)
def test_a_new_session_is_held_while_the_working_set_needs_the_memory() -> None:
    agents = Agents(2.5)
    running = full(agents, "a", "b")
    held = agents.ask("c")
    agents.step()
    assert agents.is_held(held)
    assert agents.engine.stats().phases[Phase.HELD] == agents.stats.held == 1
    agents.run(running)
    assert agents.is_held(held)
    agents.run(held)  # nothing else runs
    assert agents.stats.admitted == {"idle": 1}
    assert isinstance(held.events[-1], Finished)


@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE)], ids=["full", "states"])
def test_with_a_tier_new_sessions_enter_and_evicted_ones_are_loaded(
    families: tuple[Family, ...], tmp_path: Path
) -> None:
    agents = Agents(2.5, families=families, disk=tmp_path)
    running = full(agents, "a", "b")
    agents.run(agents.ask("c"))
    assert not agents.stats.admitted, "it was not held"
    agents.run(running)
    returned = agents.answer("b")
    assert returned.cached_tokens >= PROMPT - 2
    assert agents.cache.counters.loaded_tokens > 0
    agents.engine.stop()


def test_a_tier_that_loses_sessions_lets_no_new_ones_in(tmp_path: Path) -> None:
    agents = Agents(2.5, disk=tmp_path, queue_bytes=1)  # nothing is stored
    running = full(agents, "a", "b")
    agents.run(agents.ask("c"))
    active, new = agents.ask("b"), agents.ask("d")
    agents.step()
    assert agents.is_held(active), "the tier does not have its prefix"
    assert agents.is_held(new), "the active sessions compete"
    agents.run(running, active, new)
    agents.engine.stop()


def test_the_turns_of_sessions_with_their_prefix_pass() -> None:
    agents = Agents(2.5)
    full(agents, "a", "b")
    agents.ask("c")
    turn = agents.ask("b")
    agents.step()
    assert not agents.is_held(turn)
    agents.run(turn)


@pytest.mark.behaviour(51)
@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE)], ids=["full", "hybrid"])
@pytest.mark.parametrize("sessions", [1, 2, 3, 5])
def test_nobody_is_held_below_full_memory(sessions: int, families: tuple[Family, ...]) -> None:
    agents = Agents(2.0 * sessions + 2, families=families)
    for _ in range(3):
        clients = [agents.ask(str(each), answer=6) for each in range(sessions)]
        agents.run(*clients)
        agents.now += 500.0
    assert agents.stats.admitted == {}


@pytest.mark.behaviour(51)
def test_requests_without_a_session_are_never_held() -> None:
    agents = Agents(2.5)
    full(agents, "a", "b")
    alone = agents.ask(None)
    agents.step()
    assert not agents.is_held(alone)


@pytest.mark.parametrize("ends", [True, False], ids=["by a hint", "by its pause"])
def test_a_session_that_ends_gives_its_place(ends: bool) -> None:
    agents = Agents(2.5)
    running = full(agents, "a", "b")
    held = agents.ask("c")
    agents.step()
    assert agents.is_held(held)
    if ends:
        agents.run(agents.ask("b", ends=True))
    else:
        agents.now += MOST_WAIT_S - 1  # more than the pause that is expected first and one deviation
    agents.step()
    agents.step()
    assert not agents.is_held(held)
    assert agents.stats.admitted == {"room": 1}
    agents.run(running, held)


@pytest.mark.behaviour(51)
def test_no_request_is_held_longer_than_its_bound() -> None:
    agents = Agents(2.5, wait_s=10.0)
    running = full(agents, "a", "b")
    held = agents.ask("c")
    agents.step()
    agents.now += 8.9
    agents.step()
    assert agents.is_held(held)
    agents.now += 1.1
    agents.step()
    assert agents.stats.admitted == {"overdue": 1}
    agents.run(running, held)
    end = held.events[-1]
    assert isinstance(end, Finished)
    assert end.usage.held_s == pytest.approx(10.0)


@pytest.mark.behaviour(51)
@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE)], ids=["full", "hybrid"])
@pytest.mark.parametrize("held", [2, 5, 9])
def test_all_that_reach_their_bound_are_held_no_longer(held: int, families: tuple[Family, ...]) -> None:
    agents = Agents(2.0, wait_s=10.0, families=families)
    running = full(agents, "a", "b")
    together = [agents.ask(f"new {number}") for number in range(held)]
    agents.step()
    assert all(map(agents.is_held, together))
    agents.now += 10.0
    agents.step()
    assert not any(map(agents.is_held, together))
    agents.run(running, *together)
    assert all(event.usage.held_s == 10.0 for client in together for event in client.events[-1:])


def test_after_a_long_wait_the_session_that_was_active_longest_is_a_new_one() -> None:
    agents = Agents(2.5, wait_s=10.0)
    running = full(agents, "a", "b")
    held = agents.ask("c")
    agents.step()
    agents.now += 10.0
    agents.run(running, held)
    active = {session.name for session in agents.cache.working_set.sessions("") if session.is_active}
    assert active == {"b", "c"}


def test_sessions_that_were_active_go_before_new_ones() -> None:
    agents = Agents(2.5)
    full(agents, "a", "b")
    agents.now += 200.0  # "b" is not expected soon any more, but goes on
    running = agents.ask("c", answer=60)  # takes the place of "b"
    agents.step()
    agents.run(agents.ask("a"))
    new, active = agents.ask("d"), agents.ask("b")
    agents.step()
    assert agents.is_held(new)
    assert agents.is_held(active)
    agents.run(running)
    agents.step()
    assert agents.is_held(new)
    assert not agents.is_held(active)
    agents.run(new, active)


def test_a_session_that_works_for_an_active_one_goes_before_new_ones() -> None:
    agents = Agents(2.5)
    running = full(agents, "a", "b")
    new, child = agents.ask("c"), agents.ask("d", parent="b")
    agents.step()
    assert agents.is_held(new)
    assert agents.is_held(child)
    agents.run(running)
    agents.step()
    assert agents.is_held(new)
    assert not agents.is_held(child)
    agents.run(new, child)


def test_a_tenant_within_its_part_of_the_memory_is_not_held() -> None:
    agents = Agents(4.5)
    for each in "abcd":
        agents.answer(each, tenant="large")
    agents.ask("a", answer=30, tenant="large")
    agents.step()
    large, small = agents.ask("e", tenant="large"), agents.ask("a", tenant="small")
    agents.step()
    assert agents.is_held(large)
    assert not agents.is_held(small)


def test_further_requests_are_refused_when_as_many_as_allowed_are_held() -> None:
    agents = Agents(2.5, held=1)
    full(agents, "a", "b")
    held = agents.ask("c")
    agents.step()
    assert agents.is_held(held)
    with pytest.raises(SessionsFull, match="--max-held"):
        agents.ask("d")
    agents.ask(None)  # has no session


def test_a_request_that_finds_no_room_holds_no_smaller_one_back() -> None:
    agents = Agents(4.5)
    running = full(agents, "a", "b", "c", "d")
    large = agents.ask("large", tenant="other", prompt=4 * PROMPT)
    agents.step()
    assert agents.is_held(large)
    agents.run(agents.ask("c", ends=True), agents.ask("d", ends=True))
    small = agents.ask("e")
    agents.step()
    agents.step()
    assert agents.is_held(large)
    assert not agents.is_held(small)
    agents.run(running, small, large)


def test_a_burst_is_held_up_to_the_bound_and_each_tenant_has_its_part() -> None:
    agents = Agents(2.5, held=4)
    full(agents, "a", "b")
    burst = [agents.ask(f"of a {number}") for number in range(6)]
    agents.step()
    failed = [client for client in burst if client.events]
    assert len(failed) == 2
    assert all(isinstance(client.events[-1], Failed) for client in failed)
    agents.ask("b")  # has its place
    with pytest.raises(SessionsFull):
        agents.ask("g")


def test_a_short_request_beside_a_conversation_leaves_its_session_as_it_is() -> None:
    agents = Agents(4.5)
    agents.answer("a")
    (before,) = agents.cache.working_set.sessions("")
    agents.history["/a"], kept = [], agents.history["/a"]
    agents.run(agents.ask("a", prompt=6))
    agents.history["/a"] = kept
    (after,) = agents.cache.working_set.sessions("")
    assert after.size_bytes == before.size_bytes
    assert after.is_expected


def test_held_requests_can_be_aborted_and_fail_with_the_engine() -> None:
    agents = Agents(2.5)
    running = full(agents, "a", "b")
    first, second = agents.ask("c"), agents.ask("d")
    agents.step()
    agents.engine.abort(first.request.id)
    agents.step()
    assert isinstance(first.events[-1], Aborted)
    agents.engine.steps.restart(RuntimeError("on purpose"))
    assert isinstance(second.events[-1], Failed)
    assert isinstance(running.events[-1], Failed)
    assert not agents.engine.scheduler.has_work
    agents.answer("e")


def test_the_prefill_of_lost_tokens_is_counted_for_their_session() -> None:
    agents = Agents(1.5, wait_s=0.0, step_s=2.0)
    found = [agents.answer(session).cached_tokens for session in ("a", "b", "a")][-1]
    lost, other = (
        next(each for each in agents.cache.working_set.sessions("") if each.name == name) for name in "ab"
    )
    known = PROMPT + 1  # with the first answer but for its last token
    assert lost.lost_tokens == known - found > 0
    assert lost.lost_s == pytest.approx(2.0 * (known - found) / (PROMPT + 4 - found))  # of one forward
    assert (other.lost_tokens, other.lost_s) == (0, 0.0)
    assert lost.queued_s == 0.0


def test_without_a_wait_there_is_no_gate() -> None:
    agents = Agents(2.5, wait_s=0.0)
    full(agents, "a", "b")
    client = agents.ask("c")
    agents.step()
    assert not agents.is_held(client)
    assert agents.engine.stats().sessions is None
