"""--memory-limit: pressure by the footprint, memory that goes back, and requests that wait for memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from engine.helpers import Bench, numbers, of_kinds
from rootstock.cache import KVCache
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.cache.plan import NOTHING, Plan
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.engine.idle.prefills import IdleKind, IdlePrefill
from rootstock.engine.idle.work import HELD_RETRY_S
from rootstock.engine.kv_budget import FREE_SHARES, auto_budget_bytes, auto_shared_bytes
from rootstock.engine.memory_watch import (
    SAMPLE_S,
    MemoryGuard,
    MemoryWatch,
    Pressure,
    auto_limit_bytes,
    memory_limit,
)
from rootstock.engine.scheduler import LEAST_SCARCE_TOKENS
from rootstock.errors import InvalidOption, MemoryLacks, ModelTooLarge
from rootstock.options import parse_memory_limit
from rootstock.runtime import host_memory, memory_fit
from rootstock.runtime.base import DeviceMemory
from rootstock.runtime.memory_fit import Demands, refuse_beyond_limit
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from rootstock.units import GIB

LIMIT = 1000


class Process:
    """A process whose footprint a test sets, and its clock."""

    def __init__(self, footprint: int | None = 0) -> None:
        self.footprint = footprint
        self.now = 0.0
        self.measured = 0
        self.returned = 0
        self.on_return: Callable[[], None] = lambda: None

    def measure(self) -> int | None:
        self.measured += 1
        return self.footprint

    def return_free(self) -> None:
        self.returned += 1
        self.on_return()

    def tick(self) -> float:
        """Returns the time, at which every measurement is due."""
        self.now += SAMPLE_S
        return self.now

    def watch(self, clock: Callable[[], float] | None = None) -> MemoryWatch:
        return MemoryWatch(LIMIT, self.measure, self.return_free, clock or self.tick)


# ------------------------------------------------------------------------------------------------- pressure


def test_a_pressure_ends_below_the_footprint_at_which_it_begins() -> None:
    process = Process()
    watch = process.watch()
    found = []
    for footprint in (0, 849, 850, 949, 950, 900, 899, 800, 799, 850, 2000, 0):
        process.footprint = footprint
        watch.measure()
        found.append(watch.pressure.value)
    assert found == [0, 0, 1, 1, 2, 2, 1, 1, 0, 1, 2, 0]


def test_bytes_to_give_back_are_counted_until_requests_are_admitted_again() -> None:
    process = Process(1000)
    watch = process.watch()
    assert (watch.excess_bytes, watch.spare_bytes) == (100, 0)
    process.footprint = 600
    watch.measure()
    assert (watch.excess_bytes, watch.spare_bytes) == (0, 250)


def test_a_measurement_that_fails_changes_nothing() -> None:
    process = Process(1000)
    watch = process.watch()
    process.footprint = None
    watch.measure()
    assert (watch.footprint_bytes, watch.pressure) == (1000, Pressure.OVER)


# --------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("total", "limit"), [(4, 2), (8, 5), (16, 13), (32, 28), (128, 112)])
def test_an_automatic_limit_leaves_memory_to_the_rest_of_the_machine(total: int, limit: int) -> None:
    assert auto_limit_bytes(total * GIB) == limit * GIB


def test_a_limit_is_automatic_on_unified_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total_host_bytes", lambda: 32 * GIB)
    assert memory_limit(None, "unified") == 28 * GIB
    assert memory_limit(None, "host") is memory_limit(None, "device") is None
    assert memory_limit(0, "unified") is None
    assert memory_limit(123, "host") == memory_limit(123, "unified") == 123


def test_a_system_that_tells_no_footprint_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "footprint_bytes", lambda: None)
    assert memory_limit(None, "unified") is None
    with pytest.raises(InvalidOption, match="--memory-limit"):
        memory_limit(GIB, "unified")


@pytest.mark.parametrize(("text", "limit"), [("auto", None), ("off", 0), ("2GiB", 2 * GIB)])
def test_the_option_is_auto_off_or_a_size(text: str, limit: int | None) -> None:
    assert parse_memory_limit(text) == limit


@pytest.mark.parametrize("text", ["0", "0GiB", "-1", "much", ""])
def test_other_values_of_the_option_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="--memory-limit"):
        parse_memory_limit(text)


def test_an_automatic_budget_fits_under_the_limit() -> None:
    runtime = FakeRuntime()
    assert (
        auto_budget_bytes(runtime, EngineConfig(), spare_bytes=1_000_000) == FREE_SHARES["host"] * 1_000_000
    )
    assert auto_budget_bytes(runtime, EngineConfig(), 400_000, 1_000_000) == FREE_SHARES["host"] * 600_000
    memory = DeviceMemory("unified", 10_000_000)
    assert auto_shared_bytes(memory, 0, 1_000_000) == int(FREE_SHARES["unified"] * 1_000_000)


def test_weights_and_budget_beyond_the_limit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_fit, "footprint_bytes", lambda: 1 * GIB)
    refuse_beyond_limit("m", 100 * GIB, "float32", Demands(pool_bytes=100 * GIB))
    refuse_beyond_limit("m", 4 * GIB, "float32", Demands(pool_bytes=3 * GIB, memory_limit=8 * GIB))
    with pytest.raises(MemoryLacks, match=r"at most 3\.0 GiB: 7\.0 GiB of the --memory-limit is free"):
        refuse_beyond_limit("m", 4 * GIB, "float32", Demands(pool_bytes=4 * GIB, memory_limit=8 * GIB))
    with pytest.raises(ModelTooLarge, match="--memory-limit"):
        refuse_beyond_limit("m", 8 * GIB, "float32", Demands(memory_limit=8 * GIB))


def test_an_engine_is_assembled_with_a_watch_where_there_is_a_limit() -> None:
    budget = CacheConfig(budget_bytes=100_000)
    made = assemble(
        FakeRuntime(ByteTokenizer.vocab_size),
        ByteTokenizer(),
        budget,
        EngineConfig(memory_limit_bytes=10 * GIB),
    )
    memory = made.engine.stats().memory
    assert memory is not None
    assert memory.limit_bytes == 10 * GIB
    assert 0 < memory.footprint_bytes < 10 * GIB
    unlimited = assemble(FakeRuntime(ByteTokenizer.vocab_size), ByteTokenizer(), budget)
    assert unlimited.engine.stats().memory is None


# ------------------------------------------------------------------------------------------- memory goes back


def _guard(process: Process, bench: Bench, clock: Callable[[], float]) -> tuple[MemoryGuard, list[Plan]]:
    plans: list[Plan] = []

    def apply(plan: Plan) -> None:
        bench.runtime.apply(plan)
        plans.append(plan)

    watch = process.watch(clock)
    return MemoryGuard(watch, bench.runtime, bench.cache, bench.engine.scheduler, apply), plans


def test_the_footprint_is_measured_no_more_often_than_it_may_be() -> None:
    process = Process()
    guard, _ = _guard(process, Bench(), lambda: process.now)
    for _ in range(100):
        guard.before_step()
    assert process.measured == 1
    process.now += SAMPLE_S
    guard.before_step()
    assert process.measured == 2


def test_without_pressure_nothing_is_given_back() -> None:
    process = Process(700)
    bench = Bench()
    guard, plans = _guard(process, bench, process.tick)
    for _ in range(10):
        guard.before_step()
    assert not plans
    assert not bench.runtime.releases
    assert not guard.holds_idle_work


def test_returns_become_rarer_while_they_do_not_end_the_pressure() -> None:
    process = Process(870)
    bench = Bench()
    guard, _ = _guard(process, bench, lambda: process.now)
    at = []
    for _ in range(3000):
        process.now += SAMPLE_S
        before = process.returned
        guard.before_step()
        if process.returned > before:
            at.append(process.now)
    gaps = np.diff(at)
    assert gaps[0] == pytest.approx(1.0, abs=0.2)
    assert (np.diff(gaps) > -0.2).all(), "no gap is shorter than the one before"
    assert max(gaps) == pytest.approx(60.0, abs=0.2)


def test_memory_goes_back_at_once_when_the_pressure_grows_or_comes_again() -> None:
    process = Process(870)
    guard, _ = _guard(process, Bench(), process.tick)
    guard.before_step()
    assert process.returned == 1
    process.footprint = 960
    guard.before_step()
    assert process.returned == 3, "what nothing needs, then checkpoints"
    for footprint, returned in ((100, 3), (870, 4)):
        process.footprint = footprint
        guard.before_step()
        assert process.returned == returned


def test_a_return_that_ends_the_pressure_lets_requests_in_at_once() -> None:
    process = Process(960)
    bench = Bench()
    guard, _ = _guard(process, bench, process.tick)

    def shrink() -> None:
        process.footprint = 500

    process.on_return = shrink
    guard.before_step()
    assert process.returned == 1
    assert not bench.engine.scheduler.admits_one_by_one
    assert guard.stats()["memory"].footprint_bytes == 500


HYBRID = (FULL, STATE)


def test_memory_of_free_rows_goes_back_and_cached_prefixes_stay() -> None:
    process = Process(870)
    bench = Bench(families=HYBRID)
    tokens = numbers(1, 20)
    bench.answer(tokens)
    bench.cache.clear()
    bench.answer(numbers(2, 8))
    backed, owned = bench.cache.pools.backed_bytes, bench.cache.pools.owned_bytes
    assert backed > owned
    guard, _ = _guard(process, bench, process.tick)
    guard.before_step()
    assert bench.cache.pools.backed_bytes == bench.cache.pools.owned_bytes == owned
    bench.cache.check()
    bench.expect(bench.answer(tokens), bench.answer(numbers(2, 8)))


def test_checkpoints_are_evicted_above_the_limit_as_far_as_it_needs() -> None:
    bench = Bench(families=HYBRID)
    for seed in range(6):
        bench.answer(numbers(seed, 12))
    before = bench.cache.stats().checkpoints
    assert before >= 6
    process = Process(LIMIT * 9 // 10 + 3 * STATE.bytes_per_state)
    guard, plans = _guard(process, bench, process.tick)
    process.footprint = LIMIT  # above the end of the pressure by 100 bytes
    guard.before_step()
    evicted = -(-100 // STATE.bytes_per_state)
    assert bench.cache.stats().checkpoints == max(0, before - evicted)
    states = [len(rows.rows) for plan in plans for rows in plan.returned if rows.family == 1]
    assert sum(states) >= min(before, evicted)
    assert bench.cache.stats().evicted_tokens == 0, "K and V stay"
    bench.cache.check()
    bench.expect(*(bench.answer(numbers(seed, 12)) for seed in range(6)))


def _divided(*, lazy_states: bool) -> KVCache:
    """Returns a cache of pools that take their memory at once, with two checkpoints and free slots that were used."""
    cache = KVCache(HYBRID, 10_000, 4, rows=(100, 50), lazy_states=lazy_states)
    namespace = FakeRuntime().description.namespace()
    leases = []
    for seed in range(2):
        tokens = np.array(numbers(seed, 8), np.int32)
        admitted = cache.admit(cache.match(tokens, namespace))
        assert isinstance(admitted, Admitted)
        cache.commit(admitted.lease, tokens[:-1])  # up to its checkpoint
        leases.append(admitted.lease)
    for lease in leases:
        cache.release(lease, ReleaseReason.FAILED)
    stats = cache.stats()
    assert (stats.checkpoints, cache.usage().families[1].free_rows) == (2, 48)
    return cache


def test_only_states_go_back_on_a_device_that_takes_all_other_memory_at_once() -> None:
    cache = _divided(lazy_states=True)
    (returned,) = cache.return_memory().returned
    assert (returned.family, len(returned.rows)) == (1, 2), "the slots in which the requests ran"
    assert cache.return_memory() == NOTHING, "each row goes back once"
    (returned,) = cache.return_memory(1).returned
    assert (returned.family, len(returned.rows)) == (1, 1)
    assert cache.stats().checkpoints == 1
    assert len(cache.return_memory(10_000).returned[0].rows) == 1
    assert cache.return_memory(10_000) == NOTHING, "nothing is left"
    cache.check()


def test_a_device_that_takes_all_memory_at_once_keeps_its_checkpoints() -> None:
    cache = _divided(lazy_states=False)
    assert cache.return_memory(10_000) == NOTHING
    assert cache.stats().checkpoints == 2


# ------------------------------------------------------------------------------------------- requests wait


@of_kinds([(FULL,), (FULL, STATE), (FULL, window(5), STATE)])
def test_close_to_the_limit_requests_run_one_after_the_other_and_all_end(
    families: tuple[object, ...],
) -> None:
    process = Process(2 * LIMIT)
    bench = Bench(families=families, memory_watch=process.watch(), max_batch=8)
    clients = [bench.ask(numbers(seed, 30), max_tokens=6) for seed in range(5)]
    bench.run()
    bench.expect(*clients)
    assert all(len(batch.segments) == 1 for batch in bench.batches)
    assert bench.ended == clients, "first come, first served"
    memory = bench.engine.stats().memory
    assert memory is not None
    assert memory.held_requests == 4, "each counts once"


def test_running_requests_go_on_and_others_are_admitted_when_memory_is_there_again() -> None:
    process = Process()
    bench = Bench(memory_watch=process.watch(), max_batch=8)
    first = [bench.ask(numbers(seed, 10), max_tokens=20) for seed in range(3)]
    bench.run(steps=3)
    assert bench.engine.scheduler.running == 3
    process.footprint = LIMIT
    later = [bench.ask(numbers(seed, 10), max_tokens=20) for seed in range(3, 6)]
    bench.run(steps=5)
    assert (bench.engine.scheduler.running, bench.engine.scheduler.waiting) == (3, 3)
    process.footprint = 0
    bench.run(steps=1)
    assert (bench.engine.scheduler.running, bench.engine.scheduler.waiting) == (6, 0)
    bench.run()
    bench.expect(*first, *later)


def test_prefills_take_small_chunks_close_to_the_limit() -> None:
    process = Process(LIMIT)
    bench = Bench(memory_watch=process.watch(), chunk_tokens=128, blocks=400)
    bench.expect(bench.answer(numbers(1, 200)))
    assert max(batch.new_tokens for batch in bench.batches) == LEAST_SCARCE_TOKENS
    process.footprint = 0
    bench.batches.clear()
    bench.expect(bench.answer(numbers(2, 200)))
    assert max(batch.new_tokens for batch in bench.batches) == 128


def test_near_the_limit_requests_run_together() -> None:
    process = Process(870)
    bench = Bench(memory_watch=process.watch(), max_batch=8)
    clients = [bench.ask(numbers(seed, 10)) for seed in range(4)]
    bench.run(steps=1)
    assert bench.engine.scheduler.running == 4
    bench.run()
    bench.expect(*clients)


def test_a_request_that_waits_for_memory_can_be_cancelled() -> None:
    process = Process(LIMIT)
    bench = Bench(memory_watch=process.watch())
    first, second = bench.ask(numbers(1, 10), max_tokens=30), bench.ask(numbers(2, 10))
    bench.run(steps=3)
    bench.engine.abort(second.request.id)
    bench.run()
    bench.expect(first)
    assert second.is_aborted


def test_a_preempted_request_comes_back_close_to_the_limit() -> None:
    process = Process()
    bench = Bench(blocks=16, memory_watch=process.watch(), max_batch=4, chunk_tokens=64)
    first = bench.ask(numbers(1, 20), max_tokens=30)
    bench.run(steps=6)
    second = bench.ask(numbers(2, 12), max_tokens=30)
    bench.run(steps=2)
    process.footprint = LIMIT
    bench.run()
    assert bench.cache.stats().preemptions > 0
    bench.expect(first, second)


def test_idle_work_waits_near_the_limit_and_goes_on_afterwards() -> None:
    process = Process(870)
    bench = Bench(memory_watch=process.watch(), idle_work=True)
    tokens = np.array(numbers(3, 20), np.int32)
    bench.engine.prefill_in_idle_time(IdlePrefill(IdleKind.WARM, tokens, "", None))
    bench.engine.step()
    assert not bench.engine.work_idly()
    assert bench.engine.next_overdue_s == HELD_RETRY_S, "it sleeps, and does not spin"
    process.footprint = 0
    while bench.engine.work_idly():
        pass
    assert bench.engine.cached_tokens(tokens) == len(tokens)


def test_the_log_tells_once_that_requests_wait_and_once_that_they_are_admitted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = Process(LIMIT)
    bench = Bench(memory_watch=process.watch())
    with caplog.at_level(logging.WARNING):
        bench.answer(numbers(1, 30), max_tokens=20)
        process.footprint = 100
        bench.answer(numbers(2, 10))
    told = [record.getMessage() for record in caplog.records if "--memory-limit" in record.getMessage()]
    assert len(told) == 2
    assert "requests wait while others run" in told[0]
    assert "admitted again" in told[1]
