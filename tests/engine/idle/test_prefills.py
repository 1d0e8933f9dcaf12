"""Idle prefills on the oracle runtime: what they cache, what they leave alone, and how they make way for requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Families, numbers, of_kinds
from engine.tiered import KINDS, PROMPT, Tiered
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.engine.idle.prefills import (
    MAX_AGE_S,
    MOST_OF_OWNER,
    OWNER_SHARE,
    IdleEnd,
    IdleKind,
    IdlePrefill,
    IdlePrefills,
)
from rootstock.errors import EngineStopped, IdleWorkFull, IdleWorkOff, InvalidParameter, PromptTooLong
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, window
from tiers.helpers import Clock

FAMILIES: list[Families] = [(FULL,), (FULL, STATE), (FULL, window(6)), (window(6), STATE)]
kinds = of_kinds(FAMILIES)


class Idle(Bench):
    """An engine with idle work, which a test runs piece by piece."""

    def __init__(self, **options: Any) -> None:
        super().__init__(idle_work=True, **options)
        self.ends: list[IdleEnd] = []

    @property
    def prefills(self) -> IdlePrefills:
        assert self.engine.parts.idle_prefills is not None
        return self.engine.parts.idle_prefills

    def warm(
        self, tokens: Sequence[int], kind: IdleKind = IdleKind.WARM, salt: str = "", **more: Any
    ) -> None:
        more.setdefault("owner", "someone")
        self.engine.prefill_in_idle_time(
            IdlePrefill(kind, np.array(tokens, np.int32), salt, ended=self.ends.append, **more)
        )
        self.engine.step()  # runs the command

    def idle(self, pieces: int | None = None) -> None:
        """Does so many pieces of idle work, or all."""
        done = 0
        while self.engine.parts.idle_work.has_work and (pieces is None or done < pieces):
            self.engine.work_idly()
            self.cache.check()
            done += 1


@kinds
def test_a_warm_prompt_is_a_hit_and_its_answer_is_the_same(families: Families) -> None:
    bench = Idle(families=families, chunk_tokens=16)
    prompt = numbers(1, 70)
    bench.warm(prompt)
    bench.idle()
    assert bench.ends == [IdleEnd.CACHED]
    client = bench.answer([*prompt, 5, 6], 5)
    bench.expect(client)
    assert client.cached_tokens == len(prompt)
    stats = bench.engine.stats()
    assert stats.cache.leases == 0
    assert stats.idle is not None
    assert stats.idle.computed_tokens == stats.cache.idle_tokens == stats.cache.idle_hit_tokens == len(prompt)
    assert stats.idle.ended == {"warm": {"cached": 1}}
    assert stats.cache.asked_tokens == len(prompt) + 2, "idle work counts as a request"


@kinds
@pytest.mark.parametrize("pieces", range(1, 7))
def test_a_request_is_admitted_at_the_next_step_and_uses_the_part_that_is_computed(
    families: Families, pieces: int
) -> None:
    bench = Idle(families=families, chunk_tokens=16)
    prompt, other = numbers(2, 80), numbers(3, 20)
    bench.warm(prompt)
    bench.idle(pieces)
    computed = bench.prefills.idle_stats().computed_tokens
    clients = [bench.ask(other, 3), bench.ask([*prompt, 1], 3)]
    before = len(bench.batches)
    bench.engine.step()
    assert len(bench.batches) == before + 1
    assert {len(segment.tokens) + segment.past for segment in bench.batches[-1].segments} & {16, 20}, (
        "the request was not part of the first step"
    )
    bench.run()
    bench.expect(*clients)
    assert clients[1].cached_tokens == computed
    bench.idle()
    assert bench.ends == [IdleEnd.CACHED]


def test_pieces_are_short_by_predicted_time() -> None:
    clock = Clock()

    def slow(batch: Batch) -> None:
        clock.now_s += 0.004 + 0.0002 * batch.new_tokens

    bench = Idle(clock=clock, fault=slow, chunk_tokens=512, blocks=2000)
    bench.warm(numbers(4, 3000), owner=None)
    bench.idle()
    sizes = [batch.new_tokens for batch in bench.batches]
    assert sizes[0] == 16
    assert max(sizes) <= 80, "a chunk took longer than 20 ms"
    assert min(sizes[3:-1]) >= 40, "chunks stay too short"
    idle = bench.engine.stats().idle
    assert idle is not None
    assert idle.longest_step_s <= 0.0205


@of_kinds([(FULL,), (FULL, STATE)])
def test_idle_work_evicts_only_what_is_colder_than_itself(families: Families) -> None:
    bench = Idle(families=families, blocks=40, chunk_tokens=16)
    hot = [numbers(10 + i, 30) for i in range(3)]
    for prompt in hot:
        bench.answer(prompt, 1)
    cached = bench.cache.stats().cached_tokens
    bench.warm(numbers(20, 150), owner=None)
    bench.idle()
    assert bench.ends == [IdleEnd.NO_MEMORY]
    assert bench.cache.stats().cached_tokens == cached
    for prompt in hot:
        assert bench.answer([*prompt, 1], 1).cached_tokens > 0


def test_idle_work_takes_the_place_of_old_entries() -> None:
    ticks = Clock()
    bench = Idle(blocks=40, chunk_tokens=16)
    bench.cache._clock = bench.cache.tree._clock = lambda: ticks.now_s
    bench.answer(numbers(10, 100), 1)
    ticks.now_s += 1000.0
    bench.answer(numbers(11, 30), 1)
    bench.warm(numbers(20, 110), owner=None)
    bench.idle()
    assert bench.ends == [IdleEnd.CACHED]
    assert bench.answer([*numbers(11, 30), 1], 1).cached_tokens == 30, "the new entry was evicted"


def test_requests_evict_idle_work_that_nothing_used_before_their_own_prefixes() -> None:
    bench = Idle(blocks=40, chunk_tokens=16)
    own = numbers(30, 60)
    bench.answer(own, 1)
    bench.warm(numbers(31, 60), owner=None)
    bench.idle()
    bench.answer(numbers(32, 60), 1)
    stats = bench.cache.stats()
    assert stats.idle_evicted_tokens > 0
    assert bench.answer([*own, 1], 1).cached_tokens == 60


@kinds
def test_a_salt_has_its_own_idle_work(families: Families) -> None:
    bench = Idle(families=families)
    prompt = numbers(5, 40)
    bench.warm(prompt, salt="a")
    bench.idle()
    assert bench.answer([*prompt, 1], 3).cached_tokens == 0
    assert bench.answer([*prompt, 1], 3, salt="a").cached_tokens == 40


@kinds
def test_clearing_drops_the_prefill_in_progress_and_those_that_wait(families: Families) -> None:
    bench = Idle(families=families, chunk_tokens=16)
    first, second = numbers(6, 80), numbers(7, 80)
    bench.warm(first, salt="a")
    bench.warm(second, salt="a")
    bench.warm(second, salt="b")
    bench.idle(3)
    bench.engine.clear_cache("a")
    assert bench.ends == [IdleEnd.CLEARED, IdleEnd.CLEARED]
    bench.idle()
    assert bench.ends[2:] == [IdleEnd.CACHED]
    assert bench.answer([*first, 1], 1, salt="a").cached_tokens == 0
    bench.engine.clear_cache()
    assert bench.cache.stats().cached_tokens == 0


def test_bounds_of_one_tenant_leave_room_for_others() -> None:
    bench = Idle(blocks=100)
    for i in range(MOST_OF_OWNER):
        bench.warm([i % 97, 1, 2])
    with pytest.raises(IdleWorkFull) as refused:
        bench.warm([1, 2, 3])
    assert refused.value.http_status == 429
    bench.warm([1, 2, 3], owner="another")


def test_one_tenants_unused_idle_work_fills_no_more_than_its_share() -> None:
    bench = Idle(blocks=100, block_size=4, chunk_tokens=64)
    for i in range(8):
        bench.warm([i, *numbers(i, 39)], salt=f"salt {i}")
    bench.idle()
    assert bench.ends.count(IdleEnd.TOO_MUCH) == 6
    cached = sum(bench.cache.tree.unasked_tokens.values())
    assert cached <= OWNER_SHARE * bench.cache.capacity_tokens
    bench.answer([0, *numbers(0, 39), 1], 1, salt="salt 0")  # uses some of it
    bench.warm(numbers(50, 40))
    bench.warm(numbers(51, 40), owner=None)  # the operator has no share
    bench.idle()
    assert bench.ends[-2:] == [IdleEnd.CACHED, IdleEnd.CACHED]


def test_what_was_cached_meanwhile_is_not_computed_again() -> None:
    bench = Idle()
    prompt = numbers(8, 50)
    bench.warm(prompt)
    bench.answer([*prompt, 1], 1)
    bench.idle()
    assert bench.ends == [IdleEnd.CACHED]
    assert bench.prefills.idle_stats().computed_tokens == 0


def test_the_most_urgent_kind_is_first_and_old_work_expires() -> None:
    clock = Clock()
    bench = Idle(clock=clock)
    bench.warm(numbers(1, 20))
    bench.warm(numbers(2, 20), IdleKind.NEXT_TURN)
    bench.idle(2)
    assert bench.batches[0].segments[0].tokens.tolist() == numbers(2, 16 + 4)[:16]
    bench.warm(numbers(3, 20), IdleKind.NEXT_TURN)
    clock.now_s += MAX_AGE_S[IdleKind.NEXT_TURN] + 1
    bench.idle()
    ended = bench.prefills.idle_stats().ended
    assert ended["next_turn"]["expired"] >= 1
    assert ended["warm"] == {"cached": 1}


def test_a_forward_that_raises_fails_the_prefill_and_nothing_else() -> None:
    faulty = True

    def fault(batch: Batch) -> None:
        if faulty and len(batch.segments[0].tokens) == 16 and batch.segments[0].past == 16:
            raise RuntimeError("a fault")

    bench = Idle(fault=fault, chunk_tokens=16)
    prompt = numbers(9, 60)
    bench.warm(prompt)
    bench.idle()
    assert bench.ends == [IdleEnd.FAILED]
    faulty = False
    client = bench.answer([*prompt, 1], 4)
    bench.expect(client)
    assert client.cached_tokens == 16


def test_a_fault_of_our_own_at_the_begin_of_a_prefill_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for its prompt to be warm gets an answer."""
    bench = Idle()

    def broken(*_: object, **more: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.cache, "admit", broken)
    bench.warm(numbers(1, 40))
    bench.idle(1)
    assert bench.ends == [IdleEnd.FAILED]
    assert bench.prefills.waiting == 0
    monkeypatch.undo()
    bench.warm(numbers(1, 40))
    bench.idle()
    assert bench.ends == [IdleEnd.FAILED, IdleEnd.CACHED]


def test_idle_work_that_a_running_request_takes_over_counts_as_used() -> None:
    bench = Idle(chunk_tokens=16)
    prompt = np.array(numbers(1, 40), np.int32)
    namespace = bench.engine.namespace()
    of_request = bench.cache.admit(bench.cache.match(prompt, namespace))
    of_idle = bench.cache.admit(bench.cache.match(prompt, namespace), counted=False, is_idle=True)
    assert isinstance(of_request, Admitted)
    assert isinstance(of_idle, Admitted)
    bench.cache.commit(of_idle.lease, prompt[:24])
    assert bench.cache.unasked_tokens(namespace) == 24
    bench.cache.commit(of_request.lease, prompt)
    assert bench.cache.unasked_tokens(namespace) == 0
    for lease in (of_idle.lease, of_request.lease):
        bench.cache.release(lease, ReleaseReason.FINISHED)
        bench.cache.check()


def test_prompts_that_no_request_could_have_are_refused() -> None:
    bench = Idle(context_limit=50)
    with pytest.raises(PromptTooLong):
        bench.warm(numbers(1, 51))
    with pytest.raises(InvalidParameter):
        bench.warm([1, 2, 97])
    with pytest.raises(IdleWorkOff):
        Bench().engine.prefill_in_idle_time(IdlePrefill(IdleKind.WARM, np.array([1], np.int32), "", None))


def test_a_stop_ends_every_prefill_once() -> None:
    bench = Idle(chunk_tokens=16)
    bench.warm(numbers(1, 60))
    bench.warm(numbers(2, 60))
    bench.idle(2)
    bench.engine.stop()
    assert bench.ends == [IdleEnd.STOPPED, IdleEnd.STOPPED]
    with pytest.raises(EngineStopped):
        bench.warm([1])


def test_the_engines_thread_does_idle_work_by_itself() -> None:
    bench = Idle(chunk_tokens=16)
    with bench.engine:
        for i in range(5):
            bench.engine.prefill_in_idle_time(
                IdlePrefill(
                    IdleKind.WARM, np.array(numbers(i, 50), np.int32), "", None, ended=bench.ends.append
                )
            )
        client = bench.ask(numbers(60, 30), 8)
        assert client.ended.wait(60)
        bench.expect(client)
        assert bench.engine.wait_until_idle(60)
        for i in range(5):
            client = bench.ask([*numbers(i, 50), 1], 2)
            assert client.ended.wait(60)
            bench.expect(client)
    assert len(bench.ends) == 5


@of_kinds(KINDS)
def test_a_prefetch_loads_what_a_tier_holds_and_computes_nothing(tmp_path: Path, families: Families) -> None:
    with Tiered(tmp_path, families=families, block_size=8, chunk_tokens=16, idle_work=True) as bench:
        bench.answer(PROMPT, 2)
        bench.connector.flush()
        bench.restart()
        ends: list[IdleEnd] = []
        bench.engine.prefill_in_idle_time(
            IdlePrefill(IdleKind.PREFETCH, np.array(PROMPT, np.int32), "", None, ended=ends.append)
        )
        while not ends:
            while bench.engine.parts.idle_work.has_work:
                bench.engine.work_idly()
            if not ends:
                bench.engine.step(bench.engine._commands.get(timeout=60))
            bench.cache.check()
        idle = bench.engine.stats().idle
        assert idle is not None
        assert idle.computed_tokens == 0
        assert idle.loaded_tokens > 0
        client = bench.answer([*PROMPT, 1], 3)
        bench.expect(client)
        assert client.cached_tokens >= idle.loaded_tokens
        assert bench.engine.stats().cache.loaded_tokens == 0, "the request loaded nothing"


def test_a_request_cancels_a_prefetch_and_loads_its_prefix_itself(tmp_path: Path) -> None:
    with Tiered(tmp_path, block_size=8, chunk_tokens=16, idle_work=True) as bench:
        bench.answer(PROMPT, 2)
        bench.connector.flush()
        bench.restart()
        ends: list[IdleEnd] = []
        prefetch = IdlePrefill(IdleKind.PREFETCH, np.array(PROMPT, np.int32), "", None, ended=ends.append)
        bench.engine.prefill_in_idle_time(prefetch)
        bench.engine.step()
        bench.loads.close()
        bench.engine.work_idly()
        bench.loads.wait_until_reached()
        client = bench.ask([*PROMPT, 1], 3)
        bench.engine.step()
        assert not bench.engine.parts.idle_work.has_work
        bench.loads.open()
        bench.run()
        bench.expect(client)
        assert client.cached_tokens >= 56
        assert not ends, "the prefetch waits for idle time again"
        while bench.engine.parts.idle_work.has_work:
            bench.engine.work_idly()
        assert ends == [IdleEnd.CACHED]
